"""Results of the steps in kernels/ between two gloo ranks that interpret: right ones, and that wrong ones are told from rounding."""

from __future__ import annotations

import os
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune.testing import on_ranks, values
from tests.worlds import further

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
MOE, MOE_SHAPE = Namespace(skew=1.0, straggler=None, autotune=False, check=True), (18, 36, 30, 3, 2)


def first(rank: int, name: str) -> Any:
    """A step's case on this rank; forked ranks begin alike, and a sum of equal partial results hides which were summed."""
    from kernels import cases

    torch.manual_seed(rank)
    return cases.STEPS[name]


def worst_error(step: Any, run: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, options: Any = MOE) -> float:
    from kernels import harness

    return harness.worst_error(step, run, shape, dtype, CPU, options)


def errors(rank: int, name: str, which: list[tuple[int, bool]], shape: tuple[int, ...], sabotage: str = "") -> list[float]:
    """The worst relative error of five steps with each of some of the checked exchanges, with partial results in float32 where said."""
    from kernels import push_gemm

    step = first(rank, name)
    if sabotage:
        SABOTAGES[sabotage](rank)
    found = []
    for i, is_fp32 in which:
        context = step.context(config=push_gemm.interpreter_configs()[i % 3], partial_dtype=torch.float32 if is_fp32 else None)

        def run(a: Any, b: Any, out: Any, context: Any = context, choices: Any = step.checked[i]) -> None:
            context(a, b, out, **choices)

        found.append(worst_error(step, run, shape))
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("step", "shape", "ways"),
    [
        # M / W is no multiple of the rows of a flag or a tile, N none of 8, and K / W none of a block.
        pytest.param("gemm_rs", (38, 20, 40), [(0, False), (2, True), (4, False)]),
        # M is no multiple of the ranks, so that their parts differ.
        ("gemm_allreduce", (11, 12, 24), [(0, False), (2, True)]),
    ],
)
def test_results_are_right_where_no_block_divides_the_shape(step: str, shape: tuple[int, ...], ways: list[tuple[int, bool]]):
    """Each with an exchange, and partial results in float32 or not: five fresh inputs, outputs full of NaN."""
    for found in values(on_ranks(2, errors, step, ways, shape)):
        assert all(error < (1 if is_fp32 else 2) * 2**-7 for error, (_, is_fp32) in zip(found, ways, strict=True))


def raise_flags_before_tiles(rank: int) -> None:
    """Rank 1 stores each tile that it pushes a moment after its flag is raised."""
    from kernels import push_gemm

    kernel: Any = push_gemm
    late, store, count = list[Any](), kernel.store_to, kernel.count_for

    def count_then_store(*args: Any) -> None:
        count(*args)
        time.sleep(0.3)
        store(*late.pop())

    if rank == 1:
        kernel.store_to, kernel.count_for = (lambda *args: late.append(args)), count_then_store


def skip_a_rank(rank: int) -> None:
    """Rank 0 sums its own partial result twice, and that of rank 1 never."""
    from kernels.partials import PartialSums

    tables_of = PartialSums._tables_of

    def twice_own(self: Any, move: str, slot: int) -> Any:
        tables = tables_of(self, move, slot)
        if rank == 0:
            tables.sources[1] = tables.sources[0]
        return tables

    PartialSums._tables_of = twice_own  # type: ignore[method-assign]


SABOTAGES = {"flag before tile": raise_flags_before_tiles, "skipped rank": skip_a_rank}


@pytest.mark.parametrize(
    ("step", "sabotage", "exchange"),
    [
        ("gemm_rs", "flag before tile", 0),
        *(further("gemm_rs", "skipped rank", exchange) for exchange in (0, 1, 3, 4)),
        *(further("gemm_allreduce", sabotage, exchange) for sabotage in SABOTAGES for exchange in (0, 2)),
    ],
)
def test_a_wrong_exchange_is_found(step: str, sabotage: str, exchange: int):
    """A flag that is raised before its tile is stored, and a sum without one rank: the error is far above rounding on all ranks."""
    for (error,) in values(on_ranks(2, errors, step, [(exchange, False)], (16, 8, 16), sabotage)):
        assert error > 0.1


