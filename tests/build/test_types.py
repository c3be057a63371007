"""Would catch: types of the Python package that let a mistake pass, refuse what is right, or are not there at all."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BEGIN = """
from array import array
import numpy as np
from terrace_kv import Chain, Client, LoadCall

chain = Chain(bytes(32), chunk_tokens=4)
client = Client()
"""

GOOD = """
chain.extend([1, 2, 3])
chain.extend(range(9))
chain.extend((1, 2))
chain.extend(array("i", [1]))
chain.extend(np.arange(3))
chain.extend(np.zeros(3, np.uint32))
key: bytes = chain[-1]
client.save(chain, 0, [b"x", bytearray(1), memoryview(b"x"), np.zeros(3, np.float16)])
call: LoadCall = client.load(chain, 0, [np.empty((2, 3), np.float32)], 1)
client.load(chain, 0, [bytearray(3), memoryview(bytearray(3)), array("f", [0])], 1.5)
client.load(chain, 0, [np.empty(3, np.complex64), np.empty(3, "M8[s]")], timeout=1)
with Client("/run/node.sock", settings={"ram": "64MiB"}) as other, call:
    item = call.poll(0)
    if item and item.outcome == "hit" and item.lease:
        total: int = int(item.lease.array().sum())
    clean: bool = other.close()
"""

# One mistake a line.
BAD = """
chain.extend([1.5])
chain.extend("123")
chain.extend(b"123")
chain.extend(np.zeros(3, np.float32))
chain.extend(5)
chain["0"]
client.load(chain, 0, [b"123"], 1)
client.load(chain, 0, [[1, 2]], 1)
client.load(chain, 0, [None], 1)
client.load(chain, 0, bytearray(3), 1)
client.load(chain, 0, [bytearray(3)])
client.load(chain, 0, [bytearray(3)], "1")
client.save(chain, 0, ["123"])
client.save(chain, 0, [[1.5]])
client.lookup(chain).poll(0).chunks
client.lookup("chain")
client.stats().poll().tires
client.close("now")
Client(settings={"ram": 5})
Client("a", "b")
Chain("space")
Chain(bytes(32), chunk_tokens=4.0)
"""


def mypy(folder: Path, body: str) -> str:
    file = folder / "snippet.py"
    file.write_text(BEGIN + body)
    argv = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder / "cache", file]
    environment = os.environ | {"MYPYPATH": str(ROOT / "python")}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert not done.stderr, done.stderr
    return done.stdout


def test_mypy_takes_what_is_right(tmp_path: Path) -> None:
    assert mypy(tmp_path, GOOD).startswith("Success")


def test_mypy_refuses_each_mistake(tmp_path: Path) -> None:
    said = mypy(tmp_path, BAD)
    first = BEGIN.count("\n") + 1
    lines = [first + i for i, line in enumerate(BAD.splitlines()) if line]
    passed = [BAD.splitlines()[line - first] for line in lines if f"snippet.py:{line}: error" not in said]
    assert not passed, said
    assert "internal error" not in said and "import" not in said, said


def test_no_type_is_any() -> None:
    assert "Any" not in (ROOT / "python/terrace_kv/_native.pyi").read_text()
