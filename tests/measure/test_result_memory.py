"""Memory that is read is put back after a run, and memory that only contexts hold is left alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dist_tune.measure.checks import Checker
from tests.checked_runs import A, B, Function, accumulate, is_right, judge, multiply, out_nothing, run

pytestmark = pytest.mark.once


@pytest.mark.parametrize("reference", [lambda a, b, out: out + a @ b, accumulate, lambda a, b, out: torch.addmm(out, a, b, out=out)])
def test_an_argument_that_is_read_keeps_its_value(reference: Function):
    """Accumulation: what is expected depends on what is there, so that is left alone; and the reference leaves it alone as well."""
    out = torch.zeros(8, 4)
    checker = Checker(reference, accumulate)
    for k in range(1, 7):
        assert run(checker, accumulate, A, B, out, is_repeated=k % 2 == 0) == ""
        assert torch.allclose(out, k * (A @ B), atol=1e-4)
    assert judge(checker, out_nothing, A, B, out) != ""
    assert torch.allclose(out, 6 * (A @ B), atol=1e-4)


def test_an_argument_that_a_check_lets_be_read_is_put_back():
    """In place, with a check: the run that was given NaN is no verdict, its value is put back, and later ones are left alone."""
    x = torch.ones(4)

    def increment(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    checker = Checker(lambda result, x: bool((result == result.round()).all() and result.min() > 1), increment)
    for is_repeated, value in ((False, 2.0), (True, 2.0), (False, 3.0), (True, 4.0)):
        assert run(checker, increment, x, is_repeated=is_repeated) == ""
        assert x.tolist() == [value] * 4
    assert judge(checker, lambda x: x.mul_(0), x) != ""


@pytest.mark.parametrize("shape", [(4, 4), (8, 3), (2, 4, 4), (16, 4)])
def test_a_smaller_output_has_room_for_itself_only(shape: tuple[int, ...]):
    """Whatever is known of the last one: nothing is poisoned beyond its end, nor is it made larger."""

    def function(n: int, out: torch.Tensor) -> torch.Tensor:
        return out.fill_(n)

    checker = Checker(lambda n, out: torch.full_like(out, n), function)
    for _ in range(2):
        assert judge(checker, function, 3, torch.zeros(8, 4)) == ""
    memory = torch.zeros(100)
    for n in range(3):
        out = memory[: torch.Size(shape).numel()].view(shape)
        assert judge(checker, function, n, out) == ""
        assert out.eq(n).all()
        assert memory[out.numel() :].eq(0).all()
        separate = torch.zeros(shape)
        assert judge(checker, function, n, separate) == ""
        assert separate.untyped_storage().nbytes() == separate.numel() * 4


def test_an_output_that_is_zeroed_before_each_run_is_put_back():
    """Split products add up into zeros that ``reset`` has put there; the reference does not read them."""
    out = torch.zeros(8, 4)
    checker = Checker(multiply, accumulate)
    for _ in range(2):
        for is_repeated in (False, True):
            out.zero_()
            assert run(checker, accumulate, A, B, out, is_repeated=is_repeated) == ""
            assert torch.allclose(out, A @ B, atol=1e-4) or (is_repeated and not out.any())
    out.zero_()
    assert judge(checker, out_nothing, A, B, out) != ""


def test_an_argument_that_is_handed_through_keeps_its_value():
    """It is a result, and an input."""
    a = A.clone()

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a @ b, a

    for check in (function, is_right):
        checker = Checker(check, function)
        for _ in range(4):
            assert judge(checker, function, a, B) == ""
            assert torch.equal(a, A)


def test_a_cache_that_is_written_in_part_keeps_the_rest():
    """Keys of one position are written, those of the others are results as well."""
    cache, key = torch.randn(4, 8), torch.randn(8)
    before = cache.clone()

    def function(cache: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        cache[2] = key
        return cache

    def in_one_piece(cache: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.cat([cache[:2], key[None], cache[3:]])

    for check in (function, in_one_piece, lambda result, cache, key: torch.equal(result[2], key) and not result.isnan().any()):
        checker = Checker(check, function)
        for _ in range(4):
            assert judge(checker, function, cache, key) == ""
        assert torch.equal(cache[[0, 1, 3]], before[[0, 1, 3]])


def test_a_captured_cache_that_is_written_in_part_keeps_the_rest():
    """Nobody passes it: it is in a closure, and a result."""
    cache, key = torch.randn(4, 8), torch.randn(8)
    before = cache.clone()

    def function(key: torch.Tensor) -> torch.Tensor:
        cache[2] = key
        return cache

    for check in (lambda key: torch.cat([before[:2], key[None], before[3:]]), lambda result, key: not result.isnan().any()):
        checker = Checker(check, function)
        for _ in range(4):
            assert judge(checker, function, key) == ""
        assert torch.equal(cache[[0, 1, 3]], before[[0, 1, 3]])


@dataclass
class Context:
    buffers: list[torch.Tensor]
    inner: Any = None


@dataclass(slots=True)
class Slotted:
    buffer: torch.Tensor


@pytest.mark.parametrize(
    "wrap", [lambda t: Context([t]), lambda t: Context([], Context([], {"t": t})), Slotted, lambda t: Context([], Slotted(t))]
)
@pytest.mark.parametrize("how", ["argument", "keyword", "closure", "method"])
def test_what_only_a_context_holds_is_left_alone(wrap: Function, how: str):
    """Peers write to symmetric memory at any time, so between two runs nobody fills it, at whatever depth it is held."""
    memory = torch.zeros(8, 4)
    context, hidden = wrap(memory), Context([memory])
    seen: list[torch.Tensor] = []

    def function(a: torch.Tensor, b: torch.Tensor, context: Any = None) -> torch.Tensor:
        seen.append(hidden.buffers[0].clone())
        return torch.mm(a, b, out=hidden.buffers[0])

    def closed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert context is not None
        return function(a, b)

    class Step:
        held = None

        def __init__(self) -> None:
            self.held = context

        def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return function(a, b)

    functions: dict[str, Function] = {"argument": function, "keyword": function, "closure": closed, "method": Step()}
    outer = functions[how]
    args = (A, B, context) if how == "argument" else (A, B)
    kwargs = {"context": context} if how == "keyword" else {}
    checker = Checker(lambda result, *args, **kwargs: is_right(result, *args), outer)
    for _ in range(3):
        assert judge(checker, outer, *args, **kwargs) == ""
    assert not any(each.isnan().any() for each in seen)
