"""Would catch: a command of the start page that does not do what it says, and a miss reason that nobody can look up."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from terrace_stack import ROOT, free_port, wait_until

START = (ROOT / "docs/start.md").read_text()


def test_every_miss_reason_is_explained():
    code = (ROOT / "src/base/reason.cc").read_text()
    reasons = re.findall(r'case Reason::\w+: return "(\w+)"', code)
    assert len(reasons) > 10
    page = (ROOT / "docs/operate/troubleshoot.md").read_text()
    table = page[page.index("## Every reason") :]
    assert re.findall(r"^`(\w+)` \|", table, re.MULTILINE) == reasons


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    """`make up` as the page has it, on free ports; what stands for the page's ports and paths here."""
    ports = {page: str(free_port()) for page in ("8000", "8001", "8002")}
    variables = dict(zip(("ROUTER_PORT", "PORT_A", "PORT_B"), ports.values(), strict=True))
    shared = str(tmp_path / "shared")
    up = subprocess.Popen(
        [sys.executable, ROOT / "scripts/demo", "--up"],
        env={**os.environ, **variables, "SHARED_DIR": shared},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = ""
        while "Ctrl-C stops it" not in said:
            line = up.stdout.readline()
            assert line, said
            said += line
        # The guide's request sets no `max_tokens`: sampled, a small model can ramble until the context is full.
        short = {'"model": "SmolLM2': '"max_tokens": 64, "model": "SmolLM2'}
        yield {**ports, **short, "/tmp/terrace-kv": shared, "/tmp/request.json": str(tmp_path / "request.json")}
    finally:
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0


def test_the_commands_of_the_start_page_do_what_it_says(places: dict[str, str]):
    section = START[START.index("## Try it by hand\n") :].split("\n## ")[0]
    up, guide, body, cold, lookup, warm, find = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    assert up.strip() == "make up SHARED_DIR=/tmp/terrace-kv"

    def run(command: str) -> str:
        for page, here in places.items():
            command = command.replace(page, here)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout

    assert '"miss_reason": "short_prompt"' in run(guide)
    run(body)
    cold_text, cold_usage = run(cold).splitlines()
    assert '"cached_tokens":0' in cold_usage
    [tokens] = re.findall(r'`"shared_fs":(\d+)`', section)
    wait_until("the look-up to answer as the page says", lambda: f'"shared_fs":{tokens}' in run(lookup), 30)
    warm_text, warm_usage = run(warm).splitlines()
    assert f'"shared_fs":{tokens}' in warm_usage
    assert warm_text == cold_text
    assert len(run(find).splitlines()) == 3
