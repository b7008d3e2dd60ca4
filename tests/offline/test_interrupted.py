"""Tuning scripts that are killed, stopped or started again: what was measured counts, and what
ended a process does not run again.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_tune.offline import tune_and_save_configs, tune_kernel
from dist_tune.testing import ExactTime
from tests.programs import run_python

ROOT = Path(__file__).parents[2]
SPACE = [{"i": i} for i in range(6)]
Config = dict[str, Any]


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "quiet")


def program(folder: str, dies_at: int, from_run: int, n_deaths: int, how: int) -> None:
    """Tune twelve configs, the eighth is fastest; so many times a run of one, from its
    ``from_run``-th on, gets the signal ``how``.
    """
    ExactTime.keep()
    ran = set[int]()

    def noted(what: str) -> int:
        with open(f"{folder}/{what}", "a") as file:
            file.write("x")
        return os.path.getsize(f"{folder}/{what}")

    def make(config: Config) -> Any:
        i = config["i"]

        def run() -> int:
            ran.add(i)
            if i == dies_at and noted(f"run-{i}") >= from_run and noted("died") <= n_deaths:
                os.kill(os.getpid(), how)
            ExactTime.pass_ms(1 + abs(i - 7))
            return 1

        return run, 1

    best = tune_kernel([{"i": i} for i in range(12)], make, num_iters=5, name="program")
    print(best["i"], dies_at in ran)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "codes", "winners", "runs_again"),
    [
        (
            (7, 6, 1, signal.SIGKILL),
            [-9, 0],
            ["7"],
            True,
        ),  # killed after a first round: its times count, and it gets another chance
        ((7, 1, 99, signal.SIGKILL), [-9, -9, 0], ["6", "8"], False),  # two deaths are enough
        (
            (3, 1, 2, signal.SIGTERM),
            [-15, -15, 0],
            ["7"],
            True,
        ),  # by which launchers end healthy processes
    ],
)
def test_a_killed_tuning_goes_on_where_it_was(
    tmp_path: Path,
    arguments: tuple[int, ...],
    codes: list[int],
    winners: list[str],
    runs_again: bool,
):
    """And leaves nothing behind at its end but the quarantine."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = [
        run_python("-m", __name__, tmp_path, *map(str, map(int, arguments)), cwd=tmp_path, env=env)
        for _ in codes
    ]
    assert [each.returncode for each in done] == codes, done[-1].stderr
    winner, has_run = done[-1].stdout.split()
    assert (winner in winners, has_run) == (True, str(runs_again))
    if arguments[1] > 1:
        assert (
            "candidates are taken from an earlier attempt's journal"
            in (tmp_path / "logs" / "rank-0.log").read_text()
        )
    assert [
        each for each in (tmp_path / "cache").rglob("*.json*") if "quarantine" not in each.parts
    ] == []


def test_a_finished_tuning_begins_anew_though_the_factory_keeps_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its record is found under the name it had at the beginning, and deleted; that of a single
    problem as well.
    """
    monkeypatch.setenv(
        "DIST_TUNE_CACHE_PATH", os.pathsep.join(str(tmp_path / each) for each in ("cache", "team"))
    )
    made: list[int] = []

    def make(config: Config) -> Any:
        made.append(config["i"])
        return (lambda: None), None

    for n_made in (12, 24):
        tune_and_save_configs([1], lambda size: make, SPACE, "k.json", tmp_path, num_iters=1)
        tune_kernel(SPACE, make, num_iters=1)
        assert len(made) == n_made
        assert not list((tmp_path / "cache").rglob("*.json*"))


def test_a_problem_that_was_done_is_not_tuned_again(tmp_path: Path):
    """The job was interrupted in its second problem; other code or values that the factory sees, as
    a size, make it another problem.
    """
    args, made = SimpleNamespace(size=1), list[int]()

    def make(config: Config) -> Any:
        made.append(config["i"])
        return (lambda: args.size), None

    def ends(config: Config) -> Any:
        raise KeyboardInterrupt

    def n_made() -> int:
        made.clear()
        with pytest.raises(KeyboardInterrupt):
            tune_and_save_configs(
                [1, 2], lambda size: [make, ends][size - 1], SPACE, "k.json", tmp_path, num_iters=1
            )
        return len(made)

    assert [n_made(), n_made()] == [6, 1]
    args.size = 4
    assert n_made() == 6


def tune_k(n_runs: int) -> None:
    """A tuning of one name with a tensor of its own, no plain value; ends after so many runs, or by
    itself if that is negative.
    """
    ExactTime.keep()
    left = torch.tensor(n_runs)

    def run() -> None:
        left.sub_(1)
        ExactTime.pass_ms(1.0)
        if left == 0:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        tune_kernel(SPACE, lambda config: (run, None), num_iters=3, name="k")


@pytest.mark.processes
@pytest.mark.parametrize("n_before", [0, 1])
def test_a_tuning_takes_no_times_of_another_one_of_its_name(tmp_path: Path, n_before: int):
    """Of two sizes by one factory the second was cut off: in the next process the first is not that
    one; the second goes on.
    """
    for n_runs in ([-1, 40], [-1] * (n_before + 1)):
        program = f"from {__name__} import tune_k\nfor n in {n_runs}: tune_k(n)"
        done = run_python("-c", program, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
    goes_on = (
        "candidates are taken from an earlier attempt's journal"
        in (tmp_path / "logs" / "rank-0.log").read_text()
    )
    assert goes_on == (n_before == 1)


@pytest.mark.parametrize("limit", [0, 20, 300])
def test_a_full_disk_costs_the_file_alone(tmp_path: Path, limit: int):
    """Wherever in a line of the log, the journal or the file it comes: the error has the configs,
    and a tuning without files its result.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(OSError, match="File too large")
            if limit < 300
            else nullcontext() as told,
        ):
            assert tune_kernel(SPACE, lambda config: (lambda: None, None), num_iters=1) in SPACE
            tune_and_save_configs(
                [8, 5000],
                lambda size: lambda config: (lambda: None, None),
                SPACE,
                "k.json",
                tmp_path,
                num_iters=1,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if told is None:
        assert (tmp_path / "k.json").exists()
    else:
        assert 'k.json is not written: {"small": {"i": ' in told.value.__notes__[0]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    program(sys.argv[1], *map(int, sys.argv[2:]))
