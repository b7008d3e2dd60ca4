"""A list of problems, tuned by all ranks of a job: shared out (split), or one after the other by all together (merge).

Each problem is one ``Tuning`` with the decorators' search and journal. Records of what is tuned stay in the cache until the job is over,
so that a job which is started again goes on where it was.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import ConfigDict, TypeAdapter

from dist_tune.cache import Cache, CacheKey
from dist_tune.distributed import Part, Ranks, Reduction, Result, WorkQueue, check_group, device_identity, group_of, member_ranks
from dist_tune.errors import CommunicatesError, DistTuneError, NoValidConfigError, RankMismatchError, StoreGoneError, StuckDeviceError
from dist_tune.measure import measure
from dist_tune.offline.problem import Ended, Failed, Outcome, Problem, SearchOptions, launchable
from dist_tune.offline.runs import RunLaunch
from dist_tune.output import tuning_log
from dist_tune.settings import read_settings
from dist_tune.sites import is_fatal
from dist_tune.tuning import Tuning, TuningOptions
from dist_tune.validation import spelled
from dist_tune.warn_once import callers_level

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Mode = Literal["split", "merge"]
_ENDED: TypeAdapter[Ended] = TypeAdapter(Ended, config=ConfigDict(ser_json_inf_nan="constants"))
"""The JSON in which the end of a problem travels."""
_n_tuned: Counter[str] = Counter()
"""Problem -> tunings of that name by ``tune_one``: a script that is started again makes them in the same order."""


class Job:
    """Problems to tune, and the ranks that tune them. Collective: every rank of the group makes the same calls.

    ``mode``: "split" gives each problem to one rank; "merge" tunes one after the other on all ranks, as kernels need that communicate. A
    process without torch.distributed tunes all of them alone.
    """

    def __init__(self, mode: Mode | None = None, group: ProcessGroup | None = None) -> None:
        if mode is not None and mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {spelled(mode)}")
        check_group("group", group)
        self._settings = read_settings()
        is_dist = group is not None or bool(member_ranks(None))
        self._ranks: Ranks = group_of(group, self._settings.deadline_s) if is_dist else Ranks()
        self._is_split = is_dist and mode != "merge"
        self._keys: list[CacheKey] = []
        """Of the records that are this job's."""
        if not is_dist and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            warnings.warn(
                "this is one of several ranks, but torch.distributed is not initialised: each of them tunes everything. Call "
                'init_process_group("gloo") first to share the problems out.',
                stacklevel=callers_level(),
            )

    def tune(self, problems: Sequence[Problem], options: SearchOptions) -> list[Ended]:
        """Results of the problems, in order; the same on all ranks.

        Raises:
            CommunicatesError: problems were to be shared out, and a run of one talks to other ranks.
            RankMismatchError: ranks have different problems.
            ValueError: two problems have one name, or two ranks use one GPU.
            DistTuneError: this rank cannot go on, or another one has ended the tuning or its process.
        """
        names = [problem.name for problem in problems]
        if len(set(names)) < len(names):
            raise ValueError(f"problems need names of their own, got {sorted(name for name in set(names) if names.count(name) > 1)} twice")
        if not self._is_split:
            return [self._ended(problem, options, self._ranks) for problem in problems]
        tasks = [f"{problem.name} {problem.digest[:12]} {options}" for problem in problems]
        other_problems, one_device = self._meet("problems", lambda: (tasks, device_identity()), _checked)
        if other_problems:
            raise RankMismatchError(other_problems)
        if one_device:
            raise ValueError(one_device)
        queue = self._ranks.work_queue(len(problems))
        self._meet("results", lambda: self._share_out(queue, problems, options), _none)
        return [_ENDED.validate_json(text) for text in queue.results()]

    def tune_one(self, problem: Problem, options: SearchOptions) -> Outcome:
        """Result of one problem that all ranks tune together. Its record is deleted."""
        _n_tuned[problem.name] += 1
        outcome = self._outcome(problem, options, self._ranks, _n_tuned[problem.name])
        self._forget()
        return outcome

    def agree(self, text: str) -> str:
        """The first rank's text, the same on all ranks."""
        return self._meet("files", lambda: text, _first)

    def finish(self, save: Callable[[], str]) -> str:
        """Save the results on the first rank, and delete the records. Every rank returns after the save, what ``save`` returned.

        ``save``: returns why some results could not be saved, as text. The records stay then; an empty text is success.
        """
        why = ""
        with suppress(StoreGoneError):  # its host has saved before us, and its program is at its end
            why = self._meet("saving", lambda: save() if self._ranks.is_first else "", _first)
        if not why:
            self._forget()
        return why

    def _meet(self, topic: str, work: Callable[[], Part], fn: Reduction[Part, Result]) -> Result:
        """Do this rank's ``work``, and take ``fn`` of all ranks' parts away. An error on one rank ends it on all."""
        return self._ranks.agree(f"{topic} of a tuning script", topic, work, fn)

    def _share_out(self, queue: WorkQueue, problems: Sequence[Problem], options: SearchOptions) -> None:
        began, members = time.monotonic(), self._ranks.members
        start = members.index(self._ranks.rank) / len(members)
        try:
            for task in queue:
                ended = self._ended(problems[task], options, Ranks(), start)
                n_done, seconds = queue.put(task, _ENDED.dump_json(ended).decode()), time.monotonic() - began
                left_s = seconds / n_done * (len(problems) - n_done)
                self._say(
                    f"{n_done} of {len(problems)} problems done on {len(members)} ranks in {seconds:.0f} s, about {left_s:.0f} s to go"
                )
        except BaseException:
            queue.stop()
            raise

    def _ended(self, problem: Problem, options: SearchOptions, ranks: Ranks, start: float = 0.0) -> Ended:
        """One problem. Its own errors make it a ``Failed``; those of this process or of the group are raised."""
        try:
            return self._outcome(problem, options, ranks, start=start)
        except Exception as error:  # becomes a ``Failed``, for all ranks, if only this problem is concerned
            is_own = ranks.is_alone or isinstance(error, NoValidConfigError)
            if isinstance(error, CommunicatesError | StuckDeviceError) or is_fatal(error) or not is_own:
                raise
            failed = Failed(problem.name, f"{type(error).__name__}: {error}")
            self._say(f"{problem.name}: {failed.error}")
            return failed

    def _outcome(self, problem: Problem, options: SearchOptions, ranks: Ranks, number: int = 0, start: float = 0.0) -> Outcome:
        began = time.monotonic()
        configs, _ = launchable(problem.search_space)
        chosen = options.chosen(configs)
        launch = RunLaunch(
            problem.name, [configs[i] for i in chosen], problem.make_run_and_gt_fn, problem.config_callback, (options.atol, options.rtol),
            problem.digest_with(options, number), is_alone=ranks.is_alone, refuses_talk=self._is_split,
        )  # fmt: skip
        plan = TuningOptions(options.plan(len(chosen), start), uses_cache=True)
        tuning = Tuning(problem.name, ranks, plan, self._settings)
        try:
            tuning.meet(launch)
            with raising_on_termination():
                tuning.tune(partial(tuning.missed, launch), None)
            record = next(each for each in tuning.records if each.kernel == problem.name)
            times = {
                i: each.latency_ms * 1e3 for i, each in enumerate(record.candidates) if each.latency_ms is not None and each.failure is None
            }
            if record.winner not in times and ranks.is_alone:  # there is no race where one candidate runs
                times[record.winner] = measure(launch.made(record.winner).run, num_iters=options.num_iters).median_us
        finally:
            launch.drop()
            problem.release()
        self._keys.append(record.cache_key)
        failures = {i: each.failure for i, each in enumerate(record.candidates) if each.failure is not None}
        outcome = Outcome(
            problem.name, chosen[record.winner], times.get(record.winner, float("nan")), {chosen[i]: us for i, us in times.items()},
            {chosen[i]: reason for i, reason in failures.items()}, n_configs=len(configs), seconds=time.monotonic() - began,
            n_resumed=len(times.keys() - launch.timed) if len(times) > 1 else 0,
        )  # fmt: skip
        best = f'{outcome.latency_us:.1f} us, {len(times)} measured, {len(failures)} dropped: "{record.best.config}"'
        self._say(f"{problem.name}: {best}")
        return outcome

    def _forget(self) -> None:
        """Delete the records: what is tuned again begins anew."""
        cache = Cache(self._settings.cache_folders, is_shared=self._settings.cache_shared)
        for key in self._keys:
            with suppress(OSError):
                cache.remove(cache.path_of(key))

    def _say(self, text: str) -> None:
        with tuning_log(self._settings, self._ranks.rank, self._ranks.writes_progress) as log:
            log.bind(progress=True).info(text)


