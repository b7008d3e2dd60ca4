"""Results of kernels/ under the Triton interpreter: right at sizes that no block divides, and what
is amiss is told from rounding.

A row of a table is a kernel or step, a shape, a type, and which of its ways, all if none is named:
those of `--case check`.
"""

from __future__ import annotations

import threading
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from tests.worlds import further, on_each_rank

CPU, INF, NAN = torch.device("cpu"), float("inf"), float("nan")
OPTIONS = Namespace(skew=1.0, straggler=None, autotune=False, check=True)
alone = on_each_rank(1, is_dist=False)


@on_each_rank(
    1,
    is_dist=False,
    cases=[
        "vector_add 1025 fp32",
        "vector_add 1 bf16",
        "matmul 33,17,70 fp16",
        "softmax 2,300 bf16",
        "persistent_gemm 33,17,70 bf16",
        # Of two blocks of K, and of w, the last ones are not whole
        "gemm_a8w8_blockscale 33,130,144 bf16",
        "gemm_a8w8_blockscale 1,5,7 fp16",  # more splits than blocks
        further("gemm_a8w8_blockscale 70,200,500 bf16"),
    ],
)
def test_each_config_of_a_kernel_is_right(rank: int, row: str):
    """And the tuned one; at sizes that no block divides, and at less than one of anything."""
    from kernels import cases, harness

    name, shape, dtype = row.split()
    for problem in cases.KERNELS[name].problems(
        harness.parse_shape(shape), harness.DTYPES[dtype], CPU
    ):
        errors = {way: (run(), limit) for way, limit, run in harness.ways_of(problem)}
        assert {way: found for way, found in errors.items() if not found[0] <= found[1]} == {}


def way_of(rank: int, row: str) -> tuple[Any, list[tuple[str, int, Any]], Callable[..., float]]:
    """A step, its ways of a row, and the worst error of one of them, relative to one rounding."""
    from kernels import cases, harness

    name, shape, dtype, *which = row.split()
    torch.manual_seed(rank)  # a sum of equal partial results hides which were summed
    step, kind = cases.STEPS[name], harness.DTYPES[dtype]
    ways = list(step.ways(CPU, OPTIONS))

    def error(run: Any, n_inputs: int = 3) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(harness, "N_CHECK_INPUTS", n_inputs)
            return (
                harness.worst_error(step, run, harness.parse_shape(shape), kind, CPU, OPTIONS)
                / torch.finfo(kind).eps
            )

    return step, [ways[int(i)] for i in which[0].split(",")] if which else ways, error


@on_each_rank(
    cases=[
        "ag_gemm 140,70,45 fp16 0,1",
        # M / W is no multiple of the rows of a flag or a tile, N none of 8, and K / W none of a
        # block; once with sums in float32.
        "gemm_rs 38,20,40 bf16 0,3,8",
        # M is no multiple of the ranks, so that their parts differ
        "gemm_allreduce 11,12,24 bf16 0,5",
        *map(
            further,
            (
                "gemm_rs 38,20,40 bf16",
                "gemm_allreduce 11,12,24 bf16",
                "moe_reduce_rs 18,36,30,3,2 fp16",
            ),
        ),
    ]
)
def test_each_way_of_a_step_is_right_on_two_ranks(rank: int, row: str):
    """Each exchange with a config; fresh inputs at each step, outputs full of NaN."""
    _, ways, error = way_of(rank, row)
    errors = {way: (error(run), n_roundings) for way, n_roundings, run in ways}
    assert {way: found for way, found in errors.items() if not found[0] <= found[1]} == {}


# -- what is amiss ---------------------------------------------------------------------------------


