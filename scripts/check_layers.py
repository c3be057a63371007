#!/usr/bin/env python3
"""Checks who includes whom (layers.toml): layers, third-party fences, siblings, cycles, dead files, stray programs.

Usage: scripts/check_layers.py [ROOT]. Prints one `path:line: what` per finding and exits 1 if there is any.
"""

import re
import sys
import tomllib
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
# C and POSIX headers without a folder. Any other header with ".h" needs a fence in layers.toml.
SYSTEM = set(
    "arpa bits dirent dlfcn errno fcntl grp inttypes limits linux malloc math net netdb netinet poll pthread pwd sched "
    "signal spawn stddef stdint stdio stdlib string strings sys syslog termios time unistd".split()
)
# What the tests of a folder may see besides.
TEST_TOOLS = {"gtest", "gmock", "rapidcheck.h", "rapidcheck"}


def is_test(path):
    return path.stem.endswith("_test")


class Checker:
    def __init__(self, root):
        self.root = root
        layers = tomllib.loads((root / "layers.toml").read_text())
        self.fences = layers["third_party"]
        self.folders = layers["folders"]
        self.errors = []
        self.includes = {}  # path -> [(line, include path)]
        for top in ("include", "src", "tests", "bench"):
            for path in sorted((root / top).rglob("*")):
                if path.suffix in (".h", ".cc"):
                    lines = enumerate(path.read_text().splitlines(), 1)
                    self.includes[path] = [(n, m.group(1)) for n, line in lines if (m := INCLUDE.match(line))]

    def error(self, path, line, text):
        self.errors.append(f"{path.relative_to(self.root)}:{line}: {text}")

    def resolve(self, include):
        """The file of the tree that an include names, or None."""
        for top in ("include", "src", "."):
            if (path := self.root / top / include) in self.includes:
                return path
        return None

    def library(self, include):
        """The name behind a third-party include; "system" for the language's and the system's own, "?" if unknown."""
        prefixes = [prefix for prefix in self.fences if include.startswith(prefix)]
        if prefixes:
            return self.fences[max(prefixes, key=len)]
        first = include.split("/")[0].removesuffix(".h")
        is_cxx = "." not in include and "/" not in include
        return "system" if is_cxx or first in SYSTEM else "?"

    def check_includes(self, path):
        parts = path.relative_to(self.root).parts
        public = parts[0] == "include"
        folder = "include/terrace" if public else parts[1]
        if not public and folder not in self.folders:
            self.error(path, 1, f"folder {folder} is not in layers.toml")
            return
        rules = {"includes": [], "third_party": ["expected"]} if public else self.folders[folder]
        for line, include in self.includes[path]:
            target = self.resolve(include)
            if target is None:
                library = self.library(include)
                if library == "?" and not (is_test(path) and include.split("/")[0] in TEST_TOOLS):
                    self.error(path, line, f"{include} is neither in the tree nor in layers.toml")
                elif library not in ("system", "?") and library not in rules.get("third_party", []):
                    allowed = " ".join(rules.get("third_party", [])) or "none"
                    self.error(path, line, f"{folder} may not include {library} (third party allowed: {allowed})")
                continue
            other = target.relative_to(self.root).parts
            if other[0] == "include" or is_test(path):
                continue
            if other[0] != "src":
                self.error(path, line, f"{folder} may not include {include}")
            elif other[1] != folder and other[1] not in rules["includes"]:
                allowed = " ".join(rules["includes"]) or "none"
                self.error(path, line, f"{folder} may not include {other[1]} (allowed: {allowed})")
            elif other[1] == folder and rules.get("no_siblings"):
                self.check_sibling(path, line, target)

    def check_sibling(self, path, line, target):
        """In tier/, x_tier.h starts the family x: its files are x_*. What belongs to no family is shared by all."""
        suffix = f"_{path.parent.name}"
        families = [
            p.stem.removesuffix(suffix)
            for p in self.includes
            if p.parent == path.parent and p.suffix == ".h" and p.stem.endswith(suffix)
        ]

        def family(file):
            return max((f for f in families if file.stem.startswith(f + "_")), key=len, default=None)

        if family(target) not in (None, family(path)):
            self.error(path, line, f"{path.name} may not include its sibling {target.name}")

    def check_cycles(self):
        done, stack = set(), []

        def visit(path):
            if path in stack:
                ring = [p.name for p in stack[stack.index(path) :]] + [path.name]
                self.error(path, 1, "include cycle: " + " -> ".join(ring))
            elif path not in done:
                done.add(path)
                stack.append(path)
                for _, include in self.includes[path]:
                    if target := self.resolve(include):
                        visit(target)
                stack.pop()

        for path in self.includes:
            visit(path)
        order = list(self.folders)
        for name, rules in self.folders.items():
            for other in rules["includes"]:
                if other not in order or order.index(other) >= order.index(name):
                    self.errors.append(f"layers.toml:1: {name} includes {other}, which does not stand above it")

    def check_dead(self):
        included = {self.resolve(include) for entries in self.includes.values() for _, include in entries}
        for path in self.includes:
            if path.suffix == ".h" and path not in included and "include" not in path.relative_to(self.root).parts[:1]:
                self.error(path, 1, "no file includes this header")
            elif path.suffix == ".cc" and not self.is_built(path):
                self.error(path, 1, "no CMakeLists.txt builds this file")

    def is_built(self, path):
        for folder in path.parents:
            lists = folder / "CMakeLists.txt"
            if lists.exists() and path.relative_to(folder).as_posix() in re.split(r"[\s()]+", lists.read_text()):
                return True
            if folder == self.root:
                return False
        return False

    def check_programs(self):
        for path in self.includes:
            parts = path.relative_to(self.root).parts
            if parts[0] != "src" or parts[1] == "cli" or is_test(path):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if path.name == "main.cc" or re.match(r"int main\(", line):
                    self.error(path, number, "the only program is src/cli/main.cc")
                    break

    def run(self):
        for path in self.includes:
            if path.relative_to(self.root).parts[0] in ("include", "src"):
                self.check_includes(path)
        self.check_cycles()
        self.check_dead()
        self.check_programs()
        return self.errors


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    checker = Checker(root)
    errors = checker.run()
    print("\n".join(errors) if errors else f"layers: {len(checker.includes)} files, no finding")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
