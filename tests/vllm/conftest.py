"""Real vLLM on the CPU, the real model, the wheel as a user installs it. Run by `make test-vllm`.

A vLLM takes a minute to start, so there are few processes of them, and each does a whole plan (run_llm.py).
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = Path(os.environ["VLLM_MODEL"])
STEP_TIMEOUT_S = 900  # Importing vLLM alone takes a minute on a machine that does other things.


@dataclass
class Runner:
    folder: Path

    def share(self, name: str = "kv") -> Path:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def run(self, *engines: dict, **env: str) -> list[list[dict]]:
        """A fresh process with its own configuration in the environment, one engine after the other in it; its log lies
        beside."""
        number = len(list(self.folder.glob("run-*.log")))
        log = self.folder / f"run-{number}.log"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        environment |= {"TERRACE_RAM": "512MiB", "TERRACE_CHUNK": "64", "TERRACE_LOAD_DEADLINE": "120s", **env}
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, Path(__file__).parent / "run_llm.py"],
                input=json.dumps({"engines": [{"model": str(MODEL), **engine} for engine in engines]}).encode(),
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                timeout=STEP_TIMEOUT_S,
                check=False,
            )
        assert done.returncode == 0, f"vLLM ended with {done.returncode}; {log}:\n{log.read_text()[-4000:]}"
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same bytes in another folder."""
    folder = tmp_path_factory.mktemp("models") / "smol"
    shutil.copytree(MODEL, folder)
    return folder
