"""Terrace: a tiered KV cache for LLM inference. The client library, call by call.

Calls return at once with a handle, which is polled or waited for. Trouble is a miss with a reason, never an exception.
`terrace_kv.vllm` is the connector for vLLM; it is found by itself once this package is installed.
"""

from ._native import (
    Chain,
    Client,
    ClientStats,
    Lease,
    LoadCall,
    LoadedChunk,
    LookupCall,
    Pages,
    PrefixHit,
    SaveCall,
    SavedChunk,
    StatsCall,
    TierStats,
    __version__,
    space_id,
)

__all__ = [
    "Chain",
    "Client",
    "ClientStats",
    "Lease",
    "LoadCall",
    "LoadedChunk",
    "LookupCall",
    "Pages",
    "PrefixHit",
    "SaveCall",
    "SavedChunk",
    "StatsCall",
    "TierStats",
    "__version__",
    "space_id",
]
