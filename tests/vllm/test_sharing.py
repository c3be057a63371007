"""Would catch: a vLLM that does not find what another process left; that finds what is not for it (another model,
another salt); answers that the cache changes; and names that hang on vLLM's seed, hash or folder.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from bits import flip
from conftest import MODEL, Runner
from safetensors.torch import save_file

CHUNK = 64  # Two of vLLM's blocks: prompts of three chunks are short, and prefill is what these tests take time for.
BLOCK = 32
OPTIONS = {"block_size": BLOCK}
SEA = "The keeper of the lighthouse wrote down what the sea had brought: rope, two barrels, and a letter. "


def prompt(name: str, sentences: int = 8) -> str:
    return f"Log of {name}. " + "".join(f"Day {day}. {SEA}" for day in range(sentences)) + "The letter said:"


def whole(tokens: int) -> int:
    return (tokens - 1) // CHUNK * CHUNK


@pytest.fixture(scope="module")
def cold(runner: Runner) -> dict:
    """The first server: computes two prompts, then meets its own RAM."""
    share = runner.share()
    plan = {
        "options": OPTIONS,
        "steps": [
            {"prompts": [prompt("Ann")]},
            {"prompts": [prompt("Ben")]},
            {"prompts": [prompt("Ann")], "forget": True},
            {"prompts": [prompt("Ann")], "forget": True, "salt": "other"},
            {"prompts": [prompt("Ann"), prompt("Ben")], "forget": True},
        ],
    }
    return {"share": share, "answers": runner.run(plan, TERRACE_SHARED=str(share))}


def test_a_server_finds_in_ram_what_its_own_memory_forgot(cold: dict) -> None:
    ann, ben, again, salted, both = cold["answers"]
    tokens = whole(ann["prompt_tokens"][0])
    assert tokens >= 3 * CHUNK
    assert ann["external"] == 0 and ben["external"] == 0
    assert again["external"] == tokens
    assert again["texts"] == ann["texts"]
    assert salted["external"] == 0, "another salt shares nothing"
    assert salted["texts"] == ann["texts"]
    assert both["external"] == tokens + whole(ben["prompt_tokens"][0])
    assert both["texts"] == ann["texts"] + ben["texts"]


def test_another_process_folder_seed_and_hash_find_the_same(cold: dict, runner: Runner, other_model: Path) -> None:
    plan = {
        "model": str(other_model),
        "options": {**OPTIONS, "prefix_caching_hash_algo": "xxhash"},
        "steps": [{"prompts": [prompt("Ann")]}, {"prompts": [prompt("Cid")]}, {"prompts": [prompt("Ben")]}],
    }
    ann, cid, ben = runner.run(plan, TERRACE_SHARED=str(cold["share"]), PYTHONHASHSEED="7")
    assert ann["external"] == whole(ann["prompt_tokens"][0])
    assert ann["texts"] == cold["answers"][0]["texts"]
    assert cid["external"] == 0
    assert ben["external"] == whole(ben["prompt_tokens"][0])
    assert ben["texts"] == cold["answers"][1]["texts"]


def test_one_byte_changed_in_the_last_tensor_shares_nothing(cold: dict, runner: Runner, tmp_path: Path) -> None:
    model = tmp_path / "smol"
    shutil.copytree(MODEL, model)
    flip(str(model / "model.safetensors"))
    steps = [{"prompts": [prompt("Ann")]}, {"prompts": [prompt("Ann")], "forget": True}]
    plan = {"model": str(model), "options": OPTIONS, "steps": steps}
    first, again = runner.run(plan, TERRACE_SHARED=str(cold["share"]))
    assert first["external"] == 0
    assert again["external"] == whole(again["prompt_tokens"][0]), "and it caches its own"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """LoRA on the queries of all layers, large enough to change the answer."""
    folder = tmp_path / "adapter"
    folder.mkdir()
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


def test_an_adapter_is_known_by_its_bytes(runner: Runner, adapter: Path) -> None:
    def step(**more: object) -> dict:
        return {"prompts": [prompt("Ann")], "forget": True, **more}

    changed = str(adapter / "adapter_model.safetensors")
    plan = {
        "options": {**OPTIONS, "enable_lora": True, "max_lora_rank": 8},
        "steps": [
            step(),
            step(adapter=["tune", 1, str(adapter)]),
            step(adapter=["tune", 1, str(adapter)]),
            step(adapter=["tune", 2, str(adapter)], flip=changed),
            step(),
        ],
    }
    plain, tuned, again, other, plain_again = runner.run(plan, TERRACE_SHARED=str(runner.share("adapters")))
    assert plain["external"] == 0
    assert tuned["external"] == 0, "the adapter's KV is not the model's"
    assert again["external"] == whole(again["prompt_tokens"][0])
    assert again["texts"] == tuned["texts"]
    assert other["external"] == 0, "same name, same path, other bytes"
    assert plain_again["external"] == whole(plain_again["prompt_tokens"][0])
    assert plain_again["texts"] == plain["texts"]
