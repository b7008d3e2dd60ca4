"""The benchmark of tuners, on two ranks under the interpreter: that it runs, and what it writes."""

import json
import os
from pathlib import Path

import pytest

from tests.programs import run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]

ROOT = Path(__file__).parents[2]


RUNS = [
    ("vanilla triton.autotune", "cold"), ("vanilla triton.autotune", "memory"),
    ("dist_tune exhaustive", "cold"), ("dist_tune exhaustive", "memory"),
    ("dist_tune", "cold"), ("dist_tune", "memory"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tuners", "expected"),
    [pytest.param("racing", RUNS[4:], marks=pytest.mark.slow), pytest.param("vanilla,exhaustive,racing", RUNS, marks=pytest.mark.slow)],
)
def test_bench_tuning_times_tuners_and_judges_their_winners(tmp_path: Path, tuners: str, expected: list[tuple[str, str]]):
    """One run of each; every one has a winner on both ranks, and a regret that is zero for the best."""
    command = [f"{ROOT}/benchmarks/bench_tuning.py", "--shape", "2,16,8", "--json", f"{tmp_path}/bench.json", "--tuners", tuners]
    counts = ["--cold-repeats", "1", "--disk-repeats", "0", "--repeats", "1", "--rounds", "2"]
    folders = {"DIST_TUNE_LOG_DIR": str(tmp_path / "logs"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = run_python(*command, *counts, cwd=tmp_path, env={**os.environ, "TRITON_INTERPRET": "1", **folders}, n_ranks=2)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads((tmp_path / "bench.json").read_text())
    runs = told["runs"]
    assert [(run["tuner"].split(",")[0], run["cache"]) for run in runs] == expected
    assert all(len(run["winners"]) == 2 and run["seconds"] > 0 and run["regret"] >= 0 for run in runs)
    ours = [run for run in runs if "vanilla" not in run["tuner"]]
    assert all(len(set(run["winners"])) == 1 and sum(run["spent"].values()) <= run["seconds"] * 1.1 for run in ours)
    assert ("exhaustive" in tuners) == (told["exhaustive"] is not None and len(told["exhaustive"]["candidates"]) == 8)
