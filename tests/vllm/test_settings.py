"""Would catch: two servers that compute different KV and take each other's, because of an option that nobody thought
of; two servers with the same settings that don't share, because of a path, a port or a number that was drawn.
"""

import dataclasses
import json
import os
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
import torch
from conftest import MODEL
from terrace_kv.vllm import settings
from terrace_kv.vllm.engine import VERSION, environment_variables
from terrace_kv.vllm.model import Weights, code_of, model_of, of_module, resolved
from vllm.config import MultiModalConfig, VllmConfig, set_current_vllm_config
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import EngineArgs

KNOWN = Path(__file__).with_name("known_settings.txt")


def configurations() -> dict[str, type]:
    """Those of which a field can be part of the space, by name."""
    found: dict[str, type] = {}
    todo: list[type] = [VllmConfig]
    while todo:
        config = todo.pop()
        if config.__name__ in found:
            continue
        found[config.__name__] = config
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.name not in settings.left_out(config.__name__):
                hint = hints[field.name]
                for part in (hint, *typing.get_args(hint)):
                    if isinstance(part, type) and dataclasses.is_dataclass(part) and part.__module__.startswith("vllm"):
                        todo.append(part)
    return found


def taken_in() -> dict[str, list[str]]:
    found = {
        name: sorted({field.name for field in dataclasses.fields(config)} - settings.left_out(name))
        for name, config in sorted(configurations().items())
    }
    found["variables"] = sorted(name for name in environment_variables if not settings.is_left_out(name))
    return found


def test_every_setting_was_looked_at() -> None:
    """A new one is part of the space at once: what is asked for here is a look, so that servers that differ in nothing
    but a port go on to share."""
    lines = [line.partition(": ") for line in KNOWN.read_text().splitlines() if not line.startswith("#")]
    known = {name: names.split() for name, _, names in lines}
    found = taken_in()
    for name in sorted({*known, *found}):
        new, gone = (set(a.get(name, ())) - set(b.get(name, ())) for a, b in ((found, known), (known, found)))
        assert not new and not gone, (
            f"vLLM {VERSION}'s {name}: new {sorted(new)}, gone {sorted(gone)}. Name what can't change KV in LEFT_OUT "
            f"of terrace_kv/vllm/settings.py, with the reason, and write the rest to {KNOWN.name}"
        )


def test_what_is_left_out_exists() -> None:
    for name, config in configurations().items():
        gone = settings.left_out(name) - {field.name for field in dataclasses.fields(config)}
        assert not gone, f"vLLM's {name} has no {sorted(gone)} any more"
    assert not settings.LEFT_OUT.keys() - configurations().keys() - {"LoRAConfig"}
    variables = {name for names in settings.VARIABLES_LEFT_OUT.values() for name in names.split()}
    assert not variables - environment_variables.keys(), "vLLM has no such variables any more"


def digests(**options: object) -> tuple[str, str]:
    config = EngineArgs(**{"model": str(MODEL), "dtype": "float32", **options}).create_engine_config()
    found = settings.settings_of(config, environment_variables)
    return settings.digest_of(found), settings.digest_of(settings.adapter_settings(config))


@pytest.fixture(scope="module")
def plain() -> tuple[str, str]:
    return digests()


