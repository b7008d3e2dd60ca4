"""What once broke: each of these was an attack that succeeded."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import CaptureError, NoValidConfigError, contextual_autotune
from dist_tune.testing import values
from tests.programs import run_python
from tests.ranks.kernels import autotuned, best, launch
from tests.ranks.world import ROOT
from tests.ranks.worlds import on_ranks

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _speaks_of_collectives(rank: int, text: str) -> Any:
    kernel = autotuned(blocks=(16, 32))
    runs = []

    @contextual_autotune(is_dist=True, **QUICK)
    def step(x: torch.Tensor) -> None:
        runs.append(1)
        y = launch(kernel, x)
        if rank == 1 and len(runs) == 3:
            raise RuntimeError(text)
        dist.all_reduce(y)

    step(torch.zeros(64))


@pytest.mark.once
@pytest.mark.parametrize("text", ["data loader timed out", "block size must be a multiple of the NCCL channel count"])
def test_a_users_error_that_speaks_of_collectives_is_still_the_cause(text: str):
    """Its rank raises it, and the other names that rank."""
    peer, culprit = on_ranks(2, _speaks_of_collectives, text)
    assert (culprit.error, culprit.message) == ("RuntimeError", text)
    assert peer.error == "PeerFailedError"
    assert f"rank 1 raised RuntimeError: {text}" in peer.message


def _first_met_in_the_final_run(rank: int) -> Any:
    always, late = autotuned(blocks=(16, 32)), autotuned(blocks=(32, 64))
    runs = []

    @contextual_autotune(is_dist=True, **QUICK)
    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y = launch(always, x)
        return launch(late, y) if rank == 1 or len(runs) > 3 else y

    first, second = step(torch.zeros(64))[0].item(), step(torch.zeros(64))[0].item()
    return best(always), best(late), first, second


@pytest.mark.once
def test_a_site_first_met_in_the_final_run_gets_the_winner_of_the_others():
    """No rank is left without a config, so the next call is an ordinary one everywhere."""
    got = values(on_ranks(2, _first_met_in_the_final_run))
    assert got[0] == got[1]
    assert len(got[0][1]) == 1


def _lets_go(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: launch(kernel, x))
    x = torch.zeros(64)
    alive = weakref.ref(x)
    y = step(x)
    output = weakref.ref(y)
    del x, y
    gc.collect()
    return alive() is None, output() is None, kernel.nargs is None


@pytest.mark.once
def test_nothing_keeps_the_closures_tensors_after_a_tuning():
    """Neither arguments nor results; on a GPU they would be activations."""
    assert values(on_ranks(2, _lets_go)) == [(True, True, True)] * 2


def _old_news(rank: int, order: list[int]) -> Any:
    kernel = autotuned(blocks=(16, 32), key=())
    is_bad = [False]

    @contextual_autotune(is_dist=True, **QUICK)
    def step(x: torch.Tensor) -> float:
        if is_bad[0]:
            raise ValueError("out of memory")
        return float(launch(kernel, x)[0])

    step(torch.zeros(64))
    is_bad[0] = rank == 1
    try:
        step(torch.zeros(65 if rank == 1 else 64))
    except ValueError:
        is_bad[0] = False
    dist.barrier()
    if rank == order[1]:
        import time

        time.sleep(0.5)
    return step(torch.zeros(66))


@pytest.mark.once
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_an_error_of_an_earlier_call_is_not_raised_in_a_healthy_one(order: list[int]):
    """One rank raised and caught it while the other made an ordinary call; whoever comes first, both go on."""
    assert values(on_ranks(2, _old_news, order)) == [1.0, 1.0]


_WRAPPED = """
import functools, sys, torch, triton, triton.language as tl
from triton.runtime.autotuner import Autotuner
calls, original = [], Autotuner.run
@functools.wraps(original)
def wrapper(self, *args, **kwargs):
    calls.append(1)
    return original(self, *args, **kwargs)
Autotuner.run = wrapper
code = original.__code__
from dist_tune import contextual_autotune
from tests.programs import run_python
from tests.ranks.kernels import autotuned, launch
assert original.__code__ is code, "importing changes nothing"
many, one = autotuned(blocks=(16, 32)), autotuned(blocks=(16,))
step = contextual_autotune(n_repeat=1)(lambda x: launch(one, launch(many, x)))
assert step(torch.zeros(64))[0] == 2 and len(many.cache) == 1 and len(step.records) == 1
before = len(calls)
step(torch.zeros(64))
assert len(calls) == before + 2, "the other package's wrapper is called as before"
assert Autotuner.run is wrapper and original.__code__ is code
print("fine")
"""


def test_another_packages_wrapper_around_the_autotuner_stays_in_place(tmp_path: Path):
    """It is called for every launch, inside a tuned closure and outside; and importing exchanges no code."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    script = tmp_path / "wrapped.py"
    script.write_text(_WRAPPED)
    done = run_python(script, cwd=tmp_path, env=env)
    assert done.stdout.strip().endswith("fine"), done.stderr


def _alone_but_numbered(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    contextual_autotune(**QUICK)(lambda x: launch(kernel, x))(torch.zeros(64))


@pytest.mark.once
def test_ranks_that_tune_alone_have_their_own_logs():
    """Without is_dist, too, ``rank-<i>.log`` is the log of rank i."""
    assert all("winner=" in outcome.log for outcome in on_ranks(2, _alone_but_numbered))
    assert all("winner=" in outcome.log for outcome in on_ranks(2, _alone_but_numbered, is_dist=False))


def _a_mistake(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    x = torch.zeros(64)
    try:
        contextual_autotune(**QUICK)(lambda: kernel[(4,)](x, n=64))()
    except NoValidConfigError as error:
        return type(error.__cause__).__name__, "y_ptr" in str(error)


@pytest.mark.once
def test_a_mistake_in_the_launch_is_the_cause_of_the_error():
    """The last exception is chained, with its traceback."""
    ((cause, is_named),) = values(on_ranks(1, _a_mistake, is_dist=False))
    assert cause in ("TypeError", "KeyError", "InterpreterError")
    assert is_named


def _captures_inside(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    original = torch.cuda.is_current_stream_capturing

    def closure() -> None:
        torch.cuda.is_current_stream_capturing = lambda: True
        try:
            launch(kernel, torch.zeros(64))
        finally:
            torch.cuda.is_current_stream_capturing = original

    with pytest.raises(CaptureError, match="before the capture"):
        contextual_autotune(is_dist=True, **QUICK)(closure)()
    return len(kernel.cache)


def test_a_closure_that_captures_by_itself_is_not_tuned_in_there():
    """Also in its first call."""
    assert values(on_ranks(2, _captures_inside)) == [0, 0]


class _Shaped:
    shape, dtype = [1, 2], "float"  # unhashable, as some libraries have it


def _odd_arguments(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    step = contextual_autotune(is_dist=True, **QUICK)(lambda *args, **kwargs: launch(kernel, torch.zeros(64))[0].item())
    return step(_Shaped()), step([1], {2: 3}), step(torch.zeros(1), None, flag=True), step(_Shaped())


def test_any_arguments_will_do():
    """Unhashable ones, None, keywords."""
    assert values(on_ranks(2, _odd_arguments)) == [(1.0,) * 4] * 2
