"""A list of problems, tuned by all ranks of a job: shared out (split), or one after the other by all together (merge).

Knows which rank tunes which problem, and which errors end the job; tuner.py tunes one problem.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import ConfigDict, TypeAdapter

from dist_tune.distributed import Ranks, Reduction, WorkQueue, check_group, device_identity, group_of, member_ranks, shared_store
from dist_tune.errors import CommunicatesError, DistTuneError, NoValidConfigError, StuckDeviceError
from dist_tune.offline.journal import forget
from dist_tune.offline.problem import Ended, Failed, Outcome, Problem, SearchOptions
from dist_tune.offline.rounds import TunerContext
from dist_tune.offline.tuner import Tuner
from dist_tune.output import tuning_log
from dist_tune.settings import read_settings
from dist_tune.sites import is_fatal
from dist_tune.validation import spelled
from dist_tune.warn_once import callers_level

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dist_tune.output import Logger

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
        self._journals: set[Path] = set()
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
            DistTuneError: this rank cannot go on, or another one has ended the tuning.
        """
        names = [problem.name for problem in problems]
        if len(set(names)) < len(names):
            raise ValueError(f"problems need names of their own, got {sorted(name for name in set(names) if names.count(name) > 1)} twice")
        with self._log() as log:
            context = TunerContext(self._ranks, self._settings, log, keeps_journal=True)
            if self._is_split:
                return self._share_out(problems, options, replace(context, ranks=Ranks(), refuses_talk=True))
            return [self._tune(problem, options, context) for problem in problems]

    def tune_one(self, problem: Problem, options: SearchOptions) -> Outcome:
        """Result of one problem that all ranks tune together. Its journal is deleted."""
        _n_tuned[problem.name] += 1
        with self._log() as log:
            context = TunerContext(self._ranks, self._settings, log, ordinal=_n_tuned[problem.name])
            return Tuner(problem, options, context).tune()

    def agree(self, text: str) -> str:
        """One rank's text, the same on all ranks."""
        if self._is_split:
            # No wait for another rank, which may be dead: the first text stands.
            return shared_store(f"dist_tune/agreed/{self._space()}").compare_set("text", "", text).decode()
        with self._ranks.meeting("files"):
            return self._ranks.reduce("files", text, _first)

    def finish(self, save: Callable[[], str]) -> str:
        """Save the results on one rank, and delete the journals. Every rank returns after the save, what ``save`` returned.

        ``save``: returns why some results could not be saved, as text. The journals stay then; an empty text is success.
        """
        if self._is_split:
            why = self._queue([]).merge(save)
        else:
            with self._ranks.meeting("saving"):
                why = self._ranks.reduce("saved", save() if self._ranks.is_first else "", _first)
        if not why:
            for path in self._journals:
                forget(path)
        return why

    def _log(self) -> AbstractContextManager[Logger]:
        return tuning_log(self._settings, self._ranks.rank, self._ranks.writes_progress)

    def _space(self) -> str:
        """Part of the store for one call of these ranks."""
        calls = self._ranks.calls("jobs")
        calls.n_calls += 1
        return f"{'-'.join(map(str, self._ranks.members))}/{calls.n_calls}"

    def _queue(self, tasks: list[str]) -> WorkQueue:
        return WorkQueue(self._space(), self._ranks.rank, self._ranks.members, tasks, self._settings.deadline_s)

    def _share_out(self, problems: Sequence[Problem], options: SearchOptions, context: TunerContext) -> list[Ended]:
        queue = self._queue([f"{problem.name} {problem.digest} {options}" for problem in problems])
        rank, members = self._ranks.rank, self._ranks.members
        if (device := device_identity()) and (other := queue.claim(device)) != rank:
            reason = (
                f"ranks {other} and {rank} are on one GPU, {device}, and would time each other: call "
                f'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything is made on a device'
            )
            queue.stop(reason)
            raise ValueError(reason)
        began = time.monotonic()
        context = replace(context, start=members.index(rank) / len(members))

        def work(task: int) -> str:
            try:
                ended = self._tune(problems[task], options, context)
            except CommunicatesError as error:
                queue.stop(str(error))
                raise
            n_done, seconds = queue.n_done + 1, time.monotonic() - began
            context.say(
                f"{n_done} of {len(problems)} problems done on {len(members)} ranks in {seconds:.0f} s, about "
                f"{seconds / n_done * (len(problems) - n_done):.0f} s to go"
            )
            return _ENDED.dump_json(ended).decode()

        return [_ENDED.validate_json(text) for text in queue.run(work)]

    def _tune(self, problem: Problem, options: SearchOptions, context: TunerContext) -> Ended:
        """One problem. Its own errors make it a ``Failed``; those of this process or of the group are raised."""
        try:
            tuner = Tuner(problem, options, context)
            self._journals.add(tuner.journal_path)
            return tuner.tune()
        except Exception as error:  # becomes a ``Failed``, for all ranks, if only this problem is concerned
            is_own = context.ranks.is_alone or isinstance(error, NoValidConfigError)
            if isinstance(error, CommunicatesError | StuckDeviceError) or is_fatal(error) or not is_own:
                raise
            failed = Failed(problem.name, f"{type(error).__name__}: {error}")
            context.log.bind(progress=True).error(f"{problem.name}: {failed.error}")
            return failed


def raise_failures(ended: Sequence[Ended]) -> None:
    """Raise a ``DistTuneError`` that names the failed problems, if there are any."""
    if failed := [each for each in ended if isinstance(each, Failed)]:
        listed = "\n".join(f"{each.name}: {each.error}" for each in failed)
        raise DistTuneError(f"{len(failed)} of {len(ended)} problems could not be tuned:\n{listed}")


@Reduction
def _first(parts: Mapping[int, str]) -> str:
    return next(iter(parts.values()))
