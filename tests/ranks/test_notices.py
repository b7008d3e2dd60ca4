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
import torch.distributed as dist

from dist_tune import autotune
from tests.steps import BLOCKS, autotuned, launch, tuned
from tests.worlds import log, on_each_rank

QUICK: Any = {"n_warmup": 0, "n_repeat": 1}


def shown(work: Callable[[], Any]) -> list[str]:
    """Lines on the terminal that neither begin nor end a tuning; each rank but the first shows none."""
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        work()
    lines = [line.removeprefix("dist_tune: ") for line in terminal.getvalue().splitlines() if line.startswith("dist_tune: ")]
    lines = [line for line in lines if not line.startswith("tuning ") and ", tuned " not in line]
    if dist.is_initialized() and dist.get_rank() > 0:
        assert lines == []
    return lines


def on_first(lines: list[str]) -> list[str]:
    """What only the first rank has shown, for all of them."""
    shared = [lines]
    dist.broadcast_object_list(shared)
    return shared[0]


@on_each_rank()
def test_prune_rules_say_how_many_they_removed(rank: int):
    """By the first rank, once for each site, by a name for people; repeated configs are not counted."""
    kept = {"early_config_prune": lambda configs, named, **kw: [config for config in configs if config.kwargs["BLOCK"] > 16]}
    step = tuned(autotuned(blocks=(16, 16, 32, 64), prune_configs_by=kept))
    rule: Any = lambda config, x: np.bool_(config["block"] > 1)  # noqa: E731
    function: Any = autotune(BLOCKS, lambda x: x, rule, **QUICK)(lambda x, block=0: x)
    lines = shown(lambda: [(step(torch.zeros(64)), function(3)) for _ in range(2)])
    told = ["prune rules removed 1 of 3 configs of add_kernel [64]", "prune rules removed 1 of 3 configs of <lambda> [3]"]
    assert on_first(lines) == told


WRONG: dict[str, Any] = {"[]": [], "[{'block': 1}]": [{"block": 1}], "'yes'": "yes", "2": 2, "{}": {}}
"""What stands in the error -> what a rule returned."""


@on_each_rank()
def test_prune_fn_must_return_a_bool(rank: int):
    """A list, as Triton's early_config_prune returns it, was True; an error on all ranks that names it. Other kinds of bool are bools."""

    def call(verdict: Any) -> Any:
        function: Any = autotune(BLOCKS, lambda x: x, lambda config, x: verdict, **QUICK)(lambda x, block=0: x)
        return function(3)

    for text, verdict in WRONG.items():
        with pytest.raises(TypeError) as raised:
            call(verdict)
        assert str(raised.value).startswith(f"prune_fn of tests.ranks.test_notices.<lambda> returned {text}: it is asked of each config")
    assert [call(each) for each in (True, np.bool_(True), 1, torch.tensor(True))] == [3] * 4


@on_each_rank()
def test_a_closure_that_launches_nothing_tunable_says_so(rank: int):
    """Once for each closure; a kernel with one config is not tunable."""

    def work() -> None:
        step = tuned(None, lambda x: len(x))
        for n in (1, 2, 2):
            step(torch.zeros(n))
        tuned(autotuned(blocks=(32,)))(torch.zeros(64))
        tuned(autotuned())(torch.zeros(64))

    told = on_first(shown(work))
    assert [line.partition(": ")[0].rpartition(".")[2] for line in told] == ["<lambda>"] * 2
    assert all(": nothing tunable was launched in this call" in line for line in told)


@on_each_rank()
def test_ranks_that_choose_alone_beside_others_say_so(rank: int):
    """Once for a closure without is_dist."""

    def work() -> None:
        for is_dist in (False, True):
            step = tuned(autotuned(), is_dist=is_dist, cache=False)
            for n in (64, 32):
                step(torch.zeros(n))

    (line,) = on_first(shown(work))
    assert "each rank chooses alone; ranks may disagree: a process group of 2 ranks is initialised and is_dist was not given" in line


