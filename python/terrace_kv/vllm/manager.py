"""The scheduler's side: which chunks a request finds, and which it leaves. No I/O, no waiting.

vLLM asks chunk by chunk, under names of its own (hashes that depend on its options and its seed). They are taken as
what they are, handles: a name stands for a number of tokens of a request, and our key is the one of the chunk that
ends there.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from terrace_kv import Chain, Client, Lease, LoadCall, StatsCall

from .engine import (
    CacheHitSource,
    LoadStoreSpec,
    LookupResult,
    OffloadingConnectorStats,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from .space import Spaces

CHUNKS = "vllm:terrace_chunks"  # Counter, by outcome and reason.
FRAMES = "vllm:terrace_frames"  # Gauges, by tier ...
BYTES = "vllm:terrace_bytes"
PENDING = "vllm:terrace_pending_saves"  # ... and for all below RAM.
GAUGES_EVERY_S = 0.5

# How long a request may wait for its chunks if nothing else is said: half of what computing them would take, and at
# least this much. Before anything was computed its speed isn't known, and a server that was started anew is what a
# shared tier is there for.
PATIENCE_MIN_S = 0.2
PATIENCE_UNKNOWN_S = 2.0
PREFILL_STEP_MIN = 64  # Tokens. Smaller steps are mostly decoding, and tell nothing about prefill.
PREFETCHES_MAX = 4  # Requests in the queue whose chunks are on their way into RAM.

SOURCES = {"ram": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


@dataclass
class LoadSpec(LoadStoreSpec):
    """Chunks in vLLM's order, one after the other in their chain; lent already, if the worker is in this process."""

    chain: Chain
    first: int
    last: int
    leases: list[Lease]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "leases": []}


@dataclass
class SaveSpec(LoadStoreSpec):
    """Chunks to be written, in vLLM's order: the chain, the index in it, the group."""

    chunks: list[tuple[Chain, int, int]]


class Pace:
    """Tokens of prefill a second, of late."""

    def __init__(self) -> None:
        self._begun: deque[tuple[float, int]] = deque(maxlen=8)
        self._ended = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def step_begins(self, tokens: int, now: float) -> None:
        self._begun.append((now, tokens))

    def step_ends(self, now: float) -> None:
        if not self._begun:
            return
        begun, tokens = self._begun.popleft()
        seconds = now - max(begun, self._ended)  # Steps overlap when vLLM schedules ahead.
        self._ended = now
        if tokens >= PREFILL_STEP_MIN and seconds > 0:
            self._tokens = 0.7 * self._tokens + tokens
            self._seconds = 0.7 * self._seconds + seconds

    def patience(self, tokens: int) -> float:
        if not self._seconds:
            return PATIENCE_UNKNOWN_S
        return max(PATIENCE_MIN_S, 0.5 * tokens * self._seconds / self._tokens)


@dataclass(slots=True)
class Request:
    request: Any  # vLLM's.
    adapter: Future[bytes] | None = None  # Its digest.
    chain: Chain | None = None
    first: int = 0  # Of the call.
    call: LoadCall | None = None
    deadline: float = 0.0
    missed: bool = False  # It waited in vain, or a load failed: it is not asked again.
    counted: bool = False
    tiers: dict[int, int] = field(default_factory=dict)  # Chunk to tier, of what was loaded.
    lent: list[Lease] = field(default_factory=list)  # Of the load under way.


