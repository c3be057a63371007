"""Would catch: a router that holds streams back, that lets an engine compute for a client that has gone, that sends a
request twice or loses one, that swallows keys, or whose errors no client library understands.

The backends are fakes that a test scripts request by request; the router is the real program.
"""

import gzip
import http.client
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import CHAT
from terrace_stack import HOST, Server, call, free_port, open_stream, parse_metrics, terrace_binary, wait_until

PATIENCE_S = 20
CANCEL_S = 2  # What the router promises from a client's leaving to the backend's seeing it.
SSE = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}


class Call(BaseHTTPRequestHandler):
    """One request to a fake backend, with what its script needs to answer it."""

    protocol_version = "HTTP/1.1"
    server: "Fake"

    def setup(self):
        super().setup()
        self.connection.settimeout(PATIENCE_S)

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/health":  # The router asks this again and again: no script wants to know.
            self.server.health(self)
        else:
            self.do_POST()

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.calls.append(self)
        self.server.script(self)

    def begin(self, status: int = 200, **headers: str):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, body: object, status: int = 200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.begin(status, **{"Content-Type": "application/json", "Content-Length": str(len(data))})
        self.wfile.write(data)

    def chunk(self, data: bytes):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self):
        self.wfile.write(b"0\r\n\r\n")

    def die(self, reset: bool = True):
        """Drops the connection, as a process that is killed does."""
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.connection.close()

    def wait_peer_gone(self, timeout_s: float) -> bool:
        self.close_connection = True
        self.connection.settimeout(timeout_s)
        try:
            return self.connection.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False


class Fake(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, script: Callable[[Call], None], port: int = 0):
        super().__init__((HOST, port), Call)
        self.script, self.calls = script, []
        self.health: Callable[[Call], None] = lambda request: request.answer({"status": "ok"})
        self.url = f"http://{HOST}:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_):
        pass  # A script that dies on purpose.

    def stop(self):
        self.shutdown()
        self.server_close()


def named(name: str) -> Callable[[Call], None]:
    return lambda request: request.answer({"from": name})


@pytest.fixture
def fakes() -> Iterator[Callable[..., Fake]]:
    started = []

    def start(script: Callable[[Call], None], port: int = 0) -> Fake:
        started.append(Fake(script, port))
        return started[-1]

    yield start
    for fake in started:
        with suppress(OSError):
            fake.stop()


