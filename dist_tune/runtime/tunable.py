"""What can be tuned: one launch of something that has configs, with the arguments of that call.

Kernels of ``triton.autotune`` and functions with a config are launched alike; what tunes them knows these protocols and
nothing of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dist_tune.measure import Checker, Span


class Slot(Protocol):
    """Where the config for one key is kept, for calls to come."""

    def fill(self, config: Any, timings_ms: Sequence[tuple[Any, float]]) -> None:
        """Use ``config`` from now on. ``timings_ms``: the candidates with their agreed times, inf where there is none."""

    def clear(self) -> None:
        """Make the next launch a miss."""


class Tunable(Protocol):
    """One launch, with the arguments of one call."""

    is_compiled: bool
    """Whether candidates are compiled ahead of their first launch."""
    is_whole: bool
    """Whether the launch is all there is of the closure, so that nobody needs what it returns."""
    is_foreseen: bool
    """Whether what is not compiled ahead here has been compiled by the caller, for each candidate."""

    @property
    def prepare(self) -> Callable[[Any], None] | None:
        """Called with the config of the coming replay before that replay begins, where there is something to make ready."""

    @property
    def name(self) -> str:
        """Name of the kernel or function with its module, the same on all ranks."""

    @property
    def key_text(self) -> str:
        """The tuning key, the same on all ranks for equal keys."""

    @property
    def owner(self) -> Any:
        """The decorated object, one for all its launches."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes two launches launches of one thing, also where the decorated object is made anew."""

    @property
    def slot(self) -> Slot:
        """Where the winner goes."""

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, without those of the config."""

    def source(self) -> str:
        """Digest of the code, and of all it calls."""

    def all_configs_digest(self) -> str:
        """Identity of the configs before pruning."""

    def known_config(self) -> Any:
        """The config that is in use; None for a miss and where there is nothing to choose."""

    def candidates(self) -> list[Any]:
        """The configs after pruning, without repeats."""

    def describe(self, config: Any) -> str:
        """A candidate on one line, the same on every rank; no two read alike."""

    def run(self, config: Any, undo: Undo, span: Span | None = None, *, is_trial: bool = True) -> Any:
        """Launch with ``config``; only the launch is inside the span. Raises whatever it raises.

        ``is_trial``: whether more is done around it than where the config has long been known: zeroing, hooks of tuning.
        """

    def compile(self, config: Any) -> Any:
        """As of a ``Compilable``, where ``is_compiled``."""

    def reset_only(self, config: Any) -> None:
        """What is to be done once after tuning, before the launch that counts."""

    def n_collectives(self) -> int:
        """Collectives that this process has issued so far; only differences mean something."""

    def checker(self) -> Checker | None:
        """What judges results in this tuning, if anything does."""


class Undo:
    """Tensors to put back as they were: Triton's ``restore_value``, at the end of a replay and not of a launch.

    Kernels later in the closure must read what the launch wrote, so values go back when the closure is through.
    """

    def __init__(self) -> None:
        self._saved: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Remember what ``tensor`` held; the first copy of a replay is the one that counts."""
        self._saved.setdefault((tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()), (tensor, copy))

    def restore(self) -> None:
        """Put all back and forget them."""
        put_back(list(self._saved.values()))
        self.forget()

    def forget(self) -> None:
        """Let what was written stand."""
        self._saved.clear()


def put_back(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first, the last pair first."""
    with torch.no_grad():
        for tensor, copy in reversed(copies):
            tensor.copy_(copy)
