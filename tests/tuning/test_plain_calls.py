"""A tuned call is what the plain one is: its value, what it leaves, and the random numbers drawn after it. For both tuners."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dist_tune import autotune, contextual_autotune
from dist_tune.measure import memory
from tests.steps import accumulate_kernel, autotuned, launch
from tests.tuning import steps
from tests.worlds import log, on_each_rank

KINDS = ("one config", "known", "zeroed", "cache")
BESIDE = [pytest.param(partial(steps.beside, kind=kind), id=kind) for kind in KINDS]


@on_each_rank(1, cases=[steps.common_generators, steps.zeroed_twice, *BESIDE], is_dist=False)
def test_a_step_that_may_be_repeated_is_tuned(rank: int, case: Any):
    """Generators of torch, Python and numpy, and what kernels restore or zero, also those with a known config, are put back."""
    assert steps.beside_plain(case) == [(True, True)] * 2


@on_each_rank(1, cases=list(steps.CHANGES), is_dist=False)
def test_a_step_that_must_not_be_repeated_is_not_replayed(rank: int, case: str):
    """It gives or leaves something else when it is made again; one line of the log says so, and what."""
    assert steps.beside_plain(partial(steps.changing, name=case)) == [(True, False)] * 2
    assert log().count(": tuned in the calls to come, which take at most 5% longer") >= 2
    if case == "grown list":  # not told as a change of a tensor in place
        assert "returns another value when it runs again (returned a list of length 2, expected a list of length 1)" in log()


@on_each_rank(1, is_dist=False)
def test_memory_that_cannot_be_copied_may_be_changed(rank: int):
    """What leads to no other name than a kernel's argument is looked at by its copy: without room for one the step is not replayed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_MAX_HOST_BYTES", 4 * 64 * 2)
        assert steps.beside_plain(steps.crowded) == [(True, False)] * 2
    assert log().count("may change y_ptr of accumulate_kernel, of which no copy can be made: tuned in the calls to come") == 2


@on_each_rank(1, cases=["rt", "srsr", "tsrtr"], is_dist=False)
def test_atomics_of_several_kernels_into_one_tensor_add_once(rank: int, case: str):
    """The tensor is an argument of the step, or a default of it."""
    for is_argument in (True, False):
        found = steps.beside_plain(partial(steps.atomics, order=case, is_argument=is_argument))
        assert all(is_plain for is_plain, _ in found), (is_argument, found)


@on_each_rank(1, cases=["around", "inside", "arguments"], is_dist=False)
def test_inference_mode_changes_nothing(rank: int, case: str):
    """An argument that a kernel adds to, with restore_value or without, holds what one run leaves; so where the miss comes late."""
    steps_of = [partial(steps.inference, where=case, has_option=has_option) for has_option in (True, False)]
    with torch.inference_mode(mode=case == "around"):
        for make in (*steps_of, partial(steps.beside, kind="late")):
            assert [is_plain for is_plain, _ in steps.beside_plain(make)] == [True] * 2, make


@on_each_rank(1, cases=["a step with reset", "a function with reset", "a function with a check"], is_dist=False)
def test_memory_under_restore_value_changes_once_where_any_run_may_follow(rank: int, case: str):
    """No probe is made, and the first run does not count either."""
    kernel, total = autotuned(accumulate_kernel, restore_value=["y_ptr"]), torch.zeros(64)

    def step(x: torch.Tensor, part: int = 0) -> torch.Tensor:
        launch(kernel, x, total)
        return x.clone()

    options: Any = {"check": torch.clone} if case.endswith("check") else {"reset": lambda: None}
    face = contextual_autotune if case.startswith("a step") else partial(autotune, [{"part": k} for k in range(2)], None)
    tuned: Any = face(**options, **steps.QUICK)(step)
    tuned(torch.ones(64))
    assert len(tuned.records) > 0
    assert total.tolist() == [1.0] * 64


class _Trainer:
    def __init__(self) -> None:
        self.total, self.log = torch.zeros(64), [torch.zeros(64), torch.zeros(64)]

    def change(self, y: torch.Tensor) -> None:
        self.total.add_(y)
        self.log[1].add_(y)


class _Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = torch.nn.Linear(1, 1)
        self.inner.total = torch.zeros(64)  # no buffer

    def change(self, y: torch.Tensor) -> None:
        self.inner.total += y


class _Numbers:
    __slots__ = ("array", "n", "parts")

    def __init__(self) -> None:
        self.array, self.parts, self.n = np.zeros(2), {"rows": [torch.zeros(2)]}, 0

    def change(self, y: torch.Tensor) -> None:
        self.array += 1
        self.parts["rows"][0] += 1
        self.n += 1


NAMES: dict[Callable[[], Any], list[str]] = {
    _Trainer: ["self.total", "self.log[1]"],
    _Module: ["self.inner.total"],
    _Numbers: ["self.array", "self.parts['rows'][0]", "self.n"],
}


@on_each_rank(1, cases=list(NAMES), is_dist=False)
def test_what_plain_objects_hold_is_repeated_and_told_once(rank: int, case: Any):
    """In attributes, slots, lists in dicts and arrays: the step's own business, and it is tuned."""
    kernel = autotuned()

    class Owner(case):  # type: ignore[misc]
        __slots__ = ()

        def step(self, x: torch.Tensor) -> None:
            self.change(launch(kernel, x))

    step = contextual_autotune(**steps.QUICK)(Owner().step)
    step(torch.ones(64))
    assert len(step.records) == 1
    (line,) = [each for each in log().splitlines() if "each replay does so again" in each]
    assert [name for name in NAMES[case] if name not in line] == []


def test_restore_is_accepted_with_a_warning():
    """Any value of it warns, None as well."""
    for value in ("args", None):
        with pytest.warns(FutureWarning, match="restore= has no effect"):
            contextual_autotune(restore=value)
