"""kvblockd beside a node, driven by node_bench: a request a line on stdin, an answer a line on stdout, in JSON.

    kvblockd_peer.py PROGRAM SCRATCH_DIR     starts the server PROGRAM with its DRAM tier alone

{"do": "open", "bytes": N, "frames": K}  K random blobs of N bytes, put once
{"do": "load"}    gets the K in one call into memory of ours, verified as its client does: "seconds"
{"do": "save"}    puts K new ones one after the other, and removes them: "seconds" of the puts
{"do": "close"}
"""

import json
import os
import socket
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # What the client prints must not be taken for an answer.

from kvblockd.client import Client  # noqa: E402

START_SECONDS = 60  # It touches all its memory first.
ARENA = 2 << 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, program: str, scratch: Path):
        self.address, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        scratch.mkdir(parents=True, exist_ok=True)
        spaces, config = scratch / "spaces.yaml", scratch / "kvblockd.yaml"
        spaces.write_text('namespaces:\n  - { name: bench, id: 1, token: "bench-token" }\n')
        config.write_text(
            f'listen_addr: "{self.address}"\nmetrics_addr: "{metrics}"\ndram_arena_bytes: {ARENA}\n'
            f'dram_hugepages: false\nnamespaces_path: "{spaces}"\nnvme_paths: []\nmax_blob_len: {64 << 20}\n'
            f"initial_credit: {256 << 20}\n"
        )
        with open(scratch / "kvblockd.log", "wb") as log:
            self.process = subprocess.Popen([program, "--config", config], stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.client = Client(self.address, namespace="bench", token="bench-token", streams=4)
                return
            except OSError as error:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise SystemExit(f"kvblockd does not answer: {scratch}/kvblockd.log") from error
                time.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Batch:
    def __init__(self, client: Client, size: int, count: int):
        self.client = client
        self.blobs = [bytearray(os.urandom(size)) for _ in range(count)]
        self.into = [bytearray(os.urandom(16) * (size // 16)) for _ in range(count)]
        self.names = 0
        self.keys = self.put()

    def put(self) -> list[bytes]:
        self.names += 1
        keys = [sha256(f"{self.names} {i} {len(self.blobs[0])}".encode()).digest() for i in range(len(self.blobs))]
        for key, blob in zip(keys, self.blobs, strict=True):
            self.client.put(key, memoryview(blob))
        return keys

    def load(self) -> float:
        begun = time.perf_counter()
        self.client.batch_get_scatter(self.keys, 0, lambda i, _prefix, size: memoryview(self.into[i])[:size])
        seconds = time.perf_counter() - begun
        if self.into[-1] != self.blobs[-1]:
            raise SystemExit("kvblockd: a blob did not come back")
        self.into[-1][:] = bytes(len(self.into[-1]))
        return seconds

    def save(self) -> float:
        begun = time.perf_counter()
        keys = self.put()
        seconds = time.perf_counter() - begun
        self.client.delete(keys, force=True)
        return seconds


def main() -> None:
    server = Server(sys.argv[1], Path(sys.argv[2]))
    batch = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            answer = {}
            match request["do"]:
                case "open":
                    batch = Batch(server.client, request["bytes"], request["frames"])
                case "load":
                    answer = {"seconds": batch.load()}
                case "save":
                    answer = {"seconds": batch.save()}
                case "close":
                    server.client.delete(batch.keys, force=True)
                    batch = None
            print(json.dumps(answer), file=ANSWERS, flush=True)
    finally:
        server.close()


if __name__ == "__main__":
    main()
