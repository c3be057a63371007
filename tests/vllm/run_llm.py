"""One vLLM in one fresh process: reads a plan from stdin, prints what came out as the last line.

    {"model": "...", "options": {...}, "steps": [{"prompts": [...], "max_tokens": 8, "salt": null, "forget": false,
      "adapter": ["name", 1, "/folder"], "flip": "/a/file"}]}

`forget` empties vLLM's own prefix cache before the step; `flip` changes a bit of a file. A step answers with the texts,
the seconds it took, and how many tokens of its prompts came from outside (vLLM's own counter).
"""

import json
import os
import sys
import time

from bits import flip

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.metrics.reader import Counter


def counters(llm: LLM) -> dict[str, int]:
    found: dict[str, int] = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Counter):
            name = metric.name + "".join(f" {metric.labels[k]}" for k in ("outcome", "reason") if k in metric.labels)
            found[name] = found.get(name, 0) + metric.value
    return found


def main() -> None:
    plan = json.load(sys.stdin)
    llm = LLM(
        plan["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        disable_log_stats=False,
        kv_transfer_config={"kv_connector": "TerraceConnector", "kv_role": "kv_both"},
        **plan.get("options", {}),
    )
    from terrace_kv.vllm.connector import Instance  # After vLLM has begun, as with every user.

    instance = Instance.of(llm.llm_engine.vllm_config.kv_transfer_config.engine_id)
    assert instance.spaces is not None and instance.spaces.wait(300), "the weights' digest"
    answers = []
    for step in plan["steps"]:
        if step.get("forget"):
            assert llm.reset_prefix_cache()
        if step.get("flip"):
            flip(step["flip"])
        adapter = LoRARequest(*step["adapter"]) if step.get("adapter") else None
        before, begun = counters(llm), time.monotonic()
        prompts = [{"prompt": text, "cache_salt": step.get("salt")} for text in step["prompts"]]
        sampling = SamplingParams(temperature=0, max_tokens=step.get("max_tokens", 8), ignore_eos=True)
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        after = counters(llm)
        answers.append(
            {
                "texts": [output.outputs[0].text for output in outputs],
                "prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
                "seconds": time.monotonic() - begun,
                "external": after.get("vllm:external_prefix_cache_hits", 0)
                - before.get("vllm:external_prefix_cache_hits", 0),
                "counters": {name: after[name] - before.get(name, 0) for name in after if "terrace" in name},
            }
        )
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
