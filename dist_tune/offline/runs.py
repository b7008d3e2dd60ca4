"""Runs of a tuning script: for each config a function without arguments, made by the script's
factory, and its expected result.

Runs hold their inputs, so only as many are kept as memory allows. Knows the factory and its
callback; nothing of search or files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from dist_tune.accelerator import api
from dist_tune.configs import describe_all
from dist_tune.launches import FunctionLaunch, TunableFunction, read_code, refusing_talk
from dist_tune.measure import Checker, Matches, Snapshot, Span
from dist_tune.offline.problem import Problem, Run, SearchOptions
from dist_tune.records import digest
from dist_tune.validation import spelled

Made = tuple[Run, Any]
"""The factory's answer for one config."""
_MAX_HELD = 256
"""Runs kept at most; on a GPU only while at least half of its memory is free, so that they leave
room for the next one.
"""


class RunLaunch(FunctionLaunch):
    """A problem for the tuner: each run of a config is a call of one function.

    Candidates are counted in the order of ``configs``.
    """

    def __init__(
        self,
        problem: Problem,
        configs: Sequence[dict[str, Any]],
        options: SearchOptions,
        number: int = 0,
        *,
        is_alone: bool,
        refuses_talk: bool = False,
    ) -> None:
        """``number``: of the problem among those of its name in this process.

        With ``refuses_talk`` a run that communicates raises.
        """
        function = TunableFunction(
            self.made,
            list(configs),
            describe_all(configs),
            key_fn=None,
            prune_fn=None,
            check=None,
            bucket=None,
        )
        super().__init__(function, key=(), args=(), kwargs={}, is_whole=True)
        self.name, self.identify = problem.name, dict
        self._index = {id(config): i for i, config in enumerate(configs)}
        self._problem, self._options = problem, options
        # All that measurements depend on beside the machine. Before the factory runs, which may
        # keep what it makes.
        functions = [
            str(read_code(each).captured)
            for each in (problem.make_run_and_gt_fn, problem.config_callback)
        ]
        self._source = digest([problem.digest, str(options), str(number), *functions])
        self._is_alone, self._refuses_talk = is_alone, refuses_talk
        self._make = problem.make_run_and_gt_fn if problem.size is None else None
        """The factory, when it is made."""
        self._held: OrderedDict[int, Made | Exception] = OrderedDict()
        self._scheduled = 0

    def code(self) -> str:
        """Digest of code, plain values that it sees, configs and options."""
        return self._source

    def prepare(self, config: dict[str, Any]) -> None:
        """Make the run before the clock is started."""
        self._scheduled = self._index[id(config)]
        self._hold(self._scheduled)

    def run(
        self,
        config: dict[str, Any],
        undo: Snapshot | None,
        span: Span | None = None,
        *,
        is_trial: bool = True,
    ) -> Any:
        """Run it. Raises the errors of the factory, the callback and the run."""
        run, _ = self.made(self._index[id(config)])
        if span is not None:
            span.begin()
            result = run()
            span.end()
            return result
        with refusing_talk(self.name) if self._refuses_talk else nullcontext():
            return run()

    def checker(self) -> Any:
        """The check of runs against their ground truth."""
        return _RunChecker(self, self._options, is_alone=self._is_alone)

    def made(self, index: int | None = None) -> Made:
        """The run of a candidate, or of the one whose turn it is.

        Raises the error of its factory or callback, each time.
        """
        made = self._hold(self._turn if index is None else index)
        if isinstance(made, Exception):
            raise made
        return made

    def drop(self) -> None:
        """Free all runs, and inputs that were made for them."""
        self._held.clear()
        self._make = None

    @property
    def _turn(self) -> int:
        """The candidate whose turn it is: that of the schedule, unless a record has said which one
        to use.
        """
        known = self.slot.config
        return self._scheduled if known is None else self._index[id(known)]

    def _hold(self, index: int) -> Made | Exception:
        if index not in self._held:
            while self._held and (len(self._held) >= _MAX_HELD or _is_memory_short()):
                self._held.popitem(last=False)
            self._held[index] = self._made_now(index)
        self._held.move_to_end(index)
        return self._held[index]

    def _made_now(self, index: int) -> Made | Exception:
        config, problem = dict(self.owner.configs[index]), self._problem
        try:
            if problem.config_callback is not None:
                problem.config_callback(config)
            if self._make is None:
                self._make = problem.make_run_and_gt_fn(problem.size)
            made = self._make(dict(config))  # a copy: launchers may take keys out of it
        except Exception as error:  # noqa: BLE001  # the script's: raised where the run is launched, a vote against this config
            return error.with_traceback(None)
        if made is None:
            return TypeError("make_run_and_gt_fn returned None for this config")
        if isinstance(made, tuple | list) and len(made) == 2 and callable(made[0]):
            return made[0], made[1]
        raise TypeError(
            "make_run_and_gt_fn must return (run, ground_truth): a function without arguments and"
            f" its expected result (None: not checked), got {spelled(made)}"
        )


def _is_memory_short() -> bool:
    # The allocator's own reserve counts as free.
    return bool(
        api.is_available()
        and api.memory_allocated() > 0.5 * api.get_device_properties().total_memory
    )


class _RunChecker(Checker):
    """The check of runs, each with its ground truth."""

    def __init__(self, launch: RunLaunch, options: SearchOptions, *, is_alone: bool) -> None:
        # For the checker the run is an argument of one function that calls it, and names in
        # messages are those of the two functions.
        def run(run: Run) -> Any:
            return run()

        def ground_truth(run: Run) -> Any:
            return launch.made()[1]

        super().__init__(Matches(ground_truth, options.rtol, options.atol), run, is_alone=is_alone)
        # With the two before the race at least as many runs as ``benchmark_config`` makes: 5, and
        # ``num_iters``.
        self.n_last, self.judges_all = options.num_iters + 3, options.judges_all
        self._launch = launch

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_repeated: bool) -> None:
        """Poison the memory that results may lie in, if the scheduled run is checked."""
        try:
            run, ground_truth = self._launch.made()
        except Exception:  # noqa: BLE001  # of the factory: the run will raise it, too
            return
        if ground_truth is not None:
            super().begin((run,), {}, is_repeated=is_repeated)

    def judge(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Reason why the scheduled run is wrong; empty if it is right."""
        run, ground_truth = self._launch.made()
        return "" if ground_truth is None else super().judge(result, (run,), {})
