"""Would catch: an operator's configuration, as the deployment guide has it, that does not start, does not share, or is
understood otherwise than it says; a hash seed that changes keys; a secret of that file on the screen, in a log, in the
metrics.

The samples are in tests/data/guide, to the letter. Only what stands in <...> is filled in.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import chat, document
from s3_stack import BUCKET, LocalS3
from terrace_stack import HOST, Server, call, free_port, terrace_binary, wait_until, whole_chunks

DATA = Path(__file__).resolve().parents[1] / "data/guide"
MODEL = "Qwen/Qwen3-8B"  # As the guide names it; which weights answer to the name does not matter here.
API_KEY = "shared-api-key"
WRONG = "sesame-secret"  # A key that no server has.
PLACEHOLDERS = (
    "<bucket>",
    "<storagegrid_s3_endpoint_fqdn>",
    "<True/False>",
    "<storagegrid_s3_access_key>",
    "<storagegrid_s3_secret_key>",
)


@dataclass
class Sample:
    tier: str
    config: Path
    within: tuple[str | Path, ...]  # What its machine has that this one lacks: a mount.
    values: dict[str, str]  # What --print-config must say.
    secrets: list[str]


def fill_in(name: str, directory: Path, own: dict[str, str]) -> Path:
    text = (DATA / name).read_text()
    for placeholder, value in own.items():
        assert text.count(placeholder) == 1
        text = text.replace(placeholder, value)
    assert not re.search("<.*>", text)
    path = directory / "lmcache-config.yaml"
    path.write_text(text)
    path.chmod(0o644)  # As an editor leaves it.
    return path


@pytest.fixture(params=["s3", "nas"])
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sample]:
    ram = {"ram": str(100 << 30), "save-decode-cache": "true"}
    if request.param == "nas":
        mnt = tmp_path / "mnt"
        (mnt / "kvcache").mkdir(parents=True)
        mount = ("--mount", "sh", "-c", 'mount --bind "$0" /mnt && exec "$@"', mnt)
        # As root, as somebody who may have a namespace, or, where neither may mount, with another name in the file.
        for within in (("unshare", *mount), ("unshare", "--map-root-user", *mount), ()):
            if not within or subprocess.run([*within, "true"], capture_output=True, check=False).returncode == 0:
                break
        place = {} if within else {"/mnt/kvcache": str(mnt / "kvcache")}
        yield Sample(
            "shared_fs",
            fill_in("nas.yaml", tmp_path, place),
            within,
            {**ram, "shared": place.get("/mnt/kvcache", "/mnt/kvcache")},
            [API_KEY],
        )
        return
    bucket = LocalS3(tmp_path)
    own = [BUCKET, f"s3.localhost:{bucket.port}", "True", bucket.access_key, bucket.secret_key]
    values = {
        **ram,
        "s3-endpoint": f"s3://{BUCKET}.s3.localhost:{bucket.port}",
        "s3-disable-tls": "True",
        "s3-http2": "False",
        "s3-region": "us-east-1",
        "s3-access-key-id": "***",
        "s3-secret-access-key": "***",
    }
    yield Sample(
        "s3",
        fill_in("s3.yaml", tmp_path, dict(zip(PLACEHOLDERS, own, strict=True))),
        (),
        values,
        [API_KEY, bucket.access_key, bucket.secret_key],
    )
    bucket.stop()


def refusal(model: Path, config: Path) -> str:
    """What `terrace serve` says to this file: one line, after what it says of the file's keys."""
    done = subprocess.run(
        [terrace_binary(), "serve", "--model", model, "--port", str(free_port())],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "LMCACHE_CONFIG_FILE": str(config)},
    )
    assert done.returncode == 2, done.stderr
    assert WRONG not in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("time=", f"terrace serve: {config}:"))]
    return lines[0] if lines else done.stderr.splitlines()[-1]


def test_a_sample_filled_in_wrongly_is_refused_in_one_line_without_its_secret(tmp_path: Path, model_f16: Path):
    bucket = LocalS3(tmp_path)
    host = f"s3.localhost:{bucket.port}"
    right = [BUCKET, host, "True", bucket.access_key, bucket.secret_key]

    def refused(**other: str) -> str:
        own = dict(zip(PLACEHOLDERS, right, strict=True)) | {f"<{name}>": value for name, value in other.items()}
        return refusal(model_f16, fill_in("s3.yaml", tmp_path, own))

    try:
        line = refused(storagegrid_s3_secret_key=WRONG)
        assert "SignatureDoesNotMatch" in line and "correct the access key" in line and "--allow-degraded" in line
        line = refused(bucket="no-such-bucket")
        assert "NoSuchBucket" in line and "create bucket no-such-bucket" in line
        line = refused(storagegrid_s3_endpoint_fqdn="no-such-host.invalid", storagegrid_s3_secret_key=WRONG)
        assert f"{BUCKET}.no-such-host.invalid has no address" in line
        line = refused(storagegrid_s3_endpoint_fqdn=f"s3.localhost:{free_port()}")
        assert "is the server up" in line
        line = refused(**{"True/False": "False"})
        assert "this port speaks plain http" in line and "--s3-disable-tls" in line
    finally:
        bucket.stop()


