"""Would catch: a program that reads its options otherwise than src/base/config.h says (whose own test has the kinds of
values): another source that wins, a mistyped name or value that passes, with an exit code of 0, a secret that is told.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from terrace_stack import terrace_binary

SECRET = "sesame-secret"


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [terrace_binary(), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], **environment},
    )


def refused(*arguments: str | Path, **environment: str) -> str:
    done = run(*arguments, **environment)
    assert done.returncode == 2, done
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1, done
    assert SECRET not in done.stderr
    return done.stderr


def dump(*arguments: str | Path, **environment: str) -> dict[str, tuple[str, str]]:
    """Name to value and origin."""
    done = run(*arguments, "--print-config", **environment)
    assert done.returncode == 0, done
    assert SECRET not in done.stdout + done.stderr
    lines = [re.fullmatch(r"(\S+) = (.*?) +\((.*)\)", line) for line in done.stdout.splitlines()]
    assert all(lines), done.stdout
    return {line[1]: (line[2], line[3]) for line in lines if line}


# D14.
@pytest.mark.parametrize("texts", [("false", "0", "no", "off", " OFF "), ("true", "1", "yes", "on", " On ")])
def test_a_bool_is_read_in_every_spelling_from_every_source(tmp_path: Path, texts: tuple[str, ...]):
    file = tmp_path / "node.yaml"
    for text in texts:
        file.write_text(f"strict: '{text}'\n")
        assert dump("serve", "--config", file)["strict"] == (texts[0], f"file {file}:1")
        assert dump("serve", TERRACE_STRICT=text)["strict"] == (texts[0], "env TERRACE_STRICT")
        assert dump("serve", f"--strict={text}")["strict"] == (texts[0], "flag --strict")


# D14, D15.
@pytest.mark.parametrize(
    ("option", "value"),
    [("strict", "flase"), ("ram", "5 apples"), ("ram", "-1"), ("ram", "0400MiB"), ("ram", "5GiB5"), ("chunk", "1e3")],
)
def test_a_value_of_another_type_is_refused_with_the_options_name(tmp_path: Path, option: str, value: str):
    file = tmp_path / "node.yaml"
    file.write_text(f"# first\n{option}: {value}\n")
    assert f"{file}:2: {option}: " in refused("serve", "--config", file)
    assert f"TERRACE_{option.upper()}: {option}: " in refused("serve", **{f"TERRACE_{option.upper()}": value})
    assert f"--{option}: " in refused("serve", f"--{option}={value}")


def test_a_number_out_of_bounds_is_refused_where_it_was_set(tmp_path: Path):
    file = tmp_path / "node.yaml"
    file.write_text("model: m.gguf\nport: 65536\n")
    assert f"{file}:2 port 65536 is not between 0 and 65535" in refused("serve", "--config", file)
    assert "TERRACE_PORT -1 is not between" in refused("serve", "--config", file, TERRACE_PORT="-1")
    assert "--port 70000 is not between" in refused("serve", "--config", file, "--port", "70000")
    file.write_text("model: m.gguf\nchunk: 100\n")
    assert f"{file}:2 chunk 100 is no multiple of 64" in refused("serve", "--config", file)
    line = refused("serve", "--model", "m.gguf", LMCACHE_CHUNK_SIZE="100")
    assert "env LMCACHE_CHUNK_SIZE chunk_size 100 is no multiple of 64" in line
    file.write_text("model: m.gguf\nshared_size: 1TiB\n")
    assert f"{file}:2 shared-size bounds --shared and --s3-bucket" in refused("serve", "--config", file)


# D16.
def test_an_unknown_name_is_refused_with_the_nearest_and_an_unreadable_file_by_its_name(tmp_path: Path):
    file = tmp_path / "node.yaml"
    file.write_text("ram: 1GiB\nshared_sizee: 1TiB\n")
    assert f'{file}:2: unknown key "shared_sizee"; did you mean "shared_size"?' in refused("serve", "--config", file)
    assert f'{file}:1: unknown key "ram"' in refused("router", "--config", file)
    assert 'did you mean "shared_size"?' in refused("serve", TERRACE_CONFIG_FILE=str(file))
    assert "did you mean --shared-size?" in refused("serve", "--shared-sizee", "1TiB")
    model = ("--model", "m.gguf")
    for path in (tmp_path, tmp_path / "none.yaml"):
        assert f"--config: cannot read {path}: " in refused("serve", "--config", path)
        line = refused("serve", *model, LMCACHE_CONFIG_FILE=str(path))
        assert f"LMCACHE_CONFIG_FILE: cannot read {path}: " in line
    lmcache = tmp_path / "lmcache.yaml"
    lmcache.write_text("max_cpu_sizee: 5\n")
    line = refused("serve", *model, LMCACHE_CONFIG_FILE=str(lmcache))
    assert f'{lmcache}:1: max_cpu_sizee is no key of LMCache 0.5.6; did you mean "max_local_cpu_size"?' in line


# D17.
def test_a_flag_wins_over_a_variable_over_the_file_over_lmcaches_over_the_default(tmp_path: Path):
    file, lmcache = tmp_path / "node.yaml", tmp_path / "lmcache.yaml"
    file.write_text(f"chunk: 64\napi_key: {SECRET}\ns3_session_token: {SECRET}\n")
    file.chmod(0o600)
    lmcache.write_text("chunk_size: 320\n")
    sources: list[tuple[list[str | Path], dict[str, str], tuple[str, str]]] = [
        ([], {}, ("256", "default")),
        ([], {"LMCACHE_CONFIG_FILE": str(lmcache)}, ("320", f"file {lmcache}:1 chunk_size")),
        ([], {"LMCACHE_CHUNK_SIZE": "448"}, ("448", "file env LMCACHE_CHUNK_SIZE chunk_size")),
        (["--config", file], {}, ("64", f"file {file}:1")),
        ([], {"TERRACE_CHUNK": "512"}, ("512", "env TERRACE_CHUNK")),
        (["--chunk", "128"], {}, ("128", "flag --chunk")),
    ]
    arguments: list[str | Path] = []
    environment: dict[str, str] = {}
    for more_arguments, more_environment, expected in sources:
        arguments += more_arguments
        environment |= more_environment
        assert dump("serve", *arguments, **environment)["chunk"] == expected
    found = dump("serve", *arguments, **environment)
    assert found["api-key"] == ("***", f"file {file}:2")
    assert found["s3-session-token"] == ("***", f"file {file}:3")
    assert dump("serve", VLLM_API_KEY=SECRET)["api-key"] == ("***", "env VLLM_API_KEY")
    assert dump("serve", f"--s3-endpoint=https://AKID:{SECRET}@h")["s3-endpoint"][0] == "https://***@h"
