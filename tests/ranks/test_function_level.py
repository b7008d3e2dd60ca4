"""Who decides for an autotuned function on real ranks, when nothing goes wrong: all, a group, an outer tuning, one thread, one process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import NestedTuningError, autotune, contextual_autotune
from dist_tune.settings import Settings
from dist_tune.testing import values
from tests.ranks.functions import BLOCKS, QUICK, Results, chosen, runs_of_this_process, shape_of
from tests.ranks.kernels import autotuned, best, is_unpatched, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def pair() -> Results:
    """All that two ranks can do one after the other in one world."""
    return values(on_ranks(2, _scenarios))


def _scenarios(rank: int) -> dict[str, Any]:
    # The last one counts what is done, for ever.
    return {each.__name__: each(rank) for each in (_nested, _kernel_inside, _threads, _slowest_decides)}


def _slowest_decides(rank: int) -> Any:
    ms = [{1: 1, 2: 15, 4: 40}, {1: 60, 2: 15, 4: 40}][rank]
    ran: list[int] = []

    @autotune(BLOCKS, shape_of, n_warmup=1, n_repeat=2)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        ran.append(block)
        time.sleep(ms[block] / 1e3)
        return x + block

    y = step(torch.zeros(4))
    record, n_tuning = step.records[0], len(ran)
    spent, is_patched = _spent_in(lambda: [step(torch.zeros(4)) for _ in range(3)])
    times = [record.candidates[i].rank_latencies_ms for i in range(3)]
    return chosen(step), y.tolist(), ran[n_tuning:], spent, is_patched, record.n_replays == n_tuning, times


def _spent_in(call: Any) -> tuple[dict[str, int], bool]:
    """How often a call talks, and whether Triton was patched in it."""
    from dist_tune.tuning import tuning

    spent: Counter[str] = Counter()

    def count(owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            spent[kind] += 1
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    for name in ("set", "get", "add", "check", "wait", "compare_set", "multi_get"):
        count(dist.PrefixStore, name, "store")
    count(tuning, "Story", "log")
    call()
    return dict(spent), not is_unpatched()


def test_the_slowest_rank_decides_and_a_steady_call_is_an_ordinary_one(pair: Results):
    """Block 1 is fastest on rank 0 and slowest on rank 1: both take 2. Later calls run once, talk to nobody and log nothing."""
    got = [each["_slowest_decides"] for each in pair]
    assert got[0] == got[1]
    config, y, later, spent, is_patched, is_counted, times = got[0]
    assert config == ["block=2"]
    assert y == [2.0] * 4
    assert later == [2, 2, 2]
    assert (spent, is_patched, is_counted) == ({}, False, True)
    assert times[0][1] > times[0][0] + 30  # each rank's own time of block 1, in ms


def _groups(rank: int) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]

    @autotune(BLOCKS, shape_of, n_warmup=0, n_repeat=2)
    def step(x: torch.Tensor, block: int, group: Any = None) -> torch.Tensor:
        # Pairs like different blocks; the world is ruled by the slower pair.
        time.sleep(({1: 1, 2: 40, 4: 20} if rank < 2 else {1: 40, 2: 1, 4: 20})[block] / 1e3)
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    x = torch.ones(4)
    pairs = step(x, group=mine, autotune_pg=mine)
    world = step(x)
    again = step(x, group=mine, autotune_pg=mine)
    with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
        step(torch.ones(5), autotune_pg=groups[1 - rank // 2])
    return chosen(step), pairs[0].item(), world[0].item(), again[0].item()


def test_two_groups_tune_at_once_and_the_world_for_itself():
    """Each group has its own winner for one key; who is not in a group is refused."""
    got = values(on_ranks(4, _groups))
    assert [each[0] for each in got] == [["block=1", "block=4"]] * 2 + [["block=2", "block=4"]] * 2
    assert [each[1:] for each in got] == [(2.0, 4.0, 2.0)] * 4


def _nested(rank: int) -> Any:
    ran: Counter[str] = Counter()
    kernel = autotuned(blocks=(16, 32))
    alone = dist.new_group([0])

    @autotune(BLOCKS, shape_of, **QUICK)
    def inner(x: torch.Tensor, block: int) -> torch.Tensor:
        ran[f"inner {block}"] += 1
        return launch(kernel, x)

    @autotune([{"block": block} for block in (8, 16)], shape_of, **QUICK)
    def outer(x: torch.Tensor, block: int) -> torch.Tensor:
        ran[f"outer {block}"] += 1
        y = inner(x)
        dist.all_reduce(y)
        z: torch.Tensor = inner(y, autotune=False)
        return z

    y = outer(torch.zeros(64))
    met = [(len(chosen(outer)), sorted(record.kernel for record in outer.records)), best(kernel)]
    ran.clear()
    outer(torch.zeros(64))
    steady, n_records = dict(ran), len(inner.records) + len(outer.records)

    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: inner(x) + launch(kernel, x))
    z = step(torch.zeros(128))
    in_closure = sorted(record.kernel for record in step.records)
    inner(torch.zeros(128))
    with pytest.raises(NestedTuningError, match=r"decides with ranks \[0, 1\]") as refused:
        contextual_autotune()(lambda: inner(torch.zeros(256)))()
    lonely = contextual_autotune(is_dist=True, group=alone)(lambda: inner(torch.zeros(512))) if rank == 0 else None
    if lonely is not None:
        with pytest.raises(NestedTuningError, match=r"decides with ranks \[1\]"):
            lonely()
    n_later = len(inner.records) + len(outer.records) - n_records
    return y[0].item(), met, sum(steady.values()), z[0].item(), in_closure, n_later, "autotune_pg" in str(refused.value)


def test_a_function_inside_another_or_inside_a_closure_is_one_of_its_sites(pair: Results):
    """The outer one tunes all of them at once, kernels of triton.autotune too; with ranks that it does not ask it says so."""
    got = [each["_nested"] for each in pair]
    assert got[0] == got[1]
    y, (sites, kernels), n_steady, z, in_closure, n_later, names_remedy = got[0]
    assert y == 2 + 1
    assert sites == (
        3,
        ["tests.ranks.kernels.add_kernel", "tests.ranks.test_function_level.inner", "tests.ranks.test_function_level.outer"],
    )
    assert len(kernels) == 1
    assert n_steady == 3
    assert z == 2.0
    assert in_closure == ["tests.ranks.kernels.add_kernel", "tests.ranks.test_function_level.inner"]
    assert n_later == 0
    assert names_remedy


def _kernel_inside(rank: int) -> Any:
    ran = runs_of_this_process
    kernel = autotuned(blocks=(16, 32))

    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        runs_of_this_process.append(block)
        return launch(kernel, x)

    def new(**options: Any) -> Any:
        return autotune(BLOCKS, None, n_warmup=0, n_repeat=1, **options)(step)

    first = new()
    first(torch.zeros(64))
    kernel.cache.clear()
    ran.clear()
    hit = new()
    y = hit(torch.zeros(64))
    n_kernel = len(best(kernel))
    recalled = [(record.kernel.rpartition(".")[2], record.is_recalled) for record in hit.records]
    blocks = set(ran)
    ran.clear()
    hit = new()
    hit(torch.zeros(192))  # a new key for the kernel
    fresh = [(record.kernel.rpartition(".")[2], record.is_recalled) for record in hit.records]
    later = len(ran), len(set(ran)), len(best(kernel))
    ran.clear()
    new(cache=False)(torch.zeros(64))
    return y[0].item(), recalled, len(blocks), n_kernel, fresh, later, set(ran)


def test_a_cached_function_still_tunes_the_kernels_inside(pair: Results):
    """The function's config comes from the cache, so it runs with that alone; its kernels are sites of that run. cache=False tunes anew."""
    got = [each["_kernel_inside"] for each in pair]
    assert got[0] == got[1]
    y, recalled, n_blocks, n_kernel, fresh, (n_runs, n_later_blocks, n_later_kernel), ran = got[0]
    assert y == 1.0
    assert recalled == [("add_kernel", True), ("step", True)]
    assert (n_blocks, n_kernel) == (1, 1)
    assert fresh == [("add_kernel", False), ("step", True)]
    assert n_runs > 3  # for the kernel's configs
    assert (n_later_blocks, n_later_kernel) == (1, 2)
    assert ran == {1, 2, 4}


