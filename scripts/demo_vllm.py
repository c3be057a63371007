"""The guide's deployment with real vLLM servers: two of them share a directory, our router is in front.

Called by scripts/demo with ENGINE=vllm. Variables: ROUTER_PORT (8000), PORT_A (8001), PORT_B (8002), SHARED_DIR.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from pathlib import Path
from typing import Any

from demo_report import OUT, print_table, say, waiting, write_result
from terrace_stack import Answer, Server, StackError, port_taken, wait_until, whole_chunks
from vllm_stack import START_TIMEOUT_S, Counts, VllmServer, vllm_model

NAME = "SmolLM2-135M-Instruct"
DOCUMENT = Path("/usr/share/common-licenses/GPL-3")
CHARACTERS = 6000  # Five chunks and a bit.
QUESTION = "What is this document, and what does it allow?"
MAX_TOKENS = 24
PUBLISH_TIMEOUT_S = 120


def ports() -> dict[str, int]:
    found = {}
    for variable, default in {"ROUTER_PORT": 8000, "PORT_A": 8001, "PORT_B": 8002}.items():
        found[variable] = int(os.environ.get(variable) or default)
        if port_taken(found[variable]):
            raise StackError(f"port {found[variable]} is taken; choose another: make demo ENGINE=vllm {variable}=N")
    return found


class Stack:
    def __init__(self) -> None:
        self.ports = ports()
        self.folder = OUT / f"demo-{os.getpid()}"
        self.folder.mkdir(parents=True)
        self.share = Path(os.environ.get("SHARED_DIR") or self.folder / "shared").resolve()
        self.share.mkdir(parents=True, exist_ok=True)
        self.model = vllm_model()
        self.servers: list[Server] = []

    def start_vllm(self) -> tuple[VllmServer, VllmServer]:
        # Different seeds: names do not hang on them.
        pair = []
        for name, variable, seed in (("vllm-a", "PORT_A", "0"), ("vllm-b", "PORT_B", "7")):
            log = self.folder / f"{name}.log"
            pair.append(VllmServer(name, self.ports[variable], self.model, NAME, log, self.share, PYTHONHASHSEED=seed))
            self.servers.append(pair[-1])
        for server in pair:
            server.wait_ready()
        return pair[0], pair[1]

    def start_router(self, *backends: VllmServer) -> Server:
        flags = ["--service-discovery", "static", "--static-backends", ",".join(b.url for b in backends)]
        flags += ["--static-models", ",".join(NAME for _ in backends), "--routing-logic", "roundrobin"]
        flags += ["--first-byte-timeout", f"{START_TIMEOUT_S}s"]
        router = Server("router", self.ports["ROUTER_PORT"], ["router", *flags], self.folder / "router.log")
        self.servers.append(router)
        router.wait_healthy()
        return router

    def stop(self, *servers: Server) -> None:
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.stop(timeout_s=60)
            self.servers.remove(server)

    def close(self, keep_logs: bool) -> None:
        self.stop(*reversed(self.servers))
        if not keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)


def row(answer: Answer, found: Counts, cold: Answer) -> dict[str, Any]:
    tiers = {"engine": found.local, "shared_fs": found.external}
    return {
        "ttft_ms": round(answer.ttft_ms, 1),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": found.local + found.external,
        "cached_by_tier": tiers,
        "output_equals_cold": answer.text == cold.text,
    }


def complaints(rows: dict[str, dict[str, Any]]) -> list[str]:
    expected = whole_chunks(rows["cold"]["prompt_tokens"])
    found = [f"{name}: its output differs" for name, r in rows.items() if not r["output_equals_cold"]]
    for name, tier in (("same_instance", "engine"), ("other_instance", "shared_fs"), ("after_restart", "shared_fs")):
        hits = rows[name]["cached_by_tier"][tier]
        if hits < expected:
            found.append(f"{name}: {hits} tokens from {tier}, {expected} were expected")
    if rows["cold"]["cached_tokens"]:
        found.append(f"cold: {rows['cold']['cached_tokens']} tokens came from a cache")
    return found


def prove(stack: Stack) -> bool:
    with waiting("starting two vLLM servers and the router"):
        a, b = stack.start_vllm()
        router = stack.start_router(a, b)
    text = f"{DOCUMENT.read_text()[:CHARACTERS]}\n\n{QUESTION}"
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "cache_salt": f"demo-{secrets.token_hex(8)}",  # Cold is cold even if SHARED_DIR knows the document.
    }
    answers: dict[str, tuple[Answer, Counts]] = {}
    asked: dict[str, str] = {}
    before = {server: server.answered() for server in (a, b)}
    with waiting("cold: through the router; nobody knows it, so one server prefills it all"):
        counts = {server: server.counts() for server in (a, b)}
        cold = router.stream(body, timeout_s=START_TIMEOUT_S)
    first, other = (a, b) if a.answered() > before[a] else (b, a)
    answers["cold"] = (cold, first.counts() - counts[first])
    asked["cold"] = f":{first.port} (by router)"
    with waiting(f"same_instance: the same to :{first.port}"):
        answers["same_instance"] = first.ask(body)
    chunks = whole_chunks(cold.prompt_tokens) // 256
    with waiting(f"asking :{other.port} until it knows {chunks} chunks on the shared tier"):
        wait_until("chunks on the shared tier", lambda: other.frames(NAME) >= chunks, PUBLISH_TIMEOUT_S)
    with waiting(f"other_instance: the same to :{other.port}, which has never seen it"):
        answers["other_instance"] = other.ask(body)
    with waiting("stopping both servers, starting them anew"):
        stack.stop(a, b)
        a, b = stack.start_vllm()
        wait_until("chunks on the shared tier", lambda: b.frames(NAME) >= chunks, PUBLISH_TIMEOUT_S)
    with waiting(f"after_restart: the same to :{b.port}"):
        answers["after_restart"] = b.ask(body)
    asked |= {"same_instance": f":{first.port}", "other_instance": f":{other.port}", "after_restart": f":{b.port}"}

    rows = {name: row(answer, found, cold) for name, (answer, found) in answers.items()}
    print_table(rows, asked)
    say(f"  {QUESTION}\n  {' '.join(cold.text.split())}")
    files = list((stack.share / "frames").rglob("*.kvf"))
    say(f"\nOn the shared tier: {len(files)} frames, {sum(f.stat().st_size for f in files) / 1e6:.0f} MB")
    wrong = complaints(rows)
    write_result({**rows, "files_on_shared": len(files), "ok": not wrong})
    for line in wrong:
        say(f"WRONG: {line}")
    return not wrong


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    stack, good = None, False
    try:
        write_result({"ok": False})  # Until this run has proved otherwise.
        stack = Stack()
        say("Terrace demo with vLLM: about 4 minutes on two cores, most of it four starts of vLLM.\n")
        good = prove(stack)
        if good:
            say("\nRight: every output equals the cold one, every whole chunk was a hit (out/demo.json).")
    except (StackError, OSError) as e:
        say(f"\nscripts/demo: {e}")
    except KeyboardInterrupt:
        say("\nstopping")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if stack:
            stack.close(keep_logs=not good)
            if not good:
                say(f"logs: {stack.folder}/*.log")
    return 0 if good else 1
