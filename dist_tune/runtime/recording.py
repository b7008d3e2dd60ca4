"""Launches of Triton's kernels, recorded while they are made or in place of them, and compiled ahead with other configs.

All but the launches of a dry run is done, with outputs of any content, so a dry run is for code that does not wait for the results of
kernels. Most functions pass the fields of their config on to a Triton kernel, under the same names; so one recorded launch, with those
fields exchanged, predicts what every other config will compile. The prediction can be wrong where other arguments follow from the config,
so it drops no config: a launch that does not compile or load fails when it is made after all, on all ranks alike.
Knows Triton's launches and torch's operators; nothing of search or files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from dist_tune.compiler import replaced
from dist_tune.configs import FunctionConfig
from dist_tune.distributed import is_symmetric
from dist_tune.errors import CommunicatesError
from dist_tune.measure import RngState, tensors_in

_MAX_OF_KERNEL = 2
"""Recorded launches of a kernel at one site, so that a loop does not hide the other kernels."""
_MAX_OF_DRY_RUN = 64
"""Launches of a dry run, which ends there: a loop that waits for a kernel's result has no other end."""
_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")
"""Namespaces of torch's operators that other ranks take part in."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor as far as Triton's compiler knows it, without its memory."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Address of the tensor, whose alignment is compiled in."""
        return self.address


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """A kernel's launch inside a function."""

    label: str
    """The function's site."""
    candidate: int
    kernel: Any
    args: tuple[Any, ...]
    """With pointers in place of tensors."""
    kwargs: dict[str, Any]

    @property
    def given(self) -> dict[str, Any]:
        """All arguments and options by name."""
        return {**dict(zip(self.kernel.arg_names, self.args, strict=False)), **self.kwargs}


@dataclass(frozen=True, slots=True)
class PredictedFailure:
    """A launch that some rank cannot make."""

    kernel: Any
    given: dict[str, Any]
    """Arguments and options by name."""
    reason: str
    """With the rank."""

    def is_of(self, launch: RecordedLaunch) -> bool:
        """True for a launch with the same constants and options, and arguments of the same kinds."""
        mine, theirs = self.given, launch.given
        if launch.kernel is not self.kernel or mine.keys() != theirs.keys():
            return False
        values = {each.name for each in self.kernel.params if not each.is_constexpr}
        return all(_kind(mine[name]) == _kind(theirs[name]) if name in values else is_same(mine[name], theirs[name]) for name in mine)


class PredictedFailureError(triton.OutOfResources):  # type: ignore[misc]  # untyped
    """Raised in place of a launch that some rank cannot make."""

    __init__ = Exception.__init__  # with the reason alone
    __str__ = Exception.__str__


