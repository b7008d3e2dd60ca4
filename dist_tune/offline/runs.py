"""Runs of a tuning script: for each config a function without arguments, made by the script's factory, and its expected result.

Runs hold their inputs, so only as many are kept as memory allows. Knows the factory and its callback; nothing of search, files or ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch

from dist_tune.compiler import reason_of
from dist_tune.configs import describe_all
from dist_tune.measure import Checker, Matches, Span
from dist_tune.runtime import FunctionLaunch, TunableFunction, Undo, Watch
from dist_tune.sites import is_fatal
from dist_tune.validation import spelled

Run = Callable[[], Any]
MakeRun = Callable[[dict[str, Any]], tuple[Run, Any]]
"""From a config to a run and its expected result (None: not checked)."""
_MAX_HELD = 256
"""Runs kept at most; on a GPU only while at least half of its memory is free."""


class Made(NamedTuple):
    """The factory's answer for one config."""

    run: Run
    ground_truth: Any


class Candidate(dict[str, Any]):
    """A config with its index in the space. The callback may change its values, and not its text."""

    def __init__(self, index: int, config: dict[str, Any], text: str) -> None:
        super().__init__(config)
        self.index = index
        self.text = text


class Runs:
    """The runs of one problem, made when they are first needed."""

    def __init__(self, make: MakeRun, configs: Sequence[dict[str, Any]], callback: Callable[[dict[str, Any]], object] | None) -> None:
        self.candidates = [Candidate(i, *each) for i, each in enumerate(zip(configs, describe_all(configs), strict=True))]
        self.capacity = _MAX_HELD
        """Runs that can be held at once, as far as is known."""
        self._make = make
        self._callback = callback
        self._changed: set[int] = set()
        self._held: OrderedDict[int, Made | Exception] = OrderedDict()

    def hold(self, index: int) -> Made | Exception:
        """The run of a candidate, or the error of its factory or callback."""
        if index not in self._held:
            self._drop_oldest()
            self._held[index] = self._made(self.candidates[index])
        self._held.move_to_end(index)
        return self._held[index]

    def get(self, index: int) -> Made:
        """The run of a candidate. Raises the error of its factory or callback, each time."""
        made = self.hold(index)
        if isinstance(made, Exception):
            raise made
        return made

    def drop(self) -> None:
        """Free all runs."""
        self._held.clear()

    def make_room(self, kept: int | None = None) -> None:
        """Free all runs but one: running out of memory here is our fault, not the candidate's."""
        self.capacity = max(2, min(self.capacity, len(self._held)))
        self._held = OrderedDict((i, each) for i, each in self._held.items() if i == kept)
        torch.cuda.empty_cache()

    def _made(self, config: Candidate) -> Made | Exception:
        try:
            if self._callback is not None and config.index not in self._changed:
                self._callback(config)
                self._changed.add(config.index)
            try:
                made = self._make(dict(config))  # a copy: launchers may take keys out of it
            except torch.OutOfMemoryError:
                self.make_room()
                made = self._make(dict(config))
        except Exception as error:  # noqa: BLE001  # the script's: raised where the run is launched, a vote against this config
            return error.with_traceback(None)
        return _as_made(made)

    def _drop_oldest(self) -> None:
        while len(self._held) >= _MAX_HELD:
            self._held.popitem(last=False)
        while len(self._held) > 1 and _is_memory_short():
            self._held.popitem(last=False)
            self.capacity = max(2, min(self.capacity, len(self._held)))


def _as_made(made: object) -> Made | Exception:
    """The factory's answer. None is a vote against the config; any other answer that is no pair is a mistake in the script.

    Raises:
        TypeError: the answer is no pair of a function and its expected result.
    """
    if made is None:
        return TypeError("make_run_and_gt_fn returned None for this config")
    if isinstance(made, tuple | list) and len(made) == 2 and callable(made[0]):
        return Made(*made)
    raise TypeError(
        f"make_run_and_gt_fn must return (run, ground_truth): a function without arguments and its expected result (None: not checked), "
        f"got {spelled(made)}"
    )


def _is_memory_short() -> bool:
    # The allocator's own reserve counts as free.
    return torch.cuda.is_available() and torch.cuda.memory_allocated() > 0.5 * torch.cuda.get_device_properties().total_memory


