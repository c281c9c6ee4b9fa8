# Plain pip with pinned versions: a resolver left free to choose takes a CUDA build of several GB.
PYTHON    ?= python3
PIP_FLAGS ?=
ARGS      ?=
JOBS      ?= $(shell getconf _NPROCESSORS_ONLN)
VENV      := .venv
BIN       := $(VENV)/bin
GENERATED := docs/balancing.md docs/claims.md docs/numerics.md docs/prefix-cache.md
PIP       := $(BIN)/python -m pip install -q --no-input --disable-pip-version-check $(PIP_FLAGS)
# One torch thread a test process: on tiny models two threads on two cores lose to one.
ONE_THREAD := PERILUNE_THREADS=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

.PHONY: help serve test test-gpu test-gpus test-kills test-schedules check fix docs bench clean

help:                            ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

serve: $(VENV)/.serve            ## serve models/nano on port 8000 (ARGS="DIR --port 9000" for more)
	$(BIN)/perilune serve $(ARGS)

test: $(VENV)/.dev               ## run every test (ARGS="tests/text -x" for some)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 $(ARGS)

test-gpu: $(VENV)/.dev           ## check every op on the GPU (ARGS="kda_chunk" for one)
	$(BIN)/perilune kernels check --tier gpu --jobs $(JOBS) $(ARGS)
	$(if $(ARGS),,$(BIN)/python tests/gpu/cuda_faults.py --jobs $(JOBS))
	$(if $(ARGS),,$(BIN)/python tests/gpu/nano.py --out runs/gpu/nano.json)

test-gpus: $(VENV)/.dev          ## check a model and K3's layers shared by two GPUs (ARGS="--ranks 4")
	$(BIN)/python tests/gpu/ranks.py $(ARGS)
	$(BIN)/perilune bench ranks --unchecked --rounds 10 $(ARGS)

test-kills: $(VENV)/.dev         ## kill the engine's process mid-stream a hundred times
	KILLS=100 $(ONE_THREAD) $(BIN)/python -m pytest tests/engine/test_process_kills.py $(ARGS)

test-schedules: $(VENV)/.dev     ## a million steps of the engine under random schedules
	$(ONE_THREAD) $(BIN)/python tests/engine/schedules.py --out runs/schedules.json $(ARGS)

check: $(VENV)/.dev              ## lint, format, room contracts, types, generated documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check
	$(BIN)/cog --check $(GENERATED)

fix: $(VENV)/.dev                ## lint and format in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev               ## renew the generated blocks of the documents
	$(BIN)/cog -r $(GENERATED)

bench: $(VENV)/.dev              ## measure prefill and decode on the CPU
	$(BIN)/python benchmarks/cpu.py $(ARGS)

clean:                           ## remove the virtual environment and the caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@PYTHON="$(PYTHON)" scripts/new_venv $(VENV)

$(VENV)/.serve: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing what serving needs into $(VENV) (a few minutes, once)"
	@$(PIP) -c constraints.txt -e '.[engine]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing what the tests need into $(VENV) (a few minutes, once)"
	@$(PIP) -c constraints.txt -e '.[dev,oracles]'
	@touch $(VENV)/.serve $@
