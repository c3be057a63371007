"""Would catch: a checker of layers that lets a breach through, or that says it in other words than documented."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LAYERS = """
[third_party]
"curl/" = "curl"
"json/" = "json"
"tl/expected" = "expected"
[folders.base]
includes = []
[folders.io]
includes = ["base"]
third_party = ["curl"]
[folders.tier]
includes = ["base", "io"]
no_siblings = true
[folders.store]
includes = ["base", "tier"]
[folders.cli]
includes = ["base", "tier", "store"]
"""

# A tree without a finding; each test changes it.
TREE = {
    "layers.toml": LAYERS,
    "include/terrace/tier.h": "#include <vector>\n#include <sys/types.h>\n#include <tl/expected.hpp>\n",
    "src/base/log.h": "#include <string>\n",
    "src/io/http.h": '#include <curl/curl.h>\n#include "base/log.h"\n',
    "src/tier/ram_tier.h": '#include "terrace/tier.h"\n',
    "src/tier/ram_tier.cc": '#include "tier/ram_tier.h"\n#include "tier/ram_arena.h"\n#include "tier/queue.h"\n',
    "src/tier/ram_arena.h": "",
    "src/tier/queue.h": '#include "io/http.h"\n',
    "src/tier/disk_tier.h": "",
    "src/tier/disk_tier.cc": '#include "tier/disk_tier.h"\n',
    "src/tier/ram_tier_test.cc": '#include <gtest/gtest.h>\n#include "tier/ram_tier.h"\n',
    "src/tier/CMakeLists.txt": "library(SOURCES ram_tier.cc disk_tier.cc)\ntest(ram_tier_test.cc)\n",
    "src/store/store.h": '#include "tier/ram_tier.h"\n',
    "src/cli/main.cc": '#include "store/store.h"\nint main() {}\n',
    "src/cli/CMakeLists.txt": "add_executable(terrace main.cc)\n",
}


def findings(tmp_path, **changes):
    for name, text in {**TREE, **changes}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load("check_layers").Checker(tmp_path).run()


@pytest.mark.parametrize(
    ("file", "text", "finding"),
    [
        (
            "src/tier/queue.h",
            '#include <map>\n#include "store/store.h"\n#include "io/http.h"\n',
            "src/tier/queue.h:2: tier may not include store (allowed: base io)",
        ),
        (
            "src/base/log.h",
            '#include "io/http.h"\n',
            "src/base/log.h:1: base may not include io (allowed: none)",
        ),
        (
            "src/tier/queue.h",
            '#include <curl/curl.h>\n#include "io/http.h"\n',
            "src/tier/queue.h:1: tier may not include curl (third party allowed: none)",
        ),
        (
            "src/io/http.h",
            '#include <curl/curl.h>\n#include <json/json.h>\n#include "base/log.h"\n',
            "src/io/http.h:2: io may not include json (third party allowed: curl)",
        ),
        (
            "src/io/http.h",
            '#include <folly/String.h>\n#include "base/log.h"\n',
            "src/io/http.h:1: folly/String.h is neither in the tree nor in layers.toml",
        ),
        (
            "include/terrace/tier.h",
            '#include "base/log.h"\n',
            "include/terrace/tier.h:1: include/terrace may not include base (allowed: none)",
        ),
        (
            "src/tier/disk_tier.cc",
            '#include "tier/disk_tier.h"\n#include "tier/ram_arena.h"\n',
            "src/tier/disk_tier.cc:2: disk_tier.cc may not include its sibling ram_arena.h",
        ),
        (
            "src/tier/queue.h",
            '#include "io/http.h"\n#include "tier/ram_tier.h"\n',
            "src/tier/queue.h:2: queue.h may not include its sibling ram_tier.h",
        ),
        ("src/tier/spare.cc", "", "src/tier/spare.cc:1: no CMakeLists.txt builds this file"),
        ("src/tier/spare.h", "", "src/tier/spare.h:1: no file includes this header"),
        ("src/new/a.h", "", "src/new/a.h:1: folder new is not in layers.toml"),
        (
            "src/tier/disk_tier.cc",
            '#include "tier/disk_tier.h"\nint main(int argc, char** argv) {\n',
            "src/tier/disk_tier.cc:2: the only program is src/cli/main.cc",
        ),
    ],
)
def test_a_breach_is_one_line_with_place_and_rule(tmp_path, file, text, finding):
    assert findings(tmp_path) == []
    assert finding in findings(tmp_path, **{file: text})


def test_the_files_of_one_family_may_include_each_other(tmp_path):
    assert findings(tmp_path, **{"src/tier/ram_arena.h": '#include "tier/ram_tier.h"\n'}) == []


def test_cycles_are_found_in_files_and_in_the_order_of_folders(tmp_path):
    found = findings(
        tmp_path, **{"src/base/log.h": '#include "base/clock.h"\n', "src/base/clock.h": '#include "base/log.h"\n'}
    )
    assert found == ["src/base/clock.h:1: include cycle: clock.h -> log.h -> clock.h"]
    found = findings(
        tmp_path,
        **{"layers.toml": LAYERS.replace("[folders.base]\nincludes = []", '[folders.base]\nincludes = ["io"]')},
    )
    assert "layers.toml:1: base includes io, which does not stand above it" in found


def test_a_test_may_include_what_its_folder_may_not(tmp_path):
    test = '#include <gtest/gtest.h>\n#include "tier/disk_tier.h"\n#include "store/store.h"\n'
    assert findings(tmp_path, **{"src/tier/ram_tier_test.cc": test}) == []
