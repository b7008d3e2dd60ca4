"""kernels/gemm_a8w8_blockscale.py under the Triton interpreter, and its code for a GPU that is not there."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dist_tune.testing import choose_interpreter, fork_context, on_ranks, values
from tests.cases import further

pytestmark = pytest.mark.processes

SHAPES = [(64, 128, 256), (70, 200, 500), (33, 136, 640), (1, 5, 7)]
"""Whole blocks; edges that no block divides; five blocks of K, for splits of two and three; less than one of anything."""
Interpreted = Callable[..., Any]
"""Calls a function of this module with kernels/gemm_a8w8_blockscale.py, in a process where Triton interprets."""


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreted]:
    with ProcessPoolExecutor(1, fork_context(), initializer=choose_interpreter, initargs=(True,)) as pool:
        yield lambda function, *args: pool.submit(with_gemm, function, *args).result()


def with_gemm(function: Callable[..., Any], *args: Any) -> Any:
    return function(importlib.import_module("kernels.gemm_a8w8_blockscale"), *args)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    error: float = importlib.import_module("kernels.harness").relative_error(y, expected)
    return error


def errors(gemm: Any, dtype: torch.dtype) -> list[tuple[Any, float, float]]:
    """(shape and config, relative error, its limit), for each way through the kernels."""
    tiles = [(64, 64, 1, 1, ""), (32, 128, 8, 3, ".cg"), (64, 256, 2, 1, "TMA"), (32, 256, 16, 2, ".cg"), (32, 32, 2, 6, "TMA")]
    found = []
    for shape in SHAPES:
        inputs = gemm.random_inputs(*shape, "cpu")
        expected = gemm.reference(*inputs)
        for m, n, group, splits, cache in tiles:
            how = {"tma": True} if cache == "TMA" else {"cache": cache}
            config = gemm.make_config(m, n, warps=4, stages=2, group=group, splits=splits, **how)
            out = torch.full(shape[:2], float("nan"), dtype=dtype)
            assert gemm.gemm_a8w8_blockscale(*inputs, dtype=dtype, y=out, config=config) is out
            found.append(((shape, m, n, splits), relative_error(out, expected), gemm.LIMITS[dtype]))
    return found


@pytest.mark.once
@pytest.mark.parametrize("dtype", [torch.bfloat16, further(torch.float16)])
def test_results_are_within_the_stated_limit(interpreted: Interpreted, dtype: torch.dtype) -> None:
    """Tiles within a block of w, as wide, and twice as wide; K split unevenly, and into more parts than it has blocks."""
    found = interpreted(errors, dtype)
    assert len(found) == 20
    assert {limit for _, _, limit in found} == {torch.finfo(dtype).eps}
    assert [each for each in found if not each[1] <= each[2]] == []


def strided(gemm: Any) -> list[float]:
    x, w, x_scale, w_scale = gemm.random_inputs(40, 136, 384, "cpu")
    expected = gemm.reference(x, w, x_scale, w_scale)
    config = gemm.make_config(32, 64, warps=4, stages=2, splits=2)
    wide_x, wide_y = torch.cat([x.view(torch.uint8)] * 2, 1).view(x.dtype), torch.full((40, 200), float("nan"), dtype=torch.float16)
    turned = x_scale.T.contiguous().T, w_scale.T.contiguous().T
    # Partial sums that are not written keep what was in their memory.
    with patch.object(torch, "empty", lambda size, **options: torch.full(size, float("nan"), **options)):
        one = gemm.gemm_a8w8_blockscale(wide_x[:, :384], w, *turned, torch.float16, wide_y[:, :136], config)
        whole = gemm.gemm_a8w8_blockscale(x, w, x_scale, w_scale, torch.float16, config={**config, "NUM_KSPLIT": 5})
    assert wide_y[:, 136:].isnan().all()
    return [relative_error(y, expected) for y in (one, whole)]


@pytest.mark.once
def test_rows_and_scales_may_have_strides_and_an_empty_split_adds_zero(interpreted: Interpreted) -> None:
    """Operands and result as parts of wider ones, scales column by column; 3 blocks of K in 5 splits, over memory full of NaN."""
    assert max(interpreted(strided)) < torch.finfo(torch.float16).eps


def scales(gemm: Any) -> tuple[list[Any], float]:
    x, w, x_scale, w_scale = inputs = gemm.random_inputs(16, 256, 256, "cpu", seed=3)
    is_same = all(torch.equal(a.float(), b.float()) for a, b in zip(gemm.random_inputs(16, 256, 256, "cpu", 3), inputs, strict=True))
    largest = x.float().abs().unflatten(1, (2, 128)).amax(2), w.float().abs().reshape(2, 128, 2, 128).amax((1, 3))
    by_hand = torch.zeros(16, 256)
    for n, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
        product = x[:, 128 * k :][:, :128].float() @ w[128 * n :, 128 * k :][:128, :128].float().T
        by_hand[:, 128 * n :][:, :128] += product * x_scale[:, k : k + 1] * w_scale[n, k]
    facts = [is_same, *({*each.flatten().tolist()} for each in largest), gemm.reference(*inputs, torch.float16).dtype]
    return facts, relative_error(gemm.reference(*inputs), by_hand)


@pytest.mark.once
def test_inputs_fill_their_blocks_and_the_reference_scales_block_by_block(interpreted: Interpreted) -> None:
    """The largest number of every block is that of the dtype; dequantised by hand, the product is the reference's."""
    facts, error = interpreted(scales)
    assert facts == [True, {448.0}, {448.0}, torch.float16]
    assert error < 1e-6


