"""Would catch: a call on the thread of vLLM's scheduler that opens a file, talks to a socket, or waits for anything.
What vLLM's scheduler does of our manager's is played here, and watched by strace; test_sharing.py looks at the same in
a real vLLM.
"""

import hashlib
import subprocess
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import terrace_kv
from plain_request import plain_request
from terrace_kv import Chain, Client
from terrace_kv.vllm.engine import LookupResult, ReqContext
from terrace_kv.vllm.manager import Manager
from terrace_kv.vllm.space import Shard
from watch import begin, end, not_allowed, traced, watch

CHUNK, CHUNKS, BYTES = 64, 12, 100_000
SPACE = bytes(32)
CALLS = (
    "track",
    "lookup",
    "get_load_source",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "get_stats",
    "on_request_finished",
)
WAIT_S = 60


def tokens(number: int) -> list[int]:
    return [number * 7 + i % 5 for i in range(CHUNK * CHUNKS + 1)]


def play(client: Client, log: Path) -> None:
    """Fifty requests, half of which find what was saved."""
    deadline = time.monotonic() + WAIT_S
    while not client.connected:
        assert time.monotonic() < deadline
    for number in range(0, 50, 2):
        chain = Chain(SPACE, CHUNK)
        chain.extend(array("i", tokens(number)))
        saved = client.save(chain, 0, [bytearray(BYTES)] * CHUNKS)
        assert saved.wait(WAIT_S) and saved.poll(0).outcome == "hit", saved.poll(0).reason
    spaces = SimpleNamespace(shards=[Shard(0, 0, 0, 0, CHUNK, BYTES, False)], ids=lambda salt, adapter: [SPACE])
    manager = Manager(client, spaces, 60.0, lambda: None)
    seconds = watch(manager, CALLS)
    hits = 0
    with traced(log):
        for number in range(50):
            request = plain_request(str(number), tokens(number))
            manager.track(request)
            context = ReqContext(req_id=request.request_id)
            keys = [hashlib.sha256(b"%d %d" % (number, i)).digest() + bytes(4) for i in range(CHUNKS)]
            for i, key in enumerate(keys):
                context.set_offload_key_position(key, (i + 1) * CHUNK)
            deadline = time.monotonic() + WAIT_S
            while LookupResult.RETRY in (found := [manager.lookup(key, context) for key in keys]):
                assert time.monotonic() < deadline
            if found[0] is LookupResult.HIT:
                hits += 1
                manager.prepare_load(keys, context)
                manager.get_load_source(keys[0], context)
                manager.complete_load(keys, context)
            else:
                manager.prepare_store(keys, context)
            manager.get_stats()
            manager.on_request_finished(context)
    assert hits == 25
    calls, found = not_allowed(log)
    assert calls == len(seconds) > 500
    assert not found, "\n".join(found[:20])


def test_with_a_store_in_the_process(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    client = Client(settings={"ram": "64MiB", "shared": str(tmp_path / "kv")})
    play(client, tmp_path / "trace")
    assert client.close(WAIT_S)


def test_with_a_node(tmp_path: Path) -> None:
    program = Path(terrace_kv.__file__).parents[1] / "bin/terrace"
    socket = tmp_path / "node.sock"
    with (tmp_path / "node.log").open("wb") as log:
        node = subprocess.Popen([program, "node", "--socket", socket, "--ram", "64MiB"], stderr=log, stdout=log)
    try:
        client = Client(node=str(socket))
        play(client, tmp_path / "trace")
        assert client.close(WAIT_S)
    finally:
        node.kill()
        node.wait()


def test_a_wait_and_a_read_would_be_seen(tmp_path: Path) -> None:
    whats: list[tuple[Callable[[], object], str]] = [
        (lambda: time.sleep(0.01), "nanosleep"),
        (lambda: Path("/etc/hosts").read_text(), "open"),
    ]
    for what, seen in whats:
        log = tmp_path / seen
        with traced(log):
            begin()
            what()
            end()
        calls, found = not_allowed(log)
        assert calls == 1 and any(seen in line for line in found), found
