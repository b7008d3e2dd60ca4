"""DIST_TUNE_MODE: what may happen where a config is missing, on all ranks alike."""

from __future__ import annotations

import shutil
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import triton

from dist_tune import autotune, files
from dist_tune.offline import Mode, Problem, tune_problems
from tests.programs import of_checkout, run_python
from tests.ranks.jobs import FACES, Face, folder, is_hit, is_tuned, job, own_records, records, rewrite
from tests.steps import autotuned, best, launch, product_kernel, tuned
from tests.worlds import caught, on_each_rank

CACHED, FIRST = {"MODE": "cached"}, {"MODE": "first"}


def is_given(done: Any, block: object) -> bool:
    """Whether a job has this block without a tuning, and its closure ran once."""
    return (done.used, done.n_runs, done.record, done.is_steady, done.value, done.error.kind) == ([block], 1, None, True, 1.0, "")


@on_each_rank(cases=FACES)
def test_cached_takes_the_record_or_the_nearest_or_the_first_config(rank: int, face: Face):
    """The nearest of the same code, also of another machine; a record of other code does not count."""
    path = own_records(face, rank)
    assert is_hit(job(face, path, CACHED), 32)
    assert is_given(job(face, path, CACHED, n=128), 32)
    rewrite(path, environment={"device": "another", "torch": "1.0"})
    assert is_given(job(face, path, CACHED), 32)
    rewrite(path, source="0" * 16)
    assert is_given(job(face, path, CACHED), 16)
    assert is_given(job(face, path, CACHED, blocks=(64, 16), cache=False), 64)
    assert len(records(path)) == 1  # nothing was kept


@on_each_rank(cases=FACES)
def test_first_is_the_first_config_whatever_the_cache_holds(rank: int, face: Face):
    """Also in the first run, where a tuning begins with the config that compiles fastest."""
    path = own_records(face, rank)
    assert is_given(job(face, path, FIRST), 16)
    assert is_given(job(face, path, {**FIRST, "ALWAYS_TUNE": "1"}, blocks=(64, 32, 16)), 64)
    assert is_tuned(job(face, path, {"MODE": "tune", "ALWAYS_TUNE": "1"}))


@on_each_rank(cases=[*product(FACES, (CACHED, FIRST))])
def test_one_rank_whose_mode_forbids_it_keeps_all_from_tuning(rank: int, case: tuple[Face, dict[str, str]]):
    """And says that the settings differ; where one rank wants the first config, no rank uses its record."""
    (face, mode), files._told = case, set()
    path = folder() / str(rank)
    assert is_given(job(face, path, mode if rank == 1 else {}), 16)
    own_records(face, rank)
    done = job(face, path, mode if rank == 1 else {})
    assert is_given(done, 16) if mode is FIRST else is_hit(done, 32)


MODES = ("tune", "cached", "require", "first")


