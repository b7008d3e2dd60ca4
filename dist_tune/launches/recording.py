"""Launches of Triton's kernels: heard while they are made, recorded, and compiled ahead with other
configs.

Most functions pass the fields of their config on to a Triton kernel, under the same names; so one
recorded launch, with those fields exchanged, predicts what another config will compile. It can be
wrong where other arguments follow from the config, so each config is predicted from one of its
kind, if one has run. A prediction drops a config only where it comes true on some rank and some
rank cannot make that launch: it fails on all ranks where it comes true. Knows Triton's launches and
torch's operators; nothing of search or files.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from threading import get_ident
from typing import Any, NoReturn, TypeVar

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from dist_tune.compiler import SharedContext, replaced
from dist_tune.configs import FunctionConfig, kind_of
from dist_tune.errors import CommunicatesError
from dist_tune.measure import tensors_in
from dist_tune.ranks import is_symmetric

_MAX_OF_KERNEL = 2
"""Recorded launches of a kernel at one site, so that a loop does not hide the other kernels."""
_MAX_LAUNCHES = 8
"""Of one config of a function; each costs about 0.1 ms a candidate to ask for."""
_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")
"""Namespaces of torch's operators that other ranks take part in."""
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")

# -- what a thread hears ---------------------------------------------------------------------------

T = TypeVar("T")
Run = Callable[..., Any]
Around = Callable[[Run, Any, tuple[Any, ...], dict[str, Any]], Any]
"""``around(run, kernel, args, kwargs)``, in place of ``run(kernel, *args, **kwargs)``."""
_around: dict[int, list[Around]] = {}


def here(by_thread: Mapping[int, T]) -> T | None:
    """What the calling thread has there; one that Python did not start, as autograd's in a backward
    pass, what the only one has.
    """
    mine = by_thread.get(get_ident())
    if (
        mine is None
        and len(by_thread) == 1
        and isinstance(threading.current_thread(), threading._DummyThread)
    ):
        return next(iter([*by_thread.values()]), None)
    return mine


@contextmanager
def around_launches(around: Around) -> Iterator[None]:
    """Call ``around`` in place of each launch that is made in this block, also by autograd's
    threads; the innermost block's first.
    """
    with _launches():
        mine = _around.setdefault(get_ident(), [])
        mine.append(around)
        try:
            yield
        finally:
            mine.pop()
            if not mine:
                del _around[get_ident()]


