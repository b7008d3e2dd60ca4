"""Benchmarks as programs, on two ranks under the interpreter or alone on the fake driver: that they
run, and what they tell.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, Done, of_checkout, run_python

pytestmark = pytest.mark.processes

PHASE = """
import json, sys, torch
from rich.console import Console
from benchmarks import bench_cache
from benchmarks.compared_calls import ComparedStep, of_all_ranks, without_arithmetic
from kernels.harness import join_ranks
phase, tuner, told = sys.argv[1:]
device, _ = join_ranks()
bench_cache.N_HITS = 2  # enough to see that each is one
with without_arithmetic(device):
    found = of_all_ranks(getattr(bench_cache, phase)(ComparedStep(tuner, (2, 16, 8), device), json.loads(told), Console(quiet=True)))
if torch.distributed.get_rank() == 0:
    print("found", json.dumps(found))
"""  # noqa: E501


def run(cwd: Path, *command: str, n_ranks: int = 0, **variables: str) -> Done:
    environment = of_checkout(
        cwd,
        DIST_TUNE_LOG_DIR=str(cwd / "logs"),
        **{"TRITON_INTERPRET": str(int(n_ranks > 0)), **variables},
    )
    return run_python(*command, cwd=cwd, env=environment, n_ranks=n_ranks)


@pytest.mark.slow  # tests/ranks/test_cache.py has what is measured here
@pytest.mark.parametrize("tuner", ["function", "contextual"])
def test_what_some_processes_tune_others_find(tmp_path: Path, tuner: str) -> None:
    """New processes take the config from the cache, first and later, which costs something; also
    where rank 1's folder is empty.
    """
    told: dict[str, Any] = {}
    for phase in ("tune", "hit", "one_missing"):
        done = run(
            tmp_path,
            "-c",
            PHASE,
            phase,
            tuner,
            json.dumps({name: found[0] for name, found in told.items()}),
            n_ranks=2,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told[phase] = json.loads(done.stdout.rpartition("found ")[2])
    assert len({each["winner"] for each in told["tune"]}) == 1
    for hit in told["hit"]:
        assert hit["least_ms"].keys() == hit["more_ms"].keys() == {"first", "anew", "further"}
        assert all(0 < ms < 1e3 for ms in hit["least_ms"].values())
    assert [
        (lost["lacking"], lost["records_before"], lost["records_after"])
        for lost in told["one_missing"]
    ] == [([1], [1, 0], [1, 1])] * 2
    files = [
        [path.read_bytes() for path in (tmp_path / f"cache-rank-{rank}").rglob("*.json")]
        for rank in range(2)
    ]
    assert len(files[0]) == 1
    assert files[0] == files[1]


def test_one_command_runs_all_phases_in_new_processes_and_sums_up(tmp_path: Path) -> None:
    """launch.sh is called for each phase, with one cache for all; the table has medians of the
    hits, and how far the step is off.
    """
    more = [{"first": ms, "anew": 2.0, "further": 1.0} for ms in (4.25, 9.5, 3.0)]
    ms = {"tuned": 2.02, "untuned": 2.0}
    hits = [
        {"untuned_ms": 2.5, "later_us": 1.5, "more_ms": each, "least_ms": each, "step_ms": ms}
        for each in more
    ]
    told = {
        "tuner": "function",
        "shape": [8, 8, 8],
        "tune": {"step_ms": 2.0},
        "hits": hits,
        "one-missing": {"lacking": [1], "ms": 7.0},
    }
    (tmp_path / "cache.bench.json").write_text(json.dumps(told))
    (tmp_path / "driver.py").write_text(
        "import sys\nfrom benchmarks import bench_cache\ndef run(command, env, check):"
        " print(command[0].name, *command[2:], env['DIST_TUNE_CACHE_DIR'],"
        " check)\nbench_cache.subprocess.run = run\nsys.argv = ['bench_cache.py', '--shape',"
        " '8,8,8']\nbench_cache.main()\nsys.argv = ['bench_cache.py', '--phase',"
        " 'hit']\nbench_cache.main()\n"
    )
    done = run(tmp_path, "driver.py")
    started = re.findall(
        rf"launch.sh --phase (\S+) --tuner function --shape 8,8,8 {tmp_path}/cache True\n",
        done.stdout,
    )
    assert started == ["tune", "hit", "hit", "hit", "one-missing"], done.stdout + done.stderr
    assert re.search(
        r"first call of a process through the tuner, ms more\W+4.25\W+3.00\W+9.50\W+5\b",
        done.stdout,
    )
    assert re.search(r"% more than when tuned\W+1.00\W+1.00\W+1.00\W+1\b", done.stdout)
    assert (
        done.returncode,
        "start --phase hit with launch/launch.sh benchmarks/bench_cache.py" in done.stderr,
    ) == (2, True)


@pytest.mark.slow
def test_later_calls_are_timed_without_ranks(tmp_path: Path) -> None:
    """On the fake driver: a line for a function that launches a kernel and one for a function that
    does nothing.
    """
    done = run(tmp_path, f"{ROOT}/benchmarks/bench_cache.py", "--phase", "host")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(launches|does nothing)\W+([\d.]+)\W+([\d.]+)\W+-?[\d.]+", done.stdout)
    assert [name for name, _, _ in rows] == ["launches", "does nothing"]
    assert all(float(tuned) > float(bare) > 0 for _, bare, tuned in rows)


@pytest.mark.slow
def test_fresh_processes_hit_alone_and_on_two_ranks(tmp_path: Path) -> None:
    """A row for each step with its sites and times; a process that finds nothing in the cache would
    have failed it.
    """
    done = run(
        tmp_path,
        "-m",
        "benchmarks.bench_first_hit",
        "--steps",
        "one",
        "one-2-ranks",
        "--processes",
        "1",
        "--folder",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"(1 kernel\S*(?: 2 ranks)?) +. 1 +. [\d.]+ \([\d.]+\) +. [\d.]+ \([\d.]+\)", done.stdout
    )
    assert rows == ["1 kernel", "1 kernel, 2 ranks"]


@pytest.mark.slow
def test_tuners_are_timed_and_their_winners_judged(tmp_path: Path) -> None:
    """Each has one winner of ours on both ranks, and a regret that is zero for the best."""
    names = {
        "vanilla": "vanilla triton.autotune",
        "exhaustive": "dist_tune exhaustive",
        "racing": "dist_tune",
    }
    command = [
        f"{ROOT}/benchmarks/bench_tuning.py",
        "--shape",
        "2,16,8",
        "--json",
        "bench.json",
        "--tuners",
        ",".join(names),
    ]
    counts = ("--cold-repeats", "1", "--disk-repeats", "0", "--repeats", "1", "--rounds", "2")
    done = run(tmp_path, *command, *counts, n_ranks=2)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads((tmp_path / "bench.json").read_text())
    runs = told["runs"]
    assert [(run["tuner"].split(",")[0], run["cache"]) for run in runs] == [
        (n, c) for n in names.values() for c in ("cold", "memory")
    ]
    assert all(
        len(run["winners"]) == 2 and run["seconds"] > 0 and run["regret"] >= 0 for run in runs
    )
    ours = [run for run in runs if "vanilla" not in run["tuner"]]
    assert all(
        len(set(run["winners"])) == 1 and sum(run["spent"].values()) <= run["seconds"] * 1.1
        for run in ours
    )
    assert len(told["exhaustive"]["candidates"]) == 8
