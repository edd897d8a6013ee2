# `make demo` runs Quire's main job on the model that ships with it, `make test` runs every test, and `make test-fast`
# those of the parts that need no model.
# Nothing is needed but make and Python >= 3.11; everything else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
# pip shows its downloads on a terminal; otherwise it is quiet.
PROGRESS := $(shell [ -t 2 ] && echo --progress-bar=on || echo --quiet)
# Tests of parts that need neither torch nor a model.
FAST := account api_input bench_load bench_metrics body clocks config connection conversation fairness \
   guard imports lines live location output package processor readability reasoning settings shares \
   streams tool_calls waiting workloads writes
PROMPT ?= Once upon a time

.PHONY: demo test test-fast test-ranks test-ray lint docs bench-host clean

demo: $(VENV)/.installed
	$(BIN)/quire generate demo --summary "$(PROMPT)"

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 $(FAST:%=tests/unit/test_%.py) $(PYTEST_ARGS)

# All kinds of ranks with every pair of switches, of which `make test` runs one kind. Takes ten minutes.
test-ranks: $(VENV)/.installed-dev
	QUIRE_ALL_RANKS=1 $(BIN)/python -m pytest -n 2 tests/e2e/test_rank_matrix.py tests/e2e/test_left_processes.py $(PYTEST_ARGS)

# A Ray cluster on this machine. Ray is an extra, and the tests take two minutes, so `make test` skips them.
test-ray: $(VENV)/.installed-dev
	$(PIP) $(PROGRESS) --editable ".[ray]"
	QUIRE_TEST_RAY=1 $(BIN)/python -m pytest tests/ray_cluster $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	$(BIN)/zensical build --strict --clean

bench-host: $(VENV)/.installed
	$(BIN)/quire bench host

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Quire needs Python >= 3.11, but $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "Installing Quire into $(VENV) (once: 1.1 GB with a CPU build of torch, 5.6 GB with CUDA) ..."
	$(PIP) $(PROGRESS) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the test tools into $(VENV) (once) ..."
	$(PIP) $(PROGRESS) --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist site .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
