"""The scheduler's side: which chunks a request finds, and which it leaves. No I/O, no waiting.

vLLM asks chunk by chunk, under names of its own (hashes that depend on its options and its seed). They are taken as
what they are, handles: a name stands for a number of tokens of a request, and our key is the one of the chunk that
ends there.
"""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from terrace_kv import Chain, Client, Lease, LoadCall, LoadedChunk, StatsCall

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
    get_offload_group_idx,
    init_logger,
)
from .space import Spaces

logger = init_logger("vllm.terrace")

CHUNKS = "vllm:terrace_chunks"  # Counter, by outcome and reason.
FRAMES = "vllm:terrace_frames"  # Gauges, by tier ...
BYTES = "vllm:terrace_bytes"
PENDING = "vllm:terrace_pending_saves"  # ... and for all below RAM.
TIER_UP = "vllm:terrace_tier_up"  # Gauge, by tier.
UP = "vllm:terrace_up"  # Gauge: the store is there.
SAVES = "vllm:terrace_saves"  # Counter, by outcome. Of the workers.
GAUGES_EVERY_S = 0.5
LOST = "cache lost"

# How long a request may wait for its chunks if nothing else is said: half of what computing them would take, and at
# least this much. Before anything was computed its speed isn't known, and a server that was started anew is what a
# shared tier is there for.
PATIENCE_MIN_S = 0.02
PATIENCE_UNKNOWN_S = 2.0
# Loads that lost to computing are not made again for a while, which doubles as long as they lose. Chunks that lie in
# RAM are had within PATIENCE_MIN_S all the same.
PAUSE_MIN_S, PAUSE_MAX_S = 1.0, 32.0
PREFILL_STEP_MIN = 64  # Tokens. Smaller steps are mostly decoding, and tell nothing about prefill.
PREFETCHES_MAX = 4  # Requests in the queue whose chunks are on their way into RAM.

SOURCES = {"ram": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


@dataclass
class Row:
    """Chunks of a group, one after the other in its chain."""

    group: int
    chain: Chain  # Of the first rank.
    spaces: list[bytes]  # Of all ranks.
    first: int
    last: int


@dataclass
class LoadSpec(LoadStoreSpec):
    """Chunks to be loaded, in vLLM's order. Lent already, if the worker is in this process."""

    rows: list[Row]
    leases: list[Lease]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "leases": []}


@dataclass
class SaveSpec(LoadStoreSpec):
    """Chunks to be written, in vLLM's order: the chain of the first rank, the index in it, the group."""

    chunks: list[tuple[Chain, int, int]]
    spaces: list[list[bytes]]  # Of all ranks, a group each.
    epoch: int  # How often the cache was reset by then. Of an earlier one the pages are gone.


def media_of(request: Any) -> list[tuple[int, int, bytes]] | None:
    """Where images and the like stand in the prompt, and vLLM's digests of them. None if they are in no order."""
    media = []
    end = 0
    for feature in request.mm_features or ():
        position, length = feature.mm_position.offset, feature.mm_position.length
        if position < end:
            return None
        end = position + length
        media.append((position, length, (feature.mm_hash or feature.identifier).encode()))
    return media


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

    def seconds(self, tokens: int) -> float:
        """That computing them takes. Without end as long as nothing was computed."""
        return tokens * self._seconds / self._tokens if self._seconds else math.inf

    def patience(self, tokens: int) -> float:
        return max(PATIENCE_MIN_S, 0.5 * self.seconds(tokens)) if self._seconds else PATIENCE_UNKNOWN_S


