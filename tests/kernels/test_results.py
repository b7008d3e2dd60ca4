"""Results of the kernels of one GPU in kernels/, and of the routing of experts, under the Triton interpreter in one process."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.worlds import folder, further, on_each_rank

FP16, BF16, CPU = torch.float16, torch.bfloat16, torch.device("cpu")
alone = on_each_rank(1, is_dist=False)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    from kernels import harness

    return harness.relative_error(y, expected)


@on_each_rank(1, is_dist=False, cases=[(64, 128, 256), further((70, 200, 500)), further((33, 136, 640)), (1, 5, 7)])
def test_fp8_products_are_within_one_rounding(rank: int, shape: tuple[int, int, int]):
    """Whole blocks; edges that no block divides; five blocks of K, for splits of two and three; less than one of anything.

    Tiles within a block of w, as wide, and twice as wide; K split unevenly, and into more parts than it has blocks.
    """
    import kernels.gemm_a8w8_blockscale as gemm

    inputs = gemm.random_inputs(*shape, "cpu")
    expected = gemm.reference(*inputs)
    tiles = [(64, 64, 1, 1, ""), (32, 128, 8, 3, ".cg"), (64, 256, 2, 1, "TMA"), (32, 256, 16, 2, ".cg"), (32, 32, 2, 6, "TMA")]
    for m, n, group, splits, cache in tiles:
        how: Any = {"tma": True} if cache == "TMA" else {"cache": cache}
        config = gemm.make_config(m, n, warps=4, stages=2, group=group, splits=splits, **how)
        out = torch.full(shape[:2], float("nan"), dtype=BF16)
        assert gemm.gemm_a8w8_blockscale(*inputs, y=out, config=config) is out
        assert relative_error(out, expected) <= torch.finfo(BF16).eps, config


@alone
def test_rows_and_scales_may_have_strides_and_an_empty_split_adds_zero(rank: int):
    """Operands and result as parts of wider ones, scales column by column; 3 blocks of K in 5 splits, over memory full of NaN."""
    import kernels.gemm_a8w8_blockscale as gemm

    x, w, x_scale, w_scale = gemm.random_inputs(40, 136, 384, "cpu")
    expected = gemm.reference(x, w, x_scale, w_scale)
    config = gemm.make_config(32, 64, warps=4, stages=2, splits=2)
    wide_x, wide_y = torch.cat([x.view(torch.uint8)] * 2, 1).view(x.dtype), torch.full((40, 200), float("nan"), dtype=FP16)
    turned = x_scale.T.contiguous().T, w_scale.T.contiguous().T
    # Partial sums that are not written keep what was in their memory.
    with patch.object(torch, "empty", lambda size, **options: torch.full(size, float("nan"), **options)):
        one = gemm.gemm_a8w8_blockscale(wide_x[:, :384], w, *turned, FP16, wide_y[:, :136], config)
        whole = gemm.gemm_a8w8_blockscale(x, w, x_scale, w_scale, FP16, config={**config, "NUM_KSPLIT": 5})
    assert wide_y[:, 136:].isnan().all()
    assert max(relative_error(y, expected) for y in (one, whole)) < torch.finfo(FP16).eps


@alone
def test_inputs_fill_their_blocks_and_the_reference_scales_block_by_block(rank: int):
    """The largest number of every block is that of the dtype; dequantised by hand, the product is the reference's."""
    import kernels.gemm_a8w8_blockscale as gemm

    x, w, x_scale, w_scale = inputs = gemm.random_inputs(16, 256, 256, "cpu", seed=3)
    for largest in (x.float().abs().unflatten(1, (2, 128)).amax(2), w.float().abs().reshape(2, 128, 2, 128).amax((1, 3))):
        assert (largest == 448.0).all()
    by_hand = torch.zeros(16, 256)
    for n, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
        product = x[:, 128 * k :][:, :128].float() @ w[128 * n :, 128 * k :][:128, :128].float().T
        by_hand[:, 128 * n :][:, :128] += product * x_scale[:, k : k + 1] * w_scale[n, k]
    assert relative_error(gemm.reference(*inputs), by_hand) < 1e-6


