"""A launch that can be tuned, of a ``triton.autotune`` kernel or of a function with configs; the
place of its config; what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from triton.errors import TritonError

from dist_tune.files import warn_once
from dist_tune.keys import key_text
from dist_tune.measure import Checker, Snapshot, Span, is_interpreted, tensors_in
from dist_tune.records import nearest_key
from dist_tune.validation import spelled


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of the candidates of one site."""

    quantiles_ms: Sequence[tuple[Any, tuple[float, float, float]]] = ()
    """Candidates with their reduced time, a low one and a high one, in milliseconds; inf for those
    without.
    """
    seconds: float = 0.0
    """Of the tuning."""


MAX_SIZES = 10_000
_MAX_LISTS = 1000


class Fits:
    """Which config each exact size of a bucket runs: the bucket's, if rules keep it there and it
    runs; else the next best that does.
    """

    def __init__(self) -> None:
        self._ranked: dict[Any, list[Any]] = {}
        """Key of a bucket -> its configs, from the best on."""
        self._kept: dict[Any, dict[str, Any]] = {}
        """Exact size -> the configs that the rules keep there, by description; of the latest sizes.
        """
        self.used: dict[Any, tuple[Any, Any]] = {}
        """Exact size, of kernels with the identity of the bucket's config -> that config, and the
        one that is used.
        """

    def rank(self, key: Any, config: Any, timings: Timings) -> None:
        """Take the times of a bucket's configs; the one in use is the best."""
        times = {id(each): ms for each, (ms, _, _) in timings.quantiles_ms}
        self._ranked[key] = sorted(
            (each for each, _ in timings.quantiles_ms),
            key=lambda each: (each is not config, times[id(each)]),
        )

    def known(self, place: Any, config: Any) -> Any:
        """The config to use at a size whose bucket has ``config``; None if that is yet to be
        seen.
        """
        found = self.used.get(place)
        return found[1] if found is not None and found[0] is config else None

    def remember(self, launch: Tunable, config: Any, used: Any) -> None:
        """At the size of a launch ``used`` runs."""
        if len(self.used) >= MAX_SIZES:
            self.used.clear()
        self.used[self._place(launch, config)] = config, used

    def keeps(self, launch: Tunable, config: Any) -> bool:
        """True if the rules keep a config at the size of a launch."""
        return launch.describe(config) in self._kept_at(launch)

    def run(self, launch: Tunable, config: Any = None) -> Any:
        """Launch with the bucket's config (None: it has none), or the next best that the rules
        keep; of a kernel one that runs.
        """
        if (
            config is not None
            and (used := self.known(self._place(launch, config), config)) is not None
        ):
            return launch.run(used, None, is_trial=False)
        first, before = None, Snapshot()
        if launch.is_compiled and is_interpreted():  # an interpreted kernel may fail half way
            before.copy(tensors_in(launch.arguments).values())
        for used in self._order(launch, config):
            try:
                value = launch.run(used, None, is_trial=False)
            except TritonError as error:  # a machine that is short of something now raises others
                if not launch.is_compiled:  # a function's collectives may have been made
                    raise
                before.put_back()
                first = first or error
                continue
            if config is not None:
                self.remember(launch, config, used)
            if first is not None:
                told = f"{type(first).__name__}: {first}".partition("\n")[0]
                where = f"{launch.name}{launch.slot.spelled(launch.exact)}"
                warn_once(
                    f"dist_tune: {where}: the config of its bucket {launch.key_text} does not run"
                    " at this size, and the next best one is "
                    f'used, "{launch.describe(used)}": {told}',
                    topic=f"bucket of {launch.name}",
                )
            return value
        assert first is not None
        raise first

    def keep(self, exact: Any, kept: dict[str, Any]) -> None:
        """The rules keep these configs at a size, by description."""
        if len(self._kept) >= _MAX_LISTS:
            self._kept.clear()
        self._kept[exact] = kept

    @staticmethod
    def _place(launch: Tunable, config: Any) -> Any:
        """In ``used``: the configs of an online tuning's trials take turns in a kernel's bucket."""
        return (launch.exact, id(config)) if launch.is_compiled else launch.exact

    def _order(self, launch: Tunable, config: Any) -> Iterator[Any]:
        """What the rules keep at the size of a launch: its bucket's config, the others of the
        bucket from the best on, and the rest.

        Of the rest, which a rule has made of the size, first what is most like the bucket's.
        """
        kept = self._kept_at(launch)
        ranked = [] if config is None else [config, *self._ranked.get(launch.slot.key, ())]
        texts = [launch.describe(each) for each in ranked]
        if texts and texts[0] in kept:
            yield config  # itself, by which it is found again
        yield from [
            kept[text] for text in dict.fromkeys(texts[1:]) if text in kept and text != texts[0]
        ]
        words = set(texts[0].split() if texts else ())
        yield from [
            kept[text]
            for text in sorted(kept, key=lambda text: -len(words.intersection(text.split())))
            if text not in texts
        ]

    def _kept_at(self, launch: Tunable) -> dict[str, Any]:
        if launch.exact not in self._kept:
            configs, texts, _ = launch.candidates()
            self.keep(launch.exact, dict(zip(texts, configs, strict=True)))
        return self._kept[launch.exact]


