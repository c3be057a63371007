"""Would catch: a `make test` that keeps a newcomer waiting for lint before the first test, says nothing for minutes, or
begins with a time that has nothing to do with what follows.
"""

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/test as a module, with logs of its own."""
    loader = importlib.machinery.SourceFileLoader("stages", str(ROOT / "scripts/test"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("stages", loader))
    loader.exec_module(module)
    monkeypatch.setattr(module, "LOGS", tmp_path)
    return module


def test_tests_come_before_lint(stages: ModuleType) -> None:
    assert stages.UNASKED[0] == "unit"
    assert stages.UNASKED[-1] == "lint"


def test_a_long_command_says_how_far_it_is(stages: ModuleType, monkeypatch, capsys) -> None:
    monkeypatch.setattr(stages, "PROGRESS_S", 0.05)
    # It goes on when it was heard.
    heard = stages.LOGS / "heard"
    progress = stages.Stage.progress

    def hear(stage, seconds: float, text: str) -> None:
        progress(stage, seconds, text)
        if text == "[1/2] first":
            heard.touch()

    monkeypatch.setattr(stages.Stage, "progress", hear)
    command = f"echo '[1/2] first'; until [ -e '{heard}' ]; do :; done; echo '[2/2] second'"
    assert stages.Stage("unit", {}).check("slow", ["sh", "-c", command])
    assert " s: [1/2] first\n" in capsys.readouterr().out


def test_a_command_that_hangs_ends(stages: ModuleType, monkeypatch, capsys) -> None:
    monkeypatch.setattr(stages, "PROGRESS_S", 0.05)
    monkeypatch.setattr(stages, "COMMAND_TIMEOUT_S", 0.2)
    assert not stages.Stage("unit", {}).check("hangs", ["sh", "-c", "echo begun; exec sleep 600"])
    assert "begun" in capsys.readouterr().out


def test_the_time_at_the_start_is_that_of_the_last_run(stages: ModuleType, tmp_path: Path) -> None:
    first = stages.Times(tmp_path).estimate(["unit", "lint"], {})
    seconds = stages.COLD_SECONDS["unit"] + stages.COLD_SECONDS["lint"]
    assert first.startswith(f"about {round(seconds / 60)} minutes on 2 cores")
    for name, took in {"unit": 600, "nfs": 120, "vllm": 480}.items():
        stages.Times(tmp_path).note(name, took)
    # nfs and vllm run side by side.
    assert stages.Times(tmp_path).estimate(["unit", "nfs", "vllm"], stages.BESIDE).startswith("about 18 minutes, as")
    (tmp_path / "test-seconds.json").write_text("{torn")
    assert stages.Times(tmp_path).estimate(["unit", "lint"], {}) == first
    assert set(stages.COLD_SECONDS) == set(stages.STAGES)
