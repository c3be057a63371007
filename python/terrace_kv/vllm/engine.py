"""What is taken from vLLM: the only module that imports its internals, and the one that names the versions it fits.

vLLM calls these interfaces experimental. `tests/vllm/test_contract.py` says with a sentence what moved.
"""

import vllm

VERSIONS = ("0.32",)  # Tried.
VERSION = vllm.__version__

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.distributed.utils import get_pp_indices
    from vllm.logger import init_logger
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
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "TransferResult",
    "current_platform",
    "get_offload_group_idx",
    "get_pp_indices",
    "init_logger",
]
