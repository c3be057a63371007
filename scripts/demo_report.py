"""How the demo shows what it does: a clock while it waits, a table, out/demo.json."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from terrace_stack import ROOT, TIERS

OUT = ROOT / "out"


def say(text: str = "") -> None:
    print(text, flush=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows that something goes on: a clock on a terminal, a line every 10 s elsewhere."""
    started, done = time.monotonic(), threading.Event()
    terminal = sys.stdout.isatty()

    def show() -> None:
        while not done.wait(0.5 if terminal else 10):
            passed = f"{time.monotonic() - started:.0f} s"
            if terminal:
                print(f"\r  {what} ... {passed}", end="", flush=True)
            else:
                say(f"  ... {passed}")

    print(f"  {what} ...", end="" if terminal else "\n", flush=True)
    clock = threading.Thread(target=show, daemon=True)
    clock.start()
    try:
        yield
    finally:
        done.set()
        clock.join()
        if terminal:
            say(f"\r  {what} ... {time.monotonic() - started:.1f} s")


def print_table(rows: dict[str, dict[str, Any]], asked: dict[str, str]) -> None:
    tiers = [tier for tier in TIERS if any(r["cached_by_tier"].get(tier) for r in rows.values())]
    head = ["", "answered by", "TTFT", "prompt tokens"] + [f"from {tier}" for tier in tiers] + ["same text as cold"]
    lines = [head] + [
        [
            name,
            asked[name],
            f"{r['ttft_ms'] / 1000:.2f} s" if r["ttft_ms"] >= 1000 else f"{r['ttft_ms']:.0f} ms",
            str(r["prompt_tokens"]),
        ]
        + [str(r["cached_by_tier"].get(tier, 0)) for tier in tiers]
        + [("yes" if r["output_equals_cold"] else "NO") if name != "cold" else "-"]
        for name, r in rows.items()
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    say()
    for line in lines:
        say(
            "  "
            + "  ".join(
                cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
        )
    say()


def write_result(result: dict[str, Any]) -> None:
    OUT.mkdir(exist_ok=True)
    (OUT / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
