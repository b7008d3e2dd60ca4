"""Lines on the first rank's terminal about a tuning in which nothing failed: one each, once."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import values
from tests.function_options import BLOCKS
from tests.ranks.kernels import autotuned, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

QUICK: Any = {"n_warmup": 0, "n_repeat": 1}
SHOWN = {"DIST_TUNE_VERBOSITY": "normal"}


def lines_of(work: Callable[[], Any]) -> list[str]:
    """Lines on the terminal that neither begin nor end a tuning."""
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        work()
    lines = [line.removeprefix("dist_tune: ") for line in terminal.getvalue().splitlines() if line.startswith("dist_tune: ")]
    return [line for line in lines if not line.startswith(("tuning ", "tuned ")) and " from the cache, tuned " not in line]


def _pruned(rank: int) -> Any:
    kept = {"early_config_prune": lambda configs, named, **kw: [config for config in configs if config.kwargs["BLOCK"] > 16]}
    step = tuned(autotuned(blocks=(16, 16, 32, 64), prune_configs_by=kept))
    rule: Any = lambda config, x: np.bool_(config["block"] > 1)  # noqa: E731
    function = autotune(BLOCKS, lambda x: x, rule, **QUICK)(lambda x, block=0: x)

    def work() -> None:
        for _ in range(2):
            step(torch.zeros(64))
            function(3)

    return lines_of(work)


def test_prune_rules_say_how_many_they_removed():
    """By the first rank, once for each site, by a name for people; repeated configs are not counted."""
    of_kernel = "prune rules removed 1 of 3 configs of add_kernel [64]"
    of_function = "prune rules removed 1 of 3 configs of <lambda> [3]"
    assert values(on_ranks(2, _pruned, env=SHOWN)) == [[of_kernel, of_function], []]


WRONG: dict[str, Any] = {"[]": [], "[{'block': 1}]": [{"block": 1}], "'yes'": "yes", "2": 2, "{}": {}}
"""What stands in the error -> what a rule returned."""


def _verdicts(rank: int) -> Any:
    def told(verdict: Any) -> Any:
        function = autotune(BLOCKS, lambda x: x, lambda config, x: verdict, **QUICK)(lambda x, block=0: x)
        try:
            return function(3)
        except TypeError as error:
            return str(error)

    return [told(each) for each in WRONG.values()], [told(each) for each in (True, np.bool_(True), 1, torch.tensor(True))]


def test_prune_fn_must_return_a_bool():
    """A list, as Triton's early_config_prune returns it, was True; an error on all ranks that names it. Other kinds of bool are bools."""
    for errors, right in values(on_ranks(2, _verdicts)):
        for message, text in zip(errors, WRONG, strict=True):
            assert message.startswith(f"prune_fn of tests.ranks.test_notices.<lambda> returned {text}: it is asked of each config")
        assert right == [3] * 4


def _nothing(rank: int) -> Any:
    def work() -> None:
        step = contextual_autotune(is_dist=True, **QUICK)(lambda x: len(x))
        for n in (1, 2, 2):
            step(torch.zeros(n))
        single = tuned(autotuned(blocks=(32,)))
        single(torch.zeros(64))
        tuned(autotuned())(torch.zeros(64))

    return lines_of(work)


def test_a_closure_that_launches_nothing_tunable_says_so():
    """Once for each closure; a kernel with one config is not tunable."""
    (told, other) = values(on_ranks(2, _nothing, env=SHOWN))
    begins = ["tests.ranks.test_notices._nothing.<locals>.work.<locals>.<lambda>", "tests.ranks.kernels.tuned.<locals>.<lambda>"]
    assert [line.partition(": ")[0] for line in told] == begins
    assert all(": nothing tunable was launched in this call" in line for line in told)
    assert other == []


def _alone(rank: int) -> Any:
    def work() -> None:
        for is_dist in (False, True):
            step = tuned(autotuned(), is_dist=is_dist, cache=False)
            for n in (64, 32):
                step(torch.zeros(n))

    return lines_of(work)


def test_ranks_that_choose_alone_beside_others_say_so():
    """Once for a closure without is_dist; not where there is one process."""
    (told, other) = values(on_ranks(2, _alone, env=SHOWN))
    (line,) = told
    assert "each rank chooses alone; ranks may disagree: a process group of 2 ranks is initialised and is_dist was not given" in line
    assert other == []
    assert values(on_ranks(1, _alone, env=SHOWN)) == [[]]


def _missed(rank: int) -> Any:
    def work() -> None:
        for blocks, n in (((16, 32), 64), ((16, 64), 64), ((16, 64), 64), ((16, 64), 48)):
            tuned(autotuned(blocks=blocks))(torch.zeros(n))

    return lines_of(work)


