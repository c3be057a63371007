"""Would catch: a private node that is configured otherwise than the engine it serves, that outlives it, or that stays
dead; a tier that is not there at the start and is never joined."""

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
    program.write_text(f"#!/bin/sh\nenv > {told}.new\nmv {told}.new {told}\n")
    program.chmod(0o700)
    config = tmp_path / "lmcache.yaml"
    config.write_text(
        'local_cpu: true\nmax_local_cpu_size: 0.125\nremote_url: "s3://kv.s3.example"\nextra_config:\n'
        '  s3_region: "us-west-2"\n  aws_access_key_id: "of-the-file"\n  aws_secret_access_key: "sesame"\n'
    )
    config.chmod(0o600)
    code = f"""
        import os, time
        from terrace_kv import Client
        from terrace_kv.vllm import node as ours
        ours.program = lambda: {str(program)!r}
        node = ours.PrivateNode("@nobody", Client(node="@nobody").setting)
        deadline = time.monotonic() + 60
        while not os.path.exists({str(told)!r}):
            assert time.monotonic() < deadline
        node.stop()
    """
    run(home, config, code)
    variables = dict(line.split("=", 1) for line in told.read_text().splitlines() if line.startswith("TERRACE_S3_"))
    assert variables["TERRACE_S3_ENDPOINT"] == "s3://kv.s3.example"
    assert variables["TERRACE_S3_REGION"] == "us-west-2"
    assert variables["TERRACE_S3_ACCESS_KEY_ID"] == "of-the-file"
    assert variables["TERRACE_S3_SECRET_ACCESS_KEY"] == "sesame"


def test_one_that_is_killed_is_started_again_and_joined_by_all_ranks(home: Path, tmp_path: Path) -> None:
    config = tmp_path / "lmcache.yaml"
    config.write_text("max_local_cpu_size: 0.125\n")
    code = f"""
        import logging, os, signal, subprocess, sys, time
        from terrace_kv import Client
        from terrace_kv.vllm import node as ours
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        ours.PAUSE_MIN_S = 0.01

        def wait(what, done):
            deadline = time.monotonic() + 60
            while not done():
                assert time.monotonic() < deadline, what
                time.sleep(0.01)

        socket = ours.private_socket({str(tmp_path)!r})
        other = "import sys; from terrace_kv import Client; client = Client(node=sys.argv[1])\\n"
        other += "for _ in sys.stdin: print(client.connected, flush=True)"
        command = [sys.executable, "-c", other, socket]
        rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def rank_connected():
            rank.stdin.write("?\\n")
            rank.stdin.flush()
            return rank.stdout.readline() == "True\\n"

        client = Client(node=socket)
        node = ours.PrivateNode(socket, client.setting)
        for _ in range(2):
            wait("clients", lambda: client.connected and rank_connected())
            killed = node._process.pid
            os.kill(killed, signal.SIGKILL)
            wait("the loss", lambda: not client.connected or node._process.pid != killed)
            wait("another one", lambda: node._process.pid != killed)
            assert not os.path.exists(f"/proc/{{killed}}"), "a zombie"
        wait("clients", lambda: client.connected and rank_connected())
        last = node._process.pid
        node.stop()
        assert not os.path.exists(f"/proc/{{last}}")
        rank.stdin.close()
        rank.wait()
    """
    lines = run(home, config, code).splitlines()
    assert len([line for line in lines if "was killed by signal 9" in line and "started again in" in line]) == 2, lines


def test_one_that_can_not_start_is_tried_at_growing_pauses(home: Path, tmp_path: Path) -> None:
    config = tmp_path / "lmcache.yaml"
    config.write_text("max_local_cpu_size: 0.125\n")
    program = tmp_path / "program"
    code = f"""
        import time
        from pathlib import Path
        from terrace_kv import Client
        from terrace_kv.vllm import node as ours
        program = Path({str(program)!r})
        ours.program = lambda: str(program)
        ours.PAUSE_MIN_S = 0.01
        said, pauses = [], []
        ours.logger.warning = lambda text, why, pause: (said.append(why), pauses.append(pause))
        node = ours.PrivateNode("@nobody", Client(node="@nobody").setting)

        def wait(count):
            deadline = time.monotonic() + 60
            while len(said) < count:
                assert time.monotonic() < deadline, said
                time.sleep(0.01)

        wait(6)
        assert "can't be started" in said[0] and "No such file" in said[0], said
        assert pauses[:6] == [0.01 * 2**n for n in range(1, 7)], pauses
        program.write_text("#!/bin/sh\\nexit 2\\n")
        program.chmod(0o700)
        deadline = time.monotonic() + 60
        while "exit code 2" not in said[-1]:
            assert time.monotonic() < deadline, said
        node.stop()
        print("fine")
    """
    assert run(home, config, code) == "fine\n"


def test_a_directory_that_is_mounted_later_is_joined(home: Path, tmp_path: Path) -> None:
    share = tmp_path / "kv"
    config = tmp_path / "lmcache.yaml"
    config.write_text(
        "max_local_cpu_size: 0.125\nremote_storage_plugins: ['fs']\n"
        f"extra_config:\n  remote_storage_plugin.fs.base_path: {share}\n"
    )
    code = f"""
        import os, re, time
        from pathlib import Path
        from terrace_kv import Client
        from terrace_kv.vllm.node import PrivateNode, private_socket
        import terrace_kv.vllm
        text = Path(terrace_kv.vllm.__file__).with_name("connector.py").read_text()
        settings = eval(re.search(r"^SETTINGS = (.*)$", text, re.MULTILINE)[1])
        socket = private_socket({str(tmp_path)!r})
        client = Client(node=socket, settings=settings)
        node = PrivateNode(socket, client.setting)

        def why():
            call = client.stats()
            call.wait(10)
            found = call.poll()
            return dict(found.tiers)["shared_fs"].why if found.connected else None

        def wait(done):
            deadline = time.monotonic() + 60
            while not done(why()):
                assert time.monotonic() < deadline, why()
                time.sleep(0.01)

        wait(lambda why: why and "shared directory" in why)
        os.mkdir({str(share)!r})
        wait(lambda why: why == "")
        node.stop()
        print("fine")
    """
    assert run(home, config, code) == "fine\n"


def test_each_key_of_lmcache_that_means_nothing_here_has_its_line(home: Path, tmp_path: Path) -> None:
    keys = [
        "local_cpu", "remote_serde", "use_layerwise", "nixl_backends", "cache_policy", "numa_mode", "py_enable_gc",
        "priority_limit", "enable_kv_events", "pin_timeout_sec", "lookup_timeout_ms", "min_retrieve_tokens",
    ]  # fmt: skip
    config = tmp_path / "lmcache.yaml"
    numbers = ("priority_limit", "pin_timeout_sec", "lookup_timeout_ms", "min_retrieve_tokens")
    config.write_text("".join(f"{key}: {1 if key in numbers else 'true'}\n" for key in keys))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TERRACE_", "LMCACHE_", "AWS_"))}
    done = subprocess.run(
        [home / "bin/python", "-c", "from terrace_kv import Client; Client(settings={'ram': '16MiB'})"],
        env=environment | {"LMCACHE_CONFIG_FILE": str(config)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for number, key in enumerate(keys, 1):
        assert f"lmcache.yaml:{number}: {key}: " in done.stderr, key