@alone
def test_softmax_of_rows_without_a_finite_element_is_that_of_torch(rank: int):
    """Blocks of -inf before the first number, rows of -inf, infinities, and no columns at all."""
    from kernels.guides import softmax, softmax_kernel

    inf, x = float("inf"), torch.randn(4, 200)
    x[0, :150], x[1], x[2, 3], x[3, 100:] = -inf, -inf, inf, -inf
    for config in (*softmax_kernel.configs, None):
        assert torch.allclose(softmax(x, config), torch.softmax(x, 1), equal_nan=True)
    assert (softmax(torch.ones(3, 0)).shape, softmax(torch.ones(0, 3)).shape) == ((3, 0), (0, 3))


@alone
def test_shapes_of_a_bucket_share_a_result(rank: int):
    """The second shape tunes nothing and is right; one beyond the bucket, and another dtype, are tuned."""
    from kernels.persistent_gemm import persistent_gemm

    shapes = ((64, 20, 20, FP16, 1), (33, 32, 17, FP16, 1), (65, 20, 20, FP16, 2), (64, 20, 20, BF16, 3))
    for m, n, k, dtype, n_records in shapes:
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
        assert relative_error(persistent_gemm(a, b), a.float() @ b.float().T) < 0.008
        assert len(persistent_gemm.records) == n_records


def test_operands_are_padded_and_aligned_for_descriptors():
    """An odd depth, an address that is no multiple of 16 bytes, and a transposed matrix."""
    from kernels.operands import loadable

    odd, shifted, turned = (x.half() for x in (torch.ones(3, 5), torch.ones(25), torch.ones(8, 8)))
    found = [loadable(each) for each in (odd, shifted[1:].view(3, 8), turned.T)]
    assert [(tuple(x.shape), x.is_contiguous(), x.data_ptr() % 16) for x in found] == [((n, 8), True, 0) for n in (3, 3, 8)]


@alone
def test_what_cannot_be_computed_is_refused_with_its_reason(rank: int):
    """A TypeError for FP8's dtypes; a ValueError for shapes, strides, devices and configs; both with what is needed and what was given."""
    import kernels.gemm_a8w8_blockscale as gemm
    from kernels.guides import matmul, softmax, vector_add
    from kernels.operands import check_operands, output_for
    from kernels.persistent_gemm import persistent_gemm

    def half(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=FP16)

    x, w, xs, ws = good = gemm.random_inputs(8, 130, 256, "cpu")
    turned = x.view(torch.uint8).T.contiguous().T.view(x.dtype)
    of_types: list[Any] = [(x.float(), w, xs, ws), (x, w, xs.half(), ws), (*good, torch.float32), (*good, BF16, torch.empty(8, 130))]
    of_values: list[Any] = [(x[:, :128], w, xs, ws), (x[:0], w, xs, ws), (x, w, xs[:, :1], ws), (x, w, xs, ws[:1]), (turned, w, xs, ws)]
    of_values += [
        (x, w, xs, ws.to("meta")),
        (*good, BF16, torch.empty(130, 8, dtype=BF16)),
        (*good, BF16, torch.empty(130, 8, dtype=BF16).T),
    ]
    wrong: list[Any] = [{"BLOCK_SIZE_K": 64}, {"BLOCK_SIZE_N": 48}, {"NUM_KSPLIT": 0}, {"cache_modifier": ".ca"}, {"BLOCK": 1}]
    of_values += [(*good, BF16, None, each) for each in ({"BLOCK_SIZE_M": 64}, *({**gemm.DEFAULT_CONFIG, **each} for each in wrong))]
    for kind, wrong_args in [*((TypeError, each) for each in of_types), *((ValueError, each) for each in of_values)]:
        with pytest.raises(kind, match=r"(?s)^need .*; got "):
            gemm.gemm_a8w8_blockscale(*wrong_args)
    with pytest.raises(ValueError, match=r"need x_scale as \[8, 2\] and w_scale as \[2, 2\]; got \[\[8, 1\], \[2, 2\]\]"):
        gemm.gemm_a8w8_blockscale(x, w, xs[:, :1], ws)
    calls: list[tuple[Any, Any, str]] = [
        (vector_add, (half(3), half(4)), "[3] torch.float16 cpu and [4] torch.float16 cpu"),
        (softmax, (half(4, 8).T,), "[8, 4] torch.float16, strides (1, 8)"),
        (output_for, (half(4), (4, 4), half(4, 5)), "[4, 5] torch.float16"),
        (matmul, (half(4, 8), half(9, 8).T), "strides (8, 1) and (1, 8)"),
        (matmul, (half(4, 8), half(9, 8)), "[4, 8] torch.float16 cpu and [8, 9] torch.float16 cpu"),
        (matmul, (half(0, 8), half(8, 8)), "[0, 8] torch.float16 cpu and [8, 8] torch.float16 cpu"),
        (persistent_gemm, (half(4, 8), half(8, 4)), "[4, 8] torch.float16 cpu and [8, 4] torch.float16 cpu"),
        (check_operands, (half(4, 8).float(), half(4, 8)), "[4, 8] torch.float32 cpu and [4, 8] torch.float16 cpu"),
    ]
    for function, args, got in calls:
        with pytest.raises(ValueError) as refused:
            function(*args)
        assert str(refused.value.__cause__ or refused.value).partition("; got ")[2] == got  # a rule that raises is the cause


