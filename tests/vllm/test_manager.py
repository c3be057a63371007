"""Would catch: a request that waits for ever, or asks again what failed; a hit that is not in RAM; a chunk saved under
a name that is not known for sure. vLLM's side is played here, step by step, so no engine is started.
"""

import functools
import hashlib
import logging
import pickle
import time
from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from plain_request import plain_request
from terrace_kv import Chain, Client
from terrace_kv.vllm import manager as ours
from terrace_kv.vllm.connector import Step, Worker, is_on, said_by_user, seconds, whole_chunks
from terrace_kv.vllm.content import Contents, file_digest, is_lasting, kind_of_mount
from terrace_kv.vllm.engine import GPULoadStoreSpec, LookupResult, ReqContext, ScheduleEndContext, watch_calls
from terrace_kv.vllm.space import Facts, Shard, Spaces, model_folder, this_host
from vllm.v1.engine.core import EngineCore

CHUNK = 4
BYTES = 1000
SPACE = bytes(32)


def shard(group: int = 0, rank: int = 0, chunk_tokens: int = CHUNK, gaps: bool = False) -> Shard:
    return Shard(group, rank, rank, 0, chunk_tokens, BYTES, gaps)


@dataclass
class FakeSpaces:
    known: bool = True
    shards: list[Shard] = field(default_factory=lambda: [shard()])
    asked: list = field(default_factory=list)
    digest: Future = field(default_factory=Future)
    space: bytes = SPACE
    reason: str = "weights_pending"

    def lose(self, why: str) -> None:
        self.known, self.reason = False, "weights_changed"

    def renew(self) -> None:
        self.space = bytes([255]) * 32

    def ids(self, salt: str, adapter: Future | None) -> list[bytes] | None:
        self.asked.append((salt, adapter))
        if not self.known or not (adapter is None or adapter.done()):
            return None
        return [self.space if s == shard() else bytes([i + 1]) * 32 for i, s in enumerate(self.shards)]

    def adapter(self, lora: object) -> Future:
        return self.digest


class FakeCall:
    """A call whose items settle when the test says so."""

    def __init__(self, first: int, last: int, chain: Chain | None = None, timeout: float = 0) -> None:
        self.items: list = [None] * (last - first)
        self.first, self.chain, self.timeout = first, chain, timeout
        self.cancelled = False

    def __len__(self) -> int:
        return len(self.items)

    @property
    def done(self) -> bool:
        return all(self.items)

    def poll(self, index: int = 0) -> object:
        return self.items[index]

    def cancel(self) -> None:
        self.cancelled = True


class FakeClient:
    tier_names = ("ram", "shared_fs")

    def __init__(self, *items: object) -> None:
        self.calls: list[FakeCall] = []
        self.prefetched = 0
        self.items = items  # That are there at once.

    def lease(self, chain: Chain, first: int, last: int, payload_bytes: int, timeout: float) -> FakeCall:
        self.calls.append(FakeCall(first, last, chain, timeout))
        self.calls[-1].items[: len(self.items)] = self.items
        return self.calls[-1]

    def prefetch(self, chain: Chain, first: int, last: int, payload_bytes: int, timeout: float) -> FakeCall:
        self.prefetched += 1
        return FakeCall(first, last)

    def stats(self) -> FakeCall:
        return FakeCall(0, 1)


def hit() -> SimpleNamespace:
    return SimpleNamespace(hit=True, outcome="hit", reason="none", tier=1, lease=object())


def miss(reason: str, outcome: str = "miss") -> SimpleNamespace:
    return SimpleNamespace(hit=False, outcome=outcome, reason=reason, tier=0, lease=None)


class Scheduler:
    """vLLM's: names chunks by hashes of its own, and tells where they end."""

    def __init__(self, client: object, spaces: object, deadline_s: float | None = 60.0) -> None:
        self.manager = ours.Manager(client, spaces, deadline_s, lambda: None)

    def add(self, tokens: int, **more: object) -> ReqContext:
        self.request = plain_request("r", list(range(tokens)), **more)
        self.manager.track(self.request)
        context = ReqContext(req_id="r")
        self.manager.on_new_request(context)
        for group in range(3):
            for end in range(CHUNK, tokens + 1, CHUNK):
                context.set_offload_key_position(self.key(end, group), end)
        return context

    def counted(self) -> dict:
        stats = self.manager.get_stats()
        return {} if stats is None else stats.data

    @staticmethod
    def key(end: int, group: int = 0) -> bytes:
        return hashlib.sha256(b"%d" % end).digest() + group.to_bytes(4, "big")

    def ask(self, context: ReqContext, *ends: int, group: int = 0) -> list[str]:
        return [self.manager.lookup(self.key(end, group), context).name for end in ends]