class Pauses:
    """For how many tokens it is worth to wait for chunks that are not in RAM, as of late.

    A load takes a moment however small it is, and then so much a token; computing takes so much a token. So what loses
    for some tokens loses for fewer, too, and may win for more. One number keeps that: what is above is tried, and of
    what is below one request after each pause."""

    def __init__(self) -> None:
        self._tokens = 0  # Lost, of late.
        self._pause = 0.0
        self._begun = self._until = 0.0  # The pause.

    def over(self, tokens: int, now: float) -> bool:
        return tokens > self._tokens or now >= self._until

    def tries(self, tokens: int, now: float) -> bool:
        """Whether a request for so many tokens may wait, from now on."""
        if not self.over(tokens, now):
            return False
        if tokens <= self._tokens:
            self._until = now + self._pause  # For the others, until it is known what becomes of this one.
        return True

    def undecided(self, begun: float) -> None:
        """Of one that has tried since then nothing was learned: the next one may."""
        if self._until == begun + self._pause:
            self._until = begun

    def lost(self, tokens: int, begun: float, now: float) -> None:
        if tokens > self._tokens:
            self._tokens, self._pause = tokens, PAUSE_MIN_S
        elif begun >= self._begun:  # Not one of those that were under way at the last loss.
            self._pause = min(2 * self._pause, PAUSE_MAX_S)
        else:
            return
        self._begun, self._until = now, now + self._pause

    def won(self, tokens: int) -> None:
        if tokens <= self._tokens:
            self._tokens, self._until = tokens - 1, 0.0


@dataclass(slots=True)
class Asked:
    """Chunks of a shard that a request has asked for."""

    first: int
    call: LoadCall


@dataclass(slots=True)
class Request:
    request: Any  # vLLM's.
    adapter: Future[bytes] | None = None  # Its digest.
    spaces: list[bytes] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)  # One a shard.
    asked: dict[int, list[Asked]] = field(default_factory=dict)  # By shard.
    tokens: int = 0  # For which it waits.
    begun: float = 0.0  # To wait, ...
    waited: float = 0.0  # ... and when it was last told to ask again.
    deadline: float = 0.0
    waits: bool = True  # For chunks that are not in RAM.
    missed: bool = False  # It waited in vain, or a load failed: no more is asked for.
    failed: bool = False  # At the worker's end.
    counted: bool = False
    tiers: dict[tuple[int, int], int] = field(default_factory=dict)  # By group and chunk, of what was loaded.
    lent: list[Lease] = field(default_factory=list)  # Of the load under way.


