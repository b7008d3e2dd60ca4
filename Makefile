# `make tune` and `make test` work from a fresh clone: each first sets up .venv, once, by launch/setup.sh.
# PYTHON=... chooses the base python (3.11 to 3.13); a suitable torch that it can import is used as it is.
PYTHON ?= python3
SHELL := bash
.NOTPARALLEL:
.PHONY: help tune test test-fast test-faults test-installed test-newer lint docs check clean

python := .venv/bin/python
# A second triton, tested from a folder of its own: it stands before the installed one on PYTHONPATH.
newer := $(CURDIR)/.venv/triton-3.9.0
others := $(python) -m pytest --ignore=tests/ranks
ranks := $(python) -m pytest tests/ranks
on_newer := PYTHONPATH="$(newer)$${PYTHONPATH:+:$$PYTHONPATH}" $(python) -m pytest -m "not gpu and not slow and not once"

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' Makefile | expand -t 16

tune: .venv/run.stamp  ## tune AllGather-GEMM on all GPUs, or on two CPU ranks under the Triton interpreter
	launch/launch.sh kernels/ag_gemm.py --case tune

# Three runs side by side: tests of ranks wait much and compute little. What they print comes one after the other.
test: .venv/test.stamp $(newer)/triton/__init__.py  ## the tests, with the installed triton and with 3.9.0
	@logs=$$(mktemp -d); $(ranks) >$$logs/ranks 2>&1 & first=$$!; $(on_newer) >$$logs/newer 2>&1 & second=$$!; \
	$(others); code=$$?; wait $$second || code=1; cat $$logs/newer; wait $$first || code=1; cat $$logs/ranks; rm -rf $$logs; exit $$code

test-fast: .venv/test.stamp  ## the tests that start no ranks, programs or compilers, with the installed triton: a minute and ten seconds on two cores
	$(python) -m pytest -m "not gpu and not slow and not processes"

test-faults: .venv/test.stamp  ## what make test leaves out: all faults in all phases and other slow tests, and the table of docs/reliability.md: half an hour
	$(python) -m pytest -m "slow and not gpu"
	$(python) -m tests.faults.matrix --write docs/reliability.md

test-installed: .venv/test.stamp  ## the tests with the installed triton, one after the other
	$(others)
	$(ranks)

test-newer: .venv/test.stamp $(newer)/triton/__init__.py  ## the tests that Triton matters to, with triton 3.9.0
	$(on_newer)

lint: .venv/test.stamp  ## ruff format, ruff check, mypy --strict
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy --strict

docs: .venv/docs.stamp  ## the pages of docs/ as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict --quiet

check: lint docs test  ## all that CI runs

clean:  ## delete live logs, builds and tool caches; .venv stays
	rm -rf .autotune_logs build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.venv/%.stamp: pyproject.toml launch/constraints.txt launch/setup.sh
	PYTHON="$(PYTHON)" launch/setup.sh $*
	@touch $@

$(newer)/triton/__init__.py: | .venv/test.stamp
	$(python) -m pip install --quiet --no-deps --target $(newer) triton==3.9.0