@on_each_rank()
def test_two_modes_have_one_outcome(rank: int):
    """Without require no error: tuned if both let it, else the record or the first config. An error says what helps, and who differs."""
    kept = {face: own_records(face, rank).rename(folder() / f"{face}{rank}") for face in FACES}
    for k, (modes, has_record) in enumerate(product(product(MODES, MODES), (True, False))):
        face = FACES[k // 2 % 2]
        done = job(face, kept[face] if has_record else folder() / f"empty{k}-{rank}", {"MODE": modes[rank]})
        told, differ = (
            done.error.message,
            f"DIST_TUNE_MODE is {modes[0]} on rank 0, {modes[1]} on rank 1. Give all ranks the same environment",
        )
        if "require" in modes and (not has_record or "first" in modes):
            assert (done.error.kind, differ in told) == ("CacheMissError", modes[0] != modes[1]), (modes, told)
            assert ("tune once" in told, "There is no record" in told) == (not has_record, not has_record), (modes, told)
        elif "first" in modes or not has_record:
            assert is_tuned(done) if {*modes} == {"tune"} else is_given(done, 16), (modes, vars(done))
        else:
            assert is_hit(done, 32), (modes, vars(done))
    error = job("function", kept["function"], {"MODE": "require"} if rank else {"ALWAYS_TUNE": "1"}).error
    assert ("DIST_TUNE_ALWAYS_TUNE is 1 on rank 0, 0 on rank 1. Give all" in error.message, "tune once" in error.message) == (True, False)


@on_each_rank(cases=FACES)
def test_ranks_with_other_folders_use_one_config(rank: int, face: Face):
    """The nearest record of the first rank that has one, and a record that another rank cannot use."""
    path = own_records(face, rank)
    if rank == 0:
        shutil.rmtree(path)
    assert is_given(job(face, path, CACHED, n=128), 32)
    done = job(face, path, {"MODE": "cached" if rank else "first"})
    assert is_given(done, 16)
    rewrite(path, winner=64 if rank else 32)
    if rank == 0:
        rewrite(path, environment={"device": "another"})
    assert job(face, path, CACHED).used == [64]


@on_each_rank(cases=FACES)
def test_cached_never_fails(rank: int, face: Face):
    """Of different candidates on two ranks the first that both have."""
    assert is_given(job(face, settings=CACHED, blocks=(16, 32, 64) if rank == 0 else (32, 64)), 32)


@on_each_rank()
def test_a_recorded_config_that_answers_wrongly_is_told_of_and_used_once(rank: int):
    """Nothing is tuned for it."""
    files._told.clear()
    path = own_records("function", rank)
    done = job("function", path, CACHED, check=lambda y, x: rank == 0)
    assert (done.used, done.error.kind, done.n_runs) == ([16], "", 1)


@on_each_rank()
def test_kernels_inside_functions_follow(rank: int):
    """A function with configs inside a step, and a kernel inside that: the first configs, in one run."""
    kernel, runs = autotuned(blocks=(64, 32, 16)), []

    def work(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        runs.append(factor)
        return launch(kernel, x)

    inner = autotune([{"factor": 3}, {"factor": 1}], lambda x: x.numel())(work)
    step = tuned(None, lambda x: inner(x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_TUNE_MODE", "first")
        for _ in range(2):
            step(torch.zeros(64))
    assert (runs, best(kernel), step.records, inner.records) == ([3, 3], [64], [], [])


@on_each_rank(cases=FACES)
def test_under_capture_a_record_is_used_where_nothing_may_be_tuned(rank: int, face: Face):
    """And the nearest, and the first; no error of capture."""
    path = own_records(face, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for mode, n, block in ((CACHED, 64, 32), (CACHED, 128, 32), (FIRST, 64, 16)):
            assert is_given(job(face, path, mode, n=n), block)
        assert job(face, path).error.kind == "CaptureError"


@on_each_rank(cases=FACES)
def test_a_mode_that_one_rank_cannot_read_ends_the_call_on_all(rank: int, face: Face):
    """At once, with what is misspelt, also where there is a record; nothing is tuned. So in a tuning script, with a problem or without."""
    told = "DIST_TUNE_MODE='cachd' cannot be read: need tune, cached, require or first (did you mean cached?)"
    path, misspelt = folder() / str(rank), {"MODE": "cachd"} if rank == 1 else {}
    for _ in range(2):
        done = job(face, path, misspelt)
        assert (done.error.kind, told in done.error.message, done.record) == (["PeerFailedError", "SettingsError"][rank], True, None)
        own_records(face, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_TUNE_MODE", misspelt.get("MODE", ""))
        for mode in get_args(Mode):
            error = caught(partial(tune_problems, [Problem("p", [{"i": 1}], lambda config: (lambda: 1, None))], mode=mode))
            assert (error.kind in ("PeerFailedError", "SettingsError"), told in error.message) == (True, True), error.message


PROGRAM = """
import torch
import triton
from dist_tune import contextual_autotune
from tests.steps import autotuned, launch

kernel = autotuned()


@contextual_autotune(is_dist=torch.distributed.is_initialized())
def step(x):
    return launch(kernel, x)


for n in (64, 64, 128):
    step(torch.zeros(n))
"""


def test_the_program_ends_with_one_line(tmp_path: Path):
    """Of the first rank: how many sites have which config; none where the terminal is quiet."""
    (tmp_path / "script.py").write_text("import torch.distributed as dist\n\ndist.init_process_group('gloo')" + PROGRAM)
    begun = "2 configs without a tuning: 0 of their own record, 0 of the nearest, 2 the first that runs"
    for mode, variables, told in (
        ("cached", {}, begun),
        (" FIRST", {}, begun),
        ("cached", {"DIST_TUNE_VERBOSITY": "quiet"}, ""),
    ):
        done = run_python("script.py", cwd=tmp_path, env=of_checkout(tmp_path, DIST_TUNE_MODE=mode, **variables), n_ranks=2)
        lines = [line for line in done.stderr.splitlines() if "DIST_TUNE_MODE" in line]
        assert (done.returncode, lines) == (0, [f"dist_tune: DIST_TUNE_MODE={mode.strip().lower()}: {told}"] * bool(told)), done.stderr


def test_a_program_with_a_misspelt_mode_does_not_begin(tmp_path: Path):
    """It ends where its step is decorated, on all ranks; without it the same program runs."""
    (tmp_path / "script.py").write_text(PROGRAM + "print('has served')")
    for mode, is_right in (("requre", False), ("first", True)):
        done = run_python("script.py", cwd=tmp_path, env=of_checkout(tmp_path, DIST_TUNE_MODE=mode))
        assert (done.returncode, "has served" in done.stdout, "(did you mean require?)" in done.stderr) == (
            not is_right,
            is_right,
            not is_right,
        )


@on_each_rank()
def test_a_refused_record_of_a_step_that_may_not_run_again(rank: int):
    """One rank's record cannot be used by the other, and no run may follow: both use one config."""
    path = own_records("contextual", rank)
    if rank == 0:
        rewrite(path, environment={"device": "another"})
    else:
        rewrite(path, winner=32)
    kernel, weight = autotuned(), torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        return launch(kernel, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_TUNE_CACHE_DIR", str(path))
        patch.setenv("DIST_TUNE_ALWAYS_TUNE", str(1 - rank))
        tuned(None, step, max_slowdown=0.0)(torch.zeros(64))
    assert (best(kernel), weight.item()) == ([16], -1.0)


@on_each_rank(modes=("fake",))
def test_a_first_config_that_does_not_fit_gives_way_to_one_that_does(rank: int):
    """Under capture as outside of it: no error, and the value of the call."""
    a = torch.zeros(64, 64, dtype=torch.float16)
    for is_captured in (True, False):
        kernel = autotuned(product_kernel, configs=[triton.Config({"BLOCK": 64}, num_stages=n) for n in (40, 2)])
        step = tuned(None, lambda kernel=kernel: (kernel[(1,)](a, a, 64), 7)[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DIST_TUNE_MODE", "first")
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda is_captured=is_captured: is_captured)
            assert [step(), step()] == [7, 7]
        assert [each.num_stages for each in kernel.cache.values()] == [2]
