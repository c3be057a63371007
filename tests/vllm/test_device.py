"""Would catch: chunks that come back to other blocks when they go through pinned rows, as with KV in a device; a row
that is used anew too early; a job that never ends. The device is a tensor, and its DMA is played: it ends late.
"""

import time
from array import array
from types import SimpleNamespace

import pytest
import torch
from terrace_kv import Chain, Client
from terrace_kv.vllm import device as ours

BLOCKS, BLOCKS_PER_CHUNK = 32, 2
PAGES = (40, 24)  # Bytes, of two layers.


class Dma:
    """What vLLM's handler does, one transfer a look."""

    def __init__(self, gpu_tensors, cpu_tensors, blocks_per_chunk, layer_refs_per_group, gpu_to_cpu, **_) -> None:
        self.device, self.host, self.out, self.per_chunk = gpu_tensors, cpu_tensors, gpu_to_cpu, blocks_per_chunk
        self.refs, self.queue = layer_refs_per_group, []

    def transfer_async(self, job: int, src, dst) -> bool:
        self.queue.append((job, src, dst))
        return True

    def get_finished(self) -> list:
        if not self.queue:
            return []
        job, src, dst = self.queue.pop(0)
        blocks, (row,) = (src, dst.block_ids) if self.out else (dst, src.block_ids)
        (group,) = [g for g, size in enumerate(blocks.group_sizes) if size]
        for at, block in enumerate(blocks.block_ids):
            for ref in self.refs[group]:
                page = self.device[ref.tensor_idx].shape[1]
                begin = (blocks.block_indices[group] % self.per_chunk + at) * page
                there = self.device[ref.tensor_idx][block]
                here = self.host[ref.tensor_idx][row][begin : begin + page]
                here.copy_(there) if self.out else there.copy_(here)
        return [SimpleNamespace(job_id=job, transfer_size=1)]


def ended(pages: ours.DevicePages, job: int) -> None:
    deadline = time.monotonic() + 30
    while job not in [done.job for done in pages.finished()]:
        assert time.monotonic() < deadline, f"job {job} did not end"


def test_saves_that_wait_for_a_row_when_the_pages_change_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "ROWS_MAX", 1)
    tensor = torch.ones((BLOCKS, PAGES[0]), dtype=torch.int8)
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=PAGES[0])],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGES[0])]],
    )
    client = Client(settings={"ram": "16MiB"})
    pages = ours.DevicePages(client, caches, [[(0, PAGES[0])]], BLOCKS_PER_CHUNK, dma=Dma, pin=False)
    chain = Chain(bytes(32), 4)
    chain.extend(array("i", range(12)))
    pages.save(1, [(chain, 0, 0)], array("i", [1, 2]), [2], [0])
    pages.save(2, [(chain, 1, 0), (chain, 2, 0)], array("i", [3, 4, 5, 6]), [4], [2])
    pages.drop_saves()  # The first has the only row.
    tensor.zero_()  # The server slept.
    ended(pages, 2)
    pages.save(3, [(chain, 1, 0)], array("i", [7, 8]), [2], [2])  # Ends when the first has left its row.
    ended(pages, 3)
    call = client.lease(chain, 2, 3, pages.payload_bytes(0), 30)
    assert call.wait(30)
    assert call.poll(0).lease is None
    assert client.close(30)


@pytest.mark.parametrize("rows", [1, 64])
def test_chunks_go_through_rows_and_come_back(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "ROWS_MAX", rows)
    tensors = [torch.zeros((BLOCKS, page), dtype=torch.int8) for page in PAGES]
    refs = [[SimpleNamespace(tensor_idx=0, page_size_bytes=40)], [SimpleNamespace(tensor_idx=1, page_size_bytes=24)]]
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=t, page_size_bytes=t.shape[1]) for t in tensors], group_data_refs=refs
    )
    client = Client(settings={"ram": "16MiB"})
    pages = ours.DevicePages(client, caches, [[(0, 40)], [(1, 24)]], BLOCKS_PER_CHUNK, dma=Dma, pin=False)
    chains = [Chain(bytes([group]) * 32, 4, kv_group=group) for group in range(2)]
    for chain in chains:
        chain.extend(array("i", range(24)))
    for tensor in tensors:
        tensor.random_(-100, 100, generator=torch.Generator().manual_seed(1))
    wanted = [tensor.clone() for tensor in tensors]

    # Six blocks (three chunks) of group 0, two (one chunk, the third) of group 1.
    chunks = [(chains[0], 0, 0), (chains[0], 1, 0), (chains[0], 2, 0), (chains[1], 2, 1)]
    pages.save(1, chunks, array("i", [3, 9, 5, 1, 30, 2, 7, 8]), [6, 2], [0, 4])
    pages.wait([1])
    for tensor in tensors:
        tensor.zero_()  # vLLM has its blocks back.
    ended(pages, 1)

    def lease(chain: Chain, first: int, last: int, group: int) -> list:
        call = client.lease(chain, first, last, pages.payload_bytes(group), 30)
        assert call.wait(30)
        return [call.poll(i).lease for i in range(len(call))]

    deadline = time.monotonic() + 30
    while None in (leases := [*lease(chains[0], 0, 3, 0), *lease(chains[1], 2, 3, 1)]):
        assert time.monotonic() < deadline
        pages.finished()
    # All but the first block of the first chunk, to other blocks.
    pages.load(2, leases, array("i", [11, 12, 13, 14, 15, 20, 21]), [5, 2], [1, 4])
    ended(pages, 2)
    for group, pairs in (
        (0, zip([9, 5, 1, 30, 2], [11, 12, 13, 14, 15], strict=False)),
        (1, zip([7, 8], [20, 21], strict=False)),
    ):
        for source, target in pairs:
            assert tensors[group][target].equal(wanted[group][source])
    assert sum(int(t.any(dim=1).sum()) for t in tensors) == 7, "other blocks were touched"
    assert client.close(30)
