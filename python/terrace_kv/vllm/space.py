"""What must be equal for two vLLM servers to share KV (docs/internals/keys.md has the fields)."""

import concurrent.futures
import hashlib
import json
import os
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import terrace_kv

from . import BEGAN
from .content import WEIGHTS, Contents
from .engine import VERSION, current_platform, get_pp_indices, init_logger

logger = init_logger("vllm.terrace")

# Weights that are hashed faster than this are known before the server takes requests, so that the first one is cached.
WEIGHTS_WAIT_S = 5.0
STATE_VERSION = 1  # Of the payload: what src/pages.h describes.
# Formats in which the weights are the files of the model's folder. Others (dummy, streams) are not cached.
LOAD_FORMATS = ("auto", "hf", "safetensors", "pt", "mistral", "fastsafetensors")
# Kinds of KV whose pages are all that a layer has. Left out are those with states besides (Mamba), or with pages that
# the scheduler can't size.
KINDS = {"FullAttentionSpec": "full", "MLAAttentionSpec": "mla", "SlidingWindowSpec": "window"}


def why_not_cached(config: Any, kv_cache_config: Any) -> str | None:
    """Why this server's KV is not cached, in a sentence; None if it is."""
    parallel = config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return f"its KV is in memory of the kind {current_platform.device_type}, and only CPUs and CUDA are supported"
    if parallel.world_size != parallel.tensor_parallel_size * parallel.pipeline_parallel_size:
        return "it splits sequences over ranks"
    if parallel.pipeline_parallel_size > 1 and len(groups) > 1:
        return "it has pipeline ranks, and layers of several kinds"
    if parallel.decode_context_parallel_size > 1:
        return "it splits sequences over ranks"
    for group in groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in KINDS:
            return f"it has layers of the kind {kind}"
        if not group.kv_cache_spec.prefix_cacheable or group.kv_cache_spec.tokens_per_state != 1:
            return f"it has layers of the kind {kind} whose pages can't be shared"
    if config.weight_transfer_config is not None:
        return "its weights are replaced while it runs"
    if config.speculative_config is not None:
        return "it decodes speculatively"
    if config.model_config.runner_type != "generate":
        return "it does not generate text"
    if str(config.load_config.load_format) not in LOAD_FORMATS:
        return f"its weights come as {config.load_config.load_format}, and have no content that could be named"
    return None


@dataclass(frozen=True)
class Shard:
    """The KV of one group of layers on one rank. It has chunks of its own, in a space of its own."""

    group: int
    rank: int  # Of all workers.
    tp_rank: int
    pp_rank: int
    chunk_tokens: int
    payload_bytes: int
    gaps: bool  # Of a sliding window only the chunks at its end are kept.


def shards_of(config: Any, kv_cache_config: Any, blocks_per_chunk: int) -> list[Shard]:
    """Group by group, rank by rank. The scheduler knows the layers of the first rank only, so those of the other
    pipeline ranks are worked out as vLLM does."""
    tp_size = config.parallel_config.tensor_parallel_size
    pp_size = config.parallel_config.pipeline_parallel_size
    shards = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        for pp_rank in range(pp_size):
            layers = len(group.layer_names)
            if pp_size > 1:
                first, last = get_pp_indices(config.model_config.hf_text_config.num_hidden_layers, pp_rank, pp_size)
                layers = last - first
            for tp_rank in range(tp_size):
                shards.append(
                    Shard(
                        group=index,
                        rank=pp_rank * tp_size + tp_rank,
                        tp_rank=tp_rank,
                        pp_rank=pp_rank,
                        chunk_tokens=spec.block_size * blocks_per_chunk,
                        payload_bytes=spec.unpadded_page_size_bytes * layers * blocks_per_chunk,
                        gaps=KINDS.get(type(spec).__name__) == "window",
                    )
                )
    return shards


def model_folder(model_config: Any) -> Path:
    if os.path.isdir(model_config.model):
        return Path(model_config.model)
    from huggingface_hub import snapshot_download  # It is there already: vLLM has loaded it.

    return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))


def kernels() -> str:
    if current_platform.is_cpu():
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return f"{current_platform.get_device_name()} {current_platform.get_device_capability()}"


