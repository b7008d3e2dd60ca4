"""Tuners with a run of a library's own, and wrappers around kernels that keep launches. Knows nothing of listeners.

A subclass of Triton's tuner may have a copy of ``run``, with another key and a cache in a file. While a listener is in place, the code of
that ``run`` is exchanged as that of Triton's own; it is run with a stand-in for the kernel to learn the key that it looks up.
A wrapper such as flag_gems' LibEntry keeps what the first launch has compiled, and does not ask the tuner again. What it keeps while its
kernel has no config is taken from it after each run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, MutableMapping
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any

from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

Hear = Callable[["OwnRun", Any, tuple[Any, ...], dict[str, Any]], Any]


def _asking(self: Any, *args: Any, **kwargs: Any) -> Any:
    return "own run".hear(self, args, kwargs)  # type: ignore[attr-defined]  # the constant is exchanged for an OwnRun


class OwnRun:
    """The ``run`` of a class, which looks into ``self.cache`` and prunes by ``self.prune_configs`` on a miss."""

    def __init__(self, function: FunctionType, hear: Hear) -> None:
        self.function, self._hear = function, hear
        self.has_key = True
        """False once it was run with a stand-in for the kernel and looked up no key."""
        self.own_code: CodeType = function.__code__
        self.call = FunctionType(self.own_code, function.__globals__, function.__name__, function.__defaults__)
        """The function as its author wrote it."""
        self.call.__kwdefaults__ = function.__kwdefaults__
        constants = tuple(self if each == "own run" else each for each in _asking.__code__.co_consts)
        self.our_code = _asking.__code__.replace(co_consts=constants, co_name=self.own_code.co_name)

    def hear(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of the function."""
        return self._hear(self, kernel, args, kwargs)


class _AskedError(BaseException):
    """Leaves a ``run`` with its key; not an Exception, so that no ``except Exception`` on its way catches it."""


class _Cache:
    """A cache that only hears what it is asked for."""

    def get(self, key: Any, default: object = None) -> Any:
        raise _AskedError(key)

    __contains__ = __getitem__ = get


class _Unlaunched:
    """A stand-in for a kernel, which is asked for its key and never launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.cache, self.configs = kernel, _Cache(), kernel.configs

    def __getattr__(self, name: str) -> Any:
        if name in ("fn", "prune_configs"):  # it has not looked up a key before
            raise _AskedError
        return getattr(self._kernel, name)


own_runs: dict[Any, OwnRun] = {}
"""Function -> itself, with the code that takes its place."""


def find_own_runs(hear: Hear) -> list[OwnRun]:
    """Take note of the classes that were defined since, and return these; those that cannot be heard are left alone."""
    runs = [function for _, function in _all_runs() if function not in own_runs]
    found = {each: OwnRun(each, hear) for each in runs if "cache" in each.__code__.co_names and not each.__code__.co_freevars}
    own_runs.update(found)
    return list(found.values())


def unheard_tuners() -> list[str]:
    """Classes which tune in a ``run`` that cannot be heard."""
    runs = [(each, own_runs.get(function)) for each, function in _all_runs()]
    return [f"{each.__module__}.{each.__qualname__}" for each, own in runs if own is None or not own.has_key]


def _all_runs() -> list[tuple[type, Any]]:
    found, classes = [], list(Autotuner.__subclasses__())
    for each in classes:
        classes += each.__subclasses__()
        run = vars(each).get("run")
        if isinstance(run, FunctionType) and "prune_configs" in (run.__code__ if run not in own_runs else own_runs[run].own_code).co_names:
            found.append((each, run))
    return found


def own_run_of(kernel: Any) -> OwnRun | None:
    """The ``run`` of its own that a kernel's class has, or inherits."""
    if own_runs:
        for each in type(kernel).__mro__:
            if (own := own_runs.get(vars(each).get("run"))) is not None:
                return own
    return None


def own_key(own: OwnRun, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key that its ``run`` looks up, alone in a tuple; empty if it looks up none, or fails before."""
    key: tuple[Any, ...] = ()
    try:
        own.call(_Unlaunched(kernel), *args, **kwargs)
    except _AskedError as asked:
        key = asked.args
    except Exception:  # noqa: BLE001  # the launch itself follows: it raises the user's error, and not what a stand-in lacks
        pass
    own.has_key = bool(key)
    return key


_MAX_FRAMES = 12
keepers: dict[int, dict[int, tuple[MutableMapping[Any, Any], frozenset[Any]]]] = {}
"""Thread -> id -> mapping of a wrapper, with the keys that it had before the launch."""


def note_keepers(kernel: Any, threads: Collection[int]) -> None:
    """Called in a launch of the kernel: note what the wrappers around it, which are in the middle of this launch, hold now.

    ``threads``: those with a run under way. The launch is of the calling one's, or, on a thread of autograd's, of the only one's.
    """
    thread = get_ident() if get_ident() in threads else next(iter(list(threads)), get_ident())
    frame, inner, before = sys._getframe(1), {id(kernel)}, keepers.setdefault(thread, {})
    for _ in range(_MAX_FRAMES):
        if (frame := frame.f_back) is None:  # type: ignore[assignment]  # the outermost one has none
            return
        # Reading the variables of a frame keeps them alive as long as it runs: of no frame of the step, which may have a "run" as well.
        wrapper = frame.f_locals.get("self") if _is_launch(frame.f_code) else None
        if isinstance(wrapper, KernelInterface) and any(id(each) in inner for each in vars(wrapper).values()):
            inner.add(id(wrapper))
            for each in _mappings(wrapper):
                before.setdefault(id(each), (each, frozenset(each)))


def forget_kept(thread: int) -> None:
    """After a run of this thread: take from wrappers what they have kept since."""
    for mapping, known in keepers.pop(thread, {}).values():
        for key in frozenset(mapping) - known:  # at once, because other threads may be launching
            mapping.pop(key, None)


def _is_launch(code: CodeType) -> bool:
    """True for the code of ``run`` in a class of kernels, or of wrappers around them."""
    classes: list[type] = [KernelInterface] if code.co_name == "run" else []
    for each in classes:
        classes += each.__subclasses__()
    return any(getattr(inspect.unwrap(getattr(each, "run", None)), "__code__", None) is code for each in classes)  # type: ignore[arg-type]


def _mappings(wrapper: Any) -> Iterator[MutableMapping[Any, Any]]:
    for value in vars(wrapper).values():
        for each in value if isinstance(value, tuple | list) else (value,):  # one for each device
            if isinstance(each, MutableMapping):
                yield each