def test_a_request_is_told_to_ask_again_while_bytes_come_and_a_hit_is_in_ram() -> None:
    client = FakeClient()
    scheduler = Scheduler(client, FakeSpaces())
    context = scheduler.add(13)
    assert scheduler.ask(context, 4, 8, 12) == ["RETRY"] * 3
    (call,) = client.calls
    call.items[0] = hit()
    assert scheduler.ask(context, 4, 8) == ["HIT", "RETRY"]
    call.items[1:] = [miss("not_found")] * 2
    assert scheduler.ask(context, 4, 8, 12) == ["HIT", "MISS", "MISS"]
    spec = scheduler.manager.prepare_load([scheduler.key(4)], context)
    assert spec.leases == [call.items[0].lease]
    sent = pickle.loads(pickle.dumps(spec))  # As to a worker in another process: it borrows by key.
    (row,) = sent.rows
    assert (sent.leases, row.first, row.last, row.chain[0]) == ([], 0, 1, spec.rows[0].chain[0])
    assert scheduler.manager.get_load_source(scheduler.key(4), context).value == "external_unspecified"
    assert len(client.calls) == 1


def test_after_its_deadline_a_request_keeps_what_has_come_and_misses_the_rest_for_good() -> None:
    client = FakeClient(hit())
    scheduler = Scheduler(client, FakeSpaces(), deadline_s=0.0)
    context = scheduler.add(13)
    for _ in range(2):  # vLLM had no room the first time.
        assert scheduler.ask(context, 4, 8) == ["HIT", "MISS"]
    assert client.calls[0].cancelled
    scheduler.manager.prepare_load([scheduler.key(4)], context)
    scheduler.manager.complete_load([scheduler.key(4)], context)
    assert "hit" in str(scheduler.counted())
    scheduler.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=["r"]))
    assert scheduler.ask(context, 4, 8) == ["MISS", "MISS"]
    assert len(client.calls) == 1


def test_a_load_that_failed_is_not_asked_for_again() -> None:
    client = FakeClient()
    scheduler = Scheduler(client, FakeSpaces())
    context = scheduler.add(13)
    scheduler.ask(context, 4)
    client.calls[0].items[0] = miss("unavailable", "failed")
    assert scheduler.ask(context, 4) == ["MISS"]
    scheduler.manager.reset_cache()
    assert scheduler.ask(context, 4) == ["MISS"]
    assert len(client.calls) == 1


def test_a_load_that_failed_at_the_worker_is_not_asked_for_again() -> None:
    client = FakeClient()
    scheduler = Scheduler(client, FakeSpaces())
    context = scheduler.add(13)
    scheduler.ask(context, 4)
    client.calls[0].items[0] = hit()
    scheduler.manager.prepare_load([scheduler.key(4)], context)
    scheduler.manager.give_up("r")
    assert scheduler.ask(context, 4) == ["MISS"]
    assert len(client.calls) == 1


def test_chunks_are_counted_as_hits_when_they_have_arrived() -> None:
    for fails in (False, True):
        client = FakeClient()
        scheduler = Scheduler(client, FakeSpaces())
        context = scheduler.add(13)
        scheduler.ask(context, 4)
        client.calls[0].items[:2] = [hit(), hit()]
        keys = [scheduler.key(4), scheduler.key(8)]
        scheduler.manager.prepare_load(keys, context)
        assert "hit" not in str(scheduler.counted())
        if fails:
            scheduler.manager.give_up("r")
        scheduler.manager.complete_load(keys, context)
        counted = str(scheduler.counted())
        assert ("hit" in counted, "failed" in counted) == (not fails, fails)


def test_after_loads_that_lost_only_ram_is_asked_for_a_while() -> None:
    client = FakeClient()
    scheduler = Scheduler(client, FakeSpaces(), deadline_s=30.0)
    late = scheduler.add(13)
    assert client.prefetched == 1
    scheduler.ask(late, 4)
    scheduler.manager._requests["r"].deadline = 0.0  # It has passed.
    assert scheduler.ask(late, 4) == ["MISS"]
    assert "timeout" in str(scheduler.counted())
    next_one = scheduler.add(13)
    assert client.prefetched == 1
    scheduler.ask(next_one, 4)
    assert client.calls[-1].timeout <= ours.PATIENCE_MIN_S + 1e-6  # Sums of clocks are rounded.
    client.calls[-1].items[:] = [hit(), miss("timeout"), miss("timeout")]
    assert scheduler.ask(next_one, 4, 8) == ["HIT", "MISS"]
    assert "slower" in str(scheduler.counted())
    scheduler.ask(scheduler.add(17), 4)
    assert client.calls[-1].timeout > 1, "more tokens may be worth it"
    scheduler.manager.pauses.won(12)
    scheduler.ask(scheduler.add(13), 4)
    assert client.calls[-1].timeout > 1


