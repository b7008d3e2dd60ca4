"""Guided search of large spaces through both decorators: real compilation, a fake device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton

from dist_tune import NoValidConfigError, autotune, contextual_autotune
from dist_tune.search import NOT_TRIED
from dist_tune.search.guided import ConfigSpace
from dist_tune.testing import values
from tests.ranks.guided import BEST, SPACE, padded, sleep_steps
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = [pytest.mark.once, pytest.mark.processes]

N_AT_MOST = 91
"""Of 200 candidates, 16 and three eighths."""


def _compiled() -> list[Any]:
    """From here on, the kernels that this rank compiles."""
    found: list[Any] = []

    def listener(*, src: Any, cache_hit: bool, **facts: Any) -> None:
        if not cache_hit:
            found.append((sorted(map(str, src.constants.items())), facts["metadata"]["num_warps"]))

    triton.knobs.compilation.listener = listener
    return found


def _tuned(rank: int, options: dict[str, Any]) -> Any:
    compiled = _compiled()
    kernel, step = padded(is_dist=True, **options)
    step()
    (record,) = step.records
    (config,) = kernel.cache.values()
    (timings,) = [kernel.configs_timings]
    untried = [each.index for each in record.candidates if each.left == NOT_TRIED]
    without_time = [i for i, each in enumerate(SPACE) if timings[each][0] == float("inf")]
    resources = [each.index for each in record.candidates if each.shared_bytes is not None]
    return len(compiled), config.all_kwargs(), untried, without_time, resources, [each.latency_ms for each in record.candidates]


def test_two_ranks_try_the_same_part_of_a_large_space_and_find_the_best():
    """200 configs: at most 91 are compiled, once on both ranks together; the rest has no time."""
    got = values(on_ranks(2, _tuned, {"search": "guided"}, mode="fake", timeout_s=180.0, env={"TRITON_DEFAULT_FP_FUSION": "1"}))
    (_, config, untried, without_time, resources, _) = got[0]
    assert [each[1:] for each in got] == [got[0][1:]] * 2
    assert {name: config[name] for name in BEST} == BEST
    assert 200 - len(untried) <= N_AT_MOST
    assert set(untried) == set(without_time)
    assert set(resources) == set(range(200)) - set(untried)
    assert sum(each[0] for each in got) <= N_AT_MOST + 1  # both may compile the one that they launch first


def _beside_another(rank: int) -> Any:
    kernel, _ = padded()
    small = autotuned(blocks=(64, 128))
    x, y = torch.zeros(256), torch.zeros(256)

    @contextual_autotune(search="guided", n_warmup=1, n_repeat=3)
    def step() -> None:
        kernel[(1,)](x, y, 256)
        launch(small, x)

    step()
    config, lefts = kernel.best_config.all_kwargs(), [[each.left for each in record.candidates] for record in step.records]
    return {name: config[name] for name in BEST}, sorted(len(each) for each in lefts), sorted(each.count(NOT_TRIED) > 0 for each in lefts)


def test_a_large_site_is_searched_beside_a_small_one():
    """The small one has all its candidates raced; the log tells of each wave."""
    (outcome,) = on_ranks(1, _beside_another, mode="fake", is_dist=False, timeout_s=180.0, env={"TRITON_DEFAULT_FP_FUSION": "1"})
    assert values([outcome]) == [(BEST, [2, 200], [False, True])]
    assert re.search(r"site \d tries \d+ more of 200 candidates, \d+ are untried", outcome.log)
    assert re.search(r"\d+ tried: .* 1\d\d untried", outcome.log)


def _limited(rank: int) -> Any:
    kernel, step = padded(is_dist=True, search="guided", budget_s=0.5)
    step()
    (record,) = step.records
    return kernel.best_config.all_kwargs(), sum(each.left == NOT_TRIED for each in record.candidates), record.best.latency_ms


def test_a_budget_ends_the_search_with_what_it_knows():
    """Compiling the spread takes longer than the budget: its best wins on both ranks, and the rest is not tried."""
    got = values(on_ranks(2, _limited, mode="fake", timeout_s=180.0, env={"TRITON_DEFAULT_FP_FUSION": "1"}))
    assert got[0] == got[1]
    (_, n_untried, latency_ms) = got[0]
    assert n_untried >= 200 - N_AT_MOST
    assert latency_ms is not None


def _function(rank: int, search: Any, running: list[int] | None = None) -> Any:
    ran: list[int] = []
    space = [{"depth": depth, "width": width} for depth in range(10) for width in range(8)]

    @autotune(space, None, n_warmup=1, n_repeat=2, search=search, cache=False)
    def step(x: torch.Tensor, depth: int, width: int) -> torch.Tensor:
        ran.append(depth * 8 + width)
        if running is not None and depth * 8 + width not in running:
            raise RuntimeError("does not run")
        sleep_steps(abs(depth - 6) + abs(width - 5))
        return x

    try:
        step(torch.zeros(4))
    except NoValidConfigError as error:
        return str(error)
    record = step.records[0]
    return record.best.config, len(set(ran)), [each.left for each in record.candidates].count(NOT_TRIED)


def test_a_function_runs_a_part_of_its_configs():
    """80 configs, two ranks: each config that is not tried saves its run; with search="racing" each one runs."""
    for best, n_ran, n_untried in values(on_ranks(2, _function, None)):
        assert (best, n_ran + n_untried) == ("depth=6 width=5", 80)
        assert n_ran <= 46
    for best, n_ran, n_untried in values(on_ranks(2, _function, "racing")):
        assert (best, n_ran, n_untried) == ("depth=6 width=5", 80, 0)


def test_a_function_whose_spread_fails_is_searched_further():
    """One of 80 configs runs, and not one of the first 46 to be tried; and with none left, the error names what failed."""
    texts = [f"depth={depth} width={width}" for depth in range(10) for width in range(8)]
    last = ConfigSpace(texts).spread(80)[-1]
    ((best, n_ran, _),) = values(on_ranks(1, _function, "guided", [last], is_dist=False))
    assert best == texts[last]
    assert n_ran > 46
    (message,) = values(on_ranks(1, _function, "guided", [], is_dist=False))
    assert "none of its 80 configs runs" in message
