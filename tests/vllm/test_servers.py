"""Would catch: two real servers behind our router that do not share what one computed, before and after both were
started anew; a server that fails, waits or answers otherwise when the storage below it is gone or holds damage, or when
the node that keeps its KV is killed, whatever it was doing.
"""

import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import MODEL

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from s3_stack import LocalS3
from terrace_stack import Answer, Server, free_port, wait_until, whole_chunks
from vllm_stack import Counts, VllmServer

NAME = "smol"
KEY = "of-the-guide"
COMPLETIONS = "/v1/completions"
CHUNK = 128  # vLLM's block on CPUs: prompts of three chunks are short.


class Deadline:
    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def passed(self) -> bool:
        return time.monotonic() > self.end


def body(name: str, sentences: int = 14, **more: object) -> dict:
    sea = "The keeper of the lighthouse wrote down what the sea had brought: rope, two barrels, and a letter. "
    text = f"Log of {name}. " + "".join(f"Day {day}. {sea}" for day in range(sentences)) + "The letter said:"
    return {"model": NAME, "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}


def all_of(answer: Answer) -> Counts:
    """Every whole chunk of the prompt was loaded, and none in vain."""
    tokens = whole_chunks(answer.prompt_tokens, CHUNK)
    assert tokens >= 2 * CHUNK
    return Counts(local=0, external=tokens, loaded=tokens // CHUNK, failed=0)


class Node(Server):
    """`terrace node`; its port is the one of its metrics."""

    def __init__(self, folder: Path, flags: list[str | Path], environment: dict[str, str]) -> None:
        self.folder, self.flags, self.environment = folder, flags, environment
        self.begin()

    def begin(self) -> None:
        arguments = ["node", "--socket", self.folder / "node.sock", "--ram", "512MiB", *self.flags]
        super().__init__("node", free_port(), arguments, self.folder / "node.log", environment=self.environment)
        self.wait_healthy()

    def listening(self) -> list[str]:
        return ["--metrics-port", str(self.port)]

    def wait_joined(self, frames: int = 0) -> None:
        """By scheduler and worker of both servers, and until it knows so many chunks on its shared tier."""
        wait_until("the servers to join the node", lambda: self.metric("terrace_node_sessions") >= 4, 60)
        wait_until(
            f"{frames} chunks known to the node",
            lambda: self.metric("terrace_tier_frames", tier="shared_fs") >= frames,
            60,
        )


@dataclass
class Pair:
    folder: Path
    share: Path
    other_model: Path
    servers: list[Server]
    a: VllmServer
    b: VllmServer
    router: Server

    def start(self, **env: str) -> None:
        """Two servers with different seeds, hashes and model folders, and the router with the guide's flags."""
        environment = {"TERRACE_CHUNK": str(CHUNK), **env}
        pair = []
        for name, model, seed, algorithm in (("a", MODEL, "0", "sha256"), ("b", self.other_model, "7", "xxhash")):
            flags = ("--prefix-caching-hash-algo", algorithm)
            log = self.folder / f"{name}.log"
            seeds = {"PYTHONHASHSEED": seed} if not env else {}
            server = VllmServer(name, free_port(), model, NAME, log, self.share, flags, **environment, **seeds)
            pair.append(server)
            self.servers.append(server)
        self.a, self.b = pair
        flags = ["router", "--service-discovery", "static", "--static-backends", f"{self.a.url},{self.b.url}"]
        flags += ["--static-models", f"{NAME},{NAME}", "--routing-logic", "roundrobin", "--first-byte-timeout", "1800s"]
        for server in pair:
            server.wait_ready()
        self.router = Server("router", free_port(), flags, self.folder / "router.log", KEY)
        self.servers.append(self.router)
        self.router.wait_healthy()

    def stop(self) -> None:
        for server in self.servers:
            server.ask_to_stop()
        for server in self.servers:
            server.stop(60)
        self.servers.clear()

    def published(self, frames: int) -> None:
        """Until both know so many chunks on the shared tier."""
        for server in (self.a, self.b):
            wait_until(f"{frames} chunks known to {server.name}", lambda s=server: s.frames(NAME) >= frames, 120)

    def files(self) -> list[Path]:
        return list((self.share / "frames").rglob("*.kvf"))

    def ask_and_save(self, request: dict) -> Answer:
        """Of the first server, until its chunks are on the shared tier."""
        before = len(self.files())
        answer, _ = self.a.ask(request, COMPLETIONS)
        wanted = before + whole_chunks(answer.prompt_tokens, CHUNK) // CHUNK
        wait_until(f"{wanted} chunks on the shared tier", lambda: len(self.files()) >= wanted, 120)
        return answer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, other_model: Path) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("servers")
    share = folder / "kv"
    share.mkdir()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    pair = Pair(folder, share, other_model, [], None, None, None)  # type: ignore[arg-type]
    try:
        yield pair
    finally:
        pair.stop()
        monkeypatch.undo()


@pytest.fixture(scope="module")
def pair(made: Pair) -> Pair:
    made.start()
    return made


def test_what_one_server_computed_the_other_loads(pair: Pair) -> None:
    answers = []
    counts = [server.counts() for server in (pair.a, pair.b)]
    for _ in range(2):  # Round robin: one each.
        answers.append(pair.router.complete(body("Ann"), COMPLETIONS, timeout_s=1800))
        pair.published(whole_chunks(answers[-1].usage["prompt_tokens"], CHUNK) // CHUNK)
    assert answers[0].text == answers[1].text != ""
    found = [server.counts() - before for server, before in zip((pair.a, pair.b), counts, strict=True)]
    assert sorted(found, key=lambda f: f.external) == [Counts(), all_of(answers[0])]
    for server in (pair.a, pair.b):  # Again: from vLLM's own memory.
        again, found_again = server.ask(body("Ann"), COMPLETIONS)
        assert again.text == answers[0].text
        assert found_again.external == 0 and found_again.local == all_of(again).external


def test_damage_is_a_miss_and_the_answer_is_the_same(pair: Pair) -> None:
    before = set(pair.files())
    cold = pair.ask_and_save(body("Ben"))
    pair.published(len(pair.files()))
    for frame in set(pair.files()) - before:
        with frame.open("r+b") as file:
            file.seek(100_000)
            file.write(b"damage")
    answer, found = pair.b.ask(body("Ben"), COMPLETIONS)
    assert answer.text == cold.text
    assert found == Counts()


def test_without_storage_requests_are_answered_all_the_same(pair: Pair) -> None:
    cold = pair.ask_and_save(body("Cid"))
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


@pytest.fixture(scope="module")
def node(pair: Pair) -> Iterator[Node]:
    """All is ended and started anew, with one node that has RAM and tiers for both servers."""
    pair.stop()
    node = Node(pair.folder, ["--shared", pair.share], {})
    try:
        pair.start(TERRACE_NODE=str(pair.folder / "node.sock"), TERRACE_SAVE_DECODE_CACHE="true")
        yield node
    finally:
        node.stop()


def test_after_everything_was_started_anew_all_is_found(pair: Pair, node: Node) -> None:
    texts = set()
    node.wait_joined(len(pair.files()))
    for server in (pair.a, pair.b):
        answer, found = server.ask(body("Ann"), COMPLETIONS)
        assert found == all_of(answer)
        texts.add(answer.text)
    cold, found = pair.a.ask(body("Ann", cache_salt="alone"), COMPLETIONS)
    assert found == Counts()
    assert texts == {cold.text}


def test_what_was_generated_is_kept_too(pair: Pair, node: Node) -> None:
    asked = {"max_tokens": CHUNK + 8, "return_token_ids": True}
    before = len(pair.files())
    reply = pair.a.call("POST", COMPLETIONS, body("Eve", **asked), timeout_s=1800)
    choice = reply.json()["choices"][0]
    conversation = [*choice["prompt_token_ids"], *choice["token_ids"], *choice["prompt_token_ids"][:16]]
    chunks = (len(choice["prompt_token_ids"]) + len(choice["token_ids"]) - 1) // CHUNK
    assert chunks * CHUNK > len(choice["prompt_token_ids"])
    wait_until("the answer's chunk on the shared tier", lambda: len(pair.files()) >= before + chunks, 120)
    warm, found = pair.b.ask(body("Eve", prompt=conversation), COMPLETIONS)
    assert (found.external, found.loaded, found.failed) == (chunks * CHUNK, chunks, 0)
    cold, found = pair.b.ask(body("Eve", prompt=conversation, cache_salt="alone"), COMPLETIONS)
    assert found == Counts()
    assert warm.text == cold.text


def begun_anew(pair: Pair, node: Node) -> None:
    node.begin()
    node.wait_joined(len(pair.files()))


def test_a_node_that_dies_while_it_loads_costs_no_request(pair: Pair, node: Node) -> None:
    cold = pair.ask_and_save(body("Fay"))
    node.process.send_signal(signal.SIGSTOP)  # What is asked of it now is under way until it dies.
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.b.ask, body("Fay"), COMPLETIONS)
        waiting = Deadline(10)
        wait_until(
            "the request to wait for its chunks",
            lambda: waiting.passed() or pair.b.metric("vllm:num_requests_waiting") > 0,
            60,
        )
        node.kill()
        assert answer.result(1800)[0].text == cold.text
    begun_anew(pair, node)
    pair.ask_and_save(body("Gil"))
    again, found = pair.b.ask(body("Gil"), COMPLETIONS)
    assert found == all_of(again)


def test_a_node_that_dies_while_it_saves_costs_no_request(pair: Pair, node: Node) -> None:
    node.process.send_signal(signal.SIGSTOP)
    # With log probabilities of the prompt vLLM looks nothing up: it computes, and hands over.
    answer, _ = pair.a.ask(body("Guy", prompt_logprobs=0), COMPLETIONS)
    node.kill()
    begun_anew(pair, node)
    again, found = pair.b.ask(body("Guy"), COMPLETIONS)
    assert found == Counts(), "it was not killed while it saved"
    assert again.text == answer.text != ""


def test_a_node_that_dies_at_any_moment_costs_no_request(pair: Pair, node: Node) -> None:
    colds = {name: pair.ask_and_save(body(name)) for name in ("Hal", "Ida", "Jon")}
    for after, (name, cold) in zip((0.0, 0.05, 0.3), colds.items(), strict=True):
        death = threading.Timer(after, node.kill)
        death.start()
        answer, _ = pair.b.ask(body(name), COMPLETIONS)
        death.join()
        assert answer.text == cold.text
        begun_anew(pair, node)


def test_a_bucket_is_shared_as_a_directory_is(pair: Pair, node: Node, tmp_path: Path) -> None:
    bucket = LocalS3(tmp_path)
    node.kill()
    s3 = Node(pair.folder, bucket.flags, bucket.environment)
    try:
        s3.wait_joined()
        cold, found = pair.a.ask(body("Kim"), COMPLETIONS)
        assert found == Counts()
        chunks = whole_chunks(cold.prompt_tokens, CHUNK) // CHUNK
        wait_until("objects", lambda: len(bucket.frames()) >= chunks, 120)
        s3.kill()  # What was in RAM alone is gone.
        s3.begin()
        s3.wait_joined()
        warm, found = pair.b.ask(body("Kim"), COMPLETIONS)
        assert found == all_of(warm)
        assert warm.text == cold.text
    finally:
        s3.kill()
        bucket.stop()
        node.begin()
