# Two commands: `make demo` runs Quire's main job on the model that ships with it, `make test` runs every test.
# Nothing is needed but make and Python >= 3.11; everything else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PROMPT ?= Once upon a time

.PHONY: demo test lint bench-host clean

demo: $(VENV)/.installed
	$(BIN)/quire generate --model demo --summary "$(PROMPT)"

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-host: $(VENV)/.installed
	$(BIN)/quire bench host

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Quire needs Python >= 3.11, but $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "Installing Quire into $(VENV) (once) ..."
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the test tools into $(VENV) (once) ..."
	$(PIP) --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
