"""Would catch: answers in another shape than OpenAI's clients read, stops that leak or cut wrongly, errors that are no
clean 4xx, a key that does not protect, a queue without a bound, a generation that goes on for a client that left, and
output that a cached prefix changes.
"""

import gzip
import json
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import CHAT, COMPLETIONS, MODEL_NAME, Launcher, chat, document, prompt
from terrace_stack import CHUNK, HOST, Server, call, open_stream, parse_metrics, wait_until

CONTEXT = 1024
MANY = 1000  # Tokens; to make them takes the model ten seconds and more.
ROOT = Path(__file__).resolve().parents[2]
SHORT = "The GNU General Public License is a free, copyleft license for"


@pytest.fixture(scope="module")
def server(session_launcher: Launcher) -> Server:
    return session_launcher.serve("--ctx", str(CONTEXT))


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_a_chat_answer_has_openais_shape(server: Server):
    answer = server.call("POST", CHAT, chat("Say hello.", 8)).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL_NAME
    assert isinstance(answer["created"], int)
    [choice] = answer["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["terrace"]["miss_reason"] == "short_prompt"


def test_a_completion_has_openais_shape(server: Server):
    answer = server.call("POST", COMPLETIONS, prompt(SHORT, 8)).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    [choice] = answer["choices"]
    assert choice["text"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert answer["usage"]["completion_tokens"] == 8


def test_a_prompt_of_token_ids_is_that_prompt(server: Server):
    assert server.lookup(prompt([504, 253, 28] * 100))["prompt_tokens"] == 300
    reply = server.call("POST", COMPLETIONS, prompt([10**8], 4))
    assert reply.status == 400  # No token of this model.


@pytest.mark.parametrize("body", [chat("Say hello.", 12), prompt(SHORT, 12)], ids=["chat", "completion"])
def test_a_stream_is_the_whole_answer_in_pieces(server: Server, body: dict):
    path = CHAT if "messages" in body else COMPLETIONS
    whole = server.complete(body, path)
    streamed = server.stream(body, path)
    assert streamed.done
    assert (streamed.text, streamed.finish_reason) == (whole.text, whole.finish_reason)
    assert streamed.usage["completion_tokens"] == whole.usage["completion_tokens"]
    assert len({event["id"] for event in streamed.events}) == 1
    assert {event["object"] for event in streamed.events} == {
        "chat.completion.chunk" if path == CHAT else "text_completion"
    }
    *others, last = streamed.events
    assert last["choices"] == []
    assert all(event["usage"] is None for event in others)
    if path == CHAT:
        assert others[0]["choices"][0]["delta"]["role"] == "assistant"


def test_usage_comes_in_a_stream_only_if_asked_for(server: Server):
    body = chat("Say hello.", 4)
    with open_stream(server.url, CHAT, body) as response:
        assert response.getheader("Content-Type").startswith("text/event-stream")
        text = response.read().decode()
    assert text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in text


def test_max_tokens_bounds_the_answer(server: Server):
    answer = server.complete(prompt(SHORT, 5), COMPLETIONS)
    assert (answer.usage["completion_tokens"], answer.finish_reason) == (5, "length")


def test_the_answer_ends_where_the_context_ends(server: Server):
    answer = server.complete(prompt([504] * 1000, 24), COMPLETIONS)
    assert answer.prompt_tokens == 1000
    assert answer.usage["total_tokens"] <= CONTEXT
    assert answer.finish_reason in ("length", "stop")


# --- stop and sampling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_ends_the_text_before_it_wherever_token_boundaries_lie(server: Server, streaming: bool):
    ask = server.stream if streaming else server.complete
    body = prompt(SHORT, 40)
    text = ask(body, COMPLETIONS).text
    assert len(text) > 60
    # Windows of every length over the text: some begin and end within tokens, some span several.
    for begin, length in ((20, 1), (21, 3), (23, 5), (25, 8), (26, 13), (28, 21)):
        stop = text[begin : begin + length]
        answer = ask({**body, "stop": stop}, COMPLETIONS)
        assert answer.text == text[: text.index(stop)], stop
        assert answer.finish_reason == "stop"


def test_the_first_of_several_stops_wins_and_one_that_never_comes_hides_nothing(server: Server):
    body = prompt(SHORT, 40)
    text = server.stream(body, COMPLETIONS).text
    stops = [text[40:47], text[12:17]]
    assert server.stream({**body, "stop": stops}, COMPLETIONS).text == text[: min(text.index(stop) for stop in stops)]
    # The text's own end looks like the beginning of this stop: it must come out all the same.
    never = server.stream({**body, "stop": [text[-4:] + "\x07"]}, COMPLETIONS)
    assert (never.text, never.finish_reason) == (text, "length")


def test_a_seed_makes_sampling_repeatable(server: Server):
    body = {**prompt(SHORT, 16), "temperature": 1.0, "top_p": 0.95}
    texts = [server.complete({**body, "seed": seed}, COMPLETIONS).text for seed in (7, 7, 8, 9)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


# --- models, health, metrics ------------------------------------------------------------------------------------------


def test_what_a_request_says_about_sampling_is_done(server: Server):
    greedy = server.complete(prompt(SHORT, 12), COMPLETIONS).text
    assert server.complete(prompt(SHORT, 12, temperature=2, top_k=1), COMPLETIONS).text == greedy
    assert server.complete(prompt(SHORT, 12, temperature=2, min_p=1), COMPLETIONS).text == greedy
    only = server.complete(prompt([504, 253], 4, logit_bias={"28": 100}), COMPLETIONS).text
    assert server.complete(prompt([504, 253], 1, logit_bias={"28": 100}), COMPLETIONS).text * 4 == only
    loop = prompt("a b a b a b a b a b a b", 12)
    for penalty in ({"repetition_penalty": 2}, {"presence_penalty": 2, "frequency_penalty": 2}):
        assert server.complete({**loop, **penalty}, COMPLETIONS).text != server.complete(loop, COMPLETIONS).text


def test_models_lists_the_served_name(server: Server):
    models = server.call("GET", "/v1/models").json()
    assert models["object"] == "list"
    [model] = models["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL_NAME, "model", CONTEXT)


def test_health_is_ok(server: Server):
    assert server.health() == {"status": "ok"}


def test_metrics_are_prometheus_text_and_count_requests(server: Server):
    def snapshot() -> dict:
        reply = server.call("GET", "/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        samples = [
            (name, tuple(sorted(labels.items())), value) for name, labels, value in parse_metrics(reply.body.decode())
        ]
        assert len({sample[:2] for sample in samples}) == len(samples), "a sample stands there twice"
        assert all(name.startswith("terrace_") for name, _, _ in samples)
        return {sample[:2]: sample[2] for sample in samples}

    before = snapshot()
    server.complete(prompt(SHORT, 2), COMPLETIONS)
    after = snapshot()
    assert set(before) <= set(after)
    done = ("terrace_engine_requests_total", (("outcome", "done"),))
    assert after[done] == before[done] + 1


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(server: Server, body, path: str = CHAT, method: str = "POST") -> tuple[int, dict]:
    reply = server.call(method, path, body)
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    return reply.status, error


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "JSON"),
        (b"", "JSON"),
        (b"[1]", "object"),
        (b'{"messages": "\xff"}', "UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages[0].content"),
        ('{"messages": [{"role": "user", "content": "caf\u00e9"}]}'.encode("latin-1"), "messages[0].content"),
        (b'{"model": "m", "model": "m", "messages": []}', "twice"),
        ({"model": MODEL_NAME}, "messages"),
        ({"model": MODEL_NAME, "messages": "hello"}, "messages"),
        ({"model": MODEL_NAME, "messages": []}, "messages"),
        ({"model": MODEL_NAME, "messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"model": MODEL_NAME, "messages": [{"role": "chief", "content": "x"}]}, "messages[0].role"),
        ({"model": 7, "messages": [{"role": "user", "content": "x"}]}, "model"),
        (chat("x", temperature="hot"), "temperature"),
        (chat("x", temperature=3), "temperature"),
        (chat("x", top_p=-1), "top_p"),
        (chat("x", max_tokens=0), "max_tokens"),
        (chat("x", max_tokens="many"), "max_tokens"),
        (chat("x", stop=7), "stop"),
        (chat("x", stop=["a"] * 5), "stop"),
        (chat("x", seed="lucky"), "seed"),
        (chat("x", stream="yes"), "stream"),
        (chat("x", cache_salt=7), "cache_salt"),
        (chat("x", n=2), "n"),
        (chat("x", top_n_sigma=1), "top_n_sigma"),
        (chat("x", max_tokns=1), "did you mean 'max_tokens'?"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(server: Server, body, named: str):
    status, error = refused(server, body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/terrace/lookup"])
def test_an_unknown_model_is_a_404_that_names_it(server: Server, path: str):
    body = prompt(SHORT) if path == COMPLETIONS else chat("x")
    status, error = refused(server, {**body, "model": "gpt-9"}, path)
    assert status == 404
    assert "gpt-9" in error["message"] and MODEL_NAME in error["message"]
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
def test_no_model_means_the_one_that_is_served(server: Server, model: dict):
    body = {key: value for key, value in chat("x", max_tokens=1).items() if key != "model"}
    assert server.call("POST", CHAT, {**body, **model}).json()["model"] == MODEL_NAME


def test_a_model_name_of_a_megabyte_is_not_sent_back(server: Server):
    reply = server.call("POST", CHAT, {**chat("x"), "model": "m" * 1000000})
    assert reply.status == 404
    assert len(reply.body) < 1000


def test_a_coded_body_is_a_415(server: Server):
    coded = gzip.compress(json.dumps(chat("x", max_tokens=1)).encode())
    reply = server.call("POST", CHAT, coded, headers={"Content-Encoding": "gzip"})
    assert reply.status == 415
    assert "gzip" in reply.json()["error"]["message"]
    plain = json.dumps(chat("x", max_tokens=1)).encode()
    assert server.call("POST", CHAT, plain, headers={"Content-Encoding": "identity"}).status == 200


def test_prompt_and_answer_that_exceed_the_context_are_a_400(server: Server):
    status, error = refused(server, prompt(SHORT, CONTEXT), COMPLETIONS)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    room = CONTEXT - server.complete(prompt(SHORT, 1), COMPLETIONS).usage["prompt_tokens"]
    assert f"at most {room}," in error["message"]
    assert refused(server, prompt(SHORT, room + 1), COMPLETIONS)[0] == 400


def test_every_field_of_llama_server_is_known(server: Server):
    """None is passed over: nonsense in it is refused, unless the table says that no answer depends on it."""
    source = Path(os.environ["LLAMA_DIR"]) / "source/tools/server"
    schema = (source / "server-schema.cpp").read_text()
    names = set(re.findall(r'(?:field_\w+\(|add_alias\()"([\w.]+)"', schema)) - {"include_usage"}
    chat_body = (source / "server-common.cpp").read_text()
    chat_body = chat_body[chat_body.index("oaicompat_chat_params_parse") :]
    names |= set(re.findall(r'(?:json_value\(body, |body\.(?:at|contains)\()"(\w+)"', chat_body))
    names -= {"messages", "content", "role", "type"}
    assert len(names) > 80, "the sources of llama.cpp's server look different; teach this test to read them"
    idle = known_without_effect()
    for name in sorted(names):
        reply = server.call("POST", CHAT, {**chat("x", max_tokens=1), name: [{"nonsense": [7]}]})
        if name in idle:
            assert reply.status == 200, name
        else:
            error = reply.json()["error"]
            assert (reply.status, error["param"]) == (400, name), name
            assert error["code"] != "unknown_parameter", name


def known_without_effect() -> set[str]:
    page = (ROOT / "docs/reference/api.md").read_text()
    part = page[page.index("**Taken with any value**") : page.index("**Refused** with a 400")]
    lines = [line.split(" | ")[0] for line in part.splitlines()]
    return set(re.findall(r"`([\w.]+)`", "\n".join(lines)))


def test_a_prompt_longer_than_the_context_is_a_400_with_both_numbers(server: Server):
    for tokens in (CONTEXT, 3000):
        status, error = refused(server, prompt([504] * tokens), COMPLETIONS)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert str(tokens) in error["message"] and str(CONTEXT) in error["message"]
    status, error = refused(server, chat(document("long", 16000)))
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_a_body_too_large_is_a_413(server: Server):
    # The server may answer, and close, before it has read it all.
    with socket.create_connection((HOST, server.port), timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n{")
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_an_unknown_path_is_a_404_and_a_wrong_method_a_405(server: Server):
    assert refused(server, None, "/v1/nothing", "GET")[0] == 404
    assert refused(server, None, CHAT, "GET")[0] == 405
    assert refused(server, chat("x"), "/v1/models", "POST")[0] == 405


def test_refusals_left_the_server_well(server: Server):
    assert server.health() == {"status": "ok"}
    assert server.complete(prompt(SHORT, 4), COMPLETIONS).text


# --- key --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_a_key_protects_all_but_health_and_metrics(launcher: Launcher, by: str):
    flags = ["--api-key", "k-1234"] if by == "flag" else []
    environment = {"VLLM_API_KEY": "k-1234"} if by == "variable" else {}
    server = launcher.serve(*flags, environment=environment, api_key="k-1234")
    for headers in ({}, {"Authorization": "Bearer k-12345"}, {"Authorization": "Bearer "}, {"Authorization": "k-1234"}):
        for method, path in (("POST", CHAT), ("POST", "/terrace/lookup"), ("GET", "/v1/models")):
            reply = call(server.url, method, path, chat("x") if method == "POST" else None, headers)
            assert reply.status == 401, (headers, path)
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
            assert "k-1234" not in reply.body.decode()
    for path in ("/health", "/metrics"):
        assert call(server.url, "GET", path).status == 200
    assert server.complete(chat("Say hello.", 4)).text
    assert "k-1234" not in server.log.read_text()


# --- bounds -----------------------------------------------------------------------------------------------------------


def raw_post(body: dict) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_stops_its_generation(server: Server, streaming: bool):
    body = {**prompt(SHORT, MANY), "stop": ["\x07"]}

    def left() -> float:
        return server.metric("terrace_engine_requests_total", outcome="gone")

    def generated() -> float:
        return server.metric("terrace_engine_generated_tokens_total")

    left_before, generated_before = left(), generated()
    if streaming:
        with open_stream(server.url, COMPLETIONS, body) as response:
            assert response.readline().startswith(b"data: ")
    else:
        with socket.create_connection((HOST, server.port)) as client:
            client.sendall(raw_post(body))
            wait_until("the request to run", lambda: generated() > generated_before, 10)
    wait_until("the request to be dropped", lambda: left() == left_before + 1, 5)
    assert generated() - generated_before < 700  # Far from the end of the context.


def test_clients_that_leave_the_queue_free_their_places(launcher: Launcher):
    server = launcher.serve("--queue-max", "1")
    body = prompt(SHORT, MANY)
    with open_stream(server.url, COMPLETIONS, body) as running:
        assert running.readline().startswith(b"data: ")
        for _ in range(3):
            with socket.create_connection((HOST, server.port)) as waiting:
                waiting.sendall(raw_post(body))
                wait_until("it to wait", lambda: server.metric("terrace_engine_queue_requests") == 1, 10)
                assert server.call("POST", COMPLETIONS, body).status == 429
            wait_until("its place to be free", lambda: server.metric("terrace_engine_queue_requests") == 0, 5)
    assert server.complete(prompt(SHORT, 2), COMPLETIONS).text


def test_a_full_queue_is_a_429_and_the_waiting_ones_are_served(launcher: Launcher):
    server = launcher.serve("--queue-max", "2")
    with ThreadPoolExecutor(10) as pool:
        body = prompt(document("queue", 1200), 24)
        replies = list(pool.map(lambda i: server.call("POST", COMPLETIONS, {**body, "cache_salt": str(i)}), range(8)))
    statuses = [reply.status for reply in replies]
    assert set(statuses) == {200, 429}
    assert 2 <= statuses.count(200) <= 4
    for reply in replies:
        if reply.status == 429:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert server.complete(prompt(SHORT, 2), COMPLETIONS).text


def test_a_stop_tells_the_waiting_so_and_lets_the_running_end(launcher: Launcher):
    server = launcher.serve()
    with ThreadPoolExecutor(1) as pool, open_stream(server.url, COMPLETIONS, prompt(SHORT, 300)) as running:
        assert running.readline().startswith(b"data: ")
        waiting = pool.submit(call, server.url, "POST", COMPLETIONS, prompt("another one", 300))
        wait_until("the second to wait", lambda: server.metric("terrace_engine_queue_requests") == 1, 10)
        server.process.terminate()
        reply = waiting.result(timeout=30)
        assert (reply.status, reply.json()["error"]["code"]) == (503, "shutting_down")
        assert reply.headers["retry-after"] == "1"
        # Whole if the machine computes so much within the deadline, else with an error event: never just cut.
        assert running.read().endswith(b"data: [DONE]\n\n")
    assert server.process.wait(30) == 0


def test_a_second_signal_ends_it_at_once(launcher: Launcher):
    server = launcher.serve()
    with open_stream(server.url, COMPLETIONS, prompt(SHORT, 400)) as running:
        assert running.readline().startswith(b"data: ")
        server.process.terminate()
        wait_until("the stop to begin", lambda: "serve_stopping" in server.log.read_text(), 30)
        server.process.terminate()
        assert server.process.wait(30) == 143


# --- the same with and without a cache --------------------------------------------------------------------------------


def test_strict_repeats_and_cached_runs_equal_cold_ones(launcher: Launcher):
    server = launcher.serve("--strict")
    bodies = [prompt(document(f"strict-{i}", 1500), 24) for i in range(3)]
    cold = [server.stream(body, COMPLETIONS).text for body in bodies]
    assert len(set(cold)) == 3
    for order in ((2, 0, 1), (1, 2, 0)):  # Each time another conversation lies in engine memory.
        for i in order:
            answer = server.stream(bodies[i], COMPLETIONS)
            assert answer.cached_tokens >= CHUNK
            assert answer.text == cold[i]
    for i, body in enumerate(bodies):
        assert server.stream({**body, "cache_salt": "cold"}, COMPLETIONS).text == cold[i]
