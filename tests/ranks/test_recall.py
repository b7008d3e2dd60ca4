"""What later jobs take from the cache where all ranks see the same folder, with both tuners."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import autotune
from dist_tune.cache.store import Cache
from dist_tune.testing import FakeH200, values
from tests.ranks.jobs import FACES, RUNS, Face, edited, hit, is_tuned, job, play, records, rewrite, settings, summary
from tests.ranks.kernels import accumulate_kernel, add_kernel, autotuned, best, launch, tuned
from tests.ranks.test_sharing import compiled
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _first_job(rank: int) -> Any:
    return [job(face) for face in FACES]


def _second_job(rank: int) -> Any:
    return [summary(job(face)) for face in FACES]


def test_a_second_process_group_hits_on_all_ranks(tmp_path: Path):
    """No replay, no tuning in the log, and the winner where the next call finds it."""
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path / "cache")}
    assert all(is_tuned(each) for got in values(on_ranks(2, _first_job, env=env)) for each in got)
    rewrite(tmp_path / "cache", winner=32)
    outcomes = on_ranks(2, _second_job, env=env)
    assert values(outcomes) == [[hit(32)] * 2] * 2
    for outcome in outcomes:
        assert outcome.log.count("winner=1 (from the cache, tuned 2") == 2
        assert not any(word in outcome.log for word in ("searches in", "candidates on", "dropped"))


def _later_key(rank: int, path: Path) -> Any:
    for size in (64, 128):
        job("contextual", n=size)
    edited(rank, path / "shared", winner=32)
    n, runs, kernel = [64], list[int](), autotuned()

    def closure() -> float:
        runs.append(1)
        y = launch(kernel, torch.zeros(n[0]))
        dist.all_reduce(y)
        return y[0].item()

    step = tuned(kernel, closure)
    got = [step()]
    n[0] = 128
    got += [step(), step()]
    return got, len(runs), best(kernel), [each.is_recalled for each in step.records]


def _half(rank: int, path: Path) -> Any:
    job("contextual", blocks=(16, 32))
    edited(rank, path / "shared", winner=32)
    runs: list[int] = []

    def pair() -> tuple[Any, Any, Any]:
        first, second = autotuned(blocks=(16, 32)), autotuned(accumulate_kernel)

        def closure(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return launch(second, launch(first, x), torch.ones(64))

        return first, second, tuned(None, closure)

    first, second, step = pair()
    y = step(torch.zeros(64))
    n_runs = len(runs)
    dist.barrier()
    first_again, second_again, step_again = pair()
    step_again(torch.zeros(64))
    hits = [{each.kernel.rpartition(".")[2]: each.is_recalled for each in one.records} for one in (step, step_again)]
    return (
        y[0].item(),
        n_runs > 3,
        best(first),
        hits,
        best(first_again) == best(first),
        best(second_again) == best(second),
        len(runs) - n_runs,
    )


def _made_anew(rank: int, path: Path) -> Any:
    job("contextual")
    edited(rank, path / "shared", winner=64)
    runs, made = [], []

    def closure(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        made.append(autotuned())
        return launch(made[-1], launch(made[-1], x))

    step = tuned(None, closure)
    return [step(torch.zeros(64))[0].item() for _ in range(3)], len(runs), [best(kernel) for kernel in made], len(step.records)


def _alone(rank: int, path: Path) -> Any:
    jobs = [job("contextual", is_dist=is_dist) for is_dist in (True, False)]
    dist.barrier()
    jobs += [job("contextual", is_dist=is_dist) for is_dist in (True, False)]
    dist.barrier()
    return [each.is_hit for each in jobs[::2]], jobs[3].is_hit, sorted(each.environment.world_size for each in records(path / "shared"))


def _draw() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def drawing(x: torch.Tensor, *, BLOCK: int) -> tuple[float, ...]:
    return _draw()


def _numbers(rank: int, path: Path) -> Any:
    def calls(is_tuned: bool) -> list[Any]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        kernel = autotuned()
        if not is_tuned:
            kernel.cache[(64, "torch.float32", "torch.float32")] = kernel.configs[0]

        def closure(x: torch.Tensor) -> tuple[float, ...]:
            launch(kernel, x)
            return _draw()

        step = tuned(kernel, closure) if is_tuned else closure
        function = (
            autotune([{"BLOCK": block} for block in (16, 32)], lambda x: x.numel())(drawing) if is_tuned else partial(drawing, BLOCK=16)
        )
        x = torch.zeros(64)
        return [step(x), _draw(), function(x), _draw()]

    calls(True)
    dist.barrier()
    return calls(True) == calls(False)


def _restored(rank: int, path: Path) -> Any:
    def call() -> Any:
        kernel, total = autotuned(accumulate_kernel, restore_value=["y_ptr"]), torch.full((64,), 5.0)

        def closure(x: torch.Tensor) -> float:
            launch(kernel, x, total)
            launch(kernel, x, total)
            return total[0].item()

        step = tuned(kernel, closure)
        return step(torch.ones(64)), total[0].item(), step.records[0].is_recalled

    first = call()
    dist.barrier()
    return first, call()


def _zeroed(rank: int, path: Path) -> Any:
    def call() -> Any:
        kernel = autotuned(accumulate_kernel, reset_to_zero=["y_ptr"])

        def closure(x: torch.Tensor) -> float:
            total = torch.zeros(64)
            launch(kernel, x, total)
            launch(kernel, x, total)
            return total[0].item()

        step = tuned(kernel, closure)
        return step(torch.ones(64)), step.records[0].is_recalled

    first = call()
    dist.barrier()
    return first, call()


def _unkept(rank: int, path: Path) -> Any:
    def fails(x: torch.Tensor, *, BLOCK: int) -> torch.Tensor:
        raise ValueError("never")

    def leaving(last: int) -> Any:
        runs, kernel = [], autotuned()

        def closure(x: torch.Tensor) -> None:
            runs.append(1)
            launch(kernel, x)
            if len(runs) == last and rank == 1:
                raise ValueError("left")

        return tuned(None, closure)

    got: list[Any] = [job("function", function=fails).error.kind]
    for last in (1, 3, 5):  # the first run, a replay, the run that would have counted
        try:
            leaving(last)(torch.zeros(64))
        except Exception as error:  # noqa: BLE001  # the test looks at it
            got.append(type(error).__name__)
    dist.barrier()
    return got, len(records(path / "shared"))


SCENARIOS = [_later_key, _half, _made_anew, _alone, _numbers, _restored, _zeroed, _unkept]


@pytest.fixture(scope="module")
def got(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return play(2, tmp_path_factory.mktemp("recall"), SCENARIOS, clock="exact")


def test_a_new_key_in_a_later_call_hits_without_a_replay(got: dict[str, list[Any]]):
    """The miss comes in the midst of an ordinary call, on all ranks: one meeting, and the closure has run once."""
    assert got["_later_key"] == [([2.0] * 3, 3, [32, 32], [True, True])] * 2


def test_where_one_kernel_hits_the_others_are_tuned(got: dict[str, list[Any]]):
    """The one with a record runs its config in all replays; both are there for the next job."""
    hits = [{"add_kernel": True, "accumulate_kernel": False}, {"add_kernel": True, "accumulate_kernel": True}]
    assert got["_half"] == [(2.0, True, [32], hits, True, True, 1)] * 2


def test_a_kernel_made_anew_in_every_call_hits_in_every_call(got: dict[str, list[Any]]):
    """Instead of a tuning for each; its record is listed once, however many calls there are."""
    assert got["_made_anew"] == [([2.0] * 3, 3, [[64]] * 3, 1)] * 2


def test_a_process_alone_has_records_of_its_own(got: dict[str, list[Any]]):
    """The number of ranks that decide is part of the key: no hit across, and one each way the second time."""
    assert got["_alone"] == [([False, True], True, [1, 2])] * 2


def test_random_state_after_a_hit_is_as_without_a_tuner(got: dict[str, list[Any]]):
    assert got["_numbers"] == [True] * 2


def test_a_hit_keeps_what_the_closure_wrote(got: dict[str, list[Any]]):
    """``restore_value`` undoes replays; a hit has none, and its one run counts."""
    assert got["_restored"] == [((7.0, 7.0, False), (7.0, 7.0, True))] * 2


def test_a_hit_zeroes_nothing_between_launches(got: dict[str, list[Any]]):
    """A kernel that is launched twice adds up: ``reset_to_zero`` is for trials."""
    assert got["_zeroed"] == [((2.0, False), (2.0, True))] * 2


def test_nothing_is_kept_of_a_tuning_without_a_result(got: dict[str, list[Any]]):
    """No config is valid; a rank leaves in the first run, in a replay, in the last run."""
    one, other = got["_unkept"]
    assert one == (["NoValidConfigError", *["PeerFailedError"] * 3], 0)
    assert other == (["NoValidConfigError", *["ValueError"] * 3], 0)


def _facts(rank: int, path: Path) -> Any:
    job("contextual")
    edited(rank, path / "shared", winner=64)
    (record,) = records(path / "shared")
    os.environ["TRITON_CACHE_DIR"] += f"/of a second job on rank {rank}"
    add_kernel.device_caches.clear()
    blocks = compiled()
    again = job("contextual")
    triton.knobs.compilation.listener = None
    facts = [(each.shared_bytes, each.n_regs, each.n_spills) for each in record.candidates]
    return facts, summary(again)[:4], blocks, [each.n_regs for each in again.record.candidates]


MS = {16: 80.0, 32: 20.0, 64: 150.0, 128: 80.0, 256: 1.0}
"""What a launch takes, by block; far enough apart for a busy machine."""


def timed_work(x: torch.Tensor, *, BLOCK: int) -> torch.Tensor:
    RUNS.append(BLOCK)
    time.sleep(MS[BLOCK] / 1e3)
    return x + 1.0


def timed(face: Face, *blocks: int) -> tuple[int, set[int], bool]:
    """A job whose candidates take these times: its winner, the blocks that ran after the first run, whether there was a race."""
    launched: list[int] = []

    def launch_ms(src: Any, metadata: Any) -> float:
        launched.append(int(src.constants[(src.fn.arg_names.index("BLOCK"),)]))
        return MS[launched[-1]]

    FakeH200.launch_ms = launch_ms
    dist.barrier()
    done = job(face, blocks=blocks, function=timed_work)
    FakeH200.launch_ms = lambda src, metadata: 0.0
    ran = Counter(launched if face == "contextual" else RUNS[: done.n_runs])
    ran[min(blocks) if face == "contextual" else blocks[0]] -= 1  # the first run, where nothing is known yet: the quickest to compile
    return done.winner, {block for block, n in ran.items() if n > 0}, done.record.spent.race > 0


def _grown(rank: int, path: Path) -> Any:
    return {face: [timed(face, 16, 32, 64)[0], timed(face, 16, 32, 64, 128), timed(face, 16, 32, 64, 128, 256)] for face in FACES}


def _rearranged(rank: int, path: Path) -> Any:
    return {face: [timed(face, 16, 32, 64)[0], timed(face, 64, 32, 16), timed(face, 16, 32), timed(face, 16, 64)] for face in FACES}


def _elsewhere(rank: int, path: Path) -> Any:
    got = []
    for environment in ({"device": "another GPU"}, {"torch": "1.0"}):
        timed("contextual", 16, 32, 64)
        edited(rank, path / "shared", environment=environment)
        for check in "10":
            with settings(path / "shared", VERSION_CHECK=check):
                got.append(timed("contextual", 16, 32, 64, 128)[1])
            dist.barrier()
            if rank == 0:
                for each in Cache(path / "shared").entries():
                    if len(each.record.candidates) == 4:
                        each.path.unlink()
    return got


PROBED = {16}
"""The config of a first run, and so of the probe: the quickest to compile."""
COMPILED = [_facts, _grown, _rearranged, _elsewhere]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return play(2, tmp_path_factory.mktemp("compiled"), COMPILED, mode="fake", env={"TRITON_DEFAULT_FP_FUSION": "1"})


def test_a_hit_compiles_its_config_alone(built: dict[str, list[Any]]):
    """With nothing on disk but the record: one kernel on each rank; resource facts of all candidates are in the record."""
    assert built["_facts"] == [([(0, 64, 0)] * 3, (64, [64], 1, True), [64], [64] * 3)] * 2


@pytest.mark.parametrize("face", FACES)
def test_a_space_that_has_grown_tunes_the_new_ones_against_the_winner(built: dict[str, list[Any]], face: Face):
    """A slow new config changes nothing and a fast one wins; those that had lost are not run again."""
    for got in built["_grown"]:
        assert got[face][0] == 32
        grown, again = got[face][1:]
        assert (grown[0], grown[1] - PROBED, grown[2]) == (32, {32, 128}, True)
        assert (again[0], again[1] - PROBED, again[2]) == (256, {32, 256}, True)


@pytest.mark.parametrize("face", FACES)
def test_a_space_in_another_order_or_smaller_needs_no_race(built: dict[str, list[Any]], face: Face):
    """The winner stands while it is a candidate; without it the others are measured."""
    for got in built["_rearranged"]:
        assert got[face][0] == 32
        for winner, ran, is_raced in got[face][1:3]:
            assert (winner, ran - PROBED, is_raced) == (32, {32}, False)
        assert got[face][3] == (16, {16, 64}, True)


def test_times_of_another_environment_are_not_reused(built: dict[str, list[Any]]):
    """Neither of another GPU nor of other versions, whatever is overlooked."""
    assert built["_elsewhere"] == [[{16, 32, 64, 128}] * 4] * 2
