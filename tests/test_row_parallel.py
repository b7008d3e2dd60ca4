"""kernels/gemm_rs.py and gemm_allreduce.py: gloo ranks that store into each other's memory, and code for a GPU that is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dist_tune.testing import on_ranks, values
from tests.cases import further
from tests.programs import run_python
from tests.row_parallel_ranks import errors, errors_after, failed_then_right, refused_then_right

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("step", "shape", "ways"),
    [
        # M / W is no multiple of the rows of a flag or a tile, N none of 8, and K / W none of a block.
        pytest.param("gemm_rs", (38, 20, 40), [(0, False), (2, True), (3, False)]),
        # M is no multiple of the ranks, so that their parts differ.
        pytest.param("gemm_allreduce", (11, 12, 24), [(0, False), (2, True)], marks=pytest.mark.once),
    ],
)
def test_results_are_right_where_no_block_divides_the_shape(step: str, shape: tuple[int, ...], ways: list[tuple[int, bool]]):
    """Each with an exchange, and partial results in float32 or not: five fresh inputs, outputs full of NaN."""
    for found in values(on_ranks(2, errors, step, ways, shape)):
        assert all(error < (1 if is_fp32 else 2) * 2**-7 for error, (_, is_fp32) in zip(found, ways, strict=True))


@pytest.mark.once
@pytest.mark.parametrize(
    ("step", "sabotage", "exchange"),
    [
        ("gemm_rs", "flag before tile", 0),
        *(further("gemm_rs", "skipped rank", exchange) for exchange in (0, 2, 3, 4)),
        *(further("gemm_allreduce", sabotage, exchange) for sabotage in ("flag before tile", "skipped rank") for exchange in (0, 2)),
    ],
)
def test_a_wrong_exchange_is_found(step: str, sabotage: str, exchange: int):
    """A flag that is raised before its tile is stored, and a sum without one rank: the error is far above rounding on all ranks."""
    for (error,) in values(on_ranks(2, errors, step, [(exchange, False)], (16, 8, 16), sabotage)):
        assert error > 0.1


@pytest.mark.once
@pytest.mark.slow
def test_a_sum_that_cannot_be_launched_leaves_flags_that_the_next_step_understands():
    """A candidate whose sum does not compile fails on all ranks; the next one must not wait for the sums that were never made."""
    for message, error in values(on_ranks(2, failed_then_right, timeout_s=30)):
        assert message == "does not compile"
        assert error < 2 * 2**-7


@pytest.mark.once
def test_a_tuner_tries_one_shot_for_few_rows_and_two_shot_for_several():
    """Both algorithms between, as their bytes and latencies are close there."""
    import torch

    from kernels.gemm_allreduce import config_space, prune_fn

    def tried(m: int) -> set[str]:
        return {config["algorithm"] for config in config_space() if prune_fn(config, torch.empty(m, 1))}

    assert [tried(m) for m in (1, 16, 2048)] == [{"one_shot"}, {"one_shot", "two_shot"}, {"two_shot"}]


@pytest.mark.once
@pytest.mark.parametrize(
    ("n_before", "exchange"),
    [
        (2**31 // (16 * 20) - 2, 0),
        pytest.param(2**31 // (16 * 20) - 2, 2, marks=pytest.mark.slow),
        pytest.param(2**31 // (16 * 20) - 2, 3, marks=pytest.mark.slow),
        pytest.param(2**31 // (16 * 20) - 2, 4, marks=pytest.mark.slow),
        pytest.param(2**32 // (16 * 20) - 2, 0, marks=pytest.mark.slow),
        pytest.param(2**31 - 3, 0, marks=pytest.mark.slow),
        pytest.param(2**32 - 3, 0, marks=pytest.mark.slow),
    ],
)
def test_steps_are_right_where_flags_wrap_around(n_before: int, exchange: int):
    """Flags of 16 rows and of 3 rows pass 2^31 elements at different steps; a tile has rows of flags that count nothing."""
    assert max(values(on_ranks(2, errors_after, n_before, exchange, timeout_s=30))) < 2 * 2**-7


@pytest.mark.once
@pytest.mark.slow
def test_a_step_without_a_tuner_is_refused_and_does_not_count():
    """`triton.autotune` alone would repeat the kernel; the rank that was refused is not a step behind or ahead of its peer afterwards."""
    outcomes = values(on_ranks(2, refused_then_right, timeout_s=30))
    assert [message.partition(",")[0] for message, _ in outcomes] == ["", "push_gemm_kernel counts what it sends in its peers' flags"]
    assert max(error for _, error in outcomes) < 2 * 2**-7


@pytest.mark.once
def test_a_rank_computes_its_peers_parts_first_and_its_own_last():
    """The order is a permutation on each rank, and no two ranks compute the same part at the same time."""
    from kernels.push_gemm import part_order

    assert part_order(1, 4) == [2, 3, 0, 1]
    orders = [part_order(rank, 8) for rank in range(8)]
    assert all(sorted(order) == list(range(8)) and order[-1] == rank for rank, order in enumerate(orders))
    assert all(len(set(parts)) == 8 for parts in zip(*orders, strict=True))
    assert part_order(5, 1) == [0]


@pytest.mark.once
def test_tiles_of_a_part_are_a_permutation():
    """`tile_block` names each tile of an odd part once, columns of four tiles together."""
    from kernels.shard_gemm import tile_block

    tiles = [tile_block.fn(tile, 7, 5, 4) for tile in range(35)]
    assert sorted(tiles) == [(row, col) for row in range(7) for col in range(5)]
    assert tiles[:5] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]


@pytest.mark.once
def test_the_flags_of_a_part_count_all_its_elements():
    """Whatever the rows, also where the last ranks have few rows or none; each fits into the flags of its line."""
    import torch

    from kernels.partials import Plan

    plan = Plan(m=37, n=5, n_parts=4, dtype=torch.bfloat16, partial_dtype=torch.bfloat16, gathers=False)
    assert [plan.rows_of(part) for part in range(4)] == [10, 10, 10, 7]
    assert [sum(plan.flag_elements(part)) for part in range(4)] == [50, 50, 50, 35]
    assert Plan(m=5, n=5, n_parts=4, dtype=torch.bfloat16, partial_dtype=torch.bfloat16, gathers=False).rows_of(3) == 0
    assert all(len(plan.flag_elements(part)) <= plan.n_flags for part in range(4))


@pytest.mark.once
def test_exchanges_that_cannot_work_are_refused():
    """With the values, and what to choose instead."""
    from kernels.partials import Exchange

    with pytest.raises(ValueError, match="needs multiprocessors, got sms=0"):
        Exchange("push", "beside")
    with pytest.raises(ValueError, match="power of two"):
        Exchange(chunk_rows=100)


def test_the_kernels_compile_for_hopper(tmp_path: Path):
    """Real sm_90 code: release and acquire at system scope, a barrier before each release, vector stores, vector loads that pass by L1."""
    script = tmp_path / "compiled.py"
    script.write_text(
        "import re, torch, triton.language as tl\n"
        "from dist_tune import testing\n"
        "testing.install_fake_driver()\n"
        "from triton.tools.tensor_descriptor import TensorDescriptor\n"
        "from kernels.push_gemm import drop_hopeless, gpu_configs, make_config, most_shared_bytes, push_gemm_kernel, set_block_shapes\n"
        "from kernels.sum_parts import sum_kernel\n"
        "a, table, flags = torch.ones(256, 256).bfloat16(), torch.zeros(2).long(), torch.zeros(2, 32).int()\n"
        "kept = drop_hopeless(gpu_configs(), {'part_rows': 2048})\n"
        "print(len(gpu_configs()), len(set(map(str, gpu_configs()))), len(kept), len(drop_hopeless(gpu_configs(), {'part_rows': 16})))\n"
        "config = make_config(128, 128, 64, warps=4, stages=3, split=True, per_sm=2, stagger=True)\n"
        "inputs = [TensorDescriptor(a, [256, 256], [256, 1], [1, 1]) for _ in range(2)]\n"
        "args = (*inputs, a, table, table, table, flags, table, flags, None, None, 256, 256, 256, 128, 32, 1, 5, 0)\n"
        "set_block_shapes({**dict(zip(push_gemm_kernel.arg_names, args)), **config.all_kwargs()})\n"
        "fixed = dict(WORLD=2, ELEMENT=tl.bfloat16, FLAG_ROWS=64)\n"
        "push = dict(PARTS=2, INSIDE=True, SPREAD=0, INTERPRETED=False)\n"
        "product = push_gemm_kernel.fn.warmup(*args, grid=(1,), **fixed, **push, **config.all_kwargs())\n"
        "args = (a, table, flags, table, table, 128, 256, 128, 32, 1, 5)\n"
        "sums = dict(PARTS=1, SOURCES=2, CHUNK_ROWS=128, ROWS=8, COLUMNS=512, num_warps=8)\n"
        "total = sum_kernel.warmup(*args, grid=(1,), **fixed, **sums)\n"
        "print(product.metadata.shared <= most_shared_bytes(2), 'nanosleep' in product.asm['ptx'])\n"
        "for kernel in (product, total):\n"
        "    ptx = kernel.asm['ptx']\n"
        "    releases = [at.start() for at in re.finditer(r'global.sys.release.add', ptx)]\n"
        "    print(len(releases) > 0, all('bar.sync' in ptx[max(at - 600, 0) : at] for at in releases), 'sys.acquire' in ptx,\n"
        "          'st.global.v4' in ptx, bool(re.search('ld.global.cg[a-zA-Z0-9:.]*.v4', ptx)), 'wgmma.mma_async' in ptx)\n"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = f"import os; os.environ['TRITON_CACHE_DIR'] = 'cache'; exec(open({str(script)!r}).read())"
    done = run_python("-c", command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr
    counts, pair, product, total = done.stdout.splitlines()
    n_configs, n_distinct, n_kept, n_flat = map(int, counts.split())
    assert n_configs == n_distinct
    assert n_kept == n_configs  # none needs more shared memory than there is
    assert 0 < n_flat < n_configs
    assert pair == "True True"  # two of them fit an SM, with what the compiler adds to the stages; the second one starts later
    assert product == "True True True True True True"
    assert total == "True True True True True False"
