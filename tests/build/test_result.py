"""Would catch: an error that can be dropped without the compiler saying so."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
#include "terrace/result.h"
terrace::Result<void> Save();
terrace::Result<int> Count();
int main() {
  %s
}
"""


def compiles(statement):
    argv = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", "-I", ROOT / "include", "-x", "c++", "-"]
    done = subprocess.run(argv, input=PROGRAM % statement, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "nodiscard" in done.stderr, done.stderr
    return done.returncode == 0


def test_an_ignored_result_does_not_compile():
    assert not compiles("Save();")
    assert not compiles("Count();")


def test_a_handled_result_compiles():
    assert compiles("if (!Save()) return 1;")
    assert compiles("return Count().value_or(0);")