@pytest.fixture
def route(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a router over (url, model) pairs."""
    started = []

    def start(
        *backends: tuple[str, str],
        flags: tuple[str, ...] = (),
        healthy: bool = True,
        within: tuple[str, ...] = (),
        **environment: str,
    ) -> Server:
        urls, models = zip(*backends, strict=True)
        arguments = [
            "router", "--service-discovery", "static", "--static-backends", ",".join(urls),
            "--static-models", ",".join(models), "--routing-logic", "roundrobin",
            "--health-check-interval", "200ms", *flags,
        ]  # fmt: skip
        router = Server(
            "router", free_port(), arguments, tmp_path / "router.log", environment=environment, within=within
        )
        started.append(router)
        if healthy:
            return router.wait_healthy()
        wait_until("the router to listen", lambda: "router_ready" in router.log.read_text(), PATIENCE_S)
        return router

    yield start
    for router in started:
        # Whatever a test did to its clients and backends, nothing is left behind.
        if router.process.poll() is None:
            wait_until(
                "all requests to be over", lambda r=router: r.metric("terrace_router_in_flight") == 0, PATIENCE_S
            )
            assert router.stop() == 0, router.tail()


def body(model: str = "m", **more) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}


def ask(router: Server, model: str = "m", **headers: str):
    return router.call("POST", CHAT, body(model), headers, PATIENCE_S)


def dead_url() -> str:
    return f"http://{HOST}:{free_port()}"


def opened(router: Server, payload: dict) -> http.client.HTTPConnection:
    """A connection on which a request was sent and no answer read."""
    connection = http.client.HTTPConnection(HOST, router.port, timeout=PATIENCE_S)
    connection.request("POST", CHAT, json.dumps(payload).encode(), {"Content-Type": "application/json"})
    return connection


def test_each_event_arrives_before_the_next_is_made(fakes, route):
    go_on = threading.Semaphore(0)

    def script(request: Call):
        request.begin(**SSE)
        for i in range(5):
            request.chunk(b"data: %d\n\n" % i)
            assert go_on.acquire(timeout=PATIENCE_S)
        request.chunk(b"data: [DONE]\n\n")
        request.end()

    router = route((fakes(script).url, "m"))
    with closing(opened(router, body(stream=True))) as connection:
        response = connection.getresponse()
        assert response.headers["Content-Type"] == "text/event-stream"
        for i in range(5):
            assert response.readline() == b"data: %d\n" % i  # Here already, although the backend waits for us.
            response.readline()
            go_on.release()
        assert response.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_seen_by_the_backend(fakes, route, stream):
    busy, result = threading.Event(), []
    seen = threading.Event()

    def script(request: Call):
        if stream:
            request.begin(**SSE)
            request.chunk(b"data: 1\n\n")
        busy.set()
        result.append(request.wait_peer_gone(CANCEL_S))
        seen.set()

    router = route((fakes(script).url, "m"))
    connection = opened(router, body(stream=stream))
    assert busy.wait(PATIENCE_S)
    connection.close()
    assert seen.wait(PATIENCE_S)
    assert result == [True], f"the backend went on for more than {CANCEL_S} s"
    wait_until(
        "the attempt to be counted",
        lambda: router.metric("terrace_router_attempts_total", outcome="client_left") == 1,
        PATIENCE_S,
    )


def test_requests_take_turns_for_each_model(fakes, route):
    a, b, c = (fakes(named(name)) for name in "abc")
    router = route((a.url, "m"), (b.url, "m"), (c.url, "other"))
    answers = [ask(router).json()["from"] for _ in range(6)]
    assert sorted(answers[:2]) == ["a", "b"]
    assert answers == answers[:2] * 3
    assert ask(router, "other").json()["from"] == "c"


def states_of(router: Server) -> dict[str, str]:
    return {backend["url"]: backend["state"] for backend in router.health()["backends"]}


def test_a_dead_backend_costs_no_request_and_comes_back(fakes, route):
    alive, dead = fakes(named("alive")), dead_url()
    router = route((dead, "m"), (alive.url, "m"))
    assert [ask(router).json()["from"] for _ in range(8)] == ["alive"] * 8
    assert states_of(router) == {dead: "left_out", alive.url: "in_use"}
    assert router.health()["status"] == "degraded"
    assert "refused" in router.health()["why"]
    # It was not tried eight times: it is left out after the first.
    assert router.metric("terrace_router_attempts_total", backend=dead, outcome="unreachable") <= 1
    fakes(named("back"), int(dead.rsplit(":", 1)[1]))
    wait_until("the backend to be used again", lambda: ask(router).json()["from"] == "back", PATIENCE_S)


def test_a_backend_that_hangs_is_left_out_and_comes_back(fakes, route):
    hangs, alive = fakes(named("hangs")), fakes(named("alive"))
    well = hangs.health
    router = route((hangs.url, "m"), (alive.url, "m"), flags=("--health-check-timeout", "500ms"))
    wait_until("both to be used", lambda: set(states_of(router).values()) == {"in_use"}, PATIENCE_S)
    hangs.health = lambda request: request.wait_peer_gone(PATIENCE_S)
    wait_until("it to be left out", lambda: states_of(router)[hangs.url] == "left_out", PATIENCE_S)
    assert {ask(router).json()["from"] for _ in range(6)} == {"alive"}
    # Nor does anybody who asks for the models wait for it.
    asked = len(hangs.calls), len(alive.calls)
    assert router.call("GET", "/v1/models").status == 200
    assert (len(hangs.calls), len(alive.calls)) == (asked[0], asked[1] + 1)
    hangs.health = well
    wait_until("it to be used again", lambda: ask(router).json()["from"] == "hangs", PATIENCE_S)


def test_a_router_without_backends_says_503_and_recovers_by_itself(fakes, route):
    url = dead_url()
    router = route((url, "m"), healthy=False)
    wait_until("the first check", lambda: states_of(router)[url] == "left_out", PATIENCE_S)
    reply = router.call("GET", "/health")
    assert (reply.status, reply.json()["status"]) == (503, "unavailable")
    assert url in reply.json()["why"] and "refused" in reply.json()["why"]
    fakes(named("back"), int(url.rsplit(":", 1)[1]))
    router.wait_healthy(PATIENCE_S)
    assert router.health()["status"] == "ok"


# D25.
@pytest.mark.parametrize("reset", [False, True])
def test_a_request_whose_backend_dies_before_the_first_byte_goes_to_another(fakes, route, reset):
    dying, alive = fakes(lambda request: request.die(reset)), fakes(named("alive"))
    router = route((dying.url, "m"), (alive.url, "m"))
    assert [ask(router).json()["from"] for _ in range(4)] == ["alive"] * 4
    assert (len(dying.calls), len(alive.calls)) == (2, 4)


def test_a_request_that_kills_backends_gets_two(fakes, route):
    dying = [fakes(lambda request: request.die()) for _ in range(3)]
    router = route(*((fake.url, "m") for fake in dying))
    for asked in (2, 4, 6):
        reply = ask(router)
        assert (reply.status, reply.json()["error"]["code"]) == (502, "upstream_failed")
        assert sum(len(fake.calls) for fake in dying) == asked


def test_a_stream_that_dies_ends_with_an_error_event(fakes, route):
    asked = []

    def script(request: Call):
        asked.append(request)
        request.begin(**SSE)
        request.chunk(b"data: {}\n\n")
        request.die(reset=False)

    router = route((fakes(script).url, "m"), (fakes(script).url, "m"))
    with closing(opened(router, body(stream=True))) as connection:
        lines = connection.getresponse().read().split(b"\n\n")  # Raises if the message has no proper end.
    assert lines[0] == b"data: {}"
    assert json.loads(lines[1].removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert lines[2:] == [b""]
    assert len(asked) == 1, "what began is not asked for twice"


def test_a_stream_without_length_that_dies_ends_with_an_error_event(fakes, route):
    """Of a server that only closes its connection at the end; a crash looks the same but for the last event."""
    finished = []

    def script(request: Call):
        request.begin(**{"Content-Type": "text/event-stream", "Connection": "close"})
        request.wfile.write(b"data: {}\n\n" + (b"data: [DONE]\n\n" if finished else b""))
        request.die(reset=False)

    router = route((fakes(script).url, "m"))
    with open_stream(router.url, CHAT, body()) as response:
        lines = response.read().split(b"\n\n")
    assert lines[0] == b"data: {}"
    assert json.loads(lines[1].removeprefix(b"data: "))["error"]["code"] == "upstream_broke_off"
    finished.append(True)
    with open_stream(router.url, CHAT, body()) as response:
        assert response.read() == b"data: {}\n\ndata: [DONE]\n\n"


def test_a_plain_answer_that_dies_is_cut(fakes, route):
    def script(request: Call):
        request.begin(**{"Content-Type": "application/json", "Content-Length": "100"})
        request.wfile.write(b'{"half":')
        request.die(reset=False)

    router = route((fakes(script).url, "m"))
    with closing(opened(router, body())) as connection, pytest.raises(http.client.IncompleteRead):
        connection.getresponse().read()


def test_keys_hosts_and_ids_reach_the_backend(fakes, route):
    fake = fakes(named("a"))
    router = route((fake.url, "m"), OPENAI_API_KEY="routers-own", VLLM_API_KEY="routers-own")
    reply = ask(router, Authorization="Bearer clients", **{"X-Request-Id": "mine-1", "X-Other": "kept"})
    headers = fake.calls[0].headers
    assert headers["Authorization"] == "Bearer clients"
    assert headers["Host"] == fake.url.removeprefix("http://")
    assert headers["X-Request-Id"] == reply.headers["x-request-id"] == "mine-1"
    assert headers["X-Other"] == "kept"
    reply = ask(router)
    headers = fake.calls[1].headers
    assert headers["Authorization"] is None, "the router has no key of its own"
    assert len(headers["X-Request-Id"]) == 32 and headers["X-Request-Id"] == reply.headers["x-request-id"]


def test_hop_by_hop_fields_stay_on_their_hop(fakes, route):
    def script(request: Call):
        request.begin(**{"Connection": "X-Down", "X-Down": "1", "X-Kept": "2", "Content-Length": "0"})

    fake = fakes(script)
    router = route((fake.url, "m"))
    reply = ask(
        router, Connection="keep-alive, X-Up", **{"X-Up": "1", "Proxy-Authorization": "Basic x", "TE": "trailers"}
    )
    for name in ("X-Up", "Proxy-Authorization", "TE", "Connection"):
        assert fake.calls[0].headers[name] is None, name
    assert "x-down" not in reply.headers
    assert reply.headers["x-kept"] == "2"


def test_answers_pass_byte_for_byte(fakes, route):
    def script(request: Call):
        request.answer(b'{"error":  {"message":"no \xc3\xa9", "code":418}}\n', status=418)

    router = route((fakes(script).url, "m"))
    reply = ask(router)
    assert (reply.status, reply.body) == (418, b'{"error":  {"message":"no \xc3\xa9", "code":418}}\n')


def test_models_are_the_union_of_what_the_backends_say(fakes, route):
    def listing(*models):
        def script(request: Call):
            assert request.path == "/v1/models"
            if "gzip" in (request.headers["Accept-Encoding"] or ""):
                request.begin(**{"Content-Encoding": "gzip", "Content-Length": "0"})
                request.wfile.write(gzip.compress(b"{}"))
            elif request.headers["Authorization"] == "Bearer k":
                request.answer({"object": "list", "data": list(models)})
            else:
                request.answer({"error": {"message": "no key", "code": 401}}, status=401)

        return script

    a = fakes(listing({"id": "m", "object": "model", "max_model_len": 4096, "owned_by": "x"}))
    b = fakes(listing({"id": "m", "object": "model"}, {"id": "lora", "parent": "m"}))
    router = route((a.url, "m"), (b.url, "m"), (dead_url(), "m"))
    reply = router.call("GET", "/v1/models", headers={"Authorization": "Bearer k", "Accept-Encoding": "gzip"})
    assert reply.status == 200
    models = {model["id"]: model for model in reply.json()["data"]}
    assert reply.json()["object"] == "list"
    assert len(reply.json()["data"]) == 2
    assert models["m"] == {"id": "m", "object": "model", "max_model_len": 4096, "owned_by": "x"}
    assert models["lora"]["parent"] == "m"
    refusal = router.call("GET", "/v1/models")
    assert (refusal.status, refusal.json()["error"]["message"]) == (401, "no key")


@pytest.mark.parametrize(
    ("payload", "status", "code", "words"),
    [
        (b"{not json", 400, "invalid_json", "JSON"),
        (b"", 400, "invalid_json", "JSON"),
        (b"[]", 400, "invalid_json", "object"),
        (b'{"model":7}', 400, None, "string"),
        (b'{"model":"m","model":"n"}', 400, None, "twice"),
        (b'{"model":"nobodys"}', 404, "model_not_found", "/v1/models"),
    ],
)
def test_bad_requests_are_refused_in_openais_shape(fakes, route, payload, status, code, words):
    fake = fakes(named("a"))
    reply = route((fake.url, "m")).call("POST", CHAT, payload)
    assert reply.status == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert words in error["message"]
    if status == 404:
        assert "nobodys" in error["message"]
    assert fake.calls == []


@pytest.mark.parametrize("body", [b"{}", b'{"model":null}', b'{"model":""}'])
def test_no_model_means_the_only_one_and_is_refused_among_several(fakes, route, body):
    fake = fakes(named("a"))
    assert route((fake.url, "m")).call("POST", CHAT, body).status == 200
    reply = route((fake.url, "m"), (fake.url, "n")).call("POST", CHAT, body)
    assert (reply.status, reply.json()["error"]["code"]) == (400, "model_missing")


def test_a_coded_body_is_a_415(fakes, route):
    fake = fakes(named("a"))
    reply = route((fake.url, "m")).call("POST", CHAT, b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert (reply.status, reply.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert fake.calls == []


def test_unreachable_and_silent_backends_are_errors_that_say_so(fakes, route):
    router = route((dead_url(), "m"), (dead_url(), "m"), healthy=False)
    reply = ask(router)
    assert reply.status == 503
    assert reply.json()["error"]["code"] == "upstream_unreachable"
    silent = fakes(lambda request: request.wait_peer_gone(PATIENCE_S))
    reply = ask(route((silent.url, "m"), flags=("--first-byte-timeout", "200ms")))
    assert reply.status == 504
    assert reply.json()["error"]["code"] == "upstream_timeout"


def test_more_clients_than_the_soft_limit_of_descriptors(fakes, route):
    """Shells and units give 1,024; a stream takes two. Out of descriptors, the router would blame its backends."""
    busy, go_on = threading.Semaphore(0), threading.Event()

    def script(request: Call):
        busy.release()
        assert go_on.wait(PATIENCE_S)
        request.answer({"from": "a"})

    fake = fakes(script)
    router = route((fake.url, "m"), within=("prlimit", "--nofile=64:4096"))
    connections = [opened(router, body()) for _ in range(60)]
    for _ in connections:
        assert busy.acquire(timeout=PATIENCE_S)
    go_on.set()
    for connection in connections:
        with closing(connection):
            assert connection.getresponse().status == 200


def test_pages_of_the_router(fakes, route):
    fake = fakes(named("a"))
    router = route((fake.url, "m"))
    assert router.call("POST", "/terrace/lookup", body()).json() == {"from": "a"}
    assert fake.calls[0].path == "/terrace/lookup"
    assert router.call("GET", "/v1/nothing").status == 404
    assert router.call("POST", "/health").status == 404
    health = router.health()
    assert health == {
        "status": "ok",
        "backends": [{"url": fake.url, "models": ["m"], "state": "in_use", "in_flight": 0}],
    }
    ask(router)
    samples = list(parse_metrics(router.call("GET", "/metrics").body.decode()))
    assert ("terrace_router_in_flight", {"backend": fake.url}, 0.0) in samples
    assert ("terrace_router_request_seconds_count", {}, 2.0) in samples


def test_names_without_dots_and_missing_ports_are_taken(fakes, route):
    fake = fakes(named("a"))
    router = route((f"http://localhost:{fake.server_port}/", "m"))
    assert ask(router).json() == {"from": "a"}
    assert fake.calls[0].headers["Host"] == f"localhost:{fake.server_port}"


def test_a_stop_lets_running_answers_end(fakes, route):
    go_on = threading.Event()

    def script(request: Call):
        request.begin(**SSE)
        request.chunk(b"data: 1\n\n")
        assert go_on.wait(PATIENCE_S)
        request.chunk(b"data: 2\n\n")
        request.end()

    router = route((fakes(script).url, "m"))
    with closing(opened(router, body(stream=True))) as connection:
        response = connection.getresponse()
        assert response.readline() == b"data: 1\n"
        router.process.send_signal(signal.SIGTERM)

        def refuses() -> bool:
            with suppress(ConnectionError), socket.create_connection((HOST, router.port), timeout=PATIENCE_S):
                return False
            return True

        wait_until("the router to refuse new clients", refuses, PATIENCE_S)
        go_on.set()
        assert response.read() == b"\ndata: 2\n\n"
    assert router.process.wait(PATIENCE_S) == 0


def test_a_stop_tells_clients_whose_answers_it_cuts(fakes, route):
    busy = threading.Semaphore(0)

    def script(request: Call):
        if b"stream" in request.body:
            request.begin(**SSE)
            request.chunk(b"data: 1\n\n")
        busy.release()
        request.wait_peer_gone(PATIENCE_S)

    router = route((fakes(script).url, "m"), flags=("--drain-timeout", "100ms"))
    with closing(opened(router, body(stream=True))) as stream, closing(opened(router, body())) as plain:
        response = stream.getresponse()
        assert response.readline() == b"data: 1\n"
        for _ in range(2):
            assert busy.acquire(timeout=PATIENCE_S)
        router.process.send_signal(signal.SIGTERM)
        refusal = plain.getresponse()
        assert (refusal.status, json.loads(refusal.read())["error"]["code"]) == (503, "shutting_down")
        rest = response.read()  # Raises if the message has no proper end.
        assert json.loads(rest.removeprefix(b"\ndata: "))["error"]["code"] == "shutting_down"
    assert router.process.wait(PATIENCE_S) == 0
    assert "event=router_stopped requests_cut=true" in router.log.read_text()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(fakes, route, second):
    router = route((fakes(lambda request: request.wait_peer_gone(PATIENCE_S)).url, "m"))
    with closing(opened(router, body())):
        wait_until("the request to be under way", lambda: router.metric("terrace_router_in_flight") == 1, PATIENCE_S)
        router.process.send_signal(signal.SIGTERM)
        wait_until("the drain to begin", lambda: "router_stopping" in router.log.read_text(), PATIENCE_S)
        router.process.send_signal(second)
        assert router.process.wait(PATIENCE_S) == 128 + second


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--static-backends", "http://a,http://b", "--static-models", "m"], ["2 URLs", "1 name"]),
        (["--static-backends", "http://a,b:80", "--static-models", "m,m"], ['"b:80"', "http://HOST"]),
        (["--static-backend", "http://a", "--static-models", "m"], ["did you mean --static-backends?"]),
        (["--static-backends", "http://a", "--static-models", "m", "--routing-logic", "magic"], ["roundrobin"]),
    ],
)
def test_wrong_flags_are_one_line_and_exit_2(flags, words):
    done = subprocess.run([terrace_binary(), "router", *flags], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def test_a_taken_port_is_named(fakes):
    port = fakes(named("a")).server_port
    flags = ["--host", HOST, "--port", str(port), "--static-backends", "http://a", "--static-models", "m"]
    done = subprocess.run([terrace_binary(), "router", *flags], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert f"{HOST}:{port}" in done.stderr


def test_health_answers_while_all_backends_are_silent(fakes, route):
    busy = threading.Semaphore(0)

    def script(request: Call):
        busy.release()
        request.wait_peer_gone(PATIENCE_S)

    router = route((fakes(script).url, "m"))
    connections = [opened(router, body()) for _ in range(20)]
    for _ in connections:
        assert busy.acquire(timeout=PATIENCE_S)
    assert call(router.url, "GET", "/health", timeout_s=PATIENCE_S).json()["backends"][0]["in_flight"] == 20
    for connection in connections:
        connection.close()
