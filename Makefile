# `make help` says what there is. `demo` and `test` set everything up by themselves.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)
STYLED_SOURCES := $(filter %.h %.hpp %.c %.cc %.cpp %.inl %.cu,$(NATIVE_SOURCES))

# No locale, no terminal, no PATH and an empty HOME must be enough.
export PATH := $(or $(PATH),/usr/local/bin:/usr/bin:/bin)
export PYTHONUTF8 := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-big lint bench clean

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter (3.11 or newer);"
	@echo "  ARGS='...' is handed to what demo, test, test-big and bench start."

setup: $(STAMP)  ## make .venv and build the native parts in it (first time: some minutes)

demo: setup  ## train a GPT whose weights and optimizer state live on disk
	$(BIN)/python examples/pretrain_gpt.py --config examples/configs/demo.yaml $(ARGS)

test: setup  ## run the tests, but not the long or large ones
	$(BIN)/python -m pytest -q -n 2 -m "not big" $(ARGS)

test-big: setup  ## run all tests
	$(BIN)/python -m pytest -q -n 2 $(ARGS)

lint: setup  ## check style, types and the format of the native sources
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(STYLED_SOURCES),$(BIN)/clang-format --dry-run -Werror $(STYLED_SOURCES))

bench: setup  ## time a step against plain torch and against the bounds
	$(BIN)/python tools/bench_step.py --json $(ARGS)

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "setup: '$(PYTHON)' was not found; try: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "setup: Python 3.11 or newer is needed, and '$(PYTHON)' is" \
	    "`"$(PYTHON)" --version 2>&1`; try: make setup PYTHON=python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' || { \
	  echo "setup: '$(PYTHON)' has no venv; try: apt-get install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch first and exactly: left to a resolver, torch means gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE_SOURCES) | $(BIN)/python
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  test -n "$$CXX" || { \
	  echo "setup: no C++ compiler was found; try: apt-get install g++, or set CXX" >&2; exit 1; }
	@echo "setup: installing into $(VENV); the first time takes some minutes"
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt nanobind scikit-build-core ninja cmake
	PATH="$(CURDIR)/$(BIN):$$PATH" \
	  $(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
