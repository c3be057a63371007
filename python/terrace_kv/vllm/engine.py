"""What is taken from vLLM: the only module that imports its internals, and the one that names the versions it fits.

vLLM calls these interfaces experimental. `tests/vllm/test_contract.py` says with a sentence what moved.
"""

import functools
import weakref
from typing import Any, Protocol

import vllm

VERSIONS = ("0.32",)  # Tried.
VERSION = vllm.__version__

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorRole,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.distributed.utils import get_pp_indices
    from vllm.envs import environment_variables
    from vllm.logger import init_logger
    from vllm.model_executor.model_loader.weight_utils import maybe_download_from_modelscope
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        LookupResult,
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        OffloadingManager,
        OffloadingSpec,
        OffloadingWorker,
        OffloadKey,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TransferResult,
        get_offload_group_idx,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise ImportError(
        f"Terrace was written for vLLM {', '.join(VERSIONS)}, and this is {VERSION}, whose interface moved: {error}"
    ) from error

__all__ = [
    "VERSION",
    "VERSIONS",
    "CacheHitSource",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "KVConnectorHandshakeMetadata",
    "KVConnectorRole",
    "LoadStoreSpec",
    "LookupResult",
    "OffloadKey",
    "OffloadingConnector",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingGaugeMetadata",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "OffloadingWorkerMetadata",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "TransferResult",
    "current_platform",
    "environment_variables",
    "get_offload_group_idx",
    "get_pp_indices",
    "init_logger",
    "maybe_download_from_modelscope",
    "watch_calls",
]

# Methods of vLLM's workers that leave weights as they are. Any other that a user calls may replace them: `apply_model`,
# those of an extension, a function that is sent there.
HARMLESS = frozenset(
    (
        *("check_health", "synchronize_device", "get_kv_cache_spec", "get_supported_kv_cache_layouts"),
        *("get_cache_block_size_bytes", "get_model_inspection", "get_supported_tasks", "get_compilation_match_table"),
        *("get_encoder_timing_stats", "compute_weight_checksums", "supports_draft_weight_updates", "profile"),
        *("add_lora", "remove_lora", "list_loras", "pin_lora", "reset_mm_cache", "reset_encoder_cache"),
        *("release_late_interaction_query_cache", "save_sharded_state", "save_tensorized_model"),
        *("update_max_model_len", "execute_dummy_batch"),
    )
)


class Watcher(Protocol):
    def called(self, method: str) -> None: ...


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_calls(watcher: Watcher) -> None:
    """`watcher` is told of each call that users make to the workers of an engine in this process, but for harmless
    ones, before it is made."""
    from vllm.v1.engine.core import EngineCore

    _watchers.add(watcher)
    if hasattr(EngineCore.collective_rpc, "told_to_terrace"):  # Other plugins may have wrapped it, too.
        return
    call = EngineCore.collective_rpc

    @functools.wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__qualname__", "a function")
        if name not in HARMLESS:
            for told in list(_watchers):
                told.called(name)
        return call(self, method, *args, **kwargs)

    collective_rpc.told_to_terrace = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc = collective_rpc
