"""Tuning scripts: one kernel, several sizes. Runs tell an exact clock their time, so that it is known which config is fastest."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from dist_tune import NoValidConfigError
from dist_tune.measure import WallSpan
from dist_tune.offline import (
    Outcome,
    Problem,
    get_search_space,
    load_config,
    m_leq,
    tune_and_save_configs,
    tune_kernel,
    tune_problems,
)
from dist_tune.testing import ExactTime

pytestmark = [pytest.mark.once, pytest.mark.processes]

SPACE = [{"i": i} for i in range(6)]
Config = dict[str, Any]


@pytest.fixture(autouse=True)
def _logs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "quiet")
    monkeypatch.setattr(WallSpan, "now", ExactTime.now)


def sleeping(ms_of: Callable[[Config], float], result: Callable[[Config], Any] = lambda config: torch.ones(4)) -> Any:
    """A factory whose runs take so long and return that; right is a tensor of ones."""

    def make(config: Config) -> Any:
        def run() -> Any:
            ExactTime.pass_ms(ms_of(config))
            return result(config)

        return run, torch.ones(4)

    return make


def test_each_config_is_made_once_and_amd_keys_do_not_multiply_the_search():
    """On NVIDIA configs that differ in AMD's keys alone are one, and run without them."""
    made: Counter[str] = Counter()

    def make(config: Config) -> Any:
        made[json.dumps(config)] += 1
        return (lambda: ExactTime.pass_ms(config["num_warps"])), None

    best = tune_kernel(get_search_space(small=True) * 2 + [{**get_search_space(small=True)[0], "waves_per_eu": 8}], make, num_iters=1)
    assert set(made.values()) == {1}
    assert len(made) == 8
    assert not any("waves" in config or "nonkdim" in config for config in made)
    assert best in get_search_space(small=True)


def test_every_dropped_config_has_its_reason_in_the_log(tmp_path: Path):
    """Made wrongly, raised, NaN, wrong, not written: none of them ends the tuning or wins."""
    stale = torch.ones(4)

    def make(config: Config) -> Any:
        if config["i"] == 0:
            raise ValueError("no such tile")
        results: list[Any] = [None, None, torch.full((4,), float("nan")), torch.zeros(4), stale, torch.ones(4)]

        def run() -> Any:
            if config["i"] == 1:
                raise MemoryError("too large")
            ExactTime.pass_ms(config["i"] == 5)
            return stale if config["i"] == 4 else results[config["i"]].clone()

        return run, torch.ones(4)

    assert tune_kernel(SPACE, make, num_iters=1) == {"i": 5}
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    for reason in ("ValueError: no such tile", "MemoryError: too large", "are NaN", "wrong by 1", "not written: they are what was there"):
        assert reason in log


def test_nothing_that_runs_is_an_error_with_the_reasons():
    """Also where it is the very first run that shows it."""
    with pytest.raises(NoValidConfigError, match=r"(?s)none of its 6 configs.*wrong by 1"):
        tune_kernel(SPACE, sleeping(lambda config: 0, lambda config: torch.zeros(4)), num_iters=1)

    def make(config: Config) -> Any:
        raise TypeError("unexpected keyword 'dtyp'")

    with pytest.raises(NoValidConfigError, match="unexpected keyword 'dtyp'") as caught:
        tune_kernel(SPACE, make, num_iters=1)
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_device_that_is_lost_in_a_check_ends_the_tuning(tmp_path: Path):
    """It is no verdict on the config at hand, nor on those after it, which would all fail; what was under way stays suspected."""
    n_runs = 0

    def make(config: Config) -> Any:
        def run() -> torch.Tensor:
            nonlocal n_runs
            n_runs += 1
            if n_runs == 6:  # four dry runs, the run that is checked, and its repetition
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return torch.ones(4)

        return run, torch.ones(4)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        tune_kernel(SPACE, make, num_iters=1)
    assert list((tmp_path / "cache" / "journals").glob("*.jsonl"))


def test_tolerances_and_tuples():
    """An error of 0.05 is within an atol of 0.1, also inside a tuple, and beyond 0.01."""
    eights = torch.ones(2).to(torch.float8_e4m3fn)

    def make(config: Config) -> Any:
        return (lambda: (torch.ones(4) + 0.05 * config["i"], eights.clone())), (torch.ones(4), eights.clone())

    assert tune_kernel([{"i": 1}], make, num_iters=1, atol=0.1) == {"i": 1}
    with pytest.raises(NoValidConfigError, match=r"wrong by 0\.05"):
        tune_kernel([{"i": 1}], make, num_iters=1, atol=0.01, rtol=0.01)


def test_the_callback_changes_what_runs_and_what_is_returned():
    """Once a config, on a copy: the space stays as it is."""
    space = [{"i": 1}, {"i": 2}]
    seen = []

    def make(config: Config) -> Any:
        seen.append(dict(config))
        return (lambda: ExactTime.pass_ms(config["double"])), None

    def callback(config: Config) -> None:
        config["double"] = 2 * config["i"]

    assert tune_kernel(space, make, callback, num_iters=1) == {"i": 1, "double": 2}
    assert sorted(seen, key=str) == [{"i": 1, "double": 2}, {"i": 2, "double": 4}]
    assert space == [{"i": 1}, {"i": 2}]


@pytest.mark.parametrize("search", ["racing", "exhaustive", "random", "guided"])
def test_each_strategy_finds_the_best_of_a_small_space(search: Any):
    assert tune_kernel(SPACE, sleeping(lambda config: 1 + 8 * abs(config["i"] - 3)), num_iters=2, search=search) == {"i": 3}


