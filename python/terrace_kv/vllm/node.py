"""A node for one engine whose worker is in another process than its scheduler."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import terrace_kv

PR_SET_PDEATHSIG = 1
SYS_SET_MEMPOLICY, MPOL_DEFAULT = 238, 0  # x86-64.
DRAIN_S = 20.0
# LMCache's file and the settings of engines: a node is told what they come to. And what binds OpenMP's threads to the
# cores that compute: it would bind the node, too.
NOT_FOR_A_NODE = ("TERRACE_", "LMCACHE_", "OMP_", "GOMP_", "KMP_")
# A bucket is named by one of these.
BUCKET = ("s3-bucket", "s3-endpoint")
# What a node is told, and one of which has to be set for it to be said.
SETTINGS = {
    "ram": (),
    "shared": (),
    "disk": (),
    "disk-size": ("disk",),
    **{name: () for name in BUCKET},
    **{name: ("shared", *BUCKET) for name in ("shared-size", "shared-ttl")},
    "shared-free-min": ("shared",),
    "allow-degraded": ("shared", "disk", *BUCKET),
    **{
        f"s3-{name}": BUCKET
        for name in (
            "prefix",
            "region",
            "ca-file",
            "profile",
            "access-key-id",
            "secret-access-key",
            "session-token",
            "addressing",
            "disable-tls",
            "http2",
            "sign-payload",
            "single-put-max",
            "connections",
        )
    },
}
_LIBC = ctypes.CDLL(None)


def private_socket(engine_id: str) -> str:
    """The same for both processes of an engine; a name without a file, so that nothing stays behind of a node that is
    killed."""
    return f"@terrace-{sha256(engine_id.encode()).hexdigest()[:32]}"


def program() -> str:
    """`terrace` of this package's wheel, wherever it was installed."""
    beside = Path(terrace_kv.__file__).parents[1] / "bin/terrace"
    for candidate in (beside, Path(sys.prefix) / "bin/terrace"):
        if candidate.is_file():
            return str(candidate)
    return shutil.which("terrace") or "terrace"


@contextmanager
def unbound() -> Iterator[None]:
    """What is started within may run on any core. vLLM binds its CPU worker to those that compute without a pause, and
    threads and processes inherit that: they would hardly ever run."""
    bound = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # Of these the kernel takes what the container has.
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def _prepare() -> None:
    """In the node's process, before it is one."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _LIBC.syscall(SYS_SET_MEMPOLICY, MPOL_DEFAULT, None, 0)  # Bound, too.


class PrivateNode:
    """Configured as a store in the process would be. Ends with whoever started it."""

    def __init__(self, socket: str, setting: Callable[[str], str | None]) -> None:
        others = {k: v for k, v in os.environ.items() if not k.startswith(NOT_FOR_A_NODE)}
        known = {name: value for name in SETTINGS if (value := setting(name))}
        told = {name: value for name, value in known.items() if not SETTINGS[name] or known.keys() & SETTINGS[name]}
        self._process = subprocess.Popen(
            [program(), "node", "--socket", socket],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # A terminal's Ctrl-C is vLLM's; it then ends us.
            preexec_fn=_prepare,
            env=others | {"TERRACE_" + name.upper().replace("-", "_"): value for name, value in told.items()},
        )

    def stop(self) -> None:
        """What is queued for the tiers below RAM is written."""
        self._process.terminate()
        try:
            self._process.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