def test_a_miss_names_its_nearest_reason():
    """Not of the first tuning of all, which has nothing to be near to, and not of a new shape, which is as it should be."""
    (told, other) = values(on_ranks(2, _missed, env=SHOWN))
    assert ["candidates: the list of configs" in line for line in told] == [True]
    assert "is tuned: The nearest record of tests.ranks.kernels.add_kernel" in told[0]
    assert other == []


def _deferred(rank: int) -> Any:
    def work() -> None:
        def numbers(x: torch.Tensor) -> Any:
            yield x

        step = tuned(None, lambda x: numbers(x))
        for n in (64, 32):
            next(step(torch.zeros(n)))

        async def later(x: torch.Tensor) -> Any:
            return x

        tuned(None, lambda x: later(x))(torch.zeros(8)).close()
        tuned(None, lambda x: contextlib.contextmanager(numbers)(x))(torch.zeros(8))

    return [line.partition(" returned ")[2] for line in lines_of(work)]


def test_a_value_that_has_not_run_is_told():
    """A generator, a coroutine or a context manager of a function that looks ordinary."""
    ends = "which has not run when it returns: nothing of it is tuned. Decorate what runs it"
    told = [f"a {kind}, {ends}" for kind in ("generator", "coroutine", "context manager")]
    assert values(on_ranks(2, _deferred, env=SHOWN)) == [told, []]


def _one_left(rank: int) -> Any:
    one_left = {"perf_model": lambda BLOCK, **named: BLOCK, "top_k": 1}
    tuner, beside = autotuned(prune_configs_by=one_left), autotuned(blocks=(16, 32))
    steps = [tuned(tuner), tuned(None, lambda x: launch(beside, launch(tuner, x)))]
    tuner.cache.clear()
    return lines_of(lambda: [step(torch.zeros(64 * n)) for n, step in enumerate(steps, 1)])


def test_a_kernel_with_one_config_left_is_no_kernel_that_was_launched_once():
    """There was nothing to compare: no warning says that replays did not launch it."""
    outcomes = on_ranks(2, _one_left, env=SHOWN)
    assert values(outcomes)[1] == []
    assert not [line for each in outcomes for line in each.log.splitlines() if "is not tuned" in line or "WARNING" in line]


def _told(rank: int, of_rank_1: dict[str, str]) -> Any:
    if rank == 1:
        os.environ.update(of_rank_1)
    with contextlib.redirect_stderr(io.StringIO()) as terminal, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        kernels = [autotuned(blocks=(16, 32)), autotuned(blocks=(16, 32))]
        got = [tuned(None, lambda x, kernel=kernel: launch(kernel, x))(torch.zeros(64))[0].item() for kernel in kernels]
    lines = [line for line in terminal.getvalue().splitlines() if "settings differ" in line]
    return got, lines, [str(each.message) for each in warned if "DIST_TUNE" in str(each.message)]


def test_settings_that_differ_are_told_once():
    """By the first rank, with the values and a rank of each; folders may differ."""
    env = {"DIST_TUNE_DEADLINE_S": "4", "DIST_TUNE_ALWAYS_TUNE": "yes", "DIST_TUNE_LOG_LEVEL": "INFO"}
    got = values(on_ranks(2, _told, env, env={"DIST_TUNE_VERBOSITY": "normal"}))
    line = (
        "dist_tune: settings differ between ranks: DIST_TUNE_DEADLINE_S is 3 on rank 0, 4 on rank 1; DIST_TUNE_ALWAYS_TUNE is 0 on "
        "rank 0, 1 on rank 1. Give all ranks the same environment"
    )
    assert got == [([1.0, 1.0], [line], []), ([1.0, 1.0], [], [])]


def test_a_value_that_one_rank_cannot_read():
    """That rank warns once and takes the default, which all hear of; no rank ends."""
    got = values(
        on_ranks(2, _told, {"DIST_TUNE_ALWAYS_TUNE": "perhaps", "DIST_TUNE_DEADLINE_S": ""}, env={"DIST_TUNE_VERBOSITY": "normal"})
    )
    assert [each[0] for each in got] == [[1.0, 1.0]] * 2
    assert got[0][1] == [
        "dist_tune: settings differ between ranks: DIST_TUNE_DEADLINE_S is 3 on rank 0, 30 on rank 1. Give all ranks the same environment"
    ]
    (warning,) = got[1][2]
    assert warning == (
        "dist_tune: DIST_TUNE_ALWAYS_TUNE='perhaps' cannot be read: need 1, 0, true, false, yes, no, on or off. The default is used"
    )
