"""Would catch: a private node that is configured otherwise than the engine it serves, or that outlives it."""

import os
import subprocess
import textwrap
from pathlib import Path


def run(home: Path, config: Path, code: str) -> str:
    """What `code` prints, with this file and no other configuration."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TERRACE_", "LMCACHE_", "AWS_"))}
    done = subprocess.run(
        [home / "bin/python", "-c", textwrap.dedent(code)],
        env=environment | {"LMCACHE_CONFIG_FILE": str(config)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_has_the_tiers_of_lmcaches_file(home: Path, tmp_path: Path) -> None:
    share = tmp_path / "kv"
    share.mkdir()
    config = tmp_path / "lmcache.yaml"
    config.write_text(
        "max_local_cpu_size: 0.125\nsave_decode_cache: true\nremote_storage_plugins: ['fs']\n"
        f"extra_config:\n  remote_storage_plugin.fs.base_path: {share}\n"
    )
    code = f"""
        import time
        from terrace_kv import Client
        from terrace_kv.vllm.node import PrivateNode, private_socket
        socket = private_socket({str(tmp_path)!r})
        client = Client(node=socket)
        node = PrivateNode(socket, client.setting)
        deadline = time.monotonic() + 30
        while not client.connected:
            assert time.monotonic() < deadline
        assert client.tier_names == ["ram", "shared_fs"], client.tier_names
        assert client.setting("save-decode-cache") == "true"
        node.stop()
        print("fine")
    """
    assert run(home, config, code) == "fine\n"


def test_it_has_the_bucket_of_lmcaches_file_and_its_keys(home: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nenv > {told}\n")
    program.chmod(0o700)
    config = tmp_path / "lmcache.yaml"
    config.write_text(
        'local_cpu: true\nmax_local_cpu_size: 0.125\nremote_url: "s3://kv.s3.example"\nextra_config:\n'
        '  s3_region: "us-west-2"\n  aws_access_key_id: "of-the-file"\n  aws_secret_access_key: "sesame"\n'
    )
    config.chmod(0o600)
    code = f"""
        from terrace_kv import Client
        from terrace_kv.vllm import node as ours
        ours.program = lambda: {str(program)!r}
        node = ours.PrivateNode("@nobody", Client(node="@nobody").setting)
        assert node._process.wait(60) == 0
    """
    run(home, config, code)
    variables = dict(line.split("=", 1) for line in told.read_text().splitlines() if line.startswith("TERRACE_S3_"))
    assert variables["TERRACE_S3_ENDPOINT"] == "s3://kv.s3.example"
    assert variables["TERRACE_S3_REGION"] == "us-west-2"
    assert variables["TERRACE_S3_ACCESS_KEY_ID"] == "of-the-file"
    assert variables["TERRACE_S3_SECRET_ACCESS_KEY"] == "sesame"
