"""Functions of tuning scripts: ``tune_kernel`` for one problem, ``tune_and_save_configs`` for the
file that ``load_config`` reads.

A list of problems is tuned by all ranks of a job: shared out (split), or one after the other by all
together (merge). Each problem is one ``Tuning`` with the decorators' search and journal. Records of
what is tuned stay in the cache until the job is over, so that a job which is started again goes on
where it was.
"""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import TypeAdapter

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
from dist_tune.offline.config_files import (
    content,
    finalists,
    save_files,
    slowdowns,
    small_medium_large,
)
from dist_tune.offline.problem import (
    MakeRun,
    Outcome,
    Problem,
    SearchOptions,
    SearchStrategy,
    distinct,
    without_amd_keys,
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
from dist_tune.validation import check_function, spelled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Mode = Literal["split", "merge"]
_ENDED: TypeAdapter[Outcome | str] = TypeAdapter(Outcome | str)
"""The JSON in which the end of a problem travels: its result, or why there is none."""
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
    options = SearchOptions(num_iters, atol, rtol, search, max_configs, budget_s)
    space = distinct(search_space)
    name = name or _name(make_run_and_gt_fn)
    problem = Problem(name, space, make_run_and_gt_fn, config_callback)
    return problem.config_of(Job("merge", group).tune_one(problem, options).winner)


def tune_and_save_configs(
    sizes: Sequence[Any],
    make_for_size: Callable[[Any], MakeRun],
    search_space: Sequence[Mapping[str, Any]],
    json_file_name: str | Callable[[Any], str],
    save_path: str | Path,
    *,
    classes: Callable[[Any], str] | None = None,
    config_callback: Callable[[dict[str, Any]], object] | None = None,
    mode: Mode | None = None,
    group: ProcessGroup | None = None,
    **how: Any,
) -> dict[str, dict[str, Any]]:
    """Tune a kernel at several sizes and write one config for each class of sizes into a JSON file;
    returns the written configs by class.

    Several sizes of one class get the config with the least geometric mean of slowdowns against the
    best of each size, among those that were the best or near it, measured once more at all of them.

    With torch.distributed initialised it is collective: sizes are shared out over ranks. If a rank
    dies, the others tune the rest and then raise; started again, the job tunes what is missing.

    Args:
        sizes: the sizes to tune at: numbers, or tuples of them.
        make_for_size: from a size to a ``make_run_and_gt_fn`` as ``tune_kernel`` takes it.
        search_space: as of ``tune_kernel``.
        json_file_name: name of the file; classes in it that are not tuned now stay. A function from
            a size to a name tunes for several files, and returns the configs by file and class.
        save_path: folder of the file, made if it is missing.
        classes: from a size to the name of its class: ``small_medium_large()`` (the default),
            ``small_medium_large("_M")``, ``m_leq(64, 256, 1024)``, a function.
        config_callback: as of ``tune_kernel``.
        mode: "split", the default, gives each size to one rank, from a queue; "merge" tunes one
            after the other on all ranks, as kernels need that communicate.
        group: the ranks that tune; the world by default, if there is one.
        how: ``num_iters``, ``atol``, ``rtol``, ``search``, ``max_configs`` and ``budget_s`` of
            ``tune_kernel``, for each size.

    Raises:
        DistTuneError: no config runs at some size, or at all sizes of a class; the other classes
            are written before.
        CommunicatesError: a run talks to other ranks, and ``mode`` is "split".
        RankMismatchError: ranks have other sizes, or two of them use one GPU.
        PeerFailedError, AbsentRanksError: another rank has ended the tuning, or its process.
        OSError: the file cannot be written. Its note has the configs, and a script that is started
            again measures nothing anew.
        ValueError: no sizes, or one twice, or as of ``tune_kernel``.
    """
    options, space, sizes = SearchOptions(**how), distinct(search_space), [*sizes]
    class_of = classes or small_medium_large()
    check_function("make_for_size", make_for_size, "make_for_size(size)", is_needed=True)
    check_function("classes", class_of, "classes(size)", is_needed=True)
    if not sizes or len(set(sizes)) < len(sizes):
        raise ValueError(f"need sizes, and each once, got {sizes}")
    problems: dict[tuple[str, str], list[Problem]] = {}
    for size in sizes:
        file = json_file_name(size) if callable(json_file_name) else json_file_name
        content(file, {"": space})  # raises before anything is tuned
        name = f"{Path(file).stem} size={size}"
        problem = Problem(name, space, make_for_size, config_callback, size)
        problems.setdefault((file, class_of(size)), []).append(problem)
    job = Job(mode, group)
    found = job.tune([*chain(*problems.values())], options)
    files: dict[str, dict[str, dict[str, Any]]] = {}
    for (file, size_class), all_of_class in problems.items():
        own = [each for each in all_of_class if each.name in found]
        if not own:
            continue
        at = f"the sizes {[each.size for each in own]}"
        known = job.compare(own, [found[each.name] for each in own], options)
        if not known:
            why = f"no config runs at all of {at}: split the class, or add configs that do"
            job.failed.append(f"{file} {size_class}: {why}")
            continue
        winner = min(known, key=known.__getitem__)
        config = own[0].config_of(winner)
        files.setdefault(file, {})[size_class] = config
        regret = f"{known[winner] - 1:.1%} slower than the best config of each of {at}"
        job.say(f'{file} {size_class}: "{describe(config)}", {regret}')
    job.finish(lambda: save_files(files, save_path))
    if job.failed:
        listed = "\n".join(job.failed)
        raise DistTuneError(f"{len(job.failed)} problems could not be tuned:\n{listed}")
    return files if callable(json_file_name) else files[json_file_name]


def _name(function: Any) -> str:
    """Its module and name, as they stand in the log."""
    qualname = getattr(inspect.unwrap(function), "__qualname__", type(function).__qualname__)
    name = f"{getattr(function, '__module__', '')}.{qualname.replace('<locals>.', '')}"
    return name.removeprefix("__main__.")


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
        here = os.pathsep.join(
            cache_folder for cache_folder in settings.cache_folders if "://" not in cache_folder
        )
        self._settings = settings.model_copy(update={"cache_path": here})
        is_dist = group is not None or bool(member_ranks(None))
        self._ranks: Ranks = group_of(group, self._settings.deadline_s) if is_dist else Ranks()
        self._is_split = is_dist and mode != "merge"
        self._keys: list[CacheKey] = []
        """Of the records that are this job's."""
        self.failed: list[str] = []
        """What could not be tuned, and why."""
        if not is_dist and int(os.environ.get("WORLD_SIZE", "1")) > 1 and rank_of_job() == 0:
            warnings.warn(
                "this is one of several ranks, but torch.distributed is not initialised: each of"
                ' them tunes everything. Call init_process_group("gloo") first to share the'
                " problems out.",
                stacklevel=callers_level(),
            )

    def tune(self, problems: Sequence[Problem], options: SearchOptions) -> dict[str, Outcome]:
        """Name -> result, of the problems that could be tuned.

        Collective, and raises as ``tune_and_save_configs``.
        """
        self._check_equal(problems, options)
        if self._is_split:
            queue = self._ranks.work_queue(len(problems))
            self._meet("results", lambda: self._share_out(queue, problems, options), all_came)
            ended = [_ENDED.validate_json(text) for text in queue.results()]
        else:
            ended = [self._ended(problem, options, self._ranks) for problem in problems]
        self.failed += [each for each in ended if isinstance(each, str)]
        pairs = zip(problems, ended, strict=True)
        return {problem.name: each for problem, each in pairs if isinstance(each, Outcome)}

    def tune_one(self, problem: Problem, options: SearchOptions) -> Outcome:
        """Result of one problem that all ranks tune together. Its record is deleted."""
        _n_tuned[problem.name] += 1
        self._check_equal([problem], options)
        outcome = self._outcome(problem, options, self._ranks, _n_tuned[problem.name])
        self._forget()
        return outcome

    def compare(
        self, problems: Sequence[Problem], found: Sequence[Outcome], options: SearchOptions
    ) -> dict[int, float]:
        """Config -> its slowdown over all sizes of a class, of the finalists that run at each."""
        if len(found) == 1:
            return {found[0].winner: 1.0}
        indices = finalists(found)
        if not indices:
            return {}
        # All are measured again, because a race times its losers only once.
        space = [problems[0].search_space[i] for i in indices]
        again = [
            replace(problem, name=f"{problem.name}, compared", search_space=space)
            for problem in problems
        ]
        alike = replace(
            options, search="exhaustive", max_configs=None, budget_s=None, judges_all=True
        )
        measured = self.tune(again, alike)
        if len(measured) < len(again):
            return {}
        known = slowdowns([each.latencies_ms for each in measured.values()])
        return {indices[k]: slowdown for k, slowdown in known.items()}

    def finish(self, save: Callable[[], None]) -> None:
        """Save the results on the first rank, and then delete the records.

        Every rank returns after the save; an error ends it on all.
        """

        def work() -> None:
            if self._ranks.is_first:
                save()

        # Its host has saved before us, and its program is at its end.
        with suppress(StoreGoneError):
            self._meet("saving", work, all_came)
        self._forget()

    def say(self, text: str) -> None:
        """One line in this rank's log."""
        with closing(
            Story(self._settings, self._ranks.rank, is_first=self._ranks.writes_progress)
        ) as log:
            log.info(text, shown=True)

    def _check_equal(self, problems: Sequence[Problem], options: SearchOptions) -> None:
        """Refuse other problems on another rank: results are known by their index."""
        tasks = [f"{problem.name} {problem.digest[:12]} {options}" for problem in problems]
        device = device_identity() if self._is_split else ""
        mismatch = self._meet("problems", lambda: (tasks, device), _mismatch)
        if mismatch:
            raise RankMismatchError(mismatch)

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
                n_done = queue.put(task, _ENDED.dump_json(ended).decode())
                seconds = time.monotonic() - began
                left_s = seconds / n_done * (len(problems) - n_done)
                self.say(
                    f"{n_done} of {len(problems)} problems done in {seconds:.0f} s, about"
                    f" {left_s:.0f} s to go"
                )
        except BaseException:
            queue.stop()
            raise

    def _ended(self, problem: Problem, options: SearchOptions, ranks: Ranks) -> Outcome | str:
        """One problem: its result, or its own error as text.

        Errors of this process or of the group are raised.
        """
        try:
            return self._outcome(problem, options, ranks)
        except Exception as error:
            # Becomes a text, for all ranks, if only this problem is concerned.
            is_own = ranks.is_alone or isinstance(error, NoValidConfigError)
            if (
                isinstance(error, CommunicatesError | StuckDeviceError | SettingsError)
                or is_fatal(error)
                or not is_own
            ):
                raise
            failed = f"{problem.name}: {type(error).__name__}: {error}"
            self.say(failed)
            return failed

    def _outcome(
        self, problem: Problem, options: SearchOptions, ranks: Ranks, number: int = 0
    ) -> Outcome:
        configs = [*map(without_amd_keys, problem.search_space)]
        chosen = options.chosen(configs)
        launch = RunLaunch(
            problem,
            [configs[i] for i in chosen],
            options,
            number,
            is_alone=ranks.is_alone,
            refuses_talk=self._is_split,
        )
        plan = TuningOptions(options.plan(len(chosen)), uses_cache=True)
        tuning = Tuning(problem.name, ranks, plan, self._settings)
        try:
            tuning.meet(launch)
            tuning.tune(partial(tuning.trials.missed, launch), FirstRun())
        finally:
            launch.drop()
        record = next(each for each in tuning.records if each.kernel == problem.name)
        self._keys.append(record.cache_key)
        found = dict(zip(chosen, record.candidates, strict=True))
        failed = [i for i, each in found.items() if each.failure is not None]
        times = {
            i: each.latency_ms
            for i, each in found.items()
            if each.failure is None and each.latency_ms is not None
        }
        winner = chosen[record.winner]
        # A single candidate has no race: its slowdown is 1.
        times.setdefault(winner, 1.0)
        return Outcome(winner, times, failed)

    def _forget(self) -> None:
        """Delete the records: what is tuned again begins anew."""
        cache = Cache.of(self._settings)
        for key in self._keys:
            with suppress(OSError):
                cache.remove(cache.path_of(key))


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
        other = on.setdefault(device, rank)
        if device and other != rank:
            return (
                f"ranks {other} and {rank} are on one GPU, {device}, and would time each other:"
                f' call torch.{device_type()}.set_device(int(os.environ["LOCAL_RANK"])) before'
                " anything is made on a device"
            )
    return ""