@on_each_rank(1)
def test_one_rank_of_a_group_is_not_told_that_it_chooses_alone(rank: int):
    assert shown(lambda: tuned(autotuned(), is_dist=False)(torch.zeros(64))) == []


@on_each_rank()
def test_a_miss_names_its_nearest_reason(rank: int):
    """Not of the first tuning of all, which has nothing to be near to, and not of a new shape, which is as it should be."""
    jobs = (((16, 32), 64), ((16, 64), 64), ((16, 64), 64), ((16, 64), 48))
    (told,) = on_first(shown(lambda: [tuned(autotuned(blocks=blocks))(torch.zeros(n)) for blocks, n in jobs]))
    assert "is tuned: The nearest record of tests.steps.add_kernel" in told
    assert "candidates: the list of configs" in told


@on_each_rank()
def test_a_value_that_has_not_run_is_told(rank: int):
    """A generator, a coroutine or a context manager of a function that looks ordinary."""

    def numbers(x: torch.Tensor) -> Any:
        yield x

    async def later(x: torch.Tensor) -> Any:
        return x

    def work() -> None:
        step = tuned(None, lambda x: numbers(x))
        for n in (64, 32):
            next(step(torch.zeros(n)))
        tuned(None, lambda x: later(x))(torch.zeros(8)).close()
        tuned(None, lambda x: contextlib.contextmanager(numbers)(x))(torch.zeros(8))

    ends = "which has not run when it returns: nothing of it is tuned. Put what launches the kernels into a function of its own, decorate"
    told = [line.partition(" returned ")[2] for line in on_first(shown(work))]
    kinds = ("generator", "coroutine", "context manager")
    assert told == [f"a {kind}, {ends} that one, and call it within the {kind}" for kind in kinds]


@on_each_rank()
def test_a_kernel_with_one_config_left_is_no_kernel_that_was_launched_once(rank: int):
    """There was nothing to compare: no warning says that replays did not launch it."""
    one_left = {"perf_model": lambda BLOCK, **named: BLOCK, "top_k": 1}
    tuner, beside = autotuned(prune_configs_by=one_left), autotuned(blocks=(16, 32))
    steps = [tuned(tuner), tuned(None, lambda x: launch(beside, launch(tuner, x)))]
    shown(lambda: [step(torch.zeros(64 * n)) for n, step in enumerate(steps, 1)])
    assert [line for line in log().splitlines() if "is not tuned" in line or "WARNING" in line] == []


DIFFER = "settings differ between ranks: DIST_TUNE_DEADLINE_S is 3 on rank 0, "
SETTINGS: list[Any] = [
    ({"DEADLINE_S": "4", "ALWAYS_TUNE": "yes", "LOG_LEVEL": "INFO"}, "4 on rank 1; DIST_TUNE_ALWAYS_TUNE is 0 on rank 0, 1 on rank 1", ""),
    ({"DEADLINE_S": "", "ALWAYS_TUNE": "perhaps"}, "30 on rank 1", "DIST_TUNE_ALWAYS_TUNE='perhaps' cannot be read: need 1, 0, true"),
]  # fmt: skip


@on_each_rank(cases=SETTINGS)
def test_settings_that_differ_are_told_once(rank: int, case: Any):
    """By the first rank, with a rank of each value; folders may differ. A rank that cannot read one warns, and has the default."""
    of_rank_1, differing, unread = case
    if rank == 1:
        os.environ.update({f"DIST_TUNE_{name}": value for name, value in of_rank_1.items()})
    got: list[float] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        lines = shown(lambda: got.extend(tuned(autotuned(blocks=(16, 32)))(torch.zeros(64))[0].item() for _ in range(2)))
    assert got == [1.0, 1.0]
    assert [line for line in on_first(lines) if "settings" in line] == [f"{DIFFER}{differing}. Give all ranks the same environment"]
    told = [str(each.message) for each in warned if "DIST_TUNE" in str(each.message)]
    assert [message.startswith(f"rank 1: dist_tune: {unread}") for message in told] == [True] * (rank == 1 and bool(unread))
