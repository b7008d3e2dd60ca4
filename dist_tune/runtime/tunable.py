"""A launch that can be tuned, of a ``triton.autotune`` kernel or of a function with configs; the place of its config; what it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dist_tune.cache import Code, nearest_key
from dist_tune.keys import key_text
from dist_tune.measure import Checker, Snapshot, Span
from dist_tune.validation import spelled


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of the candidates of one site."""

    quantiles_ms: Sequence[tuple[Any, tuple[float, float, float]]] = ()
    """Candidates with their reduced time, a low one and a high one, in milliseconds; inf for those without."""
    seconds: float = 0.0
    """Of the tuning."""


class Slot:
    """The place of the config for one key, for later calls; of a function in the mapping of its winners."""

    spelled = staticmethod(key_text)
    """A key as text, from which the nearest one follows."""

    def __init__(self, configs: Any, key: Any) -> None:
        self._configs, self._key = configs, key

    @property
    def config(self) -> Any:
        """The config in use; None for a miss, and if there is nothing to choose."""
        return self._configs.get(self._key)

    def nearest(self) -> Any:
        """The config in use for the nearest other key; None if there is none, or a library's own mapping does not tell its keys."""
        configs = self._configs if isinstance(self._configs, Mapping) else {}
        known = {self.spelled(key): configs[key] for key in configs}
        return known.get(nearest_key(self.spelled(self._key), list(known)))

    def fill(self, config: Any, timings: Timings) -> None:
        """Use ``config`` from now on."""
        self._configs[self._key] = config

    def put(self, config: Any) -> bool:
        """Let a launch find a config for a moment; false where each is to be heard, as of a function."""
        return False

    def tell(self) -> None:
        """Tell of the config as vanilla Triton does after tuning, which knows no functions."""

    def clear(self) -> None:
        """Make the next launch a miss."""
        self._configs.pop(self._key, None)


class Tunable(Protocol):
    """One launch, with the arguments of one call."""

    is_compiled: bool = False
    """True if candidates are compiled ahead of their first launch. Launches inside a function are recorded in its warm-up instead."""
    is_whole: bool = False
    """True if the launch is the whole closure of all its ranks: its result is not needed, and peers may wait in its collectives."""
    prepare: Callable[[Any], None] | None = None
    """Called before a replay with its config, if there is something to prepare."""
    name: str
    """Of the kernel or function with its module, the same on all ranks."""
    key_text: str
    """The tuning key, the same on all ranks for equal keys."""
    owner: Any
    """The decorated object, one for all its launches."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """Positional and keyword arguments, without those of the config."""
    slot: Slot
    """The place of the winner."""
    identify: Callable[[], Mapping[str, str]]
    """Reads all that decides code and candidates, by name; equal for launches of one kernel or function, even if it is decorated anew."""

    def code(self) -> Code:
        """Digest of the code and of all it calls, and the imports in it that are not in the digest."""

    def candidates(self) -> tuple[list[Any], list[str], int]:
        """The configs after pruning, without repeats; the same described; and the number of those that pruning removed."""

    def describe(self, config: Any) -> str:
        """A candidate on one line, the same on every rank; no two read alike."""

    def run(self, config: Any, undo: Snapshot | None, span: Span | None = None, *, is_trial: bool = True) -> Any:
        """Launch with ``config``; only the launch is inside the span. ``is_trial``: with the zeroing and the hooks of tuning.

        Raises:
            Exception: from a hook or the launch.
        """

    def compile(self, config: Any) -> Any:
        """As of a ``Compilable``, where ``is_compiled``."""
        return None

    def keep(self, undo: Snapshot) -> None:
        """Before a launch with a config in use, keep the tensors that it changes; those inside a function do so themselves."""
        return

    def reset_only(self, config: Any) -> None:
        """Zero as vanilla Triton does once after tuning, before the launch that counts."""
        return

    def checker(self) -> Checker | None:
        """The check of results in this tuning, if there is one."""
        return None


def name_of(function: Any) -> str:
    """A function's name with its module, the same on all ranks; without the functions that it was made in."""
    qualname = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{qualname.rpartition('<locals>.')[2]}".removeprefix("__main__.")


def rule_error(rule: str, name: str, error: Exception, where: str) -> ValueError | TypeError:
    """The error for what a ``rule`` of the user's raised, such as prune_fn of the function ``name``; to be raised from its own."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{rule} of {name} raised {type(error).__name__}: {error}; {where}")


def argument_texts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The arguments of a call for a message, tensors by shape."""
    named = [*(("", each) for each in args), *((f"{name}=", each) for name, each in kwargs.items())]
    texts = [f"{name}{f'tensor {list(each.shape)}' if isinstance(each, torch.Tensor) else spelled(each)}" for name, each in named]
    return f"({', '.join(texts)})"
