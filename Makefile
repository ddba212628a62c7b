# `make help` says what there is. `demo` and `test` set everything up by themselves.
PYTHON ?= python3
ARGS ?=

BEGAN := $(shell command -p date +%s)
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.run-stamp
DEV_STAMP := $(VENV)/.dev-stamp
# Where pip's settings offer builds of torch for CPUs (+cpu, of an index or of a folder of wheels), the newest
# of those; otherwise the newest that `make test-matrix` ran with, or what pip's settings allow below it.
# TORCH=2.11.0 names another.
TORCH = $(OFFERED)
WANTED = 'torch$(or $(addprefix ==,$(TORCH)),<=2.15.0)'
OFFERED = $(shell $(BIN)/python -m pip index versions torch 2>/dev/null | grep -oE '2\.1[0-5]\.[0-9]+\+cpu' | head -n 1)
PIP_INSTALL = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q -c constraints.txt
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)
STYLED_SOURCES := $(filter %.h %.hpp %.c %.cc %.cpp %.inl %.cu %.cuh,$(NATIVE_SOURCES)) \
  $(wildcard tests/native/cpp/*.h tests/native/cpp/*.cpp)

# No locale, no terminal, no PATH and an empty HOME must be enough.
export PATH := $(or $(PATH),/usr/local/bin:/usr/bin:/bin)
export PYTHONUTF8 := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-native test-big test-clock test-crash test-matrix test-doors lint
.PHONY: bench bench-swap docs wheel-check clean

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter (3.11 or newer), TORCH=2.11.0 a torch;"
	@echo "  ARGS='...' is handed to what demo, test, test-big and bench start."

setup: $(DEV_STAMP)  ## make .venv with all that the other commands need (first time: some minutes)

demo: $(RUN_STAMP)  ## train a GPT whose weights and optimizer state live on disk
	$(BIN)/python examples/pretrain_gpt.py --config examples/configs/demo.yaml $(ARGS)

test: setup  ## run the tests, but not the long or large ones
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not big and not clock" $(ARGS)

test-clock: setup  ## run the tests that judge by a clock, one at a time, on a quiet machine
	$(BIN)/python -m pytest -q -m clock $(ARGS)

test-native: setup  ## run the native tests under ASan+UBSan and under TSan
	$(call native-tests,asan,address$(COMMA)undefined)
	$(call native-tests,tsan,thread)

# Builds and runs tests/native/cpp. TSan fails where the kernel spreads mappings too widely for it
# (vm.mmap_rnd_bits), which setarch -R turns off; where that is forbidden it is tried without.
COMMA := ,
QUIET_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)
define native-tests
	@mkdir -p build/native-$(1)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/native-$(1) -G Ninja \
	  -DCMAKE_BUILD_TYPE=Debug -DINFINITY_NATIVE_TESTS=ON -DINFINITY_SANITIZE=$(2) \
	  >build/native-$(1)/cmake.log || { cat build/native-$(1)/cmake.log; exit 1; }
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/native-$(1) -- --quiet
	cd build/native-$(1) && $(QUIET_ADDRESSES) tests/native/cpp/aio_tests
	cd build/native-$(1) && $(QUIET_ADDRESSES) tests/native/cpp/adam_tests
endef

test-big: setup  ## run all tests that are not judged by a clock
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not clock" --hypothesis-profile=search $(ARGS)

CRASH_TESTS := crash durable_kill faults records saved_under_faults simulation simulation_ranks
test-crash: setup  ## end training badly ten thousand times, and look what is left (long)
	$(BIN)/python -m pytest -q -m big $(CRASH_TESTS:%=tests/faults/test_%.py) $(ARGS)

lint: setup  ## check style, types and the format of the native sources
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(STYLED_SOURCES),$(BIN)/clang-format --dry-run -Werror $(STYLED_SOURCES))

docs: setup  ## build the pages and the API reference into build/docs, without warnings
	$(PIP_INSTALL) 'torch-infinity[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs $(ARGS)

wheel-check: $(RUN_STAMP)  ## build sdist and wheel, and use the wheel in a venv of its own, elsewhere
	$(BIN)/python tools/wheel_check.py --torch $(WANTED) $(ARGS)

test-matrix:  ## run the tests with other Pythons and torches (long): ARGS='python3.12:2.11.0 ...'
	$(PYTHON) tools/test_matrix.py $(ARGS)

# A venv of its own over this one, whose packages it sees where it has none of them itself.
DOORS := build/doors
PURELIB = python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
OTHERS := trl lightning transformers accelerate peft bitsandbytes schedulefree pytorch-optimizer datasets

test-doors: setup  ## run the tests beside TRL, Lightning, bitsandbytes, ... with the newest of each
	$(BIN)/python -m venv $(DOORS)
	echo "import site; site.addsitedir('$$($(BIN)/$(PURELIB))')" >$$($(DOORS)/bin/$(PURELIB))/beneath.pth
	$(DOORS)/bin/python -m pip install -q --upgrade $(OTHERS)
	for one in $(OTHERS); do $(DOORS)/bin/python -m pip show $$one | head -n 2 | paste - -; done
	$(DOORS)/bin/python -m pytest -q -m "not big and not clock" tests/integrations/huggingface \
	  tests/integrations/test_doors.py tests/integrations/test_lightning.py \
	  tests/unit/model/test_quantized.py tests/train/test_runs_data.py \
	  tests/parity/test_any_optimizer.py $(ARGS)

bench: setup  ## time a step against plain torch and against the bounds
	$(BIN)/python tools/bench_step.py --json $(ARGS)

bench-swap: setup  ## search settings of the disk (`infinity bench` first): make bench-swap ARGS='--path DIR --compare all'
	$(BIN)/python tools/bench_swap.py $(ARGS)

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

# What it takes to build and to run; the demo needs no more.
$(RUN_STAMP): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE_SOURCES) | $(BIN)/python
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  test -n "$$CXX" || { \
	  echo "setup: no C++ compiler was found; try: apt-get install g++, or set CXX" >&2; exit 1; }
	@echo "setup: installing into $(VENV); the first time takes some minutes"
	$(PIP_INSTALL) nanobind scikit-build-core ninja cmake
	$(PIP_INSTALL) --no-build-isolation $(WANTED) -e '.[cuda]'
	@echo "setup: took $$(($$(date +%s) - $(BEGAN))) s, this once"
	@touch $@

# Tests, style and types. The package is there already: only what its extras name is added.
$(DEV_STAMP): $(RUN_STAMP)
	$(PIP_INSTALL) 'torch-infinity[dev]'
	@touch $@
