"""A candidate that leaves out a write is found, although its memory holds the last right answer;
memory that is read is put back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_tune import matches
from dist_tune.measure.checks import Checker
from tests.checked_runs import (
    A,
    B,
    Function,
    accumulate,
    is_right,
    judge,
    multiply,
    out_function,
    out_half,
    out_nothing,
    run,
)


def rights(checker: Checker, candidates: Iterable[Function], *args: Any) -> list[bool]:
    """Which of these candidates are right, run one after the other."""
    return [judge(checker, each, *args) == "" for each in candidates]


# -- writes that are left out ----------------------------------------------------------------------


def pool(n_buffers: int) -> Function:
    """What makes a function of a write: its result lies in one of the buffers that it has captured,
    in turn, as an allocator gives them.
    """
    buffers, turns = [torch.zeros(8, 4) for _ in range(n_buffers)], count()
    return lambda write: lambda a, b: write(a, b, buffers[next(turns) % n_buffers])


@pytest.mark.parametrize("check", [multiply, is_right])
@pytest.mark.parametrize("n_buffers", [1, 3])
def test_a_missing_write_to_memory_that_is_given_again_is_found(n_buffers: int, check: Function):
    """Whether one buffer is given each time, or a few in turn; also of a first candidate that finds
    the answer there.
    """
    right, missing, half = map(pool(n_buffers), (out_function, out_nothing, out_half))
    runs = [*[right] * 2 * n_buffers, *[missing, right] * 2 * n_buffers, half]
    assert rights(Checker(check, right), runs, A, B) == [each is right for each in runs]
    right, missing = map(pool(1), (out_function, out_nothing))
    right(A, B)
    assert judge(Checker(check, missing), missing, A, B) != ""


def out_view(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.mm(a, b, out=out).view(-1).view(8, 4)


@pytest.mark.parametrize(
    "check",
    [
        multiply,
        out_function,
        lambda a, b, out: out.copy_(a @ b),
        matches(lambda a, b, out: out.zero_().addmm_(a, b)),
    ],
)
@pytest.mark.parametrize("right", [out_function, out_view])
def test_a_missing_write_to_an_argument_is_found(check: Function, right: Function):
    """Also where the reference has written the right answer there, which is undone; nothing beyond
    its end is written.
    """
    memory = torch.zeros(40)
    out, checker = memory[:32].view(8, 4), Checker(check, right)
    assert judge(checker, out_nothing, A, B, out).startswith("wrong by")
    assert judge(checker, right, A, B, out) == ""
    for _ in range(2):
        assert judge(checker, out_nothing, A, B, out).endswith("not written?")
        assert judge(checker, out_half, A, B, out).startswith(
            "16 of 32 elements are NaN, the first at [4, 0]"
        )
        assert judge(checker, right, A, B, out) == ""
    assert not memory[32:].any()


def out_five(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return out.fill_(5)


@pytest.mark.parametrize(
    ("check", "before", "candidates"),
    [
        pytest.param(
            is_right,
            torch.zeros(8, 4),
            [out_function, out_nothing, out_half, out_function],
            id="told by the first candidate",
        ),
        pytest.param(
            is_right,
            torch.zeros(8, 4),
            [out_nothing, out_nothing, out_function],
            id="nothing was right before",
        ),
        pytest.param(
            is_right,
            torch.zeros(8, 4),
            [out_function, out_five, out_function, out_nothing],
            id="after a wrong one",
        ),
        pytest.param(
            multiply, A @ B, [out_nothing, out_function], id="the first one finds the answer"
        ),
        pytest.param(
            multiply, A @ B, [out_half, out_function], id="the first one finds half of it"
        ),
    ],
)
@pytest.mark.parametrize("given", ["one", "new", "zeroed"])
def test_only_a_candidate_that_writes_its_output_is_right(
    check: Function, before: Tensor, candidates: list[Function], given: str
):
    """After any candidates, over any values in that memory; also where each run is given memory of
    its own, or zeros.
    """
    out, checker = before.clone(), Checker(check, out_function)
    gives = {"one": lambda: out, "new": before.clone, "zeroed": out.zero_}[given]
    for each in candidates:
        said = [run(checker, each, A, B, gives(), is_repeated=k > 0) for k in range(checker.n_runs)]
        assert any(said) == (each is not out_function)


def test_a_wrong_candidate_is_not_excused():
    """By what a wrong one before it did, by another output that is read, or by what it did not read
    itself.
    """
    out, n_runs, total = torch.zeros(8, 4), count(), torch.zeros(3)
    checker = Checker(multiply, out_function)
    assert judge(
        checker, lambda a, b, out: torch.mm(a, b, out=out).add_(next(n_runs)), A, B, out
    ).startswith("wrong by 1")
    assert rights(checker, [out_nothing], A, B, out.copy_(A @ B)) == [False]

    checker = Checker(
        lambda result, *args: is_right(result, *args) and not result[1].isnan().any(),
        lambda a, b, out, total: None,
    )
    runs = [
        lambda a, b, out, total: (torch.mm(a, b, out=out), torch.zeros(3)),
        lambda a, b, out, total: (out, total.add_(1)),
    ]
    assert rights(checker, runs, A, B, out, total) == [True, False]

    def function(a: Tensor, b: Tensor, out: Tensor) -> Any:
        return torch.mm(a, b, out=out), a + 1

    for wrong in (
        lambda a, b, out: (torch.mm(a, b, out=out), a + 2),
        lambda a, b, out: (out.fill_(5), a + 1),
    ):
        checker = Checker(lambda a, b, out: (a @ b, a + 1), function)
        assert rights(checker, [function, wrong, lambda a, b, out: (out, a + 1)], A, B, out) == [
            True,
            False,
            False,
        ]


def test_what_is_known_holds_for_calls_that_do_the_same():
    """Layers of a step have tensors of their own; a call with another flag may read what that one
    does not.
    """

    def function(a: Tensor, b: Tensor, out: Tensor, does_add: bool = False) -> Tensor:
        return out.addmm_(a, b) if does_add else torch.mm(a, b, out=out)

    checker = Checker(lambda result, a, b, out, does_add: not result.isnan().any(), function)
    for _ in range(2):
        assert judge(checker, function, A, B, torch.zeros(8, 4), False) == ""
    assert judge(checker, lambda a, b, out, does_add: out, A, B, torch.zeros(8, 4), False) != ""
    total = torch.ones(8, 4)
    assert judge(checker, function, A, B, total, True) == ""
    assert torch.allclose(total, 1 + A @ B, atol=1e-4)


def test_inference_tensors_and_leaves_can_be_outputs():
    """Autograd has no say in what is poisoned: versions do not count up."""
    with torch.inference_mode():
        made_there = torch.zeros(8, 4)
    for out in (made_there, torch.nn.Parameter(torch.zeros(8, 4))):
        checker, function = (
            Checker(multiply, out_function),
            torch.inference_mode()(lambda a, b, out: out.copy_(a @ b)),
        )
        assert judge(checker, function, A, B, out) == ""
        version = out.is_inference() or out._version
        assert judge(checker, out_nothing, A, B, out) != ""
        assert (out.is_inference() or out._version) == version
        assert judge(checker, function, A, B, out) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.complex64], ids=str)
def test_memory_that_nobody_holds_is_poisoned(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """What is allocated like the last result, before a run, is filled: first like what is expected,
    for what is left of the reference.
    """
    given, own = list[Tensor](), torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        made = own(*args, **kwargs)
        given.extend([made] * (made.dtype == torch.uint8))
        return made

    a, checker = torch.ones(33).to(dtype), Checker(lambda a: a + 1, lambda a: a)
    monkeypatch.setattr(torch, "empty", empty)
    for k in (1, 2):
        assert run(checker, lambda a: a + 1, a) == ""
        assert [each.numel() for each in given] == [33 * dtype.itemsize] * 2 * k
    values = torch.stack(given).view(dtype)
    assert (values < 0 if dtype == torch.int32 else values.isnan()).all()


# -- memory that is read, or that others hold ------------------------------------------------------


def picky(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    assert not out.isnan().any()
    return out + a @ b


def is_whole(result: Tensor, *args: Any) -> bool:
    """A check that lets an output be read: any finite values pass that are not all zero."""
    return bool(result.isfinite().all() and result.abs().sum() > 0)


@pytest.mark.parametrize(
    "check",
    [
        lambda a, b, out: out + a @ b,
        accumulate,
        lambda a, b, out: torch.addmm(out, a, b, out=out),
        picky,
        is_whole,
    ],
)
def test_an_argument_that_is_read_keeps_its_value(check: Function):
    """Accumulation: what is expected depends on what is there, so that is left alone, also by a
    reference, which may not take NaN.

    With a check the run that was given NaN is no verdict, and its value is put back; later ones are
    left alone.
    """
    out = torch.zeros(8, 4)
    checker = Checker(check, accumulate)
    for k in range(1, 7):
        assert run(checker, accumulate, A, B, out, is_repeated=k % 2 == 0) == ""
        assert torch.allclose(out, (k - (check is is_whole and k > 1)) * (A @ B), atol=1e-4)
    assert judge(checker, lambda a, b, out: out.mul_(0), A, B, out) != ""


def test_an_argument_that_a_reference_alone_reads_is_not_judged_by_it():
    """It multiplies what was there by zero; afterwards what is there is left alone."""
    checker = Checker(lambda a, b, out: out.mul_(0).add_(a @ b), out_function)
    assert rights(checker, [out_function, out_function, out_five], A, B, torch.zeros(8, 4)) == [
        True,
        True,
        False,
    ]


def test_an_output_that_is_zeroed_before_each_run_is_put_back():
    """Split products add up into zeros that ``reset`` has put there; the reference does not read
    them.
    """
    out = torch.zeros(8, 4)
    checker = Checker(multiply, accumulate)
    for _ in range(2):
        for is_repeated in (False, True):
            assert run(checker, accumulate, A, B, out.zero_(), is_repeated=is_repeated) == ""
            assert torch.allclose(out, A @ B, atol=1e-4) or (is_repeated and not out.any())
    assert judge(checker, out_nothing, A, B, out.zero_()) != ""


CACHE, KEY = torch.randn(4, 8), torch.randn(8)


def put(key: Tensor, cache: Tensor) -> Tensor:
    cache[2] = key
    return cache


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    "check",
    [
        lambda key, cache=CACHE: put(key, cache.clone()),
        lambda key, cache=CACHE: put(key, cache) if cache is not CACHE else put(key, CACHE.clone()),
        lambda result, *args: torch.equal(result[2], KEY) and not result.isnan().any(),
    ],
)
def test_a_cache_that_is_written_in_part_keeps_the_rest(check: Function, is_captured: bool):
    """Keys of one position are written, those of the others are results as well; the cache is
    passed, or in a closure.
    """
    cache = CACHE.clone()
    args = (KEY,) if is_captured else (KEY, cache)
    function: Function = (lambda key: put(key, cache)) if is_captured else put
    assert rights(Checker(check, function), [function] * 4, *args) == [True] * 4
    assert torch.equal(cache[[0, 1, 3]], CACHE[[0, 1, 3]])


@dataclass
class Context:
    inner: Any


@dataclass(slots=True)
class Slotted:
    inner: Any


@pytest.mark.parametrize(
    "wrap", [lambda t: Context([t]), lambda t: Context([Context({"t": [Slotted(t)]})])]
)
@pytest.mark.parametrize("how", ["argument", "closure", "method"])
def test_what_only_a_context_holds_is_left_alone(wrap: Function, how: str):
    """Peers write to symmetric memory at any time, so between two runs nobody fills it, at whatever
    depth it is held.
    """
    memory = torch.zeros(8, 4)
    context, hidden, seen = wrap(memory), SimpleNamespace(memory=memory), list[Tensor]()

    def function(a: Tensor, b: Tensor, given: Any = None) -> Tensor:
        seen.append(hidden.memory.clone())
        return torch.mm(a, b, out=hidden.memory)

    class Step:
        held = context
        __call__ = staticmethod(function)

    functions: dict[str, Function] = {
        "argument": function,
        "closure": lambda a, b: function(a, b, context),
        "method": Step(),
    }
    outer = functions[how]
    args = (context,) if how == "argument" else ()
    assert (
        rights(
            Checker(lambda result, *args: is_right(result, *args), outer), [outer] * 3, A, B, *args
        )
        == [True] * 3
    )
    assert not any(each.isnan().any() for each in seen)


def test_results_of_other_calls_are_not_poisoned():
    """Layers of one step: what one has returned is the next one's input, and kept for the backward
    pass.
    """
    weights = [torch.randn(4, 4) for _ in range(3)]

    def layer(x: Tensor, w: Tensor) -> Tensor:
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


def test_a_run_without_a_verdict_leaves_things_as_they_were():
    """It raised, or its check did: what was poisoned for it is put back, at the latest before the
    next run.
    """
    x, calls = torch.ones(4), []

    def check(result: Tensor, x: Tensor) -> bool:
        calls.append(x.isnan().any())
        if len(calls) == 2:
            raise KeyError("mine")
        return True

    checker = Checker(check, lambda x: x)
    assert run(checker, lambda x: x.add_(1), x) == ""
    with pytest.raises(KeyError):
        run(checker, lambda x: x, x, is_repeated=True)
    assert (bool(calls[1]), x.tolist()) == (True, [2.0] * 4)
    for _ in range(2):
        checker.begin((x,), {}, is_repeated=True)
        assert x.isnan().all()
    checker.restore()
    assert x.tolist() == [2.0] * 4


def test_integers_that_somebody_holds_are_never_poisoned():
    """They may be flags that a kernel waits for, or indices."""
    flags, out = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bool)
    checker = Checker(lambda result, flags, out: True, lambda flags, out: (flags, out))
    for _ in range(3):
        assert judge(checker, lambda flags, out: (flags, out), flags, out) == ""
        checker.begin((flags, out), {}, is_repeated=True)
        assert not flags.any()
        assert not out.any()


def test_nan_that_is_expected_is_no_poison():
    """It is the function's own; a missing write beside it is found."""

    def right(x: Tensor, out: Tensor) -> Tensor:
        return torch.where(torch.arange(4) == 0, torch.nan, 2 * x)

    def function(x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(right(x, out))

    x, out = torch.arange(4.0), torch.zeros(4)
    checker = Checker(matches(right), function)
    for k in range(4):  # zeroed as the closure does before its launch
        assert run(checker, function, x, out.zero_(), is_repeated=k % 2 > 0) == ""
        assert out.tolist()[1:] == ([0.0] * 3 if k % 2 else [2.0, 4.0, 6.0])
    assert judge(checker, lambda x, out: out, x, function(x, out)).startswith(
        "3 of 4 elements are NaN"
    )


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
    "argument": lambda x: (x + 1, x),
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