@alone
def test_a_config_comes_from_the_first_file_there_is(rank: int):
    """None: the default. Then the device's, until there is one for N and K; read once, and again after `cache_clear`."""
    import kernels.gemm_a8w8_blockscale as gemm

    files = folder() / "configs"

    def size(*args: int) -> int:
        return int(gemm.get_config(*args)["BLOCK_SIZE_M"])

    def write(name: str, block_m: int) -> None:
        config = {**gemm.DEFAULT_CONFIG, "BLOCK_SIZE_M": block_m}
        (files / name).write_text(json.dumps({"small_M": config, "medium_M": config, "large_M": {**config, "BLOCK_SIZE_M": 16}}))

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DIST_TUNE_CONFIG_DIR", str(files))
        assert size(64, 256, 512) == 128  # no such folder yet
        gemm.get_config(64, 256, 512)["BLOCK_SIZE_M"] = 0  # the caller's own
        files.mkdir(parents=True)
        write("cpu-GEMM-A8W8_BLOCKSCALE.json", 32)
        assert size(64, 256, 512) == 128  # remembered
        gemm.get_config.cache_clear()  # type: ignore[attr-defined]
        assert size(64, 256, 512) == 32
        write(gemm.config_file_name(256, 512), 64)
        assert [size(65, 256, 512), size(64, 256, 256), size(5000, 256, 512)] == [64, 32, 16]  # N and K's, the device's, another class
    assert size(65, 256, 512) == 128


Parts = list[tuple[int, int]]