def test_what_lost_is_tried_again_after_a_pause_by_one_request() -> None:
    pauses = ours.Pauses()
    assert pauses.tries(100, now=0.0) and pauses.tries(90, now=0.0)
    pauses.lost(100, begun=0.0, now=1.0)
    pauses.lost(90, begun=0.0, now=1.1)  # Of the same trouble.
    assert not pauses.tries(100, now=1.9)
    assert pauses.tries(101, now=1.9)
    assert pauses.tries(100, now=2.1)
    assert not pauses.tries(100, now=2.2), "one finds out for all"
    pauses.undecided(begun=2.1)
    assert pauses.tries(50, now=2.3)
    pauses.lost(50, begun=2.3, now=2.4)
    assert not pauses.tries(50, now=4.3), "the pause is twice as long"
    assert pauses.tries(80, now=4.5)
    pauses.won(80)
    assert pauses.tries(80, now=4.6)
    assert pauses.tries(79, now=4.6) and not pauses.tries(79, now=4.7), "what is less is tried, by one"


@pytest.mark.parametrize(("deadline_s", "waited", "lost"), [(None, 1.0, 8), (None, 0.001, 0), (60.0, 1.0, 0)])
def test_a_load_that_took_longer_than_computing_has_lost(deadline_s: float | None, waited: float, lost: int) -> None:
    scheduler = Scheduler(FakeClient(hit(), hit(), miss("not_found")), FakeSpaces(), deadline_s)
    scheduler.manager.pace.step_begins(1000, now=10.0)
    scheduler.manager.pace.step_ends(now=11.0)
    context = scheduler.add(13)
    assert scheduler.ask(context, 4, 8, 12) == ["HIT", "HIT", "MISS"]
    tracked = scheduler.manager._requests["r"]
    tracked.begun, tracked.waited = 100.0, 100.0 + waited
    scheduler.manager.prepare_load([scheduler.key(4), scheduler.key(8)], context)
    assert scheduler.manager.pauses.over(lost + 1, now=0.0)
    assert not lost or not scheduler.manager.pauses.over(lost, now=0.0)


def test_after_a_reset_nothing_of_before_has_a_name() -> None:
    client, spaces = FakeClient(), FakeSpaces()
    scheduler = Scheduler(client, spaces)
    context = scheduler.add(13)
    assert scheduler.ask(context, 4) == ["RETRY"]
    before = scheduler.manager.prepare_store([scheduler.key(4)], context).store_spec
    assert before.epoch == scheduler.manager.epoch
    scheduler.manager.reset_cache()
    assert client.calls[0].cancelled
    assert before.epoch != scheduler.manager.epoch, "vLLM's worker may still have it to do"
    assert scheduler.ask(context, 4) == ["RETRY"]
    assert client.calls[1].chain[0] != client.calls[0].chain[0]
    after = scheduler.manager.prepare_store([scheduler.key(4)], context).store_spec
    assert after.epoch == scheduler.manager.epoch
    assert after.chunks[0][0][0] == client.calls[1].chain[0]


def test_after_a_change_of_weights_nothing_is_found_or_kept_until_a_reset() -> None:
    client, spaces = FakeClient(), FakeSpaces()
    scheduler = Scheduler(client, spaces)
    before = scheduler.add(13)
    assert scheduler.ask(before, 4) == ["RETRY"]
    scheduler.manager.weights_changed("a test says so")
    assert client.calls[0].cancelled
    for context in (before, scheduler.add(13)):
        assert scheduler.ask(context, 4) == ["MISS"]
        assert scheduler.manager.prepare_store([scheduler.key(4)], context).keys_to_store == []
    assert "weights_changed" in str(scheduler.counted())


