#!/usr/bin/env python3
"""Checks what formatters and compilers don't: leftovers, banned calls, blanks, long lines, documents and their links.

Usage: scripts/tidy.py [ROOT]. Prints one `path:line: what` per finding and exits 1 if there is any.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

LINE_MAX = 120
SKIP_FOLDERS = {"build", "out", "dist", "__pycache__", "corpus"}
CODE = {".cc", ".h", ".py", ".cmake", ".sh"}

# (where it is banned, what, what to do instead). A place is a pattern of the path, from the root.
CXX, CXX_SRC, CXX_TEST = r"\.(cc|h)$", r"^src/.*\.(cc|h)$", r"(_test\.cc|^tests/.*\.(cc|h))$"
BANNED = [
    (r".", r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b", "finish it, or file an issue and leave it out"),
    (r"^src/(?!cli/)(?!.*_test\.cc$)", r"std::c(out|err)\b|(?<![a-z_])printf\(", "log::Info (base/log.h)"),
    (CXX, r"\b(atoi|atol|atoll)\(", "std::from_chars, which says when there is no number"),
    (CXX_SRC, r"\bstd::(stoi|stol|stoll|stoul|stoull|stod)\(", "std::from_chars, which does not throw"),
    (CXX, r"\b(sprintf|strcpy|strcat|strtok|gets)\(", "std::string or std::snprintf"),
    (CXX, r"(?<![_a-zA-Z])assert\(", "TERRACE_ASSERT (base/assert.h)"),
    (CXX, r"\bstd::rand\(|\bsrand\(", "std::mt19937 with a seed that is printed"),
    (CXX, r"\busing namespace std;", "the full name"),
    (CXX, r"\.detach\(\)", "a thread that somebody joins"),
    (CXX_SRC, r"^[^/]*\bvolatile\b", "std::atomic"),
    (CXX_TEST, r"\b(sleep_for|sleep_until|usleep|nanosleep|sleep)\(", "wait for an event with a deadline"),
]

# Hosts that anybody may name. Others that this machine's package tools are configured for stay out of the tree.
PUBLIC_HOSTS = {"pypi.org", "files.pythonhosted.org", "deb.debian.org", "security.debian.org", "localhost", "127.0.0.1"}


def private_words(root):
    """What must not appear: the hosts of this machine's package indexes and the place of this checkout."""
    text = "\n".join(value for name, value in os.environ.items() if "INDEX_URL" in name or name == "GOPROXY")
    pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    text += pip.stdout
    for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
        if path.is_file():
            text += path.read_text(errors="replace")
    hosts = {urlsplit(url).hostname for url in re.findall(r"https?://[^\s'\",]+", text)} - PUBLIC_HOSTS - {None}
    return sorted(hosts) + ([str(root)] if len(root.parts) > 2 else [])


def is_code(path, text):
    return path.suffix in CODE or path.name == "CMakeLists.txt" or text.startswith("#!")


def check_document(root, path, lines):
    titles, fenced = 0, False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if fenced:
            continue
        titles += line.startswith("# ")
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            target = target.split("#")[0]
            if target and not re.match(r"[a-z]+:", target) and not (path.parent / target).exists():
                yield number, f"broken link: {target}"
    if titles != 1:
        yield 1, f"{titles} titles (# ...); a document has exactly one"


def check_file(root, path, words):
    name = path.relative_to(root).as_posix()
    data = path.read_bytes()
    if b"\0" in data:
        return
    try:
        text = data.decode()
    except UnicodeDecodeError:
        yield 1, "neither UTF-8 nor binary"
        return
    lines = text.split("\n")
    if text and not text.endswith("\n"):
        yield len(lines), "no newline at the end"
    if text.endswith("\n\n"):
        yield len(lines) - 1, "empty line at the end"
    rules = [(re.compile(what), instead) for where, what, instead in BANNED if re.search(where, name)]
    code = is_code(path, text)
    for number, line in enumerate(lines, 1):
        if line != line.rstrip():
            yield number, "blanks at the end of the line"
        if "\t" in line and path.name != "Makefile":
            yield number, "tab"
        if code and len(line) > LINE_MAX:
            yield number, f"{len(line)} characters; at most {LINE_MAX}"
        for what, instead in rules:
            if found := what.search(line):
                yield number, f"{found.group(0).rstrip('(')}: not here; instead: {instead}"
        for word in words:
            if word in line:
                yield number, f"{word}: private to this machine"
    if path.suffix == ".md":
        yield from check_document(root, path, lines)


def files(root):
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIP_FOLDERS and (not f.startswith(".") or f == ".ci"))
        yield from (Path(folder) / name for name in sorted(names))


def check(root, words):
    errors = []
    for path in files(root):
        errors += [f"{path.relative_to(root)}:{number}: {what}" for number, what in check_file(root, path, words)]
    return errors


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    errors = check(root, private_words(root))
    print("\n".join(errors) if errors else "tidy: no finding")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
