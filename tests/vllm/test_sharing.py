"""Would catch: a vLLM that does not find what another process left; that finds what is not for it (another model,
another salt, another adapter); answers that the cache changes; names that hang on vLLM's seed, hash or folder; a
scheduler's thread that is held up.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from bits import flip
from conftest import MODEL, Runner
from safetensors.torch import save_file
from watch import not_allowed

CHUNK = 64  # Two of vLLM's blocks: prompts of three chunks are short, and prefill is what these tests take time for.
BLOCK = 32
OPTIONS = {"block_size": BLOCK}
WINDOW = 96
ANSWER = 28  # Tokens. In a small cache both prompts have room, and one answer.
SEA = "The keeper of the lighthouse wrote down what the sea had brought: rope, two barrels, and a letter. "


def prompt(name: str, sentences: int = 8) -> str:
    return f"Log of {name}. " + "".join(f"Day {day}. {SEA}" for day in range(sentences)) + "The letter said:"


def token_ids(count: int) -> list[int]:
    """The beginning of one long prompt."""
    return [1000 + (7 * i) % 4001 for i in range(count)]


def whole(tokens: int) -> int:
    return (tokens - 1) // CHUNK * CHUNK


def step(name: str = "Ann", **more: object) -> dict:
    return {"prompts": [prompt(name)], **more}


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with another byte in its last tensor."""
    folder = tmp_path_factory.mktemp("flipped") / "smol"
    shutil.copytree(MODEL, folder)
    flip(str(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRA on the queries of all layers, large enough to change the answer."""
    folder = tmp_path_factory.mktemp("adapter")
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(30):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, 576, generator=random) / 10
        tensors[f"{name}.lora_B.weight"] = torch.randn(576, 8, generator=random) / 10
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights whose layers see a window of the sequence, but one."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = tmp_path_factory.mktemp("windowed")
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        max_position_embeddings=2048,
    )
    Gemma3ForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


@pytest.fixture(scope="module")
def first(runner: Runner, flipped: Path, adapter: Path, windowed: Path) -> dict:
    """The first process: computes, meets its own RAM, and what must not be shared."""
    share = str(runner.share())
    changed = str(adapter / "adapter_model.safetensors")
    plain, small, other, lora, window, ranks = runner.run(
        {
            "options": OPTIONS,
            "steps": [
                step(),
                step("Ben"),
                step(forget=True),
                step(forget=True, salt="other"),
                {"prompts": [prompt("Ann"), prompt("Ben")], "forget": True},
                {"prompts": [prompt("Ann"), prompt("Ben")], "max_tokens": ANSWER},
            ],
        },
        {
            # For both requests, until their answers need an eighth block each.
            "options": {**OPTIONS, "num_gpu_blocks_override": 1 + 15, "max_model_len": 10 * BLOCK},
            "steps": [
                {"prompts": [prompt("Ann"), prompt("Ben")], "max_tokens": ANSWER, "salt": "small"},
                {"prompts": [prompt("Ann"), prompt("Ben")], "max_tokens": ANSWER, "forget": True},
            ],
        },
        {"model": str(flipped), "options": OPTIONS, "steps": [step(), step(forget=True)]},
        {
            "options": {**OPTIONS, "enable_lora": True, "max_lora_rank": 8},
            "steps": [
                step(),
                step(forget=True, adapter=["tune", 1, str(adapter)]),
                step(forget=True, adapter=["tune", 1, str(adapter)]),
                step(forget=True, adapter=["tune", 2, str(adapter)], flip=changed),
                step(forget=True),
            ],
        },
        {
            "model": str(windowed),
            "options": OPTIONS,
            "steps": [
                step(),
                # With the second prompt vLLM goes on from its own cache, and has only the last 3 blocks of a window.
                {"prompts": [token_ids(9 * BLOCK)]},
                {"prompts": [token_ids(12 * BLOCK)]},
                {"prompts": [token_ids(12 * BLOCK)], "forget": True},
            ],
        },
        {
            "model": str(windowed),
            "options": {**OPTIONS, "tensor_parallel_size": 2},
            "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
            "steps": [step(), step(forget=True)],
        },
        TERRACE_SHARED=share,
    )
    return {
        "share": share,
        "plain": plain,
        "small": small,
        "flipped": other,
        "adapter": lora,
        "windowed": window,
        "ranks": ranks,
    }


@pytest.fixture(scope="module")
def second(first: dict, runner: Runner, other_model: Path, windowed: Path) -> dict:
    """Another process, folder, seed, hash and home."""
    home = runner.folder / "home"
    home.mkdir()
    traces = [str(runner.folder / name) for name in ("miss.trace", "hit.trace")]
    plain, window = runner.run(
        {
            "model": str(other_model),
            "options": {**OPTIONS, "prefix_caching_hash_algo": "xxhash"},
            "steps": [step(), step("Cid", trace=traces[0]), step("Ben", trace=traces[1])],
        },
        {"model": str(windowed), "options": OPTIONS, "steps": [step(), step(forget=True)]},
        TERRACE_SHARED=first["share"],
        PYTHONHASHSEED="7",
        HOME=str(home),
        XDG_CACHE_HOME=str(home),
        VLLM_HOST_IP="127.0.0.1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    return {"plain": plain, "windowed": window, "traces": [Path(trace) for trace in traces]}


def loaded(answer: dict) -> int:
    return CHUNK * answer["counters"].get("vllm:terrace_chunks hit none", 0)


def test_a_server_finds_in_ram_what_its_own_memory_forgot(first: dict) -> None:
    ann, ben, again, salted, both, _ = first["plain"]
    tokens = whole(ann["prompt_tokens"][0])
    assert tokens >= 3 * CHUNK
    assert ann["external"] == 0 and ben["external"] == 0
    assert again["external"] == loaded(again) == tokens
    assert again["texts"] == ann["texts"]
    assert salted["external"] == 0, "another salt shares nothing"
    assert salted["texts"] == ann["texts"]
    assert both["external"] == loaded(both) == tokens + whole(ben["prompt_tokens"][0])
    assert both["texts"] == ann["texts"] + ben["texts"]


def test_requests_that_are_preempted_go_on_and_answer_the_same(first: dict) -> None:
    ample = first["plain"][5]
    computed, loads = first["small"]
    assert 7 * BLOCK - 16 < ample["prompt_tokens"][0] <= 7 * BLOCK < ample["prompt_tokens"][0] + ANSWER - 8
    assert computed["preemptions"] > 0 and ample["preemptions"] == 0
    assert loaded(loads) >= 2 * whole(ample["prompt_tokens"][0])
    assert computed["texts"] == loads["texts"] == ample["texts"]


def test_another_process_folder_seed_and_hash_find_the_same(first: dict, second: dict) -> None:
    ann, cid, ben = second["plain"]
    assert ann["open_steps"] == ben["open_steps"] == 0, "the speed of prefill is measured by steps"
    assert ann["external"] == loaded(ann) == whole(ann["prompt_tokens"][0])
    assert ann["texts"] == first["plain"][0]["texts"]
    assert cid["external"] == 0
    assert ben["external"] == loaded(ben) == whole(ben["prompt_tokens"][0])
    assert ben["texts"] == first["plain"][1]["texts"]


def test_one_byte_changed_in_the_last_tensor_shares_nothing(first: dict) -> None:
    ann, again = first["flipped"]
    assert ann["external"] == 0
    assert again["external"] == whole(again["prompt_tokens"][0]), "and it caches its own"


def test_an_adapter_is_known_by_its_bytes(first: dict) -> None:
    plain, tuned, again, other, plain_again = first["adapter"]
    assert plain["external"] == whole(plain["prompt_tokens"][0]), "the plain model is the one of before"
    assert tuned["external"] == 0, "the adapter's KV is not the model's"
    assert again["external"] == whole(again["prompt_tokens"][0])
    assert again["texts"] == tuned["texts"]
    assert other["external"] == 0, "same name, same path, other bytes"
    assert plain_again["external"] == whole(plain_again["prompt_tokens"][0])
    assert plain_again["texts"] == plain["texts"] == first["plain"][0]["texts"]


def test_a_model_with_windows_and_full_attention_finds_what_another_process_left(first: dict, second: dict) -> None:
    cold, (warm, again) = first["windowed"][0], second["windowed"]
    assert cold["external"] == 0
    for answer in (warm, again):
        assert answer["external"] == whole(cold["prompt_tokens"][0])
        assert answer["texts"] == cold["texts"]


def test_a_prompt_that_goes_on_from_vllms_own_cache_is_saved_as_far_as_its_windows_are_there(first: dict) -> None:
    _, _, longer, again = first["windowed"]
    assert longer["external"] == 0
    assert again["external"] == whole(again["prompt_tokens"][0])
    assert again["texts"] == longer["texts"]


def test_ranks_keep_their_parts_and_share_with_no_other_number_of_ranks(first: dict) -> None:
    cold, again = first["ranks"]
    assert cold["external"] == 0
    assert again["external"] == whole(cold["prompt_tokens"][0])
    assert loaded(again) > 0 and not [name for name in again["counters"] if "failed" in name]
    assert again["texts"] == cold["texts"]


def test_calls_on_the_schedulers_thread_do_no_input_or_output_and_wait_for_nothing(second: dict) -> None:
    for trace in second["traces"]:
        calls, found = not_allowed(trace)
        assert calls > 10
        assert not found, "\n".join(found[:20])