@pytest.mark.parametrize("changed", [False, True])
def test_deferred_saves_of_before_a_reset_are_not_made(changed: bool) -> None:
    """Their pages may hold something else by then. The worker may be in another process: what it gets was pickled."""
    scheduler = Scheduler(FakeClient(), FakeSpaces())
    context = scheduler.add(13)
    saved: list = []
    pages = SimpleNamespace(save=lambda job, *_: saved.append(job), drop_saves=lambda: saved.append("dropped"))
    worker = Worker(SimpleNamespace(shards=[shard()], rank=0, why_not="", pages=pages), SimpleNamespace(tensors=[]), 1)
    worker._instance.why_not = None

    def store(job: int) -> None:
        spec = scheduler.manager.prepare_store([scheduler.key(4)], context).store_spec
        later.append((job, GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0]), pickle.loads(pickle.dumps(spec))))

    later: list = []
    for job in (0, 1):
        store(job)
    worker.begin(Step(scheduler.manager.epoch, look=False))
    worker.submit_store(*later[0])
    assert saved == [0]
    if changed:
        worker.weights = SimpleNamespace(changed=lambda: True, renew=lambda: None)
        worker.begin(Step(scheduler.manager.epoch, look=True))
        assert worker.tells
        worker.submit_store(*later[1])
        assert saved == [0], "of weights that nobody knows"
    scheduler.manager.reset_cache()
    worker.begin(Step(scheduler.manager.epoch, look=False))
    worker.submit_store(*later[1])
    assert saved == [0, "dropped"]
    store(2)
    worker.submit_store(*later[2])
    assert saved == [0, "dropped", 2]


def test_spaces_that_are_renewed_are_known_to_nobody_else() -> None:
    def made() -> Spaces:
        spaces = Spaces.__new__(Spaces)
        spaces._weights = Future()
        spaces._weights.set_result(SPACE)
        spaces._ids, spaces._complained = {}, False
        spaces._settings, spaces._groups = [("settings", "adapters")], [("full", "group")]
        fields = {"engine_state_version": 1, "kv_dtype_k": "f", "kv_dtype_v": "f", "layers": 1}
        spaces._fields = [{"engine": "vllm", "engine_build": "x", "layout": "l", **fields}]
        return spaces

    one, other = made(), made()
    (before,) = one.ids("", None)
    assert other.ids("", None) == [before]
    one.renew()
    other.renew()
    assert len({before, *one.ids("", None), *other.ids("", None)}) == 3


def test_chunks_that_reach_behind_a_window_are_not_saved() -> None:
    def whole(chunks: list[tuple[int, int]], ids: list[int], sizes: list[int], firsts: list[int]) -> tuple:
        spec = GPULoadStoreSpec(ids, group_sizes=sizes, block_indices=firsts)
        kept, (ids, sizes, firsts) = whole_chunks([(None, index, group) for index, group in chunks], spec, 4)
        return [chunk[1:] for chunk in kept], list(ids), sizes, firsts

    all_of_both = [(0, 0), (1, 0), (1, 1)], [*range(1, 9), *range(11, 15)], [8, 4], [0, 4]
    assert whole(*all_of_both) == all_of_both
    # Of chunk 1 of the window vLLM has its last block only.
    assert whole([(0, 0), (1, 1), (2, 1)], [1, 2, 3, 4, 7, 11, 12, 13, 14], [4, 5], [0, 7]) == (
        [(0, 0), (2, 1)],
        [1, 2, 3, 4, 11, 12, 13, 14],
        [4, 4],
        [0, 8],
    )
    # A block in the middle is gone: whichever.
    kept, ids, sizes, _ = whole([(0, 0), (1, 1), (2, 1)], [1, 2, 3, 4, 7, 8, 9, 11, 12, 13, 14], [4, 7], [0, 4])
    assert (kept, ids, sizes) == ([(0, 0)], [1, 2, 3, 4], [4, 0])