class LaunchRecorder:
    """Records launches of kernels while a function runs on this thread, and ends those that are predicted to fail."""

    def __init__(self) -> None:
        self.launches: list[RecordedLaunch] = []
        self.failures: dict[tuple[str, int], list[PredictedFailure]] = {}
        """(site, candidate) -> launches that fail."""
        self._at: tuple[str, int] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record launches of this thread inside ``running``."""
        with _before_launches(self._note):
            yield

    @contextmanager
    def running(self, label: str, candidate: int) -> Iterator[None]:
        """The function of a site runs with one of its configs."""
        before, self._at = self._at, (label, candidate)
        try:
            yield
        finally:
            self._at = before

    def _note(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._at is None:
            return True
        launch = _recorded(*self._at, kernel, args, kwargs)
        for each in self.failures.get(self._at, ()):
            if each.is_of(launch):
                raise PredictedFailureError(each.reason)
        if sum(each.label == launch.label and each.kernel is kernel for each in self.launches) < _MAX_OF_KERNEL:
            self.launches.append(launch)
        return True


class _Ended(BaseException):
    """Ends a dry run; not an ``Exception``, which the run may catch."""


class Watch(TorchDispatchMode):
    """Ends a run before its first collective, with a ``CommunicatesError``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def see(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operator."""
        if func.namespace in _COLLECTIVE:
            raise self.refusal(f"calls {func.namespace}.{func._schema.name.partition('::')[2]}")
        return func(*args, **(kwargs or {}))

    def refusal(self, what: str) -> CommunicatesError:
        """The error of a run that does ``what``."""
        return CommunicatesError(
            f"{self._name} {what}, and so communicates with other ranks, which would not take part while one rank tunes it alone: use "
            f'mode="merge", in which all ranks tune one problem together'
        )


# Not in the class, because torch then imports Dynamo, which takes seconds.
Watch.__torch_dispatch__ = Watch.see  # type: ignore[assignment, method-assign]


@contextmanager
def refusing_talk(name: str) -> Iterator[None]:
    """End a run of this thread before it communicates with other ranks, with a ``CommunicatesError`` that has the problem's name."""
    watch = Watch(name)

    def note(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if any(map(is_symmetric, tensors_in((args, kwargs)).values())):
            raise watch.refusal(f"gives symmetric memory to {kernel.fn.__qualname__}")
        return True

    with _before_launches(note), watch:
        yield


def dry_run(run: Callable[[], Any], label: str, candidate: int) -> list[RecordedLaunch]:
    """The launches of a run with a candidate of site ``label``, which are not made.

    Kernels of ``triton.autotune`` are left out, because their config is not known.

    Raises:
        Exception: from the run, possibly only because nothing was computed.
    """
    launches: list[RecordedLaunch] = []
    ident, state = get_ident(), RngState()

    def note(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        launches.append(_recorded(label, candidate, kernel, args, kwargs))
        if len(launches) >= _MAX_OF_DRY_RUN:
            raise _Ended
        return False

    def skip(run: Callable[..., object]) -> Callable[..., object]:
        return lambda tuner, *args, **kwargs: None if get_ident() == ident else run(tuner, *args, **kwargs)

    try:
        with suppress(_Ended), _before_launches(note), replaced(Autotuner, "run", skip):
            run()
    finally:
        state.restore()
    return launches


@contextmanager
def _before_launches(note: Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]) -> Iterator[None]:
    """Call ``note(kernel, args, kwargs)`` before each launch of this thread, which is made if it returns True."""
    ident = get_ident()

    def wrap(run: Callable[..., object]) -> Callable[..., object]:
        def noted(kernel: Any, *args: Any, **kwargs: Any) -> object:
            is_made = get_ident() != ident or kwargs.get("warmup") or note(kernel, args, kwargs)
            return run(kernel, *args, **kwargs) if is_made else None

        return noted

    with replaced(JITFunction, "run", wrap):
        yield


def _recorded(label: str, candidate: int, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedLaunch:
    given = {name: _without_memory(value) for name, value in kwargs.items()} | {"grid": None}  # which may hold tensors, too
    return RecordedLaunch(label, candidate, kernel, tuple(map(_without_memory, args)), given)


def _without_memory(value: Any) -> Any:
    """An argument as far as the compiler needs it."""
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, value.data_ptr())
    if isinstance(getattr(value, "base", None), torch.Tensor) and hasattr(value, "block_shape"):
        value = copy.copy(value)  # a hook may write to it, too
        value.base = _without_memory(value.base)
    return value


def _kind(value: object) -> object:
    return value.dtype if isinstance(value, Pointer) else type(value)


def is_same(value: object, other: object) -> bool:
    """True for one object, or equal plain values of one type."""
    return value is other or (type(value) is type(other) and isinstance(value, bool | int | float | str) and value == other)


_MAX_LAUNCHES = 8
"""Of one function; each costs about 0.1 ms a candidate to ask for."""
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


class LaunchConfig(triton.Config):  # type: ignore[misc]  # untyped
    """A recorded launch with other values of some arguments."""

    def __init__(self, launch: RecordedLaunch, changed: dict[str, Any], hook: Any = None) -> None:
        self.launch = launch
        self.kernel = launch.kernel
        self.changed = changed
        """Kernel's argument or option -> value. No others: a default that is spelled out makes another key in Triton's memory."""
        options = {name: value for name, value in changed.items() if name in _OPTIONS}
        super().__init__({name: value for name, value in changed.items() if name not in _OPTIONS}, pre_hook=hook, **options)

    @property
    def given(self) -> dict[str, Any]:
        """All arguments and options by name."""
        return {**self.launch.given, **self.changed}


class RecordedKernel:
    """The kernels of recorded launches. A ``Compilable``."""

    def compile(self, config: LaunchConfig) -> Any:
        """Triton's compiled kernel for the launch, not launched."""
        launch, given = config.launch, config.given
        if config.pre_hook is not None and _has_descriptor(launch):
            config.pre_hook(given)
        args = [given.pop(name) for name in config.kernel.arg_names[: len(launch.args)]]
        return config.kernel.run(*args, **{**given, "warmup": True})


@dataclass(frozen=True, slots=True)
class Precompile:
    """Candidates of a function's site at its launches."""

    label: str
    """The function's site and the kernel, in place of a site's label."""
    kernel: str
    configs: list[LaunchConfig]
    """Launches to compile."""
    function: str
    """The function's site."""
    candidates: Sequence[int]
    """The function's candidate of each launch."""


def precompiles(function: str, candidates: Sequence[FunctionConfig], launches: Sequence[RecordedLaunch]) -> list[Precompile]:
    """The launches of all candidates of a function's site, as far as recorded ones predict them."""
    found: list[Precompile] = []
    launches = [each for each in launches if each.label == function][:_MAX_LAUNCHES]
    if not launches:
        return []
    fields = [_fields(config) for config in candidates]
    hooks = [_hook(config) for config in candidates]
    for each in launches:
        mine, given = fields[each.candidate], each.given
        names = {name.lower(): name for name in mine}
        # Kernel's argument -> field of the config.
        followed = {name: field for name, value in given.items() if (field := names.get(name.lower())) and is_same(value, mine[field])}
        if not followed or (_has_descriptor(each) and None in hooks):
            continue
        configs = [
            LaunchConfig(each, {name: one.get(field, given[name]) for name, field in followed.items()}, hook)
            for one, hook in zip(fields, hooks, strict=True)
        ]
        kernel = each.kernel.fn.__qualname__.rpartition("<locals>.")[2]
        found.append(Precompile(f"{function} > {len(found)}.{kernel}", kernel, configs, function, range(len(configs))))
    return found


def as_recorded(function: str, launches: Sequence[RecordedLaunch]) -> Precompile:
    """The launches of dry runs with candidates of a function's site, as they will be made."""
    # Constants that are given again change nothing but the estimate of the compile cost.
    configs = [LaunchConfig(each, {name: value for name, value in each.kwargs.items() if type(value) is int}) for each in launches]
    return Precompile(
        f"{function} > dry runs", launches[0].kernel.fn.__qualname__, configs, function, [each.candidate for each in launches]
    )


def _fields(config: FunctionConfig) -> dict[str, Any]:
    """All values of a config, those of a ``triton.Config`` in it by their own names."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        fields |= value.all_kwargs() if isinstance(value, triton.Config) else {name: value}
    return fields


def _hook(config: FunctionConfig) -> Any:
    return next((value.pre_hook for value in config.values() if isinstance(value, triton.Config)), None)


def _has_descriptor(launch: RecordedLaunch) -> bool:
    return any(hasattr(value, "block_shape") for value in (*launch.args, *launch.kwargs.values()))
