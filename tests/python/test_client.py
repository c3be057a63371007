"""Would catch: bytes that are lost or changed in silence on their way between Python's memory and a chunk, an id that
becomes another one, memory that moves or is freed under a call, a client that hangs when it is dropped, a page whose
example does not run.

Everything runs in an environment that holds the wheel and what it needs (`make wheel` made it).
"""

import importlib.metadata
import re
import subprocess
import textwrap
from pathlib import Path

from test_wheel import python

ROOT = Path(__file__).resolve().parents[2]

BEGIN = """
import time
from array import array
import numpy as np
from terrace_kv import Chain, Client

def refused(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")

def key(tokens):
    chain = Chain(bytes(32), chunk_tokens=4)
    chain.extend(tokens)
    return chain[0]

chain = Chain(bytes(32), chunk_tokens=4)
chain.extend(array("i", range(16)))
BYTES = 100_000
client = Client(settings={"ram": "64MiB"})
floats = [np.random.default_rng(i).random(BYTES // 4, np.float32) for i in range(4)]

def save(payloads):
    call = client.save(chain, 0, payloads)
    assert call.wait(30)
    assert all(call.poll(i).hit for i in range(len(call))), call.poll(0)
"""


def run(home: Path, code: str) -> str:
    return python(home, textwrap.dedent(BEGIN) + textwrap.dedent(code))


def test_every_type_of_memory_is_saved_and_loaded(home: Path) -> None:
    code = """
        save(floats)
        for make in (
            lambda: np.empty(BYTES // 4, np.float32),
            lambda: np.empty(BYTES // 4, ">f4"),
            lambda: np.empty((BYTES // 400, 100), np.int32),
            lambda: np.empty((5, BYTES // 10), np.float16),
            lambda: np.empty(BYTES // 8, "M8[s]"),
            lambda: np.empty(BYTES // 8, "V8"),
            lambda: np.empty(BYTES // 4, [("a", "<f4")]),
            lambda: np.empty(BYTES // 16, np.complex128),
            lambda: np.empty(2 * BYTES, np.uint8)[BYTES:],
            lambda: array("d", bytes(BYTES)),
            lambda: bytearray(BYTES),
            lambda: memoryview(bytearray(BYTES)),
        ):
            into = [make() for _ in range(4)]
            call = client.load(chain, 0, into, 30)
            assert call.wait(30)
            for i, (loaded, saved) in enumerate(zip(into, floats)):
                assert call.poll(i).hit and np.asarray(loaded).tobytes() == saved.tobytes()
        leased = client.lease(chain, 1, 2, BYTES, 30)
        assert leased.wait(30) and leased.poll().lease.array().tobytes() == floats[1].tobytes()
    """
    run(home, code)


def test_memory_that_cannot_be_meant_is_refused(home: Path) -> None:
    code = """
        save(floats)
        fixed = np.empty(BYTES // 4, np.float32)
        fixed.flags.writeable = False
        strided = np.empty(BYTES // 2, np.float32)[::2]
        for bad in (
            strided, np.empty((100, BYTES // 400), np.float32).T, fixed, bytes(BYTES), memoryview(bytes(BYTES)),
            memoryview(bytearray(2 * BYTES))[::2], [0] * BYTES, "x", None, 7,
        ):
            refused(TypeError, lambda: client.load(chain, 0, [bad], 30))
        for bad in (strided, np.empty((100, BYTES // 400)).T, [0.5] * BYTES, "x", None, 7):
            refused(TypeError, lambda: client.save(chain, 0, [bad]))
        one = bytearray(BYTES)
        half, rest = memoryview(one)[: BYTES // 2 + 1], memoryview(one)[BYTES // 2 - 1 :]
        for bad in ([], [bytearray()], [bytearray(3), bytearray(4)], [one, one], [half, rest]):
            refused(ValueError, lambda: client.load(chain, 0, bad, 30))
        refused(ValueError, lambda: client.save(chain, 0, [b""]))
        refused(IndexError, lambda: client.load(chain, 3, [bytearray(3), bytearray(3)], 30))
        refused(IndexError, lambda: client.save(chain, 3, [bytes(3), bytes(3)]))
        refused(IndexError, lambda: chain[4])
    """
    run(home, code)


