"""A candidate that writes nothing is found out, although its memory holds the last right answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_tune.measure.checks import Checker, matches
from dist_tune.measure.result_memory import _SPOILT
from tests.checked_runs import A, B, Function, is_right, multiply, out_function, out_half, out_nothing, run, wants_rerun

pytestmark = pytest.mark.once

DTYPES = list(_SPOILT)


class Pool:
    """An allocator that gives the same memory again, as CUDA's does."""

    def __init__(self, n_buffers: int, dtype: torch.dtype = torch.float32) -> None:
        self.buffers = [torch.zeros(64).to(dtype) for _ in range(n_buffers)]
        self.n_given = 0

    def function(self, write: Callable[[torch.Tensor, Any], object]) -> Function:
        """A function whose result lies in the pool, written by ``write``."""

        def give(shape: torch.Size) -> torch.Tensor:
            self.n_given += 1
            return self.buffers[self.n_given % len(self.buffers)][: shape.numel()].view(shape)

        allocate = [give]

        def function(*args: Any) -> torch.Tensor:
            out = allocate[0](torch.Size([8, 4]))
            write(out, args)
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
    checker = Checker(check, multiply)
    right, missing = pool.function(all_of_it), pool.function(nothing)
    for _ in range(2 * n_buffers):
        assert run(checker, right, A, B) == ""
    for _ in range(2 * n_buffers):
        assert run(checker, missing, A, B) != ""
        assert run(checker, right, A, B) == ""
    assert run(checker, pool.function(half_of_it), A, B) != ""


@pytest.mark.parametrize("check", [multiply, is_right])
def test_the_second_candidate_is_not_saved_by_the_first(check: Function):
    """Nothing is known of the memory yet, and it holds the right answer."""
    pool = Pool(1)
    checker = Checker(check, multiply)
    assert run(checker, pool.function(all_of_it), A, B) == ""
    assert run(checker, pool.function(nothing), A, B) != ""
    assert run(checker, pool.function(nothing), A, B) != ""
    assert run(checker, pool.function(all_of_it), A, B) == ""


def test_memory_that_nobody_holds_is_spoiled(monkeypatch: pytest.MonkeyPatch):
    """What is allocated like the last result, before a run, is filled and given back."""
    filled: list[tuple[int, torch.dtype]] = []
    own = torch.Tensor.fill_

    def fill(self: torch.Tensor, value: int) -> torch.Tensor:
        filled.append((self.numel(), self.dtype))
        return own(self, value)

    monkeypatch.setattr(torch.Tensor, "fill_", fill)
    for dtype, view in [
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.int16),
        (torch.int32, torch.uint8),
        (torch.complex64, torch.int32),
    ]:
        a = torch.ones(33).to(dtype)
        checker = Checker(lambda a: a + 1, lambda a: a)
        filled.clear()
        assert run(checker, lambda a: a + 1, a) == ""
        n = 33 * dtype.itemsize // view.itemsize
        assert filled == [(n, view)] * 2  # like what is expected, for what may be left of the reference
        assert run(checker, lambda a: a + 1, a) == ""
        assert filled == [(n, view)] * 4
    filled.clear()
    run(Checker(lambda a: a > 0, lambda a: a), lambda a: a > 0, A)  # bools
    assert filled == []


def out_view(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out=out).view(-1).view(8, 4)


OUT_REFERENCES = [multiply, out_function, lambda a, b, out: out.copy_(a @ b), matches(lambda a, b, out: out.zero_().addmm_(a, b))]


@pytest.mark.parametrize("check", OUT_REFERENCES)
@pytest.mark.parametrize("right", [out_function, out_view])
def test_a_missing_write_to_an_argument_is_found(check: Function, right: Function):
    """Also where the reference has written the right answer there, which is undone."""
    out = torch.zeros(8, 4)
    checker = Checker(check, right)
    assert run(checker, out_nothing, A, B, out).startswith("wrong by")
    assert run(checker, right, A, B, out) == ""
    for _ in range(2):
        assert run(checker, out_nothing, A, B, out).endswith("not written?")
        assert run(checker, out_half, A, B, out).startswith("16 of 32 elements are NaN, the first at [4, 0]")
        assert run(checker, right, A, B, out) == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_missing_write_is_found_in_every_format(dtype: torch.dtype):
    """Whatever its NaN looks like."""
    source, out = torch.arange(1, 33).to(torch.float32).to(dtype), torch.zeros(32).to(dtype)
    checker = Checker(lambda source, out: source.clone(), out_function)
    assert run(checker, lambda source, out: out.copy_(source), source, out) == ""
    assert run(checker, lambda source, out: out, source, out).startswith("32 of 32 elements are NaN")
    assert run(checker, lambda source, out: out.copy_(source), source, out) == ""


def test_complex_arguments_are_spoiled_too():
    source, out = torch.randn(4, dtype=torch.complex64), torch.zeros(4, dtype=torch.complex64)
    checker = Checker(lambda source, out: source + 0, out_function)
    assert run(checker, lambda source, out: out.copy_(source), source, out) == ""
    assert "are NaN" in run(checker, lambda source, out: out, source, out)


