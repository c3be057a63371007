"""What must be equal for two vLLM servers to share KV (docs/internals/keys.md has the fields)."""

import concurrent.futures
import hashlib
import json
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

import terrace_kv

from . import BEGAN
from .content import WEIGHTS, Contents
from .engine import VERSION, current_platform, init_logger

logger = init_logger("vllm.terrace")

# Weights that are hashed faster than this are known before the server takes requests, so that the first one is cached.
WEIGHTS_WAIT_S = 5.0
STATE_VERSION = 1  # Of the payload: what src/pages.h describes.
# Formats in which the weights are the files of the model's folder. Others (dummy, streams) are not cached.
LOAD_FORMATS = ("auto", "hf", "safetensors", "pt", "mistral", "fastsafetensors")


def why_not_cached(config: Any, kv_cache_config: Any) -> str | None:
    """Why this server's KV is not cached, in a sentence; None if it is."""
    parallel = config.parallel_config
    if not current_platform.is_cpu():
        return "its KV is in device memory, and only CPU servers are supported so far"
    if parallel.world_size != 1:
        return f"it has {parallel.world_size} ranks, and only one is supported so far"
    if len(kv_cache_config.kv_cache_groups) != 1:
        return f"it has {len(kv_cache_config.kv_cache_groups)} groups of KV, and only one is supported so far"
    kind = type(kv_cache_config.kv_cache_groups[0].kv_cache_spec).__name__
    if kind != "FullAttentionSpec":
        return f"its attention is of the kind {kind}, and only full attention is supported so far"
    if config.speculative_config is not None:
        return "it decodes speculatively"
    if config.model_config.runner_type != "generate":
        return "it does not generate text"
    if str(config.load_config.load_format) not in LOAD_FORMATS:
        return f"its weights come as {config.load_config.load_format}, and have no content that could be named"
    return None


def payload_bytes(kv_cache_config: Any, blocks_per_chunk: int) -> int:
    group = kv_cache_config.kv_cache_groups[0]
    return group.kv_cache_spec.page_size_bytes * len(group.layer_names) * blocks_per_chunk


def model_folder(model_config: Any) -> Path:
    if os.path.isdir(model_config.model):
        return Path(model_config.model)
    from huggingface_hub import snapshot_download  # It is there already: vLLM has loaded it.

    return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))


def kernels() -> str:
    if current_platform.is_cpu():
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return f"{current_platform.device_name} {current_platform.get_device_capability()}"


class Spaces:
    """Space ids of one server: one for each salt and set of adapters. Unknown until the weights' digest is there."""

    def __init__(self, config: Any, kv_cache_config: Any, chunk_tokens: int) -> None:
        self._contents = Contents()
        self._adapters: dict[int, bytes] = {}  # By vLLM's number, as it was when it was first met.
        self._ids: dict[tuple[str, bytes], bytes] = {}
        self._complained = False
        self.chunk_tokens = chunk_tokens
        group = kv_cache_config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        model = config.model_config
        cache = config.cache_config
        settings = model.hf_config.to_dict()
        for name in ("_name_or_path", "transformers_version"):  # Of the file, not of the model.
            settings.pop(name, None)
        effective = {
            "config": settings,
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "cache_dtype": str(cache.cache_dtype),
            "sliding_window": str(getattr(spec, "sliding_window", None)),
            "layers": list(group.layer_names),
        }
        digest = hashlib.sha256(json.dumps(effective, sort_keys=True, default=str).encode()).hexdigest()
        dtype = str(spec.dtype).removeprefix("torch.")
        self._fields: dict[str, Any] = {
            "engine": "vllm",
            "engine_state_version": STATE_VERSION,
            "engine_build": f"{VERSION} {kernels()}",
            "kv_dtype_k": dtype,
            "kv_dtype_v": dtype,
            "layers": len(group.layer_names),
            "kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "head_size_v": getattr(spec, "head_size_v", None) or spec.head_size,
            "layout": f"vllm.pages {cache.kv_cache_layout} block {spec.block_size} page {spec.page_size_bytes}",
            "attention": f"full, model settings {digest}",
            "chunk_tokens": chunk_tokens,
        }
        self._weights = self._contents.start(model_folder(model), WEIGHTS, unchanged_since=BEGAN)
        self.wait(WEIGHTS_WAIT_S)

    def wait(self, timeout_s: float) -> bool:
        """Whether the weights' digest is known by then, or known not to be."""
        return not concurrent.futures.wait([self._weights], timeout_s).not_done

    def adapter(self, lora: Any) -> Future[bytes]:
        """Digest of a request's adapter. Asked for each request: vLLM may read the files again at any time, so what was
        changed since it was first met has no name any more."""
        return self._contents.run(self._adapter, lora.lora_int_id, Path(lora.lora_path))

    def _adapter(self, lora_id: int, folder: Path) -> bytes:
        digest = self._contents.folder(folder, (*WEIGHTS, ".json"), None)
        if self._adapters.setdefault(lora_id, digest) != digest:
            raise ValueError(f"{folder} was changed since adapter {lora_id} was first used; load it under another id")
        return digest

    def id(self, salt: str, adapter: Future[bytes] | None) -> bytes | None:
        """Never waits. None while a digest is not known, or if there is none."""
        if not self._weights.done() or (adapter is not None and not adapter.done()):
            return None
        try:
            weights = self._weights.result()
            content = adapter.result() if adapter is not None else b""
        except (OSError, ValueError) as error:
            if not self._complained:
                logger.warning("Terrace does not cache: %s", error)
            self._complained = True
            return None
        space = self._ids.get((salt, content))
        if space is None:
            adapters = [(content, 1.0)] if content else []
            space = terrace_kv.space_id(weights=weights, adapters=adapters, salt=salt, **self._fields)
            if len(self._ids) < 4096:  # One a salt: bounded, however many there are.
                self._ids[(salt, content)] = space
        return space

    def stop(self) -> None:
        self._contents.stop()
