"""Would catch: a model whose state can't be cut in chunks being cached all the same, served wrong by what an earlier
request left, or not said to be so; a sliding window whose chunks come back without their rows.

The models are tiny and random, but recurrent, hybrid and windowed as real ones are.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import COMPLETIONS, Launcher, document, prompt, published
from terrace_stack import Server, whole_chunks
from tiny_gguf import gemma2, jamba, mamba

CHUNK = 64
FLAGS = ("--chunk", str(CHUNK), "--ctx", "2048")


def ask(server: Server, names: str) -> list:
    """A conversation that jumps: each name is a document of its own."""
    return [server.complete(prompt(document(f"other {name}", 900), 32), COMPLETIONS) for name in names]


def alone(launcher: Launcher, model: Path, name: str) -> str:
    """What an instance says that was asked nothing before."""
    server = launcher.serve(*FLAGS, model=model, ready=False).wait_healthy()
    [answer] = ask(server, name)
    server.stop()
    return answer.text


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (mamba, "recurrent"),
        (jamba, "hybrid"),
        (lambda path, like: gemma2(path, like, window=32), "window of 32"),  # Smaller than a chunk.
    ],
    ids=["recurrent", "hybrid", "small window"],
)
def test_a_model_that_cannot_be_cut_is_served_right_and_not_cached(
    launcher: Launcher, tmp_path: Path, make: Callable, why: str
):
    model, shared = make(tmp_path / "model.gguf", launcher.model), tmp_path / "shared"
    shared.mkdir()
    cold = {name: alone(launcher, model, name) for name in "ab"}
    assert cold["a"] != cold["b"]
    server = launcher.serve(*FLAGS, "--shared", shared, model=model, ready=False).wait_healthy()
    names = "abaab"
    for name, answer in zip(names, ask(server, names), strict=True):
        assert answer.text == cold[name]
        assert (answer.cached_tokens, answer.miss_reason) == (0, "not_cacheable")
    assert server.lookup(prompt(document("other a", 900)))["miss_reason"] == "not_cacheable"
    assert not list(shared.rglob("*.kvf"))
    [line] = [line for line in server.log.read_text().splitlines() if "event=not_cacheable" in line]
    assert why in line


def test_a_text_without_a_blank_harms_nobody(launcher: Launcher, tmp_path: Path):
    """Genomes, rulers, blobs: for this tokenizer llama.cpp recurses once a character."""
    model = mamba(tmp_path / "model.gguf", launcher.model, **{"tokenizer.ggml.pre": "default"})
    server = launcher.serve("--ctx", "4096", model=model, ready=False).wait_healthy()
    assert server.lookup(prompt("=" * 100_000))["prompt_tokens"] == 100_000 // 64 + 1
    assert server.lookup(prompt(" " * 100_000))["prompt_tokens"] > 1000
    reply = server.call("POST", "/terrace/lookup", prompt("=" * (1 << 18) + "="))
    assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert server.health() == {"status": "ok"}


def test_a_sliding_window_larger_than_a_chunk_is_cached_and_shared(launcher: Launcher, tmp_path: Path):
    model, shared = gemma2(tmp_path / "model.gguf", launcher.model, window=128), tmp_path / "shared"
    shared.mkdir()
    cold = {name: alone(launcher, model, name) for name in "ab"}
    a, b = (launcher.serve(*FLAGS, "--shared", shared, model=model) for _ in range(2))
    names = "abaab"
    answers = ask(a, names)
    assert [answer.text for answer in answers] == [cold[name] for name in names]
    whole = whole_chunks(answers[0].prompt_tokens, CHUNK)
    assert whole > 128, "the window is passed"
    assert answers[2].cached_tokens == answers[3].cached_tokens == whole
    published(a, b, prompt(document("other a", 900)))
    [warm] = ask(b, "a")
    assert (warm.text, warm.by_tier["shared_fs"]) == (cold["a"], whole)
