# Each target does all the set-up on a fresh machine with Python 3.11 or newer and g++.
#
#   make demo | test | lint | docs | venv      PYTHON=python3.12  VENV=.venv  TENSORFLOW=tensorflow-cpu
#
# VENV may be an environment that you already have: what is installed there is used, and TENSORFLOW
# is installed only where it has neither `tensorflow` nor `tensorflow-cpu`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
TENSORFLOW ?= tensorflow-cpu
PYTEST_OPTIONS ?=

SUITABLE := import sys; sys.exit(sys.version_info < (3, 11))
# The first Python that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(SUITABLE)' 2>/dev/null && { echo "$$python"; break; }; done)

BIN := $(VENV)/bin
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: demo test lint docs venv clean

demo: venv
	$(BIN)/python -m tflms demo

test: venv
	$(BIN)/python -m pytest $(PYTEST_OPTIONS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy  # strict, on tflms: see pyproject.toml

docs: $(VENV)/.docs-installed
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

venv: $(VENV)/.installed

$(VENV)/.installed: setup.py | $(BIN)/python
	$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("tensorflow") is None)' \
	  || $(BIN)/python -m pip install --quiet '$(TENSORFLOW)>=2.21'
	$(BIN)/python -m pip install --quiet --editable '.[plot,examples,dev]'
	touch $@

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(BIN)/python:
	@"$(or $(PYTHON),no-python)" -c '$(SUITABLE)' 2>/dev/null || { \
	  echo 'Python 3.11 or newer is needed; install it, or name it: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@command -v g++ > /dev/null || { \
	  echo 'g++ is needed to build the emulated accelerator; install it (Debian, Ubuntu: apt install g++)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache
