# Everything runs inside .venv, which `setup` makes once and renews when its inputs change.
PYTHON ?= python3
# Optional wheel index with a CPU build of torch, e.g. make TORCH_INDEX=<address> demo
TORCH_INDEX ?=
# Processes the tests may use.
JOBS ?= 2
# Options of the benchmark, e.g. make bench BENCH="--sizes 60M --threads 2"
BENCH ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt \
       $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help
.PHONY: help setup browser demo bench test test-all lint kernels mutants gpu-check clean

help:
	@echo "make demo      compile the bundled checkpoint, answer its 20 messages, compare"
	@echo "make bench     speed and memory of the CPU path beside the eager model and the floor"
	@echo "make test      style, types, imports, then the tests that are not slow"
	@echo "make test-all  every test"
	@echo "make lint      style, types, imports"
	@echo "make kernels   compile every kernel for every GPU architecture: what it costs (no GPU)"
	@echo "make mutants   break the kernels piece by piece: do their tests notice? (hours)"
	@echo "make gpu-check every kernel, the demonstration bundle and timed layers on the GPU that is here"
	@echo "make setup     the virtual environment alone (.venv)"
	@echo "make browser   Chromium for the tests of pages, if none is there (Debian, as root)"
	@echo "make clean     remove .venv and caches"
	@echo
	@echo "Variables: PYTHON=$(PYTHON)  JOBS=$(JOBS)  BENCH=<options of python -m bench>"
	@echo "           TORCH_INDEX=<index with a CPU build of torch>"

setup: .venv/.ready

# torch goes first: its local or CPU build then satisfies whatever asks for torch later.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Python 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e .[dev]
	@touch $@

# Not part of `test`: installing needs root and a network. Without one, tests of pages are skipped.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do \
	  command -v $$name && exit; done; apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium

demo: setup
	$(BIN)/python -m clover_compile.demo

bench: setup
	$(BIN)/python -m bench $(BENCH)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow" tests/interpreted
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" tests

test-all: setup
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) tests/interpreted
	$(BIN)/python -m pytest -n $(JOBS) tests

kernels: setup
	$(BIN)/python -m clover_compile.kernels.report --json build/kernels.json

mutants: setup
	TRITON_INTERPRET=1 $(BIN)/python -m tests.mutants --jobs $(JOBS) $(OPS)

# On a GPU without setup: such a machine has its own torch, triton and small packages, and perhaps no
# network.
gpu-check: $(if $(DRY),setup)
	$(if $(DRY),$(BIN)/python,$(PYTHON)) -m clover_compile.gpu_check $(if $(DRY),--dry)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
