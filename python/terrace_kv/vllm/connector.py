"""The connector that vLLM makes twice: for its scheduler, and for the worker that has the KV.

Where vLLM has both ends in one process (the default on GPUs, with one rank) they share one store in it, and leases go
from one to the other as they are. Where the worker has a process of its own (always on CPUs) both are clients of a
node: the one that is configured, or a private one that the worker starts. What goes where and when is vLLM's
`OffloadingConnector`; names, loads and saves are ours.
"""

import atexit
import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import yaml

from terrace_kv import Chain, Client, Lease, LoadCall, Pages

from .engine import (
    VERSION,
    VERSIONS,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    KVConnectorRole,
    LoadStoreSpec,
    OffloadingConnector,
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadingWorkerMetadata,
    TransferResult,
    current_platform,
    init_logger,
    watch_calls,
)
from .manager import BYTES, CHUNKS, FRAMES, PENDING, SAVES, TIER_UP, UP, LoadSpec, Manager, SaveSpec
from .model import Weights, model_of
from .node import PrivateNode, private_socket, unbound
from .space import Facts, Shard, Spaces, facts_of, shards_of, why_not_cached

logger = init_logger("vllm.terrace")

DRAIN_S = 15.0  # For what is queued for the tiers below RAM, at the end.
# For a worker in another process to get chunks that lie in RAM and are held by the scheduler. Only a node that hangs
# from that moment on takes so long: of one that hangs the scheduler gets none to hold.
BORROW_S = 30.0
# How often weights are looked at while requests run without a pause. When none runs they are looked at with the next.
LOOK_S = 10.0
# A tier that is not there when the server starts is joined when it appears.
SETTINGS = {"allow-degraded": "true"}
UNITS = {"": 1e-3, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}  # Of settings, which the client has checked.


def seconds(text: str | None) -> float | None:
    """A setting that is a time."""
    match = re.fullmatch(r"([\d.]+)\s*([a-z]*)", text.strip().lower()) if text else None
    return float(match[1]) * UNITS[match[2]] if match else None


def is_on(text: str | None) -> bool:
    """A setting that is yes or no."""
    return text is not None and text.strip().lower() in ("true", "1", "yes", "on")


def configured_node() -> str:
    """Socket of the node that the user has named; "" without one."""
    if socket := os.environ.get("TERRACE_NODE"):
        return socket
    if not (file := os.environ.get("TERRACE_CONFIG_FILE")):
        return ""
    settings = yaml.safe_load(Path(file).read_text())
    return str(settings.get("node") or "") if isinstance(settings, dict) else ""


class Instance:
    """What both ends of one engine share in this process."""

    _all: ClassVar[dict[str, "Instance"]] = {}
    _lock = threading.Lock()

    @classmethod
    def of(cls, engine_id: str) -> "Instance":
        with cls._lock:
            return cls._all[engine_id]

    @classmethod
    def make(cls, engine_id: str, together: bool, starts_node: bool) -> "Instance":
        """`together`: scheduler and worker are in one process, and the store with them. Otherwise it is in a node."""
        with cls._lock:
            if engine_id not in cls._all:
                with unbound():
                    cls._all[engine_id] = cls(engine_id, together, starts_node)
            return cls._all[engine_id]

    def __init__(self, engine_id: str, together: bool, starts_node: bool) -> None:
        self._engine_id = engine_id
        self._users = 0
        self._node: PrivateNode | None = None
        if together or configured_node():
            self.client = Client(settings=SETTINGS)
        else:
            socket = private_socket(engine_id)
            self.client = Client(node=socket, settings=SETTINGS)
            if starts_node:
                self._node = PrivateNode(socket, self.client.setting)
        self.pages: Any = None  # Pages, or what is in their place for KV in a device.
        self.spaces: Spaces | None = None
        self.why_not: str | None = None  # Cached.
        self.shards: list[Shard] = []
        self.rank = 0
        atexit.register(self._close)  # vLLM may end without a word.

    def enter(self) -> None:
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            self._all.pop(self._engine_id, None)
        self._close()

    def _close(self) -> None:
        atexit.unregister(self._close)
        self.pages = None  # Ends its copies.
        if self.spaces:
            self.spaces.stop()
        if not self.client.close(DRAIN_S):
            logger.warning("Terrace: some chunks were not written before the end; they are computed again")
        if self._node:
            self._node.stop()


@dataclass
class Borrowing:
    """A load whose chunks are asked for: calls in the order of the chunks."""

    calls: list[LoadCall]
    blocks: GPULoadStoreSpec
    deadline: float


@dataclass
class Step:
    """What the scheduler tells workers with each step."""

    epoch: int  # Of the manager.
    look: bool  # Whether the weights are what they were.


