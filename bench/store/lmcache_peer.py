"""LMCache's storage backends, driven by store_bench: a request a line on stdin, an answer a line on stdout, in JSON.

{"do": "open", "backend": B, "directory": D, "bytes": N, "frames": K}  K payloads of N bytes, saved once, to be loaded
{"do": "save"}            saves K new ones, and removes them: seconds until the caller may go on ("accepted", of its own
                          thread's CPU "accepted_cpu"), until all is written and synced by us ("durable"); "cpu" is
                          this process's
{"do": "load", "warm": W, "copy": C}  loads the K: "seconds", "cpu"; page cache as it is, or dropped before; into the
                          pool, or from there on into the engine's memory
{"do": "lookup"}          asks for the K again and again: "seconds" for one key
{"do": "close"}

Backends: local_disk, local_disk_direct (the same with use_odirect), fs (the remote storage plug-in for shared mounts),
fs_native (its C++ adapter of the multi-process mode), s3 (its connector; D is s3://bucket.host:port).
"""

import asyncio
import json
import os
import select
import sys
import threading
import time
from pathlib import Path

os.environ.update(LMCACHE_LOG_LEVEL="ERROR", LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1")

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # What LMCache prints must not be taken for an answer.

import torch  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # noqa: E402
from lmcache.v1.storage_backend.remote_backend import RemoteBackend  # noqa: E402

MODEL = "Qwen/Qwen3-8B"
POLL_SECONDS = 0.0002
LOOKUPS_MIN = 2000


class Base:
    """What all backends share: source payloads, and the pool of host memory that LMCache stages in."""

    def __init__(self, directory: str, payload_bytes: int, frames: int, **options):
        mib = payload_bytes >> 20  # A layer of 256 tokens, 8 heads of 128, keys and values in bf16, is 1 MiB.
        self.directory = Path(directory)
        self.metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(mib, 2, 256, 8, 128),
        )
        pool_gib = (frames * mib * 2.5 + 256) / 1024
        self.config = LMCacheEngineConfig.from_defaults(chunk_size=256, max_local_cpu_size=pool_gib, **options)
        self.pool = LocalCPUBackend(self.config, self.metadata, dst_device="cpu")
        self.source = torch.empty(frames, payload_bytes // 2, dtype=torch.int16).random_(-30000, 30000)
        self.frames = frames
        self.next_key = 0
        self.checked = False

    def allocate(self):
        memory = self.pool.allocate(self.metadata.get_shapes(), self.metadata.get_dtypes(), MemoryFormat.KV_2LTD)
        assert memory is not None, "the pool is full"
        return memory

    def take(self) -> list:
        """The engine's part of a save: its payloads copied into the pool."""
        taken = []
        for payload in self.source:
            memory = self.allocate()
            memory.tensor.view(-1).view(torch.int16).copy_(payload)
            taken.append(memory)
        return taken

    def new_keys(self) -> list:
        first, self.next_key = self.next_key, self.next_key + self.frames
        return [self.key(first + i) for i in range(self.frames)]

    def key(self, number: int):
        return CacheEngineKey(MODEL, 1, 0, number * 7919 + 1, torch.bfloat16)

    def files(self) -> list[str]:
        return [str(path) for path in self.directory.rglob("*") if path.is_file()]

    def check(self, loaded: list) -> None:
        """Once: the benchmark is no test of LMCache, but what does not load right is no load."""
        if self.checked:
            return
        for memory, payload in zip(loaded, self.source, strict=True):
            assert torch.equal(memory.tensor.view(-1).view(torch.int16), payload), "wrong bytes"
        self.checked = True

    def remove(self, keys: list) -> None:
        for key in keys:
            self.backend.remove(key)

    # What a backend does in its own way.
    def put(self, keys: list, memory: list) -> None:
        self.backend.batched_submit_put_task(keys, memory)

    def wait_written(self) -> None:
        raise NotImplementedError

    def get(self, keys: list) -> list:
        return self.backend.batched_get_blocking(keys)

    def contains(self, keys: list) -> bool:
        return all(self.backend.contains(key) for key in keys)

    def close(self) -> None:
        self.backend.close()


class LocalDisk(Base):
    def __init__(self, *sizes, direct: bool):
        directory, payload_bytes, frames = sizes
        super().__init__(
            directory,
            payload_bytes,
            frames,
            local_cpu=True,
            local_disk=directory,
            max_local_disk_size=4 * frames * payload_bytes / 2**30 + 1,
            extra_config={"use_odirect": direct},
        )
        self.backend = LocalDiskBackend(self.config, LOOP, self.pool, dst_device="cpu", metadata=self.metadata)

    def wait_written(self) -> None:
        while self.backend.disk_worker.put_tasks:
            time.sleep(POLL_SECONDS)


class Fs(Base):
    def __init__(self, directory: str, payload_bytes: int, frames: int):
        super().__init__(
            directory,
            payload_bytes,
            frames,
            local_cpu=False,
            remote_storage_plugins=["fs"],
            remote_serde="naive",
            blocking_timeout_secs=300,
            extra_config={"remote_storage_plugin.fs.base_path": directory},
        )
        self.backend = RemoteBackend(self.config, self.metadata, LOOP, self.pool, dst_device="cpu", plugin_name="fs")
        assert self.backend.connection is not None, "no connection"

    def wait_written(self) -> None:
        while self.backend.put_tasks:
            time.sleep(POLL_SECONDS)


class FsNative(Base):
    def __init__(self, directory: str, payload_bytes: int, frames: int):
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.l2_adapters import factory
        from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

        super().__init__(
            directory, payload_bytes, frames, local_cpu=True, extra_config={"local_cpu.pinned_align_bytes": 4096}
        )
        factory.ensure_adapter_loaded("fs_native")
        config = get_l2_adapter_config_class("fs_native").from_dict(
            {"type": "fs_native", "base_path": directory, "num_workers": 4, "use_odirect": False}
        )
        self.backend = factory.create_l2_adapter_from_registry(config, None)
        self.layout = {0: MemoryLayoutDesc(self.metadata.get_shapes(), self.metadata.get_dtypes())}
        self.stores: list = []

    def key(self, number: int):
        from lmcache.v1.distributed.api import ObjectKey

        return ObjectKey(number.to_bytes(32, "big"), MODEL, 0)

    def put(self, keys: list, memory: list) -> None:
        self.stores.append(self.backend.submit_store_task(keys, memory))

    def wait(self, descriptor: int, poll):
        while (result := poll()) is None:
            if select.select([descriptor], [], [], 1.0)[0]:
                os.read(descriptor, 8)
        return result

    def wait_written(self) -> None:
        while self.stores:
            done = self.wait(
                self.backend.get_store_event_fd(), lambda: self.backend.pop_completed_store_tasks() or None
            )
            self.stores = [task for task in self.stores if task not in done]

    def get(self, keys: list) -> list:
        memory = [self.allocate() for _ in keys]
        task = self.backend.submit_load_task(keys, memory)
        self.wait(self.backend.get_load_event_fd(), lambda: self.backend.query_load_result(task))
        return memory

    def contains(self, keys: list) -> bool:
        task = self.backend.submit_lookup_and_lock_task(keys, self.layout)
        found = self.wait(
            self.backend.get_lookup_and_lock_event_fd(), lambda: self.backend.query_lookup_and_lock_result(task)
        )
        return found is not None

    def remove(self, keys: list) -> None:
        del keys  # The adapter's own removal is not what is measured.
        for path in self.files():
            if path not in self.kept_files:
                os.unlink(path)


class S3(Base):
    """Its directory is a URL, s3://bucket.host:port. What it saves again and again goes under the same keys."""

    def __init__(self, url: str, payload_bytes: int, frames: int):
        super().__init__(
            url,
            payload_bytes,
            frames,
            local_cpu=False,
            remote_url=url,
            remote_serde="naive",
            blocking_timeout_secs=300,
            extra_config={
                "s3_region": "us-east-1",
                "s3_num_io_threads": os.cpu_count(),
                "s3_prefer_http2": False,
                "disable_tls": True,
                "save_chunk_meta": False,
                "aws_access_key_id": "TERRACEACCESSKEY",  # tests/support/s3_servers.h
                "aws_secret_access_key": "terrace-test-secret-key",
            },
        )
        self.backend = RemoteBackend(self.config, self.metadata, LOOP, self.pool, dst_device="cpu")
        assert self.backend.connection is not None, "no connection"

    def new_keys(self) -> list:
        keys = super().new_keys()
        self.next_key = self.frames
        return keys

    def files(self) -> list[str]:
        return []

    def remove(self, keys: list) -> None:
        pass

    def wait_written(self) -> None:
        while self.backend.put_tasks:
            time.sleep(POLL_SECONDS)


BACKENDS = {
    "local_disk": lambda *sizes: LocalDisk(*sizes, direct=False),
    "local_disk_direct": lambda *sizes: LocalDisk(*sizes, direct=True),
    "fs": Fs,
    "fs_native": FsNative,
    "s3": S3,
}


def sync(paths: list[str], drop: bool = False) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDWR)
        os.fdatasync(descriptor)
        if drop:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def save(base: Base, keys: list) -> dict:
    before = set(base.files())
    begun, cpu, own_cpu = time.perf_counter(), time.process_time(), time.thread_time()
    memory = base.take()
    base.put(keys, memory)
    accepted, own_cpu = time.perf_counter(), time.thread_time() - own_cpu
    base.wait_written()
    sync([path for path in base.files() if path not in before])
    durable = time.perf_counter()
    cpu = time.process_time() - cpu
    for one in memory:
        one.ref_count_down()
    return {"accepted": accepted - begun, "accepted_cpu": own_cpu, "durable": durable - begun, "cpu": cpu}


