"""KV in a device's memory: vLLM's own DMA to pinned rows of host memory, and from there what is done with any pages.

A row holds one chunk, laid out as vLLM lays out a block in the host's memory, so `Pages` copies between rows and chunks
as if rows were vLLM's blocks. Jobs go through in pieces, a chunk each, as rows become free:

    load   lease -> row (Pages' thread) -> device (DMA)
    save   device (DMA; now vLLM may have its blocks back) -> row -> chunk (the client's threads)

All of this is called on the worker's thread and only moves pieces on: nothing waits but `wait`.
Not tried on a device yet: tests/vllm/test_device.py plays the DMA.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from terrace_kv import Chain, Client, Lease, Pages

from .engine import CanonicalKVCaches, GPULoadStoreSpec

ROWS_MAX = 64
ROWS_BYTES_MAX = 1 << 30
WAIT_S = 0.0005  # Between two looks at what is under way.


@dataclass
class Done:
    job: int | None  # None: what became of a chunk of a job that has ended.
    bytes: int
    seconds: float
    written: int = 0
    existed: int = 0
    declined: int = 0


@dataclass
class Job:
    job: int
    begun: float
    pieces: int  # For which vLLM's blocks are still needed.
    bytes: int = 0


@dataclass
class Piece:
    """Blocks of one chunk."""

    job: Job
    group: int
    first: int  # Index of the first of them in the chunk.
    ids: Sequence[int]  # In the device.
    lease: Lease | None = None
    chunk: tuple[Chain, int, int] | None = None
    row: int = -1


@dataclass
class Lane:
    """Pieces in one direction: those that have no row yet, those in the DMA, those that Pages has."""

    waiting: deque[Piece] = field(default_factory=deque)
    dma: dict[int, Piece] = field(default_factory=dict)
    copying: dict[int, Piece] = field(default_factory=dict)


class DevicePages:
    def __init__(
        self,
        client: Client,
        caches: CanonicalKVCaches,
        groups: list[list[tuple[int, int]]],
        blocks_per_chunk: int,
        dma: Callable[..., Any] | None = None,
        pin: bool = True,
    ) -> None:
        device = [t.tensor.view(torch.int8).view((-1, t.page_size_bytes)) for t in caches.tensors]
        chunk = sum(t.shape[1] for t in device) * blocks_per_chunk
        rows = max(1, min(ROWS_MAX, ROWS_BYTES_MAX // chunk))
        self._host = [
            torch.empty((rows, t.shape[1] * blocks_per_chunk), dtype=torch.int8, pin_memory=pin) for t in device
        ]
        if dma is None:
            from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler as dma
        self._in, self._out = (
            dma(
                gpu_tensors=list(device),
                cpu_tensors=list(self._host),
                blocks_per_chunk=blocks_per_chunk,
                layer_refs_per_group=caches.group_data_refs,
                gpu_to_cpu=gpu_to_cpu,
                host_memory_is_pinned=pin,
            )
            for gpu_to_cpu in (False, True)
        )
        where = [(t.data_ptr(), t.shape[1] // blocks_per_chunk, rows * blocks_per_chunk) for t in self._host]
        self._pages = Pages(client, where, groups, blocks_per_chunk)
        self._groups = len(groups)
        self._blocks_per_chunk = blocks_per_chunk
        self._free = list(range(rows))
        self._names = itertools.count()
        self._loads, self._saves = Lane(), Lane()
        self._finished: list[Done] = []

    def payload_bytes(self, group: int) -> int:
        return self._pages.payload_bytes(group)

    def load(
        self, job: int, leases: list[Lease], block_ids: Any, group_sizes: list[int], first_indices: list[int]
    ) -> None:
        pieces = list(self._pieces(block_ids, group_sizes, first_indices))
        begun = Job(job, time.monotonic(), len(pieces))
        for (group, first, ids), lease in zip(pieces, leases, strict=True):
            self._loads.waiting.append(Piece(begun, group, first, ids, lease=lease))
        self._move()

    def save(
        self,
        job: int,
        chunks: list[tuple[Chain, int, int]],
        block_ids: Any,
        group_sizes: list[int],
        first_indices: list[int],
    ) -> None:
        pieces = list(self._pieces(block_ids, group_sizes, first_indices))
        begun = Job(job, time.monotonic(), len(pieces))
        for (group, first, ids), chunk in zip(pieces, chunks, strict=True):
            self._saves.waiting.append(Piece(begun, group, first, ids, chunk=chunk))
        self._move()

    def finished(self) -> list[Done]:
        self._move()
        finished, self._finished = self._finished, []
        return finished

    def drop_saves(self) -> None:
        """Those whose pages were not read yet: they hold something else by now."""
        for piece in self._saves.waiting:
            self._settled(piece, 0)
        self._saves.waiting.clear()

    def wait(self, jobs: list[int]) -> None:
        """Until their blocks are not needed any more."""
        wanted = set(jobs)
        while any(piece.job.job in wanted for piece in self._blocking()):
            self._move()
            time.sleep(WAIT_S)

    def _blocking(self) -> Iterator[Piece]:
        yield from self._saves.waiting
        yield from self._saves.dma.values()
        for pieces in (self._loads.waiting, self._loads.copying.values(), self._loads.dma.values()):
            yield from pieces

    def _pieces(
        self, block_ids: Any, group_sizes: list[int], first_indices: list[int]
    ) -> Iterator[tuple[int, int, list[int]]]:
        ids, at = [int(block) for block in block_ids], 0
        for group, (size, index) in enumerate(zip(group_sizes, first_indices, strict=True)):
            end = at + size
            while at < end:
                first = index % self._blocks_per_chunk
                count = min(self._blocks_per_chunk - first, end - at)
                yield group, first, ids[at : at + count]
                at, index = at + count, index + count

    def _move(self) -> None:
        """Each piece one station on, what is nearest its end first."""
        self._moved_by_pages()
        for result in self._out.get_finished():
            piece = self._saves.dma.pop(result.job_id)
            self._settled(piece, result.transfer_size or 0)
            name = next(self._names)
            self._saves.copying[name] = piece
            self._pages.save(name, [piece.chunk], *self._in_row(piece))
        for result in self._in.get_finished():
            piece = self._loads.dma.pop(result.job_id)
            self._free.append(piece.row)
            self._settled(piece, result.transfer_size or 0)
        while self._free and self._loads.waiting:
            piece = self._loads.waiting.popleft()
            piece.row = self._free.pop()
            name = next(self._names)
            self._loads.copying[name] = piece
            self._pages.load(name, [piece.lease], *self._in_row(piece))
            piece.lease = None
        while self._free and self._saves.waiting:
            piece = self._saves.waiting.popleft()
            piece.row = self._free.pop()
            name = next(self._names)
            self._saves.dma[name] = piece
            self._out.transfer_async(name, self._in_device(piece), self._row(piece))

    def _moved_by_pages(self) -> None:
        for done in self._pages.finished():
            if piece := self._saves.copying.pop(done.job, None):
                self._free.append(piece.row)
                self._finished.append(Done(None, 0, 0.0, done.written, done.existed, done.declined))
                continue
            piece = self._loads.copying.pop(done.job)
            self._loads.dma[done.job] = piece
            self._in.transfer_async(done.job, self._row(piece), self._in_device(piece))

    def _settled(self, piece: Piece, size: int) -> None:
        """vLLM's blocks are not needed any more."""
        job = piece.job
        job.bytes += size
        job.pieces -= 1
        if job.pieces == 0:
            self._finished.append(Done(job.job, job.bytes, time.monotonic() - job.begun))

    def _only(self, group: int, value: int) -> list[int]:
        return [value if index == group else 0 for index in range(self._groups)]

    def _in_row(self, piece: Piece) -> tuple[Any, list[int], list[int]]:
        begin = piece.row * self._blocks_per_chunk + piece.first
        blocks = np.arange(begin, begin + len(piece.ids), dtype=np.int32)
        return blocks, self._only(piece.group, len(piece.ids)), self._only(piece.group, piece.first)

    def _in_device(self, piece: Piece) -> GPULoadStoreSpec:
        sizes, firsts = self._only(piece.group, len(piece.ids)), self._only(piece.group, piece.first)
        return GPULoadStoreSpec(list(piece.ids), group_sizes=sizes, block_indices=firsts)

    @staticmethod
    def _row(piece: Piece) -> Any:
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        return CPULoadStoreSpec([piece.row])
