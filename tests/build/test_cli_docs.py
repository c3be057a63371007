"""Would catch: flags that a reference page lacks or describes otherwise than the program does."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("TERRACE_BIN", str(ROOT / "build/release/src/cli/terrace"))


def test_the_reference_page_prints_what_the_program_says():
    page = (ROOT / "docs/reference/cli.md").read_text()
    for verb in ([], ["serve"], ["node"], ["router"], ["doctor"]):
        said = subprocess.run([PROGRAM, *verb, "--help"], capture_output=True, text=True, check=True).stdout
        assert f"```\n{said}```\n" in page, f"terrace {' '.join(verb)} --help: copy it into docs/reference/cli.md"


def test_the_page_of_options_has_every_verb():
    """What stands under each is checked where it is made, by src/cli/reference_test.cc."""
    page = (ROOT / "docs/reference/config.md").read_text()
    usage = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, check=True).stdout
    verbs = re.findall(r"^  (\w+)  ", usage, re.MULTILINE)
    assert verbs and re.findall(r"^## terrace (\w+)$", page, re.MULTILINE) == verbs
