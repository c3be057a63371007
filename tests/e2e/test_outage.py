"""Would catch: storage trouble that costs a request or changes an answer, an instance that does not say that it is
degraded (why, since when), or stays so when the cause is gone; saves that hammer a full disk; books that do not add up.

TERRACE_OUTAGE_SECONDS says how long the outage under load lasts (8).
"""

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from conftest import COMPLETIONS, Launcher, document, prompt, published
from terrace_stack import TIERS, Server, wait_until, whole_chunks

CHUNK = 64
FLAGS = ("--chunk", str(CHUNK))
OUTAGE_S = float(os.environ.get("TERRACE_OUTAGE_SECONDS", "8"))
FIRST_HIT_S = 30


def degraded(server: Server, *words: str) -> bool:
    health = server.health()
    return health["status"] == "degraded" and all(word in health["why"] for word in words)


def test_an_outage_under_load_costs_no_request_and_hits_return_soon(launcher: Launcher, tmp_path: Path):
    shared, away = tmp_path / "shared", tmp_path / "away"
    shared.mkdir()
    servers = [launcher.serve(*FLAGS, "--shared", shared) for _ in range(2)]
    a, b = servers
    text = prompt(document("outage", 1050), 6)
    cold = a.stream(text, COMPLETIONS)
    expected = published(a, b, text)

    ends = time.monotonic() + OUTAGE_S
    salts = count()

    def client(number: int) -> int:
        server, asked = servers[number % 2], 0
        while time.monotonic() < ends:
            body = {**text, "cache_salt": f"outage-{next(salts) // 2}"}  # Each twice: computed, and from RAM.
            assert server.stream(body, COMPLETIONS).text == cold.text
            asked += 1
        return asked

    shared.rename(away)
    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(client, number) for number in range(4)]
        for server in servers:
            wait_until("degraded", lambda server=server: degraded(server, "shared_fs", str(shared), "since"), 20)
        answered = sum(future.result() for future in asking)
    assert answered >= 4
    away.rename(shared)

    back = time.monotonic()
    wait_until("the shared tier", lambda: b.lookup(text)["cached_by_tier"]["shared_fs"] == expected, FIRST_HIT_S)
    warm = b.stream(text, COMPLETIONS)
    assert time.monotonic() - back < FIRST_HIT_S
    assert warm.by_tier["shared_fs"] == expected
    assert warm.text == cold.text
    for server in servers:
        wait_until("healthy again", lambda server=server: server.health() == {"status": "ok"}, FIRST_HIT_S)
    print(f"{answered} requests during {OUTAGE_S:.0f} s, the first hit {time.monotonic() - back:.1f} s after")

    # What is computed from now on is shared again.
    after = {**text, "cache_salt": "after"}
    a.stream(after, COMPLETIONS)
    published(a, b, after)