def _heard_run(run: Run) -> Run:
    def within(run: Run, around: Around) -> Run:
        return lambda kernel, /, *args, **kwargs: around(run, kernel, args, kwargs)

    # An argument may be named so, too.
    def launch(kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
        return reduce(within, [] if kwargs.get("warmup") else here(_around) or [], run)(
            kernel, *args, **kwargs
        )

    return launch


@contextmanager
def _heard_launches() -> Iterator[None]:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    with ExitStack() as stack:
        for cls in (
            JITFunction,
            *([interpreter.InterpretedFunction] if interpreter is not None else []),
        ):
            stack.enter_context(replaced(cls, "run", _heard_run))
        yield


# Shared, because a second thread that makes a first call would put back the first one's wrapper.
_launches = SharedContext(_heard_launches)

# -- recorded launches -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor as far as Triton's compiler knows it, without its memory."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Address of the tensor, whose alignment is compiled in."""
        return self.address


class RecordedLaunch(triton.Config):  # type: ignore[misc]  # untyped
    """A kernel's launch inside a function, as it was made with one of its configs, or as predicted
    for one. A ``Compilable`` for itself.

    As a ``triton.Config`` it has the ints that are compiled in, by which the compiler estimates its
    cost.
    """

    def __init__(
        self, label: str, candidate: int, kernel: Any, given: dict[str, Any], n_args: int
    ) -> None:
        """``label``: of the function's site.

        ``given``: arguments and options, those by position first, with pointers for tensors.
        """
        self.label, self.candidate, self.kernel, self.given, self.n_args = (
            label,
            candidate,
            kernel,
            given,
            n_args,
        )
        ints = {name: value for name, value in given.items() if type(value) is int}
        constants = {
            param.name: ints[param.name]
            for param in kernel.params
            if param.is_constexpr and param.name in ints
        }
        super().__init__(constants, **{name: ints[name] for name in _OPTIONS if name in ints})

    @staticmethod
    def compile(launch: RecordedLaunch) -> Any:
        """Triton's compiled kernel for the launch, not launched."""
        given = dict(launch.given)
        args = [given.pop(name) for name in launch.kernel.arg_names[: launch.n_args]]
        return launch.kernel.run(*args, **{**given, "warmup": True})

    def is_like(self, other: RecordedLaunch) -> bool:
        """True for a launch with the same constants and options, and arguments that Triton compiles
        alike.
        """
        mine, theirs = self.given, other.given
        if other.kernel is not self.kernel or mine.keys() != theirs.keys():
            return False
        values = {param.name for param in self.kernel.params if not param.is_constexpr}
        return all(
            (
                _kind(mine[name]) == _kind(theirs[name])
                if name in values
                else is_same(mine[name], theirs[name])
            )
            for name in mine
        )


class PredictedFailureError(triton.OutOfResources):  # type: ignore[misc]  # untyped
    """Raised in place of a launch that some rank cannot make."""

    __init__ = Exception.__init__  # with the reason alone
    __str__ = Exception.__str__


class LaunchRecorder:
    """Records launches of kernels while a function runs on this thread, and ends those that are
    predicted to fail.
    """

    def __init__(self, under_way: Sequence[tuple[str, int]]) -> None:
        """``under_way``: functions that run now, the outermost first: label of the site, and
        candidate.
        """
        self._under_way = under_way
        self.launches: defaultdict[tuple[str, int], list[RecordedLaunch]] = defaultdict(list)
        """By site and candidate, in their order."""
        self.failures: list[tuple[RecordedLaunch, str]] = []
        """Launches that some rank cannot make, and why."""

    def record(self, run: Run, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a launch, and record it; to be given to ``around_launches``."""
        if self._under_way and isinstance(kernel, JITFunction):
            at = self._under_way[-1]
            # A grid may hold tensors, too.
            given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs, "grid": None}
            launch = RecordedLaunch(
                *at,
                kernel,
                {name: _without_memory(value) for name, value in given.items()},
                len(args),
            )
            mine = self.launches[at]
            if (
                len(mine) < _MAX_LAUNCHES
                and sum(each.kernel is kernel for each in mine) < _MAX_OF_KERNEL
            ):
                mine.append(launch)
            for each, reason in self.failures:
                if (each.label, each.candidate) == at and each.is_like(launch):
                    raise PredictedFailureError(reason)
        return run(kernel, *args, **kwargs)


class _Watch(TorchDispatchMode):
    """Calls ``_refuse`` before a collective of torch's."""

    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def _see(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVE:
            self._refuse(f"calls {func.namespace}.{func._schema.name.partition('::')[2]}")
        return func(*args, **(kwargs or {}))


# Not in the class, because torch then imports Dynamo, which takes seconds.
_Watch.__torch_dispatch__ = _Watch._see  # type: ignore[assignment, method-assign]


@contextmanager
def refusing_talk(name: str) -> Iterator[None]:
    """End a run of this thread before it communicates with other ranks, with a
    ``CommunicatesError`` that has the problem's name.
    """

    def refuse(what: str) -> NoReturn:
        raise CommunicatesError(
            f"{name} {what}, and so communicates with other ranks, which would not take part while"
            " one rank tunes it alone: use "
            f'mode="merge", in which all ranks tune one problem together'
        )

    def record(run: Run, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(map(is_symmetric, tensors_in((args, kwargs)).values())):
            refuse(f"gives symmetric memory to {kernel.fn.__qualname__}")
        return run(kernel, *args, **kwargs)

    with around_launches(record), _Watch(refuse):
        yield


def _without_memory(value: Any) -> Any:
    """An argument as far as the compiler needs it."""
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, value.data_ptr())
    if isinstance(value, tuple):
        parts = [_without_memory(each) for each in value]
        # Else it may be a value of the config's.
        if any(part is not each for part, each in zip(parts, value, strict=True)):
            return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    if isinstance(getattr(value, "base", None), torch.Tensor) and hasattr(value, "block_shape"):
        value = copy.copy(value)  # a hook may write to it, too
        value.base = _without_memory(value.base)
    return value


def _kind(value: Any) -> object:
    if hasattr(value, "block_shape") and hasattr(value, "base"):
        return (
            getattr(value.base, "dtype", None),
            getattr(value, "layout", None),
            *value.block_shape,
        )
    if isinstance(value, tuple):
        return type(value), *map(_kind, value)
    if isinstance(value, Pointer):
        return value.dtype, value.address % 16 == 0
    return (
        (int, value == 1, value % 16 == 0, value.bit_length() > 31)
        if type(value) is int
        else type(value)
    )


def is_same(value: object, other: object) -> bool:
    """True for one object, or equal plain values of one type."""
    return value is other or (
        type(value) is type(other)
        and isinstance(value, bool | int | float | str)
        and value == other
    )


def predict(
    candidates: Sequence[FunctionConfig],
    texts: Sequence[str],
    ran: Mapping[int, Sequence[RecordedLaunch]],
    wanted: Collection[int],
) -> dict[int, list[RecordedLaunch]]:
    """What the ``wanted`` candidates of a function launch: what one did if it ran, or else as the
    last of its kind, or the first of all.

    ``texts``: of the candidates. ``ran``: candidate -> its launches, in their order. Launches that
    show no value of their config are left out, and those with descriptors for which a config's hook
    fails: it may want more than the kernel's arguments.
    """
    kinds, fields = [kind_of(text) for text in texts], [_fields(config) for config in candidates]
    hooks: list[Any] = [
        next((each.pre_hook for each in config.values() if isinstance(each, triton.Config)), None)
        for config in candidates
    ]
    shown = {
        i: [(launch, found) for launch in launches if (found := _followed(launch, fields[i]))]
        for i, launches in ran.items()
    }
    last, first = (
        {kinds[i]: launches for i, launches in shown.items()},
        next(iter(shown.values()), []),
    )
    predicted: dict[int, list[RecordedLaunch]] = {}
    for i in sorted(wanted):
        for each, followed in shown.get(i, last.get(kinds[i], first)):
            values = _exchanged(each, followed, fields[i], is_hooked=None not in hooks)
            if values is not None:
                given = {**each.given, **values}
                if hooks[i] is not None and any(
                    hasattr(value, "block_shape") for value in given.values()
                ):
                    try:
                        hooks[i](given)
                    except Exception:  # noqa: BLE001  # the user's; where the function calls it, an error counts
                        continue
                predicted.setdefault(i, []).append(
                    RecordedLaunch(each.label, i, each.kernel, given, each.n_args)
                )
    return predicted


def _followed(launch: RecordedLaunch, fields: Mapping[str, Any]) -> dict[str, str]:
    """Kernel's argument -> the field of the launch's own config that it shows."""
    names = {name.lower(): name for name in fields}
    # No others are exchanged: a default that is spelled out makes another key for Triton.
    return {
        name: field
        for name, value in launch.given.items()
        if (field := names.get(name.lower())) and is_same(value, fields[field])
    }


def _exchanged(
    launch: RecordedLaunch,
    followed: Mapping[str, str],
    fields: Mapping[str, Any],
    *,
    is_hooked: bool,
) -> dict[str, Any] | None:
    """What a launch with the ``fields`` of another config has in place of its own values.

    A size of a descriptor's block is that of the constant with its value. None if two constants
    have it that now differ, or if a layout follows from a block that changes, as in Gluon.
    ``is_hooked``: hooks of all configs set the blocks; they get copies to write to.
    """
    given, values = (
        launch.given,
        {name: fields.get(field, launch.given[name]) for name, field in followed.items()},
    )
    constants = (
        []
        if is_hooked
        else [
            param.name
            for param in launch.kernel.params
            if param.is_constexpr and param.name in followed
        ]
    )
    for name, value in given.items():
        if hasattr(value, "block_shape"):
            block: list[Any] = []
            for size in value.block_shape:
                first, *others = [
                    values[constant] for constant in constants if is_same(given[constant], size)
                ] or [size]
                if any(not is_same(first, other) for other in others):
                    return None
                block.append(first)
            if hasattr(value, "layout") and block != [*value.block_shape]:
                return None
            values[name] = copy.copy(value)
            values[name].block_shape = block
    return values


def _fields(config: FunctionConfig) -> dict[str, Any]:
    """All values of a config, those of a ``triton.Config`` in it by their own names."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        fields |= value.all_kwargs() if isinstance(value, triton.Config) else {name: value}
    return fields
