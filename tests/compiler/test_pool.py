"""The threads that compile: their order and number, what a launch waits for, and what other
processes do meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dist_tune.compiler.pool import n_compile_threads, quickest, turns
from dist_tune.compiler.triton_cache import claim
from dist_tune.testing import FakeH200
from tests.steps import add_kernel, autotuned, constants_of, failures, launch, tuned
from tests.worlds import on_each_rank

alone: Any = {"n": 1, "modes": ["fake"], "is_dist": False}
LONG_S = 60.0


def config(block: int, num_warps: int = 4, **options: Any) -> triton.Config:
    return triton.Config({"BLOCK": block}, num_warps=num_warps, **options)


def fresh(*blocks: int, **options: Any) -> Any:
    """Autotuned, with nothing in its memory."""
    return autotuned(triton.jit(add_kernel.fn), blocks, **options)


@pytest.mark.once
def test_the_first_run_waits_for_the_candidate_that_compiles_fastest():
    """Smallest tile per warp first, then fewest stages, then the lowest index: the same on all
    ranks.
    """
    mine = [
        config(128),
        config(32, 8),
        config(32, 8, num_stages=2),
        config(64),
        config(32, 8, num_stages=2),
    ]
    assert quickest(mine) == [2, 4, 1, 3, 0]


@pytest.mark.once
def test_ranks_begin_with_other_parts_that_make_up_all():
    """What differs in stages, and warps where there are many blocks, stays together; each rank has
    some of the long ones.
    """
    mine = [
        config(block, warps, num_stages=stages)
        for block in (16, 32, 64, 128)
        for warps in (4, 8)
        for stages in (1, 2)
    ]
    by_rank = [
        [i for i, (part, *_) in enumerate(turns(mine, position, 2)) if part == 0]
        for position in range(2)
    ]
    assert sorted(by_rank[0] + by_rank[1]) == list(range(16))
    assert [{mine[i].kwargs["BLOCK"] for i in each} for each in by_rank] == [{128, 32}, {64, 16}]
    few = [config(16, warps, num_stages=stages) for warps in (4, 8) for stages in (1, 2, 3)]
    assert [part for part, *_ in turns(few, 0, 2)] == [0, 0, 0, 1, 1, 1]


@pytest.mark.once
def test_threads_share_the_cores_of_a_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert [n_compile_threads(n) for n in (1, 4, 5, 64)] == [16, 4, 3, 1]


@on_each_rank(**alone)
def test_what_a_launch_waits_for_is_compiled_beside_all_others(rank: int):
    """On one core one thread compiles the others, the longest first; the launch does not wait for
    that.
    """
    launched, kernel, at_work = threading.Event(), fresh(16, 32, 64, 128), list[int]()
    order, most, is_timely = list[int](), list[int](), list[bool]()

    def listener(*, src: Any, **facts: Any) -> None:
        block = constants_of(src)["BLOCK"]
        if block != 16:
            order.append(block)
            at_work.append(block)
            is_timely.append(launched.wait(LONG_S))
            most.append(len(at_work))
            at_work.remove(block)

    def step() -> None:
        launch(kernel, torch.zeros(64))
        launched.set()

    triton.knobs.compilation.listener = listener
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: {0})
        tuned(None, step, is_dist=False)()
    assert (order, most, is_timely) == ([128, 64, 32], [1] * 3, [True] * 3)


@on_each_rank(**alone)
def test_kernels_are_loaded_while_others_are_compiled(rank: int):
    """The last one to be compiled waits until most are on the device."""
    kernel, loads, begun, is_timely = (
        fresh(16, 32, 64, 128, 256),
        list[str](),
        list[int](),
        list[bool](),
    )
    are_loaded, load = threading.Event(), FakeH200.utils.load_binary

    def listener(**facts: Any) -> None:
        begun.append(1)
        if len(begun) == 5:
            is_timely.append(are_loaded.wait(LONG_S))

    def loading(name: str, *rest: Any) -> Any:
        loads.append(name)
        if len(loads) == 3:
            are_loaded.set()
        return load(name, *rest)

    triton.knobs.compilation.listener = listener
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeH200.utils, "load_binary", loading, raising=False)
        tuned(kernel, is_dist=False)(torch.zeros(64))
    assert (len(loads), is_timely) == (5, [True])


@pytest.mark.once
@on_each_rank(**alone, cases=["let go", "never"])
def test_a_kernel_that_another_process_compiles_comes_last(rank: int, end: str):
    """The others go on; it is taken up when that process lets go, as at its death, and fails after
    the deadline if it never does.
    """
    each, done = [config(16, warps) for warps in (1, 2, 4, 8)], list[int]()
    # All are on disk, and take no time that counts.
    tuned(fresh(configs=each), is_dist=False)(torch.zeros(64))
    (path,) = (
        each
        for each in Path(os.environ["TRITON_CACHE_DIR"]).rglob("add_kernel.json")
        if '"num_warps": 1,' in each.read_text()
    )
    file = (path.parent / "dist_tune.lock").open("a+b")
    fcntl.flock(file, fcntl.LOCK_EX)

    def listener(*, metadata: Any, **facts: Any) -> None:
        done.append(metadata["num_warps"])
        if len(done) == 3 and end == "let go":
            file.close()

    triton.knobs.compilation.listener = listener
    os.environ["DIST_TUNE_DEADLINE_S"] = "3" if end == "never" else "60"
    step = tuned(fresh(configs=each), is_dist=False, cache=False)
    step(torch.zeros(64))
    file.close()
    first, *others = failures(step)
    assert (sorted(done[:3]), done[3:], others) == ([2, 4, 8], [1] * (end == "let go"), [None] * 3)
    assert ("TimeoutError" in str(first)) == (end == "never")


@pytest.mark.once
@pytest.mark.parametrize("why", ["", "no folder", "no locks"])
def test_where_there_are_no_locks_each_process_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
):
    """A cache folder that cannot be written, or a file system without locks."""

    def flock(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv(
        "TRITON_CACHE_DIR", "/dev/null/cache" if why == "no folder" else str(tmp_path)
    )
    if why == "no locks":
        monkeypatch.setattr("fcntl.flock", flock)
    with claim("ab" * 32) as first, claim("ab" * 32) as second:
        assert first is not None
        assert (second is None) == (why == "")