@dataclass
class Told(OffloadingWorkerMetadata):
    """And what they tell it."""

    weights_changed: bool = False

    def aggregate(self, other: Any) -> "Told":
        both = super().aggregate(other)
        changed = self.weights_changed or other.weights_changed
        return Told(both.completed_jobs, both.transfer_stats, changed)


class Worker(OffloadingWorker):
    """Copies between vLLM's pages and chunks. A save that is not taken is done, too; a load that fails is told."""

    def __init__(self, instance: Instance, caches: CanonicalKVCaches, blocks_per_chunk: int) -> None:
        self._instance = instance
        self._shards = [shard for shard in instance.shards if shard.rank == instance.rank]  # A group each.
        self._blocks_per_chunk = blocks_per_chunk
        self._tensors = [t.tensor for t in caches.tensors]  # What `pages` copies.
        self._borrowing: dict[int, Borrowing] = {}
        self._done: list[TransferResult] = []  # Of jobs for which there was nothing to do.
        self.requests: dict[int, str] = {}  # Of load jobs.
        self.failed: set[str] = set()  # Requests.
        self.weights: Weights | None = None
        self.changed = False  # They are not those whose digest names the KV, ...
        self.tells = False  # ... which the scheduler does not know yet.
        self._epoch = 0
        self._stats = OffloadingConnectorStats()
        if instance.why_not is None:
            with unbound():
                pages = make_pages(instance.client, caches, blocks_per_chunk)
            if [pages.payload_bytes(s.group) for s in self._shards] == [s.payload_bytes for s in self._shards]:
                instance.pages = pages
            else:
                logger.warning(
                    "Terrace caches nothing of this server: vLLM's pages are not of the size that was expected"
                )

    def _mine(self, chain: Chain, spaces: list[bytes]) -> Chain:
        """The chain of this rank."""
        if len(spaces) == 1:
            return chain
        return chain.on_rank(spaces[self._instance.rank], self._shards[0].tp_rank, self._shards[0].pp_rank)

    def begin(self, step: Step) -> None:
        """Before anything of this step is saved or loaded."""
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            self.changed = self.tells = False
            if self.weights is not None:
                self.weights.renew()
            if hasattr(self._instance.pages, "drop_saves"):
                self._instance.pages.drop_saves()
        elif step.look and not self.changed and self.weights is not None and self.weights.changed():
            self.changed = self.tells = True

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, SaveSpec)
        chunks, blocks = whole_chunks(dst_spec.chunks, src_spec, self._blocks_per_chunk)
        if self._instance.pages is None or self.changed or dst_spec.epoch != self._epoch or not chunks:
            self._done.append(TransferResult(job_id, True, 0, 0.0))
            return True
        mine: dict[int, Chain] = {}  # By group. Of one request.
        for chain, _, group in chunks:
            if group not in mine:
                mine[group] = self._mine(chain, dst_spec.spaces[group])
        self._instance.pages.save(job_id, [(mine[group], index, group) for _, index, group in chunks], *blocks)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, LoadSpec)
        if self._instance.pages is None or self.changed:
            self._fail(job_id)
        elif src_spec.leases:
            self._load(job_id, src_spec.leases, dst_spec)
        else:
            calls = [
                self._instance.client.lease(
                    self._mine(row.chain, row.spaces),
                    row.first,
                    row.last,
                    self._shards[row.group].payload_bytes,
                    BORROW_S,
                )
                for row in src_spec.rows
            ]
            self._borrowing[job_id] = Borrowing(calls, dst_spec, time.monotonic() + BORROW_S)
        return True

    def _load(self, job_id: int, leases: list[Lease], blocks: GPULoadStoreSpec) -> None:
        self._instance.pages.load(
            job_id, leases, blocks.block_ids, list(blocks.group_sizes), list(blocks.block_indices)
        )

    def _fail(self, job_id: int) -> None:
        self.failed.add(self.requests[job_id])
        self._done.append(TransferResult(job_id, True, 0, 0.0))  # vLLM's own bookkeeping knows no other end.

    def _borrow(self) -> None:
        """Begins the copies whose chunks are here."""
        for job_id, borrowing in list(self._borrowing.items()):
            if not all(call.done for call in borrowing.calls) and time.monotonic() < borrowing.deadline:
                continue
            del self._borrowing[job_id]
            chunks = [call.poll(i) for call in borrowing.calls for i in range(len(call))]
            leases = [chunk.lease for chunk in chunks if chunk is not None and chunk.lease is not None]
            if len(leases) == len(chunks):
                self._load(job_id, leases, borrowing.blocks)
            else:
                self._fail(job_id)

    def get_finished(self) -> list[TransferResult]:
        pages = self._instance.pages
        if pages is not None:
            for ended in pages.finished():
                for outcome in ("written", "existed", "declined"):
                    if count := getattr(ended, outcome):
                        self._stats.increase_counter(SAVES, count, (outcome,))
                if ended.job is not None:
                    self._done.append(TransferResult(ended.job, True, ended.bytes, ended.seconds))
            self._borrow()
        done, self._done = self._done, []
        for result in done:
            self.requests.pop(result.job_id, None)
        return done

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def wait(self, job_ids: set[int]) -> None:
        if self._instance.pages is not None:
            self._instance.pages.wait(list(job_ids))

    def shutdown(self) -> None:
        self._borrowing.clear()
        self._instance.pages = None
        self._tensors = []
        self._instance.leave()


