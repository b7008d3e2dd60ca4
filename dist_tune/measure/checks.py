"""Whether what a tuned function returns is right: a check of the user's, or a comparison with a reference.

Knows tensors and the memory they lie in, and nothing of candidates, ranks or times. A fast candidate that writes nothing
must not win because its memory still holds the last right answer, so that memory is spoiled before each run.
"""

from __future__ import annotations

import inspect
import math
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dist_tune.measure.compare import difference
from dist_tune.measure.reference import ask
from dist_tune.measure.result_memory import Place, ResultMemory
from dist_tune.measure.rng import RngState
from dist_tune.measure.tensor_memory import is_one_of, leaves_of, tensors_in, version_of

_VALUES = (int, float, complex, str, bytes, torch.dtype, torch.device)
_MAX_ASKED = 8
"""Outputs up to which a reference is asked about each; about more, it is asked once."""


@dataclass(frozen=True)
class Matches:
    """A check: the result must be what ``reference`` returns for the same arguments. Made by ``matches``."""

    reference: Callable[..., Any]
    rtol: float | None = None
    atol: float | None = None

    def __call__(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """Raise ``AssertionError``, saying where and by how much ``result`` is wrong."""
        with torch.no_grad():
            if wrong := self.difference(result, self.reference(*args, **kwargs)):
                raise AssertionError(wrong)

    def difference(self, result: Any, expected: Any) -> str:
        """Why ``result`` is wrong; empty if it is right."""
        return difference(result, expected, self.rtol, self.atol)


def matches(reference: Callable[..., Any], *, rtol: float | None = None, atol: float | None = None) -> Matches:
    """A check: the result must be what ``reference(*args, **kwargs)`` returns.

    Equal are nested tuples, lists and dicts of tensors with the same shapes and dtypes, where every element differs by at most
    ``atol + rtol * |expected|``. ``atol`` is ``rtol`` times the root mean square of what is expected, if it is not given; ``rtol`` is 4
    units in the last place for 16-bit floats, 1 for fp8, 1e-5 for float32 and 1e-12 for float64. Matrix products of float32 are
    TF32 in Triton, unless it is told otherwise, and need ``rtol=1e-3``. Integers and bools must be equal.

    Raises:
        ValueError: a tolerance is negative, infinite or NaN.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, need a number from 0")
    return Matches(reference, rtol, atol)


class Checker:
    """Whether what a function returns is right, candidate after candidate; one per tuning and rank.

    ``check`` is ``check(result, *args, **kwargs)``, which returns None or True, or returns False or raises AssertionError; or a
    reference, which takes what the function takes and returns what it should; or ``matches(reference)``. What its parameters
    allow decides which; where they allow both, it is a reference if its first parameter has the name of the function's first.
    A builtin, as ``torch.matmul``, is a reference.

    Attributes:
        n_runs: how often each candidate runs: in the second run its memory may be spoiled on a better ground.
        wants_rerun: whether the last run says little, though its verdict is empty: what is right may have stood in memory before. A
            second run of the same candidate tells.
    """

    n_runs = 2

    def __init__(self, check: Callable[..., Any], function: Callable[..., Any]) -> None:
        self.wants_rerun = False
        self._check = check
        self._function = function
        self._matches: Matches | None = None
        self._expected: list[Any] = []
        """What the reference returned for this call; empty before."""
        self._call: _Call | None = None
        self._memory = ResultMemory()
        self._is_decided = self._was_right = self._has_asked_twice = False

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a run: ask the reference what to expect, and spoil the memory that results may lie in.

        The reference runs once, if all runs are of one call with the same arguments; before each run, if a result is an argument.

        Raises:
            TypeError: ``check`` takes neither the result and the arguments nor the arguments.
            Exception: whatever the reference raises.
        """
        with torch.no_grad(), _same_random(), self._restored_after_errors():
            self.restore()
            if not self._is_decided:
                self._matches = self._as_reference(args, kwargs)
                self._is_decided = True
            call = _Call(args, kwargs)
            if self._call is None or not call.repeats(self._call):
                self._memory.forget(is_similar=self._call is not None and call.resembles(self._call))
                self._expected.clear()
            arguments = tensors_in((args, kwargs))
            if self._matches is not None and (self._memory.outputs or not self._expected):
                self._expected = [ask(self._matches.reference, args, kwargs)]
            held = self._memory.held(arguments, (args, kwargs, self._function))
            if self._matches is not None and self._memory.outputs and not self._has_asked_twice:
                self._has_asked_twice = True
                self._find_read(self._matches, held, args, kwargs)
            if self._was_right:
                self._memory.spoil(held)
            self._memory.spoil_free(list(tensors_in(self._expected).values()))
            self._call = _Call(args, kwargs)

    def verdict(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """After a run: why ``result`` is wrong, with the size of the error, on one line; empty if it is right.

        Raises:
            TypeError: the check returned something that is neither None nor true or false.
            Exception: whatever the check raises, other than AssertionError.
        """
        with torch.no_grad(), _same_random(), self._restored_after_errors():
            results, arguments = list(tensors_in(result).values()), tensors_in((args, kwargs))
            wrong = self._judge(result, results, args, kwargs)
            wrong, is_unsure = self._memory.settle(results, wrong, is_independent=self._matches is not None)
            self._memory.remember(results, arguments)
            self._was_right |= not wrong
            self.wants_rerun = is_unsure or (not wrong and self._memory.has_untried(arguments))
            self._call = _Call(args, kwargs)
        return " ".join(wrong.split())

    def restore(self) -> None:
        """Put back what was spoiled for a run that ended without a verdict. Called by the next ``begin``, if by nobody else."""
        self._memory.restore()

    def _judge(self, result: Any, results: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if self._matches is None:
            return _asked(self._check, result, args, kwargs)
        expected = list(tensors_in(self._expected).values())
        if any(is_one_of(tensor, expected) for tensor in results):
            raise TypeError(
                f"{_name(self._function)} and its reference {_name(self._matches.reference)} return the same memory: copy one of them"
            )
        return self._matches.difference(result, self._expected[0])

    def _find_read(self, reference: Matches, held: list[Place], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Learn from the reference which outputs it reads, and so the function: what it expects changes with what lies there.

        A reference may be collective, and must run equally often on all ranks: once for each position, also where nothing lies.
        """
        positions = list(self._memory.outputs)
        for group in [[each] for each in positions] if len(positions) <= _MAX_ASKED else [positions]:
            places = [place for place in held if place.key in group]
            self._memory.spoil(places)
            try:
                again = ask(reference.reference, args, kwargs)
                is_read = bool(reference.difference(again, self._expected[0]))
            except Exception:  # noqa: BLE001 - it has run before with the same arguments, so it is what it read that it does not take
                is_read = True
            finally:
                self.restore()
            if is_read:
                self._memory.leave(places)

    @contextmanager
    def _restored_after_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def _as_reference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Matches | None:
        """The check as a reference, if it is one."""
        if isinstance(self._check, Matches):
            return self._check
        parameters = _signature(self._check.forward if isinstance(self._check, torch.nn.Module) else self._check)
        if parameters is None:  # an operator of torch: what looks at results is written in Python
            return Matches(self._check)
        is_check, is_reference = _fits(parameters, (None, *args), kwargs), _fits(parameters, args, kwargs)
        if not is_check and not is_reference:
            raise TypeError(
                f"{_name(self._check)}{parameters} can be called neither as a check, with the result and then {len(args)} positional "
                f"arguments and {sorted(kwargs)}, nor as a reference, without the result"
            )
        if is_check and is_reference:
            function = _signature(self._function)
            is_reference = function is not None and next(iter(function.parameters), None) == next(iter(parameters.parameters), "")
        return Matches(self._check) if is_reference else None


class _Call:
    """What a call was given: which tensors, in which state, without keeping them alive."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves = {path: _mark(leaf) for path, leaf in leaves_of((args, kwargs))}

    def repeats(self, other: _Call) -> bool:
        """Whether both were given the same. A tensor that torch has written to in between is another; what kernels write is not known."""
        mine, theirs = self._leaves, other._leaves
        return mine.keys() == theirs.keys() and all(_is_same(leaf, theirs[path]) for path, leaf in mine.items())

    def resembles(self, other: _Call) -> bool:
        """Whether both do the same with what they are given: the tensors may be others, and objects others of their kind."""
        mine, theirs = self._leaves, other._leaves
        return mine.keys() == theirs.keys() and all(
            type(leaf) is type(theirs[path]) and (not isinstance(leaf, _VALUES) or leaf == theirs[path]) for path, leaf in mine.items()
        )


def _mark(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return weakref.ref(leaf), version_of(leaf)


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):  # a tensor, and how often it was written to
        return a[0]() is b[0]() and a[1] == b[1]
    return a is b or (type(a) is type(b) and isinstance(a, _VALUES) and bool(a == b))


def _asked(check: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What a check of the user's says."""
    try:
        answer = check(result, *args, **kwargs)
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [f"{frame.line} (line {frame.lineno})"]
        return "; ".join(lines[:3])[:400]
    if answer is None:
        return ""
    is_one = getattr(answer, "dtype", None) is not None and math.prod(answer.shape) == 1 and "bool" in str(answer.dtype)
    if not is_one and not isinstance(answer, bool):
        raise TypeError(
            f"the check {_name(check)} returned {type(answer).__name__}, need None or a bool, or an AssertionError. If it returns what "
            f"the result should be, say so: matches({_name(check)})"
        )
    return "" if bool(answer) else f"{_name(check)} returned False"


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]


@contextmanager
def _same_random() -> Iterator[None]:
    state = RngState()
    try:
        yield
    finally:
        state.restore()


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def _fits(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