def sorted_by_loop(experts: list[int], parts: Parts, n_experts: int, order: str) -> tuple[list[int], list[list[tuple[int, ...]]]]:
    """Rows with their padding, and for each BLOCK_M the tiles as (expert, first place, first part, last part)."""
    from kernels.routing import BLOCKS_M

    part_of = {row: part for part, (first, end) in enumerate(parts) for row in range(first, end)}
    segments = [
        (e, [row for first, end in group for row in range(first, end) if experts[row] == e])
        for group in ([[part] for part in parts] if order == "part" else [parts])
        for e in range(n_experts)
    ]
    rows: list[int] = []
    lists: list[list[tuple[int, ...]]] = [[] for _ in BLOCKS_M]
    for expert, segment in segments:
        for tiles, block_m in zip(lists, BLOCKS_M, strict=True):
            for first in range(0, len(segment), block_m):
                of = [part_of[row] for row in segment[first : first + block_m]]
                tiles.append((expert, len(rows) + first, of[0], of[-1]))
        rows += segment + [len(experts)] * (-len(segment) % BLOCKS_M[-1])
    if order == "arrival":
        lists = [sorted(tiles, key=lambda tile: tile[3]) for tiles in lists]  # a stable sort: by expert within a part
    return rows, lists


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[int], Parts, int]:
    """Experts of rows, the parts of the rows in any order, some of them empty, and the number of experts."""
    n_experts = draw(st.integers(1, 5))
    used = draw(st.lists(st.integers(0, n_experts - 1), min_size=1, max_size=n_experts))  # often not all: some get no row
    experts = draw(st.lists(st.sampled_from(used), min_size=1, max_size=150))
    cuts = sorted(draw(st.lists(st.integers(0, len(experts)), max_size=2)))
    parts = list(zip([0, *cuts], [*cuts, len(experts)], strict=True))
    return experts, draw(st.permutations(parts)), n_experts


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(routings(), st.sampled_from(["arrival", "part"]))
@example(([1] * 140, [(70, 140), (0, 70)], 3), "arrival")
@example(([0, 1] * 70, [(70, 140), (0, 70)], 2), "arrival")
@example(([2], [(0, 1)], 3), "part")
@example(([7, 1, -1], [(0, 2), (2, 3)], 2), "arrival")
def check_sorting(routing: tuple[list[int], Parts, int], order: Any) -> None:
    from kernels.routing import BLOCKS_M, RowSorter

    experts, parts, n_experts = routing
    sorter = RowSorter(parts, n_experts, order, CPU)
    sorter.counters.fill_(7)  # as a step leaves them
    got = sorter.sort(torch.tensor(experts, dtype=torch.int32).view(-1, 1))
    rows, lists = sorted_by_loop(experts, parts, n_experts, order)
    assert got.rows[: len(rows)].tolist() == rows
    assert len(rows) <= len(got.rows)
    assert got.counters is sorter.counters
    assert got.counters.tolist() == [0] * len(parts)
    assert got.n_tiles.tolist() == [len(tiles) for tiles in lists]
    assert max(got.n_tiles.tolist()) <= sorter.most_tiles <= len(experts) // BLOCKS_M[0] + n_experts * len(parts)
    assert [[tuple(tile) for tile in of[:n].tolist()] for of, n in zip(got.tiles, got.n_tiles, strict=True)] == lists


@alone
def test_rows_are_sorted_and_padded_as_by_a_plain_loop_for_any_imbalance(rank: int):
    """Random routings, experts without rows, all rows to one expert, empty parts, experts that do not exist; all orders of tiles."""
    check_sorting()


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_most_probable_experts_are_chosen_with_weights_that_sum_up_to_one(top_k: int):
    from kernels.routing import route

    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(3))
    routing = route(logits.half(), top_k)
    for token in range(50):
        shares = logits[token].half().float().exp()
        chosen = sorted(range(5), key=lambda e: -shares[e])[:top_k]
        assert routing.experts[token].tolist() == chosen
        assert torch.allclose(routing.weights[token], shares[chosen] / shares[chosen].sum(), rtol=1e-5)


def test_skewed_logits_choose_experts_by_zipfs_law():
    """First choices at exponent 1 come close to 1 : 1/2 : 1/3 : 1/4, and at 0 to equal shares."""
    from kernels.routing import skewed_logits

    torch.manual_seed(0)
    for skew, parts in ((1.0, [1, 1 / 2, 1 / 3, 1 / 4]), (0.0, [1.0] * 4)):
        first = skewed_logits(20_000, 4, skew, CPU).argmax(dim=1)
        shares = torch.bincount(first, minlength=4) / 20_000
        assert torch.allclose(shares, torch.tensor(parts) / sum(parts), atol=0.02)


def test_a_routing_that_kernels_would_misread_is_refused():
    """Transposed experts, other shapes and 64-bit numbers, each with what was given."""
    from kernels.routing import Routing

    experts, weights = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
    Routing(experts, weights)
    with pytest.raises(ValueError, match=r"contiguous; got \[4, 2\] of strides \[1, 4\]"):
        Routing(torch.zeros(2, 4, dtype=torch.int32).T, weights)
    with pytest.raises(ValueError, match=r"contiguous; got \[4, 2\] of strides \[2, 1\] and \[4, 1\]"):
        Routing(experts, weights[:, :1].clone())
    with pytest.raises(ValueError, match=r"need int32 experts and float32 weights; got torch.int64"):
        Routing(experts.long(), weights)
