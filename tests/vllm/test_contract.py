"""Would catch: vLLM's interfaces having moved, with a sentence that says what, before a server fails in an odd way."""

import inspect

import pytest
from terrace_kv.vllm import engine


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
        ("ReqContext", "get_offload_key_position", ["self", "key"]),
    ],
)
def test_a_method_takes_what_we_give(owner: str, method: str, wanted: list[str]) -> None:
    found = parameters(getattr(getattr(engine, owner), method))
    assert found == wanted, f"vLLM's {owner}.{method} takes {found} now, and Terrace was written for {wanted}"


def test_nothing_is_abstract_that_we_leave_out() -> None:
    from terrace_kv.vllm.connector import TerraceConnector, TerraceSpec, Worker
    from terrace_kv.vllm.manager import Manager

    for ours in (Manager, Worker, TerraceSpec, TerraceConnector):
        missing = getattr(ours, "__abstractmethods__", frozenset())
        assert not missing, f"vLLM asks {ours.__name__} for {sorted(missing)} now"
