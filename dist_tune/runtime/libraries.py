"""Tuners with a run of a library's own, and wrappers around kernels that keep launches. Knows nothing of listeners.

A subclass of Triton's tuner may have a copy of ``run``, with another key and a cache in a file. While a listener is in place, another
function stands in the place of that ``run``; it is run with a stand-in for the kernel to learn the key that it looks up.
A wrapper such as flag_gems' LibEntry keeps what the first launch has compiled, and does not ask the tuner again. What it keeps while its
kernel has no config is taken from it after each run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, MutableMapping
from functools import wraps
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any

from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

Hear = Callable[[FunctionType, Any, tuple[Any, ...], dict[str, Any]], Any]
own_runs: dict[type, Any] = {}
"""Class whose ``run`` looks into ``self.cache``, and prunes on a miss -> the function in its place, which wraps it."""
_keyless: set[FunctionType] = set()
"""Those that were run with a stand-in for the kernel, and looked up no key."""


def find_own_runs(hear: Hear) -> list[FunctionType]:
    """Take note of the tuners that were defined since, and return the functions for their places: ``hear(run, kernel, args, kwargs)``."""

    def hearing(run: FunctionType) -> Any:
        return wraps(run)(lambda kernel, /, *args, **kwargs: hear(run, kernel, args, kwargs))

    found = {cls: hearing(run) for cls, run in _tuners() if cls not in own_runs and "cache" in run.__code__.co_names}
    own_runs.update(found)
    return list(found.values())


def unheard_tuners() -> list[str]:
    """Classes which tune in a ``run`` that cannot be heard."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls, run in _tuners() if cls not in own_runs or run in _keyless]


def _tuners() -> Iterator[tuple[type, FunctionType]]:
    """Classes with a ``run`` that tunes, which is as its author wrote it."""
    classes = list(Autotuner.__subclasses__())
    for cls in classes:
        classes += cls.__subclasses__()
        run = own_runs[cls].__wrapped__ if cls in own_runs else vars(cls).get("run")
        if isinstance(run, FunctionType) and "prune_configs" in run.__code__.co_names:
            yield cls, run


class _AskedError(BaseException):
    """Leaves a ``run`` with its key; not an Exception, so that no ``except Exception`` on its way catches it."""


class _StandIn:
    """Stands for a kernel and for its cache, to hear which key is looked up; launches nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.cache, self.configs = kernel, self, kernel.configs

    def get(self, key: Any, default: object = None) -> Any:
        raise _AskedError(key)

    __contains__ = __getitem__ = get

    def __getattr__(self, name: str) -> Any:
        if name in ("fn", "prune_configs"):  # it has not looked up a key before
            raise _AskedError
        return getattr(self._kernel, name)


def own_key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key that a kernel's own ``run`` looks up, alone in a tuple; empty if it has or inherits none, or that looks up none, or fails."""
    cls = next((each for each in type(kernel).__mro__ if each in own_runs), None) if own_runs else None
    if cls is None:
        return ()
    run, key = own_runs[cls].__wrapped__, ()
    try:
        run(_StandIn(kernel), *args, **kwargs)
    except _AskedError as asked:
        key = asked.args
    except Exception:  # noqa: BLE001  # the launch itself follows: it raises the user's error, and not what a stand-in lacks
        pass
    (_keyless.discard if key else _keyless.add)(run)
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
