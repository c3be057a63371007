"""Would catch: an event that operators can't look up, or one that the documents describe and no code writes."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(r"\blog::(?:Debug|Info|Warn|Error)\(\s*([^,)\s]+)")


def events_in_code():
    names = {}
    for path in (ROOT / "src").rglob("*.cc"):
        if path.stem.endswith("_test"):
            continue
        for argument in CALL.findall(path.read_text()):
            assert re.fullmatch(
                r'"[a-z][a-z0-9_]+"', argument
            ), f"{path}: {argument}: an event is a literal, snake_case"
            names[argument.strip('"')] = path
    return names


def test_every_event_is_in_the_reference_and_the_other_way_round():
    listed = re.findall(r"^\| `([a-z0-9_]+)` \|", (ROOT / "docs/reference/events.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)), "an event is listed twice"
    assert listed == sorted(listed), "the list is in alphabetical order"
    assert set(listed) == set(events_in_code())