def test_what_a_user_says_is_told_from_a_default(tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text("kv-transfer-config:\n  kv_load_failure_policy: fail\n")
    option = "kv_load_failure_policy"
    assert said_by_user(option, ["vllm", "serve", "m", "--kv-transfer-config", '{"kv_load_failure_policy":"fail"}'])
    assert said_by_user(option, ["vllm", "serve", "--config", str(options)])
    assert not said_by_user(option, ["vllm", "serve", "m", "--config", str(tmp_path / "none.yaml")])


def test_a_chunk_is_a_hit_when_every_rank_has_its_part() -> None:
    client = FakeClient()
    scheduler = Scheduler(client, FakeSpaces(shards=[shard(rank=0), shard(rank=1)]))
    context = scheduler.add(13)
    assert scheduler.ask(context, 4) == ["RETRY"]
    first, second = client.calls
    assert first.chain[0] != second.chain[0]
    first.items[:] = [hit(), hit(), miss("not_found")]
    assert scheduler.ask(context, 4) == ["RETRY"]
    second.items[:] = [hit(), miss("not_found"), miss("not_found")]
    assert scheduler.ask(context, 4, 8) == ["HIT", "MISS"]
    spec = pickle.loads(pickle.dumps(scheduler.manager.prepare_load([scheduler.key(4)], context)))
    (row,) = spec.rows
    assert row.chain.on_rank(row.spaces[0], 0, 0)[0] == first.chain[0]
    assert row.chain.on_rank(row.spaces[1], 1, 0)[0] == second.chain[0]
    stored = scheduler.manager.prepare_store([scheduler.key(8)], context).store_spec
    assert stored.spaces == [row.spaces]


def test_groups_have_chunks_of_their_own_and_a_window_is_asked_for_backwards() -> None:
    client = FakeClient()
    groups = [shard(), shard(group=1, chunk_tokens=2 * CHUNK), shard(group=2, gaps=True)]
    scheduler = Scheduler(client, FakeSpaces(shards=groups))
    context = scheduler.add(17)
    assert scheduler.ask(context, 4, 8, 12, 16) == ["RETRY"] * 4
    assert scheduler.ask(context, 8, 16, group=1) == ["RETRY"] * 2
    assert scheduler.ask(context, 16, 12, group=2) == ["RETRY"] * 2
    assert [(call.first, len(call)) for call in client.calls] == [(0, 4), (0, 2), (3, 1), (2, 1)]
    assert len({call.chain[0] for call in client.calls}) == 3
    for call in client.calls:
        call.items[:] = [hit() for _ in call.items]
    keys = [scheduler.key(end) for end in (4, 8, 12, 16)]
    keys += [scheduler.key(end, 1) for end in (8, 16)] + [scheduler.key(16, 2)]
    spec = scheduler.manager.prepare_load(keys, context)
    assert [(row.group, row.first, row.last) for row in spec.rows] == [(0, 0, 4), (1, 0, 2), (2, 3, 4)]
    leases = [item.lease for call in client.calls[:3] for item in call.items]
    assert spec.leases == leases
    stored = scheduler.manager.prepare_store([scheduler.key(16), scheduler.key(16, 2)], context).store_spec
    assert [(index, group) for _, index, group in stored.chunks] == [(3, 0), (3, 2)]


def test_images_are_part_of_the_names_by_their_digest() -> None:
    def first_keys(*media: tuple[int, int, str]) -> list[bytes]:
        client = FakeClient()
        scheduler = Scheduler(client, FakeSpaces())
        features = [
            SimpleNamespace(mm_position=SimpleNamespace(offset=o, length=n), mm_hash=name, identifier="lora:" + name)
            for o, n, name in media
        ]
        scheduler.ask(scheduler.add(13, mm_features=features), 4)
        return [client.calls[0].chain[i] for i in range(3)] if client.calls else []

    plain, ann, ben = first_keys(), first_keys((5, 4, "ann")), first_keys((5, 4, "ben"))
    assert plain[0] == ann[0] == ben[0]
    assert len({plain[1], ann[1], ben[1]}) == 3
    assert first_keys((5, 4, "ann")) == ann
    assert first_keys((5, 4, "ann"), (6, 2, "ben")) == [], "items that overlap are not cached"


def test_a_preempted_request_asks_anew() -> None:
    client = FakeClient()
    scheduler = Scheduler(client, FakeSpaces())
    context = scheduler.add(13)
    scheduler.ask(context, 4)
    client.calls[0].items[0] = miss("not_found")
    assert scheduler.ask(context, 4) == ["MISS"]
    scheduler.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=["r"]))
    assert scheduler.ask(context, 4) == ["RETRY"]
    client.calls[1].items[0] = hit()
    assert scheduler.ask(context, 4) == ["HIT"]


def test_nothing_is_asked_or_saved_until_the_weights_have_a_name() -> None:
    client, spaces = FakeClient(), FakeSpaces(known=False)
    scheduler = Scheduler(client, spaces)
    context = scheduler.add(13)
    assert scheduler.ask(context, 4) == ["MISS"]
    assert scheduler.manager.prepare_store([scheduler.key(4)], context).keys_to_store == []
    spaces.known = True
    stored = scheduler.manager.prepare_store([scheduler.key(4), scheduler.key(8)], context)
    assert stored.keys_to_store == [scheduler.key(4), scheduler.key(8)]
    assert [(index, group) for _, index, group in stored.store_spec.chunks] == [(0, 0), (1, 0)]


def test_an_adapter_that_is_read_anew_with_each_request_is_not_cached() -> None:
    scheduler = Scheduler(FakeClient(), FakeSpaces())
    context = scheduler.add(13, lora_request=SimpleNamespace(load_inplace=True))
    assert scheduler.ask(context, 4) == ["MISS"]