def whole_chunks(
    chunks: list[tuple[Chain, int, int]], blocks: GPULoadStoreSpec, blocks_per_chunk: int
) -> tuple[list[tuple[Chain, int, int]], tuple[Any, list[int], list[int]]]:
    """Those of which vLLM lists all blocks: the chunks, and their blocks, how many they are of each group, and the
    index of the first. Of a window vLLM also names a chunk that reaches back behind it, and leaves out the blocks that
    are gone: at the front of the first chunk. If others are left out, nobody can tell which."""
    kept, ids, sizes, firsts = [], [], [], []
    at = 0
    for group, (size, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
        named = [chunk for chunk in chunks if chunk[2] == group]
        gone = first % blocks_per_chunk
        cut = blocks_per_chunk - gone if gone else 0
        if size + gone != len(named) * blocks_per_chunk:
            named, cut = [], size
        kept += named[1:] if gone else named
        ids.append(blocks.block_ids[at + cut : at + size])
        sizes.append(size - cut)
        firsts.append(first + cut)
        at += size
    return kept, (np.concatenate(ids), sizes, firsts)


def said_by_user(option: str, argv: list[str]) -> bool:
    """On the command line, or in the file of options that it names. Of a script's `LLM(...)` nobody can tell: vLLM
    keeps what an option is, and not who said so."""
    files = [Path(file) for flag, file in pairwise(argv) if flag == "--config"]
    return any(option in text for text in (*argv, *(f.read_text(errors="replace") for f in files if f.is_file())))


def make_pages(client: Client, caches: CanonicalKVCaches, blocks_per_chunk: int) -> Any:
    groups = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in caches.group_data_refs]
    if current_platform.is_cpu():
        tensors = [t.tensor for t in caches.tensors]
        where = [(t.data_ptr(), t.stride(0) * t.element_size(), t.shape[0]) for t in tensors]
        return Pages(client, where, groups, blocks_per_chunk)
    from .device import DevicePages

    logger.warning("Terrace was not tried with KV in the memory of a device: compare answers before you rely on it")
    return DevicePages(client, caches, groups, blocks_per_chunk)