class RunLaunch(FunctionLaunch):
    """One round of a problem: some of its candidates, by index. Each run of a candidate is a call of one function."""

    name = ""
    identity: Mapping[str, str] = {}

    def __init__(
        self, name: str, runs: Runs, indices: Sequence[int], tolerances: tuple[float, float], *, is_alone: bool, is_watched: bool
    ) -> None:
        """``tolerances``: absolute and relative; ``is_watched``: a run that communicates with other ranks raises."""
        candidates = [runs.candidates[i] for i in indices]
        texts = [each.text for each in candidates]
        function = TunableFunction(runs.get, [*candidates], texts, key_fn=None, prune_fn=None, check=None, bucket=None)
        super().__init__(function, key=(), slot_key=(), args=(), kwargs={}, is_whole=not is_alone)
        self.name = name
        self.is_recorded = not is_alone
        """Runs of a process alone were compiled before; ranks that run together share the compilation out."""
        self._runs = runs
        self._tolerances = tolerances
        self._is_alone = is_alone
        self._is_watched = is_watched
        self._scheduled: int | None = None

    def source(self) -> str:
        """Empty: scripts keep their results in their own files."""
        return ""

    def not_followed(self) -> list[str]:
        """None, as nothing is kept."""
        return []

    def prepare(self, config: dict[str, Any]) -> None:
        """Make the run before the clock is started."""
        assert isinstance(config, Candidate)
        self._scheduled = config.index
        self._runs.hold(config.index)

    def run(self, config: dict[str, Any], undo: Undo | None, span: Span | None = None, *, is_trial: bool = True) -> Any:
        """Run it. Raises the errors of the factory, the callback and the run."""
        assert isinstance(config, Candidate)
        run = self._runs.get(config.index).run
        if span is None:
            with Watch() if self._is_watched else nullcontext():
                try:
                    return run()
                except torch.OutOfMemoryError:
                    if not self._is_alone:  # the others do not run once more
                        raise
                    self._runs.make_room(config.index)
                    return run()
        span.begin()
        result = run()
        span.end()
        return result

    def checker(self) -> Any:
        """The check of runs against their ground truth."""
        return _RunChecker(self._scheduled_made, self._tolerances, self._make_room if self._is_alone else None)

    def _scheduled_made(self) -> Made:
        assert self._scheduled is not None
        return self._runs.get(self._scheduled)

    def _make_room(self) -> None:
        self._runs.make_room(self._scheduled)


class _RunChecker(Checker):
    """The check of runs, each with its ground truth: repeated at will by a process that is alone, equally often by ranks together."""

    def __init__(self, scheduled: Callable[[], Made], tolerances: tuple[float, float], make_room: Callable[[], None] | None) -> None:
        """``make_room`` frees the memory of other runs; None if ranks run together."""

        # For the checker the run is an argument of one function that calls it, and names in messages are those of the two functions.
        def run(run: Run) -> Any:
            self._is_repeating = True
            return run()

        def ground_truth(run: Run) -> Any:
            return scheduled().ground_truth

        atol, rtol = tolerances
        super().__init__(Matches(ground_truth, rtol, atol), run, is_repeatable=make_room is not None)
        self._scheduled = scheduled
        self._make_room = make_room
        self._is_repeating = False

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_repeated: bool) -> None:
        """Poison the memory that results may lie in, if the scheduled run is checked."""
        try:
            made = self._scheduled()
        except Exception:  # noqa: BLE001  # of the factory: the run will raise it, too
            return
        if made.ground_truth is not None:
            super().begin((made.run,), {}, is_repeated=is_repeated)

    def judge(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Reason why the scheduled run is wrong; empty if it is right."""
        made = self._scheduled()
        if made.ground_truth is None:
            return ""
        self._is_repeating = False
        try:
            if self._make_room is not None:
                with suppress(torch.OutOfMemoryError):
                    return super().judge(result, (made.run,), {})
                self._make_room()  # copies of the result did not fit beside the runs that are held
            return super().judge(result, (made.run,), {})
        except Exception as error:  # of a run that works once: a vote against this config
            if self._make_room is None or is_fatal(error):  # the device is lost, also to the other configs
                raise
            return f"{'a repeated run' if self._is_repeating else 'its check'} raised {reason_of(error)}"
