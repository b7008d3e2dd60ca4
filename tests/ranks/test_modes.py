"""Settings of ranks: DIST_TUNE_MODE, which says what may happen where a config is missing, on all
ranks alike, and those that differ.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dist_tune import autotune
from dist_tune.offline import tune_and_save_configs
from tests.programs import of_checkout, run_python
from tests.steps import (
    FACES,
    Face,
    Job,
    Step,
    autotuned,
    best,
    edited,
    launch,
    own_records,
    product_kernel,
    records,
    runs_of_this_process,
    tuned,
)
from tests.worlds import caught, folder, gathered, log, on_each_rank, shown

CACHED, FIRST = {"MODE": "cached"}, {"MODE": "first"}


@on_each_rank(cases=FACES)
def test_cached_takes_the_record_or_the_nearest_or_the_first_config(rank: int, face: Face):
    """The nearest of the same code, also of another machine; a record of other code does not
    count.
    """
    path = own_records(face, rank)
    cached = partial(Job, face, path=path, settings=CACHED)
    assert [cached().how, cached(n=128).how] == ["hit 32", "given 32"]
    edited(rank, path, environment={"device": "another", "torch": "1.0"})
    assert cached().how == "given 32"
    edited(rank, path, source="0" * 16)
    assert [cached().how, cached((64, 16), cache=False).how] == ["given 16", "given 64"]
    assert len(records(path)) == 1  # nothing was kept


@on_each_rank(cases=FACES)
def test_first_is_the_first_config_whatever_the_cache_holds(rank: int, face: Face):
    """Also in the first run, where a tuning begins with the config that compiles fastest."""
    job = partial(Job, face, path=own_records(face, rank))
    anew = {"ALWAYS_TUNE": "1"}
    assert [job(settings=FIRST).how, job((64, 32, 16), settings=FIRST | anew).how] == [
        "given 16",
        "given 64",
    ]
    assert job(settings={"MODE": "tune"} | anew).how == "tuned 64"


MODES = ("tune", "cached", "require", "first")


@on_each_rank()
def test_two_modes_have_one_outcome(rank: int):
    """Without require no error: tuned if both let it, else the record or the first config.

    An error says what helps, and who differs.
    """
    kept = {face: own_records(face, rank).rename(folder() / f"{face}{rank}") for face in FACES}
    for k, (modes, has_record) in enumerate(product(product(MODES, MODES), (True, False))):
        face = FACES[k // 2 % 2]
        job = Job(
            face,
            path=kept[face] if has_record else folder() / f"empty{k}-{rank}",
            settings={"MODE": modes[rank]},
        )
        differ = (
            f"DIST_TUNE_MODE is {modes[0]} on rank 0, {modes[1]} on rank 1. Give all ranks the same"
            " environment"
        )
        if "require" in modes and (not has_record or "first" in modes):
            told = [
                words in job.error.message for words in (differ, "tune once", "There is no record")
            ]
            assert (job.how, told) == (
                "CacheMissError",
                [modes[0] != modes[1], not has_record, not has_record],
            ), modes
        elif "first" in modes or not has_record:
            assert job.how == ("tuned 64" if {*modes} == {"tune"} else "given 16"), modes
        else:
            assert job.how == "hit 32", modes
    error = Job(
        "function",
        path=kept["function"],
        settings={"MODE": "require"} if rank else {"ALWAYS_TUNE": "1"},
    ).error
    assert (
        "DIST_TUNE_ALWAYS_TUNE is 1 on rank 0, 0 on rank 1. Give all" in error.message,
        "tune once" in error.message,
    ) == (True, False)


@on_each_rank(cases=FACES)
def test_ranks_with_other_folders_use_one_config(rank: int, face: Face):
    """The nearest record of the first rank that has one, or the record of one rank that the other
    cannot use.
    """
    path = own_records(face, rank)
    if rank == 0:
        shutil.rmtree(path)
    assert Job(face, path=path, settings=CACHED, n=128).how == "given 32"
    own_records(face, rank, winner=64 if rank else 32)
    if rank == 0:
        edited(rank, path, environment={"device": "another"})
    assert Job(face, path=path, settings=CACHED).how.endswith(" 64")


@on_each_rank(cases=FACES)
def test_cached_never_fails(rank: int, face: Face):
    """Of different candidates on two ranks the first that both have."""
    assert Job(face, (16, 32, 64) if rank == 0 else (32, 64), settings=CACHED).how == "given 32"


@on_each_rank()
def test_a_recorded_config_that_answers_wrongly_is_used_once(rank: int):
    """On one rank: nothing is tuned for it, one line says so, and later calls use the first
    config.
    """
    runs_of_this_process.clear()

    def check(y: torch.Tensor, x: torch.Tensor) -> bool:
        return not runs_of_this_process

    path = own_records("function", rank, check=check)
    runs_of_this_process.extend([1] * rank)
    jobs: list[Job] = []
    lines = shown(lambda: jobs.append(Job("function", path=path, settings=CACHED, check=check)))
    assert jobs[0].ran == [32, 16]
    assert any(
        "answers wrongly; later calls use the first config: rank 1" in line for line in lines
    )


def _work(x: torch.Tensor, *, factor: int) -> torch.Tensor:
    runs_of_this_process.append(factor)
    return launch(_work.kernel, x)  # type: ignore[attr-defined]


@on_each_rank(cases=["first", "nearest"])
def test_kernels_inside_functions_follow(rank: int, case: str):
    """A function inside a step in the mode "first", or one that uses the nearest record, and a
    kernel inside that: first configs alone.
    """
    kernel = _work.kernel = autotuned(blocks=(64, 32, 16))  # type: ignore[attr-defined]
    inner: Any = autotune([{"factor": 3}, {"factor": 1}], lambda x: x.numel(), nearest=True)(_work)
    step = tuned(None, lambda x: inner(x)) if case == "first" else partial(inner, autotune=False)
    runs_of_this_process.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_TUNE_MODE", case if case == "first" else "")
        for _ in range(2):
            step(torch.zeros(64))
    assert (runs_of_this_process, best(kernel), inner.records) == ([3, 3], [64], [])


@on_each_rank()
def test_without_tuning_the_nearest_record_decides_if_asked(rank: int):
    """No record: the first config.

    An exact one, a near one: on all ranks, though one has none; one line with both keys.

    Nothing of it counts for calls that may tune.
    """
    path = own_records("function", rank)
    if rank == 1:
        shutil.rmtree(path)
    os.environ["DIST_TUNE_CACHE_DIR"] = str(path)
    for is_asked in (True, False):
        step = Step("function", nearest=is_asked, cache=not is_asked)
        step(torch.zeros(64), autotune=False)
        assert step.ran == [16]
    step = Step("function", nearest=True)
    lines = shown(lambda: [step(torch.zeros(n), autotune=False) for n in (64, 80, 80, 80)])
    assert step.ran == [32] * 4
    assert [
        ("[80]" in line, "[64]" in line, "BLOCK=32" in line)
        for line in lines
        if "the nearest is of" in line
    ] == [(True,) * 3]
    step(torch.zeros(80))
    assert step.best == [32, 64]
    step = Step("function", nearest=True)
    # Each rank looks into its own cache, which has a copy.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        step(torch.zeros(64), autotune=False)
    assert step.ran == [32]


@on_each_rank(cases=FACES)
def test_under_capture_a_record_is_used_where_nothing_may_be_tuned(rank: int, face: Face):
    """And the nearest, and the first; no error of capture."""
    job = partial(Job, face, path=own_records(face, rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        jobs = [job(settings=CACHED), job(settings=CACHED, n=128), job(settings=FIRST), job()]
    assert [each.how for each in jobs] == ["given 32", "given 32", "given 16", "CaptureError"]


@on_each_rank(1, modes=("fake",), is_dist=False)
def test_a_first_config_that_does_not_fit_gives_way_to_one_that_does(rank: int):
    """Under capture as outside of it: no error, and the value of the call."""
    a = torch.zeros(64, 64, dtype=torch.float16)
    for is_captured in (True, False):
        kernel = autotuned(
            product_kernel, configs=[triton.Config({"BLOCK": 64}, num_stages=n) for n in (40, 2)]
        )
        step = tuned(None, lambda kernel=kernel: (kernel[(1,)](a, a, 64), 7)[1], is_dist=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DIST_TUNE_MODE", "first")
            patch.setattr(
                torch.cuda,
                "is_current_stream_capturing",
                lambda is_captured=is_captured: is_captured,
            )
            assert [step(), step()] == [7, 7]
        assert [each.num_stages for each in kernel.cache.values()] == [2]


@on_each_rank(cases=FACES)
def test_a_mode_that_one_rank_cannot_read_ends_the_call_on_all(rank: int, face: Face):
    """At once, with what is misspelt, also where there is a record; nothing is tuned.

    So in a tuning script, with a problem or without.
    """
    told = (
        "DIST_TUNE_MODE='cachd' cannot be read: need tune, cached, require or first (did you mean"
        " cached?)"
    )
    path, misspelt = folder() / str(rank), {"MODE": "cachd"} if rank == 1 else {}
    for _ in range(2):
        job = Job(face, path=path, settings=misspelt)
        assert (job.how, told in job.error.message, job.record) == (
            ["PeerFailedError", "SettingsError"][rank],
            True,
            None,
        )
        own_records(face, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_TUNE_MODE", misspelt.get("MODE", ""))
        for mode in ("split", "merge"):
            error = caught(
                partial(
                    tune_and_save_configs,
                    [1],
                    lambda size: lambda config: (lambda: 1, None),
                    [{"i": 1}],
                    "k.json",
                    path,
                    mode=mode,
                )
            )
            assert (error.kind in ("PeerFailedError", "SettingsError"), told in error.message) == (
                True,
                True,
            ), error.message


@on_each_rank()
def test_a_refused_record_of_a_step_that_may_not_run_again(rank: int):
    """One rank's record cannot be used by the other, and no run may follow: both use one config."""
    path = own_records("contextual", rank)
    if rank == 0:
        edited(rank, path, environment={"device": "another"})
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    step = Step("contextual", rest=lambda y: optimizer.step(), max_slowdown=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_TUNE_CACHE_DIR", str(path))
        patch.setenv("DIST_TUNE_ALWAYS_TUNE", str(1 - rank))
        step(torch.zeros(64))
    assert (best(step.kernel), weight.item()) == ([16], -1.0)


# -- other settings --------------------------------------------------------------------------------


@on_each_rank()
def test_settings_that_differ_are_told_once(rank: int):
    """By the first rank, with a rank of each value; folders and the log may differ."""
    of_rank_1 = {"DEADLINE_S": "40", "ALWAYS_TUNE": "yes", "LOG_LEVEL": "INFO"}
    lines = shown(
        lambda: [Job("contextual", settings=of_rank_1 if rank == 1 else {}) for _ in range(2)]
    )
    (line,) = [line for line in lines if "settings differ" in line]
    assert (
        "DIST_TUNE_DEADLINE_S is 3 on rank 0, 40 on rank 1; DIST_TUNE_ALWAYS_TUNE is 0 on rank 0, 1"
        " on rank 1. Give all" in line
    )


WARNED = [
    ("CACHE_DIR", "", {1}, "tunings are not kept and will be repeated: "),
    ("CACHE_DIR", "", {0, 1}, "tunings are not kept and will be repeated: "),
    ("LOG_DIR", "", {0, 1}, "dist_tune keeps no log: "),
    (
        "DEADLINE_S",
        "soon",
        {1},
        "DIST_TUNE_DEADLINE_S='soon' cannot be read: need a number of seconds above 0",
    ),
    ("LOGDIR", "x", {0, 1}, "DIST_TUNE_LOGDIR is not read: did you mean DIST_TUNE_LOG_DIR?"),
]
"""A variable with its value (that of a folder is a file), the ranks that have it, and words of the
warning.
"""


@on_each_rank(cases=WARNED)
def test_a_warning_of_several_ranks_is_given_once(rank: int, case: tuple[str, str, set[int], str]):
    """By the first that has it, with its remedy; no other warning follows from the same cause.

    Each has it in its log.
    """
    name, value, who, words = case
    file = folder().with_name("file")
    file.parent.mkdir(exist_ok=True)
    file.touch()
    warned = [
        Job("contextual", n=n, settings={name: value or str(file)} if rank in who else {}).warned
        for n in (64, 128)
    ]
    first, *others = [text for texts in gathered(warned) for job in texts for text in job]
    assert (others, words in first, first.startswith("rank 1: ")) == ([], True, 0 not in who)
    assert value or (
        "a file is in the folder's place" in first,
        f"DIST_TUNE_{name} names another folder" in first,
    ) == (True, True)
    assert name == "LOG_DIR" or log().count(words) == (rank in who)


# -- programs --------------------------------------------------------------------------------------


PROGRAM = """
import torch
from dist_tune import autotune, contextual_autotune
from tests.steps import autotuned, launch

{}
kernel = autotuned()


@contextual_autotune(is_dist=torch.distributed.is_initialized())
def step(x):
    return launch(kernel, x)


for n in (64, 64, 128):
    step(torch.zeros(n))
print("has served")
"""
NEAREST = "autotune([{'n': 1}, {'n': 2}], None, nearest=True)(lambda x, n: x)(1, autotune=False)"
PROGRAMS: dict[str, tuple[str, dict[str, str], int, str]] = {
    "cached": (
        "torch.distributed.init_process_group('gloo')",
        {"MODE": "cached"},
        2,
        "cached: 2 configs without a tuning: ",
    ),
    "quiet": ("", {"MODE": "first", "VERBOSITY": "quiet"}, 0, ""),
    "nearest": (NEAREST, {}, 0, ""),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_the_program_ends_with_one_line(tmp_path: Path, case: str):
    """Of the first rank: how many sites have which config.

    None where the terminal is quiet, and of calls that use the nearest record.
    """
    begin, settings, n_ranks, told = PROGRAMS[case]
    (tmp_path / "script.py").write_text(PROGRAM.format(begin))
    env = of_checkout(tmp_path, **{f"DIST_TUNE_{name}": value for name, value in settings.items()})
    done = run_python("script.py", cwd=tmp_path, env=env, n_ranks=n_ranks)
    lines = [line for line in done.stderr.splitlines() if "DIST_TUNE_MODE" in line]
    counted = "0 of their own record, 0 of the nearest, 2 the first that runs"
    assert ("has served" in done.stdout, lines) == (
        True,
        [f"dist_tune: DIST_TUNE_MODE={told}{counted}"] * bool(told),
    ), done.stderr


def test_a_program_with_a_misspelt_mode_does_not_begin(tmp_path: Path):
    """It ends where its step is decorated."""
    (tmp_path / "script.py").write_text(PROGRAM.format(""))
    done = run_python("script.py", cwd=tmp_path, env=of_checkout(tmp_path, DIST_TUNE_MODE="requre"))
    assert ("has served" in done.stdout, "(did you mean require?)" in done.stderr) == (False, True)