class TerraceSpec(OffloadingSpec):
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            CHUNKS: OffloadingCounterMetadata(
                documentation="Chunks that requests loaded, and the first one each did not find, with the reason.",
                labelnames=("outcome", "reason"),
            ),
            FRAMES: OffloadingGaugeMetadata(documentation="Chunks in a tier.", labelnames=("tier",)),
            BYTES: OffloadingGaugeMetadata(documentation="Bytes in a tier.", labelnames=("tier",)),
            PENDING: OffloadingGaugeMetadata(documentation="Saves queued or under way below RAM."),
            TIER_UP: OffloadingGaugeMetadata(
                documentation="1; 0 while a tier can't be reached, or takes no saves.", labelnames=("tier",)
            ),
            UP: OffloadingGaugeMetadata(documentation="1; 0 while the cache is lost: its node does not answer."),
            SAVES: OffloadingCounterMetadata(
                documentation="Chunks handed over: written, existed, or declined. Each rank counts its parts.",
                labelnames=("outcome",),
            ),
        }

    def _instance(self) -> Instance:
        return Instance.of(self.config.engine_id)

    def get_manager(self) -> OffloadingManager:
        instance = self._instance()
        instance.enter()
        return Manager(
            instance.client, instance.spaces, seconds(instance.client.setting("load-deadline")), instance.leave
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        instance = self._instance()
        instance.enter()
        return Worker(instance, kv_caches, self.blocks_per_chunk)


class TerraceConnector(OffloadingConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        is_worker = role == KVConnectorRole.WORKER
        # Workers come first, and what the first one starts ends with it.
        instance = Instance.make(
            transfer.engine_id,
            together=parallel.distributed_executor_backend == "uni",
            starts_node=is_worker and parallel.rank == 0,
        )
        self._instance = instance
        why = why_not_cached(vllm_config, kv_cache_config)
        if why and not instance.why_not:
            instance.why_not = why
            logger.warning("Terrace caches nothing of this server: %s", why)
        if not VERSION.startswith(VERSIONS):
            logger.warning("Terrace was tried with vLLM %s, and this is %s", ", ".join(VERSIONS), VERSION)

        block = max(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
        blocks_per_chunk = max(1, int(instance.client.setting("chunk") or 256) // block)
        keeps_answers = is_on(instance.client.setting("save-decode-cache"))
        transfer.kv_connector_extra_config = {
            **transfer.kv_connector_extra_config,
            "spec_name": "TerraceSpec",
            "spec_module_path": __name__,
            "blocks_per_chunk": blocks_per_chunk,
            "offload_prompt_only": not keeps_answers,
        }
        if transfer.kv_load_failure_policy == "fail":
            if said_by_user("kv_load_failure_policy", sys.argv):
                logger.warning("Terrace: kv_load_failure_policy is fail: a load that fails would fail its request")
            else:
                transfer.kv_load_failure_policy = "recompute"
        if instance.why_not is None:
            if is_worker:
                instance.rank = parallel.rank
            if not instance.shards:
                instance.shards = shards_of(vllm_config, kv_cache_config, blocks_per_chunk)
            if instance.spaces is None and not is_worker:
                instance.spaces = Spaces(vllm_config, kv_cache_config, instance.shards)
        self._config = vllm_config
        self._model = model_of(vllm_config) if is_worker and instance.why_not is None else None
        self._looked = 0.0
        super().__init__(vllm_config, role, kv_cache_config)
        if not is_worker:
            watch_calls(self)

    def get_handshake_metadata(self) -> Facts | None:
        if self._instance.why_not is not None:
            return None
        return facts_of(self._config, self._model)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self._instance.spaces is not None:
            facts = {
                ranks: told for ranks, told in metadata.items() if isinstance(told, Facts)
            }  # Not of others' beside us.
            self._instance.spaces.told(facts, has_node=bool(configured_node()))

    def called(self, method: str) -> None:
        self._manager.weights_changed(f"{method} was called in the workers, and may have replaced weights")

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        if self._model is not None:
            parallel, offload = self._config.parallel_config, self._config.offload_config
            moves = parallel.enable_eplb or offload.prefetch.offload_group_size > 0
            self._worker.weights = Weights(self._model, samples=not moves)

    @property
    def _manager(self) -> Manager:
        manager = self.scheduler.manager
        assert isinstance(manager, Manager)
        return manager

    @property
    def _worker(self) -> Worker:
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        assert isinstance(worker, Worker)
        return worker

    def on_new_request(self, request: Any) -> None:
        self._manager.track(request)
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._manager.pace.step_begins(scheduler_output.total_num_scheduled_tokens, time.monotonic())
        meta = super().build_connector_meta(scheduler_output)
        now, running = time.monotonic(), scheduler_output.scheduled_cached_reqs.req_ids
        # Whoever replaces weights from within the process, between steps, does so while nothing runs.
        look = not running and bool(scheduler_output.scheduled_new_reqs or meta.load_jobs)
        if look or now - self._looked > LOOK_S:
            look, self._looked = True, now
        meta.terrace = Step(self._manager.epoch, look)
        return meta

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.begin(kv_connector_metadata.terrace)
        super().handle_preemptions(kv_connector_metadata)

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        if self.connector_worker is None or (meta is None and not self._worker.tells):
            return meta
        changed, self._worker.tells = self._worker.tells, False
        return Told(meta.completed_jobs, meta.transfer_stats, changed) if meta else Told(weights_changed=changed)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        worker = self._worker
        for job_id, job in self._connector_metadata.load_jobs.items():
            worker.requests[job_id] = job.req_id
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._worker.failed
        self._worker.failed = set()
        return results

    def get_kv_connector_stats(self) -> Any:
        if self.connector_scheduler is None:
            return self._worker.take_stats()
        # Asked of the scheduler's end once for each step, as soon as it has ended, also if there was nothing to report.
        self._manager.pace.step_ends(time.monotonic())
        return super().get_kv_connector_stats()

    def update_connector_output(self, connector_output: Any) -> None:
        for req_id in connector_output.failed_recving or ():
            self._manager.give_up(req_id)
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, Told) and told.weights_changed:
            self._manager.weights_changed("the weights in the workers are not those that were loaded")
        super().update_connector_output(connector_output)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        # In the process of the API, where no connector was made.
        vllm_config.kv_transfer_config.kv_connector_extra_config.update(
            {"spec_name": "TerraceSpec", "spec_module_path": __name__}
        )
        return super().build_prom_metrics(vllm_config, *args, **kwargs)
