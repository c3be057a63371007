"""An environment that holds the wheel, what that needs, and nothing else (`make wheel` made it)."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and the NumPy that is installed here."""
    (wheel,) = (ROOT / "dist").glob("terrace_kv-*.whl")
    home = tmp_path_factory.mktemp("empty") / "venv"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, home], check=True)
    (site,) = home.glob("lib/python3*/site-packages")
    numpy = importlib.metadata.distribution("numpy")
    for name in {file.parts[0] for file in numpy.files or [] if file.parts[0] != ".."}:
        shutil.copytree(str(numpy.locate_file(name)), site / name)
    subprocess.run([uv, "pip", "install", "--quiet", "--offline", "--python", home / "bin/python", wheel], check=True)
    return home
