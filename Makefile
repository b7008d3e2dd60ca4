# `make tune` and `make test` work from a fresh clone: each first sets up .venv, once, by launch/setup.sh.
# PYTHON=... chooses the base python (3.11 to 3.13); a suitable torch that it can import is used as it is.
PYTHON ?= python3
SHELL := bash
# Programs that tests start find dist_tune compiled to bytecode, also where the environment says to write none.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: help tune test test-fast test-faults test-pauses test-installed test-newer lint docs check clean

python := .venv/bin/python
# A second triton, tested from a folder of its own: it stands before the installed one on PYTHONPATH.
newer := $(CURDIR)/.venv/triton-3.9.0
pytest := $(python) -m pytest
# The files that Triton's version matters to.
both := contextual equal_kernels kernels launched_configs library_kernels loaded_kernels settled_kernels variants
on_newer := PYTHONPATH="$(newer)$${PYTHONPATH:+:$$PYTHONPATH}" $(pytest) -m "not gpu and not slow and not once" \
	tests/compiler tests/runtime tests/test_configs.py tests/test_pruning.py \
	"tests/test_kernel_code.py::test_kernels_compile_for_hopper_once_for_many_shapes[AllGather-GEMM]" \
	$(both:%=tests/ranks/test_%.py) tests/ranks/test_online.py::test_a_rank_alone_finds_its_winner
# Two runs of like length side by side, because tests of ranks wait; the run with the other Triton is shorter.
of_ranks := tests/ranks tests/faults
fast := not gpu and not slow and not processes
half := benchmarks/tests tests/measure tests/offline tests/report tests/search

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' Makefile | expand -t 16

tune: .venv/run.stamp  ## tune AllGather-GEMM on all GPUs, or on two CPU ranks under the Triton interpreter
	launch/launch.sh kernels/ag_gemm.py --case tune

# What the runs in the background print comes one after the other, at the end.
test: .venv/test.stamp $(newer)/triton/__init__.py  ## the tests, and those that Triton matters to with 3.9.0 as well
	@logs=$$(mktemp -d); ids=; code=0; \
	$(pytest) $(of_ranks) >$$logs/1 2>&1 & ids="$$ids $$!"; \
	$(on_newer) >$$logs/2 2>&1 & ids="$$ids $$!"; \
	$(pytest) $(addprefix --ignore=,$(of_ranks)) || code=1; for id in $$ids; do wait $$id || code=1; done; cat $$logs/*; rm -rf $$logs; exit $$code

test-fast: .venv/test.stamp  ## the tests that start no ranks, programs or compilers, with the installed triton: 40 s on two cores
	@log=$$(mktemp); code=0; $(pytest) -m "$(fast)" $(half) >$$log 2>&1 & id=$$!; \
	$(pytest) -m "$(fast)" $(addprefix --ignore=,$(half)) || code=1; wait $$id || code=1; cat $$log; rm -f $$log; exit $$code

test-faults: .venv/test.stamp  ## what make test leaves out: all faults in all phases and other slow tests, and the table of logs/faults-cpu: half an hour
	$(pytest) -m "slow and not gpu"
	$(pytest) -m "hypothesis and not gpu and not slow" --hypothesis-profile=thorough
	$(python) -m tests.faults.matrix --write logs/faults-cpu/README.md

# Without the tests that stop a rank themselves, for a time that a pause's end would cut short.
test-pauses: .venv/test.stamp  ## the tests of ranks while each rank is paused at random: what they agree on must not depend on who is late
	PAUSES=0.02 $(pytest) tests/ranks tests/faults tests/offline -k "not stop"

test-installed: .venv/test.stamp  ## the tests with the installed triton, one after the other
	$(pytest)

test-newer: .venv/test.stamp $(newer)/triton/__init__.py  ## the tests that Triton matters to, with triton 3.9.0
	$(on_newer)

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
	$(python) -m pip install --quiet --no-deps --target $(newer) triton==3.9.0