@pytest.mark.parametrize("what", ["prompt_embeds", "pooling_params", "resumable"])
def test_what_tokens_alone_do_not_name_is_not_cached(what: str) -> None:
    scheduler = Scheduler(FakeClient(), FakeSpaces())
    context = scheduler.add(13, **{what: [1]})
    assert scheduler.ask(context, 4) == ["MISS"]
    assert scheduler.manager.prepare_store([scheduler.key(4)], context).keys_to_store == []


def test_a_request_waits_for_the_name_of_its_adapter_until_its_deadline() -> None:
    client, spaces = FakeClient(), FakeSpaces()
    scheduler = Scheduler(client, spaces)
    context = scheduler.add(13, lora_request="a")
    assert scheduler.ask(context, 4) == ["RETRY"]
    assert not client.calls
    spaces.digest.set_result(SPACE)
    assert scheduler.ask(context, 4) == ["RETRY"]  # For its chunks now.
    assert len(client.calls) == 1
    late = Scheduler(client, FakeSpaces(), deadline_s=0.0)
    assert late.ask(late.add(13, lora_request="a"), 4) == ["MISS"]


def test_salt_and_adapter_are_part_of_the_space() -> None:
    spaces = FakeSpaces()
    scheduler = Scheduler(FakeClient(), spaces)
    scheduler.add(13, cache_salt="s", lora_request="a")
    assert spaces.asked[0] == ("s", spaces.digest)


def test_a_server_that_is_not_cached_works() -> None:
    scheduler = Scheduler(None, None)
    context = scheduler.add(13)
    assert scheduler.ask(context, 4) == ["MISS"]
    assert scheduler.manager.prepare_store([scheduler.key(4)], context).keys_to_store == []
    scheduler.manager.on_request_finished(context)


def test_keys_follow_a_growing_request() -> None:
    scheduler = Scheduler(FakeClient(), FakeSpaces())
    context = scheduler.add(6)
    scheduler.manager.prepare_store([scheduler.key(4)], context)
    scheduler.request.all_token_ids += [6, 7, 8]
    scheduler.request.num_tokens = 9
    context.set_offload_key_position(scheduler.key(8), 8)
    (chunk,) = scheduler.manager.prepare_store([scheduler.key(8)], context).store_spec.chunks
    whole = Chain(SPACE, CHUNK)
    whole.extend(array("i", range(9)))
    assert chunk[0][chunk[1]] == whole[1]


def test_the_scheduler_is_not_held_up(tmp_path: Path) -> None:
    """A real client, a long prompt that hits nothing: look-ups are answered from memory."""
    client = Client(settings={"ram": "32MiB", "shared": str(tmp_path)})
    scheduler = Scheduler(client, FakeSpaces())
    context = scheduler.add(4 * 2000)
    deadline = time.monotonic() + 30
    while (answer := scheduler.ask(context, CHUNK)) == ["RETRY"]:
        assert time.monotonic() < deadline
    assert answer == [LookupResult.MISS.name]
    assert client.close(30)


def test_a_digest_is_of_all_bytes_and_kept_by_the_files_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("terrace_kv.vllm.content.kind_of_mount", lambda device: "ext4")
    model = tmp_path / "model"
    model.mkdir()
    (model / "a.safetensors").write_bytes(b"x" * 100_000)
    (model / "config.json").write_text("{}")
    contents = Contents()
    first = contents.start(model, (".safetensors",)).result(30)
    assert contents.start(model, (".safetensors",)).result(30) == first
    (kept,) = (tmp_path / "cache/terrace/digests").iterdir()
    assert kept.read_text().strip() == hashlib.sha256(b"x" * 100_000).hexdigest()
    (model / "a.safetensors").write_bytes(b"x" * 99_999 + b"y")
    assert contents.start(model, (".safetensors",)).result(30) != first
    (model / "a.safetensors").rename(model / "b.safetensors")
    with pytest.raises(ValueError, match="none of"):
        contents.start(model, (".bin",)).result(30)
    contents.stop()


def test_weights_that_changed_after_the_engine_began_have_no_name(tmp_path: Path) -> None:
    weights = tmp_path / "a.safetensors"
    weights.write_bytes(b"x")
    with pytest.raises(ValueError, match="start again"):
        file_digest(weights, unchanged_since=time.time() - 3600)


def test_identities_that_do_not_last_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On FUSE another mount may give the same inode, size and second to other bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = tmp_path / "a.safetensors"
    weights.write_bytes(b"x")
    stat = weights.stat()
    assert is_lasting(stat, "") and is_lasting(stat, "nfs4")
    assert kind_of_mount(Path("/proc/self").stat().st_dev) == "proc"
    for kind in ("fuse", "fuse.s3fs", "virtiofs"):
        assert not is_lasting(stat, kind)
    whole = SimpleNamespace(st_mtime_ns=7 * 10**9, st_ctime_ns=8 * 10**9)
    assert not is_lasting(whole, "ext4")
    monkeypatch.setattr("terrace_kv.vllm.content.kind_of_mount", lambda device: "fuse.s3fs")
    assert file_digest(weights, None) == hashlib.sha256(b"x").digest()
    assert not (tmp_path / "cache").exists()


