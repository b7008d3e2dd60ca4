"""The check of what a tuned function or a script's run returns: by a check of the user's, or a
comparison with a reference.

Knows how to call checks and references, and nothing of candidates, ranks or times. A fast candidate
that writes nothing must not win because its memory still holds the last right answer, so that
memory is poisoned.
"""

from __future__ import annotations

import inspect
import math
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dist_tune.measure.differences import difference
from dist_tune.measure.inputs import RngState, ask, generators_in, name_of
from dist_tune.measure.memory import leaves_of, shares_memory, tensors_in, version_of
from dist_tune.measure.poison import Place, ResultMemory, n_nan
from dist_tune.measure.reachable import held_by
from dist_tune.validation import check_function

_VALUES = (int, float, complex, str, bytes, torch.dtype, torch.device)
"""Arguments that are equal by value; of others, objects that are one are the same."""


@dataclass(frozen=True)
class Matches:
    """A check: the result must be what ``reference`` returns for the same arguments.

    Made by ``matches``.
    """

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


def matches(
    reference: Callable[..., Any], *, rtol: float | None = None, atol: float | None = None
) -> Matches:
    """A check: the result must be what ``reference(*args, **kwargs)`` returns.

    Equal are nested tuples, lists and dicts of tensors with the same shapes and dtypes, where every
    element differs by at most ``atol + rtol * |expected|``. ``atol`` is ``rtol`` times the root
    mean square of what is expected, if it is not given; ``rtol`` is 4 units in the last place for
    16-bit floats, 1 for fp8, 1e-5 for float32 and 1e-12 for float64. Matrix products of float32 are
    TF32 in Triton, unless it is told otherwise, and need ``rtol=1e-3``. Integers and bools must be
    equal.

    Raises:
        TypeError: ``reference`` is no function.
        ValueError: a tolerance is negative, infinite or NaN.
    """
    check_function("reference", reference, "reference(*args, **kwargs)", is_needed=True)
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, need a number from 0")
    return Matches(reference, rtol, atol)


