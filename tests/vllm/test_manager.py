"""Would catch: a request that waits for ever, or asks again what failed; a hit that is not in RAM; a chunk saved under
a name that is not known for sure. vLLM's side is played here, step by step, so no engine is started.
"""

import hashlib
import pickle
import time
from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from terrace_kv import Chain, Client
from terrace_kv.vllm import manager as ours
from terrace_kv.vllm.content import Contents, file_digest
from terrace_kv.vllm.engine import LookupResult, ReqContext, ScheduleEndContext

CHUNK = 4
BYTES = 1000
SPACE = bytes(32)


@dataclass
class FakeSpaces:
    space: bytes | None = SPACE
    chunk_tokens: int = CHUNK
    asked: list = field(default_factory=list)
    digest: Future = field(default_factory=Future)

    def id(self, salt: str, adapter: Future | None) -> bytes | None:
        self.asked.append((salt, adapter))
        return self.space if adapter is None or adapter.done() else None

    def adapter(self, lora: object) -> Future:
        return self.digest


class FakeCall:
    """A call whose items settle when the test says so."""

    def __init__(self, size: int) -> None:
        self.items: list = [None] * size
        self.cancelled = False

    def __len__(self) -> int:
        return len(self.items)

    @property
    def done(self) -> bool:
        return all(self.items)

    def poll(self, index: int) -> object:
        return self.items[index]

    def cancel(self) -> None:
        self.cancelled = True


class FakeClient:
    tier_names = ("ram", "shared_fs")

    def __init__(self) -> None:
        self.calls: list[FakeCall] = []

    def lease(self, chain: Chain, first: int, last: int, payload_bytes: int, timeout: float) -> FakeCall:
        self.calls.append(FakeCall(last - first))
        return self.calls[-1]

    def prefetch(self, chain: Chain, first: int, last: int, payload_bytes: int, timeout: float) -> FakeCall:
        return FakeCall(last - first)


def hit() -> SimpleNamespace:
    return SimpleNamespace(hit=True, outcome="hit", reason="none", tier=1, lease=object())


def miss(reason: str, outcome: str = "miss") -> SimpleNamespace:
    return SimpleNamespace(hit=False, outcome=outcome, reason=reason, tier=0, lease=None)


class Scheduler:
    """vLLM's: names chunks by hashes of its own, and tells where they end."""

    def __init__(self, client: object, spaces: object, deadline_s: float | None = 60.0) -> None:
        self.manager = ours.Manager(client, spaces, lambda: BYTES, deadline_s, lambda: None)

    def add(self, tokens: int, **more: object) -> ReqContext:
        self.request = SimpleNamespace(
            request_id="r",
            all_token_ids=list(range(tokens)),
            num_tokens=tokens,
            cache_salt=None,
            lora_request=None,
            mm_features=[],
            prompt_embeds=None,
            pooling_params=None,
            skip_reading_prefix_cache=False,
        )
        vars(self.request).update(more)
        self.manager.track(self.request)
        context = ReqContext(req_id="r")
        self.manager.on_new_request(context)
        for end in range(CHUNK, tokens + 1, CHUNK):
            context.set_offload_key_position(self.key(end), end)
        return context

    @staticmethod
    def key(end: int) -> bytes:
        return hashlib.sha256(b"%d" % end).digest() + bytes(4)

    def ask(self, context: ReqContext, *ends: int) -> list[str]:
        return [self.manager.lookup(self.key(end), context).name for end in ends]


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
    assert (sent.leases, sent.first, sent.last, sent.chain[0]) == ([], 0, 1, spec.chain[0])
    assert scheduler.manager.get_load_source(scheduler.key(4), context).value == "external_unspecified"
    assert len(client.calls) == 1


def test_after_its_deadline_a_request_misses_for_good() -> None:
    client = FakeClient()
    scheduler = Scheduler(client, FakeSpaces(), deadline_s=0.0)
    context = scheduler.add(13)
    assert scheduler.ask(context, 4) == ["MISS"]
    assert client.calls[0].cancelled
    client.calls[0].items[0] = hit()  # Too late.
    assert scheduler.ask(context, 4) == ["MISS"]


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
    client, spaces = FakeClient(), FakeSpaces(space=None)
    scheduler = Scheduler(client, spaces)
    context = scheduler.add(13)
    assert scheduler.ask(context, 4) == ["MISS"]
    assert scheduler.manager.prepare_store([scheduler.key(4)], context).keys_to_store == []
    spaces.space = SPACE
    stored = scheduler.manager.prepare_store([scheduler.key(4), scheduler.key(8)], context)
    assert stored.keys_to_store == [scheduler.key(4), scheduler.key(8)]
    assert [(index, group) for _, index, group in stored.store_spec.chunks] == [(0, 0), (1, 0)]


def test_an_adapter_that_is_read_anew_with_each_request_is_not_cached() -> None:
    scheduler = Scheduler(FakeClient(), FakeSpaces())
    context = scheduler.add(13, lora_request=SimpleNamespace(load_inplace=True))
    assert scheduler.ask(context, 4) == ["MISS"]


@pytest.mark.parametrize("what", ["mm_features", "prompt_embeds", "pooling_params"])
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
