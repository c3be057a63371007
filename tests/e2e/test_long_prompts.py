"""Would catch: prompts that take long to read, sent by anybody, standing in the way of all others: of health checks, of
running streams, of short requests and of a stop; more of them waiting than may; one refused for another reason than its
length.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from conftest import COMPLETIONS, TEXT, Launcher, prompt
from terrace_stack import Server, open_stream, wait_until

BODIES = 16
LONG = (TEXT * 20)[:450_000]  # More tokens than any context here, but fewer bytes than so many tokens may have.
SPECIAL = "<|im_start|> " * 34_000  # llama.cpp's own search for special tokens takes minutes.


def send(pool: ThreadPoolExecutor, server: Server, text: str, count: int = BODIES) -> list[Future]:
    return [pool.submit(server.call, "POST", COMPLETIONS, prompt(text), timeout_s=300) for _ in range(count)]


def too_long(attack: list[Future]) -> bool:
    replies = [future.result() for future in attack]
    return all((r.status, r.json()["error"]["code"]) == (400, "context_length_exceeded") for r in replies)


def test_health_answers_while_long_prompts_are_read(launcher: Launcher):
    server = launcher.serve("--ctx", "8192")
    with ThreadPoolExecutor(BODIES) as pool:
        attack = send(pool, server, LONG)
        answers = 0
        while not all(future.done() for future in attack):
            assert server.call("GET", "/health").status == 200
            answers += 1
        # Whoever reads bodies on the threads that answer gets to a health check once or twice a body.
        assert answers > 4 * BODIES
        assert too_long(attack)


def test_a_stream_and_short_requests_go_on_beside_them(launcher: Launcher):
    server = launcher.serve("--ctx", "8192")
    with ThreadPoolExecutor(BODIES) as pool, open_stream(server.url, COMPLETIONS, prompt("Once", 400)) as running:
        assert running.readline().startswith(b"data: ")
        attack = send(pool, server, LONG)
        wait_until("one to wait", lambda: server.metric("terrace_prepare_queue_requests", size="long") > 0, 30)
        assert server.lookup(prompt("short"))["prompt_tokens"] > 0
        assert any(not future.done() for future in attack), "the short one did not wait for all of them"
        assert running.readlines()[-2] == b"data: [DONE]\n"
        assert too_long(attack)


def test_many_special_tokens_are_refused_by_their_number(launcher: Launcher):
    server = launcher.serve("--ctx", "8192")
    with ThreadPoolExecutor(2) as pool:
        attack = send(pool, server, SPECIAL, 2)
        assert server.call("GET", "/health").status == 200
        assert too_long(attack)
        assert "at least 68000 tokens" in attack[0].result().json()["error"]["message"]


def test_more_than_may_wait_are_told_so(launcher: Launcher):
    server = launcher.serve("--ctx", "8192", "--prepare-threads", "1", "--prepare-queue-max", "1")
    with ThreadPoolExecutor(BODIES) as pool:
        replies = [future.result() for future in send(pool, server, LONG)]
    assert {reply.status for reply in replies} == {400, 503}
    for reply in replies:
        if reply.status == 503:
            assert reply.json()["error"]["code"] == "overloaded"
            assert reply.headers["retry-after"] == "1"
    refused = sum(reply.status == 503 for reply in replies)
    assert server.metric("terrace_prepare_refused_total", size="long") == refused
    assert server.lookup(prompt("short"))["prompt_tokens"] > 0


def test_a_stop_does_not_wait_for_what_is_not_read(launcher: Launcher):
    server = launcher.serve("--ctx", "8192", "--prepare-threads", "1")
    with ThreadPoolExecutor(BODIES) as pool:
        attack = send(pool, server, LONG)
        wait_until("some to wait", lambda: server.metric("terrace_prepare_queue_requests", size="long") > 4, 30)
        assert server.stop() == 0
    # One whose body is still on its way at the stop may lose its connection.
    replies = [future.result() for future in attack if future.exception() is None]
    assert {reply.status for reply in replies} <= {400, 503}
    assert "shutting_down" in {reply.json()["error"]["code"] for reply in replies}
