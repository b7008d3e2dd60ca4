"""What a function's other configs will launch, told from what one of them has launched.

A function cannot be asked what it compiles without running it. But most hand the fields of their config on to a Triton
kernel, under the same names; so one recorded launch, with those fields exchanged, says what every other config will compile.
Knows Triton's launches and nothing of ranks. A forecast can be wrong where other arguments follow from the config. So it
compiles ahead, and drops nothing: what did not compile or load fails where it is launched after all, on all ranks alike.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from dist_tune.compiler import replaced
from dist_tune.configs import FunctionConfig

_MAX_LAUNCHES = 8
"""Of one function; each costs about 0.1 ms a candidate to ask for."""
_MAX_OF_KERNEL = 2
"""Of them: what is launched in a loop shall not hide the others."""
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


class Pointer:
    """A tensor as far as Triton's compiler knows it, without its memory."""

    __slots__ = ("_address", "dtype")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        """Where the tensor was: how far it is aligned is compiled in."""
        return self._address


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


class ForeseenError(triton.OutOfResources):  # type: ignore[misc]  # untyped
    """Raised in place of a launch that some rank could not make."""

    def __init__(self, reason: str) -> None:
        Exception.__init__(self, reason)
        self.reason = reason

    def __str__(self) -> str:
        """Which rank, and why."""
        return self.reason


class LaunchRecorder:
    """Writes down launches of kernels while a function runs on this thread, and ends those that are foreseen to fail."""

    def __init__(self) -> None:
        self.seen: list[RecordedLaunch] = []
        self.foreseen: dict[tuple[str, int], list[ForeseenFailure]] = {}
        """(site, candidate) -> launches that fail."""
        self._n_seen: Counter[tuple[str, int]] = Counter()
        """(site, kernel) -> launches so far."""
        self._at: tuple[str, int] | None = None
        self._ident = get_ident()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Listen to all launches meanwhile."""
        with replaced(JITFunction, "run", self._wrap):
            yield

    @contextmanager
    def running(self, label: str, candidate: int) -> Iterator[None]:
        """The function of a site runs with one of its configs."""
        before, self._at = self._at, (label, candidate)
        try:
            yield
        finally:
            self._at = before

    def _wrap(self, run: Callable[..., object]) -> Callable[..., object]:
        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> object:
            if self._at is not None and get_ident() == self._ident and not kwargs.get("warmup"):
                given = {name: light(value) for name, value in kwargs.items()} | {"grid": None}  # which may hold tensors, too
                self._note(RecordedLaunch(*self._at, kernel, tuple(map(light, args)), given))
            return run(kernel, *args, **kwargs)

        return recorded

    def _note(self, launched: RecordedLaunch) -> None:
        for each in self.foreseen.get((launched.label, launched.candidate), ()):
            if each.launch.is_like(launched, each.config):
                raise ForeseenError(each.reason)
        self._n_seen[launched.label, id(launched.kernel)] += 1
        if self._n_seen[launched.label, id(launched.kernel)] <= _MAX_OF_KERNEL:
            self.seen.append(launched)


class PrecompileLaunch:
    """A recorded launch with other configs. A ``Compilable``."""

    def __init__(self, seen: RecordedLaunch) -> None:
        self._seen = seen

    def compile(self, config: PrecompileConfig) -> Any:
        """What Triton compiles for it, not launched."""
        seen = self._seen
        given = {**seen.given, **config.given}
        if config.pre_hook is not None and _has_descriptor(seen):
            config.pre_hook(given)
        args = [given.pop(name) for name in seen.kernel.arg_names[: len(seen.args)]]
        return seen.kernel.run(*args, **{**given, "warmup": True})

    def is_like(self, launched: RecordedLaunch, config: PrecompileConfig) -> bool:
        """Whether a launch asks for what this one does with ``config``: the same constants and options, and arguments of the same kinds."""
        if launched.kernel is not self._seen.kernel:
            return False
        mine, theirs = {**self._seen.given, **config.given}, launched.given
        values = {each.name for each in launched.kernel.params if not each.is_constexpr}
        return mine.keys() == theirs.keys() and all(
            _kind(mine[name]) == _kind(theirs[name]) if name in values else _is_same(mine[name], theirs[name]) for name in mine
        )


class PrecompileConfig(triton.Config):  # type: ignore[misc]  # untyped
    """What a candidate changes of a launch."""

    def __init__(self, given: dict[str, Any], hook: Any) -> None:
        self.given = given
        """Kernel's argument or option -> value. No others: a default that is spelled out makes another key in Triton's memory."""
        options = {name: value for name, value in given.items() if name in OPTIONS}
        super().__init__({name: value for name, value in given.items() if name not in OPTIONS}, pre_hook=hook, **options)


@dataclass(frozen=True, slots=True)
class Precompile:
    """All candidates of a function's site at one of its launches."""

    label: str
    """The function's site and the kernel, in place of a site's label."""
    kernel: str
    configs: list[PrecompileConfig]
    """What each candidate of the function changes, in the same order."""
    launch: PrecompileLaunch
    function: str
    """The function's site."""


