"""Memory of results: free memory is poisoned, memory that is read is put back, and what others hold is left alone, in any layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dist_tune import matches
from dist_tune.measure.checks import Checker
from dist_tune.measure.memory import tensors_in
from tests.checked_runs import A, B, Function, accumulate, is_right, judge, multiply, out_nothing, run

pytestmark = pytest.mark.once


def test_memory_that_nobody_holds_is_poisoned(monkeypatch: pytest.MonkeyPatch):
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


def test_results_of_other_calls_are_not_poisoned():
    """Layers of one step: what one has returned is the next one's input, and kept for the backward pass."""
    weights = [torch.randn(4, 4) for _ in range(3)]

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w)

    for check in (layer, lambda result, x, w: torch.equal(result, torch.relu(x @ w))):
        checker = Checker(check, layer)
        for k in range(4):
            kept = [torch.randn(4, 4)]
            for w in weights:
                checker.begin((kept[-1], w), {}, is_repeated=k % 2 > 0)
                assert not any(each.isnan().any() for each in kept)
                kept.append(layer(kept[-1], w))
                assert checker.judge(kept[-1], (kept[-2], w), {}) == ""


def test_an_earlier_result_that_somebody_keeps_is_put_back():
    """Whoever kept it finds it as it was."""
    checker = Checker(multiply, multiply)
    kept = []
    for k in range(4):
        checker.begin((A, B), {}, is_repeated=k % 2 > 0)
        kept.append(A @ B)
        assert checker.judge(kept[-1], (A, B), {}) == ""
    assert all(torch.equal(each, A @ B) for each in kept)


def test_a_run_without_a_verdict_leaves_things_as_they_were():
    """It raised: what was poisoned for it is put back, at the latest before the next run."""
    x = torch.ones(4)
    checker = Checker(lambda result, x: True, lambda x: x)
    assert judge(checker, lambda x: x.add_(1), x) == ""
    checker.begin((x,), {}, is_repeated=True)
    assert x.isnan().all()
    checker.restore()
    assert x.tolist() == [2.0] * 4
    checker.begin((x,), {}, is_repeated=True)
    checker.begin((x,), {}, is_repeated=True)
    checker.restore()
    assert x.tolist() == [2.0] * 4


def test_errors_of_the_users_leave_things_as_they_were():
    """Of a check, and of a reference that does not take NaN: it is asked again without."""
    x, calls = torch.ones(4), []

    def check(result: torch.Tensor, x: torch.Tensor) -> bool:
        calls.append(x.isnan().any())
        if len(calls) == 2:
            raise KeyError("mine")
        return True

    checker = Checker(check, lambda x: x)
    assert run(checker, lambda x: x, x) == ""
    with pytest.raises(KeyError):
        run(checker, lambda x: x, x, is_repeated=True)
    assert calls[1]
    assert x.tolist() == [1.0] * 4

    def picky(x: torch.Tensor) -> torch.Tensor:
        assert not x.isnan().any()
        return x + 1

    checker = Checker(picky, lambda x: x)
    for k in range(1, 4):
        assert judge(checker, lambda x: x.add_(1), x) == ""
        assert x.tolist() == [1.0 + 2 * k] * 4


def test_integers_that_somebody_holds_are_never_poisoned():
    """They may be flags that a kernel waits for, or indices."""
    flags, out = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bool)
    checker = Checker(lambda result, flags, out: True, lambda flags, out: (flags, out))
    for _ in range(3):
        assert judge(checker, lambda flags, out: (flags, out), flags, out) == ""
        checker.begin((flags, out), {}, is_repeated=True)
        assert flags.eq(0).all()
        assert not out.any()


def test_nan_that_is_expected_stays_in_a_given_output():
    """It is the function's own, and not poison to be taken away."""

    def right(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(4) == 0, torch.nan, 2 * x)

    def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(right(x, out))

    x, out = torch.arange(4.0), torch.zeros(4)
    checker = Checker(matches(right), function)
    for k in range(3):
        out.zero_()  # as the closure does before its launch
        assert run(checker, function, x, out, is_repeated=k > 0) == ""
        assert out[0].isnan()
        assert out[1:].tolist() == [2.0, 4.0, 6.0]


