# make demo: from a fresh checkout to an answer.  make test: the suite.  make slow: what takes long, with
# real models.  make check: lint and types.
# pip takes the torch that its settings lead to. On Linux without an NVIDIA GPU point pip at PyTorch's
# CPU wheels first (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS): the default ones carry gigabytes of CUDA.

# The first that runs and is new enough: version managers leave names that do not run.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
TESTS ?= not slow and not gpu
# One a core, at about a gigabyte; who has no tests left takes of another's.
WORKERS ?= -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo test slow check format clean

demo: .venv/.installed
	$(BIN)/foretell pull smollm2
	$(BIN)/foretell demo

test: .venv/.installed-dev
	$(BIN)/python -m pytest -m "$(TESTS)" $(WORKERS)

slow: .venv/.installed-dev
	$(BIN)/python -m pytest -m slow

check: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --project pyproject.toml
	$(BIN)/python -m pytest tests/repo/test_imports.py

format: .venv/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/bin/python:
	@$(or $(PYTHON),false) -c '$(NEW_ENOUGH)' 2>/dev/null || \
		{ echo "foretell needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	@echo "installing torch and the rest into .venv: a minute or more"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ .venv/.installed

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
