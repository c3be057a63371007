"""Would catch: two real servers behind our router that do not share what one computed; a server that fails, waits
or answers otherwise when the storage below it is gone or holds damage.
"""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import MODEL

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from terrace_stack import Server, free_port, wait_until, whole_chunks
from vllm_stack import VllmServer

NAME = "smol"
KEY = "of-the-guide"
COMPLETIONS = "/v1/completions"
CHUNK = 256


def body(name: str, sentences: int = 12) -> dict:
    sea = "The keeper of the lighthouse wrote down what the sea had brought: rope, two barrels, and a letter. "
    text = f"Log of {name}. " + "".join(f"Day {day}. {sea}" for day in range(sentences)) + "The letter said:"
    return {"model": NAME, "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclass
class Pair:
    share: Path
    a: VllmServer
    b: VllmServer
    router: Server

    def published(self, frames: int) -> None:
        """Until both know so many chunks on the shared tier."""
        for server in (self.a, self.b):
            wait_until(f"{frames} chunks known to {server.name}", lambda s=server: s.frames(NAME) >= frames, 120)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("servers")
    share = folder / "kv"
    share.mkdir()
    servers: list[Server] = []
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    try:
        for name, seed in (("a", "0"), ("b", "7")):
            log = folder / f"{name}.log"
            servers.append(VllmServer(name, free_port(), MODEL, NAME, log, share, PYTHONHASHSEED=seed))
        a, b = servers
        flags = ["router", "--service-discovery", "static", "--static-backends", f"{a.url},{b.url}"]
        flags += ["--static-models", f"{NAME},{NAME}", "--routing-logic", "roundrobin", "--first-byte-timeout", "1800s"]
        for server in (a, b):
            server.wait_ready()
        servers.append(Server("router", free_port(), flags, folder / "router.log", KEY))
        servers[-1].wait_healthy()
        yield Pair(share, a, b, servers[-1])
    finally:
        for server in servers:
            server.process.terminate()
        for server in servers:
            server.stop(60)
        monkeypatch.undo()


def test_what_one_server_computed_the_other_loads(pair: Pair) -> None:
    texts = []
    counts = [server.counts() for server in (pair.a, pair.b)]
    for _ in range(2):  # Round robin: one each.
        cold_or_warm = pair.router.complete(body("Ann"), COMPLETIONS, timeout_s=1800)
        texts.append(cold_or_warm.text)
        expected = whole_chunks(cold_or_warm.usage["prompt_tokens"])
        pair.published(expected // CHUNK)
    assert texts[0] == texts[1] != ""
    found = [server.counts() - before for server, before in zip((pair.a, pair.b), counts, strict=True)]
    assert sorted(f.external for f in found) == [0, expected]


def test_damage_is_a_miss_and_the_answer_is_the_same(pair: Pair) -> None:
    cold, _ = pair.a.ask(body("Ben"), COMPLETIONS)
    chunks = whole_chunks(cold.prompt_tokens) // CHUNK
    before = set((pair.share / "frames").rglob("*.kvf"))
    pair.published(len(before))
    frames = sorted((pair.share / "frames").rglob("*.kvf"), key=lambda path: path.stat().st_mtime_ns)
    for frame in frames[-chunks:]:
        with frame.open("r+b") as file:
            file.seek(100_000)
            file.write(b"damage")
    answer, found = pair.b.ask(body("Ben"), COMPLETIONS)
    assert answer.text == cold.text
    assert found.external == 0


def test_without_storage_requests_are_answered_all_the_same(pair: Pair) -> None:
    cold, _ = pair.a.ask(body("Cid"), COMPLETIONS)
    gone = pair.share.with_name("gone")
    pair.share.rename(gone)
    try:
        answer, _ = pair.b.ask(body("Cid"), COMPLETIONS)
        again, _ = pair.a.ask(body("Dan"), COMPLETIONS)
    finally:
        shutil.rmtree(pair.share, ignore_errors=True)
        gone.rename(pair.share)
    assert answer.text == cold.text
    assert again.text
