"""Real programs, the real model, free ports. Needs TERRACE_BIN and the model of scripts/setup (MODEL_F16, MODEL_Q4).

Prefill is what these tests spend their time on (200 to 400 tokens a second), so prompts are short, each test has a
document of its own (nothing another test did can make it hit), and instances are shared where a test does not need to
start or stop one.

Instances run with --strict: then an answer equals a cold run's bit for bit whatever was asked before it
(docs/concepts/promises.md).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from terrace_stack import Server, free_port, model_file, wait_until, whole_chunks

MODEL_NAME = "smol"
TEXT = Path("/usr/share/common-licenses/GPL-3").read_text()
_documents: dict[str, int] = {}


def document(name: str, characters: int = 2600) -> str:
    """A real text that no other name begins like: `characters` / 4.3 to 4.6 tokens (2600: two chunks and a bit)."""
    offset = 700 * _documents.setdefault(name, len(_documents)) % (len(TEXT) - characters)
    return f"Document {name}.\n{TEXT[offset : offset + characters]}\n\nSummary:"


def prompt(text: str, max_tokens: int = 24, **more) -> dict:
    """A greedy completion: no chat template, so what the model reads is what stands here."""
    return {"model": MODEL_NAME, "prompt": text, "max_tokens": max_tokens, "temperature": 0, **more}


def chat(text: str, max_tokens: int = 24, **more) -> dict:
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass
class Launcher:
    """Starts instances whose logs lie in one directory; stops what is still there at the end."""

    directory: Path
    model: Path
    servers: list[Server]

    def serve(
        self, *flags: str | Path, model: Path | None = None, name: str = MODEL_NAME, ready: bool = True, **more
    ) -> Server:
        number = len(self.servers)
        arguments = [
            "serve",
            "--model",
            model or self.model,
            "--served-name",
            name,
            "--ram",
            "512MiB",
            "--strict",
            *flags,
        ]
        port = more.pop("port", None) or free_port()
        server = Server(f"serve-{number}", port, arguments, self.directory / f"serve-{number}.log", **more)
        self.servers.append(server)
        return server.wait_caching(name) if ready else server

    def close(self) -> None:
        for server in self.servers:
            server.ask_to_stop()
        codes = {server.name: server.stop() for server in self.servers}
        crashed = [server for server in self.servers if server.process.returncode in (-6, -11, -8, -7)]
        assert not crashed, f"ended by a crash: {codes}\n{crashed[0].tail()}"


@pytest.fixture(scope="session")
def model_f16() -> Path:
    return model_file("MODEL_F16")


@pytest.fixture(scope="session")
def model_q4() -> Path:
    return model_file("MODEL_Q4")


@pytest.fixture
def launcher(tmp_path: Path, model_f16: Path) -> Iterator[Launcher]:
    it = Launcher(tmp_path, model_f16, [])
    yield it
    it.close()


@pytest.fixture(scope="session")
def session_launcher(tmp_path_factory: pytest.TempPathFactory, model_f16: Path) -> Iterator[Launcher]:
    it = Launcher(tmp_path_factory.mktemp("shared-servers"), model_f16, [])
    yield it
    it.close()


@dataclass
class Pair:
    a: Server
    b: Server
    shared: Path


@pytest.fixture(scope="session")
def pair(session_launcher: Launcher) -> Pair:
    """Two instances that share one directory, for every test that neither stops nor damages anything."""
    shared = session_launcher.directory / "shared"
    shared.mkdir()
    return Pair(session_launcher.serve("--shared", shared), session_launcher.serve("--shared", shared), shared)


def published(writer: Server, reader: Server, body: dict, timeout_s: float = 30) -> int:
    """Waits until `reader` sees on the shared tier all that `writer` has of this prompt; the number of tokens."""
    found = writer.lookup(body)
    expected = whole_chunks(found["prompt_tokens"], found["chunk"])
    wait_until(f"{writer.name} to have no save pending", lambda: writer.lookup(body)["pending_saves"] == 0, timeout_s)
    wait_until(
        f"{reader.name} to see {expected} tokens on the shared tier",
        lambda: reader.lookup(body)["cached_by_tier"]["shared_fs"] >= expected,
        timeout_s,
    )
    return expected


def frames_of(shared: Path) -> list[Path]:
    return sorted((shared / "frames").rglob("*.kvf"))
