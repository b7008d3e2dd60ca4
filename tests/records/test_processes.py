"""The cache directory under many processes at once, and under processes that are killed.

A program of its own forks the processes, so that torch is imported once and no thread of pytest is
forked.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from dist_tune.records import Cache, TuningRecord, record_in
from tests.cached_records import candidate, environment, record
from tests.programs import of_checkout, run_python

N_PROCESSES, N_ROUNDS, N_KILLED = 8, 15, 10
SITES = [
    (name, key, triton)
    for name in ("gemm", "a/b", "reduce")
    for key in ("[64]", "[128]")
    for triton in ("3.6.0", "3.9.0")
]


@pytest.mark.processes
def test_many_processes_lose_nothing_and_killed_ones_leave_whole_files(tmp_path: Path):
    """8 processes store keys of their own and common ones: each finds whole records all the time,
    and no key is lost.

    10 more are killed in the middle of a write; every record is whole, and what they left is no
    record.
    """
    done = run_python(__file__, tmp_path, cwd=tmp_path, env=of_checkout(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    stored: set[str] = set(json.loads(done.stdout.splitlines()[-1]))
    assert {str(path) for path in (tmp_path / "race").rglob("*") if path.is_file()} == stored, (
        "something was lost, or left behind"
    )
    killed = [path for path in (tmp_path / "kill").rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in killed) == [".json"] * len(SITES) + [".tmp"] * N_KILLED
    for path in (*map(Path, stored), *(each for each in killed if each.suffix == ".json")):
        assert record_in(path.read_bytes()).best.index == 1


def tuning(site: tuple[str, str, str], n_samples: int) -> TuningRecord:
    name, key, triton = site
    measured = [
        candidate(0),
        candidate(1, n_replays=n_samples),
        *(candidate(index) for index in range(2, 30)),
    ]
    return record(kernel=name, key=key, candidates=measured, environment=environment(triton=triton))


def raced(folder: Path, number: int) -> set[str]:
    """The paths that a process has stored."""
    cache, stored = Cache(folder), set[str]()
    own = [(name, f"[{number}]", triton) for name, _, triton in SITES]
    for n in range(N_ROUNDS):
        made = tuning(random.choice(SITES if n % 2 else own), random.randrange(100))
        stored.add(str(cache.store(made)))
        assert cache.find(made.cache_key) is not None
        assert {each.cache_key for each in cache.of_name(made.kernel)} >= {made.cache_key}
        assert cache.siblings(made.cache_key) == []
    return stored


def stopped(folder: Path, n_written: int, writing: Any) -> None:
    """Store again and again, until the process stops in the middle of a write."""
    sync, left = os.fsync, [n_written]

    def stop(fd: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            writing.set()
            get_context("fork").Event().wait(100.0)
        sync(fd)

    os.fsync = stop
    while True:
        Cache(folder).store(tuning(random.choice(SITES), left[0]))


def main(race: Path, kill: Path) -> None:
    """Print the paths of the race; the others lie in ``kill``."""
    # Nothing is broken here, and a lost file would only be a warning.
    warnings.simplefilter("error")
    context = get_context("fork")
    for site in SITES:
        Cache(kill).store(tuning(site, 0))
    for n in range(N_KILLED):
        writing = context.Event()
        process = context.Process(target=stopped, args=(kill, n, writing))
        process.start()
        assert writing.wait(100.0)
        process.kill()
        process.join()
    with ProcessPoolExecutor(N_PROCESSES, context) as pool:
        print(
            json.dumps(
                sorted(set[str]().union(*pool.map(raced, [race] * N_PROCESSES, range(N_PROCESSES))))
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1], "race"), Path(sys.argv[1], "kill"))
