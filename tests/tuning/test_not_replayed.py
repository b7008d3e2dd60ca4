"""Steps that give or leave something else when they are made again are not tuned: a call is what the plain one is, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_tune import contextual_autotune
from dist_tune.testing import on_ranks
from tests.ranks.kernels import autotuned
from tests.tuning import training_steps

pytestmark = [pytest.mark.once, pytest.mark.processes]

QUICK: Any = {"n_repeat": 2, "n_warmup": 1}


def plain(value: Any) -> Any:
    """Tensors as their bytes and shapes, in any container."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def outcome(case: Callable[[Any], training_steps.Case], is_tuned: bool) -> Any:
    kernel = autotuned(blocks=(16, 32) if is_tuned else (16,))
    step, calls, after = case(kernel)
    step = contextual_autotune(**QUICK)(step) if is_tuned else step
    found = [plain(step(*args)) for args in calls]
    return found, plain(after()), torch.rand(1).item()


def _both(rank: int, name: str) -> Any:
    case = getattr(training_steps, name)
    torch.manual_seed(7)
    expected = outcome(case, is_tuned=False)
    torch.manual_seed(7)
    return expected, outcome(case, is_tuned=True)


@pytest.mark.parametrize("name", [each.__name__ for each in training_steps.CASES])
def test_a_call_is_what_the_plain_one_is(name: str):
    """Values, state, random numbers afterwards; and one line says that the step is not tuned, and why."""
    (run,) = on_ranks(1, _both, name, is_dist=False)
    expected, found = run.value
    assert found == expected
    (line,) = [each for each in run.log.splitlines() if ": not tuned; split it, or give reset=" in each][:1]
    print(line)