# D22.
def test_storage_that_never_answers_is_left_at_the_deadline_and_then_alone(launcher: Launcher, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    text = prompt(document("hangs", 700), 4)
    bodies = [{**text, "cache_salt": str(i)} for i in range(4)]
    writer = launcher.serve(*FLAGS, "--shared", shared)
    cold = [writer.stream(body, COMPLETIONS) for body in bodies]
    assert writer.stop() == 0
    server = launcher.serve(*FLAGS, "--shared", shared, "--fault", "load.hang=1", "--load-deadline", "200ms")
    for i, body in enumerate(bodies):
        answer = server.stream(body, COMPLETIONS)
        assert answer.text == cold[i].text
        assert answer.cached_tokens == 0
        if i == 0:
            assert answer.miss_reason == "timeout"
    # That it then gets no calls, but for probes, is tested where time can be had: src/tier/guard_tier_test.cc.
    assert 'event=tier_degraded tier=shared_fs what=reads why="no answer in time"' in server.log.read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "terrace-test", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_shared_directory_stops_saves_alone_and_they_resume_when_there_is_room(
    launcher: Launcher, small_disk: Path
):
    server = launcher.serve(*FLAGS, "--shared", small_disk)
    text = prompt(document("full", 1050), 4)
    cold = server.stream(text, COMPLETIONS)
    wait_until("the saves", lambda: server.lookup(text)["pending_saves"] == 0, 20)
    filler = small_disk / "filler"
    filler.write_bytes(b"")
    with open(filler, "ab", buffering=0) as file, pytest.raises(OSError, match="space"):
        while True:
            file.write(bytes(1 << 20))

    assert server.stream({**text, "cache_salt": "1"}, COMPLETIONS).text == cold.text
    wait_until("degraded", lambda: degraded(server, "shared_fs: saves stopped for", "ENOSPC"), 20)
    # Loads go on: another instance's would.
    reader = launcher.serve(*FLAGS, "--shared", small_disk)
    assert reader.stream(text, COMPLETIONS).by_tier["shared_fs"] == whole_chunks(cold.prompt_tokens, CHUNK)

    filler.unlink()
    # Nobody asks it for anything meanwhile.
    wait_until("the server to find out that there is room", lambda: server.health() == {"status": "ok"}, 60)
    anew = {**text, "cache_salt": "2"}
    assert server.stream(anew, COMPLETIONS).text == cold.text
    expected = published(server, reader, anew)
    assert reader.stream(anew, COMPLETIONS).by_tier["shared_fs"] == expected
    assert server.health() == {"status": "ok"}


def test_a_disk_that_is_not_there_at_the_start_is_joined_when_it_appears(launcher: Launcher, tmp_path: Path):
    disk = tmp_path / "disk"
    flags = (*FLAGS, "--disk", disk, "--disk-size", "1GiB")
    server = launcher.serve(*flags, "--allow-degraded", ready=False).wait_healthy()
    text = prompt(document("late disk", 1050), 4)
    assert degraded(server, "disk: ", str(disk), "since")
    cold = server.stream(text, COMPLETIONS)
    disk.mkdir()
    wait_until("the server to join the disk", lambda: server.health() == {"status": "ok"}, 30)
    assert server.stream({**text, "cache_salt": "1"}, COMPLETIONS).text == cold.text
    assert server.stop() == 0
    heir = launcher.serve(*flags)
    found = heir.lookup({**text, "cache_salt": "1"})["cached_by_tier"]["disk"]
    assert found == whole_chunks(cold.prompt_tokens, CHUNK)


def test_the_books_balance_and_an_idle_instance_changes_nothing(launcher: Launcher, tmp_path: Path):
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    disk.mkdir()
    shared.mkdir()
    flags = (*FLAGS, "--shared", shared, "--disk", disk, "--disk-size", "1GiB")
    text = prompt(document("books", 1050), 4)
    writer = launcher.serve(*flags)
    writer.stream(text, COMPLETIONS)
    assert writer.stop() == 0
    drained = [line for line in writer.log.read_text().splitlines() if "event=saves_drained" in line]
    assert all("dropped=0" in line for line in drained)

    server = launcher.serve(*flags)
    answers = [server.stream({**text, "cache_salt": salt}, COMPLETIONS) for salt in (None, None, "a", "a", "b", None)]
    for tier in TIERS:
        cached = sum(answer.by_tier[tier] for answer in answers)
        assert server.metric("terrace_engine_cached_tokens_total", tier=tier) == cached, tier
    assert server.metric("terrace_engine_prompt_tokens_total") == sum(answer.prompt_tokens for answer in answers)
    for reason in {answer.miss_reason for answer in answers} - {"none"}:
        missed = sum(answer.miss_reason == reason for answer in answers)
        assert server.metric("terrace_engine_misses_total", reason=reason) == missed, reason
    wait_until("the saves", lambda: server.lookup(text)["pending_saves"] == 0, 30)
    for tier, directory in (("disk", disk), ("shared_fs", shared)):
        frames = list((directory / "frames").rglob("*.kvf"))
        assert server.metric("terrace_tier_frames", tier=tier) == len(frames), tier
        assert server.metric("terrace_tier_bytes", tier=tier) == sum(frame.stat().st_size for frame in frames), tier

    def scrape() -> list[str]:
        return server.call("GET", "/metrics").body.decode().splitlines()

    wait_until("the last request's end", lambda: server.metric("terrace_requests_in_flight") == 0, 10)
    first = scrape()
    watched = time.monotonic() + 3  # Polls, sweeps and the scrubber have their turns.
    while time.monotonic() < watched:
        # The scrubber holds a chunk while it reads it.
        changed = [line for line in scrape() if line not in first and "terrace_tier_pinned_bytes" not in line]
        assert changed == []
