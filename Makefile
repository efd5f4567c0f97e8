.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_DIR := runs/demo
PEERS := opacus backpack-for-pytorch einops unfoldNd scipy

.PHONY: help install demo test test-all check docs dist bench reproduce clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# What tests/norms/test_peers.py compares with; their own requirements would bring much that it does not use.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(PEERS) || echo 'skipped: peers'
	@touch $(STAMP)

install: $(STAMP)  ## Create .venv with the package, all extras and the development tools

demo: install  ## Run both synthetic experiments small, print what came out, write the report
	@rm -rf $(DEMO_DIR)
	@$(BIN)/divebatch run synthetic-convex --trials 2 --epochs 20 --log-exact --out $(DEMO_DIR)
	@$(BIN)/divebatch run synthetic-nonconvex --trials 2 --epochs 20 --log-exact --out $(DEMO_DIR)
	@$(BIN)/divebatch report $(DEMO_DIR)

test: install  ## Run the tests but the slow ones
	$(BIN)/pytest -n 2 -m 'not slow'

test-all: install  ## Run all tests: also those that kill processes, start ranks, browsers or compilers
	$(BIN)/pytest -n 3 --dist worksteal

check: install  ## Lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs  ## Build the site into build/site
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . build/site
	@echo 'open build/site/index.html'

$(VENV)/.dist: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dist]'
	@touch $@

dist: $(VENV)/.dist  ## Build the wheel and the source archive into dist, check both, try the wheel in an empty environment
	@rm -rf dist
	$(BIN)/python tools/dist.py

bench: install  ## Measure the overhead of measuring, as ratios to a plain loop and beside other libraries (6 minutes)
	$(BIN)/python benchmarks/synthetic_step.py
	$(BIN)/python -W ignore benchmarks/norms.py --peers

reproduce: install  ## The paper's synthetic experiments in full (minutes on two cores)
	$(BIN)/divebatch run synthetic-convex --log-exact --out runs/paper --resume
	$(BIN)/divebatch run synthetic-nonconvex --log-exact --out runs/paper --resume
	$(BIN)/divebatch report runs/paper

clean:  ## Remove the virtual environment, builds, runs and caches
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