def hub(folder: Path, name: str, revision: str) -> Path:
    """A Hugging Face cache with one model."""
    model = folder / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(revision)
    (snapshot / "model.safetensors").write_bytes(b"x")
    return snapshot


def test_the_models_folder_is_the_one_that_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub(tmp_path, "org/model", "1" * 40)
    config = SimpleNamespace(model="org/model", revision=None)
    assert model_folder(config, SimpleNamespace(download_dir=str(tmp_path))).resolve() == snapshot.resolve()
    local = SimpleNamespace(model=str(tmp_path), revision=None)
    assert model_folder(local, SimpleNamespace(download_dir=None)) == tmp_path
    asked = []

    def from_modelscope(model: str, revision: str | None) -> str:
        asked.append((model, revision))
        return "/of/modelscope"

    monkeypatch.setattr("terrace_kv.vllm.space.maybe_download_from_modelscope", from_modelscope)
    assert model_folder(config, SimpleNamespace(download_dir=None)) == Path("/of/modelscope")
    assert asked == [("org/model", None)]


def test_a_folder_that_is_not_found_costs_the_cache_alone() -> None:
    def nowhere() -> Path:
        raise RuntimeError("no hub")

    contents = Contents()
    with pytest.raises(ValueError, match="no hub"):
        contents.model(nowhere, (".safetensors",), None).result(30)
    contents.stop()


def ids_of(workers: dict, has_node: bool = False) -> list[bytes] | None:
    spaces = Spaces.__new__(Spaces)
    spaces._weights = Future()
    spaces._weights.set_result(SPACE)
    spaces._ids, spaces._complained, spaces._settings = {}, False, None
    spaces.shards = [shard(rank=0), shard(rank=1)]
    spaces._groups = [("full", "group")] * 2
    fields = {"engine_state_version": 1, "kv_dtype_k": "f", "kv_dtype_v": "f", "layers": 1}
    spaces._fields = [{"engine": "vllm", "engine_build": "x", "layout": "l", **fields, "tp_rank": n} for n in range(2)]
    spaces.told(workers, has_node)
    return spaces.ids("", None)


def test_ranks_on_several_hosts_need_nodes_of_their_own() -> None:
    here, there = Facts(this_host(), "s", "a"), Facts("another host", "s", "a")
    assert ids_of({(0, 0): here, (0, 1): here}) is not None
    assert ids_of({(0, 0): here, (0, 1): there}) is None
    assert ids_of({(0, 0): here, (0, 1): there}, has_node=True) is not None


def test_what_a_worker_can_not_name_is_shared_with_nobody() -> None:
    def ids(*facts: Facts) -> list[bytes] | None:
        return ids_of({(0, rank): fact for rank, fact in enumerate(facts)})

    named, unnamed = Facts(this_host(), "s", "a"), Facts(this_host(), why_not="a thing")
    assert ids(named, named) == ids(named, named)
    assert ids(named, Facts(this_host(), "other", "a")) != ids(named, named)
    assert ids(unnamed, unnamed) is not None
    assert ids(unnamed, unnamed) != ids(unnamed, unnamed)
    assert ids(named) is None, "of one rank nothing is known"


def test_a_blob_of_the_hub_is_its_own_name(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / ("ab" * 32)).write_bytes(b"x")
    (tmp_path / "a.safetensors").symlink_to(blobs / ("ab" * 32))
    assert file_digest(tmp_path / "a.safetensors", unchanged_since=0.0) == b"\xab" * 32


def test_patience_is_half_of_what_computing_would_take() -> None:
    pace = ours.Pace()
    assert pace.patience(1000) == ours.PATIENCE_UNKNOWN_S
    pace.step_begins(1000, now=10.0)
    pace.step_ends(now=12.0)
    assert pace.patience(1000) == pytest.approx(1.0)
    pace.step_begins(1, now=20.0)  # Decoding says nothing.
    pace.step_ends(now=21.0)
    assert pace.patience(1000) == pytest.approx(1.0)
    assert pace.patience(1) == ours.PATIENCE_MIN_S


