# `make help` lists the targets. `demo` and `test` install what they need into .venv.
PYTHON ?= python3
ARGS ?=

BEGAN := $(shell command -p date +%s)
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.run-stamp
DEV_STAMP := $(VENV)/.dev-stamp
# torch: the newest CPU build (+cpu) if pip's indexes or folders offer one, else the newest release that is not
# newer than the last one tested by `make test-matrix`. TORCH=2.11.0 selects another.
TORCH = $(OFFERED)
WANTED = 'torch$(or $(addprefix ==,$(TORCH)),<=2.15.0)'
OFFERED = $(shell $(BIN)/python -m pip index versions torch 2>/dev/null | grep -oE '2\.1[0-5]\.[0-9]+\+cpu' | head -n 1)
PIP_INSTALL = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q -c constraints.txt
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)
STYLED_SOURCES := $(filter %.h %.hpp %.c %.cc %.cpp %.inl %.cu %.cuh,$(NATIVE_SOURCES)) \
  $(wildcard tests/native/cpp/*.h tests/native/cpp/*.cpp)

# Targets work without a locale, a terminal, PATH and HOME.
export PATH := $(or $(PATH),/usr/local/bin:/usr/bin:/bin)
export PYTHONUTF8 := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-native test-big test-clock test-crash test-matrix test-doors lint
.PHONY: bench bench-swap docs wheel-check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter (3.11 or newer), TORCH=2.11.0 the version of torch;"
	@echo "  ARGS='...' is passed to the programs that demo, test, test-big and bench start."

setup: $(DEV_STAMP)  ## create .venv with all requirements (some minutes the first time)

demo: $(RUN_STAMP)  ## train a GPT with weights and optimizer state on disk
	$(BIN)/python examples/pretrain_gpt.py --config examples/configs/demo.yaml $(ARGS)

test: setup  ## run the tests, except long or large ones
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not big and not clock" $(ARGS)

test-clock: setup  ## run the tests that measure time, one at a time, on an idle machine
	$(BIN)/python -m pytest -q -m clock $(ARGS)

test-native: setup  ## run the native tests under ASan+UBSan and under TSan
	$(call native-tests,asan,address$(COMMA)undefined)
	$(call native-tests,tsan,thread)

# Builds and runs tests/native/cpp. TSan fails if the kernel randomizes addresses by too many bits
# (vm.mmap_rnd_bits); setarch -R disables this, unless it is not permitted.
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

test-big: setup  ## run all tests except those that measure time
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not clock" --hypothesis-profile=search $(ARGS)

CRASH_TESTS := crash durable_kill faults records saved_under_faults simulation simulation_ranks
test-crash: setup  ## kill or fail training 10,000 times, and check what can be resumed (long)
	$(BIN)/python -m pytest -q -m big $(CRASH_TESTS:%=tests/faults/test_%.py) $(ARGS)

lint: setup  ## check style, types and the format of native sources
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(STYLED_SOURCES),$(BIN)/clang-format --dry-run -Werror $(STYLED_SOURCES))

docs: setup  ## build the pages and the API reference into build/docs, without warnings
	$(PIP_INSTALL) 'torch-infinity[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs $(ARGS)

wheel-check: $(RUN_STAMP)  ## build sdist and wheel, and test the wheel in a separate venv
	$(BIN)/python tools/wheel_check.py --torch $(WANTED) $(ARGS)

test-matrix:  ## run the tests with other Pythons and torches (long): ARGS='python3.12:2.11.0 ...'
	$(PYTHON) tools/test_matrix.py $(ARGS)

# A second venv that falls back to the packages of .venv.
DOORS := build/doors
PURELIB = python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
OTHERS := trl lightning transformers accelerate peft bitsandbytes schedulefree pytorch-optimizer datasets

test-doors: setup  ## run the integration tests with the newest TRL, Lightning, bitsandbytes, ...
	$(BIN)/python -m venv $(DOORS)
	echo "import site; site.addsitedir('$$($(BIN)/$(PURELIB))')" >$$($(DOORS)/bin/$(PURELIB))/beneath.pth
	$(DOORS)/bin/python -m pip install -q --upgrade $(OTHERS)
	for one in $(OTHERS); do $(DOORS)/bin/python -m pip show $$one | head -n 2 | paste - -; done
	$(DOORS)/bin/python -m pytest -q -m "not big and not clock" tests/integrations/huggingface \
	  tests/integrations/test_doors.py tests/integrations/test_lightning.py \
	  tests/unit/model/test_quantized.py tests/train/test_runs_data.py \
	  tests/parity/test_any_optimizer.py $(ARGS)

bench: setup  ## compare the time of a step with plain torch and with the bounds
	$(BIN)/python tools/bench_step.py --json $(ARGS)

bench-swap: setup  ## search I/O settings of a drive: make bench-swap ARGS='--path DIR --compare all'
	$(BIN)/python tools/bench_swap.py $(ARGS)

clean:  ## remove .venv and all build outputs
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

# Requirements of the build and of the demo.
$(RUN_STAMP): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE_SOURCES) | $(BIN)/python
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  test -n "$$CXX" || { \
	  echo "setup: no C++ compiler was found; try: apt-get install g++, or set CXX" >&2; exit 1; }
	@echo "setup: installing into $(VENV); the first time takes some minutes"
	$(PIP_INSTALL) nanobind scikit-build-core ninja cmake
	$(PIP_INSTALL) --no-build-isolation $(WANTED) -e '.[cuda]'
	@echo "setup: took $$(($$(date +%s) - $(BEGAN))) s"
	@touch $@

# Requirements of tests and lint: the extras of the installed package.
$(DEV_STAMP): $(RUN_STAMP)
	$(PIP_INSTALL) 'torch-infinity[dev]'
	@touch $@
