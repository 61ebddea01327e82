# Two commands for users: `make serve` and `make test`. Both make .venv and install the pinned requirements first;
# a stamp named after the pins' checksum makes the second run start at once.

VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=
PORT ?=
ARGS ?=

RUNTIME_PINS := requirements/runtime.txt pyproject.toml
NATIVE_SOURCES := $(sort $(wildcard native/*) $(wildcard native/*/*))
DEV_PINS := requirements/dev.txt $(RUNTIME_PINS)
RUNTIME_STAMP := $(VENV)/.runtime-$(shell cat $(RUNTIME_PINS) | cksum | cut -d' ' -f1)
NATIVE_STAMP := $(VENV)/.native-$(shell cat pyproject.toml $(filter %.txt %.h %.cpp,$(NATIVE_SOURCES)) | cksum | cut -d' ' -f1)
DEV_STAMP := $(VENV)/.dev-$(shell cat $(DEV_PINS) | cksum | cut -d' ' -f1)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help serve test clients lint format lines bench gpu clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(NATIVE_STAMP) ## serve a model: make serve [MODEL=folder-or-hub-id] [PORT=8001] [ARGS="..."]
	@exec $(BIN)/tokenmill serve $(if $(MODEL),"$(MODEL)") $(if $(PORT),--port "$(PORT)") $(ARGS)

# Two worker processes with one compute thread each: tests use small models, more threads only wait for each other.
test: lint ## lint and all tests; ARGS are passed to pytest
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

clients: $(DEV_STAMP) $(NATIVE_STAMP) ## clients that need other pins than ours, in an environment of their own
	@$(BIN)/python -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/clients.txt
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients $(ARGS)

lint: $(DEV_STAMP) $(NATIVE_STAMP) ## ruff, mypy --strict, import contracts, line budget
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(MAKE) --no-print-directory --silent lines

format: $(DEV_STAMP) ## format and mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lines: ## lines of Python code per folder, docstrings not counted; fails when a part exceeds its budget
	@$(firstword $(wildcard $(BIN)/python) python3) tools/count_lines.py $(LINES_ARGS)

bench: $(NATIVE_STAMP) ## offline throughput of MODEL (or the demo model); ARGS are passed on
	@exec $(BIN)/python benchmarks/throughput.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

gpu: $(NATIVE_STAMP) ## prove and measure the GPU side, where there is a GPU; ARGS are passed on
	@exec $(BIN)/python tools/gpu_check.py $(ARGS)

clean: ## remove .venv and everything that tools have written
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples -name __pycache__ -type d -exec rm -rf {} +

$(RUNTIME_STAMP): | $(BIN)/python
	@echo "installing the pinned requirements into $(VENV) (once; minutes on a slow line)"
	@$(PIP) install -r requirements/runtime.txt
	@rm -f $(VENV)/.runtime-*
	@touch $@

# Without a C++ compiler this installs the Python alone.
$(NATIVE_STAMP): $(RUNTIME_STAMP)
	@echo "installing TokenMill and building its native kernels"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.native-*
	@touch $@

$(DEV_STAMP): $(RUNTIME_STAMP)
	@echo "installing the tools of the tests into $(VENV) (once)"
	@$(PIP) install -r requirements/dev.txt
	@rm -f $(VENV)/.dev-*
	@touch $@

# A name on the PATH is not enough: version managers leave stubs there that only print a message.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	  then echo "making $(VENV) with $$("$$python" --version)"; exec "$$python" -m venv $(VENV); fi; \
	done; \
	echo "Python 3.11, 3.12 or 3.13 with its venv module is needed (Debian: apt install python3-venv)." >&2; \
	echo "If it has another name: make PYTHON=/path/to/python3 ..." >&2; exit 1
