"""The check of what a tuned function or a script's run returns: by a check of the user's, or a comparison with a reference.

Knows tensors and the memory they lie in, and nothing of candidates, ranks or times. A fast candidate that writes nothing must not win
because its memory still holds the last right answer, so that memory is poisoned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from dist_tune.measure.compare import tensors_of
from dist_tune.measure.inputs import name_of
from dist_tune.measure.memory import Path, leaves_of, shares_memory, tensors_in, version_of
from dist_tune.measure.poison import ResultMemory
from dist_tune.measure.reference import Matches, answer_of, as_reference, ask
from dist_tune.measure.state import RngState, generators_in

_VALUES = (int, float, complex, str, bytes, torch.dtype, torch.device)
"""Arguments that are equal by value; of others, objects that are one are the same."""


class Checker:
    """The check of one function in one tuning on one rank, candidate after candidate: ``begin``, a run, ``judge``.

    ``check`` is ``check(result, *args, **kwargs)``, which returns None or True, or returns False or raises AssertionError; or a
    reference, which takes what the function takes and returns what it should; or ``matches(reference)``. What its parameters
    allow decides which; where they allow both, it is a reference if its first parameter has the name of the function's first.
    A builtin, as ``torch.matmul``, is a reference.

    The first run of a candidate is judged as it is. Before its second one, memory of earlier results is poisoned also where it is held: in
    arguments that a reference does not read, and in others until a run was right without poison and wrong with it. That run is not judged.

    A function that ``is_repeatable`` at will is repeated by ``judge`` instead, and all that it returned is poisoned before, flags and what
    objects hold, too. An element that it leaves as it was is wrong; memory that it reads is put back.
    """

    def __init__(self, check: Callable[..., Any], function: Callable[..., Any], *, is_repeatable: bool = False) -> None:
        self.n_runs = 1 if is_repeatable else 2
        """Runs of each candidate, the same on all ranks, since a check may be collective."""
        self._is_repeatable = is_repeatable
        self._before = RngState(), True
        """Generators before the run, and True if torch records gradients in it."""
        self._check = check
        self._function = function
        self._reference: Matches | None = None
        """The check, if it is a reference."""
        self._expected: list[Any] = []
        """Result that the reference returned for this call; empty before."""
        self._random = self._before[0]
        """Generators before it did: a run that is compared with it draws the same numbers."""
        self._call: _Call | None = None
        """The latest call, as it was left."""
        self._memory = ResultMemory()
        self._written_by_reference: set[Path] = set()
        self._has_asked_twice = False

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_repeated: bool) -> None:
        """Before a run: poison the memory that results may lie in, and ask the reference what to expect.

        The reference runs once, if all runs are of one call with the same arguments; before each run, if a result is an argument.
        ``is_repeated``: the candidate has answered this call rightly before.

        Raises:
            TypeError: ``check`` takes neither the result and the arguments nor the arguments.
            Exception: errors of the reference.
        """
        with self._judging(args, kwargs) as self._before:
            self.restore()
            if self._call is None:
                self._reference = as_reference(self._check, self._function, args, kwargs)
            call = _Call.of(args, kwargs)
            if self._call is None or not call.repeats(self._call):
                self._memory.forget(is_similar=self._call is not None and call.form == self._call.form)
                self._expected.clear()
            if self._reference is not None and (self._memory.outputs or not self._expected):
                self._expected = [ask(self._reference.reference, args, kwargs, self._written_by_reference)]
                self._random = self._before[0]
            if self._reference is not None and self._memory.outputs and not self._has_asked_twice:
                self._has_asked_twice = True
                self._find_read(self._reference, args, kwargs)
            if is_repeated:
                self._memory.poison_held(tensors_in((args, kwargs)), (args, kwargs, self._function))
            self._memory.poison_free(list(tensors_of(self._expected).values()))
        if self._reference is not None:
            self._random.restore()

    def judge(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """After a run: why ``result`` is wrong, with the size of the error, on one line; empty if it is right.

        Raises:
            TypeError: the check returned something that is neither None nor true or false.
            Exception: errors of the check other than AssertionError, and of a repeated run.
        """
        with self._judging(args, kwargs):
            results = list(tensors_of(result).values())
            wrong = self._wrong(result, args, kwargs)
            wrong = self._memory.resolve(results, wrong, is_independent=self._reference is not None)
            self._memory.remember(results, tensors_in((args, kwargs)))
            if self._is_repeatable and not wrong:
                del results
                wrong = self._repeat(result, args, kwargs)
        return " ".join(wrong.split())

    @property
    def outputs(self) -> set[Path]:
        """Positions of arguments that the function may write: results are part of them, or the reference writes them, too."""
        return self._memory.outputs.keys() | self._written_by_reference

    def restore(self) -> None:
        """Put back what was poisoned for a run that ended without being judged. Called by the next ``begin``, too."""
        self._memory.restore()

    def _wrong(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if self._reference is None:
            return answer_of(self._check, result, args, kwargs)
        expected = list(tensors_of(self._expected).values())
        if any(shares_memory(tensor, expected) for tensor in tensors_of(result).values()):
            names = f"{name_of(self._function)} and its reference {name_of(self._reference.reference)}"
            raise TypeError(f"{names} return the same memory, so nothing would ever be wrong: copy one of them")
        return self._reference.difference(result, self._expected[0])

    def _repeat(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why a function that was right is wrong when it is repeated, with poison in its memory and, if it may have read that, without."""

        def again() -> Any:
            random, has_grad = self._before
            random.restore()
            with torch.set_grad_enabled(has_grad):
                return self._function(*args, **kwargs)

        repeated, left = self._memory.repeat(again, result)
        if not left and not self._wrong(repeated, args, kwargs):
            self._memory.accept()
            return ""
        self.restore()
        wrong = "" if left else self._wrong(again(), args, kwargs)
        return left or (wrong and f"when repeated: {wrong}")

    def _find_read(self, matches: Matches, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Learn from the reference which outputs it reads, and so the function: what it expects changes with what lies there.

        A reference may be collective, and must run equally often on all ranks: once for each position, also where nothing lies.
        """
        for path in self._memory.outputs:
            self._memory.poison_held(tensors_in((args, kwargs)), (), only=path)
            self._random.restore()
            try:
                is_read = bool(matches.difference(ask(matches.reference, args, kwargs), self._expected[0]))
            except Exception:  # noqa: BLE001 - it has run before with the same arguments, so it is what it read that it does not take
                is_read = True
            self.restore()
            if is_read:
                self._memory.leave(path)

    @contextmanager
    def _judging(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[RngState, bool]]:
        """Without gradients, with the same random numbers afterwards, and with nothing poisoned after an error."""
        random, has_grad = RngState(generators_in((args, kwargs))), torch.is_grad_enabled()
        try:
            with torch.no_grad():
                yield random, has_grad
                # A call that is repeated at once holds what it needs, all memory of a script's run, until the next one.
                self._call = None if self._is_repeatable else _Call.of(args, kwargs)
        except BaseException:
            self.restore()
            raise
        finally:
            random.restore()


class _Call(NamedTuple):
    """The arguments of a call, without keeping tensors alive."""

    form: list[Any]
    """Path, type and plain value of each argument, which decide on the work: tensors may be others of their kind."""
    leaves: list[Any]
    versions: list[int | None]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Of the arguments as they are now."""
        leaves = list(leaves_of((args, kwargs)))
        form = [(path, type(leaf), leaf if isinstance(leaf, _VALUES) else None) for path, leaf in leaves]
        tensors = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)]
        kept = [weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves if not isinstance(leaf, _VALUES)]
        return cls(form, kept, [version_of(tensor) for tensor in tensors])

    def repeats(self, other: _Call) -> bool:
        """True if both were given the same. A tensor that torch has written to in between is another; what kernels write is not known."""
        is_same = all(mine is theirs for mine, theirs in zip(self.leaves, other.leaves, strict=False))
        return is_same and self.form == other.form and self.versions == other.versions
