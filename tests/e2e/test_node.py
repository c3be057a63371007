"""Would catch: a node that systemd can't activate or that does not tell it, that is slow to start because of its RAM,
that hangs at its end or does not say what it left, that leaves its socket behind or can't start over a dead one's, that
takes somebody's file for one; a start that fails and leaves things behind; nodes of one host that promise more RAM than
it has.

Clients here are a few lines of Python by hand: what is sent is what docs/internals/node.md says.
"""

import array
import mmap
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.request import urlopen

import pytest
from terrace_stack import terrace_binary, wait_until

MAGIC, VERSION = 0x444E5254, 1
HELLO, SEGMENT, COMMIT, WELCOME, GRANTED, SAVED = 1, 11, 12, 64, 68, 69
HEADER = struct.Struct("<IHHQ32sQ4QII")
COMMIT_ITEM = struct.Struct("<QQ32s32s32sIIIIIIQ")


def message(kind: int, *numbers: int, version: int = VERSION, items: tuple[bytes, ...] = ()) -> bytes:
    four = (*numbers, 0, 0, 0, 0)[:4]
    return HEADER.pack(MAGIC, version, kind, 7, bytes(32), 0, *four, 0, len(items)) + b"".join(items)


class Node:
    def __init__(self, log: Path, *flags: object, **more) -> None:
        self.log = log
        command = [str(terrace_binary()), "node", *map(str, flags)]
        if (listener := more.pop("listener", None)) is not None:
            # As systemd hands its socket over: descriptor 3, for the process that it starts.
            command = ["/bin/sh", "-c", 'LISTEN_PID=$$; export LISTEN_PID; exec "$@"', "sh", *command]
            more["env"]["LISTEN_FDS"] = "1"
            more |= {"pass_fds": [3], "preexec_fn": lambda: os.dup2(listener, 3)}
        with open(log, "ab") as err:
            self.process = subprocess.Popen(command, stderr=err, **more)

    def events(self, name: str) -> list[dict[str, str]]:
        lines = [line for line in self.log.read_text().splitlines() if f"event={name} " in line + " "]
        return [dict(field.split("=", 1) for field in line.split() if "=" in field) for line in lines]

    def wait_ready(self, times: int = 1) -> "Node":
        wait_until("node_ready", lambda: self.process.poll() is not None or len(self.events("node_ready")) >= times, 30)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def stop(self) -> dict[str, str]:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()
        return self.events("node_stopped")[-1]


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    started: list[Node] = []
    yield started
    for node in started:
        node.process.kill()
        node.process.wait()


def ask(client: socket.socket, request: bytes) -> tuple[tuple, bytes, list[int]]:
    """The header of the answer, its items, and the descriptors that came with it."""
    client.send(request)
    answer, ancillary, _, _ = client.recvmsg(1 << 17, socket.CMSG_SPACE(8))
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return HEADER.unpack(answer[: HEADER.size]), answer[HEADER.size :], list(fds)


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(30)
    client.connect(str(path))
    return client


def test_it_is_ready_whatever_its_ram_and_leaves_no_socket(tmp_path: Path, nodes: list[Node]) -> None:
    path = tmp_path / "node.sock"
    nodes.append(Node(tmp_path / "log", "--socket", path, "--ram", "64TiB"))
    nodes[0].wait_ready()  # Cut to what the machine has. Touching that first would take longer than the wait.
    client = connect(path)
    header, _, fds = ask(client, message(HELLO))
    assert header[2] == WELCOME
    assert len(fds) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fds[0], b"x", 0)
    assert nodes[0].stop()["sessions"] == "1"
    assert client.recv(100) == b""
    assert not path.exists()


def test_it_starts_over_the_socket_of_one_that_was_killed_and_not_beside_one_that_lives(
    tmp_path: Path, nodes: list[Node]
) -> None:
    path = tmp_path / "node.sock"
    flags = ("--socket", path, "--ram", "64MiB")
    nodes.append(Node(tmp_path / "log", *flags).wait_ready())
    beside = Node(tmp_path / "beside", *flags)
    nodes.append(beside)
    assert beside.process.wait(30) == 2
    assert "another node is there" in beside.log.read_text()
    nodes[0].process.kill()
    nodes[0].process.wait()
    assert path.exists()
    nodes.append(Node(tmp_path / "log", *flags).wait_ready(2))
    assert ask(connect(path), message(HELLO))[0][2] == WELCOME


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path, nodes: list[Node]) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("precious")
    nodes.append(Node(tmp_path / "log", "--socket", path, "--ram", "64MiB"))
    assert nodes[0].process.wait(30) == 2
    assert f"{path}: what is there is no socket" in (tmp_path / "log").read_text()
    assert path.read_text() == "precious"


