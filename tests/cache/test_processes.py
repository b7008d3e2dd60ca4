"""The cache directory under many processes at once, and under processes that are killed.

A program of its own forks the processes, so that torch is imported once and no thread of pytest is forked:
    python tests/cache/test_processes.py race FOLDER SECONDS
CACHE_RACE_S=60 pytest tests/cache/test_processes.py runs the race for a minute.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from dist_tune.cache import files
from dist_tune.cache.folder import Cache
from dist_tune.cache.record_file import read_record
from dist_tune.cache.records import CacheKey, TuningRecord
from tests.cached_records import NOON, candidate, environment, record
from tests.programs import run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
N_PROCESSES = 16
RACE_S = float(os.environ.get("CACHE_RACE_S", "4"))
N_KILLED = 20
SITES = [(name, key, triton) for name in ("gemm", "a/b", "reduce") for key in ("[64]", "[128]") for triton in ("3.6.0", "3.9.0")]
Score = tuple[int, float]
"""Timed replays of a record and its time in seconds after noon: of records of one key, tuned at the same time, the largest stays."""


def run(*arguments: object) -> Any:
    """What the program reports, as JSON on its last line."""
    done = run_python(__file__, *map(str, arguments), cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, timeout_s=RACE_S + 90)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_best_of_many_processes_survives(tmp_path: Path):
    """16 processes store and find the same 12 keys; in the end each key has the best-measured record that any of them stored.

    All tunings overlapped by their own account, so the merge rule asks for that. No process ever finds less than it knows.
    """
    reports = run("race", tmp_path, RACE_S)
    assert len(reports) == N_PROCESSES
    for report in reports:
        assert report["error"] == ""
    best: dict[str, list[Any]] = {}
    for report in reports:
        for path, stored in report["best"].items():
            best[path] = max(best.get(path, stored), stored)
    assert len(best) == len(SITES)
    entries = {str(entry.path): entry.record for entry in Cache(tmp_path).entries()}
    assert {path: list(score(found)) for path, found in entries.items()} == best
    files = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(files) == len(SITES), f"something was left behind: {files}"
    assert min(report["n_stored"] for report in reports) > 0, "a process never came to the lock"
    print({name: sum(report[name] for report in reports) for name in ("n_stored", "n_found", "n_listed")})


def test_killed_processes_leave_whole_files(tmp_path: Path):
    """20 processes are killed in the middle of their writes; every record is whole, and the next process stores without waiting."""
    report = run("kill", tmp_path, N_KILLED)
    assert report["n_in_a_write"] > 0, f"no process was killed while it wrote: {report}"
    records = list(tmp_path.rglob("*.json"))
    assert len(records) == len(SITES)
    for path in records:
        assert read_record(path).best.index == 1
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path not in records and path.name != ".lock"]
    assert all(path.suffix == ".tmp" for path in left)
    for path in left:
        os.utime(path, (0, 0))
    began = time.monotonic()
    for site in SITES:
        assert Cache(tmp_path).store(tuning(site, 1, 1e6)) is not None
    assert time.monotonic() - began < files.LOCK_TIMEOUT_S, "a killed process still held the lock"
    assert not [path for path in left if path.exists()]


def tuning(site: tuple[str, str, str], n_samples: int, second: float) -> TuningRecord:
    """A record of a tuning that took all day, so that it overlaps with all others."""
    name, key, triton = site
    measured = [candidate(0), candidate(1, n_replays=n_samples), *(candidate(index) for index in range(2, 30))]
    when = NOON + timedelta(seconds=second)
    return record(kernel=name, key=key, candidates=measured, environment=environment(triton=triton), tuned_at=when, seconds=86400.0)


def score(found: TuningRecord) -> Score:
    return found.n_samples, (found.tuned_at - NOON).total_seconds()


class Process:
    """One of many that use the cache; what it knows of each key only gets better."""

    def __init__(self, folder: Path, number: int) -> None:
        self.cache = Cache(folder)
        self.random = random.Random(number)
        self.known: dict[str, Score] = {}
        self.best: dict[str, Score] = {}
        self.counts = {"n_stored": 0, "n_found": 0, "n_listed": 0}

    def store(self) -> None:
        # Better and better with the time, so that who is last matters to the end; at times equal.
        n_samples = time.monotonic_ns() // 10_000_000 + self.random.randrange(4)
        made = tuning(self.random.choice(SITES), n_samples, float(self.random.randrange(1000)))
        path = self.cache.store(made, is_import=self.random.random() < 0.3)
        assert path is not None
        self.best[str(path)] = max(self.best.get(str(path), score(made)), score(made))
        self._know(made.cache_key, score(made))
        self.counts["n_stored"] += 1

    def find(self) -> None:
        key = tuning(self.random.choice(SITES), 1, 0.0).cache_key
        found = self.cache.find(key, any_software=self.random.random() < 0.5)
        assert found is not None or str(self.cache.path_of(key)) not in self.known, f"{key} was stored, and is not there"
        if found is not None:
            self._know(found.cache_key, score(found))
        self.counts["n_found"] += 1

    def list(self) -> None:
        for found in self.cache.of_name(self.random.choice(SITES)[0]):
            self._know(found.cache_key, score(found))
        assert self.cache.siblings(tuning(SITES[0], 1, 0.0).cache_key) == []
        self.counts["n_listed"] += 1

    def _know(self, key: CacheKey, at_least: Score) -> None:
        path = self.cache.path_of(key)
        known = score(read_record(path))
        assert known >= max(at_least, self.known.get(str(path), at_least)), (
            f"{key}: {known} after {at_least} and {self.known.get(str(path))}"
        )
        self.known[str(path)] = known


def race(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Each process reports its best record of each path, its counts, and its error if there was one."""
    end = time.monotonic() + seconds
    pipes = [forked(partial(_raced, folder, number, end)) for number in range(N_PROCESSES)]
    return [json.loads(pipe.read()) for pipe in pipes]


