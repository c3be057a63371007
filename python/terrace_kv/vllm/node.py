"""A node for one engine whose worker is in another process than its scheduler."""

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import terrace_kv

PR_SET_PDEATHSIG = 1
SYS_SET_MEMPOLICY, MPOL_DEFAULT = 238, 0  # x86-64.
DRAIN_S = 20.0
# Before a node that has ended is started again. One that has run for so long begins with the short one again.
PAUSE_MIN_S, PAUSE_MAX_S = 0.5, 60.0
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
    "metrics-port": (),
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

logger = logging.getLogger("vllm.terrace")


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
    """Configured as a store in the process would be. Started again when it dies; ends with whoever started it."""

    def __init__(self, socket: str, setting: Callable[[str], str | None]) -> None:
        others = {k: v for k, v in os.environ.items() if not k.startswith(NOT_FOR_A_NODE)}
        known = {name: value for name in SETTINGS if (value := setting(name))}
        told = {name: value for name, value in known.items() if not SETTINGS[name] or known.keys() & SETTINGS[name]}
        self._command = [program(), "node", "--socket", socket]
        self._environment = others | {
            "TERRACE_" + name.upper().replace("-", "_"): value for name, value in told.items()
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None  # Guarded by the lock.
        self._over = threading.Event()
        # The kernel ends the node with the thread that has started it, so that one stays.
        self._keeper = threading.Thread(target=self._keep, name="terrace-node", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        pause = PAUSE_MIN_S
        while not self._over.is_set():
            begun = time.monotonic()
            why = self._run()
            if self._over.is_set():
                return
            pause = PAUSE_MIN_S if time.monotonic() - begun > PAUSE_MAX_S else min(2 * pause, PAUSE_MAX_S)
            logger.warning("Terrace: the private node %s; it is started again in %.0f s", why, pause)
            self._over.wait(pause)

    def _run(self) -> str:
        """Until it has ended; why it has."""
        with self._lock:
            if self._over.is_set():
                return "is not wanted any more"
            try:
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # A terminal's Ctrl-C is vLLM's; it then ends us.
                    preexec_fn=_prepare,
                    env=self._environment,
                )
            except OSError as error:
                return f"can't be started: {error}"
            self._process = process
        code = process.wait()
        if code < 0:
            return f"was killed by signal {-code}, and what only its RAM held is gone"
        return f"ended with exit code {code}, and what it wrote before says why"

    def stop(self) -> None:
        """What is queued for the tiers below RAM is written."""
        self._over.set()
        with self._lock:
            process = self._process
        if process is not None:
            process.terminate()
        self._keeper.join(DRAIN_S)
        if process is not None and self._keeper.is_alive():
            process.kill()
            self._keeper.join()