def test_settings_are_read_as_the_client_reads_them() -> None:
    for text, wanted in (("250ms", 0.25), ("1.5s", 1.5), ("2 M", 120.0), ("40", 0.04), (None, None)):
        assert seconds(text) == (wanted if wanted is None else pytest.approx(wanted)), text
    for text in ("true", "True", " YES", "on", "1", "false", "0", "Off", "no"):
        client = Client(node="@nobody", settings={"save-decode-cache": text})
        assert is_on(client.setting("save-decode-cache")) == (text.strip().lower() in ("true", "yes", "on", "1")), text
        assert client.close(0)
    assert not is_on(None)


class Told(FakeClient):
    """Says of itself what the test says."""

    answer: object = None

    def stats(self) -> FakeCall:
        call = FakeCall(0, 1)
        call.items[0] = self.answer
        return call


def gauges(manager: ours.Manager) -> dict:
    manager._gauges_at = 0.0
    stats = manager.get_stats()
    assert stats is not None
    return {name: values for name, values in stats.data["data"].items() if name != ours.CHUNKS}


def told(connected: bool, **why: str) -> SimpleNamespace:
    tiers = [(name, SimpleNamespace(frames=3, bytes=300, why=text)) for name, text in why.items()]
    return SimpleNamespace(connected=connected, tiers=tiers, pending_saves=2 if connected else 0)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_a_cache_that_is_lost_shows_in_gauges_and_in_the_log() -> None:
    client, log = Told(), Lines()
    manager = ours.Manager(client, FakeSpaces(), 60.0, lambda: None)
    logging.getLogger("vllm.terrace").addHandler(log)
    try:
        client.answer = told(False)  # Its node is started along with it.
        assert gauges(manager)[ours.UP] == {(): 0}
        assert not log.messages
        client.answer = told(True, ram="", shared_fs="")
        found = gauges(manager)
        assert (found[ours.UP], found[ours.PENDING]) == ({(): 1}, {(): 2})
        assert found[ours.TIER_UP] == {("ram",): 1, ("shared_fs",): 1}
        client.answer = told(True, ram="", shared_fs="reads stopped for 0 s: EIO")
        assert gauges(manager)[ours.TIER_UP] == {("ram",): 1, ("shared_fs",): 0}
        client.answer = told(True, ram="", shared_fs="reads stopped for 1 s: EIO")
        gauges(manager)
        assert [m for m in log.messages if "reads stopped" in m] == [
            "Terrace: tier shared_fs: reads stopped for 0 s: EIO"
        ]
        client.answer = told(False)
        found = gauges(manager)
        assert (found[ours.UP], found[ours.PENDING]) == ({(): 0}, {(): 0})
        for gauge in (ours.FRAMES, ours.BYTES, ours.TIER_UP):
            assert found[gauge] == {("ram",): 0, ("shared_fs",): 0}, "a dead node holds nothing"
        assert any("cache lost" in m and "requests are computed" in m for m in log.messages)
        client.answer = told(True, ram="", shared_fs="")
        gauges(manager)
        assert log.messages[-1] == "Terrace: cache lost: it is back"
    finally:
        logging.getLogger("vllm.terrace").removeHandler(log)


def test_what_became_of_saves_is_counted_and_only_copies_are_bytes() -> None:
    ended = SimpleNamespace(job=7, bytes=2 * BYTES, seconds=0.5, written=2, existed=3, declined=1)
    of_a_device = SimpleNamespace(job=None, bytes=0, seconds=0.0, written=1, existed=0, declined=0)
    worker = Worker.__new__(Worker)
    worker._instance = SimpleNamespace(pages=SimpleNamespace(finished=lambda: [ended, of_a_device]))
    worker._borrowing, worker._done, worker.requests = {}, [], {}
    worker._stats = ours.OffloadingConnectorStats()
    (result,) = worker.get_finished()
    assert (result.job_id, result.transfer_size) == (7, 2 * BYTES)
    stats = worker.take_stats()
    assert stats is not None
    assert stats.data["data"] == {ours.SAVES: {("written",): 3, ("existed",): 3, ("declined",): 1}}
    assert worker.take_stats() is None


class Watching:
    def __init__(self) -> None:
        self.methods: list[str] = []

    def called(self, method: str) -> None:
        self.methods.append(method)


def test_calls_are_seen_though_another_plugin_wraps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(EngineCore.collective_rpc)
    def of_another(self: object, method: str) -> str:
        return f"did {method}"

    monkeypatch.setattr(EngineCore, "collective_rpc", of_another)
    watching = Watching()
    for _ in range(2):
        watch_calls(watching)
    assert EngineCore.collective_rpc(object(), "reload_weights") == "did reload_weights"
    assert EngineCore.collective_rpc(object(), "check_health") == "did check_health"
    assert watching.methods == ["reload_weights"]
