"""A candidate that writes nothing is found out, although its memory holds the last right answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from dist_tune import matches
from dist_tune.measure.checks import Checker
from dist_tune.measure.poison import NANS
from tests.checked_runs import A, B, Function, is_right, judge, multiply, out_function, out_half, out_nothing, run

pytestmark = pytest.mark.once

DTYPES = [*NANS, torch.complex64]


class Pool:
    """Buffers that a function has captured and gives in turn, as an allocator does."""

    def __init__(self, n_buffers: int) -> None:
        self.buffers = [torch.zeros(8, 4) for _ in range(n_buffers)]
        self.turns = count()

    def function(self, write: Callable[[torch.Tensor, Any], object]) -> Function:
        """A function whose result lies in the pool, written by ``write``."""
        buffers, turns = self.buffers, self.turns

        def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = buffers[next(turns) % len(buffers)]
            write(out, (a, b))
            return out

        return function


def all_of_it(out: torch.Tensor, args: Any) -> None:
    out.copy_(args[0] @ args[1])


def nothing(out: torch.Tensor, args: Any) -> None:
    pass


def half_of_it(out: torch.Tensor, args: Any) -> None:
    out[:, :2] = (args[0] @ args[1])[:, :2]


@pytest.mark.parametrize("check", [multiply, is_right])
@pytest.mark.parametrize("n_buffers", [1, 2, 3])
def test_a_missing_write_to_memory_that_is_given_again_is_found(n_buffers: int, check: Function):
    """Whether one buffer is given each time, or a few in turn."""
    pool = Pool(n_buffers)
    right, missing = pool.function(all_of_it), pool.function(nothing)
    checker = Checker(check, right)
    for _ in range(2 * n_buffers):
        assert judge(checker, right, A, B) == ""
    for _ in range(2 * n_buffers):
        assert judge(checker, missing, A, B) != ""
        assert judge(checker, right, A, B) == ""
    assert judge(checker, pool.function(half_of_it), A, B) != ""


def out_view(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out=out).view(-1).view(8, 4)


OUT_REFERENCES = [multiply, out_function, lambda a, b, out: out.copy_(a @ b), matches(lambda a, b, out: out.zero_().addmm_(a, b))]


@pytest.mark.parametrize("check", OUT_REFERENCES)
@pytest.mark.parametrize("right", [out_function, out_view])
def test_a_missing_write_to_an_argument_is_found(check: Function, right: Function):
    """Also where the reference has written the right answer there, which is undone."""
    out = torch.zeros(8, 4)
    checker = Checker(check, right)
    assert judge(checker, out_nothing, A, B, out).startswith("wrong by")
    assert judge(checker, right, A, B, out) == ""
    for _ in range(2):
        assert judge(checker, out_nothing, A, B, out).endswith("not written?")
        assert judge(checker, out_half, A, B, out).startswith("16 of 32 elements are NaN, the first at [4, 0]")
        assert judge(checker, right, A, B, out) == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_missing_write_is_found_in_every_format(dtype: torch.dtype):
    """Whatever its NaN looks like."""
    source, out = torch.arange(1, 33).to(torch.float32).to(dtype), torch.zeros(32).to(dtype)
    checker = Checker(lambda source, out: source.clone(), out_function)
    assert judge(checker, lambda source, out: out.copy_(source), source, out) == ""
    assert judge(checker, lambda source, out: out, source, out).endswith("elements are NaN, the first at [0]: not written?")
    assert judge(checker, lambda source, out: out.copy_(source), source, out) == ""


def out_five(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.fill_(5)


@pytest.mark.parametrize(
    ("check", "before", "candidates"),
    [
        pytest.param(is_right, torch.zeros(8, 4), [out_function, out_nothing, out_half, out_function], id="told by the first candidate"),
        pytest.param(is_right, torch.zeros(8, 4), [out_nothing, out_nothing, out_function], id="nothing was right before"),
        pytest.param(is_right, torch.zeros(8, 4), [out_function, out_five, out_function, out_nothing], id="after a wrong one"),
        pytest.param(multiply, A @ B, [out_nothing, out_function], id="the first one finds the answer"),
        pytest.param(multiply, A @ B, [out_half, out_function], id="the first one finds half of it"),
    ],
)
def test_only_a_candidate_that_writes_its_output_is_right(check: Function, before: torch.Tensor, candidates: list[Function]):
    """Whatever candidates were before it, and what stood there; a reference tells at once that it does not read that."""
    out, checker = before.clone(), Checker(check, out_function)
    assert [judge(checker, each, A, B, out) == "" for each in candidates] == [each is out_function for each in candidates]


def test_an_output_is_zeroed_before_each_run():
    """That torch writes to it in between makes it no other call."""
    out = torch.zeros(8, 4)
    checker = Checker(is_right, out_function)
    verdicts = []
    for function in (out_function, out_nothing, out_half, out_function):
        for is_repeated in (False, True):
            out.zero_()
            verdicts.append(run(checker, function, A, B, out, is_repeated=is_repeated) == "")
    assert verdicts == [True, True, False, False, False, False, True, True]


def test_a_first_candidate_that_leaves_memory_of_its_own_is_found():
    """All of it: what is kept there from run to run is a part."""
    pool = Pool(1)
    pool.buffers[0].copy_(A @ B)
    assert judge(Checker(is_right, pool.function(nothing)), pool.function(nothing), A, B) != ""


def test_a_run_that_is_wrong_without_nan_is_wrong_by_itself():
    """Right once, and then not: it has not read what it found, and the next candidate's missing write is found all the same."""
    out, n_runs = torch.zeros(8, 4), iter(range(9))
    checker = Checker(multiply, out_function)
    assert judge(checker, lambda a, b, out: torch.mm(a, b, out=out).add_(next(n_runs)), A, B, out).startswith("wrong by 1")
    out.copy_(A @ B)
    assert judge(checker, out_nothing, A, B, out) != ""


