"""Would catch: a doctor that finds instances sharing which don't, or the other way round; that needs what only our own
server tells; that leaves something behind, tells a secret, or exits as if all were well.
"""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import MODEL_NAME, Launcher
from s3_stack import LocalS3
from terrace_stack import HOST, Server, free_port, terrace_binary, wait_until
from test_router import Call, Fake

CHUNK = 64
QUICK = ("--measure", "20ms", "--chunk", str(CHUNK), "--prompt-tokens", "200", "--ram", "64MiB")


def doctor(*flags: object, **environment: str) -> tuple[int, dict[str, dict]]:
    """The exit code, and the findings by id."""
    done = subprocess.run(
        [terrace_binary(), "doctor", "--json", *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    for secret in environment.values():
        assert secret not in done.stdout + done.stderr
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)
    findings = {finding["id"]: finding for finding in document["findings"]}
    assert (document["status"] == "problem") == (done.returncode == 1)
    assert all(finding["remedy"] for finding in findings.values() if finding["severity"] != "ok")
    return done.returncode, findings


def problems(findings: dict[str, dict]) -> list[str]:
    return [f"{f['id']}: {f['what']}" for f in findings.values() if f["severity"] == "problem"]


def router_to(tmp_path: Path, *backends: str) -> Server:
    arguments = [
        "router", "--service-discovery", "static", "--static-backends", ",".join(backends),
        "--static-models", ",".join([MODEL_NAME] * len(backends)), "--routing-logic", "roundrobin",
    ]  # fmt: skip
    return Server("router", free_port(), arguments, tmp_path / "router.log").wait_healthy()


def test_two_instances_and_the_router_are_proved_to_share(launcher: Launcher, tmp_path: Path, model_f16: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    flags = ("--shared", shared, "--chunk", str(CHUNK))
    a, b = launcher.serve(*flags), launcher.serve(*flags)
    router = router_to(tmp_path, a.url, b.url)
    try:
        size = ("--size", model_f16, "--prefill-tps", 1)  # So slow that no machine's storage loses.
        asked = ("--shared", shared, *size, "--instances", f"{a.url},{b.url}/v1", "--router", router.url)
        code, found = doctor(*asked, *QUICK)
    finally:
        router.stop()
    assert code == 0, problems(found)
    assert found["sharing.cold"]["measured"]["cached_tokens"] == 0
    other = found["sharing.instance_2"]["measured"]
    expected = found["sharing.saved"]["measured"]["tokens"]
    assert expected >= 2 * CHUNK
    assert other["cached_tokens"] == expected
    assert "shared_fs" in other["cached_by_tier"]
    assert "same text" in found["sharing.instance_2"]["what"]
    assert found["sharing.frames"]["measured"]["folders"] >= 1
    for turn in range(1, 5):
        assert found[f"sharing.router_{turn}"]["measured"]["cached_tokens"] == expected
    assert found["size.token"]["measured"]["bytes_per_token"] == 30 * 3 * 128 * 2
    assert found["size.pays_shared"]["severity"] == "ok"
    assert sorted(path.name for path in shared.iterdir() if path.name.startswith("terrace-doctor")) == []


def test_instances_that_do_not_share_are_told_so(launcher: Launcher, tmp_path: Path):
    servers = []
    for name in "ab":
        (tmp_path / name).mkdir()
        servers.append(launcher.serve("--shared", tmp_path / name, "--chunk", str(CHUNK)))
    fakes = Fake(lambda request: request.answer({"data": [{"id": "another"}]}))
    try:
        code, found = doctor("--instances", f"{servers[0].url},{fakes.url}", *QUICK)
        assert code == 1 and "serves another" in found["sharing.reach"]["what"]
    finally:
        fakes.stop()
    code, found = doctor("--instances", ",".join(server.url for server in servers), *QUICK)
    assert code == 1
    assert found["sharing.instance_2"]["severity"] == "problem"
    assert found["sharing.instance_2"]["measured"]["cached_tokens"] == 0
    assert "not_found" in found["sharing.instance_2"]["what"]
    assert found["sharing.same_instance"]["severity"] == "ok"


class Node(Server):
    def listening(self) -> list[str]:
        return ["--metrics-port", str(self.port)]


def config_of(tmp_path: Path, socket: Path) -> Path:
    config = tmp_path / "engine.yaml"
    config.write_text(f"node: {socket}\n")
    return config


@pytest.mark.parametrize("by", ["flag", "variable", "file"])
def test_a_node_is_joined_as_an_engine_does(by: str, tmp_path: Path):
    socket, shared = tmp_path / "node.sock", tmp_path / "kv"
    flags = ("--node", socket) if by == "flag" else ("--config", config_of(tmp_path, socket)) if by == "file" else ()
    variables = {"TERRACE_NODE": str(socket)} if by == "variable" else {}

    def findings() -> tuple[int, dict[str, dict]]:
        done = subprocess.run(
            [terrace_binary(), "doctor", "--json", *map(str, flags), *QUICK],
            capture_output=True,
            text=True,
            timeout=300,
            env={"PATH": "/usr/bin:/bin", **variables},
        )
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, {f["id"]: f for f in json.loads(done.stdout)["findings"]}

    code, found = findings()
    assert code == 1
    assert "no such file" in found["node.join"]["what"]
    assert found["node.join"]["remedy"].startswith("start `terrace node --socket")
    node = ["node", "--socket", socket, "--ram", "64MiB", "--shared", shared, "--allow-degraded"]
    server = Node("node", free_port(), node, tmp_path / "node.log")
    try:
        server.wait_healthy()
        code, found = findings()
        assert code == 1
        assert found["node.join"]["severity"] == "ok"
        assert "shared_fs" in found["node.tiers"]["what"] and "shared directory" in found["node.tiers"]["what"]
        shared.mkdir()
        wait_until("the tier to join", lambda: findings()[0] == 0, 120)
        assert "config.shared" not in findings()[1], "the node has the tiers"
    finally:
        server.stop()


def other_server(cached: int, asked: list[tuple[str, str]]) -> Fake:
    """A server that tells cached tokens as OpenAI does, and nothing of ours: cold at first, then `cached`.

    `asked` gets each prompt, with the key that came.
    """

    def script(request: Call):
        if request.path == "/v1/models":
            return request.answer({"data": [{"id": "m", "max_model_len": 1000}]})
        if request.path != "/v1/completions":
            return request.answer({"error": {"message": "no such path"}}, status=404)
        usage = {"prompt_tokens": 220, "prompt_tokens_details": {"cached_tokens": cached if asked else 0}}
        asked.append((json.loads(request.body)["prompt"], request.headers["Authorization"]))
        return request.answer({"choices": [{"text": " yes"}], "usage": usage})

    return Fake(script)


@pytest.mark.parametrize(("cached", "code"), [(208, 0), (16, 1)])
def test_servers_that_tell_only_cached_tokens_are_judged_by_them(cached: int, code: int):
    asked = []
    server = other_server(cached, asked)
    try:
        got, found = doctor("--router", server.url, *QUICK, VLLM_API_KEY="the-key-of-all")
    finally:
        server.stop()
    assert got == code, problems(found)
    assert found["sharing.cold"]["measured"]["cached_tokens"] == 0
    assert found["sharing.router_1"]["measured"]["cached_tokens"] == cached
    assert len(asked) == 3 and len(set(asked)) == 1
    assert asked[0][1] == "Bearer the-key-of-all"


def test_a_bucket_is_judged_and_no_secret_is_told(tmp_path: Path):
    (tmp_path / "s3").mkdir()
    bucket = LocalS3(tmp_path / "s3")
    try:
        code, found = doctor(*bucket.flags, *QUICK, **bucket.environment)
        assert code == 0, problems(found)
        assert found["s3.bandwidth"]["measured"]["read_bytes_per_s"] > 0
        code, found = doctor(*bucket.flags, *QUICK, **{**bucket.environment, "AWS_SECRET_ACCESS_KEY": "wrong-secret"})
        assert code == 1 and found["s3.list"]["measured"]["trouble"] == "wrong_key"
        code, found = doctor(*bucket.flags, *QUICK, **bucket.add_account())
        assert code == 1 and found["s3.list"]["measured"]["trouble"] == "denied"
        code, found = doctor(*bucket.flags, *QUICK, "--s3-region", "eu-west-9", **bucket.environment)
        assert code == 0 and found["s3.region"]["measured"]["trouble"] == "other_region"
        assert found["s3.region"]["remedy"].endswith("--s3-region us-east-1")
    finally:
        bucket.stop()
    code, found = doctor(*bucket.flags, *QUICK, **bucket.environment)
    assert code == 1 and found["s3.server"]["measured"]["trouble"] == "unreachable"


def test_size_needs_nothing_else(model_f16: Path):
    code, found = doctor("--size", model_f16)
    assert code == 0
    assert {finding["section"] for finding in found.values()} == {"size"}
    # 1,000 users of 4,096 tokens.
    assert found["size.users"]["measured"]["bytes"] == 23040 * 4096 * 1000
    assert found["size.pays_at_1000"]["measured"]["pays_above_bytes_per_s"] == 23040 * 1000
    code, found = doctor("--size", "/no/such/model.gguf")
    assert code == 1 and found["size.model"]["severity"] == "problem"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--instances", f"{HOST}:8001"], "http://"),
        (["--router", "http://user:key@host"], "VLLM_API_KEY"),
        (["--instances", "user:key@host:8000"], "VLLM_API_KEY"),
        (["--disk", "/tmp"], "--disk-size"),
        (["--nosuch"], "--nosuch"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(flags: list[str], words: str):
    done = subprocess.run([terrace_binary(), "doctor", *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and done.stderr.count("\n") == 1 and "user:key" not in done.stderr
