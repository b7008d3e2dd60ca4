"""The benchmark of cache hits: its phases on two ranks under the interpreter, its order, and its part without ranks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, Done, of_checkout, run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]


def run(cwd: Path, *command: str, **variables: str) -> Done:
    environment = of_checkout(cwd, DIST_TUNE_LOG_DIR=str(cwd / "logs"), **{"TRITON_INTERPRET": "0", **variables})
    return run_python(*command, cwd=cwd, env=environment)


@pytest.fixture(scope="module", params=["function", "contextual"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """Where the phases ran, and what both ranks found in each, or why they failed."""
    cwd = tmp_path_factory.mktemp(request.param)
    done = run(cwd, "-m", "benchmarks.tests.bench_cache_phases", request.param, "tune", "hit", "one_missing", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return cwd, json.loads(done.stdout)


@pytest.mark.slow  # tests/ranks/test_recall.py has what is measured here
def test_what_some_processes_tune_others_find(found: tuple[Path, list[list[Any]]]) -> None:
    """New processes take the config from the cache, the first time and later, and a hit costs something."""
    _, (tuned, hits, *_) = found
    assert len({each["winner"] for each in tuned}) == 1
    for hit in hits:
        assert hit["least_ms"].keys() == hit["more_ms"].keys() == {"first", "anew", "further"}
        assert all(0 < ms < 1e3 for ms in hit["least_ms"].values())


@pytest.mark.slow
def test_they_find_it_also_where_a_rank_lacks_it(found: tuple[Path, list[list[Any]]]) -> None:
    """Rank 1's folder was empty; its calls hit all the same, and the record lies there afterwards."""
    cwd, (*_, losses) = found
    for lost in losses:
        assert (lost["lacking"], lost["records_before"], lost["records_after"]) == ([1], [1, 0], [1, 1])
    files = [[path.read_bytes() for path in (cwd / f"cache-rank-{rank}").rglob("*.json")] for rank in range(2)]
    assert len(files[0]) == 1
    assert files[0] == files[1]


def test_one_command_runs_all_phases_in_new_processes_and_sums_up(tmp_path: Path) -> None:
    """launch.sh is called for each phase, with one cache for all; the table has medians of the hits, and how far the step is off."""
    more = [{"first": ms, "anew": 2.0, "further": 1.0} for ms in (4.25, 9.5, 3.0)]
    ms = {"tuned": 2.02, "untuned": 2.0}
    hits = [{"untuned_ms": 2.5, "later_us": 1.5, "more_ms": each, "least_ms": each, "step_ms": ms} for each in more]
    told = {"tuner": "function", "shape": [8, 8, 8], "tune": {"step_ms": 2.0}, "hits": hits, "one-missing": {"lacking": [1], "ms": 7.0}}
    (tmp_path / "cache.bench.json").write_text(json.dumps(told))
    (tmp_path / "driver.py").write_text(
        "import sys\n"
        "from benchmarks import bench_cache\n"
        "def run(command, env, check): print(command[0].name, *command[2:], env['DIST_TUNE_CACHE_DIR'], check)\n"
        "bench_cache.subprocess.run = run\n"
        "sys.argv = ['bench_cache.py', '--shape', '8,8,8']\n"
        "bench_cache.main()\n"
        "sys.argv = ['bench_cache.py', '--phase', 'hit']\n"
        "bench_cache.main()\n"
    )
    done = run(tmp_path, "driver.py")
    started = re.findall(rf"launch.sh --phase (\S+) --tuner function --shape 8,8,8 {tmp_path}/cache True\n", done.stdout)
    assert started == ["tune", "hit", "hit", "hit", "one-missing"], done.stdout + done.stderr
    assert re.search(r"first call of a process through the tuner, ms more\W+4.25\W+3.00\W+9.50\W+5\b", done.stdout)
    assert re.search(r"% more than when tuned\W+1.00\W+1.00\W+1.00\W+1\b", done.stdout)
    assert (done.returncode, "start --phase hit with launch/launch.sh benchmarks/bench_cache.py" in done.stderr) == (2, True)


@pytest.mark.slow
def test_later_calls_are_timed_without_ranks(tmp_path: Path) -> None:
    """On the fake driver: a line for a function that launches a kernel and one for a function that does nothing."""
    done = run(tmp_path, str(ROOT / "benchmarks/bench_cache.py"), "--phase", "host")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(launches|does nothing)\W+([\d.]+)\W+([\d.]+)\W+-?[\d.]+", done.stdout)
    assert [name for name, _, _ in rows] == ["launches", "does nothing"]
    assert all(float(tuned) > float(bare) > 0 for _, bare, tuned in rows)
