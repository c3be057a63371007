"""An environment that holds the wheel and nothing else (`make wheel` made it)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone."""
    (wheel,) = (ROOT / "dist").glob("terrace_kv-*.whl")
    home = tmp_path_factory.mktemp("empty") / "venv"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, home], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--offline", "--python", home / "bin/python", wheel], check=True)
    return home
