"""vLLM servers with Terrace in them: what `make demo ENGINE=vllm` and tests/vllm share. Needs `scripts/setup vllm`, and
the wheel unpacked in build/vllm-site (make wheel-site).
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path

from terrace_stack import ROOT, Answer, Server, StackError, from_setup

SITE = ROOT / "build/vllm-site"
START_TIMEOUT_S = 1800  # Importing vLLM takes a minute on two idle cores, twice, and many on busy ones.
TRANSFER = '{"kv_connector":"TerraceConnector","kv_role":"kv_both"}'


def vllm_model() -> Path:
    return from_setup("VLLM_MODEL", "scripts/setup vllm")


def vllm_environment(share: Path) -> dict[str, str]:
    if not (SITE / "terrace_kv").is_dir():
        raise StackError(f"{SITE} is not there: run make wheel-site")
    return {
        "PYTHONPATH": str(SITE),
        "PYTHONDONTWRITEBYTECODE": "",  # Compiled anew in each process, vLLM's modules take 10 s.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "TERRACE_RAM": "512MiB",
        "TERRACE_SHARED": str(share),
        "TERRACE_LOAD_DEADLINE": "120s",  # For machines that do other things: a miss would look like a fault.
    }


@dataclass(frozen=True)
class Counts:
    """What came from where, so far. `local` and `external` are vLLM's own counters, in tokens; it counts `external` of
    loads that fail, too. `loaded` and `failed` are ours: chunks that arrived, and loads that did not."""

    local: int = 0
    external: int = 0
    loaded: int = 0
    failed: int = 0

    def __sub__(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


class VllmServer(Server):
    """`vllm serve`, float32 (bfloat16 is slower on CPUs that lack it), nothing compiled."""

    def __init__(
        self,
        name: str,
        port: int,
        model: Path,
        served: str,
        log: Path,
        share: Path,
        flags: tuple[str, ...] = (),
        transfer: str = TRANSFER,
        **env: str,
    ) -> None:
        arguments: list[str | Path] = [
            "serve",
            model,
            "--served-model-name",
            served,
            "--dtype",
            "float32",
            "--max-model-len",
            "2048",
            "--enforce-eager",
            "--kv-transfer-config",
            transfer,
            *flags,
        ]
        super().__init__(name, port, arguments, log, os.environ.get("VLLM_API_KEY"), vllm_environment(share) | env)

    def program(self) -> Path:
        return from_setup("VLLM_DIR", "scripts/setup vllm", "bin/vllm")

    def wait_ready(self) -> VllmServer:
        self.wait_healthy(START_TIMEOUT_S)
        return self

    def counts(self) -> Counts:
        return Counts(
            int(self.metric("vllm:prefix_cache_hits_total")),
            int(self.metric("vllm:external_prefix_cache_hits_total")),
            int(self.metric("vllm:terrace_chunks_total", outcome="hit")),
            int(self.metric("vllm:terrace_chunks_total", outcome="failed")),
        )

    def answered(self) -> int:
        return int(self.metric("vllm:request_success_total"))

    def frames(self, model: str, tier: str = "shared_fs") -> int:
        """Chunks on a tier that this server knows of. A step makes it tell, so a short question is asked."""
        self.complete({"model": model, "prompt": "Hi", "max_tokens": 1}, "/v1/completions")
        return int(self.metric("vllm:terrace_frames", tier=tier))

    def ask(self, body: dict, path: str = "/v1/chat/completions", timeout_s: float = 1800) -> tuple[Answer, Counts]:
        """With streaming; and what it found. Nobody else asks meanwhile."""
        before = self.counts()
        answer = self.stream(body, path, timeout_s)
        return answer, self.counts() - before
