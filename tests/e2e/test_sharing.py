"""Would catch: an instance that computes again what another has computed, that reuses KV it must not (other weights,
other salt), whose answer differs because of the cache, or whose usage numbers are not what happened; frames lost or
served damaged after kill -9.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import COMPLETIONS, Launcher, Pair, chat, document, frames_of, prompt, published
from terrace_stack import TIERS, Answer, wait_until, whole_chunks


def check_sums(answer: Answer) -> None:
    assert set(answer.by_tier) == set(TIERS)
    assert answer.cached_tokens == sum(answer.by_tier.values())
    assert answer.usage["total_tokens"] == answer.prompt_tokens + answer.usage["completion_tokens"]


def test_another_instance_loads_what_one_has_computed(pair: Pair):
    body = prompt(document("shared"))
    cold = pair.a.stream(body, COMPLETIONS)
    check_sums(cold)
    assert (cold.cached_tokens, cold.miss_reason) == (0, "not_found")
    expected = published(pair.a, pair.b, body)

    found = pair.b.lookup(body)
    other = pair.b.stream(body, COMPLETIONS)
    check_sums(other)
    assert other.by_tier["shared_fs"] == other.cached_tokens == expected == whole_chunks(cold.prompt_tokens)
    assert found["cached_by_tier"] == other.by_tier
    assert other.text == cold.text
    assert other.prompt_tokens == cold.prompt_tokens
    assert other.miss_reason == "none"


def test_a_repeat_hits_engine_memory(pair: Pair):
    body = prompt(document("repeat"))
    cold = pair.a.stream(body, COMPLETIONS)
    found = pair.a.lookup(body)
    again = pair.a.stream(body, COMPLETIONS)
    check_sums(again)
    assert again.by_tier["engine"] == again.cached_tokens >= whole_chunks(cold.prompt_tokens)
    assert found["cached_by_tier"] == again.by_tier
    assert again.text == cold.text


def test_a_lookup_changes_nothing_and_counts_like_the_request(pair: Pair):
    body = chat(document("lookup"))
    for _ in range(3):
        found = pair.a.lookup(body)
        assert sum(found["cached_by_tier"].values()) == 0
    answer = pair.a.stream(body)
    assert found["prompt_tokens"] == answer.prompt_tokens
    assert answer.cached_tokens == 0


def test_a_longer_prompt_reuses_the_chunks_it_shares(pair: Pair):
    text = document("grows", 3600)
    short, long = prompt(text[:2400], 4), prompt(text)
    pair.a.stream(short, COMPLETIONS)
    expected = published(pair.a, pair.b, short)
    longer = pair.b.stream(long, COMPLETIONS)
    check_sums(longer)
    assert longer.cached_tokens == expected
    assert longer.miss_reason == "not_found"
    assert longer.text == pair.b.stream({**long, "cache_salt": "cold"}, COMPLETIONS).text


def test_a_conversation_goes_on_at_another_instance(pair: Pair):
    first = chat(document("conversation"))
    answer = pair.a.stream(first)
    second = {
        **first,
        "messages": [
            *first["messages"],
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": "Why?"},
        ],
    }
    expected = published(pair.a, pair.b, first)
    there = pair.b.stream(second)
    check_sums(there)
    assert there.by_tier["shared_fs"] >= expected
    assert there.text == pair.a.stream({**second, "cache_salt": "cold"}).text


def test_restarted_instances_find_what_was_published(launcher: Launcher, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    body = prompt(document("restart"))
    first = launcher.serve("--shared", shared)
    cold = first.stream(body, COMPLETIONS)
    assert first.stop() == 0  # An orderly end writes what is pending.

    second = launcher.serve("--shared", shared)
    found = second.lookup(body)
    warm = second.stream(body, COMPLETIONS)
    check_sums(warm)
    assert warm.by_tier["shared_fs"] == warm.cached_tokens == whole_chunks(cold.prompt_tokens)
    assert found["cached_by_tier"] == warm.by_tier
    assert warm.text == cold.text


def test_an_absent_a_null_and_an_empty_salt_are_one_and_any_other_is_another(pair: Pair):
    body = prompt(document("salts"))
    cold = pair.a.stream(body, COMPLETIONS)
    expected = published(pair.a, pair.b, body)
    for salt in (None, ""):
        assert pair.b.lookup({**body, "cache_salt": salt})["cached_by_tier"]["shared_fs"] == expected, salt
    for salt in ("0", "tenant", " "):
        assert sum(pair.b.lookup({**body, "cache_salt": salt})["cached_by_tier"].values()) == 0, salt
    other = pair.b.stream({**body, "cache_salt": "0"}, COMPLETIONS)
    assert other.cached_tokens == 0
    assert other.text == cold.text


def test_one_name_over_two_weight_files_never_shares(launcher: Launcher, model_q4: Path, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    # The same path for both, as an operator would who replaces the file: name and path say nothing, only the bytes do.
    path = tmp_path / "model.gguf"
    body = prompt(document("weights", 1500))
    cold, texts = {}, {}
    for weights in (launcher.model, model_q4):
        shutil.copyfile(weights, path)
        server = launcher.serve("--shared", shared, model=path)
        cold[weights] = server.stream(body, COMPLETIONS)
        texts[weights] = server.stream({**body, "cache_salt": "cold"}, COMPLETIONS).text
        assert server.stop() == 0
    for weights, answer in cold.items():
        assert answer.cached_tokens == 0, weights.name
        assert answer.text == texts[weights]
    for weights in cold:
        server = launcher.serve("--shared", shared, model=weights)
        warm = server.stream(body, COMPLETIONS)
        assert warm.by_tier["shared_fs"] == whole_chunks(warm.prompt_tokens)
        assert warm.text == texts[weights]
        server.stop()


def wait_for_a_temporary(shared: Path) -> None:
    """Returns while a frame is being written, as a rule: a write takes some ms, so it asks without a pause."""
    wait_until("two frames on the shared tier", lambda: len(frames_of(shared)) >= 2, 60)
    deadline = time.monotonic() + 20
    while not os.listdir(shared / "tmp") and time.monotonic() < deadline:
        pass


def wait_for_five_frames(shared: Path) -> None:
    wait_until("five frames on the shared tier", lambda: len(frames_of(shared)) >= 5, 60)


@pytest.mark.parametrize(
    ("moment", "fault"),
    [(wait_for_a_temporary, []), (wait_for_five_frames, ["--fault", "save.delay=100ms"])],
    ids=["while_one_is_written", "while_some_wait"],
)
def test_kill_during_writes_loses_no_committed_frame(
    launcher: Launcher, tmp_path: Path, moment: Callable[[Path], None], fault: list[str]
):
    shared = tmp_path / "shared"
    shared.mkdir()
    chunk = 64  # Many frames of a short prompt.
    body = prompt(document(moment.__name__), 4)
    victim = launcher.serve("--shared", shared, "--chunk", str(chunk), *fault)
    with ThreadPoolExecutor() as asking:
        answer = asking.submit(victim.stream, body, COMPLETIONS)
        moment(shared)
        victim.kill()
        answer.exception()  # Whether it had ended by then does not matter.
    committed = len(frames_of(shared))
    assert committed >= 2

    heir = launcher.serve("--shared", shared, "--chunk", str(chunk))
    assert heir.lookup(body)["cached_by_tier"]["shared_fs"] == chunk * committed
    warm = heir.stream(body, COMPLETIONS)
    check_sums(warm)
    assert warm.by_tier["shared_fs"] == chunk * committed
    assert warm.text == heir.stream({**body, "cache_salt": "cold"}, COMPLETIONS).text
    assert heir.metric("terrace_tier_quarantined", tier="shared_fs") == 0
