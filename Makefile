# The front door. Every target installs what is missing first (scripts/setup: a second, when all is there).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PREFIX ?= /usr/local
WHAT ?= store

# The cache paths of scripts/setup, for the recipe's own commands.
ENV = set -a; eval "$$(scripts/setup env)"; set +a
RUFF = "$$VENV_DIR/bin/ruff"
CXX_FILES = $$(git ls-files --cached --others --exclude-standard '*.cc' '*.h')

.PHONY: help setup setup-test build demo up test test-all test-vllm wheel wheel-site bench format lint install clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:
	@scripts/setup $(if $(filter s3,$(STORE)),s3)

setup-test:
	@scripts/setup test

build: setup  ## The program, build/release/src/cli/terrace
	@$(ENV); mkdir -p build; cmake --preset release >build/release.log 2>&1 || { cat build/release.log; exit 1; }
	@$(ENV); cmake --build build/release --target terrace

demo: build $(if $(filter vllm,$(ENGINE)),wheel-site)  ## Two instances share a directory (STORE=s3: a bucket; ENGINE=vllm): what the second need not compute
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/demo

up: build  ## The same stack, left running until Ctrl-C
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/demo --up

test: setup-test  ## Unit, contract, end to end, NFS, fuzz, sanitizers, lint
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/test

test-all: setup-test  ## And with real vLLM: what CI runs
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/test all

# Compiled as build/release is, so that ccache knows the objects already: by the same names of the compilers, too.
wheel: setup  ## dist/terrace_kv-*.whl: connector for vLLM, Python client, the program
	@$(ENV); export CMAKE_PREFIX_PATH="$$LLAMA_DIR" CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_C_COMPILER_LAUNCHER=ccache; \
	  export CC=cc CXX=c++ SKBUILD_CMAKE_DEFINE="TERRACE_DEVELOPER=ON;CMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -g1"; \
	  mkdir -p build; rm -rf dist; "$$VENV_DIR/bin/python" -m pip wheel --verbose --no-deps --no-build-isolation \
	  --wheel-dir dist ./python 2>&1 | tee build/wheel.log | \
	  awk '$$1 ~ /^\[[0-9]+\/[0-9]+\]$$/ && ++n % 20 == 0 { print "wheel: " $$1; fflush() }' || { cat build/wheel.log; exit 1; }
	@ls dist

# The wheel where the pinned vLLM finds it, with nothing installed into that: other clones use it, too.
wheel-site: wheel
	@scripts/setup vllm
	@$(ENV); rm -rf build/vllm-site; "$$VENV_DIR/bin/uv" pip install --quiet --offline --no-deps --python "$$VLLM_DIR/bin/python" \
	  --target build/vllm-site dist/terrace_kv-*.whl

test-vllm: setup-test  ## The wheel in an empty environment, then with real vLLM on the CPU (6 GB the first time)
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/test vllm

bench: build $(if $(filter vllm,$(WHAT)),wheel-site)  ## WHAT=store|s3|engine|node|vllm: measured beside the physical limit and peers, into out/bench-WHAT.json
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/bench $(WHAT)

format: setup-test  ## Formats C++ and Python in place
	@$(ENV); clang-format-19 -i $(CXX_FILES); $(RUFF) format -q; $(RUFF) check -q --fix

lint: setup-test  ## Format, layers, headers, leftovers, clang-tidy: what `make test` ends with
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/test lint

install: build  ## PREFIX=/usr/local: program, headers, libraries, find_package(terrace)
	@cmake --install build/release --prefix "$(PREFIX)"

clean:  ## Removes build/ and out/; the caches outside the clone stay
	@rm -rf build out
