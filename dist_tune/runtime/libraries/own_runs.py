"""Subclasses of Triton's tuner with a copy of its ``run`` of their own: another key, a cache in a file.

While a listener is in place, the code of their ``run`` is exchanged as that of Triton's own. Theirs is run with a stand-in for the
kernel to learn the key that it looks up. Knows nothing of listeners.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from triton.runtime.autotuner import Autotuner

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
