"""Would catch: a wheel that lacks a part, or needs what a user's environment does not have; a binding that names KV
other than the library does, or loses bytes, buffers or handles.

Everything runs in an environment that holds the wheel and nothing else (`make wheel` made it).
"""

import json
import os
import re
import subprocess
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(home: Path, code: str, **env: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TERRACE_", "LMCACHE_"))}
    argv = [home / "bin/python", "-c", textwrap.dedent(code)]
    done = subprocess.run(argv, env=environment | env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_is_in_the_wheel(home: Path) -> None:
    done = subprocess.run([home / "bin/terrace", "--version"], capture_output=True, text=True, check=True)
    assert "0.1.0" in done.stdout


def test_its_objects_are_those_of_the_release_build() -> None:
    """To ccache g++ is another compiler than c++, which CMake takes by itself: all would be compiled once more."""
    cache = (ROOT / "build/wheel/CMakeCache.txt").read_text()
    compilers = dict(re.findall(r"^CMAKE_(CXX|C)_COMPILER:\w+=.*/(.*)$", cache, re.MULTILINE))
    assert compilers == {"C": "cc", "CXX": "c++"}


def test_vllm_finds_the_plugin(home: Path) -> None:
    code = """
        from importlib.metadata import entry_points
        (found,) = entry_points(group="vllm.general_plugins")
        print(found.name, found.value, found.load().__name__)
    """
    assert python(home, code) == "terrace terrace_kv.vllm:register register\n"


def test_keys_are_those_of_the_specification(home: Path) -> None:
    code = """
        import json
        from array import array
        from terrace_kv import Chain, space_id
        fields = dict(
            weights=bytes(range(32)), engine="llama.cpp", engine_state_version=4, engine_build="b11434",
            kv_dtype_k="f16", kv_dtype_v="f16", layers=30, kv_heads=3, head_size=64, head_size_v=64,
            layout="llama.seq/v-transposed", attention="full", rope_type="norm", rope_freq_base=1e5,
            rope_freq_scale=1.0, rope_attn_factor=1.0, rope_beta_fast=32.0, rope_beta_slow=1.0, rope_orig_context=8192,
        )
        space = space_id(**fields)
        plain, media = Chain(space), Chain(space, media=[(200, 100, b"img-1")])
        for first in range(1, 513, 100):  # A growing sequence.
            tokens = array("i", range(first, min(first + 100, 513)))
            plain.extend(tokens)
            media.extend(tokens)
        print(json.dumps({
            "space.base": [space.hex()],
            "space.salt": [space_id(**fields, salt="tenant-7").hex()],
            "space.adapter": [space_id(**fields, adapters=[(bytes(range(32)), 0.5)]).hex()],
            "keys.1to512": [plain[i].hex() for i in range(len(plain))],
            "keys.media": [media[i].hex() for i in range(len(media))],
        }))
    """
    lines = (ROOT / "tests/data/keys.txt").read_text().splitlines()
    wanted = {name: keys for name, *keys in (line.split() for line in lines if not line.startswith("#"))}
    assert json.loads(python(home, code)) == wanted


def test_what_is_saved_is_loaded_by_another_process(home: Path, tmp_path: Path) -> None:
    begin = """
        from array import array
        from terrace_kv import Chain, Client
        client = Client(settings={"ram": "64MiB"})
        chain = Chain(bytes(32), chunk_tokens=4)
        chain.extend(array("i", range(13)))
        payloads = [bytearray([i]) * 100_000 for i in range(3)]
    """
    save = """
        call = client.save(chain, 0, payloads)
        assert call.wait(30) and [call.poll(i).outcome for i in range(3)] == ["hit"] * 3
        assert client.close(30)
    """
    load = """
        import time
        deadline = time.monotonic() + 30
        while True:  # The index of a directory is read in the background.
            look = client.lookup(chain)
            assert look.wait(30)
            if look.poll().chunks == 3:
                break
            assert time.monotonic() < deadline
        into = [bytearray(100_000) for _ in range(3)]
        call = client.load(chain, 0, into, 30)
        assert call.wait(30) and all(call.poll(i).hit for i in range(3))
        assert into == payloads
        lease = client.lease(chain, 2, 3, 100_000, 30)
        assert lease.wait(30) and lease.poll(0).lease.nbytes == 100_000
        chain.extend(array("i", range(13, 16)))
        call = client.load(chain, 3, [bytearray(100_000)], 30)
        assert call.wait(30) and (call.poll(0).outcome, call.poll(0).reason) == ("miss", "not_found")
        try:
            client.load(chain, 4, [bytearray(100_000)], 30)
        except IndexError:
            print("fine")
    """
    share = {"TERRACE_SHARED": str(tmp_path)}
    python(home, textwrap.dedent(begin) + textwrap.dedent(save), **share)
    assert python(home, textwrap.dedent(begin) + textwrap.dedent(load), **share) == "fine\n"


def test_a_setting_that_cannot_be_is_an_error_with_a_sentence(home: Path) -> None:
    code = """
        from terrace_kv import Client
        try:
            Client(settings={"ram": "plenty"})
        except ValueError as error:
            print(error)
    """
    assert "plenty" in python(home, code)