class Manager(OffloadingManager):
    """`spaces` is None if nothing is cached: everything is a miss then, and nothing is kept."""

    def __init__(
        self,
        client: Client | None,
        spaces: Spaces | None,
        load_deadline_s: float | None,
        shutdown: Callable[[], None],
    ) -> None:
        self._client = client
        self._spaces = spaces
        self._load_deadline_s = load_deadline_s
        self._shutdown = shutdown
        self.epoch = 0
        self._requests: dict[str, Request] = {}
        self._prefetches: dict[str, list[LoadCall]] = {}
        self._stats = OffloadingConnectorStats()
        self._gauges_at = 0.0
        self._gauges: StatsCall | None = None
        self._tiers: list[str] = []  # That gauges were told of.
        self._troubled: dict[str, str] = {}  # Tiers that do not work, as the log has it, or LOST; and why.
        self.pace = Pace()
        self.pauses = Pauses()
        self._shards = spaces.shards if spaces else []
        self._of_group: dict[int, list[int]] = {}  # Indices of shards, the first rank's first.
        for index, shard in enumerate(self._shards):
            self._of_group.setdefault(shard.group, []).append(index)

    # Before on_new_request, which has no tokens.
    def track(self, request: Any) -> None:
        self._requests[request.request_id] = tracked = Request(request)
        if not self._cacheable(request):
            return
        if request.lora_request is not None:
            assert self._spaces is not None
            tracked.adapter = self._spaces.adapter(request.lora_request)
        if not request.skip_reading_prefix_cache:
            self._prefetch(tracked)

    def _prefetch(self, tracked: Request) -> None:
        """While it waits in vLLM's queue its chunks come into RAM."""
        assert self._client is not None
        self._prefetches = {
            req_id: calls for req_id, calls in self._prefetches.items() if not all(call.done for call in calls)
        }
        if len(self._prefetches) >= PREFETCHES_MAX:
            return
        self._extend(tracked)
        now = time.monotonic()
        calls = [
            self._client.prefetch(chain, 0, len(chain), shard.payload_bytes, self._patience(chain.tokens))
            for chain, shard in zip(tracked.chains, self._shards, strict=False)
            if len(chain) and not shard.gaps and self.pauses.over(len(chain) * shard.chunk_tokens, now)
        ]
        if calls:
            self._prefetches[tracked.request.request_id] = calls

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        tracked = self._requests.get(req_context.req_id)
        if tracked is None or (tracked.missed and not tracked.asked):
            return LookupResult.MISS
        if not tracked.chains and self._waits_for_adapter(tracked):
            return LookupResult.RETRY
        place = self._place(tracked, key, req_context)
        if place is None:
            return LookupResult.MISS
        group, index = place
        items = [self._item(tracked, shard, index) for shard in self._of_group[group]]
        if all(item is not None and item.hit for item in items):
            return LookupResult.HIT  # Also after a miss further on: maybe vLLM had no room then.
        if tracked.missed:
            return LookupResult.MISS
        for item in items:
            if item is not None and not item.hit:
                tracked.missed = item.outcome == "failed" or item.reason == "timeout"
                if item.reason == "timeout":
                    self._gave_up(tracked)
                else:
                    self._count(tracked, item.outcome, item.reason)
                    self._judge(tracked, 0)
                return LookupResult.MISS
        now = time.monotonic()
        if now < tracked.deadline:
            tracked.waited = now
            return LookupResult.RETRY
        self._cancel(tracked)
        tracked.missed = True
        self._gave_up(tracked)
        return LookupResult.MISS

    def _item(self, tracked: Request, shard: int, index: int) -> LoadedChunk | None:
        """Of the call that has it; it is asked for now if there is none."""
        asked = self._asked(tracked, shard, index)
        if asked is None:
            if tracked.missed:
                return None
            assert self._client is not None
            now, chain = time.monotonic(), tracked.chains[shard]
            # A prefix is asked for to its end, at once; of a sliding window vLLM asks backwards, until it has enough.
            last = index + 1 if self._shards[shard].gaps else len(chain)
            if not tracked.asked:
                tracked.tokens = (len(chain) - index) * self._shards[shard].chunk_tokens
                tracked.begun = tracked.waited = now
                tracked.waits = self.pauses.tries(tracked.tokens, now)
                tracked.deadline = now + self._patience(tracked.tokens)
                if not tracked.waits:
                    tracked.deadline = min(tracked.deadline, now + PATIENCE_MIN_S)
            timeout = max(tracked.deadline - now, 0.0)
            call = self._client.lease(chain, index, last, self._shards[shard].payload_bytes, timeout)
            asked = Asked(index, call)
            tracked.asked.setdefault(shard, []).append(asked)
        return asked.call.poll(index - asked.first)

    @staticmethod
    def _asked(tracked: Request, shard: int, index: int) -> Asked | None:
        for asked in tracked.asked.get(shard, ()):
            if asked.first <= index < asked.first + len(asked.call):
                return asked
        return None

    def _gave_up(self, tracked: Request) -> None:
        if tracked.waits:
            self.pauses.lost(tracked.tokens, tracked.begun, time.monotonic())
        self._count(tracked, "miss", "timeout" if tracked.waits else "slower")

    def _judge(self, tracked: Request, tokens: int) -> None:
        """So many came from below RAM. Were they worth the wait? Where the user says how long to wait, they are."""
        if not tracked.waits or tracked.missed:
            return
        if not tokens:
            self.pauses.undecided(tracked.begun)
        elif self._load_deadline_s is None and tracked.waited - tracked.begun > self.pace.seconds(tokens):
            self.pauses.lost(tokens, tracked.begun, time.monotonic())
        else:
            self.pauses.won(tokens)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        tracked = self._requests.get(req_context.req_id)
        place = self._place(tracked, key, req_context) if tracked else None
        if tracked is None or place is None or self._client is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        names = self._client.tier_names
        tier = tracked.tiers.get(place)
        name = names[tier] if tier is not None and tier < len(names) else ""
        return SOURCES.get(name, CacheHitSource.EXTERNAL_UNSPECIFIED)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadSpec:
        tracked = self._requests[req_context.req_id]
        rows: list[Row] = []
        leases = []
        below: dict[int, int] = {}  # Tokens by group that were not in RAM.
        for key in keys:
            place = self._place(tracked, key, req_context)
            assert place is not None, "vLLM loads what no look-up had"
            group, index = place
            shards = self._of_group[group]
            if rows and (rows[-1].group, rows[-1].last) == place:
                rows[-1].last += 1
            else:
                spaces = [tracked.spaces[shard] for shard in shards]
                rows.append(Row(group, tracked.chains[shards[0]], spaces, index, index + 1))
            tracked.tiers[place] = 0
            for shard in shards:
                asked = self._asked(tracked, shard, index)
                item = asked.call.poll(index - asked.first) if asked else None
                assert item is not None and item.lease is not None, "vLLM loads what no look-up had"
                leases.append(item.lease)
                tracked.tiers[place] = max(item.tier, tracked.tiers[place])
            if tracked.tiers[place]:
                below[group] = below.get(group, 0) + self._shards[shards[0]].chunk_tokens
        self._judge(tracked, max(below.values(), default=0))
        tracked.asked = {}  # Asked anew if vLLM should forget the blocks.
        tracked.lent = leases  # Until the copy has ended: a worker in another process borrows them anew by key.
        return LoadSpec(rows, leases)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if tracked := self._requests.get(req_context.req_id):
            tracked.lent = []
            if not tracked.failed:
                self._stats.increase_counter(CHUNKS, len(keys), ("hit", "none"))

    def give_up(self, req_id: str) -> None:
        """A load failed at the worker's end: the request is computed, and does not ask again."""
        if (tracked := self._requests.get(req_id)) and not tracked.failed:
            tracked.missed = tracked.failed = True
            self._stats.increase_counter(CHUNKS, 1, ("failed", "unavailable"))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        tracked = self._requests.get(req_context.req_id)
        chunks = []
        taken = []
        for key in keys:
            place = self._place(tracked, key, req_context) if tracked else None
            if tracked is not None and place is not None:
                group, index = place
                chunks.append((tracked.chains[self._of_group[group][0]], index, group))
                taken.append(key)
        spaces = tracked.spaces if tracked else []
        of_ranks = [[spaces[shard] for shard in shards] for shards in self._of_group.values()] if spaces else []
        spec = SaveSpec(chunks, of_ranks, self.epoch)
        return PrepareStoreOutput(keys_to_store=taken, store_spec=spec, evicted_keys=[])

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for req_id in context.preempted_req_ids:
            if tracked := self._requests.get(req_id):
                tracked.asked = {}  # What it saved meanwhile may be found.

    def on_request_finished(self, req_context: ReqContext) -> None:
        tracked = self._requests.pop(req_context.req_id, None)
        if tracked:
            self._cancel(tracked)
            self._judge(tracked, 0)
        for call in self._prefetches.pop(req_context.req_id, ()):
            call.cancel()

    def reset_cache(self) -> None:
        """What was computed so far is not to be used: the weights may be others from here on, and the pages gone.
        Chunks can't be taken back from others who share them, so what is computed from here on has other names."""
        self._forget()
        if self._spaces is not None:
            self._spaces.renew()

    def weights_changed(self, why: str) -> None:
        """Or so it seems, and vLLM's own cache was not reset: nothing is found and kept until it is."""
        self._forget()
        if self._spaces is not None:
            self._spaces.lose(why)

    def _forget(self) -> None:
        self.epoch += 1
        for tracked in self._requests.values():
            self._cancel(tracked)
            tracked.asked, tracked.chains, tracked.spaces = {}, [], []
        for calls in self._prefetches.values():
            for call in calls:
                call.cancel()

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

    @staticmethod
    def _cancel(tracked: Request) -> None:
        for calls in tracked.asked.values():
            for asked in calls:
                asked.call.cancel()

    # Embeddings in the place of tokens, and what is pooled from hidden states, have no name.
    def _cacheable(self, request: Any) -> bool:
        return (
            self._spaces is not None
            and media_of(request) is not None
            and request.prompt_embeds is None
            and request.pooling_params is None
            and not request.resumable  # A session: vLLM takes tokens back, and appends others and images.
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

    def _extend(self, tracked: Request) -> None:
        """Names all whole chunks that the request has by now. It has no chains as long as its space is not known."""
        request = tracked.request
        if not tracked.chains and self._cacheable(request):
            assert self._spaces is not None
            spaces = self._spaces.ids(request.cache_salt or "", tracked.adapter)
            if spaces is None:
                return
            tracked.spaces = spaces
            tracked.chains = [
                Chain(
                    space,
                    shard.chunk_tokens,
                    media_of(request) or [],
                    shard.tp_rank,
                    shard.pp_rank,
                    shard.group,
                    shard.gaps,
                )
                for space, shard in zip(spaces, self._shards, strict=True)
            ]
        if tracked.chains and tracked.chains[0].tokens < request.num_tokens:
            tokens = array("i", request.all_token_ids[tracked.chains[0].tokens :])
            for chain in tracked.chains:
                chain.extend(tokens)

    def _place(self, tracked: Request, key: OffloadKey, req_context: ReqContext) -> tuple[int, int] | None:
        """The group, and the chunk in it, that vLLM's name stands for."""
        end = req_context.get_offload_key_position(key)
        if not tracked.chains or end is None or tracked.chains[0].tokens < end:
            self._extend(tracked)
        if not tracked.chains:
            cacheable = self._spaces is not None and self._cacheable(tracked.request)
            self._count(tracked, "miss", self._spaces.reason if self._spaces and cacheable else "not_cacheable")
            return None
        group = get_offload_group_idx(key)
        shard = self._of_group[group][0]
        size = self._shards[shard].chunk_tokens
        if end is None or end % size or end // size > len(tracked.chains[shard]):
            return None
        return group, end // size - 1

    def _patience(self, tokens: int) -> float:
        return self.pace.patience(tokens) if self._load_deadline_s is None else self._load_deadline_s

    def _set_gauges(self, now: float) -> None:
        if self._client is not None and self._gauges is None and now >= self._gauges_at:
            self._gauges = self._client.stats()
            self._gauges_at = now + GAUGES_EVERY_S
        if self._gauges is None or not self._gauges.done:
            return
        found, self._gauges = self._gauges.poll(), None
        if found is None:
            return
        self._stats.set_gauge(UP, int(found.connected))
        self._stats.set_gauge(PENDING, found.pending_saves)
        if not found.connected:
            # A gauge keeps its last value for ever.
            for tier in self._tiers:
                for gauge in (FRAMES, BYTES, TIER_UP):
                    self._stats.set_gauge(gauge, 0, (tier,))
            if self._tiers:  # Before it was there once it may be on its way.
                self._tell({LOST: "its node does not answer; requests are computed until it is back"})
            return
        self._tiers = [tier for tier, _ in found.tiers]
        for tier, stats in found.tiers:
            self._stats.set_gauge(FRAMES, stats.frames, (tier,))
            self._stats.set_gauge(BYTES, stats.bytes, (tier,))
            self._stats.set_gauge(TIER_UP, int(not stats.why), (tier,))
        self._tell({f"tier {tier}": stats.why for tier, stats in found.tiers if stats.why})

    def _tell(self, troubled: dict[str, str]) -> None:
        """Lines of what does not work any more, or works again."""
        for what in troubled.keys() - self._troubled.keys():
            logger.warning("Terrace: %s: %s", what, troubled[what])
        for what in self._troubled.keys() - troubled.keys():
            logger.warning("Terrace: %s: it is back", what)
        self._troubled = troubled

    def _count(self, tracked: Request, outcome: str, reason: str) -> None:
        """Once a request: vLLM asks again and again."""
        if not tracked.counted:
            tracked.counted = True
            self._stats.increase_counter(CHUNKS, 1, (outcome, reason))