def test_a_missing_write_is_not_excused_by_another_output_that_is_read():
    """Of one output it is known that candidates write all of it, of the other one not yet whether it is read."""
    out, total = torch.zeros(8, 4), torch.zeros(3)
    checker = Checker(lambda result, *args: is_right(result, *args) and not result[1].isnan().any(), both)
    assert judge(checker, out_function_alone, A, B, out, total) == ""
    assert judge(checker, lambda a, b, out, total: (out, total.add_(1)), A, B, out, total) != ""


def test_an_output_is_another_tensor_each_time():
    """It is known by its position: each call has memory of its own, and the first missing write is found."""
    checker = Checker(multiply, out_function)
    for _ in range(2):
        for _ in range(3):
            assert judge(checker, out_function, A, B, torch.zeros(8, 4)) == ""
        out = A @ B
        assert judge(checker, out_nothing, A, B, out) != ""
        assert torch.equal(out, A @ B) or out.isnan().all()


def test_a_function_may_not_share_its_memory_with_the_reference():
    """What is expected would be what it has just written."""
    shared = torch.zeros(8, 4)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b, out=shared)

    checker = Checker(lambda a, b: torch.mm(a, b, out=shared), function)
    checker.begin((A, B), {}, is_repeated=False)
    with pytest.raises(TypeError, match="function and its reference <lambda> return the same memory"):
        checker.judge(function(A, B), (A, B), {})


def both(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.mm(a, b, out=out), total.add_(1)


def out_function_alone(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.mm(a, b, out=out), torch.zeros(3)


def test_a_wrong_candidate_is_not_excused_by_what_it_did_not_read():
    """It has written all of its output before that was known not to be read, and is wrong in another result, or in this one."""
    out = torch.zeros(8, 4)

    def function(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.mm(a, b, out=out), a + 1

    def in_another(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.mm(a, b, out=out), a + 2

    def in_this(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return out.fill_(5), a + 1

    for wrong in (in_another, in_this):
        checker = Checker(lambda a, b, out: (a @ b, a + 1), function)
        assert judge(checker, function, A, B, out) == ""
        assert judge(checker, wrong, A, B, out) != ""
        assert judge(checker, lambda a, b, out: (out, a + 1), A, B, out) != ""


def test_what_is_known_holds_for_calls_that_do_the_same():
    """Layers of a step have tensors of their own; a call with another flag may read what that one does not."""

    def function(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, does_add: bool = False) -> torch.Tensor:
        return out.addmm_(a, b) if does_add else torch.mm(a, b, out=out)

    def check(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, does_add: bool) -> bool:
        return not result.isnan().any()

    checker = Checker(check, function)
    for _ in range(2):
        assert judge(checker, function, A, B, torch.zeros(8, 4), False) == ""
    assert judge(checker, lambda a, b, out, does_add: out, A, B, torch.zeros(8, 4), False) != ""
    total = torch.ones(8, 4)
    assert judge(checker, function, A, B, total, True) == ""
    assert torch.allclose(total, 1 + A @ B, atol=1e-4)