def test_an_id_is_itself_or_an_error(home: Path) -> None:
    code = """
        ids = [5, 0, 7, 2**31 - 1]
        for same in (
            tuple(ids), array("i", ids), array("q", ids), np.array(ids), np.array(ids, np.uint32), np.array(ids, ">i8"),
            np.array(ids[::-1])[::-1], np.repeat(ids, 2)[::2],
        ):
            assert key(same) == key(ids), same
        assert key(range(4)) == key(np.arange(4, dtype=np.int8)) == key(np.arange(4, dtype=np.uint16))
        fresh = Chain(bytes(32), chunk_tokens=1)
        for far in (2**31, 2**32 + 5, 2**63, 2**64 + 5, -1, -(2**31) - 1, -(2**32) + 5):
            refused(ValueError, lambda: fresh.extend([far]))
            if -(2**63) <= far < 2**63:
                refused(ValueError, lambda: fresh.extend(np.array([far])))
                refused(ValueError, lambda: fresh.extend(array("q", [1, far])))
        refused(ValueError, lambda: fresh.extend(np.array([2**64 - 1], np.uint64)))
        for bad in (
            [1.0], np.array([1.0]), np.array([True]), np.zeros((2, 2), int), "12", b"12", bytearray(4), ["1"], 5, None,
        ):
            refused(TypeError, lambda: fresh.extend(bad))
        assert fresh.tokens == 0, "nothing of what was refused is in it"
    """
    run(home, code)


def test_memory_stays_while_a_call_uses_it(home: Path) -> None:
    code = """
        import sys
        before = [sys.getrefcount(payload) for payload in floats]
        save(floats)
        into = [bytearray(BYTES) for _ in range(4)]
        for _ in range(50):
            call = client.load(chain, 0, into, 30)
            while not call.done:
                pass
            for buffer in into:  # Would be a BufferError while it is used.
                buffer.append(0)
                buffer.pop()
        for _ in range(50):
            client.save(chain, 0, floats)
            client.load(chain, 0, [np.empty(BYTES // 4, np.float32) for _ in range(4)], 30)
        deadline = time.monotonic() + 30
        while [sys.getrefcount(payload) for payload in floats] != before:
            # A load lets go of what ended before it. Python 3.11 by itself does so late.
            client.load(chain, 0, [np.empty(BYTES // 4, np.float32) for _ in range(4)], 30).wait(30)
            assert time.monotonic() < deadline
    """
    run(home, code)


def test_a_client_is_dropped_with_calls_open(home: Path) -> None:
    # Enough to be copying when the client goes.
    code = """
        import threading
        big = [np.zeros(4_000_000, np.uint8) for _ in range(4)]
        for _ in range(20):
            dropped = Client(settings={"ram": "64MiB"})
            saving = dropped.save(chain, 0, big)
            loading = dropped.load(chain, 0, [np.empty_like(one) for one in big], 30)
            del dropped, loading
            assert saving.wait(30)
            del saving
        with Client(settings={"ram": "64MiB"}) as ours:
            with ours.save(chain, 0, floats) as saving:
                pass
            assert saving.done
        assert ours.lookup(chain).poll().miss_reason == "unavailable", "closed"
        client.save(chain, 0, big)  # The interpreter ends with calls open, too.
        client.load(chain, 0, [np.empty_like(one) for one in big], 30)
    """
    run(home, code)


def test_objects_say_what_they_are(home: Path) -> None:
    code = """
        import terrace_kv
        save(floats)
        lookup, stats, lease = client.lookup(chain), client.stats(), client.lease(chain, 0, 1, BYTES, 30)
        assert lookup.wait(30) and stats.wait(30) and lease.wait(30)
        things = [chain, client, lookup, lookup.poll(), stats.poll(), stats.poll().tiers[0][1], lease.poll()]
        for thing in [*things, lease.poll().lease]:
            assert " object at 0x" not in repr(thing), repr(thing)
        assert "4 chunks" in repr(chain) and "1 of 1 settled" in repr(lookup) and "hit" in repr(lease.poll())
        for name in terrace_kv.__all__:
            thing = getattr(terrace_kv, name)
            assert thing.__doc__, name
            if isinstance(thing, type):
                for part, value in vars(thing).items():
                    assert part.startswith("_") or part == "hit" or value.__doc__, (name, part)
    """
    run(home, code)


def test_the_page_has_an_example_that_runs(home: Path) -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", page, re.M)]
    example = next(block for block in blocks if "import" in block)
    printed = blocks[blocks.index(example) + 1]
    assert python(home, example) == printed.lstrip("\n")


def test_the_wheel_says_its_licence_and_what_it_needs(home: Path) -> None:
    (site,) = home.glob("lib/python3*/site-packages")
    (meta,) = importlib.metadata.distributions(name="terrace-kv", path=[str(site)])
    assert meta.metadata["License-Expression"] == "Apache-2.0"
    assert any(str(file).endswith("licenses/LICENSE") for file in meta.files or [])
    assert "numpy" in (meta.requires or [])
    argv = [home / "bin/python", "-c", "import numpy"]
    assert subprocess.run(argv, check=False).returncode == 0
