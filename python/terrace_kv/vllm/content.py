"""Content identity of files: SHA-256 of all bytes, computed in the background, kept by the file's identity.

The cache is the one of `terrace serve`: a file named device-inode-size-mtime-ctime in the user's cache folder.
"""

import hashlib
import os
import re
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def cache_folder() -> Path | None:
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "terrace/digests"
    home = os.environ.get("HOME")
    return Path(home) / ".cache/terrace/digests" if home else None


def hub_digest(path: Path) -> bytes | None:
    """Of a file in a Hugging Face hub cache: a blob that is a large file is named by its SHA-256, and never changes."""
    blob = path.resolve()
    is_blob = blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", blob.name)
    return bytes.fromhex(blob.name) if path.is_symlink() and is_blob else None


def identity(stat: os.stat_result) -> str:
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}"


def is_lasting(stat: os.stat_result, kind: str) -> bool:
    """Whether a file's identity names its bytes at the next start, too. On FUSE inodes may be counted anew with each
    mount. And files of one size and inode are told apart by their times: where these are whole seconds, by nothing."""
    made_up = kind.startswith("fuse") or kind == "virtiofs"
    return not made_up and bool(stat.st_mtime_ns % 10**9 or stat.st_ctime_ns % 10**9)


def kind_of_mount(device: int) -> str:
    """Of file system, as the kernel calls it; "" if it isn't listed."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    kinds = [line.partition(" - ")[2].split(" ")[0] for line in lines if line.split(" ")[2] == wanted]
    return kinds[-1] if kinds else ""


def file_digest(path: Path, unchanged_since: float | None) -> bytes:
    """SHA-256 of a file that has been as it is since then (seconds since 1970)."""
    if known := hub_digest(path):
        return known
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        if unchanged_since is not None and before.st_ctime > unchanged_since:
            raise ValueError(f"{path} was changed after the engine began to read it: start again to cache")
        folder = cache_folder()
        lasting = is_lasting(before, kind_of_mount(before.st_dev))
        kept = folder / identity(before) if folder and lasting else None
        if kept and kept.is_file() and re.fullmatch(r"[0-9a-f]{64}\n", text := kept.read_text()):
            return bytes.fromhex(text.strip())
        digest = hashlib.file_digest(file, "sha256").digest()
        if identity(os.fstat(file.fileno())) != identity(before):
            raise ValueError(f"{path} was changed while it was read: start again to cache")
    if kept:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            temporary = kept.with_name(f"{kept.name}.{os.getpid()}")
            temporary.write_text(digest.hex() + "\n")
            temporary.rename(kept)
        except OSError:
            pass  # It is computed again at the next start.
    return digest


class Contents:
    """Digests of folders, on threads of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="terrace-digest")
        self._parts = ThreadPoolExecutor(max_workers=4, thread_name_prefix="terrace-digest-file")

    def start(self, folder: Path, suffixes: tuple[str, ...], unchanged_since: float | None = None) -> Future[bytes]:
        return self.run(self.folder, folder, suffixes, unchanged_since)

    def run(self, what: Callable[..., bytes], *arguments: Any) -> Future[bytes]:
        return self._pool.submit(what, *arguments)

    def model(
        self, folder: Callable[[], Path], suffixes: tuple[str, ...], unchanged_since: float | None
    ) -> Future[bytes]:
        """Where the model lies is found out on our thread, too: it may have to be looked up."""

        def find() -> bytes:
            try:
                found = folder()
            except Exception as error:  # Of the hubs' libraries: whatever it is, the server goes on.
                raise ValueError(f"the folder of the model's weights is not found: {error}") from error
            return self.folder(found, suffixes, unchanged_since)

        return self.run(find)

    def folder(self, folder: Path, suffixes: tuple[str, ...], unchanged_since: float | None) -> bytes:
        files = sorted(path for path in folder.iterdir() if path.suffix in suffixes and path.is_file())
        if not files:
            raise ValueError(f"{folder} holds none of {', '.join(suffixes)}")
        whole = hashlib.sha256(b"terrace.files.1")
        for path, digest in zip(files, self._parts.map(lambda p: file_digest(p, unchanged_since), files), strict=True):
            name = path.name.encode()
            whole.update(struct.pack("<I", len(name)) + name + digest)
        return whole.digest()

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._parts.shutdown(wait=False, cancel_futures=True)
