"""Tuning scripts that are killed, stopped or started again: what was measured counts, and what ended a process does not run again."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dist_tune.measure import WallSpan
from dist_tune.offline import Outcome, Problem, tune_problems
from dist_tune.search.guided.strategies import grouped_order
from dist_tune.testing import ExactTime
from tests.programs import Done, run_python

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
SPACE = [{"i": i} for i in range(6)]
Config = dict[str, Any]


@pytest.fixture(autouse=True)
def _logs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "quiet")


LATE = grouped_order([{"i": i} for i in range(12)], 0)[-1]
"""The config that is tried last."""


def run_program(folder: Path, *arguments: int) -> Done:
    env = {
        **os.environ,
        "DIST_TUNE_VERBOSITY": "normal",
        "DIST_TUNE_LOG_DIR": str(folder / "logs"),
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
    }
    return run_python("-m", "tests.offline_programs", folder, *map(str, arguments), cwd=folder, env=env)


def ran(folder: Path) -> dict[int, int]:
    return {i: path.stat().st_size if (path := folder / f"run-{i}").exists() else 0 for i in range(12)}


@pytest.mark.processes
def test_a_killed_tuning_goes_on_where_it_was(tmp_path: Path):
    """What was measured before is not run again, but for the best; the config that was under way gets another chance."""
    assert run_program(tmp_path, LATE, 1).returncode == -9
    before = ran(tmp_path)
    done = run_program(tmp_path, LATE, 1)
    assert (done.returncode, done.stdout.strip()) == (0, "7"), done.stderr
    assert "configs tried before" in done.stderr
    after = ran(tmp_path)
    assert any(0 < before[i] == after[i] for i in range(12))
    assert after[LATE] > before[LATE]
    assert not list((tmp_path / "logs" / "journal").glob("*.jsonl"))


@pytest.mark.processes
def test_a_config_that_ends_the_process_is_quarantined(tmp_path: Path):
    """Twice: among others, then alone. The third process goes on without it."""
    codes = [run_program(tmp_path, 7, 99).returncode for _ in range(2)]
    assert codes == [-9, -9]
    done = run_program(tmp_path, 7, 99)
    assert (done.returncode, done.stdout.strip() in ("6", "8")) == (0, True), done.stderr
    assert (tmp_path / "died").stat().st_size == 2
    assert "the process ended 2 times while this config ran" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_a_finished_tuning_begins_anew_though_the_factory_keeps_what_it_made(tmp_path: Path):
    """Its journal is found under the name it had at the beginning, and deleted."""
    kept: list[int] = []

    def make(config: Config) -> Any:
        kept.append(config["i"])
        return (lambda: None), None

    for _ in range(2):
        before = len(kept)
        (outcome,) = tune_problems([Problem("p", SPACE, make)], num_iters=1)
        assert isinstance(outcome, Outcome)
        assert outcome.n_resumed == 0
        assert len(kept) > before
        assert not list((tmp_path / "logs" / "journal").iterdir())


def test_what_was_measured_for_other_values_is_not_gone_on_from(monkeypatch: pytest.MonkeyPatch):
    """A size in an attribute of something captured: interrupted at one size, and started again with another."""
    monkeypatch.setattr(WallSpan, "now", ExactTime.now)
    args = SimpleNamespace(size=1)
    n_runs = 0

    def make(config: Config) -> Any:
        def run() -> None:
            nonlocal n_runs
            n_runs += 1
            if n_runs == 40:
                raise KeyboardInterrupt
            ExactTime.pass_ms(1 + abs(config["i"] - args.size))

        return run, None

    with pytest.raises(KeyboardInterrupt):
        tune_problems([Problem("p", SPACE, make)], num_iters=5)
    args.size = 4
    (outcome,) = tune_problems([Problem("p", SPACE, make)], num_iters=2)
    assert isinstance(outcome, Outcome)
    assert (outcome.n_resumed, outcome.winner) == (0, 4)


@pytest.mark.processes
def test_an_interrupted_script_casts_no_suspicion(tmp_path: Path):
    """SIGTERM, by which launchers end healthy processes, twice; then it runs to its end with all configs."""
    for _ in range(2):
        assert run_program(tmp_path, 100 + LATE, 2).returncode == 143
    done = run_program(tmp_path, 100 + LATE, 2)
    assert (done.returncode, done.stdout.strip()) == (0, "7"), done.stderr
    assert "the process ended" not in (tmp_path / "logs" / "rank-0.log").read_text()
