"""Tuners with a run of a library's own, and wrappers around kernels that keep launches.

Knows nothing of listeners.

A subclass of Triton's tuner may have a copy of ``run``, with another key and a cache in a file.
While a listener is in place, another function stands in the place of that ``run``; it is run with a
stand-in for the kernel to learn the key that it looks up. A wrapper such as flag_gems' LibEntry
keeps what its first launch has compiled, and does not ask the tuner again. While a listener is in
place its ``run`` is replaced, too: what it keeps of a launch whose kernel has no config is taken
from it when that launch returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import wraps
from threading import get_ident
from types import FunctionType
from typing import Any

from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

Hear = Callable[[FunctionType, Any, tuple[Any, ...], dict[str, Any]], Any]
own_runs: dict[type, Any] = {}
"""Class whose ``run`` is heard -> the function in its place, which wraps it.

A tuner's looks into ``self.cache``, and prunes on a miss.
"""


def find_own_runs(hear: Hear) -> list[FunctionType]:
    """Take note of the tuners and wrappers that were defined since; the functions for their places,
    ``hear(run, kernel, args, kwargs)``.
    """

    def in_place_of(run: FunctionType, hear: Hear) -> Any:
        return wraps(run)(lambda kernel, /, *args, **kwargs: hear(run, kernel, args, kwargs))

    tuners = {
        cls: in_place_of(run, hear) for cls, run in _tuners() if "cache" in run.__code__.co_names
    }
    wrappers = {
        cls: in_place_of(run, _run_wrapper)
        for cls, run in _own_classes()
        if not issubclass(cls, Autotuner)
    }
    found = {cls: ours for cls, ours in (tuners | wrappers).items() if cls not in own_runs}
    own_runs.update(found)
    return list(found.values())


def unheard_tuners() -> list[str]:
    """Classes which tune in a ``run`` that cannot be heard."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls, _ in _tuners() if cls not in own_runs]


def _tuners() -> Iterator[tuple[type, FunctionType]]:
    return (
        (cls, run)
        for cls, run in _own_classes()
        if issubclass(cls, Autotuner) and "prune_configs" in run.__code__.co_names
    )


def _own_classes() -> Iterator[tuple[type, FunctionType]]:
    """Classes of tuners and wrappers that are not Triton's, with their ``run`` as its author wrote
    it.
    """
    classes: list[type] = [KernelInterface]
    for cls in classes:
        classes += cls.__subclasses__()
        run = own_runs[cls].__wrapped__ if cls in own_runs else vars(cls).get("run")
        if isinstance(run, FunctionType) and not cls.__module__.startswith("triton."):
            yield cls, run


class _AskedError(BaseException):
    """Leaves a ``run`` with its key; not an Exception, so that no ``except Exception`` on its way
    catches it.
    """


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
    """The key that a kernel's own ``run`` looks up, alone in a tuple; empty if it has or inherits
    none, or that looks up none, or fails.
    """
    cls = (
        next((each for each in type(kernel).__mro__ if each in own_runs), None)
        if own_runs
        else None
    )
    if cls is None:
        return ()
    try:
        own_runs[cls].__wrapped__(_StandIn(kernel), *args, **kwargs)
    except _AskedError as asked:
        return asked.args
    except Exception:  # noqa: BLE001  # the launch itself follows: it raises the user's error, and not what a stand-in lacks
        pass
    return ()


_Kept = list[tuple[MutableMapping[Any, Any], frozenset[Any]]]
"""Mappings of a wrapper, with the keys that they had before a launch."""
_under_way: dict[int, list[tuple[Any, _Kept]]] = {}
"""Thread -> wrappers whose run is under way in it, the outermost first."""


def _run_wrapper(
    run: FunctionType, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a wrapper, and take from it what it has kept, if ``remember_wrappers`` was called
    meanwhile.
    """
    kept: _Kept = []
    wrappers = _under_way.setdefault(get_ident(), [])
    wrappers.append((wrapper, kept))
    try:
        return run(wrapper, *args, **kwargs)
    finally:
        wrappers.pop()
        for mapping, known in kept:
            # At once, because other threads may be launching.
            for key in frozenset(mapping) - known:
                mapping.pop(key, None)


def remember_wrappers() -> None:
    """Called in a launch that a tuning decides, or may yet decide: the wrappers around it are to
    keep nothing of it.
    """
    for wrapper, kept in _under_way.get(get_ident(), ()):
        for value in vars(wrapper).values():
            # One for each device.
            for each in value if isinstance(value, tuple | list) else (value,):
                if isinstance(each, MutableMapping):
                    kept.append((each, frozenset(each)))
