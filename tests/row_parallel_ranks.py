"""What ranks run in tests of kernels/gemm_rs.py and kernels/gemm_allreduce.py: steps on fresh inputs, some of them sabotaged."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


def errors(rank: int, name: str, which: list[tuple[int, bool]], shape: tuple[int, ...], sabotage: str = "") -> list[float]:
    """The worst relative error of five steps with each of some of the checked exchanges, with partial results in float32 where said."""
    from kernels import cases, harness, push_gemm

    torch.manual_seed(rank)  # forked ranks begin alike, and a sum of equal partial results hides which were summed
    step: Any = cases.STEPS[name]
    if sabotage:
        SABOTAGES[sabotage](rank)
    found = []
    for i, is_fp32 in which:
        context: Any = step.context(config=push_gemm.interpreter_configs()[i % 3], partial_dtype=torch.float32 if is_fp32 else None)

        def run(a: Any, b: Any, out: Any, context: Any = context, choices: Any = step.checked[i]) -> None:
            context(a, b, out, **choices)

        found.append(harness.worst_error(step, run, shape, torch.bfloat16, CPU, Namespace(straggler=None)))
    dist.barrier()
    return found


def errors_after(rank: int, n_before: int, exchange: int) -> float:
    """The worst relative error of five GEMM-ReduceScatter steps when flags and credits are as `n_before` steps leave them."""
    from kernels import cases, harness, push_gemm
    from kernels.partials import Plan
    from kernels.symmetric import Epochs, as_int32

    torch.manual_seed(rank)
    step: Any = cases.STEPS["gemm_rs"]
    m, n, k = 38, 20, 40
    context: Any = step.context(config=push_gemm.interpreter_configs()[0])
    sums = context.sums_for(Plan(m=m, n=n, n_parts=2, dtype=torch.bfloat16, partial_dtype=torch.bfloat16, gathers=False), CPU)
    sums._epochs, own = Epochs(n_before), sums._memory.own
    for flag, elements in enumerate(sums.plan.flag_elements(rank)):
        own["arrivals"][:, flag] = as_int32(n_before * elements)
    own["credits"][1 - rank] = as_int32(n_before)
    dist.barrier()

    def run(a: Any, b: Any, out: Any) -> None:
        context(a, b, out, **step.checked[exchange])

    error: float = harness.worst_error(step, run, (m, n, k), torch.bfloat16, CPU, Namespace(straggler=None))
    dist.barrier()
    return error


def refused_then_right(rank: int) -> tuple[str, float]:
    """The message of an untuned step on rank 1 alone, and the error of the step that both ranks make then."""
    from kernels import cases, harness, push_gemm

    torch.manual_seed(rank)
    step: Any = cases.STEPS["gemm_rs"]
    message = ""
    context: Any = step.context()
    a, b = step.operands((4, 8, 16), torch.bfloat16, CPU, None)
    config = push_gemm.interpreter_configs()[0]
    context(a, b, config=config)  # also makes the memory, on both ranks
    if rank == 1:
        try:
            context(a, b)
        except RuntimeError as error:
            message = str(error)
    errors = [harness.worst_over_ranks(context(a, b, config=config), step.expected((a, b))) for _ in range(3)]
    dist.barrier()
    return message, max(errors)


def failed_then_right(rank: int) -> tuple[str, float]:
    """The message of a step whose sum could not be launched on any rank, and the error of the steps behind it."""
    from kernels import cases, harness, push_gemm
    from kernels.partials import Exchange, PartialSums

    torch.manual_seed(rank)
    step: Any = cases.STEPS["gemm_allreduce"]
    message, right = "", PartialSums._sum
    context: Any = step.context(config=push_gemm.interpreter_configs()[0])
    choices = {"algorithm": "two_shot", "exchange": Exchange("push", "behind", 0, 16)}

    def fail(*_: Any) -> None:
        PartialSums._sum = right  # type: ignore[method-assign]
        raise RuntimeError("does not compile")

    PartialSums._sum = fail  # type: ignore[assignment, method-assign]
    a, b = step.operands((9, 8, 16), torch.bfloat16, CPU, None)
    try:
        context(a, b, **choices)
    except RuntimeError as error:
        message = str(error)
    errors = [harness.worst_over_ranks(context(a, b, **choices), step.expected((a, b))) for _ in range(3)]
    dist.barrier()
    return message, max(errors)


def raise_flags_before_tiles(rank: int) -> None:
    """Rank 1 stores each tile that it pushes a moment after its flag is raised."""
    from kernels import push_gemm

    if rank != 1:
        return
    kernel: Any = push_gemm
    late: list[Any] = []
    store, count = kernel.store_to, kernel.count_for

    def count_then_store(*args: Any) -> None:
        count(*args)
        time.sleep(0.3)
        store(*late.pop())

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