def test_a_rerun_tells_what_a_check_cannot():
    """A check of the user's does not say what it expects: after the first run of an ``out=``, a second one of the same candidate does."""
    out = torch.zeros(8, 4)
    checker = Checker(is_right, out_function)
    assert run(checker, out_function, A, B, out) == ""
    assert wants_rerun(checker)
    assert run(checker, out_function, A, B, out) == ""
    assert not wants_rerun(checker)
    assert run(checker, out_nothing, A, B, out) != ""
    assert run(checker, out_half, A, B, out) != ""
    assert run(checker, out_function, A, B, out) == ""
    assert not wants_rerun(checker)


def test_a_rerun_counts_where_an_output_is_zeroed_before_each_run():
    """That torch writes to it in between makes it no other call."""
    out = torch.zeros(8, 4)
    checker = Checker(is_right, out_function)
    verdicts = []
    for function in (out_function, out_function, out_nothing, out_half, out_function):
        out.zero_()
        verdicts.append(run(checker, function, A, B, out))
    assert [verdict == "" for verdict in verdicts] == [True, True, False, False, True]


def test_nothing_is_excused_before_anything_was_right():
    """A wrong candidate at the beginning says nothing of what the function reads."""
    out = torch.zeros(8, 4)
    checker = Checker(is_right, out_function)
    assert run(checker, out_nothing, A, B, out) != ""
    assert run(checker, out_nothing, A, B, out) != ""
    assert run(checker, out_function, A, B, out) == ""


def test_an_output_is_another_tensor_each_time():
    """It is known by its position: each call has memory of its own, and the first missing write is found."""
    checker = Checker(multiply, out_function)
    for _ in range(2):
        for _ in range(3):
            assert run(checker, out_function, A, B, torch.zeros(8, 4)) == ""
        out = A @ B
        assert run(checker, out_nothing, A, B, out) != ""
        assert torch.equal(out, A @ B) or out.isnan().all()


def test_a_function_may_not_share_its_memory_with_the_reference():
    """What is expected would be what it has just written."""
    shared = torch.zeros(8, 4)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b, out=shared)

    checker = Checker(lambda a, b: torch.mm(a, b, out=shared), function)
    checker.begin((A, B), {})
    with pytest.raises(TypeError, match="function and its reference <lambda> return the same memory"):
        checker.verdict(function(A, B), (A, B), {})


def rerun(checker: Checker, function: Function, *args: Any) -> str:
    """The verdict when runs that say little are made again, as ``wants_rerun`` asks."""
    verdict = run(checker, function, *args)
    for _ in range(10):
        if verdict or not wants_rerun(checker):
            return verdict
        verdict = run(checker, function, *args)
    raise AssertionError("reruns without end")


def both(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.mm(a, b, out=out), total.add_(1)


def both_reference(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a @ b, total + 1


@pytest.mark.parametrize("check", [both_reference, is_right])
def test_an_output_beside_one_that_is_read_is_spoiled(check: Function):
    """Which is which is found out one by one."""
    out, total = torch.zeros(8, 4), torch.zeros(3)
    checker = Checker(
        check if check is both_reference else lambda result, *args: is_right(result, *args) and not result[1].isnan().any(), both
    )
    for _ in range(3):
        assert rerun(checker, both, A, B, out, total) == ""
    before = total.clone()
    for _ in range(2):
        assert rerun(checker, lambda a, b, out, total: (out, total.add_(1)), A, B, out, total) != ""
    assert torch.equal(total, before + 2)
    assert rerun(checker, both, A, B, out, total) == ""


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
        assert run(checker, function, A, B, out) == ""
        assert run(checker, wrong, A, B, out) != ""
        assert run(checker, lambda a, b, out: (out, a + 1), A, B, out) != ""


def test_a_rerun_that_is_wrong_by_itself_takes_back_what_was_concluded():
    """A check cannot say whether the second candidate reads its output or is wrong; its rerun can, and the third is found out."""
    out = torch.zeros(8, 4)
    checker = Checker(is_right, out_function)
    assert run(checker, out_function, A, B, out) == ""
    assert run(checker, lambda a, b, out: out.fill_(5), A, B, out) == ""
    assert wants_rerun(checker)
    assert run(checker, lambda a, b, out: out.fill_(5), A, B, out) != ""
    assert run(checker, out_function, A, B, out) == ""
    assert run(checker, out_nothing, A, B, out) != ""


def test_what_is_known_holds_for_calls_that_do_the_same():
    """Layers of a step have tensors of their own; a call with another flag may read what that one does not."""

    def function(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, does_add: bool = False) -> torch.Tensor:
        return out.addmm_(a, b) if does_add else torch.mm(a, b, out=out)

    def check(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, does_add: bool) -> bool:
        return not result.isnan().any()

    checker = Checker(check, function)
    for _ in range(2):
        assert run(checker, function, A, B, torch.zeros(8, 4), False) == ""
    assert run(checker, lambda a, b, out, does_add: out, A, B, torch.zeros(8, 4), False) != ""
    total = torch.ones(8, 4)
    assert rerun(checker, function, A, B, total, True) == ""
    assert torch.allclose(total, 1 + A @ B, atol=1e-4)
