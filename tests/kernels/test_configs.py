"""Which configs of kernels/ are tried: search spaces, what of them fits a GPU, and the files that
configs come from.
"""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import cute_gemm, persistent_gemm, push_gemm, shard_gemm
from kernels.gemm_allreduce import config_space, prune_fn
from tests.worlds import folder, on_each_rank

FP16 = torch.float16
on_a_gpu = on_each_rank(1, modes=("fake",), is_dist=False)
LARGE = (4096, 4096, 4096)


def kinds(reasons: set[str]) -> set[str]:
    return {re.sub(r"\d+", "N", reason) for reason in reasons}


@on_a_gpu
def test_no_config_of_a_space_comes_twice(rank: int):
    from kernels.grouped_gemm import gpu_configs as grouped
    from launch.tune_a8w8_blockscale import full_space, small_space

    assert all(each in full_space() for each in small_space())
    assert (len(full_space()), len(small_space())) == (3645, 24)
    for configs in (
        shard_gemm.gpu_configs(),
        push_gemm.gpu_configs(),
        grouped(),
        full_space(),
        small_space(),
        cute_gemm.all_configs(),
    ):
        assert len({*map(str, configs)}) == len(configs)


@on_a_gpu
def test_a_search_space_drops_what_does_not_fit_and_is_that_of_the_bucket(rank: int):
    """Shared memory, registers a thread, small sizes: fewer configs, each with its reason; equal in
    a bucket.
    """
    gemm = persistent_gemm
    assert kinds(
        {gemm.reason_to_drop(config, (64, 4096, 4096), FP16) for config in gemm.all_configs()}
    ) == {
        "",
        "BLOCK_M=N is mostly padding for M=N",
        "needs N accumulators a thread, more than N",
        "needs N bytes of shared memory, there are N",
    }
    shapes = (LARGE, (65, 128, 1000), (128, 65, 513), (1, 1, 1))
    large, one, other, smallest = ([*map(str, gemm.search_space(*shape, FP16))] for shape in shapes)
    assert one == other
    assert len(large) > len(one) > len(smallest) == 4


def test_a_hopper_block_has_room_for_each_config_of_cute_gemm():
    """Shared memory, registers, the rows of a wgmma, buffers in turn, stages left over: each rule
    drops some, and all kept ones keep it.
    """
    space, everything = cute_gemm.search_space(*LARGE), cute_gemm.all_configs()
    assert kinds({cute_gemm.reason_to_drop(config, LARGE) for config in everything}) == {
        "",
        "gives a warpgroup N rows, a wgmma has N",
        "needs N sums a thread, more than N",
        "needs N bytes of shared memory, there are N",
        "has N stages where N fit",
        "stores N pieces, which N buffers do not take in turn",
    }
    assert max(map(cute_gemm.shared_bytes, space)) <= 227 * 1024
    # 1 KiB of barriers, 4 stages of a 128 x 64 and a 256 x 64 tile, 4 buffers of 64 x 64, 2 bytes
    # each.
    assert cute_gemm.shared_bytes(everything[0]) == 1024 + 4 * 384 * 64 * 2 + 4 * 64 * 64 * 2
    # That of an untuned call is kept, and every axis is left.
    assert everything[0] is space[0]
    assert all(len({config.kwargs[name] for config in space}) > 1 for name in space[0].kwargs)
    assert len({config.num_stages for config in space}) == 4


def test_small_sizes_drop_tiles_and_clusters_that_would_be_padding():
    """One row keeps the smallest tile, and no cluster along M; each drop is named."""
    assert {
        (each.kwargs["TILE_M"], each.kwargs["CLUSTER_M"])
        for each in cute_gemm.search_space(1, 4096, 4096)
    } == {(64, 1)}
    reasons = {
        cute_gemm.reason_to_drop(config, (1, 4096, 4096)) for config in cute_gemm.all_configs()
    }
    assert {
        "TILE_M=128 is mostly padding for M=1",
        "CLUSTER_M=2 has one tile for two blocks at M=1",
    } <= reasons


@pytest.mark.parametrize(
    ("one", "other"), [((33, 100, 4096), (64, 128, 2049)), (LARGE, (2049, 3000, 2100))]
)
def test_sizes_of_a_bucket_have_the_same_space(
    one: tuple[int, int, int], other: tuple[int, int, int]
):
    """Otherwise the winner may be a config that the next size would have dropped."""
    assert (
        cute_gemm.search_space(*one)
        == cute_gemm.search_space(*other)
        != cute_gemm.search_space(1, 1, 1)
    )


# -- programs that are on a multiprocessor together ------------------------------------------------