class Spaces:
    """Space ids of one server: for each salt and set of adapters one a shard. Unknown until the weights' digest is
    there."""

    def __init__(self, config: Any, kv_cache_config: Any, shards: list[Shard]) -> None:
        self._contents = Contents()
        self._adapters: dict[int, bytes] = {}  # By vLLM's number, as it was when it was first met.
        self._ids: dict[tuple[str, bytes], list[bytes]] = {}
        self._complained = False
        self.shards = shards
        model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
        settings = model.hf_config.to_dict()
        for name in ("_name_or_path", "transformers_version"):  # Of the file, not of the model.
            settings.pop(name, None)
        self._fields: list[dict[str, Any]] = []  # A shard each.
        for shard in shards:
            group = kv_cache_config.kv_cache_groups[shard.group]
            spec = group.kv_cache_spec
            effective = {
                "config": settings,
                "dtype": str(model.dtype),
                "quantization": str(model.quantization),
                "cache_dtype": str(cache.cache_dtype),
                "backend": str(config.attention_config.backend),
                "sliding_window": str(getattr(spec, "sliding_window", None)),
                "layers": list(group.layer_names),
            }
            for name in ("mm_processor_kwargs", "media_io_kwargs"):  # vLLM's digests of images know a request's only.
                if value := getattr(model.multimodal_config, name, None):
                    effective[name] = value
            digest = hashlib.sha256(json.dumps(effective, sort_keys=True, default=str).encode()).hexdigest()
            dtype = str(spec.dtype).removeprefix("torch.")
            self._fields.append(
                {
                    "engine": "vllm",
                    "engine_state_version": STATE_VERSION,
                    "engine_build": f"{VERSION} {kernels()}",
                    "kv_dtype_k": dtype,
                    "kv_dtype_v": dtype,
                    "layers": len(group.layer_names),
                    "kv_heads": spec.num_kv_heads,
                    "head_size": spec.head_size,
                    "head_size_v": getattr(spec, "head_size_v", None) or spec.head_size,
                    "layout": f"vllm.pages {cache.kv_cache_layout} block {spec.block_size} chunk {shard.payload_bytes}",
                    "attention": f"{KINDS[type(spec).__name__]}, model settings {digest}",
                    "tp_size": parallel.tensor_parallel_size,
                    "tp_rank": shard.tp_rank,
                    "pp_size": parallel.pipeline_parallel_size,
                    "pp_rank": shard.pp_rank,
                    "kv_group": shard.group,
                    "chunk_tokens": shard.chunk_tokens,
                }
            )
        self._weights = self._contents.start(model_folder(model), WEIGHTS, unchanged_since=BEGAN)
        self.wait(WEIGHTS_WAIT_S)

    def wait(self, timeout_s: float) -> bool:
        """Whether the weights' digest is known by then, or known not to be."""
        return not concurrent.futures.wait([self._weights], timeout_s).not_done

    def renew(self) -> None:
        """From here on nobody can tell what the weights are: what is computed with them has a name that nobody else
        knows."""
        logger.warning(
            "Terrace: the cache was reset, as after a change of weights: what is cached from here on is for this "
            "server alone, until it is started again"
        )
        self._weights = Future()
        self._weights.set_result(os.urandom(32))
        self._ids = {}

    def adapter(self, lora: Any) -> Future[bytes]:
        """Digest of a request's adapter. Asked for each request: vLLM may read the files again at any time, so what was
        changed since it was first met has no name any more."""
        return self._contents.run(self._adapter, lora.lora_int_id, Path(lora.lora_path))

    def _adapter(self, lora_id: int, folder: Path) -> bytes:
        digest = self._contents.folder(folder, (*WEIGHTS, ".json"), None)
        if self._adapters.setdefault(lora_id, digest) != digest:
            raise ValueError(f"{folder} was changed since adapter {lora_id} was first used; load it under another id")
        return digest

    def ids(self, salt: str, adapter: Future[bytes] | None) -> list[bytes] | None:
        """One a shard. Never waits: None while a digest is not known, or if there is none."""
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
        ids = self._ids.get((salt, content))
        if ids is None:
            adapters = [(content, 1.0)] if content else []
            ids = [
                terrace_kv.space_id(weights=weights, adapters=adapters, salt=salt, **fields) for fields in self._fields
            ]
            if len(self._ids) < 4096:  # One a salt: bounded, however many there are.
                self._ids[(salt, content)] = ids
        return ids

    def stop(self) -> None:
        self._contents.stop()