def errors_after(rank: int, n_before: int, exchange: int) -> float:
    """The worst relative error of five GEMM-ReduceScatter steps when flags and credits are as `n_before` steps leave them."""
    from kernels import push_gemm
    from kernels.partials import PartialSums, Plan
    from kernels.symmetric import as_int32

    step: Any = first(rank, "gemm_rs")
    m, n, k = 38, 20, 40
    context: Any = step.context(config=push_gemm.interpreter_configs()[0])
    plan = Plan(m=m, n=n, n_parts=2, dtype=torch.bfloat16, partial_dtype=torch.bfloat16, gathers=False)
    sums = context._sums[plan, CPU] = PartialSums(plan, CPU, context.group)
    sums._n_done, own = n_before, sums._memory.own
    for flag, elements in enumerate(plan.flag_elements(rank)):
        own["arrivals"][:, flag] = as_int32(n_before * elements)
    own["credits"][1 - rank] = as_int32(n_before)
    dist.barrier()
    error = worst_error(step, lambda a, b, out: context(a, b, out, **step.checked[exchange]), (m, n, k))
    dist.barrier()
    return error


@pytest.mark.parametrize(
    ("n_before", "exchange"),
    [
        (2**31 // (16 * 20) - 2, 0),
        *(further(2**31 // (16 * 20) - 2, exchange) for exchange in (3, 4)),
        *(further(n_before, 0) for n_before in (2**32 // (16 * 20) - 2, 2**31 - 3, 2**32 - 3)),
    ],
)
def test_steps_are_right_where_flags_wrap_around(n_before: int, exchange: int):
    """Flags of 16 rows and of 3 rows pass 2^31 elements at different steps; a tile has rows of flags that count nothing."""
    assert max(values(on_ranks(2, errors_after, n_before, exchange, timeout_s=30))) < 2 * 2**-7


def refused_then_right(rank: int) -> tuple[str, float]:
    """The message of an untuned step on rank 1 alone, and the error of the steps that both ranks make then."""
    from kernels import harness, push_gemm

    step, message = first(rank, "gemm_rs"), ""
    context: Any = step.context()
    a, b = step.operands((4, 8, 16), torch.bfloat16, CPU, None)
    config = push_gemm.interpreter_configs()[0]
    context(a, b, config=config)  # also makes the memory, on both ranks
    if rank == 1:
        with pytest.raises(RuntimeError) as refused:
            context(a, b)
        message = str(refused.value)
    errors = [harness.worst_over_ranks(context(a, b, config=config), step.expected((a, b))) for _ in range(3)]
    dist.barrier()
    return message, max(errors)


@pytest.mark.slow
def test_a_step_without_a_tuner_is_refused_and_does_not_count():
    """`triton.autotune` alone would repeat the kernel; the rank that was refused is not a step behind or ahead of its peer afterwards."""
    outcomes = values(on_ranks(2, refused_then_right, timeout_s=30))
    assert [message.partition(",")[0] for message, _ in outcomes] == ["", "push_gemm_kernel counts what it sends in its peers' flags"]
    assert max(error for _, error in outcomes) < 2 * 2**-7


class LateGather:
    """A gather whose shards arrive while the product waits, or, `too_late`, when it has been run."""

    def __init__(self, *, too_late: bool) -> None:
        self.epoch, self.too_late, self.flags = 0, too_late, torch.zeros(2, dtype=torch.int32)
        self.arrival = threading.Thread()

    def start(self, shard: torch.Tensor) -> Any:
        from kernels.cases import gathered
        from kernels.gather import Gathered

        shards = gathered(shard)
        self.epoch += 1
        seen, epoch = torch.full_like(shards, float("nan")), self.epoch

        def arrive() -> None:
            time.sleep(0.05)
            seen.copy_(shards)
            self.flags.fill_(epoch)

        self.arrival = threading.Thread(target=arrive)
        if not self.too_late:
            self.arrival.start()
        return Gathered(seen, self.flags, self.epoch)

    def finish(self) -> None:
        if self.too_late:
            self.arrival.start()
        self.arrival.join()


@triton.jit
def no_wait(flag, count):
    return tl.load(flag) * 0


def taking_turns(run: Callable[..., Any]) -> Callable[..., Any]:
    """One rank begins its step when the other has ended it: a step that waits for its peer would never end."""
    calls = iter(range(100))

    def turn(*operands: Any, out: torch.Tensor) -> None:
        is_late = next(calls) % 2 == dist.get_rank()
        if is_late:
            dist.barrier()
        run(*operands, out=out)
        if not is_late:
            dist.barrier()

    return turn


@contextmanager
def amiss(module: Any, name: str, value: object) -> Iterator[None]:
    right = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, right)


def experts(rank: int) -> list[bool]:
    """Whether the first way of each layer is right, and with something amiss; what is late here is late by order, not by time."""
    from kernels import grouped_gemm, harness, moe_combine, moe_reduce_rs
    from kernels.ag_gemm import AllGatherGemm

    second, ahead = first(rank, "moe_reduce_rs"), first(rank, "ag_moe")
    scatter, gather = (next(iter(layer.ways(CPU, MOE)))[2] for layer in (second, ahead))
    late, too_late, found = LateGather(too_late=False), LateGather(too_late=True), list[bool]()

    def tell(layer: Any, run: Any) -> None:
        found.append(worst_error(layer, run, MOE_SHAPE, torch.float16) <= layer.n_roundings * torch.finfo(torch.float16).eps)

    tell(second, scatter)
    with amiss(AllGatherGemm, "gather_for", lambda *_: late):
        tell(ahead, gather)
    harness.N_CHECK_INPUTS = 2  # enough for what is always wrong, on one rank or the other
    equal = moe_combine.Partials
    with amiss(moe_reduce_rs, "Partials", lambda results, weights, *rest: equal(results, torch.full_like(weights, 0.5), *rest)):
        tell(second, scatter)
    # The step has its memory by now: where one rank runs alone, nothing may be collective.
    with amiss(moe_combine, "wait_until", no_wait):
        tell(second, taking_turns(scatter))
    with (
        amiss(grouped_gemm, "wait_until", no_wait),
        amiss(AllGatherGemm, "gather_for", lambda *_: too_late),
    ):
        tell(ahead, gather)
    dist.barrier()
    return found


def test_layers_of_experts_are_right_and_what_is_amiss_is_told_from_rounding():
    """Odd sizes, skewed experts, shards that come while the product waits; ignored weights, no wait for sums, no wait for shards."""
    assert values(on_ranks(2, experts)) == [[True, True, False, False, False]] * 2


def with_the_product_tuned_alone(rank: int, name: str) -> tuple[float, int, int]:
    """The error of a step with this product, how many sites it tuned, and how many configs its kernel's tuner chose for it."""
    from kernels import grouped_gemm, harness, push_gemm, shard_gemm

    step = first(rank, name)
    kernels = {"ag_gemm": shard_gemm.ag_gemm_kernel, "gemm_rs": push_gemm.push_gemm_kernel}
    kernel: Any = kernels.get(name, grouped_gemm.grouped_gemm_kernel)
    operands = step.operands(step.shapes("tune", 2, CPU)[0], torch.float16, CPU, MOE)
    run, records = step.tuned(step.tuners[0])
    run(*operands)
    in_the_step, n_tuned, alone = dict(kernel.cache), len(records), step.fastest_product(operands)
    assert in_the_step
    assert kernel.cache == in_the_step
    assert alone in kernel.configs
    kernel.cache.clear()
    run, more = step.tuned(step.tuners[0], alone)
    error = harness.worst_over_ranks(run(*operands), step.expected(operands)) / step.n_roundings / torch.finfo(torch.float16).eps
    dist.barrier()
    return error, len(more) - (n_tuned if more is records else 0), len(kernel.cache)


@pytest.mark.parametrize("name", ["ag_gemm", *map(further, ("gemm_rs", "ag_moe", "moe_reduce_rs"))])
def test_a_step_runs_with_the_product_that_was_tuned_alone(name: str):
    """Right, with all else as it was tuned in the step: nothing is tuned again, and the product's config is not its kernel's choice."""
    for error, n_tuned, n_chosen in values(on_ranks(2, with_the_product_tuned_alone, name)):
        assert (error <= 1.0, n_tuned, n_chosen) == (True, 0, 0)


def failed_sum(rank: int) -> list[int]:
    import kernels.moe_reduce_rs as layer
    from kernels.routing import route

    def fail(*_: Any) -> None:
        raise RuntimeError("does not compile")

    step: Any = layer.MoeReduceScatter()
    with amiss(layer, "reduce", fail), pytest.raises(RuntimeError, match="does not compile"):
        step(torch.ones(8, 8).half(), torch.ones(2, 8, 8).half(), route(torch.zeros(4, 2), 2), config=layer_config())
    return [buffers.n_done for buffers in step._buffers.values()]


def layer_config() -> Any:
    from kernels.grouped_gemm import check_configs

    return check_configs()[0]


def test_a_sum_that_cannot_be_launched_counts_its_step():
    """What the peers wait for is queued by then: the next step is another one, or it would take their flags of this one for its own."""
    assert values(on_ranks(1, failed_sum)) == [[1]]


def of_groups(rank: int) -> tuple[int, int]:
    from kernels.ag_gemm import AllGatherGemm

    dist.get_process_group_ranks = lambda group: [1, 2, 3, 4, 5]
    os.environ["LOCAL_WORLD_SIZE"] = "3"  # ranks 3 to 5 share a machine
    step = AllGatherGemm()
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="AllGatherGemm needs a process group: call"):
        AllGatherGemm()
    return step.n_ranks, step.n_local_ranks


def test_a_step_knows_its_group():
    """How many ranks share a machine is part of its key; without a group there is no step."""
    assert values(on_ranks(1, of_groups)) == [(1, 3)]
