"""Would catch: a variable written wrong that is passed over in silence, and one of our own that is taken for such."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("TERRACE_BIN", str(ROOT / "build/release/src/cli/terrace"))
READ = re.compile(r"(?:environ|getenv|env)[.\[(get]*[\"'](TERRACE_[A-Z_]+)|\$\{?(TERRACE_[A-Z_]+)")


def run(*arguments, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TERRACE_")}
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, env=clean | variables, check=False)


def test_a_variable_that_nobody_reads_is_an_error_with_a_hint():
    for verb in ("serve", "router"):
        done = run(verb, "--print-config", TERRACE_STATIC_BACKEND="http://a")
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "TERRACE_STATIC_BACKEND" in done.stderr and "did you mean TERRACE_STATIC_BACKENDS?" in done.stderr
        assert run(verb, "--help", TERRACE_STATIC_BACKEND="http://a").returncode == 0


def test_variables_of_scripts_tests_and_other_verbs_are_known():
    files = [path for top in ("scripts", "tests", "bench") for path in (ROOT / top).rglob("*") if path.is_file()]
    names = set()
    for path in [*files, ROOT / "Makefile"]:
        if path.suffix in (".py", ".sh", "") and path != Path(__file__):
            names |= {a or b for a, b in READ.findall(path.read_text(errors="replace"))}
    assert "TERRACE_CACHE" in names
    done = run("router", "--print-config", TERRACE_RAM="1GiB", **dict.fromkeys(names, "x"))
    assert done.returncode == 0, done.stderr