def test_max_configs_and_budget_end_the_search():
    """Few are tried; what was tried decides."""
    made = []

    def make(config: Config) -> Any:
        made.append(config["i"])
        return (lambda: time.sleep(0.002)), None

    space = [{"i": i} for i in range(400)]
    tune_kernel(space, make, num_iters=1, max_configs=5)
    assert len(set(made)) == 5
    made.clear()
    began = time.monotonic()
    tune_kernel(space, make, num_iters=1, budget_s=0.5)
    assert time.monotonic() - began < 10
    assert 2 <= len(set(made)) < 300  # one round at least


@pytest.mark.parametrize(
    ("space", "how", "error", "words"),
    [
        ([], {}, ValueError, "empty"),
        ([1], {}, TypeError, "dicts"),
        (SPACE, {"num_iters": 0}, ValueError, "num_iters"),
        (SPACE, {"search": "magic"}, ValueError, "magic"),
        (SPACE, {"budget_s": 0}, ValueError, "budget_s"),
        (SPACE, {"max_configs": 0}, ValueError, "max_configs"),
    ],
)
def test_mistakes_of_the_caller_are_told(space: Any, how: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        tune_kernel(space, sleeping(lambda config: 0), **how)


def test_sizes_of_one_class_get_the_config_that_loses_least_over_them(tmp_path: Path):
    """Best at each size is another one; the third is second at both, and the last size does not decide alone."""
    ms = {64: [6, 36, 9], 128: [36, 6, 9], 512: [30, 30, 6]}

    def make_for_size(size: int) -> Any:
        return sleeping(lambda config: ms[size][config["i"]])

    saved = tune_and_save_configs([64, 128, 512], make_for_size, SPACE[:3], "k.json", tmp_path / "configs", num_iters=5)
    assert saved == {"small": {"i": 2}, "medium": {"i": 2}}
    assert load_config(tmp_path / "configs" / "k.json", 100) == {"i": 2}
    # Classes that are there stay, and another layout goes into a file of its own.
    tune_and_save_configs(
        [4096], lambda size: sleeping(lambda config: 1 + 20 * config["i"]), SPACE[:2], "k.json", tmp_path / "configs", num_iters=1
    )
    assert json.loads((tmp_path / "configs" / "k.json").read_text()) == {"small": {"i": 2}, "medium": {"i": 2}, "large": {"i": 0}}
    by_limit = tune_and_save_configs([16, 4096], make_for_any, SPACE[:2], "l.json", tmp_path, classes=m_leq(64), num_iters=1)
    assert by_limit == {"M_LEQ_64": {"i": 1}, "any": {"i": 0}}


def make_for_any(size: int) -> Any:
    """Many rows are fastest with config 0, few with config 1."""
    return sleeping(lambda config: 1 + 20 * (config["i"] if size > 100 else 1 - config["i"]))


@pytest.mark.parametrize(("old_ms", "is_replaced"), [(24.0, True), (12.0, False)])
def test_an_older_config_is_replaced_only_if_it_is_clearly_slower(tmp_path: Path, old_ms: float, is_replaced: bool):
    """With min_gain both run in the same replays."""
    (tmp_path / "k.json").write_text('{"small": {"i": 77}, "large": {"i": 1}}')
    make = sleeping(lambda config: old_ms if config["i"] == 77 else 12.0 + 6 * config["i"])
    tune_and_save_configs([64], lambda size: make, SPACE[:2], "k.json", tmp_path, num_iters=5, min_gain=0.3)
    assert json.loads((tmp_path / "k.json").read_text()) == {"small": {"i": 0 if is_replaced else 77}, "large": {"i": 1}}


def test_what_cannot_be_tuned_does_not_lose_the_rest(tmp_path: Path):
    """A size at which nothing runs, and a class that no config serves: the rest is in the file, and the error names them."""

    def make_for_size(size: int) -> Any:
        right_ones = {32: [0], 64: [1], 512: [0, 1], 4096: []}[size]
        return sleeping(lambda config: 1, lambda config: torch.ones(4) * (1 if config["i"] in right_ones else 2))

    with pytest.raises(RuntimeError, match=r"(?s)M=4096.*NoValidConfigError.*k\.json small: no config runs at all of the sizes \[32, 64\]"):
        tune_and_save_configs([32, 64, 512, 4096], make_for_size, SPACE[:2], "k.json", tmp_path, num_iters=1)
    assert list(json.loads((tmp_path / "k.json").read_text())) == ["medium"]


def test_problems_come_back_in_order_with_what_was_measured():
    problems = [Problem(f"p{n}", SPACE, sleeping(lambda config, n=n: 1 + 8 * abs(config["i"] - n))) for n in (4, 1)]  # type: ignore[misc]
    first, second = tune_problems(problems, num_iters=5)
    assert isinstance(first, Outcome)
    assert isinstance(second, Outcome)
    assert (first.winner, second.winner) == (4, 1)
    assert first.latencies_us.keys() == set(range(6))
    assert 900 < first.latency_us < 20_000  # a sleep of 1 ms, in us


def test_memory_that_our_own_runs_hold_is_no_reason_to_drop_a_config():
    """Two inputs fit at a time: others are let go, and each config is tried."""
    alive: WeakSet[torch.Tensor] = WeakSet()

    def make(config: Config) -> Any:
        if len(alive) >= 2:
            raise torch.OutOfMemoryError("out of memory")
        x = torch.ones(4)
        alive.add(x)

        def run() -> torch.Tensor:
            ExactTime.pass_ms(20 * config["i"])
            return x + 0

        return run, torch.ones(4)

    (outcome,) = tune_problems([Problem("p", SPACE, make)], num_iters=3)
    assert isinstance(outcome, Outcome)
    assert (outcome.failures, outcome.winner) == ({}, 0)
