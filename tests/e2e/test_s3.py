"""Would catch: instances with one bucket that do not share, or not within two seconds; an answer that differs because
of it; a bucket's trouble that costs a request, or stays when it is over; a start that can not work and does not say
why; a secret on the screen, in a log, in the metrics.
"""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import COMPLETIONS, MODEL_NAME, Launcher, document, prompt
from s3_stack import LocalS3
from terrace_stack import Server, free_port, terrace_binary, wait_until, whole_chunks

CHUNK = 64
FLAGS = ("--chunk", str(CHUNK))
VISIBLE_S = 2


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[LocalS3]:
    (tmp_path / "s3").mkdir()
    server = LocalS3(tmp_path / "s3")
    yield server
    server.stop()


def saved(server: Server, body: dict) -> int:
    """Waits until all that was computed is in the bucket; how many tokens that is."""
    wait_until("no save pending", lambda: server.lookup(body)["pending_saves"] == 0, 30)
    found = server.lookup(body)
    return whole_chunks(found["prompt_tokens"], found["chunk"])


def test_instances_share_a_bucket_and_no_secret_is_told(launcher: Launcher, bucket: LocalS3):
    flags = (*FLAGS, *bucket.flags, "--s3-prefix", "one/two", "--log-level", "debug")
    a, b = (launcher.serve(*flags, environment=bucket.environment) for _ in range(2))
    body = prompt(document("bucket", 1050), 6)
    assert sum(b.lookup(body)["cached_by_tier"].values()) == 0  # And remembers that nothing was there.
    cold = a.stream(body, COMPLETIONS)
    assert (cold.cached_tokens, cold.miss_reason) == (0, "not_found")
    expected = saved(a, body)
    assert len(bucket.frames()) == expected // CHUNK

    begun = time.monotonic()
    wait_until("the other to see it", lambda: b.lookup(body)["cached_by_tier"]["s3"] == expected, 10)
    assert time.monotonic() - begun < VISIBLE_S + 1  # A little for the machine.
    warm = b.stream(body, COMPLETIONS)
    assert warm.by_tier["s3"] == warm.cached_tokens == expected
    assert warm.text == cold.text

    # A request asks by itself: no look-up before it, and chunks that are written while it is computed.
    other = prompt(document("bucket by itself", 1050), 6)
    cold = b.stream(other, COMPLETIONS)
    expected = saved(b, other)
    warm = a.stream(other, COMPLETIONS)
    assert warm.by_tier["s3"] == expected
    assert warm.text == cold.text

    keys = ["--s3-access-key-id", "ID", "--s3-secret-access-key", bucket.secret_key]
    config = subprocess.run(
        [terrace_binary(), "serve", "--model", "m.gguf", *flags, *keys, "--print-config"],
        capture_output=True,
        text=True,
        check=True,
    )
    told = [server.log.read_text() for server in (a, b)]
    told += [server.call("GET", path).body.decode() for server in (a, b) for path in ("/metrics", "/health")]
    for text in [*told, config.stdout, config.stderr]:
        assert bucket.secret_key not in text
    assert "***" in config.stdout


def test_a_bucket_that_goes_away_costs_no_request_and_is_joined_again(launcher: Launcher, bucket: LocalS3):
    a = launcher.serve(*FLAGS, *bucket.flags, environment=bucket.environment)
    body = prompt(document("bucket away", 700), 4)
    cold = a.stream(body, COMPLETIONS)
    expected = saved(a, body)
    bucket.stop()
    # Starts without it, since it may, and joins when it is there.
    b = launcher.serve(*FLAGS, *bucket.flags, "--allow-degraded", environment=bucket.environment)
    assert b.health()["status"] == "degraded" and "s3" in b.health()["why"]
    for salt in range(4):
        salted = {**body, "cache_salt": f"away-{salt}"}
        assert a.stream(salted, COMPLETIONS).text == cold.text
    wait_until("degraded", lambda: a.health()["status"] == "degraded" and "s3" in a.health()["why"], 30)
    bucket.start()
    wait_until("to join it", lambda: b.health() == {"status": "ok"}, 40)

    def heals() -> bool:
        a.stream({**body, "cache_salt": f"back-{time.monotonic()}"}, COMPLETIONS)  # What is saved next tries.
        return a.health() == {"status": "ok"}

    wait_until("healthy again", heals, 40)
    wait_until("the other to see it", lambda: b.lookup(body)["cached_by_tier"]["s3"] == expected, 10)
    assert b.stream(body, COMPLETIONS).text == cold.text


def refuse(model: Path, environment: dict[str, str], *flags: str) -> str:
    command = [terrace_binary(), "serve", "--model", model, "--served-name", MODEL_NAME, "--port", str(free_port())]
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin", **environment}
    )
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("time=")]
    assert len(lines) == 1, done.stderr
    for secret in environment.values():
        assert secret not in done.stderr
    return lines[0]


def test_a_start_that_can_not_work_says_which_and_what_to_do(model_f16: Path, bucket: LocalS3):
    flags, keys = bucket.flags, bucket.environment
    line = refuse(model_f16, keys, *flags[:2], "--s3-bucket", "no-such-bucket")
    assert "NoSuchBucket" in line and "create bucket no-such-bucket" in line and "--allow-degraded" in line
    line = refuse(model_f16, {**keys, "AWS_SECRET_ACCESS_KEY": "wrong"}, *flags)
    assert "SignatureDoesNotMatch" in line and "correct the access key" in line
    line = refuse(model_f16, bucket.add_account(), *flags)
    assert "list: 403 AccessDenied" in line and "s3:ListBucket on bucket kv-cache" in line
    line = refuse(model_f16, {**keys, "AWS_ACCESS_KEY_ID": "TERRACENOBODY"}, *flags)
    assert "InvalidAccessKeyId" in line and "correct the access key" in line
    line = refuse(model_f16, {}, *flags)
    assert "no credentials" in line and "AWS_ACCESS_KEY_ID" in line
    line = refuse(model_f16, keys, "--s3-endpoint", "http://no-such-host.invalid", "--s3-bucket", "kv-cache")
    assert "no-such-host.invalid has no address" in line
    line = refuse(
        model_f16, keys, "--s3-endpoint", bucket.endpoint.replace("http:", "https:"), "--s3-bucket", "kv-cache"
    )
    assert "write http://" in line
    line = refuse(model_f16, keys, "--s3-endpoint", bucket.endpoint)
    assert "--s3-bucket" in line