@pytest.mark.parametrize("cause", ["shared", "bucket", "port", "ram"])
def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path, nodes: list[Node], cause: str) -> None:
    place = tmp_path / "place"
    disk = place / "disk"
    disk.mkdir(parents=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]  # Somebody's, who speaks no HTTP and hangs up on nobody.
        flags = {
            "shared": ["--ram=64MiB", "--shared", place / "missing"],
            "bucket": ["--ram=64MiB", "--s3-bucket=kv", "--s3-endpoint=nonsense"],
            "port": ["--ram=64MiB", f"--metrics-port={port}"],
            "ram": ["--ram=16KiB"],
        }[cause]
        node = Node(tmp_path / "log", "--socket", place / "s", "--disk", disk, "--disk-size=64MiB", *flags)
        nodes.append(node)
        assert node.process.wait(60) == 2, node.log.read_text()
    assert [path.relative_to(place) for path in place.rglob("*")] == [Path("disk")]


def test_nodes_of_a_host_share_its_ram_and_heal_when_one_is_killed(tmp_path: Path, nodes: list[Node]) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    caps = []
    for name, more in [("first", []), ("second", [f"--metrics-port={port}"])]:
        node = Node(tmp_path / name, "--socket", tmp_path / f"{name}.sock", "--ram=64TiB", "--segments=64MiB", *more)
        nodes.append(node.wait_ready())
        caps.append(int(node.events("node_ready")[0]["ram"]))
        assert node.events("ram_cap_cut")
    assert sum(caps) < total
    assert caps[1] < caps[0] / 2

    def cap_now() -> float:
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith('terrace_tier_bytes_max{tier="ram"}'))

    assert cap_now() == caps[1] - (64 << 20)
    nodes[0].process.kill()
    nodes[0].process.wait()
    wait_until("the second to get more", lambda: cap_now() > 1.5 * caps[1], 120)
    assert nodes[1].events("ram_cap_raised")


def test_a_client_of_another_release_hears_which_version_is_there(tmp_path: Path, nodes: list[Node]) -> None:
    path = tmp_path / "node.sock"
    nodes.append(Node(tmp_path / "log", "--socket", path, "--ram", "64MiB").wait_ready())
    client = connect(path)
    header, _, fds = ask(client, message(HELLO, version=VERSION + 1))
    assert header[:2] == (MAGIC, VERSION)
    assert header[2] != WELCOME
    assert not fds
    assert client.recv(100) == b""
    assert nodes[0].events("node_session_ended")


def test_systemd_activates_it_and_hears_of_it(tmp_path: Path, nodes: list[Node]) -> None:
    path, notify = tmp_path / "node.sock", tmp_path / "notify"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(notify))
    told.settimeout(30)
    early = connect(path)  # Before there is a node: systemd starts it for this one.
    early.send(message(HELLO))
    nodes.append(
        Node(
            tmp_path / "log",
            "--ram",
            "64MiB",
            listener=listener.fileno(),
            env={**os.environ, "NOTIFY_SOCKET": str(notify)},
        )
    )
    assert told.recv(100) == b"READY=1"
    assert HEADER.unpack(early.recv(1 << 17)[: HEADER.size])[2] == WELCOME
    assert nodes[0].stop()["calls_cut"] == "0"
    assert told.recv(100) == b"STOPPING=1"
    assert path.exists()  # It is systemd's.


@contextmanager
def bucket() -> Iterator[str]:
    """One that is empty, and does not answer whoever gives it a frame until the end; its address."""
    over = Event()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if "list-type" in self.path:
                return self.answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not self.path.partition("?")[0].endswith("terrace.format"):
                over.wait(60)
            self.answer(200)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()


def test_a_stop_has_a_deadline_and_says_what_it_left(tmp_path: Path, nodes: list[Node]) -> None:
    """A bucket that takes a frame and never answers keeps its save for long."""
    path = tmp_path / "node.sock"
    with bucket() as endpoint:
        flags = ("--s3-bucket=kv", f"--s3-endpoint={endpoint}", "--s3-access-key-id=a", "--s3-secret-access-key=b")
        nodes.append(Node(tmp_path / "log", "--socket", path, "--ram=64MiB", *flags, "--drain-timeout=1s"))
        nodes[0].wait_ready()
        client = connect(path)
        ask(client, message(HELLO))
        granted, _, fds = ask(client, message(SEGMENT, 4096, 4096))
        assert granted[2] == GRANTED
        with mmap.mmap(fds[0], 4096) as segment:
            segment[:5] = b"bytes"
        space, key = b"s" * 32, b"k" * 32
        item = COMMIT_ITEM.pack(granted[6], 0, space, key, space, 0, 1, 0, 0, 0, 0, 4096)
        saved, items, _ = ask(client, message(COMMIT, items=(item,)))
        assert saved[2] == SAVED
        assert items[4] == 0  # A hit.
        report = nodes[0].stop()
        assert report["sessions"] == "1"
        assert report["saves_abandoned"] == "1"