class Slot:
    """The place of the config for one key, for later calls; of a function in the mapping of its
    winners.
    """

    spelled = staticmethod(key_text)
    """A key as text, from which the nearest one follows."""

    def __init__(self, configs: Any, key: Any, fits: Fits | None = None) -> None:
        self._configs, self.key, self.fits = configs, key, fits

    @property
    def config(self) -> Any:
        """The config in use; None for a miss, and if there is nothing to choose."""
        return self._configs.get(self.key)

    def nearest(self) -> Any:
        """The config in use for the nearest other key; None if there is none, or a library's own
        mapping does not tell its keys.
        """
        configs = self._configs if isinstance(self._configs, Mapping) else {}
        known = {self.spelled(key): configs[key] for key in configs}
        return known.get(nearest_key(self.spelled(self.key), list(known)))

    def fill(self, config: Any, timings: Timings) -> None:
        """Use ``config`` from now on."""
        self._configs[self.key] = config
        if self.fits is not None:
            self.fits.rank(self.key, config, timings)

    def put(self, config: Any) -> bool:
        """Let a launch find a config for a moment; false where each is to be heard, as of a
        function.
        """
        return False

    def tell(self) -> None:
        """Tell of the config as vanilla Triton does after tuning, which knows no functions."""

    def clear(self) -> None:
        """Make the next launch a miss."""
        self._configs.pop(self.key, None)


class Tunable(Protocol):
    """One launch, with the arguments of one call."""

    is_compiled: bool = False
    """True if candidates are compiled ahead of their first launch.

    Launches inside a function are recorded in its warm-up instead.
    """
    is_whole: bool = False
    """True if the launch is the whole closure of all its ranks: its result is not needed, and peers
    may wait in its collectives.
    """
    prepare: Callable[[Any], None] | None = None
    """Called before a replay with its config, if there is something to prepare."""
    name: str
    """Of the kernel or function with its module, the same on all ranks."""
    key_text: str
    """The tuning key, the same on all ranks for equal keys."""
    owner: Any
    """The decorated object, one for all its launches."""
    function: Any = None
    """What is called with them; of a function with configs alone."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """Positional and keyword arguments, without those of the config."""
    slot: Slot
    """The place of the winner."""
    exact: Any = None
    """Its size, where its slot is of a bucket of several."""
    identify: Callable[[], Mapping[str, str]]
    """Reads all that decides code and candidates, by name; equal for launches of one kernel or
    function, even if it is decorated anew.
    """

    def code(self) -> str:
        """Digest of the code, and of what it calls."""

    def candidates(self) -> tuple[list[Any], list[str], int]:
        """The configs after pruning, without repeats; the same described; and the number of those
        that pruning removed.
        """

    def describe(self, config: Any) -> str:
        """A candidate on one line, the same on every rank; no two read alike."""

    def run(
        self, config: Any, undo: Snapshot | None, span: Span | None = None, *, is_trial: bool = True
    ) -> Any:
        """Launch with ``config``; only the launch is inside the span.

        ``is_trial``: with the zeroing and the hooks of tuning.

        Raises:
            Exception: from a hook or the launch.
        """

    def keeps(self, config: Any) -> bool:
        """False where the rules drop a config of its bucket at this very size."""
        return self.slot.fits is None or self.slot.fits.keeps(self, config)

    def run_known(self, config: Any) -> Any:
        """Launch with the config in use, as it is used at this very size."""
        return (
            self.run(config, None, is_trial=False)
            if self.slot.fits is None
            else self.slot.fits.run(self, config)
        )

    def compile(self, config: Any) -> Any:
        """As of a ``Compilable``, where ``is_compiled``."""
        return None

    def keep(self, undo: Snapshot) -> None:
        """Before a launch with a config in use, keep the tensors that it changes; those inside a
        function do so themselves.
        """
        return

    def reset_only(self, config: Any) -> None:
        """Zero as vanilla Triton does once after tuning, before the launch that counts."""
        return

    def unrestored(self, error: Exception) -> list[str]:
        """Tensors that it may have written to before it failed, and that stay so; those of a
        function are put back with its arguments.
        """
        return []

    def checker(self) -> Checker | None:
        """The check of results in this tuning, if there is one."""
        return None


def name_of(function: Any) -> str:
    """A function's name with its module, the same on all ranks; without the functions that it was
    made in.
    """
    qualname = getattr(function, "__qualname__", type(function).__qualname__)
    return (
        f"{getattr(function, '__module__', '')}.{qualname.rpartition('<locals>.')[2]}".removeprefix(
            "__main__."
        )
    )


def rule_error(rule: str, name: str, error: Exception, where: str) -> ValueError | TypeError:
    """The error for what a ``rule`` of the user's raised, such as prune_fn of the function
    ``name``; to be raised from its own.
    """
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{rule} of {name} raised {type(error).__name__}: {error}; {where}")


def argument_texts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The arguments of a call for a message, tensors by shape."""

    def text(value: Any) -> str:
        return f"tensor {[*value.shape]}" if isinstance(value, torch.Tensor) else spelled(value)

    named = [f"{name}={text(value)}" for name, value in kwargs.items()]
    return f"({', '.join([*map(text, args), *named])})"
