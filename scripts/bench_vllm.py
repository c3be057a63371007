"""make bench WHAT=vllm: time to the first token of a prompt that another process has computed, with Terrace and, with
SKETCHES=FOLDER, with a plain connector (sketch_connector.py in that folder) and with vLLM's own fs tier
(sketch_spec.py, which gives it a worker for CPUs); and what our calls on the scheduler's thread take. Into
out/bench-vllm.json.

Every system has two processes: the first computes, the second loads. vLLM is in the process (`LLM`), float32, the model
SmolLM2-135M; pages of files are warm, as the first process has just written them.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from terrace_stack import ROOT, from_setup
from vllm_stack import vllm_environment, vllm_model

LENGTHS = {1844: 3, 5400: 2}  # Tokens, and prompts of that length.
REQUESTS, REQUEST_TOKENS = 200, 150
GOAL_P99_MS, GOAL_SHARE = 1.0, 0.01


def prompt(tokens: int, number: int) -> list[int]:
    source = random.Random(tokens * 1000 + number)
    return [source.randrange(1000, 40000) for _ in range(tokens)]


def run(engine: dict, **env: str) -> list[dict]:
    environment = {**os.environ, **vllm_environment(Path("/nowhere")), **env}
    if not env.get("TERRACE_SHARED"):
        environment.pop("TERRACE_SHARED")
    log = ROOT / "out/bench-vllm.log"
    with log.open("ab") as output:
        done = subprocess.run(
            [from_setup("VLLM_DIR", "scripts/setup vllm") / "bin/python", ROOT / "tests/vllm/run_llm.py"],
            input=json.dumps({"engines": [engine]}).encode(),
            stdout=subprocess.PIPE,
            stderr=output,
            env=environment,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {log}")
    return json.loads(done.stdout.splitlines()[-1])[0]


def systems(folder: Path) -> Iterable[tuple[str, dict, dict[str, str]]]:
    """Name, vLLM's options, environment."""
    share = {name: folder / name for name in ("terrace", "plain", "fs")}
    for path in share.values():
        path.mkdir()
    yield (
        "terrace",
        {"kv_connector": "TerraceConnector", "kv_role": "kv_both"},
        {"TERRACE_SHARED": str(share["terrace"])},
    )
    sketches = os.environ.get("SKETCHES")
    if not sketches:
        print("bench: without SKETCHES=FOLDER no other system is measured", flush=True)
        return
    env = {"PYTHONPATH": f"{ROOT / 'build/vllm-site'}:{sketches}"}
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    yield (
        "plain connector",
        {
            **common,
            "kv_connector": "SketchConnector",
            "kv_connector_module_path": "sketch_connector",
            "kv_connector_extra_config": {"root": str(share["plain"])},
        },
        env,
    )
    yield (
        "vLLM's fs tier",
        {
            **common,
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {
                "spec_name": "SketchTieringSpec",
                "spec_module_path": "sketch_spec",
                "cpu_bytes_to_use": 2 << 30,
                "secondary_tiers": [{"type": "fs", "root_dir": str(share["fs"])}],
            },
        },
        env,
    )


def ttft(folder: Path) -> list[dict]:
    prompts = [(tokens, prompt(tokens, number)) for tokens, count in LENGTHS.items() for number in range(count)]
    rows: list[dict] = []
    texts: list[str] = []
    for name, transfer, env in systems(folder):
        engine = {
            "model": str(vllm_model()),
            "options": {"max_model_len": 8192, "kv_transfer_config": transfer},
            # A short one first, and one last: saves of the last step are handed over by the next.
            "steps": [{"prompts": [[5, 6, 7]]}, *({"prompts": [p], "max_tokens": 1} for _, p in prompts)],
        }
        engine["steps"].append({"prompts": [[7, 6, 5]], "max_tokens": 8})
        phases = {phase: run(engine, TERRACE_RAM="2GiB", **env)[1:-1] for phase in ("cold", "warm")}
        found = [answer["texts"][0] for answers in phases.values() for answer in answers]
        texts = texts or found[: len(prompts)]
        if found != 2 * texts:
            raise RuntimeError(f"{name}: other tokens than cold")
        for phase, answers in phases.items():
            for tokens in LENGTHS:
                of_length = [a for (n, _), a in zip(prompts, answers, strict=True) if n == tokens]
                seconds = [a["seconds"] for a in of_length]
                rows.append(
                    {
                        "name": f"ttft {phase}, {name}",
                        "size": tokens,
                        "value": statistics.median(seconds),
                        "unit": "s",
                        "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
                        "external_tokens": [a["external"] for a in of_length],
                    }
                )
                print_row(rows[-1])
    return rows


def scheduler_thread(folder: Path) -> list[dict]:
    """Requests that hit nothing, all given at once."""
    share = folder / "nothing"
    share.mkdir()
    engine = {
        "model": str(vllm_model()),
        "steps": [{"prompts": [prompt(REQUEST_TOKENS, 10_000 + i) for i in range(REQUESTS)], "max_tokens": 1}],
    }
    (answer,) = run(engine, TERRACE_SHARED=str(share), TERRACE_CHUNK="128")
    calls = sorted(answer["calls"])
    if answer["external"]:
        raise RuntimeError("a request that was to hit nothing did")
    rows = [
        {"name": "calls on the scheduler's thread", "size": REQUESTS, "value": len(calls), "unit": "calls"},
        {
            "name": "calls on the scheduler's thread: p99",
            "size": REQUESTS,
            "value": calls[int(len(calls) * 0.99)] * 1e3,
            "unit": "ms",
            "limit": GOAL_P99_MS,
        },
        {"name": "calls on the scheduler's thread: longest", "size": REQUESTS, "value": calls[-1] * 1e3, "unit": "ms"},
        {
            "name": "calls on the scheduler's thread: their part of the time",
            "size": REQUESTS,
            "value": sum(calls) / answer["seconds"],
            "unit": "",
            "limit": GOAL_SHARE,
        },
    ]
    for row in rows:
        print_row(row)
    return rows


def print_row(row: dict) -> None:
    spread = f"  spread {row['spread']:.2f}" if "spread" in row else ""
    limit = f"  goal {row['limit']:g}" if "limit" in row else ""
    print(f"vllm: {row['name']:<58}{row['size']:>6}  {row['value']:>10.4g} {row['unit']}{limit}{spread}", flush=True)


def main() -> None:
    report, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    (ROOT / "out/bench-vllm.log").unlink(missing_ok=True)
    rows = scheduler_thread(scratch) + ttft(scratch)
    report.write_text(json.dumps({"requests": REQUESTS, "rows": rows}))


if __name__ == "__main__":
    main()
