"""A list of problems, tuned by all ranks of a job: shared out (split), or one after the other by all together (merge).

Knows who does what, and what a problem's end means to the others; how one problem is tuned is the ``Tuner``'s.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from dist_tune.distributed import Ranks, Reduction, Solo, WorkQueue, device_identity, group_of, member_ranks, shared_store
from dist_tune.errors import CommunicatesError, DistTuneError, NoValidConfigError, StuckDeviceError
from dist_tune.log import tuning_log
from dist_tune.offline.journal import forget
from dist_tune.offline.problem import Outcome, Problem, SearchOptions
from dist_tune.offline.tuner import Tuner
from dist_tune.settings import Settings
from dist_tune.tuning import is_fatal

if TYPE_CHECKING:
    import loguru
    from torch.distributed import ProcessGroup

Mode = Literal["split", "merge"]


@dataclass(frozen=True, slots=True)
class Failed:
    """A problem that could not be tuned."""

    name: str
    error: str
    """"Type: message"."""


Ended = Outcome | Failed
_n_calls: Counter[tuple[int, ...]] = Counter()
"""Ranks -> calls that they have made together in this process, in the same order."""
_n_tuned: Counter[str] = Counter()
"""Problem -> how often one of its name was tuned in this process."""


class Job:
    """Problems to tune, and the ranks that do it. Collective: every rank of the group makes the same calls.

    ``mode``: "split" gives each problem to one rank; "merge" tunes one after the other on all ranks, as kernels need that communicate. A
    process without torch.distributed does everything alone.
    """

    def __init__(self, compile_cost: SearchOptions, mode: Mode | None = None, group: ProcessGroup | None = None) -> None:
        if mode is not None and mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
        self._settings = Settings()
        self.compile_cost = compile_cost
        is_dist = group is not None or bool(member_ranks(None))
        self._ranks: Ranks = group_of(group, self._settings.deadline_s) if is_dist else Solo()
        self._is_split = is_dist and mode != "merge"
        self._journals: set[Path] = set()
        if not is_dist and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            warnings.warn(
                "this is one of several ranks, but torch.distributed is not initialised: each of them tunes everything. Call "
                'init_process_group("gloo") first to share the problems out.',
                stacklevel=4,
            )

    def tune(self, problems: Sequence[Problem], compile_cost: SearchOptions | None = None) -> list[Ended]:
        """What came of each problem, in order; the same on all ranks.

        Raises:
            CommunicatesError: problems were to be shared out, and a run of one talks to other ranks.
            RankMismatchError: ranks have different problems.
            ValueError: two problems have one name, or two ranks use one GPU.
            DistTuneError: this rank cannot go on, or another one has ended the tuning.
        """
        names = [problem.name for problem in problems]
        if len(set(names)) < len(names):
            raise ValueError(f"problems need names of their own, got {sorted(name for name in set(names) if names.count(name) > 1)} twice")
        compile_cost = compile_cost or self.compile_cost
        with self._log() as log:
            if self._is_split:
                return self._own_share(problems, compile_cost, log)
            return [self._tune_one(problem, compile_cost, self._ranks, log) for problem in problems]

    def tune_one(self, problem: Problem) -> Outcome:
        """What came of one problem that all ranks tune together. Nothing of it is kept.

        Raises:
            NoValidConfigError: nothing in its space runs and answers rightly.
            Exception: what a session raises.
        """
        with self._log() as log:
            return Tuner(problem, self.compile_cost, self._ranks, self._settings, log, ordinal=_ordinal(problem)).tune()

    def agree(self, text: str) -> str:
        """What all go by, if ranks may have found different things."""
        if self._is_split:
            store = shared_store(f"dist_tune/agreed/{self._space()}")
            return store.compare_set("text", "", text).decode()
        self._ranks.enter("files", self._number())
        return self._ranks.reduce("files", text, _first)

    def finish(self, save: Callable[[], None]) -> None:
        """Save what was found, on one rank; nothing of it can be resumed afterwards. Every rank returns when it is saved."""
        if self._is_split:
            self._queue([]).merge(save)
        else:
            self._ranks.enter("saving", self._number())
            try:
                if self._ranks.is_first:
                    save()
            except BaseException as error:
                self._ranks.abort(error)
                raise
            self._ranks.reduce("saved", "", _first)
        for path in self._journals:
            forget(path)

    def _log(self) -> AbstractContextManager[loguru.Logger]:
        is_first = self._ranks.writes_progress
        return tuning_log(self._settings, self._ranks.rank, is_first)

    def _number(self) -> int:
        _n_calls[self._ranks.members] += 1
        return _n_calls[self._ranks.members]

    def _space(self) -> str:
        """Of the store, for one call of these ranks."""
        return f"{'-'.join(map(str, self._ranks.members))}/{self._number()}"

    def _queue(self, tasks: list[str]) -> WorkQueue:
        return WorkQueue(self._space(), self._ranks.rank, self._ranks.members, tasks, self._settings.deadline_s)

    def _own_share(self, problems: Sequence[Problem], compile_cost: SearchOptions, log: loguru.Logger) -> list[Ended]:
        queue = self._queue([f"{problem.name} {problem.digest} {compile_cost}" for problem in problems])
        if (device := device_identity()) and (other := queue.claim(device)) != self._ranks.rank:
            reason = (
                f"ranks {other} and {self._ranks.rank} are on one GPU, {device}, and would time each other: call "
                f'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything is made on a device'
            )
            queue.stop(reason)
            raise ValueError(reason)
        began = time.monotonic()
        start = self._ranks.members.index(self._ranks.rank) / len(self._ranks.members)

        def work(task: int) -> str:
            try:
                ended = self._tune_one(problems[task], compile_cost, Solo(), log, start=start, watches=True)
            except CommunicatesError as error:
                queue.stop(str(error))
                raise
            n_done, seconds = queue.n_done + 1, time.monotonic() - began
            log.bind(progress=True).info(
                f"{n_done} of {len(problems)} problems done on {len(self._ranks.members)} ranks in {seconds:.0f} s, about "
                f"{seconds / n_done * (len(problems) - n_done):.0f} s to go"
            )
            return json.dumps({"kind": type(ended).__name__, **asdict(ended)})

        return [_read(text) for text in queue.run(work)]

    def _tune_one(
        self, problem: Problem, compile_cost: SearchOptions, ranks: Ranks, log: loguru.Logger, *, start: float = 0.0, watches: bool = False
    ) -> Ended:
        """One problem. What is wrong with it is no reason to leave the others; what is wrong with this process is."""
        try:
            tuner = Tuner(problem, compile_cost, ranks, self._settings, log, start=start, watches=watches, keeps=True)
            self._journals.add(tuner.journal_path)
            return tuner.tune()
        except Exception as error:  # the problem's, unless it is raised again here: then it is that of this process, or of all ranks
            is_its_own = ranks.is_alone or isinstance(error, NoValidConfigError)
            if isinstance(error, CommunicatesError | StuckDeviceError) or is_fatal(error) or not is_its_own:
                raise
            failed = Failed(problem.name, f"{type(error).__name__}: {error}")
            log.bind(progress=True).error(f"{problem.name}: {failed.error}")
            return failed


def _ordinal(problem: Problem) -> int:
    """Of the calls for problems of one name: a script that is started again makes them in the same order."""
    _n_tuned[problem.name] += 1
    return _n_tuned[problem.name]


def _read(text: str) -> Ended:
    values = json.loads(text)
    if values.pop("kind") == "Failed":
        return Failed(**values)
    for name in ("latencies_us", "failures"):
        values[name] = {int(i): value for i, value in values[name].items()}
    return Outcome(**values)


def raise_failures(ended: Sequence[Ended]) -> None:
    """Say what failed, if anything did.

    Raises:
        DistTuneError: names all that failed.
    """
    if failed := [each for each in ended if isinstance(each, Failed)]:
        listed = "\n".join(f"{each.name}: {each.error}" for each in failed)
        raise DistTuneError(f"{len(failed)} of {len(ended)} problems could not be tuned:\n{listed}")


@Reduction
def _first(parts: Mapping[int, str]) -> str:
    return next(iter(parts.values()))