class Manager(OffloadingManager):
    """`spaces` is None if nothing is cached: everything is a miss then, and nothing is kept."""

    def __init__(
        self,
        client: Client | None,
        spaces: Spaces | None,
        payload_bytes: Callable[[], int],
        load_deadline_s: float | None,
        shutdown: Callable[[], None],
    ) -> None:
        self._client = client
        self._spaces = spaces
        self._payload_bytes = payload_bytes
        self._load_deadline_s = load_deadline_s
        self._shutdown = shutdown
        self._requests: dict[str, Request] = {}
        self._prefetches: dict[str, LoadCall] = {}
        self._stats = OffloadingConnectorStats()
        self._gauges_at = 0.0
        self._asked: StatsCall | None = None
        self.pace = Pace()

    # Before on_new_request, which has no tokens.
    def track(self, request: Any) -> None:
        self._requests[request.request_id] = tracked = Request(request)
        if self._cacheable(request) and request.lora_request is not None:
            assert self._spaces is not None
            tracked.adapter = self._spaces.adapter(request.lora_request)
        if not self._cacheable(request) or request.skip_reading_prefix_cache:
            return
        self._prefetches = {r: call for r, call in self._prefetches.items() if not call.done}
        chain = self._chain(tracked)
        if chain and len(chain) and len(self._prefetches) < PREFETCHES_MAX:
            assert self._client is not None
            self._prefetches[request.request_id] = self._client.prefetch(
                chain, 0, len(chain), self._payload_bytes(), self._patience(chain, 0)
            )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        tracked = self._requests.get(req_context.req_id)
        if tracked is None or tracked.missed:
            return LookupResult.MISS
        if tracked.chain is None and self._waits_for_adapter(tracked):
            return LookupResult.RETRY
        chain, index = self._place(tracked, key, req_context)
        if chain is None:
            return LookupResult.MISS
        if tracked.call is None or not tracked.first <= index < tracked.first + len(tracked.call):
            self._ask(tracked, chain, index)
        assert tracked.call is not None
        item = tracked.call.poll(index - tracked.first)
        if item is None:
            if time.monotonic() < tracked.deadline:
                return LookupResult.RETRY
            tracked.call.cancel()
            tracked.missed = True
            self._count(tracked, "miss", "timeout")
            return LookupResult.MISS
        if item.hit:
            return LookupResult.HIT
        tracked.missed = item.outcome == "failed" or item.reason == "timeout"
        self._count(tracked, item.outcome, item.reason)
        return LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        tracked = self._requests.get(req_context.req_id)
        end = req_context.get_offload_key_position(key)
        if tracked is None or tracked.chain is None or self._client is None or self._spaces is None or end is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        names = self._client.tier_names
        tier = tracked.tiers.get(end // self._spaces.chunk_tokens - 1)
        name = names[tier] if tier is not None and tier < len(names) else ""
        return SOURCES.get(name, CacheHitSource.EXTERNAL_UNSPECIFIED)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadSpec:
        tracked = self._requests[req_context.req_id]
        assert tracked.call is not None and tracked.chain is not None
        indices = [self._place(tracked, key, req_context)[1] for key in keys]
        assert indices == list(range(indices[0], indices[0] + len(indices))), "chunks with holes between them"
        leases = []
        for index in indices:
            item = tracked.call.poll(index - tracked.first)
            assert item is not None and item.lease is not None, "vLLM loads what no look-up had"
            leases.append(item.lease)
            tracked.tiers[index] = item.tier
        self._stats.increase_counter(CHUNKS, len(leases), ("hit", "none"))
        tracked.call = None  # Asked anew if vLLM should forget the blocks.
        tracked.lent = leases  # Until the copy has ended: a worker in another process borrows them anew by key.
        return LoadSpec(tracked.chain, indices[0], indices[-1] + 1, leases)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if tracked := self._requests.get(req_context.req_id):
            tracked.lent = []

    def give_up(self, req_id: str) -> None:
        """A load failed at the worker's end: the request is computed, and does not ask again."""
        if tracked := self._requests.get(req_id):
            tracked.missed = True

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        tracked = self._requests.get(req_context.req_id)
        chunks = []
        taken = []
        for key in keys:
            chain, index = self._place(tracked, key, req_context) if tracked else (None, 0)
            if chain is not None:
                chunks.append((chain, index, 0))
                taken.append(key)
        return PrepareStoreOutput(keys_to_store=taken, store_spec=SaveSpec(chunks), evicted_keys=[])

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for req_id in context.preempted_req_ids:
            if tracked := self._requests.get(req_id):
                tracked.call = None  # What it saved meanwhile may be found.

    def on_request_finished(self, req_context: ReqContext) -> None:
        tracked = self._requests.pop(req_context.req_id, None)
        if tracked and tracked.call:
            tracked.call.cancel()
        if prefetch := self._prefetches.pop(req_context.req_id, None):
            prefetch.cancel()

    def reset_cache(self) -> None:
        for tracked in self._requests.values():
            tracked.call = None

    def get_stats(self) -> OffloadingConnectorStats | None:
        self._set_gauges(time.monotonic())
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def shutdown(self) -> None:
        self._requests.clear()
        self._prefetches.clear()
        self._shutdown()

    # What is not the same for the same tokens alone is not cached: media and embeddings are not named yet.
    def _cacheable(self, request: Any) -> bool:
        return (
            self._spaces is not None
            and not request.mm_features
            and request.prompt_embeds is None
            and request.pooling_params is None
            and not getattr(request.lora_request, "load_inplace", False)  # Read anew with each request.
        )

    def _waits_for_adapter(self, tracked: Request) -> bool:
        """The digest of an adapter takes a moment; without it nothing is found, and nothing kept."""
        if tracked.adapter is None or tracked.adapter.done():
            return False
        if not tracked.deadline:
            limit = self._load_deadline_s
            tracked.deadline = time.monotonic() + (PATIENCE_UNKNOWN_S if limit is None else limit)
        return time.monotonic() < tracked.deadline

    def _chain(self, tracked: Request) -> Chain | None:
        """The request's keys so far; None as long as its space is not known."""
        request = tracked.request
        if tracked.chain is None and self._cacheable(request):
            assert self._spaces is not None
            space = self._spaces.id(request.cache_salt or "", tracked.adapter)
            if space is not None:
                tracked.chain = Chain(space, self._spaces.chunk_tokens)
        if tracked.chain is not None and tracked.chain.tokens < request.num_tokens:
            tracked.chain.extend(array("i", request.all_token_ids[tracked.chain.tokens :]))
        return tracked.chain

    def _place(self, tracked: Request, key: OffloadKey, req_context: ReqContext) -> tuple[Chain | None, int]:
        """The chunk that vLLM's name stands for."""
        end = req_context.get_offload_key_position(key)
        chain = tracked.chain
        if chain is None or end is None or chain.tokens < end:
            chain = self._chain(tracked)
        if chain is None:
            self._count(tracked, "miss", "weights_pending" if self._cacheable(tracked.request) else "not_cacheable")
            return None, 0
        assert self._spaces is not None
        if end is None or end % self._spaces.chunk_tokens or end // self._spaces.chunk_tokens > len(chain):
            return None, 0
        return chain, end // self._spaces.chunk_tokens - 1

    def _ask(self, tracked: Request, chain: Chain, index: int) -> None:
        assert self._client is not None
        patience = self._patience(chain, index)
        tracked.first = index
        tracked.deadline = time.monotonic() + patience
        tracked.call = self._client.lease(chain, index, len(chain), self._payload_bytes(), patience)

    def _patience(self, chain: Chain, index: int) -> float:
        if self._load_deadline_s is not None:
            return self._load_deadline_s
        assert self._spaces is not None
        return self.pace.patience((len(chain) - index) * self._spaces.chunk_tokens)

    def _set_gauges(self, now: float) -> None:
        if self._client is not None and self._asked is None and now >= self._gauges_at:
            self._asked = self._client.stats()
            self._gauges_at = now + GAUGES_EVERY_S
        if self._asked is None or not self._asked.done:
            return
        found, self._asked = self._asked.poll(), None
        if found is None or not found.connected:
            return
        for tier, stats in found.tiers:
            self._stats.set_gauge(FRAMES, stats.frames, (tier,))
            self._stats.set_gauge(BYTES, stats.bytes, (tier,))
        self._stats.set_gauge(PENDING, found.pending_saves)

    def _count(self, tracked: Request, outcome: str, reason: str) -> None:
        """Once a request: vLLM asks again and again."""
        if not tracked.counted:
            tracked.counted = True
            self._stats.increase_counter(CHUNKS, 1, (outcome, reason))
