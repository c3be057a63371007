"""Would catch: an installed package that others can't find, compile against or link, or that brings our flags."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/release"

CMAKE = """
cmake_minimum_required(VERSION 3.25)
project(outside LANGUAGES CXX)
find_package(terrace 0.1 REQUIRED)
add_executable(outside main.cc)
target_compile_options(outside PRIVATE -Wall)
target_link_libraries(outside PRIVATE terrace::store)
"""

# A store in process, RAM alone: one chunk in and out again. The unused variable is a warning here, which would be an
# error if our developer flags came along.
PROGRAM = """
#include <terrace/key.h>
#include <terrace/metrics.h>
#include <terrace/store.h>
#include <terrace/version.h>

#include <chrono>
#include <cstdio>
#include <cstring>

int main() {
  int unused;
  const terrace::Digest space = terrace::SpaceId(terrace::SpaceFields{});
  terrace::KeyChain chain(space, 2);
  const int32_t tokens[] = {1, 2, 3, 4, 5};
  chain.Extend(tokens);

  terrace::Metrics metrics;
  auto store = terrace::OpenStore({.ram_bytes_max = 64 << 20}, {}, metrics);
  if (!store) return 1;
  terrace::FrameInfo info;
  info.space = space;
  info.key = chain.keys()[0];
  info.parent = chain.parent(0);
  info.token_count = 2;
  info.payload_bytes = 5;
  auto slot = (*store)->BeginSave(info);
  if (!slot) return 2;
  std::memcpy(slot->bytes.data(), "bytes", 5);
  (*store)->Commit(std::move(*slot));

  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  terrace::LoadJob::Item item;
  while (item.outcome != terrace::Outcome::kHit) {  // The chunk shows once it is hashed, in the background.
    if (std::chrono::steady_clock::now() > deadline) return 3;
    item = (*store)->Load(space, {chain.keys().data(), 1}, info.payload_bytes, deadline)->Wait(0, deadline);
  }
  std::printf("%s %zu %s %.*s %d\\n", terrace::kVersion, chain.keys().size(),
              terrace::ReasonName(terrace::Reason::kDamaged), static_cast<int>(item.lease.bytes.size()),
              reinterpret_cast<const char*>(item.lease.bytes.data()),
              metrics.Text().find("terrace_") != std::string::npos);
}
"""


def run(*argv):
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_outside_project_finds_and_links_the_installed_package(tmp_path):
    prefix, source, build = tmp_path / "prefix", tmp_path / "source", tmp_path / "build"
    run("cmake", "--install", BUILD, "--prefix", prefix)
    assert os.access(prefix / "bin/terrace", os.X_OK)
    source.mkdir()
    (source / "CMakeLists.txt").write_text(CMAKE)
    (source / "main.cc").write_text(PROGRAM)
    run("cmake", "-G", "Ninja", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", build)
    assert run(build / "outside") == "0.1.0 2 damaged bytes 1\n"


def test_the_examples_build_on_it_and_find_what_they_saved(tmp_path):
    prefix, build, socket = tmp_path / "prefix", tmp_path / "build", tmp_path / "node.sock"
    run("cmake", "--install", BUILD, "--prefix", prefix)
    run("cmake", "-G", "Ninja", "-S", ROOT / "examples", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", build)
    none, all_three = "loaded 0 saved 3 of 3 chunks\n", "loaded 3 saved 0 of 3 chunks\n"
    for program in (build / "save_and_load", build / "save_and_load_c"):
        assert run(program) == none  # A store of its own, gone with it.
    node = subprocess.Popen(
        [prefix / "bin/terrace", "node", "--socket", socket, "--ram", "64MiB"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert any("node_ready" in line for line in node.stderr)
        for program in (build / "save_and_load", build / "save_and_load_c"):
            assert [run(program, socket), run(program, socket)] == [none, all_three]
    finally:
        node.terminate()
    assert "node_stopped" in node.stderr.read()
    assert node.wait(30) == 0


def test_every_public_header_is_installed(tmp_path):
    run("cmake", "--install", BUILD, "--prefix", tmp_path)
    public = {path.name for path in (ROOT / "include/terrace").iterdir()}
    assert {path.name for path in (tmp_path / "include/terrace").iterdir()} == public