def raise_failures(ended: Sequence[Any]) -> None:
    """Raise a ``DistTuneError`` that names the failed problems, if there are any."""
    if failed := [each for each in ended if isinstance(each, Failed)]:
        listed = "\n".join(f"{each.name}: {each.error}" for each in failed)
        raise DistTuneError(f"{len(failed)} of {len(ended)} problems could not be tuned:\n{listed}")


@contextmanager
def raising_on_termination() -> Iterator[None]:
    """Let SIGTERM, by which launchers and schedulers stop a process, raise ``SystemExit``, so that the journal can note the interruption.

    A handler of the user's stays, and threads other than the main one are left as they are.
    """
    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@Reduction
def _first(parts: Mapping[int, str]) -> str:
    return next(iter(parts.values()))


@Reduction
def _none(parts: Mapping[int, None]) -> None:
    """Nothing but that all ranks have come."""


@Reduction
def _checked(parts: Mapping[int, tuple[list[str], str]]) -> tuple[str, str]:
    """Which ranks have other problems, and which one GPU; empty if they can share the problems. The parts: tasks, and the device."""
    first, (tasks, _) = next(iter(parts.items()))
    devices: dict[str, int] = {}
    for rank, (own, device) in parts.items():
        if own != tasks:
            pairs = enumerate(zip_longest(tasks, own, fillvalue="none"))
            at, (theirs, mine) = next((k, pair) for k, pair in pairs if pair[0] != pair[1])
            return (
                f"ranks {first} and {rank} have other problems, first at index {at}: {theirs!r} and {mine!r}. Build the list from values "
                f"that are equal on all ranks"
            ), ""
        if device and (other := devices.setdefault(device, rank)) != rank:
            return "", (
                f"ranks {other} and {rank} are on one GPU, {device}, and would time each other: call "
                f'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything is made on a device'
            )
    return "", ""
