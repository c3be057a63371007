"""What vLLM's scheduler calls of a connector: how long it takes, and, between two marks that strace sees, what is asked
of the kernel.
"""

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_external_cache_hit_sources",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "get_kv_connector_stats",
    "has_pending_push_work",
    "take_events",
)
# Memory, wake-ups and clocks. A wait for a mutex that another thread holds for a moment is a futex of value 2 without a
# time; a wait for an event is none.
ALLOWED = re.compile(
    r"^(brk|mmap|munmap|mremap|madvise|mprotect|clock_gettime|gettid)\("
    r"|^futex\(0x[0-9a-f]+, FUTEX_WAKE"
    r"|^futex\(0x[0-9a-f]+, FUTEX_WAIT_PRIVATE, 2, NULL\)"
    r'|^write\(\d+, "\\1(\\0){7}", 8\)'  # An eventfd that wakes a thread.
)


def begin() -> None:
    os.getpgid(0)


def end() -> None:
    os.getsid(0)


def marked(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begin()
        begun = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begun)
            end()

    return wrapped


def watch(owner: Any, names: Iterable[str] = CALLS) -> list[float]:
    """Marks these methods of one object; the list grows by how long each call took."""
    seconds: list[float] = []
    for name in names:
        setattr(owner, name, marked(getattr(owner, name), seconds))
    return seconds


@contextmanager
def traced(log: Path) -> Iterator[None]:
    """System calls of this thread alone, into `log`."""
    argv = ["strace", "-o", str(log), "-p", str(threading.get_native_id())]
    tracer = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    assert "attached" in said, said
    try:
        yield
    finally:
        tracer.terminate()
        with suppress(subprocess.TimeoutExpired):
            tracer.wait(30)
        tracer.kill()


def not_allowed(log: Path) -> tuple[int, list[str]]:
    """How many marked calls there were, and what was asked of the kernel in them that would be I/O or a wait."""
    calls, depth, found = 0, 0, []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("getpgid(0)"):
            calls, depth = calls + 1, depth + 1
        elif line.startswith("getsid(0)"):
            depth = max(depth - 1, 0)  # The first mark may be before the trace.
        elif depth > 0 and not ALLOWED.match(line):
            found.append(line)
    return calls, found
