"""Would catch (case D28): a frame that is empty, missing, damaged or another model's being served, costing the request,
giving a reason that is not so, counted as a hit, or spoiling what other requests have in engine memory.
"""

import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import COMPLETIONS, Launcher, Pair, document, frames_of, prompt, published
from terrace_stack import Answer, Server, whole_chunks

CHUNK = 64  # The smallest: a frame has 1.5 MB of this model's KV, two segments, and its prefill takes no time.
FLAGS = ("--chunk", str(CHUNK))
HEADER_BYTES = 4096
FIRST_TOKEN_AT = 128  # docs/internals/frame.md


@dataclass
class Written:
    """A shared directory with the three frames of one prompt, and another model's frames of the same text."""

    body: dict
    cold: Answer
    directory: Path  # Never changed: each test damages a copy.
    foreign: Path


def first_token(frame: Path) -> int:
    with open(frame, "rb") as file:
        return struct.unpack_from("<I", file.read(HEADER_BYTES), FIRST_TOKEN_AT)[0]


def frame_at(shared: Path, position: int) -> Path:
    """The frame of the chunk that begins at token `position`."""
    [frame] = [frame for frame in frames_of(shared) if first_token(frame) == position]
    return frame


@pytest.fixture(scope="module")
def written(session_launcher: Launcher, model_q4: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory, foreign = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("foreign")
    body = prompt(document("damage", 1050))
    servers = (
        session_launcher.serve(*FLAGS, "--shared", directory),
        session_launcher.serve(*FLAGS, "--shared", foreign, model=model_q4),
    )
    cold, other = (server.stream(body, COMPLETIONS) for server in servers)
    for server in servers:
        assert server.stop() == 0
    assert whole_chunks(cold.prompt_tokens, CHUNK) == whole_chunks(other.prompt_tokens, CHUNK) == 3 * CHUNK
    assert [len(frames_of(path)) for path in (directory, foreign)] == [3, 3]
    return Written(body, cold, directory, foreign)


@pytest.fixture(scope="module")
def pair(session_launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    shared = tmp_path_factory.mktemp("running")
    a, b = (session_launcher.serve(*FLAGS, "--shared", shared) for _ in range(2))
    return Pair(a, b, shared)


def flip(frame: Path, offset: int) -> None:
    with open(frame, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def empty(frame: Path, written: Written) -> None:
    frame.write_bytes(b"")


def remove(frame: Path, written: Written) -> None:
    frame.unlink()


def header_only(frame: Path, written: Written) -> None:
    frame.write_bytes(frame.read_bytes()[:HEADER_BYTES])


def minus_one_byte(frame: Path, written: Written) -> None:
    frame.write_bytes(frame.read_bytes()[:-1])


def flip_in_payload(frame: Path, written: Written) -> None:
    flip(frame, HEADER_BYTES + 1_000_003)


def flip_in_header(frame: Path, written: Written) -> None:
    flip(frame, 40)


def garbage(frame: Path, written: Written) -> None:
    frame.write_bytes(b"\xa5" * frame.stat().st_size)


def of_another_model(frame: Path, written: Written) -> None:
    position = first_token(frame)
    shutil.copyfile(frame_at(written.foreign, position), frame)


def of_another_chunk(frame: Path, written: Written) -> None:
    """A whole frame of the right model and size: only its name says that it is not the one."""
    shutil.copyfile(frame_at(written.directory, 2 * CHUNK), frame)


Damage = Callable[[Path, Written], None]


def check(answer: Answer, server: Server, written: Written, chunks: int, reason: str) -> None:
    assert answer.text == written.cold.text
    assert answer.by_tier["shared_fs"] == answer.cached_tokens == chunks * CHUNK
    assert answer.miss_reason == reason
    assert server.metric("terrace_engine_misses_total", reason=reason) == 1


# `found`: frames that are there under their names and wrong in themselves are set aside, each once.
@pytest.mark.parametrize(
    ("damage", "reason", "set_aside"),
    [
        (empty, "empty", 1),
        (header_only, "truncated", 1),
        (minus_one_byte, "truncated", 1),
        (flip_in_payload, "damaged", 1),
        (flip_in_header, "damaged", 1),
        (garbage, "damaged", 1),
        (of_another_model, "foreign", 1),
        (of_another_chunk, "foreign", 1),
        (remove, "not_found", 0),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_fresh_instance_computes_from_the_damaged_frame_on(
    launcher: Launcher, written: Written, tmp_path: Path, damage: Damage, reason: str, set_aside: int
):
    shared = tmp_path / "shared"
    shutil.copytree(written.directory, shared)
    damaged = frame_at(shared, CHUNK)
    damage(damaged, written)

    server = launcher.serve(*FLAGS, "--shared", shared)
    answer = server.stream(written.body, COMPLETIONS)
    check(answer, server, written, 1, reason)
    assert server.metric("terrace_tier_quarantined", tier="shared_fs") == set_aside
    assert server.health()["status"] == "ok"

    # The request wrote the chunk anew: the next instance has all three.
    assert server.stop() == 0
    heir = launcher.serve(*FLAGS, "--shared", shared)
    again = heir.stream(written.body, COMPLETIONS)
    assert again.by_tier["shared_fs"] == 3 * CHUNK
    assert again.text == written.cold.text


@pytest.fixture(scope="module")
def on_disk(session_launcher: Launcher, written: Written, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same prompt's frames on the disk of an instance of its own. Never changed."""
    directory = tmp_path_factory.mktemp("on-disk")
    server = session_launcher.serve(*FLAGS, "--disk", directory, "--disk-size", "1GiB")
    assert server.stream(written.body, COMPLETIONS).text == written.cold.text
    assert server.stop() == 0
    assert len(frames_of(directory)) == 3
    return directory


# The disk is ours alone: what its header betrays is removed before the first request.
@pytest.mark.parametrize(
    ("damage", "reason", "removed"),
    [
        (flip_in_payload, "damaged", 1),
        (empty, "not_found", 1),
        (of_another_model, "not_found", 1),
        (remove, "not_found", 0),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_damaged_frame_on_the_disk_is_removed_once_and_written_anew(
    launcher: Launcher, written: Written, on_disk: Path, tmp_path: Path, damage: Damage, reason: str, removed: int
):
    disk = tmp_path / "disk"
    shutil.copytree(on_disk, disk)
    damage(frame_at(disk, CHUNK), written)
    flags = (*FLAGS, "--disk", disk, "--disk-size", "1GiB")
    server = launcher.serve(*flags)
    answer = server.stream(written.body, COMPLETIONS)
    assert answer.text == written.cold.text
    assert answer.by_tier["disk"] == answer.cached_tokens == CHUNK
    assert answer.miss_reason == reason
    assert server.metric("terrace_tier_quarantined", tier="disk") == removed
    assert server.stop() == 0
    again = launcher.serve(*flags).stream(written.body, COMPLETIONS)
    assert again.by_tier["disk"] == 3 * CHUNK
    assert again.text == written.cold.text


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(remove, "missing"), (empty, "empty"), (flip_in_payload, "damaged"), (of_another_model, "foreign")],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_frame_spoilt_while_the_server_runs_is_a_miss_and_hurts_nothing_else(
    pair: Pair, written: Written, damage: Damage, reason: str
):
    # Salted, so that each case has frames of its own.
    body = {**written.body, "cache_salt": f"running-{reason}"}
    before = {frame: None for frame in frames_of(pair.shared)}
    pair.a.stream(body, COMPLETIONS)
    published(pair.a, pair.b, body)
    mine = [frame for frame in frames_of(pair.shared) if frame not in before]
    [damaged] = [frame for frame in mine if first_token(frame) == CHUNK]

    live = prompt(document(f"live-{reason}", 800), 8)
    cold = pair.b.stream(live, COMPLETIONS)
    assert pair.b.lookup(body)["cached_by_tier"]["shared_fs"] == 3 * CHUNK  # It has it in its index.
    damage(damaged, written)
    misses = pair.b.metric("terrace_chunk_misses_total", reason=reason)
    check(pair.b.stream(body, COMPLETIONS), pair.b, written, 1, reason)
    assert pair.b.metric("terrace_chunk_misses_total", reason=reason) == misses + 1

    # Asked again, nothing is looked for twice: it computed the chunk, and has it.
    again = pair.b.stream(body, COMPLETIONS)
    assert again.cached_tokens == 3 * CHUNK
    assert again.text == written.cold.text
    warm = pair.b.stream(live, COMPLETIONS)
    assert warm.text == cold.text
    assert warm.cached_tokens == whole_chunks(cold.prompt_tokens, CHUNK)


def test_a_damaged_first_frame_hides_the_ones_after_it(launcher: Launcher, written: Written, tmp_path: Path):
    shared = tmp_path / "shared"
    shutil.copytree(written.directory, shared)
    flip_in_payload(frame_at(shared, 0), written)
    server = launcher.serve(*FLAGS, "--shared", shared)
    check(server.stream(written.body, COMPLETIONS), server, written, 0, "damaged")


def test_a_directory_emptied_while_the_server_runs_costs_hits_only(
    launcher: Launcher, written: Written, tmp_path: Path
):
    shared = tmp_path / "shared"
    shutil.copytree(written.directory, shared)
    server = launcher.serve(*FLAGS, "--shared", shared)
    for entry in shared.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    answer = server.stream(written.body, COMPLETIONS)
    assert answer.text == written.cold.text
    assert answer.cached_tokens == 0
    # And it writes there again.
    heir = launcher.serve(*FLAGS, "--shared", shared)
    published(server, heir, written.body)
