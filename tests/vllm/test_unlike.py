"""Would catch: KV of other weights, or of other settings, that a server takes for its own, or gives out as such:
weights that were replaced while it ran, by whatever way and without a word to the connector; a model whose length picks
its factors.
"""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import MODEL, Runner

CHUNK = 64
OPTIONS = {"block_size": 32, "max_model_len": 512}
TOKENS = {name: [1000 + (seed * i) % 4001 for i in range(3 * CHUNK + 8)] for name, seed in (("Ann", 7), ("Ben", 11))}
WHOLE = 3 * CHUNK


def step(name: str = "Ann", *actions: list, forget: bool = True) -> dict:
    return {"prompts": [TOKENS[name]], "do": list(actions), "forget": forget}


def saved(config: object, architecture: type, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    architecture(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


@pytest.fixture(scope="module")
def answers(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

    llama = LlamaConfig(**SHAPE, max_position_embeddings=512)
    ours, other = (
        str(saved(llama, LlamaForCausalLM, tmp_path_factory.mktemp("models") / "llama", seed)) for seed in (1, 2)
    )
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    phi = Phi3Config(
        **SHAPE,
        max_position_embeddings=1024,
        original_max_position_embeddings=256,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )
    long = str(saved(phi, Phi3ForCausalLM, tmp_path_factory.mktemp("models") / "phi", 1))
    ranks = {"distributed_executor_backend": "mp"}
    engines = {
        "called": [
            step(),
            step(),
            step("Ann", ["call", "reload_weights", {"weights_path": other}]),
            step("Ben"),
            step("Ben"),
            step("Ben", ["reset"]),
            step("Ben"),
        ],
        "looked at": [step("Ann", ["call", "get_model_inspection", {}])],
        "extended": [step(), step("Ben", ["call", "nudge", {}]), step("Ben")],
        "written": [step(), step("Ben", ["write"]), step("Ben")],
        "loaded": [step(), step("Ben", ["load", other]), step("Ben")],
        "of a rank": [step(), step("Ben", ["call_unseen", "nudge", {}]), step("Ben")],
        "after all": [step("Ben"), step()],
        "other": [step("Ben")],
        "long": [step()],
        "short": [step()],
        "as long": [step()],
    }
    of_long = {"long": 512, "short": 256, "as long": 1024}

    def engine(name: str) -> dict:
        model = {"other": other, **dict.fromkeys(of_long, long)}.get(name, ours)
        options = {**OPTIONS, "max_model_len": of_long.get(name, 512), "worker_extension_cls": "trainer.Trainer"}
        return {
            "model": model,
            "options": {**options, **(ranks if name == "of a rank" else {})},
            "steps": engines[name],
        }

    found = runner.run(*(engine(name) for name in engines), TERRACE_SHARED=str(runner.share("unlike")))
    return dict(zip(engines, found, strict=True))


def external(answers: list[dict]) -> list[int]:
    return [answer["external"] for answer in answers]


def test_weights_that_a_call_replaced_are_not_the_ones_of_before(answers: dict) -> None:
    assert external(answers["called"]) == [0, WHOLE, 0, 0, 0, 0, WHOLE], "after a reset it caches for itself"
    called = answers["called"]
    assert called[2]["texts"] != called[0]["texts"]
    assert {answer["texts"][0] for answer in called[3:]} == {answers["other"][0]["texts"][0]}


def test_a_call_that_only_looks_changes_nothing(answers: dict) -> None:
    assert external(answers["looked at"]) == [WHOLE]


@pytest.mark.parametrize("way", ["extended", "written", "loaded", "of a rank"])
def test_weights_that_were_replaced_without_a_word_are_noticed(answers: dict, way: str) -> None:
    assert external(answers[way]) == [WHOLE, 0, 0]
    assert answers[way][0]["texts"] == answers["called"][0]["texts"]


def test_what_was_computed_with_them_is_given_to_nobody(answers: dict) -> None:
    ben, ann = answers["after all"]
    assert (ben["external"], ann["external"]) == (0, WHOLE)
    assert ann["texts"] == answers["called"][0]["texts"]
    assert ben["texts"] != answers["written"][1]["texts"]
    assert answers["other"][0]["external"] == 0


def test_the_length_keeps_apart_where_it_picks_the_factors_of_rope(answers: dict) -> None:
    assert external(answers["long"]) == external(answers["short"]) == [0]
    assert external(answers["as long"]) == [WHOLE], "any other length is the same"
    assert answers["as long"][0]["texts"] == answers["long"][0]["texts"]