class Checker:
    """The check of one function in one tuning on one rank, candidate after candidate: ``begin``, a
    run, ``judge``.

    ``check`` is ``check(result, *args, **kwargs)``, which returns None or True, or returns False or
    raises AssertionError; or a reference, which takes what the function takes and returns what it
    should; or ``matches(reference)``. What its parameters allow decides which; where they allow
    both, it is a reference if its first parameter has the name of the function's first. A builtin,
    as ``torch.matmul``, is a reference.

    The first run of a candidate is judged as it is. Before its second one, memory of earlier
    results is poisoned also where it is held: in arguments and captured tensors, until a run was
    right without poison and wrong with it, or a reference reads it. That run is not judged.

    Of a function that ``is_alone`` all that it has returned is poisoned, flags and what objects
    hold, too, and it is called once more where only that tells whether it reads its outputs.
    """

    n_runs = 2
    """Runs of each candidate, the same on all ranks, since a check may be collective."""
    n_last = 1
    """Runs of the winner when the search is through, the same on all ranks."""
    judges_all = False
    """True if all that are left then have as many, and not the winner alone."""

    def __init__(
        self, check: Callable[..., Any], function: Callable[..., Any], *, is_alone: bool = False
    ) -> None:
        self._check = check
        self._function = function
        self._reference: Matches | None = None
        """The check, if it is a reference."""
        self._expected: list[Any] = []
        """Result that the reference returned for this call; empty before, and where it has read
        poison.
        """
        self._random = RngState()
        """Generators before it did: a run that is compared with it draws the same numbers."""
        self._call: _Call | None = None
        """The latest call, as it was left."""
        self._memory = ResultMemory(is_alone=is_alone)
        self._written_by_reference: set[str] = set()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_repeated: bool) -> None:
        """Before a run: poison the memory that results may lie in, and ask the reference what to
        expect.

        The reference runs once, if all runs are of one call with the same arguments; before each
        run, if a result is an argument. ``is_repeated``: the candidate has answered this call
        rightly before.

        Raises:
            TypeError: ``check`` takes neither the result and the arguments nor the arguments.
            Exception: errors of the reference.
        """
        with self._judging(args, kwargs) as before:
            self.restore()
            if self._call is None:
                self._reference = _as_reference(self._check, self._function, args, kwargs)
            call = _Call.of(args, kwargs)
            if self._call is None or call.form != self._call.form:
                self._memory.forget()
            if is_repeated:
                self._memory.poison_held(self._held(args, kwargs))
            is_known = (
                self._expected
                and self._call is not None
                and call.repeats(self._call)
                and not self._memory.outputs
            )
            if self._reference is not None and not is_known:
                self._random = before
                self._ask(self._reference.reference, args, kwargs)
            self._memory.poison_free(_tensors_of(self._expected))
        if self._reference is not None:
            self._random.restore()

    def judge(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """After a run: why ``result`` is wrong, with the size of the error, on one line; empty if
        it is right.

        Raises:
            TypeError: the check returned something that is neither None nor true or false.
            Exception: errors of the check other than AssertionError, and of a repeated run.
        """
        with self._judging(args, kwargs):

            def again() -> str:
                self._random.restore()
                return self._wrong(self._function(*args, **kwargs), args, kwargs)

            wrong = self._memory.resolve(
                self._wrong(result, args, kwargs), again, is_independent=self._reference is not None
            )
            self._memory.remember(_tensors_of(result), self._held(args, kwargs))
        return " ".join(wrong.split())

    @property
    def outputs(self) -> set[str]:
        """Names of arguments that the function may write: results are part of them, or the
        reference writes them, too.
        """
        return self._memory.outputs | self._written_by_reference

    def restore(self) -> None:
        """Put back what was poisoned for a run that ended without being judged.

        Called by the next ``begin``, too.
        """
        self._memory.restore()

    def _wrong(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if self._reference is None:
            return _answer_of(self._check, result, args, kwargs)
        if not self._expected:
            return ""
        expected = _tensors_of(self._expected)
        if any(shares_memory(tensor, expected) for tensor in _tensors_of(result)):
            names = (
                f"{name_of(self._function)} and its reference {name_of(self._reference.reference)}"
            )
            raise TypeError(
                f"{names} return the same memory, so nothing would ever be wrong: copy one of them"
            )
        return self._reference.difference(result, self._expected[0])

    def _held(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Place, torch.Tensor]:
        return {
            (leaf.kind, leaf.name): leaf.tensor for leaf in held_by(self._function, args, kwargs)
        }

    def _ask(
        self, reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Ask the reference what to expect.

        If it reads what is poisoned, so may the function: then this run is not judged.

        It is not asked again without poison, because a reference may be collective, and must run
        equally often on all ranks.
        """
        n_before = n_nan(_tensors_of(self._expected)) if self._memory.is_poisoned else 0
        self._expected.clear()
        try:
            self._expected.append(ask(reference, args, kwargs, self._written_by_reference))
        except Exception:
            if not self._memory.is_poisoned:
                raise
        if self._memory.is_poisoned and (
            not self._expected or n_nan(_tensors_of(self._expected)) > n_before
        ):
            self._memory.leave()
            self._expected.clear()

    @contextmanager
    def _judging(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[RngState]:
        """Without gradients, with the same random numbers afterwards, and with nothing poisoned
        after an error.
        """
        random = RngState(generators_in((args, kwargs)))
        try:
            with torch.no_grad():
                yield random
                self._call = _Call.of(args, kwargs)
        except BaseException:
            self.restore()
            raise
        finally:
            random.restore()


def _tensors_of(result: Any) -> list[torch.Tensor]:
    return list(tensors_in(result, has_fields=True).values())


class _Call(NamedTuple):
    """The arguments of a call, without keeping alive what they hold."""

    form: list[Any]
    """Path, type and plain value of each argument, which decide on the work: tensors may be others
    of their kind.
    """
    leaves: list[Any]
    versions: list[int | None]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Of the arguments as they are now."""
        leaves = list(leaves_of((args, kwargs)))
        form = [
            (path, type(leaf), leaf if isinstance(leaf, _VALUES) else None) for path, leaf in leaves
        ]
        tensors = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [_referred(leaf) for _, leaf in leaves if not isinstance(leaf, _VALUES)]
        return cls(form, others, [version_of(tensor) for tensor in tensors])

    def repeats(self, other: _Call) -> bool:
        """True if both were given the same.

        A tensor that torch has written to in between is another; what kernels write is not known.
        """
        is_same = all(
            mine is theirs for mine, theirs in zip(self.leaves, other.leaves, strict=False)
        )
        return is_same and self.form == other.form and self.versions == other.versions


def _referred(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:  # of plain values
        return value


def _as_reference(
    check: Callable[..., Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Matches | None:
    """A check as a reference, if it is one."""
    if isinstance(check, Matches):
        return check
    parameters = _signature(check.forward if isinstance(check, torch.nn.Module) else check)
    if parameters is None:  # an operator of torch: what looks at results is written in Python
        return Matches(check)
    is_check, is_reference = (
        _fits(parameters, (None, *args), kwargs),
        _fits(parameters, args, kwargs),
    )
    if not is_check and not is_reference:
        raise TypeError(
            f"{name_of(check)}{parameters} can be called neither as a check, with the result and"
            f" then {len(args)} positional arguments and {sorted(kwargs)}, nor as a reference,"
            " without the result"
        )
    if is_check and is_reference:
        own = _signature(function)
        is_reference = own is not None and next(iter(own.parameters), None) == next(
            iter(parameters.parameters), ""
        )
    return Matches(check) if is_reference else None


def _answer_of(
    check: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Reason of a user's check why the result is wrong; empty if it is right."""
    try:
        answer = check(result, *args, **kwargs)
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
            f"{frame.line} (line {frame.lineno})"
        ]
        return "; ".join(lines[:3])[:400]
    if answer is None:
        return ""
    is_one = (
        getattr(answer, "dtype", None) is not None
        and math.prod(answer.shape) == 1
        and "bool" in str(answer.dtype)
    )
    if not is_one and not isinstance(answer, bool):
        raise TypeError(
            f"the check {name_of(check)} returned {type(answer).__name__}, need None or a bool, or"
            " an AssertionError. If it returns what the result should be, say so:"
            f" matches({name_of(check)})"
        )
    return "" if bool(answer) else f"{name_of(check)} returned False"


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