RESULTS: dict[str, Function] = {
    "empty": lambda x: x[:0],
    "scalar": lambda x: x.sum(),
    "transposed": lambda x: (x + 1).t(),
    "strided": lambda x: (x + 1)[::2, 1:],
    "expanded": lambda x: x.sum(0)[:, None].expand(4, 5),
    "views of each other": lambda x: (y := x + 1, y[1:], y.view(-1)),
    "unfolded": lambda x: (x + 1).view(-1).unfold(0, 3, 1),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "negative view": lambda x: torch.complex(x, x).conj().imag,
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr(),
    "parameter": lambda x: torch.nn.Parameter(x + 1),
    "view of an argument": lambda x: x[1:],
    "expanded argument": lambda x: x[:1].expand(3, 4),
    "conjugate of an argument": lambda x: torch.view_as_complex(x.view(4, 2, 2)).conj(),
    "bits of an argument": lambda x: x.view(torch.int32),
    "detached": lambda x: x.detach(),
    "nested": lambda x: {"a": [x + 1, (None, 3)], "b": x},
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_results_of_any_layout_are_checked_and_arguments_stay(name: str):
    """Whether they can be poisoned or not."""
    function = RESULTS[name]
    x = torch.randn(4, 4)
    before = x.clone()
    for check in (function, lambda result, x: not x.isnan().any()):
        checker = Checker(check, function)
        for _ in range(4):
            assert judge(checker, function, x) == ""
        assert torch.equal(x, before)


@dataclass
class Output:
    value: torch.Tensor
    whole: Any = None
    unset: torch.Tensor = field(init=False)


def test_a_missing_write_to_a_field_of_a_dataclass_is_found():
    """It is a part of the result like an item of a tuple; one that holds itself, or lacks a field, is no obstacle."""
    out = torch.zeros(8, 4)

    def right(a: torch.Tensor, b: torch.Tensor) -> Output:
        return Output(torch.mm(a, b, out=out))

    def is_right(result: Output, a: torch.Tensor, b: torch.Tensor) -> bool:
        result.whole = result
        return torch.allclose(result.value, a @ b, atol=1e-4)

    for check in (lambda a, b: Output(a @ b), is_right):
        checker = Checker(check, right)
        assert judge(checker, right, A, B) == ""
        assert judge(checker, lambda a, b: Output(out), A, B) != ""
        assert judge(checker, right, A, B) == ""


def test_a_container_is_searched_once():
    """A list in itself, a tree whose nodes know their parent, and twenty pairs in one another, which have a million ends."""
    value = torch.ones(1)
    itself: list[Any] = [value]
    itself.append(itself)
    root = Output(value)
    root.whole = [Output(value, root) for _ in range(40)]
    pair: Any = value
    for _ in range(20):
        pair = (pair, pair)
    assert list(tensors_in(itself, has_fields=True)) == [(0,)]
    assert len(tensors_in(root, has_fields=True)) == 41
    assert list(tensors_in((pair, value), has_fields=True))[-1] == (1,)
    assert len(tensors_in(pair, has_fields=True)) == 2
    assert list(tensors_in([[value], {"a": value}], has_fields=True)) == [(0, 0), (1, "a")]


def test_inference_tensors_and_leaves_can_be_outputs():
    """Autograd has no say in what is poisoned: versions do not count up."""
    with torch.inference_mode():
        made_there = torch.zeros(8, 4)
    for out in (made_there, torch.zeros(8, 4, requires_grad=True), torch.nn.Parameter(torch.zeros(8, 4))):

        def function(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                out.copy_(a @ b)
            return out

        checker = Checker(multiply, function)
        assert judge(checker, function, A, B, out) == ""
        version = 0 if out.is_inference() else out._version
        assert judge(checker, lambda a, b, out: out, A, B, out) != ""
        assert out.is_inference() or out._version == version
        assert judge(checker, function, A, B, out) == ""
