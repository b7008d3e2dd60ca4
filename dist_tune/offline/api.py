"""Functions of tuning scripts: ``tune_kernel`` for one problem, ``tune_and_save_configs`` for the file that ``load_config`` reads.

Knows files, sizes and classes; job.py tunes problems, and shares them out over ranks.
"""

from __future__ import annotations

import errno
import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_tune.configs import describe
from dist_tune.offline.class_configs import ConfigFile, Settled, classes_of
from dist_tune.offline.config_files import configs_there, save_configs_to_json, small_medium_large
from dist_tune.offline.job import Job, Mode, raise_failures
from dist_tune.offline.problem import Ended, Failed, Problem, SearchOptions, SearchStrategy
from dist_tune.offline.runs import MakeRun
from dist_tune.validation import check_space
from dist_tune.warn_once import callers_level

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a quota, a limit on the size of files."""


def tune_kernel(
    search_space: Sequence[Mapping[str, Any]], make_run_and_gt_fn: MakeRun,
    config_callback: Callable[[dict[str, Any]], object] | None = None, num_iters: int = 10, atol: float = 1e-2, rtol: float = 1e-2,
    *, name: str | None = None, search: SearchStrategy = "racing", max_configs: int | None = None, budget_s: float | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The fastest config of a space whose runs return the expected output.

    Triton kernels are compiled ahead in threads; every config is checked against the ground truth before it is timed, then configs race,
    and the best few are compared again. A config that raises, does not fit or gives a wrong result is dropped, with the reason in the log.
    An interrupted tuning goes on where it was, with the journal under ``DIST_TUNE_CACHE_DIR``; a finished one begins anew.

    With torch.distributed initialised all ranks of ``group`` tune it together: collective, and the slowest rank decides.

    Args:
        search_space: dicts of values by name. On NVIDIA, configs that differ in AMD's keys alone are one, and run without them.
        make_run_and_gt_fn: from a config to ``(run, ground_truth)``: a function without arguments that returns the kernel's output, and
            the expected output (None: not checked). Called once a config, and again where memory is short: make shared inputs outside.
        config_callback: called with a copy of each config before it is used, to change it in place.
        num_iters: timed runs of each of the best few.
        atol: an element is right within ``atol + rtol * |expected|``.
        rtol: see ``atol``.
        name: of the problem in the log; that of ``make_run_and_gt_fn`` by default.
        search: "racing" and "exhaustive" try all configs, "random" and "guided" a part of them.
        max_configs: configs tried at most; None: all, or 5 % of them where a part is tried.
        budget_s: seconds after which no new configs are begun.
        group: the ranks that tune together; the world by default, if there is one.

    Returns:
        The best config, as ``config_callback`` leaves it, with AMD's keys as they stand in the space.

    Raises:
        NoValidConfigError: no config runs and gives the right result; with the reasons.
        ValueError, TypeError: the space is empty or holds no dicts by name, a number is out of range, an option is not of its kind, or the
            factory returns no pair.
    """
    options = SearchOptions(num_iters, atol, rtol, search=search, max_configs=max_configs, budget_s=budget_s)
    problem = Problem(name or _name(make_run_and_gt_fn), check_space("search_space", search_space), make_run_and_gt_fn, config_callback)
    return problem.config_of(Job("merge", group).tune_one(problem, options).winner)


def tune_problems(
    problems: Sequence[Problem],
    *, num_iters: int = 10, atol: float = 1e-2, rtol: float = 1e-2, search: SearchStrategy = "racing", max_configs: int | None = None,
    budget_s: float | None = None, mode: Mode | None = None, group: ProcessGroup | None = None,
) -> list[Ended]:  # fmt: skip
    """Tune a list of problems; returns their results in order, the same on all ranks.

    Arguments are those of ``tune_kernel``; ``budget_s`` is for each problem. With torch.distributed initialised it is collective.
    ``mode="split"``, the default, gives each problem to one rank, from a queue; ``mode="merge"`` tunes one after the other on all ranks,
    as kernels need that communicate. A problem that fails is a ``Failed`` in the list, and the others go on. If a rank dies, the others
    tune the rest and then raise; started again, the job tunes what is missing.

    Raises:
        CommunicatesError: a run talks to other ranks, and ``mode`` is "split".
        ValueError: two problems have one name, or a number is out of range.
        PeerFailedError, AbsentRanksError: another rank has ended the tuning, or its process.
    """
    options = SearchOptions(num_iters, atol, rtol, search=search, max_configs=max_configs, budget_s=budget_s)
    job = Job(mode, group)
    ended = job.tune(problems, options)
    job.finish(lambda: "")
    return ended