DIFFERENT = {
    "type": {"dtype": "bfloat16"},
    "type of KV": {"kv_cache_dtype": "fp8_e5m2"},
    "non-causal attention": {"attention_config": {"use_non_causal": True}},
    "configuration of the model": {"hf_overrides": {"rms_norm_eps": 1e-3}},
    "rope": {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}}},
    "files that are loaded": {"ignore_patterns": ["*-of-2.safetensors"]},
    "another implementation": {"model_impl": "transformers"},
    "compiled": {"compilation_config": {"mode": 0}},
    "kinds of layers kept apart": {"additional_config": {"of": "a platform"}},
}
EQUAL = {
    "room": {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 77},
    "batches": {"max_num_seqs": 3, "max_num_batched_tokens": 4096, "enable_chunked_prefill": True},
    "names": {"served_model_name": "another", "seed": 7},
    "length": {"max_model_len": 777},
    "hashes": {"prefix_caching_hash_algo": "xxhash"},
    "watching": {"disable_log_stats": True, "show_hidden_metrics_for_version": None},
    "answers": {"max_logprobs": 3, "generation_config": "vllm"},
    "loading": {"use_tqdm_on_load": False, "download_dir": "/nowhere"},
    "places": {"master_port": 30303, "distributed_executor_backend": "mp"},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_changes_kv_keeps_servers_apart(name: str, plain: tuple[str, str]) -> None:
    assert digests(**DIFFERENT[name])[0] != plain[0]


@pytest.mark.parametrize("name", EQUAL)
def test_what_can_not_change_kv_does_not_matter(name: str, plain: tuple[str, str]) -> None:
    assert digests(**EQUAL[name])[0] == plain[0]


def test_adapters_are_put_around_the_same_layers() -> None:
    eager = {"enforce_eager": True}  # On CPUs vLLM compiles nothing for adapters.
    few, all_of_them = ({**eager, "enable_lora": True, "lora_target_modules": names} for names in (["q_proj"], None))
    assert digests(**eager)[0] == digests(**few)[0] == digests(**all_of_them)[0], "requests without one do not care"
    assert digests(**few)[1] != digests(**all_of_them)[1]
    assert digests(**few, max_loras=3, max_cpu_loras=5)[1] == digests(**few)[1]


def test_settings_of_quantization_and_video_count() -> None:
    def of(config: object) -> str:
        return settings.digest_of(settings.named(config))

    args = QuantizationConfigArgs
    assert len({of(args()), of(args(ignore=["lm_head"])), of(args(targets={"re:a": "mxfp8"}))}) == 3
    multi = MultiModalConfig
    assert len({of(multi()), of(multi(video_pruning_rate=0.5)), of(multi(mm_processor_kwargs={"a": 1}))}) == 3
    assert of(multi(limit_per_prompt={"image": 1})) == of(multi())

    class Quantization:  # As vLLM's are: objects with attributes.
        def __init__(self, ignored: list[str]) -> None:
            self.ignored = ignored

    assert of(Quantization(["a"])) == of(Quantization(["a"])) != of(Quantization(["b"]))


def test_variables_count_when_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs(model=str(MODEL), dtype="float32").create_engine_config()

    def digest() -> str:
        return settings.digest_of(settings.settings_of(config, environment_variables))

    before = digest()
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_CACHE_ROOT", "VLLM_HOST_IP", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "DEBUG")
    monkeypatch.setenv("VLLM_PORT", "4711")
    assert digest() == before
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert digest() != before


def test_a_value_without_a_name_is_refused() -> None:
    same = {"b": {2, 1}, "a": [torch.float16, 1.5, Path]}
    assert settings.named(same) == settings.named(dict(reversed(same.items())))
    for value in (lambda: 1, torch.zeros(3), object()):
        with pytest.raises(settings.Unnamed, match="x"):
            settings.named({"x": value})
    loop: dict = {}
    loop["again"] = loop
    assert json.dumps(settings.named(loop))


def test_the_length_picks_factors_of_rope() -> None:
    from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
        Phi3LongRoPEScaledRotaryEmbedding as Rope,
    )

    def rope(length: int) -> str:
        config = EngineArgs(model=str(MODEL), dtype="float32", max_model_len=length).create_engine_config()
        with set_current_vllm_config(config):
            layer = Rope(32, 32, 8192, 512, 1e4, True, torch.float32, [1.0] * 16, [2.0] * 16)
        return settings.digest_of(of_module(layer))

    assert rope(256) == rope(512) != rope(1024) == rope(2048)


class Layer(torch.nn.Module):
    def __init__(self, **switches: object) -> None:
        super().__init__()
        vars(self).update(switches)
        self.inner = torch.nn.Linear(200, 200)

    def load_weights(self, weights: object) -> None: ...


def test_switches_of_layers_count_and_sizes_do_not() -> None:
    def of(**switches: object) -> str:
        return settings.digest_of(resolved(Layer(**switches)))

    assert of() != of(attn_temperature_tuning=True)
    assert of(scale=0.5) != of(scale=0.25)
    assert of() == of(tp_rank=3, path="/a/folder", compiled=True, _private=1.0)


def test_code_that_comes_with_a_model_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(folder: str, text: str) -> list[str]:
        file = tmp_path / folder / "modeling.py"
        file.parent.mkdir()
        file.write_text(text)
        name = f"transformers_modules.{folder}.modeling"
        module = types.ModuleType(name)
        module.__file__ = str(file)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, module)
            return code_of(torch.nn.Linear(2, 2))

    assert of("a", "x = 1") == of("b", "x = 1") != of("c", "x = 2")


def test_the_loaded_model_is_found() -> None:
    model = torch.nn.Sequential(Layer(), Layer())
    layers = {"a": model[0].inner, "b": model[1].inner}
    config = types.SimpleNamespace(compilation_config=types.SimpleNamespace(static_forward_context=layers))
    assert model_of(config) is model
    config.compilation_config.static_forward_context = {}
    assert model_of(config) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_that_change_are_noticed(kind: torch.dtype) -> None:
    model = Layer()
    model.inner.weight.data = torch.rand(200, 200).to(kind).t()
    model.repeated = torch.nn.Parameter(torch.zeros(3, 1).expand(3, 5), requires_grad=False)
    weights = Weights(model)
    assert not weights.changed()
    model.inner.weight.data[:100] = torch.ones(100, 200).to(kind)
    assert weights.changed()
    weights.renew()
    assert not weights.changed()
    model.inner.bias.data = model.inner.bias.data.clone()
    assert weights.changed(), "another tensor in its place"
    weights.renew()
    model.load_weights([])
    assert weights.changed()


def test_another_process_agrees_whatever_its_folders(tmp_path: Path, other_model: Path) -> None:
    program = (
        "import sys, json; from vllm.engine.arg_utils import EngineArgs;"
        "from terrace_kv.vllm import settings; from terrace_kv.vllm.engine import environment_variables;"
        "config = EngineArgs(model=sys.argv[1], dtype='float32').create_engine_config();"
        "print(json.dumps(settings.settings_of(config, environment_variables), sort_keys=True))"
    )
    different = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT")}
    different |= {"PYTHONHASHSEED": "7", "VLLM_HOST_IP": "127.0.0.7", "TZ": "UTC+7", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(other_model)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **different},
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    config = EngineArgs(model=str(MODEL), dtype="float32").create_engine_config()
    ours = settings.settings_of(config, environment_variables)
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(json.dumps(ours))
