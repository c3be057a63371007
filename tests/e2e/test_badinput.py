"""Would catch: bad input at the start, or storage that is not as it should be, ending in a crash, a stack trace, a
silent default or failed requests instead of one clear line that says what to do.
"""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import COMPLETIONS, MODEL_NAME, Launcher, document, prompt
from terrace_stack import HOST, free_port, terrace_binary, wait_until, whole_chunks


def refuse(*arguments: str | Path, model: Path | None = None) -> str:
    """Runs `terrace serve`, which must end with code 2 and one line; the line."""
    command = [
        terrace_binary(),
        "serve",
        *(["--model", model] if model else []),
        "--served-name",
        MODEL_NAME,
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("time=")]  # Log lines may come before it.
    assert len(lines) == 1, done.stderr
    return lines[0]


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 3, 100, 1 << 20, 100 << 20])
def test_a_truncated_model_is_one_line(model_f16: Path, tmp_path: Path, size: int):
    path = tmp_path / "cut.gguf"
    with open(model_f16, "rb") as file:
        path.write_bytes(file.read(size))
    assert str(path) in refuse("--port", str(free_port()), model=path)


def test_a_text_file_for_a_model_is_one_line(tmp_path: Path):
    path = tmp_path / "notes.gguf"
    path.write_text("These are notes, not weights.\n" * 1000)
    line = refuse("--port", str(free_port()), model=path)
    assert str(path) in line and "GGUF" in line


def test_a_missing_model_or_a_directory_is_one_line(tmp_path: Path):
    assert str(tmp_path / "none.gguf") in refuse("--port", str(free_port()), model=tmp_path / "none.gguf")
    assert str(tmp_path) in refuse("--port", str(free_port()), model=tmp_path)
    assert "--model" in refuse("--port", str(free_port()))


# --- the shared directory ---------------------------------------------------------------------------------------------


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "read-only"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "terrace-test", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_shared_directory_that_is_missing_is_refused_with_the_remedy(model_f16: Path, tmp_path: Path):
    line = refuse("--port", str(free_port()), "--shared", tmp_path / "none", model=model_f16)
    assert str(tmp_path / "none") in line
    assert "--allow-degraded" in line


def test_a_file_for_a_shared_directory_is_refused(model_f16: Path, tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("")
    line = refuse("--port", str(free_port()), "--shared", path, model=model_f16)
    assert str(path) in line and "directory" in line


def test_a_read_only_shared_directory_is_refused(model_f16: Path, read_only: Path):
    line = refuse("--port", str(free_port()), "--shared", read_only, model=model_f16)
    assert str(read_only) in line
    assert "write" in line.lower() or "read-only" in line.lower()


def test_allow_degraded_serves_without_the_directory_and_joins_when_it_appears(launcher: Launcher, tmp_path: Path):
    shared = tmp_path / "late"
    server = launcher.serve("--shared", shared, "--allow-degraded", ready=False).wait_healthy()
    body = prompt(document("late", 1500), 8)
    health = server.health()
    assert health["status"] == "degraded"
    assert "shared_fs" in health["why"] and str(shared) in health["why"]
    cold = server.stream(body, COMPLETIONS)
    assert cold.text and cold.cached_tokens == 0

    shared.mkdir()
    wait_until("the server to join the directory", lambda: server.health() == {"status": "ok"}, 30)
    second = prompt(document("after", 1500), 8)
    answer = server.stream(second, COMPLETIONS)
    assert server.stop() == 0
    heir = launcher.serve("--shared", shared)
    assert heir.lookup(second)["cached_by_tier"]["shared_fs"] == whole_chunks(answer.prompt_tokens)


def test_a_tier_that_fails_every_load_costs_no_request(launcher: Launcher, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    body = prompt(document("faulty", 1500))
    writer = launcher.serve("--shared", shared)
    cold = writer.stream(body, COMPLETIONS)
    assert writer.stop() == 0
    server = launcher.serve("--shared", shared, "--fault", "load.error=1")
    for salt in (None, "other", None):
        answer = server.stream({**body, "cache_salt": salt}, COMPLETIONS)
        assert answer.text == cold.text
        assert answer.by_tier["shared_fs"] == 0
    assert server.metric("terrace_chunk_misses_total", reason="unavailable") >= 1


# --- flags and files --------------------------------------------------------------------------------------------------


def test_a_taken_port_is_said(model_f16: Path):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in refuse("--host", HOST, "--port", port, model=model_f16)


def test_an_unknown_flag_names_the_nearest(model_f16: Path):
    line = refuse("--shraed", "/tmp", model=model_f16)
    assert "--shraed" in line and "--shared" in line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--ram", "5 apples"], "ram"),
        (["--ram", "-1"], "ram"),
        (["--ram", "0"], "--ram 0 is no room"),
        (["--disk", "/tmp", "--disk-size", "0"], "--disk-size 0 is no room"),
        (["--kv-type", "f17"], "kv-type"),
        (["--strict=flase"], "strict"),
        (["--chunk", "100"], "chunk"),
        (["--shared-size", "10GiB"], "shared-size"),
        (["--s3-bucket", "b", "--shared-free-min", "1GiB"], "shared-free-min"),
        (["--shared", "/tmp", "--shared-size", "1MiB"], "shared-size"),
        (["--shared", "/tmp", "--shared-ttl", "5s"], "shared-ttl"),
        (["--fault", "load.eror=1"], "load.error"),
        (["--ctx"], "ctx"),
    ],
)
def test_a_bad_value_names_its_option(model_f16: Path, flags: list[str], named: str):
    assert named in refuse(*flags, model=model_f16)


# A chunk of this model is larger. In silence nothing would be kept.
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--ram", "1MiB"], "--ram"),
        (["--disk-size", "1MiB", "--disk"], "--disk-size"),
        (["--shared-free-min", "1000TiB", "--shared"], "--shared-free-min"),
    ],
)
def test_a_cap_below_one_chunk_is_refused(model_f16: Path, tmp_path: Path, flags: list[str], named: str):
    line = refuse(*flags, *([tmp_path] if len(flags) == 3 else []), "--ctx", "2048", model=model_f16)
    assert line.startswith(f"terrace serve: {named} ")
    assert "one chunk" in line


def test_an_unknown_key_in_the_file_gives_line_and_nearest(model_f16: Path, tmp_path: Path):
    path = tmp_path / "serve.yaml"
    path.write_text("# comment\nram: 1GiB\nshraed: /tmp\n")
    line = refuse("--config", path, model=model_f16)
    assert f"{path}:3" in line
    assert "shraed" in line and '"shared"' in line


def test_an_unreadable_file_is_said(model_f16: Path, tmp_path: Path):
    assert str(tmp_path / "none.yaml") in refuse("--config", tmp_path / "none.yaml", model=model_f16)


def test_an_unknown_verb_names_the_nearest():
    done = subprocess.run([terrace_binary(), "sevre"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert '"serve"' in done.stderr


def test_more_ram_than_the_machine_has_is_cut_and_said(launcher: Launcher):
    server = launcher.serve("--ram", "100TiB")
    body = prompt(document("ram", 1500), 4)
    cold = server.stream(body, COMPLETIONS)
    assert server.stream(body, COMPLETIONS).text == cold.text
    assert 0 < server.metric("terrace_tier_bytes_max", tier="ram") < 100 << 40
    assert any("ram" in line and "level=warn" in line for line in server.log.read_text().splitlines())