def _threads(rank: int) -> Any:
    ran: list[int] = []

    @autotune(BLOCKS, shape_of, **QUICK)
    def step(x: torch.Tensor, block: int) -> int:
        ran.append(threading.get_ident())
        time.sleep(2e-3)
        return block

    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(step(torch.zeros(4)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(step.records), len(set(results)), len(set(ran)), is_unpatched()


def test_threads_that_miss_together_tune_once(pair: Results):
    """One of them tunes, and the others wait for its config."""
    assert [each["_threads"] for each in pair] == [(1, 1, 3, True)] * 2


def _late_world(rank: int, folder: str) -> Any:
    @autotune(BLOCKS, shape_of, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        return x

    step(torch.zeros(4))
    alone = step.records[0].environment.world_size
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/late", 2), rank=rank, world_size=2)
    step(torch.zeros(5))
    return alone, step.records[1].environment.world_size, Settings().deadline_s > 0


def test_without_a_world_a_process_tunes_alone(tmp_path: Any):
    """autotune_pg=None is the world if there is one, and this process otherwise."""
    assert values(on_ranks(2, _late_world, str(tmp_path), is_dist=False)) == [(1, 2, True)] * 2


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _results_of_collectives(rank: int) -> Any:
    from torch.distributed._functional_collectives import all_reduce

    told = []
    for check in (None, _plus_one):
        x: Any = all_reduce(torch.full((1 << 10,), rank + 1.0), "sum", list(range(2)))

        @autotune(BLOCKS, None, check=check, **QUICK)
        def step(x: torch.Tensor, block: int) -> torch.Tensor:
            return x + 1

        told.append((bool((step(x) == 4).all()), [each.failure for each in step.records[0].candidates]))
    return told


def test_a_result_of_a_collective_may_be_an_argument():
    """It is waited for before it is copied, with a check, too."""
    assert values(on_ranks(2, _results_of_collectives)) == [[(True, [None] * 3)] * 2] * 2


def _distributed_tensors(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x: Any = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (2,)), [Shard(0)])

    @autotune(BLOCKS, None, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        return x.add_(1)

    y: Any = step(x)
    return y.to_local().tolist(), len(step.records)


def test_a_distributed_tensor_is_changed_once():
    """Its part on this rank is what is copied and put back, because the function is not tuned."""
    assert values(on_ranks(2, _distributed_tensors)) == [([2.0] * 4, 0)] * 2
