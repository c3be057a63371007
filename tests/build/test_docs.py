"""Would catch: an event or metric that operators can't look up, or that is described and no code has."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EVENT = re.compile(r"\blog::(?:Debug|Info|Warn|Error)\(\s*([^,)\s]+)")
METRIC = re.compile(r'"(terrace_[a-z0-9_]+)"')


def sources():
    return [path for path in (ROOT / "src").rglob("*.cc") if not path.stem.endswith("_test")]


def listed_in(document):
    names = re.findall(r"^\| `([a-z0-9_]+)` \|", (ROOT / "docs/reference" / document).read_text(), re.MULTILINE)
    assert names == sorted(set(names)), "the list is in alphabetical order, each name once"
    return set(names)


def test_every_event_is_in_the_reference_and_the_other_way_round():
    used = set()
    for path in sources():
        for argument in EVENT.findall(path.read_text()):
            assert re.fullmatch(
                r'"[a-z][a-z0-9_]+"', argument
            ), f"{path}: {argument}: an event is a literal, snake_case"
            used.add(argument.strip('"'))
    assert used == listed_in("events.md")


def test_every_metric_is_in_the_reference_and_the_other_way_round():
    used = {name for path in sources() for name in METRIC.findall(path.read_text())}
    assert used == listed_in("metrics.md")
