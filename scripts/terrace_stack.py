"""Starts Terrace programs and asks them: what scripts/demo and the end-to-end tests share. Standard library only.

A program started here dies with its parent, whatever kills the parent; its output goes to a log file whose tail is part
of every error.
Nothing sleeps a fixed time to wait for something: `wait_until` asks again until a deadline.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
CHUNK = 256
TIERS = ("engine", "ram", "disk", "shared_fs", "s3")
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
T = TypeVar("T")


class StackError(Exception):
    """What went wrong, for a person; the tail of a log follows if a program is to blame."""


# --- where things are -------------------------------------------------------------------------------------------------


def terrace_binary() -> Path:
    path = Path(os.environ.get("TERRACE_BIN") or ROOT / "build/release/src/cli/terrace")
    if not path.is_file():
        raise StackError(f"{path} is not there: run `make build`, or set TERRACE_BIN")
    return path.resolve()


def model_file(name: str) -> Path:
    """MODEL_F16 or MODEL_Q4: from the environment, else where scripts/setup puts it."""
    return from_setup(name, "scripts/setup")


def from_setup(name: str, command: str, within: str = "") -> Path:
    """A file or folder that the environment names, else where scripts/setup puts it; or what is `within` it."""
    path = os.environ.get(name)
    if not path:
        text = subprocess.run([ROOT / "scripts/setup", "env"], check=True, capture_output=True, text=True).stdout
        path = dict(line.split("=", 1) for line in text.split())[name]
    found = Path(path, within)
    if not found.exists():
        raise StackError(f"{found} is not there: run {command}, or set {name}")
    return found.resolve()


def port_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


_given_ports: set[int] = set()


def free_port() -> int:
    """A port that is free now. From below the range that outgoing connections take theirs from, so it stays free."""
    first = 20000 + os.getpid() * 7 % 10000
    for port in range(first, first + 2000):
        if port not in _given_ports and not port_taken(port):
            _given_ports.add(port)
            return port
    raise StackError(f"no free port from {first} to {first + 2000}")


def wait_until(what: str, ask: Callable[[], T], timeout_s: float) -> T:
    """The first true answer of `ask`, which is called until the deadline; then a StackError with its last answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise StackError(f"waited {timeout_s:.0f} s for {what}; the last answer was {answer!r}")
        time.sleep(0.05)  # Between two questions.


# --- HTTP -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]  # Names in lower case.
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """A generated text and what the server says of it."""

    text: str = ""
    ttft_ms: float = 0.0  # From opening the connection to the first piece of text.
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)  # A streamed answer's, as they came.
    done: bool = False  # The stream ended with [DONE].

    @property
    def prompt_tokens(self) -> int:
        return self.usage["prompt_tokens"]

    @property
    def cached_tokens(self) -> int:
        return self.usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def by_tier(self) -> dict[str, int]:
        return self.usage["terrace"]["cached_by_tier"]

    @property
    def miss_reason(self) -> str:
        return self.usage["terrace"]["miss_reason"]


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or HOST, parts.port or 80, timeout=timeout_s)


