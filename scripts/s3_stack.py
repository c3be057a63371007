"""A local S3 server (versitygw over a directory) for the demo and the end-to-end tests. Standard library only.

Its objects are plain files below `directory`/data/BUCKET. It dies with its parent. The binary comes from scripts/setup.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from terrace_stack import HOST, StackError, free_port, from_setup, wait_until
from terrace_stack import _die_with_parent as die_with_parent

BUCKET = "kv-cache"


class LocalS3:
    """One running server with one empty bucket, and keys of its own."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.access_key, self.secret_key = "TERRACELOCAL", secrets.token_hex(20)
        self.port = free_port()
        self.endpoint = f"http://{HOST}:{self.port}"
        # A bucket is a folder of the server's root.
        (directory / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        argv = [
            from_setup("VERSITYGW", "scripts/setup s3"),
            "--port",
            f"{HOST}:{self.port}",
            "--virtual-domain",
            "s3.localhost",
        ]
        accounts = self.directory / "accounts"
        accounts.mkdir(exist_ok=True)
        argv += ["--iam-dir", accounts, "--keep-alive", "--quiet", "posix", self.directory / "data"]
        with open(self.directory / "versitygw.log", "ab") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Keys by environment: they are in nobody's list of processes.
                env={**os.environ, "ROOT_ACCESS_KEY_ID": self.access_key, "ROOT_SECRET_ACCESS_KEY": self.secret_key},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        wait_until("the S3 server to answer", self._answers, 30)

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            log = (self.directory / "versitygw.log").read_text(errors="replace")
            raise StackError(f"the S3 server ended with code {self.process.returncode}:\n{log[-2000:]}")
        try:
            urllib.request.urlopen(self.endpoint, timeout=2).close()
        except urllib.error.HTTPError:
            return True  # Without a signature it refuses, and so it is there.
        except OSError:
            return False
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def add_account(self) -> dict[str, str]:
        """One more account, with no right to the bucket: its environment."""
        access_key, secret_key = "TERRACEGUEST", secrets.token_hex(20)
        argv = [from_setup("VERSITYGW", "scripts/setup s3"), "admin", "--endpoint-url", self.endpoint]
        argv += ["create-user", "--access", access_key, "--secret", secret_key, "--role", "user"]
        admin = {"ADMIN_ACCESS_KEY_ID": self.access_key, "ADMIN_SECRET_ACCESS_KEY": self.secret_key}
        subprocess.run(argv, check=True, capture_output=True, timeout=60, env={**os.environ, **admin})
        return {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}

    @property
    def flags(self) -> list[str]:
        return ["--s3-endpoint", self.endpoint, "--s3-bucket", BUCKET]

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def frames(self) -> list[Path]:
        return sorted((self.directory / "data" / BUCKET).rglob("*.kvf"))
