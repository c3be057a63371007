"""Would catch: vLLM's interfaces having moved, with a sentence that says what, before a server fails in an odd way."""

import inspect

import pytest

try:
    from terrace_kv.vllm import engine
except ImportError as error:
    pytest.fail(str(error), pytrace=False)


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_version_is_one_that_was_tried() -> None:
    assert engine.VERSION.startswith(
        engine.VERSIONS
    ), f"vLLM is {engine.VERSION}; look through terrace_kv/vllm/engine.py and add it to VERSIONS"


@pytest.mark.parametrize(
    ("owner", "method", "wanted"),
    [
        ("OffloadingManager", "lookup", ["self", "key", "req_context"]),
        ("OffloadingManager", "prepare_load", ["self", "keys", "req_context"]),
        ("OffloadingManager", "prepare_store", ["self", "keys", "req_context"]),
        ("OffloadingManager", "on_new_request", ["self", "req_context"]),
        ("OffloadingManager", "on_request_finished", ["self", "req_context"]),
        ("OffloadingWorker", "submit_store", ["self", "job_id", "src_spec", "dst_spec"]),
        ("OffloadingWorker", "submit_load", ["self", "job_id", "src_spec", "dst_spec"]),
        ("OffloadingWorker", "get_finished", ["self"]),
        ("OffloadingWorker", "wait", ["self", "job_ids"]),
        ("OffloadingConnector", "__init__", ["self", "vllm_config", "role", "kv_cache_config"]),
        ("OffloadingConnector", "on_new_request", ["self", "request"]),
        ("OffloadingConnector", "build_connector_meta", ["self", "scheduler_output"]),
        ("OffloadingConnector", "update_connector_output", ["self", "connector_output"]),
        ("OffloadingConnector", "get_kv_connector_stats", ["self"]),
        ("OffloadingConnector", "handle_preemptions", ["self", "kv_connector_metadata"]),
        ("OffloadingConnector", "build_connector_worker_meta", ["self"]),
        ("OffloadingConnector", "get_handshake_metadata", ["self"]),
        ("OffloadingConnector", "set_xfer_handshake_metadata_pp_aware", ["self", "metadata"]),
        ("OffloadingWorkerMetadata", "__init__", ["self", "completed_jobs", "transfer_stats"]),
        ("ReqContext", "get_offload_key_position", ["self", "key"]),
    ],
)
def test_a_method_takes_what_we_give(owner: str, method: str, wanted: list[str]) -> None:
    found = parameters(getattr(getattr(engine, owner), method))
    assert found == wanted, f"vLLM's {owner}.{method} takes {found} now, and Terrace was written for {wanted}"


def test_the_dma_of_devices_takes_what_we_give() -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler as Handler

    found = parameters(Handler.__init__)
    wanted = ["self", "gpu_tensors", "cpu_tensors", "blocks_per_chunk", "layer_refs_per_group", "gpu_to_cpu"]
    wanted += ["canonical_layout", "host_memory_is_pinned"]
    assert found == wanted, f"vLLM's DMA handler takes {found} now, and Terrace was written for {wanted}"
    found = parameters(Handler.transfer_async)
    assert found == ["self", "job_id", "src_spec", "dst_spec"], f"vLLM's transfer_async takes {found} now"


def test_calls_to_workers_pass_where_we_watch_them() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    found = parameters(EngineCore.collective_rpc)
    assert found == [
        "self",
        "method",
        "timeout",
        "args",
        "kwargs",
    ], f"vLLM's EngineCore.collective_rpc takes {found} now"
    gone = [name for name in engine.HARMLESS if not hasattr(Worker, name)]
    assert not gone, f"vLLM's workers have no {gone} any more: take them out of HARMLESS"


def test_nothing_is_abstract_that_we_leave_out() -> None:
    from terrace_kv.vllm.connector import TerraceConnector, TerraceSpec, Worker
    from terrace_kv.vllm.manager import Manager

    for ours in (Manager, Worker, TerraceSpec, TerraceConnector):
        missing = getattr(ours, "__abstractmethods__", frozenset())
        assert not missing, f"vLLM asks {ours.__name__} for {sorted(missing)} now"