def call(
    url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 120
) -> Reply:
    """One request. `body`: bytes as they are, anything else as JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection = _connect(url, timeout_s)
    try:
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


@contextmanager
def open_stream(
    url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, timeout_s: float = 300
) -> Iterator[http.client.HTTPResponse]:
    """A streamed answer's response, for a caller that reads it line by line or leaves before its end."""
    connection = _connect(url, timeout_s)
    try:
        connection.request(
            "POST",
            path,
            json.dumps({**body, "stream": True}).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        yield connection.getresponse()
    finally:
        connection.close()


def piece_of(choice: dict[str, Any]) -> str:
    """The text in one choice: of a chat or a completion, whole or streamed."""
    part = choice.get("delta") or choice.get("message") or {}
    return part.get("content") or choice.get("text") or ""


def stream(
    url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, timeout_s: float = 300
) -> Answer:
    """Asks with streaming and reads to the end. A refusal is a StackError with the server's words."""
    answer = Answer()
    started = time.perf_counter()
    with open_stream(url, path, {"stream_options": {"include_usage": True}, **body}, headers, timeout_s) as response:
        if response.status != 200:
            raise StackError(f"POST {url}{path}: {response.status} {response.read().decode(errors='replace')}")
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                answer.done = True
                continue
            event = json.loads(line[6:])
            answer.events.append(event)
            if "error" in event:
                raise StackError(f"POST {url}{path}: the stream ended with {event['error']}")
            answer.usage = event.get("usage") or answer.usage
            for choice in event["choices"]:
                piece = piece_of(choice)
                if piece and not answer.text:
                    answer.ttft_ms = (time.perf_counter() - started) * 1000
                answer.text += piece
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return answer


# --- programs ---------------------------------------------------------------------------------------------------------


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """One running `terrace` program that listens on `port`."""

    def __init__(
        self,
        name: str,
        port: int,
        arguments: list[str | Path],
        log: Path,
        api_key: str | None = None,
        environment: dict[str, str] | None = None,
        within: tuple[str | Path, ...] = (),
    ):
        """`within`: a command that runs another one in its place, `unshare --mount`, say."""
        self.name, self.port, self.log = name, port, log
        self._asked_to_stop = False
        self.url = f"http://{HOST}:{port}"
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        command = [*within, self.program(), *arguments, *self.listening()]
        with open(log, "ab") as out:
            # A session of its own: Ctrl-C in the terminal reaches us, and we stop the programs in order.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def program(self) -> Path:
        return terrace_binary()

    def listening(self) -> list[str]:
        return ["--host", HOST, "--port", str(self.port)]

    def tail(self, lines: int = 15) -> str:
        return "\n".join(
            f"  {self.name}| {line}" for line in self.log.read_text(errors="replace").splitlines()[-lines:]
        )

    def died(self) -> StackError | None:
        code = self.process.poll()
        if code is None:
            return None
        return StackError(
            f"{self.name} (port {self.port}) ended with code {code}; its last words ({self.log}):\n{self.tail()}"
        )

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except (OSError, http.client.HTTPException) as e:
            with suppress(subprocess.TimeoutExpired):  # A connection breaks a moment before the process is gone.
                self.process.wait(0.5)
            raise self.died() or StackError(
                f"{self.name} (port {self.port}): {e or type(e).__name__}\n{self.tail()}"
            ) from e

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 120
    ) -> Reply:
        return self._asked(lambda: call(self.url, method, path, body, {**self.headers, **(headers or {})}, timeout_s))

    def stream(self, body: dict[str, Any], path: str = "/v1/chat/completions", timeout_s: float = 300) -> Answer:
        return self._asked(lambda: stream(self.url, path, body, self.headers, timeout_s))

    def complete(self, body: dict[str, Any], path: str = "/v1/chat/completions", timeout_s: float = 300) -> Answer:
        """The same without streaming; no TTFT then."""
        reply = self.call("POST", path, body, timeout_s=timeout_s)
        if reply.status != 200:
            raise StackError(f"POST {self.url}{path}: {reply.status} {reply.body.decode(errors='replace')}")
        choice = reply.json()["choices"][0]
        return Answer(text=piece_of(choice), finish_reason=choice["finish_reason"], usage=reply.json()["usage"])

    def lookup(self, body: dict[str, Any]) -> dict[str, Any]:
        """What a request would find now, and where; generates nothing."""
        reply = self.call("POST", "/terrace/lookup", body)
        if reply.status != 200:
            raise StackError(f"POST {self.url}/terrace/lookup: {reply.status} {reply.body.decode(errors='replace')}")
        return reply.json()

    def health(self) -> dict[str, Any]:
        return self.call("GET", "/health").json()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` that carry these labels; 0 if there is none."""
        total = 0.0
        for sample, its_labels, value in parse_metrics(self.call("GET", "/metrics").body.decode()):
            if sample == name and labels.items() <= its_labels.items():
                total += value
        return total

    def wait_healthy(self, timeout_s: float = 60) -> Server:
        def healthy() -> bool:
            if error := self.died():
                raise error
            try:
                return call(self.url, "GET", "/health", timeout_s=5).status == 200
            except (OSError, http.client.HTTPException):
                return False

        wait_until(f"{self.name} to answer on port {self.port}", healthy, timeout_s)
        return self

    def wait_caching(self, model: str, timeout_s: float = 120) -> Server:
        """Until it knows its weights' digest and has read its tiers' indexes: before that every lookup is a miss."""
        self.wait_healthy(timeout_s)
        body = {"model": model, "prompt": "ready? " * (CHUNK // 2)}  # More than a chunk, less than any context.
        wait_until(
            f"{self.name} to know its weights' digest and its tiers' frames",
            lambda: self.lookup(body)["miss_reason"] not in ("weights_pending", "index_loading"),
            timeout_s,
        )
        return self

    def ask_to_stop(self) -> None:
        """Once, however often it is called: a second signal would end it at once."""
        if not self._asked_to_stop:
            self._asked_to_stop = True
            self.process.terminate()

    def stop(self, timeout_s: float = 40) -> int:
        """Asks it to end, waits, kills it if it does not. Its exit code."""
        self.ask_to_stop()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        self.process.kill()
        return self.process.wait()


def parse_metrics(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Samples of a Prometheus text, strictly: a line that is none is an error."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = _SAMPLE.match(line)
            if not match:
                raise ValueError(f"not a sample: {line!r}")
            yield match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"])


def whole_chunks(prompt_tokens: int, chunk: int = CHUNK) -> int:
    """Tokens of a prompt that a cache can hold: whole chunks, and one token is always left to compute."""
    return (prompt_tokens - 1) // chunk * chunk
