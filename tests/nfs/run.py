#!/usr/bin/env python3
"""Runs the NFS tests in user-mode Linux: a real NFS server and real clients, without privileges.

    tests/nfs/run.py                                     the tests of build/release
    tests/nfs/run.py --gtest_filter='*Outage*'           what it does not know goes to the tests
    tests/nfs/run.py --build DIR --report FILE.xml --timeout SECONDS

The guest has this machine's files as its own, so it needs no image. Its output comes as it is written; it is switched
off when the tests have ended or the time is over, and also if this process is killed.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MEMORY_MIB = 1024
GUEST_STATE = "libnfs_guest_state.so"  # guest_state.h says what it is for.

# Ends the guest and removes its folder when its stdin closes: when run.py is done with it, or dies. It is in a session
# of its own, so that who kills run.py's whole group does not kill it.
CLEANER = """
read -r work; read -r group; cat >/dev/null
if [ -n "$group" ]; then
  kill -KILL "-$group" 2>/dev/null
  i=0; while kill -0 "-$group" 2>/dev/null && [ $i -lt 100 ]; do sleep 0.1; i=$((i + 1)); done
fi
rm -rf "$work"
"""


def missing(build: Path, tools: Path) -> str | None:
    """What keeps the tests from running, in a sentence."""
    if not shutil.which("linux.uml"):
        return "linux.uml is not there: install the Debian package user-mode-linux (`scripts/setup test` does)"
    if not Path("/usr/lib/uml/modules").is_dir():
        return "/usr/lib/uml/modules is not there: the package user-mode-linux brings no modules on this system"
    if not (tools / "usr/sbin/rpc.nfsd").exists():
        return f"{tools} has no NFS server: run `scripts/setup test`"
    for program in ("nfs_test", "nfs_host", GUEST_STATE):
        if not (build / "tests/nfs" / program).exists():
            return f"{build}/tests/nfs/{program} is not built: cmake --build {build} --target nfs_test"
    for program in ("ip", "modprobe", "mkfs.ext4", "nsenter", "unshare"):
        if not shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin"):
            return f"{program} is not there: run `scripts/setup test`"
    return None


def holds_memory(folder: str) -> bool:
    """The guest's memory is a file that programs run from. A container's /dev/shm may be small, noexec or gone."""
    try:
        there = os.statvfs(folder)
    except OSError:
        return False
    return not there.f_flag & os.ST_NOEXEC and there.f_bavail * there.f_frsize > (MEMORY_MIB + 256) << 20


def documented_options() -> str:
    page = (ROOT / "docs/operate/shared_fs.md").read_text()
    found = re.search(r"mount -t nfs -o (\S+) SERVER:", page)
    assert found, "docs/operate/shared_fs.md tells no `mount -t nfs -o OPTIONS SERVER:...`"
    return found.group(1)


def guest_command(work: Path, build: Path, tools: Path, report: Path, arguments: list[str]) -> list[str]:
    (work / "guest").mkdir()
    tests = [str(build / "tests/nfs/nfs_test"), f"--gtest_output=xml:{report}", "--gtest_color=no", *arguments]
    values = {
        "WORK": str(work),
        "TOOLS": str(tools),
        "TESTS": shlex.join(tests),
        "OPTIONS": documented_options(),
        "NFS_SERVER": str(HERE / "server.sh"),
    }
    init = work / "init"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in values.items()]
    init.write_text("\n".join(["#!/bin/sh", *lines, f"exec sh {shlex.quote(str(HERE / 'init.sh'))}", ""]))
    init.chmod(0o755)
    return [
        "linux.uml",
        f"mem={MEMORY_MIB}M",
        "rootfstype=hostfs",
        "rw",
        f"init={init}",
        "con=null",
        "con0=null,fd:1",
        "ssl=null",
        f"uml_dir={work}",
        "umid=guest",
        "quiet",
        "loglevel=3",
    ]


def follow(guest: subprocess.Popen, timeout_s: float) -> int:
    """Prints what the guest prints until it says that it has ended. Returns the status of the tests."""
    deadline = time.monotonic() + timeout_s
    end = re.compile(rb"nfs: end (\d+)")
    unread = b""
    with selectors.DefaultSelector() as selector:
        selector.register(guest.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            data = os.read(guest.stdout.fileno(), 65536)
            if not data:
                print(f"nfs: the guest died, status {guest.wait()}")
                return 1
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                if found := end.match(line):
                    return int(found.group(1))
                print(line.decode(errors="replace").rstrip("\r"), flush=True)
    print(unread.decode(errors="replace"))
    print(f"nfs: stopped after {timeout_s:.0f} s; what is above is the guest's console")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--report", type=Path, help="gtest's results, as XML")
    parser.add_argument("--timeout", type=float, default=600)
    args, arguments = parser.parse_known_args()
    build = args.build.resolve()
    paths = subprocess.run([ROOT / "scripts/setup", "env"], capture_output=True, text=True, check=True).stdout
    tools = Path(dict(word.split("=", 1) for word in shlex.split(paths))["NFS_DIR"])
    if why := missing(build, tools):
        print(f"nfs: {why}")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    cleaner = subprocess.Popen(
        ["sh", "-c", CLEANER], stdin=subprocess.PIPE, text=True, bufsize=1, start_new_session=True
    )
    guest = None
    try:
        work = Path(tempfile.mkdtemp(prefix="terrace-nfs-"))
        cleaner.stdin.write(f"{work}\n")
        report = work / "report.xml"
        memory = next((folder for folder in ("/dev/shm", str(work)) if holds_memory(folder)), None)
        if memory is None:
            print(f"nfs: neither /dev/shm nor {work} has room for {MEMORY_MIB} MiB that programs may run from (TMPDIR)")
            return 1
        started = time.monotonic()
        guest = subprocess.Popen(
            guest_command(work, build, tools, report, arguments),
            # For linux.uml alone: the guest's processes do not get its environment.
            env={**os.environ, "TMPDIR": memory, "LD_PRELOAD": str(build / "tests/nfs" / GUEST_STATE)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        cleaner.stdin.write(f"{guest.pid}\n")
        status = follow(guest, args.timeout)
        print(f"nfs: {time.monotonic() - started:.0f} s, status {status}")
        if args.report and report.exists():
            shutil.copyfile(report, args.report)
        return status
    finally:
        cleaner.stdin.close()
        if guest:
            guest.stdout.close()
            guest.wait()
        cleaner.wait()


if __name__ == "__main__":
    sys.exit(main())
