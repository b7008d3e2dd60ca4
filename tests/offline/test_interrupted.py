"""Tuning scripts that are killed, stopped or started again: what was measured counts, and what ended a process does not run again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dist_tune.measure import WallSpan
from dist_tune.offline import Outcome, Problem, tune_kernel, tune_problems
from dist_tune.testing import ExactTime
from tests.programs import Done, run_python

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
SPACE = [{"i": i} for i in range(6)]
Config = dict[str, Any]


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "quiet")


def run_program(folder: Path, *arguments: int) -> Done:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    return run_python("-m", "tests.offline_programs", folder, *map(str, arguments), cwd=folder, env=env)


def kept(folder: Path) -> list[Path]:
    """Records and journals."""
    return [each for each in (folder / "cache").rglob("*.json*") if "quarantine" not in each.parts]


@pytest.mark.processes
def test_a_killed_tuning_goes_on_where_it_was(tmp_path: Path):
    """Killed after a first round: its times count, and the config that was under way gets another chance."""
    assert run_program(tmp_path, 7, 6, 1, signal.SIGKILL).returncode == -9
    assert kept(tmp_path)
    done = run_program(tmp_path, 7, 6, 1, signal.SIGKILL)
    assert done.returncode == 0, done.stderr
    winner, _, *failures = map(int, done.stdout.split())
    assert (winner, failures) == (7, [])
    assert "candidates are taken from an earlier attempt's journal" in (tmp_path / "logs" / "rank-0.log").read_text()
    assert not kept(tmp_path)


@pytest.mark.processes
def test_a_config_that_ends_the_process_twice_is_left_out(tmp_path: Path):
    """The third process goes on without it."""
    assert [run_program(tmp_path, 7, 1, 99, signal.SIGKILL).returncode for _ in range(2)] == [-9, -9]
    done = run_program(tmp_path, 7, 1, 99, signal.SIGKILL)
    assert (done.returncode, done.stdout.split()[0] in ("6", "8")) == (0, True), done.stderr
    assert done.stdout.split()[2:] == ["7"]
    assert (tmp_path / "died").stat().st_size == 2


@pytest.mark.processes
def test_an_interrupted_script_casts_no_suspicion(tmp_path: Path):
    """SIGTERM, by which launchers end healthy processes, twice; then it runs to its end with all configs."""
    assert [run_program(tmp_path, 3, 1, 2, signal.SIGTERM).returncode for _ in range(2)] == [143, 143]
    done = run_program(tmp_path, 3, 1, 2, signal.SIGTERM)
    assert (done.returncode, done.stdout.split()[0], done.stdout.split()[2:]) == (0, "7", []), done.stderr


@pytest.mark.parametrize("folders", [["cache"], ["cache", "team"]])
def test_a_finished_tuning_begins_anew_though_the_factory_keeps_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: list[str]
):
    """Its record is found under the name it had at the beginning, and deleted; that of a single problem as well."""
    monkeypatch.setenv("DIST_TUNE_CACHE_PATH", os.pathsep.join(str(tmp_path / each) for each in folders))
    made: list[int] = []

    def make(config: Config) -> Any:
        made.append(config["i"])
        return (lambda: None), None

    for _ in range(2):
        before = len(made)
        (outcome,) = tune_problems([Problem("p", SPACE, make)], num_iters=1)
        assert isinstance(outcome, Outcome)
        assert (outcome.n_resumed, len(made) > before) == (0, True)
        tune_kernel(SPACE, make, num_iters=1)
        assert not kept(tmp_path)


def test_a_problem_that_was_done_is_not_tuned_again(tmp_path: Path):
    """The job was interrupted in its second problem; other code or values that the factory sees, as a size, make it another problem."""
    args, made = SimpleNamespace(size=1), list[int]()

    def make(config: Config) -> Any:
        made.append(config["i"])
        return (lambda: args.size), None

    def ends(config: Config) -> Any:
        raise KeyboardInterrupt

    def n_made() -> int:
        made.clear()
        with pytest.raises(KeyboardInterrupt):
            tune_problems([Problem("first", SPACE, make), Problem("second", SPACE, ends)], num_iters=1)
        return len(made)

    assert [n_made(), n_made()] == [6, 1]
    args.size = 4
    assert n_made() == 6


def test_a_config_that_is_right_at_first_and_wrong_later_does_not_win(monkeypatch: pytest.MonkeyPatch):
    """The winner is checked once more before it is kept; then the next one is, which is right."""
    monkeypatch.setattr(WallSpan, "now", ExactTime.now)
    n_runs = dict.fromkeys(range(6), 0)

    def make(config: Config) -> Any:
        i = config["i"]

        def run() -> int:
            n_runs[i] += 1
            ExactTime.pass_ms(20 + i)
            return 2 if i < 2 and n_runs[i] > 8 else 1

        return run, 1

    (outcome,) = tune_problems([Problem("p", SPACE, make)], num_iters=10)
    assert isinstance(outcome, Outcome)
    assert (outcome.winner, "the result is wrong" in outcome.failures[0]) == (2, True)
