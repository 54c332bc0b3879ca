# On a fresh machine `make demo` and `make test` are all there is to do: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed

WORKERS = $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
# Minutes on two cores (20 on slow ones); what `make test-all` adds takes more: cases at one more size, and figures.
LEFT_OUT = -m "not figures and not variants"

.PHONY: demo test test-all tests check lint audit torture bench docs clean

demo: $(READY)
	$(BIN)/dpoptim train --data digits --epsilon 2 --delta 1e-5 --compare --out runs/demo --overwrite

# Workers have one thread each, since they would wait for each other's; one more than cores, as some wait for processes
# that they started: each takes a quarter of a minute to import and collect all tests.
test: $(READY)
	$(MAKE) --jobs=2 lint tests

# Everything: the figures of committed tables are measured again, and properties at every size, too.
test-all: $(READY)
	$(MAKE) --jobs=2 lint tests LEFT_OUT=

# What Python compiles is kept: the workers' own processes, and the next run, need not do it again.
tests: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(LEFT_OUT) -n $(WORKERS) --maxprocesses 8 --dist worksteal

# For every save: lint, types and the quick tests; under a minute on one core. `make test` is what counts.
check: lint
	$(BIN)/python -m pytest -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: $(READY)
	$(BIN)/dpoptim audit all
	$(BIN)/python -m pytest tests/audit

# Kills, damaged files, full disks and exhausted memory: minutes; TORTURE="--seed 1 --only kills" for others.
torture: $(READY)
	cd tests && ../$(BIN)/python -m torture $(TORTURE)

bench: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/noise_throughput.py
	$(BIN)/python benchmarks/step_time.py --out runs/bench

# The site, from docs/ and docstrings, into build/site; a dead link is an error. Nothing is fetched while it builds.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/plots.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

# What is imported is compiled then; pip would compile all, which takes as long as downloading it.
$(READY): pyproject.toml setup.py $(shell find src -name '*.[ch]') constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) runs build src/dpoptim/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
