"""Would catch: a rule of scripts/tidy.py that no longer finds what it is there for, or bites where it should not."""

import pytest
from test_layers import load

tidy = load("tidy")
LEFTOVER = "TO" + "DO"


def findings(tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return tidy.check(tmp_path, ["pkg.internal.example"])


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        (
            "src/a.cc",
            f"int a;  // {LEFTOVER}: later\n",
            f"1: {LEFTOVER}: not here; instead: finish it, or file an issue",
        ),
        ("src/tier/a.cc", 'std::cout << "x";\n', "1: std::cout: not here; instead: log::Info (base/log.h)"),
        ("src/tier/a.cc", 'printf("x");\n', "1: printf: not here; instead: log::Info (base/log.h)"),
        (
            "src/tier/a_test.cc",
            "\nsleep_for(1s);\n",
            "2: sleep_for: not here; instead: wait for an event with a deadline",
        ),
        ("src/tier/a.cc", "  assert(x);\n", "1: assert: not here; instead: TERRACE_ASSERT (base/assert.h)"),
        ("src/a.cc", "int a;\t\n", "1: tab"),
        ("src/a.cc", "int a; \n", "1: blanks at the end of the line"),
        ("src/a.cc", "int a;", "1: no newline at the end"),
        ("src/a.cc", "int a;\n\n", "2: empty line at the end"),
        ("src/a.cc", "x" * 121 + "\n", "1: 121 characters; at most 120"),
        ("scripts/run", "#!/bin/sh\n" + "x" * 121 + "\n", "2: 121 characters; at most 120"),
        ("docs/a.md", "# One\n\n# Two\n", "1: 2 titles (# ...); a document has exactly one"),
        ("docs/a.md", "text\n", "1: 0 titles (# ...); a document has exactly one"),
        ("docs/a.md", "# T\n\n[b](b.md#part)\n", "3: broken link: b.md"),
        ("docs/a.md", "# T\n\nfrom pkg.internal.example\n", "3: pkg.internal.example: private to this machine"),
    ],
)
def test_a_finding_is_one_line_with_its_place(tmp_path, name, text, finding):
    found = findings(tmp_path, name, text)
    assert any(line.startswith(f"{name}:{finding}") for line in found), found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/cli/main.cc", "std::cout << 1;\n"),
        (
            "src/tier/a.cc",
            'std::fprintf(stderr, "x");\nstd::snprintf(b, 1, "x");\nstatic_assert(true);\nsleep_for(1s);\n',
        ),
        (
            "docs/a.md",
            "# T\n\n" + "x" * 200 + "\n\n```sh\n# a comment\n```\n\n[t](#t) [w](https://a.example/b) [a](a.md)\n",
        ),
        ("Makefile", "all:\n\ttrue\n"),
        ("build/a.cc", LEFTOVER + "\n"),
        ("data.bin", "a\0b \t"),
    ],
)
def test_what_is_fine_is_left_alone(tmp_path, name, text):
    assert findings(tmp_path, name, text) == []