def test_a_sample_that_is_not_filled_in_says_where(tmp_path: Path, model_f16: Path):
    path = tmp_path / "lmcache-config.yaml"
    text = (DATA / "s3.yaml").read_text()
    path.write_text(text)
    assert f"{path}:11: disable_tls: expected true or false" in refusal(model_f16, path)
    path.write_text(text.replace("<True/False>", "True"))
    line = refusal(model_f16, path)
    assert f"{path}:4 remote_url: " in line and "s3://<bucket>" in line


@dataclass
class Stack:
    """Chapters 3 and 4: two instances with the same file, and the router with the guide's flags."""

    sample: Sample
    directory: Path
    model: Path

    def __post_init__(self):
        self.servers: list[Server] = []
        self.a, self.b = (self._serve(number, seed) for number, seed in enumerate(("0", "4711")))
        for server in (self.a, self.b):
            server.wait_caching(MODEL)
        self.router = self._start(
            "router",
            [
                "router",
                "--service-discovery",
                "static",
                "--static-backends",
                f"{self.a.url},{self.b.url}",
                "--static-models",
                f"{MODEL},{MODEL}",
                "--routing-logic",
                "roundrobin",
            ],
            {"OPENAI_API_KEY": API_KEY},
        ).wait_healthy()

    def environment(self, seed: str) -> dict[str, str]:
        return {"LMCACHE_CONFIG_FILE": str(self.sample.config), "PYTHONHASHSEED": seed, "VLLM_API_KEY": API_KEY}

    def _start(self, name: str, arguments: list[str | Path], environment: dict[str, str], **more) -> Server:
        log = self.directory / f"{name}.log"
        self.servers.append(Server(name, free_port(), arguments, log, API_KEY, environment, **more))
        return self.servers[-1]

    def _serve(self, number: int, seed: str) -> Server:
        arguments = ["serve", "--model", self.model, "--served-name", MODEL]
        # A busy machine may load more slowly than it computes, and then compute: not the matter here.
        environment = {**self.environment(seed), "TERRACE_LOAD_DEADLINE": "30s", "TERRACE_LOG_LEVEL": "debug"}
        return self._start(f"instance-{number}", arguments, environment, within=self.sample.within)

    def doctor(self) -> subprocess.CompletedProcess[str]:
        """Chapter 5, by the same file."""
        sharing = ["--instances", f"{self.a.url},{self.b.url}", "--router", self.router.url, "--prompt-tokens", "600"]
        return subprocess.run(
            [*self.sample.within, terrace_binary(), "doctor", "--json", "--measure", "20ms", *sharing],
            capture_output=True,
            text=True,
            timeout=300,
            env={"PATH": "/usr/bin:/bin", **self.environment("0")},
        )

    def close(self) -> None:
        # The router first, by one signal: a second would end it at once. Instances stop side by side.
        codes = [self.servers.pop().stop()] if self.servers[-1].name == "router" else []
        for server in self.servers:
            server.ask_to_stop()
        codes += [server.stop() for server in self.servers]
        assert not any(codes), codes


@pytest.fixture
def stack(sample: Sample, tmp_path: Path, model_f16: Path) -> Iterator[Stack]:
    it = Stack(sample, tmp_path, model_f16)
    yield it
    it.close()


def test_the_guides_sample_shares_between_two_instances_behind_the_router(stack: Stack):
    sample, a, b = stack.sample, stack.a, stack.b
    body = {**chat(document(f"guide {sample.tier}", 1700), 8), "model": MODEL}
    cold = a.stream(body)
    expected = whole_chunks(cold.prompt_tokens)
    assert expected > 0 and cold.cached_tokens == 0
    wait_until("B to see what A wrote", lambda: b.lookup(body)["cached_by_tier"][sample.tier] == expected, 30)
    warm = b.stream(body)
    assert warm.by_tier[sample.tier] == warm.cached_tokens == expected
    assert warm.text == cold.text
    # Chapter 4: by the router, with the clients' key, and without one.
    for _ in range(2):
        routed = stack.router.stream(body)
        assert routed.cached_tokens >= expected and routed.text == cold.text
    assert call(stack.router.url, "POST", "/v1/chat/completions", body).status == 401

    doctor = stack.doctor()
    assert doctor.returncode == 0, doctor.stdout
    findings = {finding["id"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    assert findings["sharing.instance_2"]["severity"] == "ok"
    assert sample.tier in findings["sharing.instance_2"]["measured"]["cached_by_tier"]
    appeared = findings["sharing.objects" if sample.tier == "s3" else "sharing.frames"]
    assert appeared["severity"] == "ok" and " appeared in " in appeared["what"]

    logs = [server.log.read_text() for server in (a, b)]
    for log in logs:
        if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 100 << 30:
            assert "event=ram_cap_cut" in log
        assert "save_chunk_meta: every chunk carries a header that proves it" in log
    command = [*sample.within, terrace_binary(), "serve", "--host", HOST, "--print-config"]
    config = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", **stack.environment("0")}
    )
    for name, value in sample.values.items():
        line = rf"^{name} = {re.escape(value)} +\(file {re.escape(str(sample.config))}:\d+ \w+"
        assert re.search(line, config.stdout, re.MULTILINE | re.IGNORECASE), (name, config.stdout)
    told = [server.call("GET", path).body.decode() for server in (a, b) for path in ("/metrics", "/health")]
    for text in [*logs, *told, config.stdout, config.stderr, doctor.stdout, doctor.stderr]:
        for secret in sample.secrets:
            assert secret not in text
