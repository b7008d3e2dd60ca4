"""The cache directory under many processes at once, and under processes that are killed.

A program of its own forks the processes, so that torch is imported once and no thread of pytest is forked.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from dist_tune.cache import Cache, TuningRecord, record_in
from tests.cached_records import candidate, environment, record
from tests.programs import run_python

N_PROCESSES = 8
RACE_S = 2.0
SITES = [(name, key, triton) for name in ("gemm", "a/b", "reduce") for key in ("[64]", "[128]") for triton in ("3.6.0", "3.9.0")]


@pytest.mark.processes
def test_many_processes_lose_nothing_and_killed_ones_leave_whole_files(tmp_path: Path):
    """8 processes store keys of their own and common ones: each finds whole records all the time, and no key is lost.

    20 more are killed in the middle of their writes; every record is whole, and what they left is no record.
    """
    env = {**os.environ, "PYTHONPATH": "."}
    done = run_python(__file__, str(tmp_path), cwd=Path(__file__).parents[2], env=env, timeout_s=RACE_S + 90)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(done.stdout.splitlines()[-1])
    assert [each for each in reports if each.get("error")] == []
    stored = {path for each in reports for path in each["stored"]}
    assert {str(path) for path in (tmp_path / "race").rglob("*") if path.is_file()} == stored, "something was lost, or left behind"
    left = [path for path in (tmp_path / "kill").rglob("*") if path.is_file() and path.suffix != ".json"]
    assert left, "no process was killed while it wrote"
    assert {path.suffix for path in left} == {".tmp"}
    killed = list((tmp_path / "kill").rglob("*.json"))
    assert len(killed) == len(SITES)
    for path in (*map(Path, stored), *killed):
        assert record_in(path.read_bytes()).best.index == 1


def tuning(site: tuple[str, str, str], n_samples: int) -> TuningRecord:
    name, key, triton = site
    measured = [candidate(0), candidate(1, n_replays=n_samples), *(candidate(index) for index in range(2, 30))]
    return record(kernel=name, key=key, candidates=measured, environment=environment(triton=triton))


def race(folder: Path) -> list[dict[str, Any]]:
    """The paths that each process has stored, or its error."""
    end, reports = time.monotonic() + RACE_S, [folder.with_name(f"report-{number}") for number in range(N_PROCESSES)]
    for number, report in enumerate(reports):
        if os.fork() == 0:
            try:
                report.write_text(json.dumps({"stored": _raced(folder, number, end)}))
            except Exception:  # noqa: BLE001  # whatever it is, the test shall see it
                report.write_text(json.dumps({"error": traceback.format_exc()}))
            os._exit(0)
    for _ in reports:
        os.wait()
    return [json.loads(report.read_text()) for report in reports]


def _raced(folder: Path, number: int, end: float) -> list[str]:
    cache, stored = Cache(folder), set[str]()
    own = [(name, f"[{number}]", triton) for name, _, triton in SITES]
    while time.monotonic() < end:
        made = tuning(random.choice([*SITES, *own]), random.randrange(100))
        path = cache.store(made)
        assert path is not None
        stored.add(str(path))
        assert cache.find(made.cache_key) is not None
        assert {each.cache_key for each in cache.of_name(made.kernel)} >= {made.cache_key}
        assert cache.siblings(made.cache_key) == []
    return [*stored]


def kill(folder: Path, n: int = 20) -> None:
    """Kill processes that only write, one after the other, each after another few milliseconds."""
    for site in SITES:
        Cache(folder).store(tuning(site, 0))
    for _ in range(n):
        pid = os.fork()
        if pid == 0:
            _store_forever(Cache(folder))
        time.sleep(0.02 + random.random() / 20)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _store_forever(cache: Cache) -> None:
    sync = os.fsync

    def slow(fd: Any) -> None:
        time.sleep(0.002)
        sync(fd)

    os.fsync = slow  # as a slow disk does, so that most kills come in the middle of a write
    while True:
        cache.store(tuning(random.choice(SITES), time.monotonic_ns() // 1_000_000))


if __name__ == "__main__":
    warnings.simplefilter("error")  # nothing is broken here, and a lost file would only be a warning
    kill(Path(sys.argv[1], "kill"))
    print(json.dumps(race(Path(sys.argv[1], "race"))))