@dataclass(frozen=True, slots=True)
class ForeseenFailure:
    """A launch that some rank cannot make."""

    launch: PrecompileLaunch
    config: PrecompileConfig
    reason: str
    """On which rank, and why."""


def precompiles(function: str, candidates: Sequence[FunctionConfig], seen: Sequence[RecordedLaunch]) -> list[Precompile]:
    """What the candidates of a function's site will launch, as far as it can be told."""
    found: list[Precompile] = []
    seen = [each for each in seen if each.label == function][:_MAX_LAUNCHES]
    if not seen:
        return []
    fields = [_fields(config) for config in candidates]
    hooks = [_hook(config) for config in candidates]
    for each in seen:
        names = {name.lower(): name for name in fields[each.candidate]}
        given = each.given
        # Kernel's argument -> field of the config.
        followed = {
            name: names[name.lower()]
            for name, value in given.items()
            if name.lower() in names and _is_same(value, fields[each.candidate][names[name.lower()]])
        }
        if not followed or (_has_descriptor(each) and None in hooks):
            continue
        configs = [
            PrecompileConfig({name: one.get(field, given[name]) for name, field in followed.items()}, hook)
            for one, hook in zip(fields, hooks, strict=True)
        ]
        kernel = each.kernel.fn.__qualname__.rpartition("<locals>.")[2]
        label = f"{function} > {len(found)}.{kernel}"
        found.append(Precompile(label, kernel, configs, PrecompileLaunch(each), function))
    return found


def _fields(config: FunctionConfig) -> dict[str, Any]:
    """All values of a config, those of a ``triton.Config`` in it by their own names."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        fields |= value.all_kwargs() if isinstance(value, triton.Config) else {name: value}
    return fields


def _hook(config: FunctionConfig) -> Any:
    return next((value.pre_hook for value in config.values() if isinstance(value, triton.Config)), None)


def light(value: Any) -> Any:
    """What the compiler needs of an argument, without the memory behind it."""
    if isinstance(value, torch.Tensor):
        return Pointer(value)
    if isinstance(getattr(value, "base", None), torch.Tensor) and hasattr(value, "block_shape"):
        value = copy.copy(value)  # a hook may write to it, too
        value.base = Pointer(value.base)
    return value


def _kind(value: object) -> object:
    return value.dtype if isinstance(value, Pointer) else type(value)


def _is_same(value: object, field: object) -> bool:
    return value is field or (type(value) is type(field) and isinstance(value, bool | int | float | str) and value == field)


def _has_descriptor(seen: RecordedLaunch) -> bool:
    return any(hasattr(value, "block_shape") for value in (*seen.args, *seen.kwargs.values()))
