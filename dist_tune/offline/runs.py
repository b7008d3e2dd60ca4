"""What a tuning script measures: for each config a run without arguments, made by the script, and what it is to return.

A ``Tunable`` whose launch is one run. Knows the script's factory and callback; nothing of search, files or who decides. Runs hold their
inputs, so only as many are kept as memory allows; a factory that makes inputs and reference once, outside, makes that free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dist_tune.compiler import reason_of
from dist_tune.configs import digest
from dist_tune.distributed import n_collectives
from dist_tune.measure import Checker, Matches, Span, wrong_output
from dist_tune.runtime import Undo, Watch
from dist_tune.tuning import is_fatal

Run = Callable[[], Any]
MakeRun = Callable[[dict[str, Any]], tuple[Run, Any]]
"""From a config to a run and what it is to return (None: that is not checked)."""
_MAX_HELD = 256
"""Runs kept at most; on a GPU only while at least half of its memory is free."""


@dataclass(frozen=True, slots=True)
class Made:
    """What the factory made for one config."""

    run: Run
    ground_truth: Any


class Runs:
    """The runs of one problem, made when they are first needed."""

    def __init__(self, make: MakeRun, configs: Sequence[dict[str, Any]], callback: Callable[[dict[str, Any]], object] | None) -> None:
        self.configs = [dict(config) for config in configs]
        """As the callback leaves them, once their run was made."""
        self._make = make
        self._callback = callback
        self._changed: set[int] = set()
        self._held: OrderedDict[int, Made | Exception] = OrderedDict()
        self.capacity = _MAX_HELD
        """Runs that can be held at once, as far as is known."""

    def get(self, index: int) -> Made:
        """The run for a config.

        Raises:
            Exception: what the factory or the callback raises, each time.
        """
        if index in self._held:
            self._held.move_to_end(index)
        else:
            self._drop_oldest()
            self._held[index] = self._made(index)
        made = self._held[index]
        if isinstance(made, Exception):
            raise made
        return made

    def drop(self) -> None:
        """Let all go."""
        self._held.clear()

    def _made(self, index: int) -> Made | Exception:
        config = self.configs[index]
        try:
            if self._callback is not None and index not in self._changed:
                self._callback(config)
                self._changed.add(index)
            run, ground_truth = self._made_with_room(config)
        except Exception as error:  # noqa: BLE001  # the script's: this config cannot run, which is a vote where it is launched
            return error.with_traceback(None)
        return Made(run, ground_truth)

    def _made_with_room(self, config: dict[str, Any]) -> tuple[Run, Any]:
        try:
            return self._make(dict(config))  # a copy: launchers may take keys out of it
        except torch.OutOfMemoryError:
            self.make_room()
            return self._make(dict(config))

    def make_room(self, kept: int | None = None) -> None:
        """Let all go but one: the device has no memory left, and that is not the doing of whoever asks for more."""
        self.capacity = max(2, min(self.capacity, len(self._held)))
        self._held = OrderedDict((i, each) for i, each in self._held.items() if i == kept)
        torch.cuda.empty_cache()

    def _drop_oldest(self) -> None:
        while len(self._held) >= _MAX_HELD:
            self._held.popitem(last=False)
        while len(self._held) > 1 and _is_memory_short():
            self._held.popitem(last=False)
            self.capacity = max(2, min(self.capacity, len(self._held)))


def _is_memory_short() -> bool:
    if not torch.cuda.is_available():
        return False
    # What the allocator keeps for itself counts as free.
    return torch.cuda.memory_allocated() > 0.5 * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


class RunLaunch:
    """One round of a problem: some of its configs, by index. A ``Tunable``."""

    is_compiled = False
    is_whole = True

    def __init__(
        self, name: str, runs: Runs, texts: Sequence[str], indices: Sequence[int], atol: float, rtol: float, *, is_alone: bool,
        is_watched: bool,
    ) -> None:  # fmt: skip
        self.name = name
        self.key_text = "[]"
        self.owner = runs
        self.slot = _NoSlot()
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.identity = ("run",)
        self.is_foreseen = is_alone
        """What a process that asks nobody runs was compiled before; ranks that run together share that out."""
        self._runs = runs
        self._configs = [runs.configs[i] for i in indices]
        self._index_of = {id(config): i for config, i in zip(self._configs, indices, strict=True)}
        self._texts = {i: texts[i] for i in indices}
        self._tolerances = atol, rtol
        self._is_alone = is_alone
        self._is_watched = is_watched
        self._scheduled: int | None = None

    def source(self) -> str:
        """Nothing: what scripts find is kept in their own files."""
        return ""

    def all_configs_digest(self) -> str:
        """Identity of this round's configs."""
        return digest(list(self._texts.values()))

    def known_config(self) -> None:
        """Each round is new."""

    def candidates(self) -> list[dict[str, Any]]:
        """The configs of this round."""
        return self._configs

    def describe(self, config: dict[str, Any]) -> str:
        """As it stood in the space, before a callback changed it."""
        return self._texts[self._index_of[id(config)]]

    def prepare(self, config: dict[str, Any]) -> None:
        """Make the run before the clock is started."""
        self._scheduled = self._index_of[id(config)]
        try:
            self._runs.get(self._scheduled)
        except Exception:  # noqa: BLE001  # it will be raised where the run is launched, and become a vote
            return

    def run(self, config: dict[str, Any], undo: Undo, span: Span | None = None, *, is_trial: bool = True) -> Any:
        """Run it. Raises whatever the factory, the callback or the run raises."""
        index = self._index_of[id(config)]
        run = self._runs.get(index).run
        if span is None:
            with Watch() if self._is_watched else nullcontext():
                try:
                    return run()
                except torch.OutOfMemoryError:
                    if not self._is_alone:  # the others do not run once more
                        raise
                    self._runs.make_room(index)
                    return run()
        span.begin()
        result = run()
        span.end()
        return result

    def compile(self, config: dict[str, Any]) -> None:
        """Nothing: what a run compiles is seen when it runs."""

    def reset_only(self, config: dict[str, Any]) -> None:
        """Nothing of ours."""

    def n_collectives(self) -> int:
        """Collectives that this process has issued so far."""
        return 0 if self._is_alone else n_collectives()

    def checker(self) -> Any:
        """What judges results."""
        return (_LoneChecker if self._is_alone else _GroupChecker)(self._scheduled_made, *self._tolerances)

    def _scheduled_made(self) -> tuple[int, Made]:
        assert self._scheduled is not None
        return self._scheduled, self._runs.get(self._scheduled)


