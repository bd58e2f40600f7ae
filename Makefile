# The developer's commands. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The interpreter that makes the environment (3.11 or newer), and where the environment lives.
PYTHON ?= python3
VENV ?= .venv
# Test processes; each runs on one thread.
WORKERS ?= 2
# Passed on, as in: make test PYTEST_ARGS='-k gate'    make quickstart ARGS='--smoke'
PYTEST_ARGS ?=
ARGS ?=
PIP_FLAGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help quickstart install test lint format types imports check clean

help:  ## list the targets
	@sed -nE 's/^([a-z]+):[^#]*## (.*)$$/  make \1\t\2/p' Makefile | expand -t 20

quickstart: $(STAMP)  ## train, gate, measure and report on this machine, about ten minutes
	$(BIN)/looplm quickstart $(ARGS)

install: $(STAMP)  ## make the environment

# Reinstalls only when what is to be installed has changed. The constraints pin torch.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "looplm needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this takes a few minutes, since torch is large."
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

test: $(STAMP)  ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP)  ## formatting, lint, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

format: $(STAMP)  ## put the formatting right
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The variable keeps pyright from asking the network for its newest version.
types: $(STAMP)  ## type check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

imports: $(STAMP)  ## which package may import which
	$(BIN)/lint-imports

check: lint types imports  ## all three

clean:  ## remove caches and build outputs; keeps the environment and runs/
	rm -rf build dist .pytest_cache .ruff_cache .import_linter_cache
	find looplm tests -type d -name __pycache__ -prune -exec rm -rf {} +
