"""The protocols of a launch that can be tuned, of a ``triton.autotune`` kernel or of a function with configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dist_tune.measure import Checker, Span
from dist_tune.runtime.recording import RecordedLaunch
from dist_tune.runtime.undo import Undo


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of the candidates of one site."""

    quantiles_ms: Sequence[tuple[Any, tuple[float, float, float]]] = ()
    """Candidates with their reduced time, a low one and a high one, in milliseconds; inf for those without."""
    seconds: float = 0.0
    """Of the tuning."""


class Slot(Protocol):
    """The place of the config for one key, for later calls."""

    def fill(self, config: Any, timings: Timings) -> None:
        """Use ``config`` from now on."""

    def tell(self, *, is_hit: bool) -> None:
        """Tell of the config as vanilla Triton does after tuning. ``is_hit``: it comes from a record.

        Raises:
            Exception: from a listener.
        """

    def clear(self) -> None:
        """Make the next launch a miss."""


class Tunable(Protocol):
    """One launch, with the arguments of one call."""

    is_compiled: bool
    """True if candidates are compiled ahead of their first launch."""
    is_whole: bool
    """True if the launch is the whole closure of all its ranks: its result is not needed, and peers may wait in its collectives."""
    is_recorded: bool
    """True if launches inside it are recorded in the warm-up, and compiled ahead with the other candidates."""
    owner: Any
    """The decorated object, one for all its launches."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """Positional and keyword arguments, without those of the config."""
    slot: Slot
    """The place of the winner."""

    @property
    def prepare(self) -> Callable[[Any], None] | None:
        """Called before a replay with its config, if there is something to prepare."""

    @property
    def dry_run(self) -> Callable[[Any, str], list[RecordedLaunch]] | None:
        """From a config and the site's label to the launches inside, which are not made; None where only a run tells them."""

    @property
    def name(self) -> str:
        """Name of the kernel or function with its module, the same on all ranks."""

    @property
    def key_text(self) -> str:
        """The tuning key, the same on all ranks for equal keys."""

    @property
    def identity(self) -> Mapping[str, str]:
        """All that decides code and candidates, by name; equal for launches of one kernel or function, even if it is decorated anew."""

    def source(self) -> str:
        """Digest of the code, and of all it calls."""

    def not_followed(self) -> list[str]:
        """Imports inside that code, as "module.name", that are not in the digest."""

    @property
    def n_configs(self) -> int:
        """Configs before pruning, without repeats."""

    def known_config(self) -> Any:
        """The config in use; None for a miss, and if there is nothing to choose."""

    def nearest_config(self) -> Any:
        """The config in use for the nearest other key; None if there is none."""

    def candidates(self) -> list[Any]:
        """The configs after pruning, without repeats."""

    def describe(self, config: Any) -> str:
        """A candidate on one line, the same on every rank; no two read alike."""

    def keep(self, undo: Undo) -> None:
        """Keep the tensors that a launch changes, before one with a config in use."""

    def run(self, config: Any, undo: Undo | None, span: Span | None = None, *, is_trial: bool = True) -> Any:
        """Launch with ``config``; only the launch is inside the span. ``is_trial``: with the zeroing and the hooks of tuning.

        Raises:
            Exception: from a hook or the launch.
        """

    def compile(self, config: Any) -> Any:
        """As of a ``Compilable``, where ``is_compiled``."""

    def reset_only(self, config: Any) -> None:
        """Zero as vanilla Triton does once after tuning, before the launch that counts."""

    def checker(self) -> Checker | None:
        """The check of results in this tuning, if there is one."""
