# Two commands: `make test` and `make demo`. Both create the environment the first time and reuse it afterwards.
# `make test-all` also runs the tests that are too long for every day, `make docs` builds the site into build/site.
#
# PYTHON     the interpreter the environment is made from (3.11 or newer)
# PIP_FLAGS  passed to pip, for example an index that holds the CPU build of torch
# JOBS       pytest workers
# TESTS      what pytest runs, for example TESTS="tests/test_cli.py -k json"

PYTHON ?= $(shell command -v python3 || command -v python)
PIP_FLAGS ?=
JOBS ?= 2
TESTS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MORE := $(VENV)/.integrations
DOCS := $(VENV)/.docs
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt

.DEFAULT_GOAL := test
.PHONY: test test-all test-rest demo docs lint format clean

test: lint
	$(BIN)/python -m pytest -n $(JOBS) $(TESTS)

test-all: test
	$(MAKE) test-rest

# What `make test` leaves out: tests marked slow, and random networks by the hundred. The plugin of hypothesis marks its
# tests by its name.
test-rest: $(MORE)
	$(BIN)/python -m pytest -n $(JOBS) -m 'slow or hypothesis' --hypothesis-profile=many -rs

demo: $(READY)
	$(BIN)/gspace demo

# Strictly: a link that leads nowhere or a public name without a docstring is an error. Nothing is fetched.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# setuptools first: the package is then built with the pinned one, without a second environment for the build.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3 found: make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gspace needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools torch
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(MORE): $(DOCS)
	$(PIP) --no-build-isolation --editable '.[dev,docs,integrations]'
	@touch $@

$(DOCS): $(READY)
	$(PIP) --no-build-isolation --editable '.[dev,docs]'
	@touch $@
