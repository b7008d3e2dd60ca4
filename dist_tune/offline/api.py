"""Functions of tuning scripts: ``tune_kernel`` for one problem, ``tune_and_save_configs`` for the
file that ``load_config`` reads.

A list of problems is tuned by all ranks of a job: shared out (split), or one after the other by all
together (merge). Each problem is one ``Tuning`` with the decorators' search and journal. Records of
what is tuned stay in the cache until the job is over, so that a job which is started again goes on
where it was.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import ConfigDict, TypeAdapter

from dist_tune.accelerator import device_type
from dist_tune.configs import describe
from dist_tune.errors import (
    CommunicatesError,
    DistTuneError,
    NoValidConfigError,
    RankMismatchError,
    StoreGoneError,
    StuckDeviceError,
)
from dist_tune.files import callers_level, rank_of_job
from dist_tune.log import Story
from dist_tune.measure import measure
from dist_tune.offline.config_files import (
    ConfigFile,
    Settled,
    classes_of,
    configs_there,
    save,
    small_medium_large,
)
from dist_tune.offline.problem import (
    Ended,
    Failed,
    MakeRun,
    Outcome,
    Problem,
    SearchOptions,
    SearchStrategy,
    launchable,
)
from dist_tune.offline.runs import RunLaunch
from dist_tune.ranks import (
    Part,
    Ranks,
    Reduction,
    Result,
    WorkQueue,
    all_came,
    check_group,
    device_identity,
    group_of,
    member_ranks,
)
from dist_tune.records import Cache, CacheKey
from dist_tune.replays import FirstRun
from dist_tune.settings import SettingsError, check_mode, read_settings
from dist_tune.sites import is_fatal
from dist_tune.tuning import Tuning, TuningOptions
from dist_tune.validation import spelled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Mode = Literal["split", "merge"]
_ENDED: TypeAdapter[Ended] = TypeAdapter(Ended, config=ConfigDict(ser_json_inf_nan="constants"))
"""The JSON in which the end of a problem travels."""
_n_tuned: Counter[str] = Counter()
"""Problem -> tunings of that name by ``tune_one``: a script that is started again makes them in the
same order.
"""


def tune_kernel(
    search_space: Sequence[Mapping[str, Any]],
    make_run_and_gt_fn: MakeRun,
    config_callback: Callable[[dict[str, Any]], object] | None = None,
    num_iters: int = 10,
    atol: float = 1e-2,
    rtol: float = 1e-2,
    *,
    name: str | None = None,
    search: SearchStrategy = "racing",
    max_configs: int | None = None,
    budget_s: float | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """The fastest config of a space whose runs return the expected output.

    Triton kernels are compiled ahead in threads; every config is checked against the ground truth
    before it is timed, then configs race, and the best few are compared again. The winner runs at
    least ``num_iters`` times more with a check of each result; if one is wrong, the next best is
    checked in its place. A config that raises, does not fit or gives a wrong result is dropped; the
    log has the reason. An interrupted tuning goes on where it was, with the journal under
    ``DIST_TUNE_CACHE_DIR``; a finished one begins anew.

    With torch.distributed initialised all ranks of ``group`` tune it together: collective, and the
    slowest rank decides.

    Args:
        search_space: dicts of values by name. On NVIDIA, configs that differ in AMD's keys alone
            are one, and run without them.
        make_run_and_gt_fn: from a config to ``(run, ground_truth)``: a function without arguments
            that returns the kernel's output, and the expected output (None: not checked). Called
            once a config, and again where memory is short: make shared inputs outside.
        config_callback: called with a copy of each config before it is used, to change it in place.
        num_iters: timed runs of each of the best few, and checked runs of the winner after them.
        atol: an element is right within ``atol + rtol * |expected|``.
        rtol: see ``atol``.
        name: of the problem in the log; that of ``make_run_and_gt_fn`` by default.
        search: "racing" and "exhaustive" try all configs, "random" and "guided" a part of them.
        max_configs: configs tried at most; None: all, or 5 % of them where a part is tried.
        budget_s: seconds after which no new configs are begun.
        group: the ranks that tune together; the world by default, if there is one.

    Returns:
        The best config, as ``config_callback`` leaves it, with AMD's keys as they stand in the
        space.

    Raises:
        NoValidConfigError: no config runs and gives the right result; with the reasons.
        ValueError, TypeError: the space is empty or holds no dicts by name, a number is out of
            range, an option is not of its kind, or the factory returns no pair.
    """
    options = SearchOptions(
        num_iters, atol, rtol, search=search, max_configs=max_configs, budget_s=budget_s
    )
    problem = Problem(
        name or _name(make_run_and_gt_fn), search_space, make_run_and_gt_fn, config_callback
    )
    return problem.config_of(Job("merge", group).tune_one(problem, options).winner)


def tune_problems(
    problems: Sequence[Problem],
    *,
    num_iters: int = 10,
    atol: float = 1e-2,
    rtol: float = 1e-2,
    search: SearchStrategy = "racing",
    max_configs: int | None = None,
    budget_s: float | None = None,
    mode: Mode | None = None,
    group: ProcessGroup | None = None,
) -> list[Ended]:
    """Tune a list of problems; returns their results in order, the same on all ranks.

    Arguments are those of ``tune_kernel``; ``budget_s`` is for each problem. With torch.distributed
    initialised it is collective. ``mode="split"``, the default, gives each problem to one rank,
    from a queue; ``mode="merge"`` tunes one after the other on all ranks, as kernels need that
    communicate. A problem that fails is a ``Failed`` in the list, and the others go on. If a rank
    dies, the others tune the rest and then raise; started again, the job tunes what is missing.

    Raises:
        CommunicatesError: a run talks to other ranks, and ``mode`` is "split".
        RankMismatchError: ranks have other problems, or two of them use one GPU.
        ValueError: two problems have one name, or a number is out of range.
        PeerFailedError, AbsentRanksError: another rank has ended the tuning, or its process.
    """
    options = SearchOptions(
        num_iters, atol, rtol, search=search, max_configs=max_configs, budget_s=budget_s
    )
    job = Job(mode, group)
    ended = job.tune([*problems], options)
    job.finish(lambda: None)
    return ended


def tune_and_save_configs(
    sizes: Sequence[int],
    make_for_size: Callable[[int], MakeRun],
    search_space: Sequence[Mapping[str, Any]],
    json_file_name: str,
    save_path: str | Path,
    *,
    classes: Callable[[int], str] | None = None,
    config_callback: Callable[[dict[str, Any]], object] | None = None,
    **how: Any,
) -> dict[str, dict[str, Any]]:
    """Tune a kernel at several sizes and write one config for each class of sizes into a JSON file;
    returns the written configs.

    Several sizes of one class get the config with the least geometric mean of slowdowns against the
    best of each size, among those that were the best or near it, measured once more at all of them.

    Args:
        sizes: the sizes to tune at.
        make_for_size: from a size to a ``make_run_and_gt_fn`` as ``tune_kernel`` takes it.
        search_space: as of ``tune_kernel``.
        json_file_name: name of the file; classes in it that are not tuned now stay.
        save_path: folder of the file, made if it is missing.
        classes: from a size to the name of its class: ``small_medium_large()`` (the default),
            ``small_medium_large("_M")``, ``m_leq(64, 256, 1024)``, a function.
        config_callback: as of ``tune_kernel``; a config out of the file goes through it once more.
        how: ``min_gain``, and the options of ``tune_problems``.

    Raises:
        DistTuneError: no config runs at some size, or at all sizes of a class; the other classes
            are written before.
        OSError: the file cannot be written. Its note has the configs, and a script that is started
            again measures nothing anew.
        ValueError: no sizes, or one twice, or as of ``tune_problems``.
    """
    named = classes or small_medium_large()
    file = ConfigFile(
        json_file_name,
        sizes,
        make_for_size,
        search_space,
        classes=named,
        config_callback=config_callback,
    )
    return {
        each.size_class: each.config
        for each in tune_files([file], save_path, **how)
        if each.is_saved
    }


def tune_files(
    files: Sequence[ConfigFile],
    save_path: str | Path,
    *,
    min_gain: float | None = None,
    num_iters: int = 10,
    atol: float = 1e-2,
    rtol: float = 1e-2,
    search: SearchStrategy = "racing",
    max_configs: int | None = None,
    budget_s: float | None = None,
    mode: Mode | None = None,
    group: ProcessGroup | None = None,
) -> list[Settled]:
    """``tune_and_save_configs`` for several files, whose sizes are shared out together.

    ``min_gain``: compare with the configs that the files have for these classes, in the same runs,
    and replace only those against which the new one is faster by at least this share: 0.03 is 3 %.
    None replaces all. The rest as of ``tune_problems``.
    """
    options = SearchOptions(
        num_iters, atol, rtol, search=search, max_configs=max_configs, budget_s=budget_s
    )
    job, files = Job(mode, group), [*files]
    first = job.tune([file.problem(size) for file in files for size in file.sizes], options)

    def found() -> str:
        return json.dumps(
            [
                {} if min_gain is None else configs_there(Path(save_path) / file.json_file_name)
                for file in files
            ]
        )

    # Folders of several machines may hold different files.
    there = json.loads(job.agree("files", found))
    ended = iter(first)
    classes = [
        each
        for file, old in zip(files, there, strict=True)
        for each in classes_of(file, {size: next(ended) for size in file.sizes}, old)
    ]
    # All finalists are measured again, because a race times its losers only once.
    finals = [each.finals() for each in classes]
    again = [problem for problems in finals for problem in problems.values()]
    second = job.tune(
        again,
        replace(options, search="exhaustive", max_configs=None, budget_s=None, judges_all=True),
    )
    measured = iter(second)
    choices = [
        each.settle({size: next(measured) for size in sizes}, min_gain)
        for each, sizes in zip(classes, finals, strict=True)
    ]
    settled = [each for each in choices if isinstance(each, Settled)]
    for chosen in settled:
        what = f'{chosen.json_file_name} {chosen.size_class}: "{describe(chosen.config)}"'
        job.say(
            f"{what}, {chosen.regret:.1%} slower than the best config of each of the sizes"
            f" {sorted(chosen.latencies_us)}"
        )
    job.finish(lambda: save(settled, save_path))
    if failed := [each for each in [*first, *second, *choices] if isinstance(each, Failed)]:
        listed = "\n".join(f"{each.name}: {each.error}" for each in failed)
        raise DistTuneError(f"{len(failed)} problems could not be tuned:\n{listed}")
    return settled


def _name(function: Any) -> str:
    qualname = getattr(inspect.unwrap(function), "__qualname__", type(function).__qualname__)
    return (
        f"{getattr(function, '__module__', '')}.{qualname.replace('<locals>.', '')}".removeprefix(
            "__main__."
        )
    )


class Job:
    """The ranks that tune, and the records that they keep meanwhile.

    Every rank of the group makes the same calls.
    """

    def __init__(self, mode: Mode | None = None, group: ProcessGroup | None = None) -> None:
        if mode is not None and mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {spelled(mode)}")
        check_group("group", group)
        settings = read_settings()
        # Its records are deleted at its end, and another script's must not end it: they stay on
        # this machine.
        here = os.pathsep.join(each for each in settings.cache_folders if "://" not in each)
        self._settings = settings.model_copy(update={"cache_path": here})
        is_dist = group is not None or bool(member_ranks(None))
        self._ranks: Ranks = group_of(group, self._settings.deadline_s) if is_dist else Ranks()
        self._is_split = is_dist and mode != "merge"
        self._keys: list[CacheKey] = []
        """Of the records that are this job's."""
        if not is_dist and int(os.environ.get("WORLD_SIZE", "1")) > 1 and rank_of_job() == 0:
            warnings.warn(
                "this is one of several ranks, but torch.distributed is not initialised: each of"
                ' them tunes everything. Call init_process_group("gloo") first to share the'
                " problems out.",
                stacklevel=callers_level(),
            )

    def tune(self, problems: Sequence[Problem], options: SearchOptions) -> list[Ended]:
        """Results of the problems, in order. Collective, and raises as ``tune_problems``."""
        if twice := [
            name
            for name, count in Counter(problem.name for problem in problems).items()
            if count > 1
        ]:
            raise ValueError(f"problems need names of their own, got {twice} twice")
        self._check_equal(problems, options)
        if not self._is_split:
            return [self._ended(problem, options, self._ranks) for problem in problems]
        queue = self._ranks.work_queue(len(problems))
        self._meet("results", lambda: self._share_out(queue, problems, options), all_came)
        return [_ENDED.validate_json(text) for text in queue.results()]

    def tune_one(self, problem: Problem, options: SearchOptions) -> Outcome:
        """Result of one problem that all ranks tune together. Its record is deleted."""
        _n_tuned[problem.name] += 1
        self._check_equal([problem], options)
        outcome = self._outcome(problem, options, self._ranks, _n_tuned[problem.name])
        self._forget()
        return outcome

    def _check_equal(self, problems: Sequence[Problem], options: SearchOptions) -> None:
        """Refuse other problems on another rank: results are known by their index."""
        tasks = [f"{problem.name} {problem.digest[:12]} {options}" for problem in problems]
        device = device_identity() if self._is_split else ""
        if mismatch := self._meet("problems", lambda: (tasks, device), _mismatch):
            raise RankMismatchError(mismatch)

    def agree(self, topic: str, work: Callable[[], str]) -> str:
        """The text of the first rank's ``work``, the same on all ranks."""
        return self._meet(topic, lambda: work() if self._ranks.is_first else "", _first)

    def finish(self, save: Callable[[], object]) -> None:
        """Save the results on the first rank, and then delete the records.

        Every rank returns after the save; an error ends it on all.
        """
        # Its host has saved before us, and its program is at its end.
        with suppress(StoreGoneError):
            self.agree("saving", lambda: str(save()))
        self._forget()

    def say(self, text: str) -> None:
        """One line in this rank's log."""
        with closing(
            Story(self._settings, self._ranks.rank, is_first=self._ranks.writes_progress)
        ) as log:
            log.info(text, shown=True)

    def _meet(self, topic: str, work: Callable[[], Part], fn: Reduction[Part, Result]) -> Result:
        """Do this rank's ``work``, and take ``fn`` of all ranks' parts away.

        An error on one rank ends it on all.
        """
        return self._ranks.agree(f"{topic} of a tuning script", topic, work, fn)

    def _share_out(
        self, queue: WorkQueue, problems: Sequence[Problem], options: SearchOptions
    ) -> None:
        began = time.monotonic()
        try:
            check_mode()  # also on a rank that gets no task
            for task in queue:
                ended = self._ended(problems[task], options, Ranks())
                n_done, seconds = (
                    queue.put(task, _ENDED.dump_json(ended).decode()),
                    time.monotonic() - began,
                )
                left_s = seconds / n_done * (len(problems) - n_done)
                self.say(
                    f"{n_done} of {len(problems)} problems done in {seconds:.0f} s, about"
                    f" {left_s:.0f} s to go"
                )
        except BaseException:
            queue.stop()
            raise

    def _ended(self, problem: Problem, options: SearchOptions, ranks: Ranks) -> Ended:
        """One problem.

        Its own errors make it a ``Failed``; those of this process or of the group are raised.
        """
        try:
            return self._outcome(problem, options, ranks)
        except Exception as error:
            # Becomes a ``Failed``, for all ranks, if only this problem is concerned.
            is_own = ranks.is_alone or isinstance(error, NoValidConfigError)
            if (
                isinstance(error, CommunicatesError | StuckDeviceError | SettingsError)
                or is_fatal(error)
                or not is_own
            ):
                raise
            failed = Failed(problem.name, f"{type(error).__name__}: {error}")
            self.say(f"{problem.name}: {failed.error}")
            return failed

    def _outcome(
        self, problem: Problem, options: SearchOptions, ranks: Ranks, number: int = 0
    ) -> Outcome:
        configs, _ = launchable(problem.search_space)
        chosen = options.chosen(configs)
        tried = [configs[i] for i in chosen]
        launch = RunLaunch(
            problem, tried, options, number, is_alone=ranks.is_alone, refuses_talk=self._is_split
        )
        tuning = Tuning(
            problem.name,
            ranks,
            TuningOptions(options.plan(len(chosen)), uses_cache=True),
            self._settings,
        )
        try:
            tuning.meet(launch)
            tuning.tune(partial(tuning.trials.missed, launch), FirstRun())
            record = next(each for each in tuning.records if each.kernel == problem.name)
            found = dict(zip(chosen, record.candidates, strict=True))
            failures = {i: each.failure for i, each in found.items() if each.failure is not None}
            times = {
                i: each.latency_ms * 1e3
                for i, each in found.items()
                if each.latency_ms is not None and each.failure is None
            }
            winner = chosen[record.winner]
            if winner not in times:  # there is no race where one candidate runs
                run, _ = launch.made(record.winner)
                times[winner] = (
                    measure(run, num_iters=options.num_iters).median_us
                    if ranks.is_alone
                    else math.nan
                )
        finally:
            launch.drop()
        self._keys.append(record.cache_key)
        outcome = Outcome(problem.name, winner, times, failures)
        best = (
            f"{outcome.latency_us:.1f} us, {len(times)} measured, {len(failures)} dropped:"
            f' "{record.best.config}"'
        )
        self.say(f"{problem.name}: {best}")
        return outcome

    def _forget(self) -> None:
        """Delete the records: what is tuned again begins anew."""
        cache = Cache.of(self._settings)
        for key in self._keys:
            with suppress(OSError):
                cache.remove(cache.path_of(key))


@Reduction
def _first(parts: Mapping[int, str]) -> str:
    return next(iter(parts.values()))


@Reduction
def _mismatch(parts: Mapping[int, tuple[list[str], str]]) -> str:
    """Why ranks cannot share the problems: other ones, or one GPU; empty if they can.

    The parts: tasks, and the device.
    """
    first, (tasks, _) = next(iter(parts.items()))
    on: dict[str, int] = {}
    for rank, (own, device) in parts.items():
        for at, (theirs, mine) in enumerate(zip_longest(tasks, own, fillvalue="none")):
            if theirs != mine:
                return (
                    f"ranks {first} and {rank} have other problems, first at index {at}: {theirs!r}"
                    f" and {mine!r}. Build the list from values that are equal on all ranks"
                )
        if device and (other := on.setdefault(device, rank)) != rank:
            return (
                f"ranks {other} and {rank} are on one GPU, {device}, and would time each other:"
                " call "
                f'torch.{device_type()}.set_device(int(os.environ["LOCAL_RANK"])) before anything'
                " is made on a device"
            )
    return ""
