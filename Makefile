# `make tune` and `make test` work from a fresh clone: each first sets up .venv, once, by launch/setup.sh.
# PYTHON=... chooses the base python (3.11 to 3.13); a suitable torch that it can import is used as it is.
PYTHON ?= python3
SHELL := bash
# Programs that tests start find dist_tune compiled to bytecode, also where the environment says to write none.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: help tune test test-fast test-faults test-pauses lint docs check clean

python := .venv/bin/python
# A second triton, tested from a folder of its own.
newer := $(CURDIR)/.venv/triton-3.9.0
pytest := $(python) -m pytest
fast := not gpu and not slow and not processes
half := benchmarks/tests tests/cli tests/measure tests/offline tests/report tests/search tests/sites

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' Makefile | expand -t 16

tune: .venv/run.stamp  ## tune AllGather-GEMM on all GPUs, or on two CPU ranks under the Triton interpreter
	launch/launch.sh kernels/ag_gemm.py --case tune

test: .venv/test.stamp  ## the tests, and those that Triton decides with 3.9.0 as well: five minutes on two cores
	@tests/all.sh $(newer)

test-fast: .venv/test.stamp  ## the tests that start no ranks, programs or compilers, with the installed triton: 45 s on two cores
	@log=$$(mktemp); code=0; $(pytest) -m "$(fast)" $(half) >$$log 2>&1 & id=$$!; \
	$(pytest) -m "$(fast)" tests $(addprefix --ignore=,$(half)) || code=1; wait $$id || code=1; cat $$log; rm -f $$log; exit $$code

test-faults: .venv/test.stamp  ## what make test leaves out: all faults in all phases and other slow tests, and the table of logs/faults-cpu: a quarter of an hour
	$(pytest) -m "slow and not gpu"
	$(pytest) -m "hypothesis and not gpu and not slow" --hypothesis-profile=thorough
	$(python) -m tests.faults.matrix --write logs/faults-cpu/README.md

# Without the tests that stop a rank themselves, for a time that a pause's end would cut short.
test-pauses: .venv/test.stamp  ## the tests of ranks while each rank is paused at random: what they agree on must not depend on who is late
	PAUSES=0.02 $(pytest) tests/ranks tests/faults tests/offline -k "not stop"

lint: .venv/test.stamp  ## ruff format, ruff check, mypy --strict
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy --strict

# Not --quiet: --strict counts only the warnings that are shown.
docs: .venv/test.stamp  ## the pages of docs/ as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

check: lint docs test  ## all that CI runs

clean:  ## delete live logs, builds and tool caches; .venv stays
	rm -rf .autotune_logs build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.venv/%.stamp: pyproject.toml launch/constraints.txt launch/setup.sh
	PYTHON="$(PYTHON)" launch/setup.sh $*
	@touch $@

$(newer)/triton/__init__.py: | .venv/test.stamp
	$(python) -m pip install --quiet --no-deps --no-compile --target $(newer) triton==3.9.0
