"""What must be equal for two vLLM servers to share KV (docs/internals/keys.md has the fields)."""

import concurrent.futures
import json
import os
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import terrace_kv

from . import BEGAN
from .content import WEIGHTS, Contents
from .engine import (
    VERSION,
    KVConnectorHandshakeMetadata,
    current_platform,
    environment_variables,
    get_pp_indices,
    init_logger,
    maybe_download_from_modelscope,
)
from .model import resolved
from .settings import Unnamed, adapter_settings, digest_of, settings_of

logger = init_logger("vllm.terrace")

# Weights that are hashed faster than this are known before the server takes requests, so that the first one is cached.
WEIGHTS_WAIT_S = 5.0
# Why requests find nothing, as metrics say it.
WEIGHTS_PENDING, WEIGHTS_CHANGED = "weights_pending", "weights_changed"
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


def model_folder(model_config: Any, load_config: Any) -> Path:
    """From which vLLM has loaded the weights."""
    if os.path.isdir(model_config.model):
        return Path(model_config.model)
    if folder := maybe_download_from_modelscope(model_config.model, model_config.revision):
        return Path(folder)
    from huggingface_hub import snapshot_download  # It is there already: vLLM has loaded it.

    return Path(
        snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    )


def this_host() -> str:
    """The machine and its network, within which the sockets of private nodes have names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True)
class Facts(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler when the model is loaded: digests of its settings, and where it runs."""

    host: str
    settings: str = ""
    adapters: str = ""  # For requests with an adapter, besides.
    why_not: str = ""  # Something can't be named: what is computed is for this server alone.


def facts_of(config: Any, model: torch.nn.Module | None) -> Facts:
    try:
        if model is None:
            raise Unnamed("the loaded model is not found")
        settings, found = settings_of(config, environment_variables), resolved(model)
        adapters = [adapter_settings(config), found.pop("adapters")]
        logger.debug("Terrace: what this worker's KV depends on: %s", json.dumps([settings, found], sort_keys=True))
        return Facts(this_host(), digest_of([settings, found]), digest_of(adapters))
    except (Unnamed, OSError) as error:
        return Facts(this_host(), why_not=str(error) or type(error).__name__)


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
        self.reason = WEIGHTS_PENDING  # Why there are no ids, while there are none.
        self.shards = shards
        model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
        self._settings: list[tuple[str, str]] | None = (
            None  # Of a shard's worker; for requests with an adapter, besides.
        )
        self._fields: list[dict[str, Any]] = []  # A shard each.
        self._groups: list[tuple[str, str]] = []  # A shard each: the kind, and a digest of what a group has of its own.
        for shard in shards:
            group = kv_cache_config.kv_cache_groups[shard.group]
            spec = group.kv_cache_spec
            own = [str(getattr(spec, "sliding_window", None)), list(group.layer_names)]
            self._groups.append((KINDS[type(spec).__name__], digest_of(own)))
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
                    "tp_size": parallel.tensor_parallel_size,
                    "tp_rank": shard.tp_rank,
                    "pp_size": parallel.pipeline_parallel_size,
                    "pp_rank": shard.pp_rank,
                    "kv_group": shard.group,
                    "chunk_tokens": shard.chunk_tokens,
                }
            )
        self._weights = self._contents.model(lambda: model_folder(model, config.load_config), WEIGHTS, BEGAN)
        self.wait(WEIGHTS_WAIT_S)

    def told(self, workers: dict[tuple[int, int], Facts], has_node: bool) -> None:
        """By all workers, by their ranks in the pipeline and among tensors."""
        if any(facts.host != this_host() for facts in workers.values()) and not has_node:
            logger.warning(
                "Terrace caches nothing of this server: its workers are on several hosts, and its node is on one. "
                "Run `terrace node` on each of them and name its socket (TERRACE_NODE)"
            )
            return
        if missing := [shard for shard in self.shards if (shard.pp_rank, shard.tp_rank) not in workers]:
            logger.warning("Terrace caches nothing of this server: rank %d has not told its settings", missing[0].rank)
            return
        for why in sorted({facts.why_not for facts in workers.values() if facts.why_not}):
            logger.warning("Terrace shares nothing of this server with others: %s", why)
        alone = os.urandom(32).hex()
        of_shards = [workers[shard.pp_rank, shard.tp_rank] for shard in self.shards]
        self._settings = [(f.settings or alone, f.adapters) for f in of_shards]
        logger.info("Terrace: servers with settings %s share KV", digest_of(self._settings)[:16])

    def lose(self, why: str) -> None:
        """The weights may have been replaced, and who did so has not told us: neither is what was cached theirs, nor
        what vLLM's own cache holds."""
        if self.reason != WEIGHTS_CHANGED:
            logger.warning(
                "Terrace caches nothing from here on: %s. Reset vLLM's cache together with the connector's "
                "(reset_connector=True) to cache again, for this server alone; to share, start it again",
                why,
            )
        self.reason = WEIGHTS_CHANGED
        self._weights = Future()

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
        self.reason = WEIGHTS_PENDING
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
        if self._settings is None or not self._weights.done() or (adapter is not None and not adapter.done()):
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
            ids = []
            for fields, group, settings in zip(self._fields, self._groups, self._settings, strict=True):
                attention = f"{group[0]}, model settings {digest_of([group[1], settings[: 1 + len(adapters)]])}"
                named = {**fields, "attention": attention, "weights": weights, "adapters": adapters, "salt": salt}
                ids.append(terrace_kv.space_id(**named))
            if len(self._ids) < 4096:  # One a salt: bounded, however many there are.
                self._ids[(salt, content)] = ids
        return ids

    def stop(self) -> None:
        self._contents.stop()