def refused(gemm: Any) -> list[str]:
    x, w, xs, ws = good = gemm.random_inputs(8, 130, 256, "cpu")
    operands = [(x.float(), w, xs, ws), (x, w, xs.half(), ws), (*good, torch.float32), (x[:, :128], w, xs, ws), (x[:0], w, xs, ws)]
    operands += [(x, w, xs[:, :1], ws), (x, w, xs, ws[:1]), (x, w, xs, ws.to("meta"))]
    operands += [(x.view(torch.uint8).T.contiguous().T.view(x.dtype), w, xs, ws)]
    results = [torch.empty(8, 130), *(torch.empty(130, 8, dtype=torch.bfloat16) for _ in range(2))]
    results[2] = results[2].T
    wrong: list[Any] = [{"BLOCK_SIZE_K": 64}, {"BLOCK_SIZE_N": 48}, {"NUM_KSPLIT": 0}, {"cache_modifier": ".ca"}, {"BLOCK": 1}]
    options = [{"config": {**gemm.DEFAULT_CONFIG, **each}} for each in wrong] + [{"config": {"BLOCK_SIZE_M": 64}}]
    calls: list[tuple[Any, Any]] = [(each, {}) for each in operands] + [(good, each) for each in [*({"y": y} for y in results), *options]]
    found = []
    for args, named in calls:
        try:
            found.append(f"no error: {gemm.gemm_a8w8_blockscale(*args, **named)}")
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.once
def test_what_cannot_be_multiplied_is_refused_with_its_reason(interpreted: Interpreted) -> None:
    """A TypeError for dtypes; a ValueError for shapes, strides, devices and configs; both with what is needed and what was given."""
    found = interpreted(refused)
    assert [each.split(":")[0] for each in found] == ["TypeError"] * 3 + ["ValueError"] * 6 + ["TypeError"] + ["ValueError"] * 8
    assert all(": need " in each and "; got " in each for each in found)
    assert "need x_scale as [8, 2] and w_scale as [2, 2]; got [[8, 1], [2, 2]]" in found[5]


def looked_up(gemm: Any, folder: str) -> list[int]:
    def sizes(*args: int) -> int:
        return int(gemm.get_config(*args)["BLOCK_SIZE_M"])

    def write(name: str, block_m: int) -> None:
        config = {**gemm.DEFAULT_CONFIG, "BLOCK_SIZE_M": block_m}
        (Path(folder) / name).write_text(json.dumps({"small_M": config, "medium_M": config, "large_M": {**config, "BLOCK_SIZE_M": 16}}))

    with patch.dict(os.environ, DIST_TUNE_CONFIG_DIR=folder):
        found = [sizes(64, 256, 512)]  # no such folder yet
        gemm.get_config(64, 256, 512)["BLOCK_SIZE_M"] = 0  # the caller's own
        Path(folder).mkdir()
        write("cpu-GEMM-A8W8_BLOCKSCALE.json", 32)
        found.append(sizes(64, 256, 512))  # remembered
        gemm.get_config.cache_clear()
        found.append(sizes(64, 256, 512))
        write(gemm.config_file_name(256, 512), 64)
        found += [sizes(65, 256, 512), sizes(64, 256, 256), sizes(5000, 256, 512)]  # that of N and K, that of the device, another class
    return [*found, sizes(65, 256, 512)]


@pytest.mark.once
def test_a_config_comes_from_the_first_file_there_is(interpreted: Interpreted, tmp_path: Path) -> None:
    """None: the default. Then the device's, until there is one for N and K; read once, and again after `cache_clear`."""
    assert interpreted(looked_up, str(tmp_path / "configs")) == [128, 128, 32, 64, 32, 16, 128]


def compiled(rank: int) -> tuple[list[int], list[str], list[str]]:
    import kernels.gemm_a8w8_blockscale as gemm
    from dist_tune.testing import FakeH200

    n_kept = [len({json.dumps(each) for each in space}) for space in (gemm.full_space(), gemm.small_space())]
    assert all(each in gemm.full_space() for each in (*gemm.small_space(), gemm.DEFAULT_CONFIG))
    split = gemm.make_config(64, 128, warps=4, stages=3, splits=2, cache=".cg")
    for shape in ((256, 256, 512), (512, 1024, 1024), (7, 1024, 2048), (64, 256, 496)):
        for config in (gemm.DEFAULT_CONFIG, split, {**split, "NUM_KSPLIT": 4}):
            gemm.gemm_a8w8_blockscale(*gemm.random_inputs(*shape, "cpu"), config=config)
    for depth in (1024, 512, 488):
        gemm.gemm_a8w8_blockscale(
            *gemm.random_inputs(256, 256, depth, "cpu"), config=gemm.make_config(64, 128, warps=4, stages=3, tma=True)
        )
    ptx = Path(os.environ["TRITON_CACHE_DIR"]).rglob("*blockscale_kernel.ptx")
    return n_kept, FakeH200.launches, [path.read_text() for path in ptx]


def test_the_kernel_compiles_for_hopper_once_for_many_shapes() -> None:
    """Real sm_90 code, fp8 matrix units and asynchronous copies: one for three shapes and both splits, another for a ragged K."""
    n_kept, launches, ptx = values(on_ranks(1, compiled, mode="fake", is_dist=False, env={"TRITON_DEFAULT_FP_FUSION": "1"}))[0]
    assert n_kept == [3645, 24]
    assert [launches.count(name) for name in ("gemm_a8w8_blockscale_kernel", "sum_partials_kernel")] == [15, 8]
    # With the last depth TMA would have to begin rows anywhere, and a config that asks for it is one without.
    assert len(ptx) == 6
    assert sum("cp.async.bulk.tensor" in code for code in ptx) == 1
    assert sum("cp.async.cg" in code for code in ptx) == 4
    assert all("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in code for code in ptx)