def tune_and_save_configs(
    sizes: Sequence[int], make_for_size: Callable[[int], MakeRun], search_space: Sequence[Mapping[str, Any]], json_file_name: str,
    save_path: str | Path,
    *, classes: Callable[[int], str] | None = None, config_callback: Callable[[dict[str, Any]], object] | None = None, **how: Any,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Tune a kernel at several sizes and write one config for each class of sizes into a JSON file; returns the written configs.

    Several sizes of one class get the config with the least geometric mean of slowdowns against the best of each size, among those that
    were the best or near it, measured once more at all of them.

    Args:
        sizes: the sizes to tune at.
        make_for_size: from a size to a ``make_run_and_gt_fn`` as ``tune_kernel`` takes it.
        search_space: as of ``tune_kernel``.
        json_file_name: name of the file; classes in it that are not tuned now stay.
        save_path: folder of the file, made if it is missing.
        classes: from a size to the name of its class: ``small_medium_large()`` (the default), ``small_medium_large("_M")``,
            ``m_leq(64, 256, 1024)``, a function.
        config_callback: as of ``tune_kernel``; a config out of the file goes through it once more.
        how: ``min_gain``, and the options of ``tune_problems``.

    A full disk costs a warning, and the configs are returned all the same.

    Raises:
        DistTuneError: no config runs at some size, or at all sizes of a class; the other classes are written before.
        OSError: the file cannot be written for another reason.
        ValueError: no sizes, or one twice, or as of ``tune_problems``.
    """
    named = classes or small_medium_large()
    file = ConfigFile(json_file_name, sizes, make_for_size, search_space, classes=named, config_callback=config_callback)
    return {each.size_class: each.config for each in tune_files([file], save_path, **how) if each.is_saved or each.error}


def tune_files(
    files: Sequence[ConfigFile], save_path: str | Path,
    *, min_gain: float | None = None, num_iters: int = 10, atol: float = 1e-2, rtol: float = 1e-2, search: SearchStrategy = "racing",
    max_configs: int | None = None, budget_s: float | None = None, mode: Mode | None = None, group: ProcessGroup | None = None,
) -> list[Settled]:  # fmt: skip
    """``tune_and_save_configs`` for several files, whose sizes are shared out together.

    ``min_gain``: compare with the configs that the files have for these classes, in the same runs, and replace only those against which the
    new one is faster by at least this share: 0.03 is 3 %. None replaces all. The rest as of ``tune_problems``.
    """
    for file in files:
        file.check()
    options = SearchOptions(num_iters, atol, rtol, search=search, max_configs=max_configs, budget_s=budget_s)
    job = Job(mode, group)
    first = job.tune([file.problem(size) for file in files for size in file.sizes], options)

    def found() -> str:
        return json.dumps([{} if min_gain is None else configs_there(Path(save_path) / file.json_file_name) for file in files])

    there = json.loads(job.agree("files", found))  # folders of several machines may hold different files
    ended = iter(first)
    classes = [
        each for file, old in zip(files, there, strict=True) for each in classes_of(file, {size: next(ended) for size in file.sizes}, old)
    ]
    # All finalists are measured again, because a race times its losers only once.
    finals = [(one, size, problem) for one in classes for size, problem in one.finals()]
    second = job.tune([problem for *_, problem in finals], replace(options, search="exhaustive", max_configs=None, budget_s=None))
    measured = [(one, size, each) for (one, size, _), each in zip(finals, second, strict=True)]
    choices = [one.settle({size: each for other, size, each in measured if other is one}, min_gain) for one in classes]
    settled = [each for each in choices if isinstance(each, Settled)]
    for chosen in settled:
        what = f'{chosen.json_file_name} {chosen.size_class}: "{describe(chosen.config)}"'
        job.say(f"{what}, {chosen.regret:.1%} slower than the best config of each of the sizes {sorted(chosen.latencies_us)}")

    def save() -> str:
        full: dict[str, str] = {}
        for file in files:
            configs = {each.size_class: each.config for each in settled if each.json_file_name == file.json_file_name and each.is_saved}
            try:
                if configs:
                    save_configs_to_json(file.json_file_name, save_path, configs)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                full[file.json_file_name] = str(error.strerror)
                warnings.warn(
                    f"{Path(save_path) / file.json_file_name} is not written: {error.strerror}. Its configs are returned all the same: "
                    f"{json.dumps(configs)[:2000]}. Started again when there is room, the script measures nothing anew.",
                    stacklevel=callers_level(),
                )
        return json.dumps(full) if full else ""

    full = json.loads(job.finish(save) or "{}")
    settled = [replace(each, is_saved=False, error=full[each.json_file_name]) if each.is_saved and each.json_file_name in full else each
               for each in settled]  # fmt: skip
    raise_failures([*first, *second, *(each for each in choices if isinstance(each, Failed))])
    return settled


def _name(function: Any) -> str:
    qualname = getattr(inspect.unwrap(function), "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{qualname.replace('<locals>.', '')}".removeprefix("__main__.")