def load(base: Base, keys: list, warm: bool, copy: bool) -> dict:
    if not warm:
        sync(base.files(), drop=True)
    begun, cpu = time.perf_counter(), time.process_time()
    memory = base.get(keys)
    if copy:
        for payload, one in zip(base.source, memory, strict=True):
            payload.copy_(one.tensor.view(-1).view(torch.int16))
    answer = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    assert all(one is not None for one in memory), "a miss"
    base.check(memory)
    for one in memory:
        one.ref_count_down()
    return answer


def lookup(base: Base, keys: list) -> dict:
    rounds = -(-LOOKUPS_MIN // len(keys))
    begun = time.perf_counter()
    for _ in range(rounds):
        assert base.contains(keys), "a miss"
    return {"seconds": (time.perf_counter() - begun) / (rounds * len(keys))}


def main() -> None:
    torch.set_num_threads(1)
    base, kept = None, []
    for line in sys.stdin:
        request = json.loads(line)
        answer = {}
        match request["do"]:
            case "open":
                base = BACKENDS[request["backend"]](request["directory"], request["bytes"], request["frames"])
                kept = base.new_keys()
                save(base, kept)
                base.kept_files = set(base.files())
            case "save":
                keys = base.new_keys()
                answer = save(base, keys)
                base.remove(keys)
            case "load":
                answer = load(base, kept, request["warm"], request["copy"])
            case "lookup":
                answer = lookup(base, kept)
            case "close":
                # RemoteBackend.close may wait for ever; the process ends anyway.
                closing = threading.Thread(target=base.close, daemon=True)
                closing.start()
                closing.join(5)
                if not closing.is_alive():
                    base.pool.memory_allocator.close()
                base = None
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()
    os._exit(0)  # Its threads may not end.


LOOP = asyncio.new_event_loop()
threading.Thread(target=LOOP.run_forever, daemon=True).start()

if __name__ == "__main__":
    main()
