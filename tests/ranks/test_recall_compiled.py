"""What later jobs take from the cache without an interpreter: facts of compiled kernels, and times where the space has changed."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune.cache.store import Cache
from dist_tune.testing import FakeH200
from tests.ranks.jobs import FACES, RUNS, Face, edited, job, play, records, settings, summary
from tests.ranks.kernels import add_kernel
from tests.ranks.test_sharing import compiled

pytestmark = pytest.mark.once


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
