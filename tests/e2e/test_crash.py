"""Would catch: a frame that was committed and is not found after kill -9, a damaged one that is served, an answer that
differs because of what a killed instance left, a directory or a lock that a dead process keeps from the next one.

TERRACE_KILL_ROUNDS says how often (5).
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conftest import COMPLETIONS, Launcher, document, frames_of, prompt
from terrace_stack import Answer, Server, wait_until, whole_chunks

CHUNK = 64  # Many frames of a short prompt.
ROUNDS = int(os.environ.get("TERRACE_KILL_ROUNDS", "5"))
ASKING = 3


def chunks_found(server: Server, body: dict) -> int:
    by_tier = server.lookup(body)["cached_by_tier"]
    return (by_tier["disk"] + by_tier["shared_fs"]) // CHUNK


def test_kill_under_load_again_and_again_loses_nothing_and_damages_nothing(launcher: Launcher, tmp_path: Path):
    seed = int(os.environ.get("TERRACE_KILL_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"TERRACE_KILL_SEED={seed}")
    moments = random.Random(seed)
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    disk.mkdir()
    shared.mkdir()
    flags = ("--chunk", str(CHUNK), "--shared", shared, "--disk", disk, "--disk-size", "8GiB", "--load-deadline", "60s")
    text = prompt(document("killed", 700), 4)
    cold = launcher.serve("--chunk", str(CHUNK)).stream(text, COMPLETIONS)
    chunks = whole_chunks(cold.prompt_tokens, CHUNK) // CHUNK

    def committed() -> set[str]:
        return {frame.name for directory in (disk, shared) for frame in frames_of(directory)}

    def check(answer: Answer, found: int) -> None:
        assert answer.text == cold.text
        assert answer.by_tier["disk"] + answer.by_tier["shared_fs"] == found * CHUNK

    bodies: list[dict] = []
    server = launcher.serve(*flags)
    for round_ in range(ROUNDS):
        before = len(committed())
        # Salted, so that each is computed and written, and all answers are the same.
        new = [{**text, "cache_salt": f"{round_}-{i}"} for i in range(ASKING)]
        at = moments.randrange(1, ASKING * chunks)
        with ThreadPoolExecutor(ASKING) as asking:
            answers = [asking.submit(server.stream, body, COMPLETIONS) for body in new]
            wait_until(f"{at} frames", lambda goal=before + at: len(committed()) >= goal, 60)
            server.kill()
        for answer in answers:
            if answer.exception() is None:  # Whole, or cut by the death.
                assert cold.text.startswith(answer.result().text)
                assert not answer.result().done or answer.result().text == cold.text
        bodies += new
        left = committed()

        server = launcher.serve(*flags)
        found = {body["cache_salt"]: chunks_found(server, body) for body in bodies}
        assert sum(found.values()) == len(left), f"round {round_}"
        for body in new:
            check(server.stream(body, COMPLETIONS), found[body["cache_salt"]])
        for tier in ("disk", "shared_fs"):
            assert server.metric("terrace_tier_quarantined", tier=tier) == 0, f"round {round_}"
            assert server.metric("terrace_chunk_misses_total", reason="damaged") == 0
        wait_until("the saves", lambda heir=server: heir.lookup(text)["pending_saves"] == 0, 30)
    assert server.stop() == 0
