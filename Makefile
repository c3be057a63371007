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

.PHONY: help setup setup-test build demo up test bench format lint install clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:
	@scripts/setup $(if $(filter s3,$(STORE)),s3)

setup-test:
	@scripts/setup test

build: setup  ## The program, build/release/src/cli/terrace
	@$(ENV); mkdir -p build; cmake --preset release >build/release.log 2>&1 || { cat build/release.log; exit 1; }
	@$(ENV); cmake --build build/release --target terrace

demo: build  ## Two instances share one directory (STORE=s3: a bucket); a table shows what the second need not compute
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/demo

up: build  ## The same stack, left running until Ctrl-C
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/demo --up

test: setup-test  ## Everything: lint, unit, contract, fuzz, sanitizers, end to end
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/test

bench: build  ## WHAT=store|engine: measured beside the physical limit and LMCache, into out/bench-WHAT.json
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/bench $(WHAT)

format: setup-test  ## Formats C++ and Python in place
	@$(ENV); clang-format-19 -i $(CXX_FILES); $(RUFF) format -q; $(RUFF) check -q --fix

lint: setup-test  ## Format, layers, headers, leftovers, clang-tidy: what `make test` begins with
	@$(ENV); exec "$$VENV_DIR/bin/python" scripts/test lint

install: build  ## PREFIX=/usr/local: program, headers, libraries, find_package(terrace)
	@cmake --install build/release --prefix "$(PREFIX)"

clean:  ## Removes build/ and out/; the caches outside the clone stay
	@rm -rf build out
