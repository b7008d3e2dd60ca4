"""The order in which candidates of several sites are compiled."""

from __future__ import annotations

import threading
import time
from typing import Any

import triton

from dist_tune.compiler.candidate import Compilation
from dist_tune.compiler.partition import quickest
from dist_tune.compiler.front_end import FrontEndLock
from dist_tune.compiler.pool import Compiler, Pace, Queued
from tests.compiler.test_pool import NOTHING, Bench, bench

__all__ = ["bench"]


def config(block: int, num_warps: int = 4, **options: Any) -> triton.Config:
    return triton.Config({"BLOCK": block}, num_warps=num_warps, **options)


def test_the_first_run_waits_for_the_candidate_that_compiles_fastest() -> None:
    """Smallest tile per warp first, then fewest stages, then the lowest index: the same on all ranks."""
    configs = [
        config(128),
        config(32, num_warps=8),
        config(32, num_warps=8, num_stages=2),
        config(64),
        config(32, num_warps=8, num_stages=2),
    ]
    assert quickest(configs) == [2, 4, 1, 3, 0]


def test_what_a_launch_waits_for_is_compiled_before_all_others(bench: Bench) -> None:
    """With one thread, and candidates that take longer in the queue before it."""
    gate = threading.Event()
    bench.work = lambda number: gate.wait(10) if number in (128, 64) else None
    compiler = Compiler(1, 10.0)
    configs = [config(128), config(64), config(32), config(16)]
    compiler.begin("site", NOTHING, configs, range(4), 3)
    assert compiler.load("site", 3) is None
    assert bench.began[0] == 16
    gate.set()
    for _ in compiler.wait("site", range(4)):
        pass
    compiler.close()
    assert sorted(bench.began) == [16, 32, 64, 128]


def test_the_longest_of_all_sites_come_first() -> None:
    """A site that is met late does not wait behind the short ones of earlier sites: what each takes is learnt from those done."""
    pace, now = Pace(), time.monotonic()
    for label, seconds in (("short", 0.4), ("long", 4.0)):
        done = Compilation("", None)
        done.started_at = now - seconds
        pace.note(Queued(done, label, (-16.0, 0), 9))
    costs = {("short", 0): -64.0, ("short", 1): -32.0, ("long", 0): -32.0, ("long", 1): -1.0}
    turns = sorted((pace.turn(Queued(NOTHING, place[0], (cost, 0), place[1])), place) for place, cost in costs.items())
    assert [place for _, place in turns] == [("long", 0), ("long", 1), ("short", 0), ("short", 1)]


def test_an_urgent_thread_enters_the_front_end_first() -> None:
    """Others wait for the lock, also if they came before."""
    lock, entered = FrontEndLock(), []

    def enter(name: str, *, is_urgent: bool) -> None:
        lock.acquire(is_urgent=is_urgent)
        entered.append(name)
        lock.release()

    lock.acquire()
    threads = [threading.Thread(target=enter, args=[f"other {i}"], kwargs={"is_urgent": False}) for i in range(3)]
    threads.append(threading.Thread(target=enter, args=["urgent"], kwargs={"is_urgent": True}))
    for each in threads:
        each.start()
    while lock._n_urgent == 0:
        pass
    lock.release()
    for each in threads:
        each.join(5)
    assert entered[0] == "urgent"
    assert len(entered) == 4