class LateGather:
    """A gather whose shards arrive while the product waits, or when it has been run."""

    def __init__(self, *, too_late: bool) -> None:
        self.epoch, self.too_late, self.flags = 0, too_late, torch.zeros(2, dtype=torch.int32)
        self.arrival = threading.Thread()

    def start(self, shard: torch.Tensor) -> Any:
        from kernels.cases import gathered
        from kernels.gather import Gathered

        shards, self.epoch = gathered(shard), self.epoch + 1
        seen = torch.full_like(shards, NAN)

        def arrive() -> None:
            seen.copy_(shards)
            self.flags.fill_(self.epoch)

        self.arrival = threading.Timer(0.0 if self.too_late else 0.05, arrive)
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
    """One rank begins its step when the other has ended it: a step that waits for its peer would
    never end.
    """
    calls = iter(range(100))

    def turn(*operands: Any, out: torch.Tensor) -> None:
        is_late = next(calls) % 2 == dist.get_rank()
        if is_late:
            dist.barrier()
        run(*operands, out=out)
        if not is_late:
            dist.barrier()

    return turn


def a_flag_before_its_tile(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 1 stores each tile that it pushes when it pushes the next one: behind its flag."""
    from kernels.sum_parts import store_to

    late: list[Any] = []

    def store_the_last_one(*args: Any) -> None:
        if late:
            store_to(*late.pop())
        late.append(args)

    if rank == 1:
        patch.setattr("kernels.push_gemm.store_to", store_the_last_one)


def a_rank_left_out(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 0 sums its own partial result twice, and that of rank 1 never."""
    from kernels.partials import Tables

    def tables(targets: Any, arrivals: Any, sources: torch.Tensor, *rest: Any) -> Any:
        return Tables(targets, arrivals, sources[[0, 0]] if rank == 0 else sources, *rest)

    patch.setattr("kernels.partials.Tables", tables)


def weights_left_out(patch: pytest.MonkeyPatch, rank: int) -> None:
    from kernels.moe_combine import Partials

    patch.setattr(
        "kernels.moe_reduce_rs.Partials",
        lambda c, weights, *rest: Partials(c, torch.full_like(weights, 0.5), *rest),
    )


def no_wait_for_sums(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr("kernels.moe_combine.wait_until", no_wait)


def no_wait_for_shards(patch: pytest.MonkeyPatch, rank: int) -> None:
    late = LateGather(too_late=True)
    patch.setattr("kernels.grouped_gemm.wait_until", no_wait)
    patch.setattr("kernels.ag_gemm.AllGatherGemm.gather_for", lambda *_: late)


def shards_that_come_late(patch: pytest.MonkeyPatch, rank: int) -> None:
    late = LateGather(too_late=False)
    patch.setattr("kernels.ag_gemm.AllGatherGemm.gather_for", lambda *_: late)


RS, AR, UP, DOWN = (
    "gemm_rs 16,8,16 bf16 0",
    "gemm_allreduce 16,8,16 bf16 4",
    "ag_moe 6,12,10,3,2 fp16 0",
    "moe_reduce_rs 6,12,10,3,2 fp16 0",
)
AMISS: dict[Any, tuple[str, bool]] = {
    a_flag_before_its_tile: (RS, False),
    a_rank_left_out: (AR, False),
    weights_left_out: (DOWN, False),
    no_wait_for_sums: (DOWN, False),
    no_wait_for_shards: (UP, False),
    shards_that_come_late: (UP, True),
}


@on_each_rank(cases=[*AMISS])
def test_what_is_amiss_is_told_from_rounding(rank: int, amiss: Any):
    """Far above rounding on all ranks; where shards come while the product waits for them, nothing
    is amiss.
    """
    row, is_right = AMISS[amiss]
    _, ((_, n_roundings, run),), error = way_of(rank, row)
    with pytest.MonkeyPatch.context() as patch:
        if amiss is no_wait_for_sums:
            error(run, 1)  # makes the memory: where one rank runs alone, nothing may be collective
            run = taking_turns(run)
        amiss(patch, rank)
        found = error(run, 2)  # enough for what is wrong on one rank or the other
    assert (found <= n_roundings) == is_right
    assert is_right or found > 10 * n_roundings
    dist.barrier()


# -- steps that follow others ----------------------------------------------------------------------


@on_each_rank(
    cases=[
        2**31 // (16 * 20) - 2,
        further(2**32 // (16 * 20) - 2),
        further(2**31 - 3),
        further(2**32 - 3),
    ]
)
def test_steps_are_right_where_flags_wrap_around(rank: int, n_before: int):
    """Flags of 16 rows and of 3 rows pass 2^31 elements at different steps; a tile has rows of
    flags that count nothing.
    """
    from kernels.partials import Plan
    from kernels.symmetric import SymmetricMemory, as_int32, next_step

    bf16 = torch.bfloat16
    plan = Plan(m=38, n=20, n_parts=2, dtype=bf16, partial_dtype=bf16, gathers=False)

    class Used(SymmetricMemory):
        """As `n_before` steps leave it."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for flag, elements in enumerate(plan.flag_elements(rank)):
                self.own["arrivals"][:, flag] = as_int32(n_before * elements)
            self.own["credits"][1 - rank] = as_int32(n_before)
            dist.barrier()

    _, ((_, n_roundings, run),), error = way_of(rank, "gemm_rs 38,20,40 bf16 0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.partials.SymmetricMemory", Used)
        patch.setattr("kernels.partials.next_step", lambda n_done: next_step(n_before + n_done))
        assert error(run, 5) <= n_roundings
    dist.barrier()


@on_each_rank()
def test_a_step_without_a_tuner_is_refused_and_does_not_count(rank: int):
    """`triton.autotune` alone would repeat the kernel; the rank that was refused is not a step
    behind or ahead of its peer afterwards.
    """
    from kernels import push_gemm

    step, _, error = way_of(rank, "gemm_rs 4,8,16 bf16")
    context: Any = step.context()
    config = push_gemm.interpreter_configs()[0]
    a, b = step.operands((4, 8, 16), torch.bfloat16, CPU, None)
    context(a, b, config=config)  # makes the memory, on both ranks
    if rank == 1:
        with pytest.raises(
            RuntimeError,
            match=r"push_gemm_kernel counts what it sends .* cannot be timed by repeating it",
        ):
            context(a, b)
    assert error(lambda a, b, out: context(a, b, out, config=config)) <= 2
    dist.barrier()


@on_each_rank()
def test_a_sum_that_cannot_be_launched_counts_its_step(rank: int):
    """What the peers wait for is queued by then: the next step is another one, or they would take
    old flags for its own.
    """
    step, ((_, n_roundings, run),), error = way_of(rank, DOWN)
    operands = step.operands((6, 12, 10, 3, 2), torch.float16, CPU, OPTIONS)
    out = torch.empty_like(step.expected(operands)).half()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("kernels.moe_reduce_rs.reduce", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(*operands, out=out)
        else:
            run(*operands, out=out)
    assert error(run) <= n_roundings
    dist.barrier()


@on_each_rank(cases=["ag_gemm", *map(further, ("gemm_rs", "ag_moe", "moe_reduce_rs"))])
def test_a_step_runs_with_the_product_that_was_tuned_alone(rank: int, name: str):
    """Right, with all else as it was tuned in the step: nothing is tuned again, and the product's
    config is not its kernel's choice.
    """
    from kernels import grouped_gemm, harness, push_gemm, shard_gemm

    step, _, _ = way_of(rank, f"{name} 4 fp16")
    kernel = {"ag_gemm": shard_gemm.ag_gemm_kernel, "gemm_rs": push_gemm.push_gemm_kernel}.get(
        name, grouped_gemm.grouped_gemm_kernel
    )
    operands = step.operands(step.shapes("tune", 2, CPU)[0], torch.float16, CPU, OPTIONS)
    run, records = step.tuned(step.tuners[0])
    run(*operands)
    in_the_step, n_tuned, product = dict(kernel.cache), len(records), step.fastest_product(operands)
    assert in_the_step
    assert kernel.cache == in_the_step
    assert product in kernel.configs
    kernel.cache.clear()
    run, more = step.tuned(step.tuners[0], product)
    assert (
        harness.worst_over_ranks(run(*operands), step.expected(operands))
        <= step.n_roundings * torch.finfo(torch.float16).eps
    )
    assert (len(more) - n_tuned * (more is records), len(kernel.cache)) == (0, 0)
    dist.barrier()


# -- one GPU's operands ----------------------------------------------------------------------------


@alone
def test_softmax_of_rows_without_a_finite_element_is_that_of_torch(rank: int):
    """Blocks of -inf before the first number, rows of -inf, infinities, and no columns at all."""
    from kernels.guides import softmax, softmax_kernel

    x = torch.randn(4, 90)
    x[0, :70], x[1], x[2, 3], x[3, 40:] = -INF, -INF, INF, -INF
    for config in (*softmax_kernel.configs, None):
        assert torch.allclose(softmax(x, config), torch.softmax(x, 1), equal_nan=True)
    assert (softmax(torch.ones(3, 0)).shape, softmax(torch.ones(0, 3)).shape) == ((3, 0), (0, 3))


@alone
def test_shapes_of_a_bucket_share_a_result(rank: int):
    """The second shape tunes nothing and is right; one beyond the bucket, and another dtype, are
    tuned.
    """
    from kernels.persistent_gemm import persistent_gemm

    persistent_gemm.records.clear()
    half = torch.float16
    for m, n, k, dtype, n_records in (
        (64, 20, 20, half, 1),
        (33, 32, 17, half, 1),
        (65, 20, 20, half, 2),
        (64, 20, 20, torch.bfloat16, 3),
    ):
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
        assert torch.allclose(
            persistent_gemm(a, b).float(), a.float() @ b.float().T, rtol=0.01, atol=0.02
        )
        assert len(persistent_gemm.records) == n_records


@alone
def test_rows_and_scales_may_have_strides_and_an_empty_split_adds_zero(rank: int):
    """FP8 operands and the result as parts of wider ones, scales column by column; 3 blocks of K in
    5 splits, over memory full of NaN.
    """
    import kernels.gemm_a8w8_blockscale as gemm
    from kernels.harness import relative_error

    x, w, x_scale, w_scale = gemm.random_inputs(40, 136, 384, "cpu")
    expected, half = gemm.reference(x, w, x_scale, w_scale), torch.float16
    config = gemm.make_config(32, 64, warps=4, stages=2, splits=2)
    wide_x, wide_y = (
        torch.cat([x.view(torch.uint8)] * 2, 1).view(x.dtype),
        torch.full((40, 200), NAN, dtype=half),
    )
    turned = x_scale.T.contiguous().T, w_scale.T.contiguous().T
    # Partial sums that are not written keep what was in their memory.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda size, **options: torch.full(size, NAN, **options))
        one = gemm.gemm_a8w8_blockscale(wide_x[:, :384], w, *turned, half, wide_y[:, :136], config)
        whole = gemm.gemm_a8w8_blockscale(
            x, w, x_scale, w_scale, half, config={**config, "NUM_KSPLIT": 5}
        )
    assert wide_y[:, 136:].isnan().all()
    assert max(relative_error(y, expected) for y in (one, whole)) < torch.finfo(half).eps


@alone
def test_inputs_fill_their_blocks_and_the_reference_scales_block_by_block(rank: int):
    """The largest number of every block is that of the dtype; dequantised by hand, the product is
    the reference's.
    """
    import kernels.gemm_a8w8_blockscale as gemm

    x, w, x_scale, w_scale = inputs = gemm.random_inputs(16, 256, 256, "cpu", seed=3)
    for largest in (
        x.float().abs().unflatten(1, (2, 128)).amax(2),
        w.float().abs().reshape(2, 128, 2, 128).amax((1, 3)),
    ):
        assert (largest == 448.0).all()
    wide_x, wide_w = (
        x_scale.repeat_interleave(128, 1),
        w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1),
    )
    assert torch.allclose(
        gemm.reference(*inputs), (x.float() * wide_x) @ (w.float() * wide_w).T, rtol=1e-4, atol=1e-4
    )


def test_operands_are_padded_and_aligned_for_descriptors():
    """An odd depth, an address that is no multiple of 16 bytes, and a transposed matrix."""
    from kernels.operands import loadable

    odd, shifted, turned = (x.half() for x in (torch.ones(3, 5), torch.ones(25), torch.ones(8, 8)))
    found = [loadable(each) for each in (odd, shifted[1:].view(3, 8), turned.T)]
    assert [(tuple(x.shape), x.is_contiguous(), x.data_ptr() % 16) for x in found] == [
        ((n, 8), True, 0) for n in (3, 3, 8)
    ]


def half(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@alone
def test_what_cannot_be_computed_is_refused_with_its_reason(rank: int):
    """A TypeError for FP8's dtypes; a ValueError for shapes, strides, devices and configs; both
    with what is needed and what was given.
    """
    import kernels.gemm_a8w8_blockscale as gemm
    from kernels.guides import matmul, softmax, vector_add
    from kernels.operands import check_operands, output_for
    from kernels.persistent_gemm import persistent_gemm
    from kernels.routing import Routing

    x, w, xs, ws = good = gemm.random_inputs(8, 130, 256, "cpu")
    bf16, fp8, a, b = torch.bfloat16, gemm.gemm_a8w8_blockscale, half(4, 8), half(9, 8)
    turned = x.view(torch.uint8).T.contiguous().T.view(x.dtype)
    wrong: list[Any] = [
        {"BLOCK_SIZE_K": 64},
        {"BLOCK_SIZE_N": 48},
        {"NUM_KSPLIT": 0},
        {"cache_modifier": ".ca"},
        {"BLOCK": 1},
    ]
    experts, weights = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
    of_types = [
        (x.float(), w, xs, ws),
        (x, w, xs.half(), ws),
        (*good, torch.float32),
        (*good, bf16, torch.empty(8, 130)),
    ]
    of_shapes = [
        (x[:, :128], w, xs, ws),
        (x[:0], w, xs, ws),
        (x, w, xs, ws[:1]),
        (turned, w, xs, ws),
        (x, w, xs, ws.to("meta")),
    ]
    of_results = [(*good, bf16, y) for y in (half(130, 8, dtype=bf16), half(130, 8, dtype=bf16).T)]
    of_configs = [(*good, bf16, None, {**gemm.DEFAULT_CONFIG, **each}) for each in wrong] + [
        (*good, bf16, None, {"BLOCK_SIZE_M": 64})
    ]
    refused: list[tuple[Any, tuple[Any, ...], str]] = [
        *((fp8, args, "") for args in (*of_types, *of_shapes, *of_results, *of_configs)),
        (fp8, (x, w, xs[:, :1], ws), "[[8, 1], [2, 2]]"),
        (vector_add, (half(3), half(4)), "[3] torch.float16 cpu and [4] torch.float16 cpu"),
        (softmax, (a.T,), "[8, 4] torch.float16, strides (1, 8)"),
        (output_for, (half(4), (4, 4), half(4, 5)), "[4, 5] torch.float16"),
        (matmul, (a, b.T), "strides (8, 1) and (1, 8)"),
        (
            matmul,
            (a, b),
            "[4, 8] torch.float16 cpu and [8, 9]",
        ),  # as if it were that of the product
        (matmul, (half(0, 8), half(8, 8)), "[0, 8]"),
        (persistent_gemm, (a, half(8, 4)), "[4, 8] torch.float16 cpu and [8, 4]"),
        (check_operands, (a.float(), a), "[4, 8] torch.float32 cpu and [4, 8] torch.float16 cpu"),
        (Routing, (experts.T.contiguous().T, weights), "[4, 2] of strides [1, 4]"),
        (Routing, (experts, weights[:, :1].clone()), "[4, 2] of strides [2, 1] and [4, 1]"),
        (Routing, (experts.long(), weights), "torch.int64"),
    ]
    for k, (function, args, got) in enumerate(refused):
        with pytest.raises(TypeError if k < len(of_types) else ValueError) as error:
            function(*args)
        told = str(error.value.__cause__ or error.value)  # a rule that raises is the cause
        assert "; got " in told
        assert told.partition("; got ")[2].startswith(got), told
