# Plain pip with pinned versions: a resolver left free to choose takes a CUDA build of several GB.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One torch thread a test process: on tiny models two threads on two cores lose to one.
TEST_ENV := PERILUNE_THREADS=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

.PHONY: serve test check fix clean

serve: $(VENV)/.serve            ## install what serving needs, then serve models/nano on port 8000
	$(BIN)/perilune serve

test: $(VENV)/.dev               ## install everything the tests need, then run them
	$(TEST_ENV) $(BIN)/pytest -n 2

check: $(VENV)/.dev              ## lint, format, types, room contracts, generated documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

fix: $(VENV)/.dev                ## lint and format in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[engine]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,oracles]'
	touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV)
