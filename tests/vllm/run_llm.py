"""Real vLLMs in one fresh process, one after the other (importing vLLM takes longer than starting it): reads a plan
from stdin, prints what came out as the last line.

    {"engines": [{"model": "...", "options": {...}, "environment": {...}, "steps": [{"prompts": [...], "max_tokens": 8,
      "salt": null, "forget": false, "adapter": ["name", 1, "/folder"], "flip": "/a/file", "trace": "/a/log",
      "do": [["call", "method", {}], ["call_unseen", "method", {}], ["write"], ["load", "/folder"], ["reset"]]}]}]}

A prompt is a text or a list of tokens. `forget` empties vLLM's own prefix cache before the step; `flip` changes a bit
of a file; `do` does what trainers do, before the prefix cache is emptied: calls a method of the workers as users do,
or past the engine; writes to a tensor of the model; gives its loader other files; resets the connector's cache, too.
`trace` writes what the scheduler's thread asks of the kernel. A step answers with the texts, the seconds it
took, how many tokens of its prompts came from outside and how often a request was preempted (vLLM's own counters), how
long each call of the connector by the scheduler took, and how many steps have begun, for the connector, and not ended.
"""

import gc
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from bits import flip
from watch import traced, watch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.v1.metrics.reader import Counter


def counters(llm: LLM) -> dict[str, int]:
    found: dict[str, int] = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Counter):
            name = metric.name + "".join(f" {metric.labels[k]}" for k in ("outcome", "reason") if k in metric.labels)
            found[name] = found.get(name, 0) + metric.value
    return found


def do(llm: LLM, action: str, *arguments: object) -> None:
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    if action == "call":
        llm.collective_rpc(arguments[0], kwargs=arguments[1])
    elif action == "call_unseen":
        executor.collective_rpc(arguments[0], kwargs=arguments[1])
    elif action == "reset":
        assert llm.llm_engine.reset_prefix_cache(reset_connector=True)
    else:
        model = executor.driver_worker.worker.model_runner.model
        if action == "write":
            dict(model.named_parameters())["model.layers.0.input_layernorm.weight"].data[::2].mul_(3)
        else:
            weights = load_file(Path(arguments[0]) / "model.safetensors")
            # On a CPU those of linear layers are packed away when they are loaded.
            weights = {name: weight for name, weight in weights.items() if "norm" in name}
            weights["model.layers.0.input_layernorm.weight"][::2] *= 3
            model.load_weights(list(weights.items()))


def run(plan: dict) -> list[dict]:
    os.environ.update(plan.get("environment", {}))
    llm = LLM(
        plan["model"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        **{
            "max_model_len": 2048,
            "kv_transfer_config": {"kv_connector": "TerraceConnector", "kv_role": "kv_both"},
            **plan.get("options", {}),
        },
    )
    transfer = llm.llm_engine.vllm_config.kv_transfer_config
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    pace = None
    if transfer.kv_connector == "TerraceConnector":
        from terrace_kv.vllm.connector import Instance  # After vLLM has begun, as with every user.

        spaces = Instance.of(transfer.engine_id).spaces
        assert spaces is None or spaces.wait(300), "the weights' digest"
        pace = connector.scheduler.manager.pace
    seconds = watch(connector)
    answers = []
    for step in plan["steps"]:
        for action in step.get("do", ()):
            do(llm, *action)
        if step.get("forget"):
            assert llm.reset_prefix_cache()
        if step.get("flip"):
            flip(step["flip"])
        adapter = LoRARequest(*step["adapter"]) if step.get("adapter") else None
        before, begun = counters(llm), time.monotonic()
        seconds.clear()
        prompts = [
            {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": step.get("salt")}
            for prompt in step["prompts"]
        ]
        sampling = SamplingParams(temperature=0, max_tokens=step.get("max_tokens", 8), ignore_eos=True)
        with traced(Path(step["trace"])) if step.get("trace") else nullcontext():
            outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        took, after = time.monotonic() - begun, counters(llm)
        answers.append(
            {
                "texts": [output.outputs[0].text for output in outputs],
                "prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
                "seconds": took,
                "external": after.get("vllm:external_prefix_cache_hits", 0)
                - before.get("vllm:external_prefix_cache_hits", 0),
                "preemptions": after["vllm:num_preemptions"] - before["vllm:num_preemptions"],
                "open_steps": len(pace._begun) if pace else 0,
                "counters": {name: after[name] - before.get(name, 0) for name in after if "terrace" in name},
                "calls": list(seconds),
            }
        )
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return answers


def main() -> None:
    answers = [run(plan) for plan in json.load(sys.stdin)["engines"]]
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