def _raced(folder: Path, number: int, end: float) -> dict[str, Any]:
    process, error = Process(folder, number), ""
    try:
        while time.monotonic() < end:
            process.random.choices([process.store, process.find, process.list], [6, 3, 1])[0]()
    except Exception:  # noqa: BLE001  # whatever it is, the test shall see it
        error = traceback.format_exc()
    return {"error": error, "best": process.best, **process.counts}


def kill(folder: Path, n: int) -> dict[str, int]:
    """Kill processes that only write, one after the other, each after another few milliseconds."""
    cache = Cache(folder)
    for site in SITES:
        cache.store(tuning(site, 0, 0.0))
    n_in_a_write = 0
    for number in range(n):
        pid = os.fork()
        if pid == 0:
            _store_forever(Process(folder, number))
        time.sleep(0.02 + random.random() / 20)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        n_in_a_write += any(f"-{pid}-" in path.name for path in folder.rglob("*.tmp"))
    return {"n_in_a_write": n_in_a_write}


def _store_forever(process: Process) -> None:
    sync = os.fsync

    def slow(fd: Any) -> None:
        time.sleep(0.002)
        sync(fd)

    os.fsync = slow  # as a slow disk does, so that most kills come in the middle of a write
    while True:
        process.store()


def forked(report: Callable[[], dict[str, Any]]) -> IO[str]:
    """A file from which the report of a new process can be read, as JSON."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        with open(writer, "w") as file:
            json.dump(report(), file)
        os._exit(0)
    os.close(writer)
    return open(reader)


if __name__ == "__main__":
    warnings.simplefilter("error")  # nothing is broken here, and a lost file would only be a warning
    files.LOCK_TIMEOUT_S = 60.0  # no claim of these tests is about a disk so slow that processes go on without the lock
    folder, amount = Path(sys.argv[2]), float(sys.argv[3])
    print(json.dumps(race(folder, amount) if sys.argv[1] == "race" else kill(folder, int(amount))))