FITS: list[tuple[tuple[int, int, int], dict[str, int], bool]] = [
    ((128, 128, 64), {"warps": 4, "stages": 3, "per_sm": 2}, True),
    (
        (128, 128, 64),
        {"warps": 8, "stages": 3, "per_sm": 2},
        False,
    ),  # 2 x 256 threads x 255 registers
    ((128, 128, 64), {"warps": 4, "stages": 4, "per_sm": 2}, False),  # 2 x 128 KiB
    (
        (64, 128, 64),
        {"warps": 4, "stages": 3, "per_sm": 3},
        False,
    ),  # 3 x 128 threads x 255 registers
    (
        (64, 64, 32),
        {"warps": 2, "stages": 7, "per_sm": 4},
        False,
    ),  # 4 x 56 KiB fit, the 7 barriers of 8 bytes beside them do not
    (
        (128, 256, 32),
        {"warps": 2, "stages": 2, "per_sm": 4},
        False,
    ),  # 4 x 64 KiB for a tile of float32 on its way out
    ((128, 256, 64), {"warps": 8, "stages": 4, "per_sm": 1}, True),
    ((128, 256, 64), {"warps": 8, "stages": 5, "per_sm": 1}, False),
]


@on_a_gpu
def test_programs_of_a_config_fit_a_multiprocessor_together(rank: int):
    """By the registers that a compiler may take at most, and by the shared memory of the stages; a
    tuner's own configs do.
    """
    first = push_gemm.make_config(128, 256, 64, warps=8, stages=3)
    for block, options, is_kept in FITS:
        one: Any = push_gemm.make_config(*block, **options)  # type: ignore[arg-type]
        assert (one in push_gemm.drop_hopeless([first, one], {"part_rows": 2048})) == is_kept, (
            block,
            options,
        )
    configs = push_gemm.gpu_configs()
    assert push_gemm.drop_hopeless(configs, {"part_rows": 2048}) == configs
    # Tiles of mostly padding.
    assert 0 < len(push_gemm.drop_hopeless(configs, {"part_rows": 16})) < len(configs)


@on_a_gpu
def test_a_launch_whose_programs_do_not_fit_together_is_refused(rank: int):
    """A program without room would start when another one ends, which may wait for its tiles:
    before the launch, with the numbers.
    """
    for stages, per_sm, told in (
        (4, 2, r"2 programs .* 131104 bytes .* 115712 .* PER_SM=1"),
        (3, 0, r"PER_SM, the programs .* on each SM, must be 1 or more, got 0"),
    ):
        config: Any = push_gemm.make_config(128, 128, 64, warps=4, stages=stages, per_sm=per_sm)
        with pytest.raises(ValueError, match=told):
            config.pre_hook({"a": SimpleNamespace(), "b": SimpleNamespace(), **config.all_kwargs()})


@on_a_gpu
def test_programs_of_a_multiprocessor_start_a_tile_apart(rank: int):
    """So that they send in turn: the first of each SM at once, the second when the tensor cores
    have had time for a tile of the first.
    """
    start = push_gemm.start_cycles.fn
    of_two = [start(program, 264, 128 * 128, 5504, 2) for program in range(264)]
    assert of_two == [0] * 132 + [2 * 128 * 128 * 5504 // 4096] * 132
    assert {start(program, 132, 128 * 128, 5504, 1) for program in range(132)} == {0}
    assert all(
        each.kwargs["PER_SM"] > 1 for each in push_gemm.gpu_configs() if each.kwargs["STAGGER"]
    )  # alone it would only be late


@on_a_gpu
def test_tiles_of_a_part_are_a_permutation(rank: int):
    """Each tile of an odd part once, columns of four tiles together."""
    tiles = [shard_gemm.tile_block.fn(tile, 7, 5, 4) for tile in range(35)]
    assert sorted(tiles) == [(row, col) for row in range(7) for col in range(5)]
    assert tiles[:5] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]


def test_a_tuner_tries_one_shot_for_few_rows_and_two_shot_for_several():
    """Both algorithms between, as their bytes and latencies are close there."""
    tried = [
        {config["algorithm"] for config in config_space() if prune_fn(config, torch.empty(m, 1))}
        for m in (1, 16, 2048)
    ]
    assert tried == [{"one_shot"}, {"one_shot", "two_shot"}, {"two_shot"}]


@on_each_rank(1, is_dist=False)
def test_a_config_comes_from_the_first_file_there_is(rank: int):
    """None: the default.

    Then the device's, until there is one for N and K; read once, and again after `cache_clear`.
    """
    import kernels.gemm_a8w8_blockscale as gemm

    files = folder() / "configs"

    def size(*args: int) -> int:
        return int(gemm.get_config(*args)["BLOCK_SIZE_M"])

    def write(name: str, block_m: int) -> None:
        config = {**gemm.DEFAULT_CONFIG, "BLOCK_SIZE_M": block_m}
        (files / name).write_text(
            json.dumps(
                {"small_M": config, "medium_M": config, "large_M": {**config, "BLOCK_SIZE_M": 16}}
            )
        )

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
        # N and K's, the device's, another class.
        assert [size(65, 256, 512), size(64, 256, 256), size(5000, 256, 512)] == [64, 32, 16]
    assert size(65, 256, 512) == 128