class _LoneChecker:
    """Judges the runs of a process that asks nobody, and so may repeat one as often as it needs."""

    n_runs = 1

    def __init__(self, scheduled: Callable[[], tuple[int, Made]], atol: float, rtol: float) -> None:
        self._scheduled = scheduled
        self._tolerances = atol, rtol

    def begin(self, args: Any, kwargs: Any) -> None:
        """Nothing to do before a run."""

    def verdict(self, result: Any, args: Any, kwargs: Any) -> str:
        """Why the scheduled run is wrong; empty if it is right."""
        _, made = self._scheduled()
        if made.ground_truth is None:
            return ""
        try:
            return wrong_output(made.run, made.ground_truth, *self._tolerances, result)
        except Exception as error:  # of a run that works once: this config is out, and the others go on
            if is_fatal(error):  # they could not: it is no verdict on them
                raise
            return f"a repeated run raised {reason_of(error)}"

    def restore(self) -> None:
        """Nothing was changed."""


class _GroupChecker:
    """Judges runs that ranks make together: each runs as often as on any other."""

    n_runs = 2

    def __init__(self, scheduled: Callable[[], tuple[int, Made]], atol: float, rtol: float) -> None:
        self._scheduled = scheduled
        self._tolerances = atol, rtol
        self._at: tuple[int, Checker | None] | None = None

    def begin(self, args: Any, kwargs: Any) -> None:
        """Spoil the memory that results may lie in."""
        try:
            index, made = self._scheduled()
        except Exception:  # noqa: BLE001  # of the factory: the run will raise it, too
            self._at = None
            return
        if self._at is None or self._at[0] != index:
            atol, rtol = self._tolerances
            checks = made.ground_truth is not None
            self._at = index, Checker(Matches(lambda: made.ground_truth, rtol, atol), made.run) if checks else None
        if self._at[1] is not None:
            self._at[1].begin(args, kwargs)

    def verdict(self, result: Any, args: Any, kwargs: Any) -> str:
        """Why the run is wrong; empty if it is right."""
        return self._at[1].verdict(result, args, kwargs) if self._at is not None and self._at[1] is not None else ""

    def restore(self) -> None:
        """Put back what was spoiled."""
        if self._at is not None and self._at[1] is not None:
            self._at[1].restore()


class _NoSlot:
    """Nobody calls what is tuned here by a key."""

    def fill(self, config: Any, timings_ms: Sequence[tuple[Any, float]]) -> None:
        """Nothing to keep."""

    def clear(self) -> None:
        """Nothing was kept."""
