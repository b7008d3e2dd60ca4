"""Code of kernels/ for a Hopper GPU that is not there: real compilation on the fake driver, and by
CuTe DSL where it is installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from triton.runtime.jit import JITFunction

from dist_tune.testing import values
from kernels import cute_build, cute_gemm
from tests.worlds import further, on_each_rank, on_ranks

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
HALF_AN_SM = (227 * 1024 + 1024) // 2 - 1024
"""Bytes of shared memory that each of two programs on an SM may have."""


BULK, WGMMA, WIDE = "cp.async.bulk.tensor.2d.shared", "wgmma.mma_async", r"ld.global.cg[\w:.]*.v4"
SENT = ("sys.acquire", "global.sys.release.add", "st.global.v4", WIDE)
Wanted = dict[str, list[tuple[str, ...]]]
"""Kernel -> what each code that is compiled of it has."""


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def ag_gemm() -> Wanted:
    """Both loop forms; the second with columns that a descriptor cannot store."""
    from kernels.ag_gemm import AllGatherGemm
    from kernels.shard_gemm import make_config

    for flatten, n in ((False, 256), (True, 255)):
        AllGatherGemm(config=make_config(128, 128, 64, warps=4, stages=3, flatten=flatten))(
            half(128, 256), half(n, 256)
        )
    return {"ag_gemm_kernel": [("acquire", "fence.proxy.async;", BULK, WGMMA)] * 2}


def row_parallel() -> Wanted:
    """A product of two programs on an SM, which sums, and a sum that is sent to all ranks."""
    from kernels.gemm_allreduce import GemmAllReduce
    from kernels.partials import Exchange
    from kernels.push_gemm import make_config

    config = make_config(128, 128, 64, warps=4, stages=3, split=True, per_sm=2, stagger=True)
    step = GemmAllReduce(config=config)
    step(half(256, 256), half(256, 256), algorithm="two_shot", exchange=Exchange())
    step(half(256, 256), half(256, 256), algorithm="two_shot", exchange=Exchange("push", "behind"))
    product = (WGMMA, "nanosleep", *SENT[:3])
    return {
        "push_gemm_kernel": [(*product, WIDE), product],
        "sum_kernel": [SENT, ("sys.acquire", WIDE)],
    }


def moe() -> Wanted:
    """Both layers' products, and the sums that are pushed and reduced."""
    from kernels.ag_moe import AllGatherMoe
    from kernels.grouped_gemm import check_configs
    from kernels.moe_reduce_rs import MoeReduceScatter
    from kernels.routing import route

    routing, b, configs = route(torch.zeros(256, 8), 2), half(8, 512, 512), check_configs()
    AllGatherMoe(config=configs[0])(half(128, 512), b, routing)
    MoeReduceScatter(config=configs[1])(half(512, 512), b, routing, 2)
    return {
        "grouped_gemm_kernel": [("cp.async.cg.shared.global", "0x10", BULK, WGMMA)] * 2,
        "push_kernel": [("sys", "release")],
        "reduce_kernel": [("sys", "acquire", "ld.global.cg.v4")],
    }


def one_gpu() -> Wanted:
    """The guides, and the persistent product with two configs at four shapes."""
    import kernels.guides as g
    import kernels.persistent_gemm as p

    given: dict[str, Any] = {"autotune_allow_arg_overwrite": True}
    for config in p.search_space(4096, 4096, 4096, torch.bfloat16)[:2]:
        for m, n, k in ((64, 64, 64), (1, 1, 1), (33, 17, 70), (300, 7, 16)):
            p.persistent_gemm(half(m, k), half(n, k), config=config, **given)
    g.vector_add(half(99), half(99), config=g.add_kernel.configs[0])
    g.softmax(half(3, 4096), config=g.softmax_kernel.configs[1])
    g.matmul(half(64, 64), half(64, 64), config=g.matmul_kernel.configs[0])
    return {
        "persistent_gemm_kernel": [("cp.async", WGMMA)] * 2,
        "matmul_kernel": [("cp.async", WGMMA)],
        "softmax_kernel": [("cp.async",)],
        "add_kernel": [()],
    }


def a8w8() -> Wanted:
    """Whole blocks at three shapes in one, two and four splits; a ragged depth; tiles by TMA at two
    depths and one that it cannot read.
    """
    import kernels.gemm_a8w8_blockscale as gemm

    split = gemm.make_config(64, 128, warps=4, stages=3, splits=2, cache=".cg")
    tma = gemm.make_config(64, 128, warps=4, stages=3, tma=True)
    for shape in ((256, 256, 512), (512, 1024, 1024), (7, 1024, 2048), (64, 256, 496)):
        for config in (gemm.DEFAULT_CONFIG, split, {**split, "NUM_KSPLIT": 4}):
            gemm.gemm_a8w8_blockscale(*gemm.random_inputs(*shape, CPU), config=config)
    for depth in (1024, 512, 488):
        gemm.gemm_a8w8_blockscale(*gemm.random_inputs(256, 256, depth, CPU), config=tma)
    return {
        "gemm_a8w8_blockscale_kernel": [(f"{WGMMA}.sync.aligned.m64n128k32.f32.e4m3.e4m3",)] * 6
    }


@on_each_rank(modes=("fake",), cases=[ag_gemm, row_parallel, moe, one_gpu, further(a8w8)])
def test_kernels_compile_for_hopper_once_for_many_shapes(rank: int, case: Callable[[], Wanted]):
    """Matrix and copy units, acquires and releases at the scope of the system, wide loads; one
    kernel for sizes 1, odd, multiples of 16.
    """
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # it has the same kernels
            patch.setattr(JITFunction, "run", lambda *_, **__: None)
        wanted = case()
    dist.barrier()
    if rank == 1:
        return
    files = sorted(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.ptx"))
    for name, each_has in wanted.items():
        codes = [file.read_text() for file in files if file.stem == name]
        # The release is one thread's: a barrier before it orders the stores of the others.
        releases = [
            code[max(at.start() - 600, 0) : at.start()]
            for code in codes
            for at in re.finditer(r"global\.sys\.release\.add", code)
        ]
        assert all("bar.sync" in before for before in releases)
        for parts in each_has:
            found = next(
                (code for code in codes if all(re.search(each, code) for each in parts)), ""
            )
            assert found, (name, parts)
            codes.remove(found)
        assert codes == []
    if case is a8w8:
        assert [
            sum(what in file.read_text() for file in files)
            for what in ("cp.async.bulk.tensor", "cp.async.cg")
        ] == [1, 4]
    shared = [
        json.loads(file.with_suffix(".json").read_text())["shared"]
        for file in files
        if file.stem == "push_gemm_kernel"
    ]
    # Two programs on an SM, with what the compiler adds to the stages.
    assert max(shared, default=0) <= HALF_AN_SM


def digests(rank: int) -> list[bool]:
    """Whether the function's digest is another one where each of these is."""
    import kernels.ag_gemm as ag
    import kernels.shard_gemm as shard
    from dist_tune.launches import read_code
    from kernels.operands import output_for

    changes = [
        (ag.AllGatherGemm, "__call__"),
        (ag, "loadable"),
        (shard, "set_block_shapes"),
        (shard, "tile_block"),
        (ag, "random_operands"),
    ]
    found, unchanged = [], read_code(ag.ag_gemm.__wrapped__).digest
    for owner, name in changes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                owner, name, shard.ag_gemm_kernel.fn if name == "tile_block" else output_for
            )
            found.append(read_code(ag.ag_gemm.__wrapped__).digest != unchanged)
    return found


def test_a_change_of_the_kernel_or_of_what_calls_it_makes_another_function():
    """Records of the function count only for the step, the kernel and the helpers that they were
    made with.
    """
    assert values(on_ranks(1, digests, is_dist=False)) == [[True, True, True, True, False]]


def check_code(config: triton.Config, dtype: torch.dtype, folder: Path) -> None:
    """Compile for sm_90a, which needs no GPU, and look at PTX, machine code and the launch."""
    pytest.importorskip("cutlass.cute", reason="needs the extra cute")
    pytest.importorskip("tvm_ffi", reason="needs the extra cute")
    from kernels.cute_kernel import compiled

    block, (_, items), folder = (
        config.kwargs,
        cute_build.kernel_key(dtype, config),
        Path(tempfile.mkdtemp(dir=folder)),
    )
    code = compiled(
        cute_build.DTYPES[dtype],
        dict(items),
        f"{cute_build.OPTIONS} --keep-ptx --keep-cubin --dump-dir {folder}",
    )
    ptx = next(folder.glob("*.ptx")).read_text(errors="replace")
    # A box of TMA has 128 bytes a row.
    rows, n_boxes = (block["TILE_M"] // (1 if block["PING_PONG"] else 2), block["TILE_K"] // 64)
    element = "f16" if dtype is torch.float16 else "bf16"
    counts = {
        f"wgmma.mma_async.sync.aligned.m64n{block['TILE_N']}k16.f32.{element}.{element}": rows
        // 64
        * block["TILE_K"]
        // 16,
        "cp.async.bulk.tensor.2d.shared::cluster.global": 2 * n_boxes,
        ".multicast::cluster": n_boxes * (block["CLUSTER_M"] * block["CLUSTER_N"] - 1),
        "cp.async.bulk.tensor.2d.global.shared::cta": rows
        // 64
        * block["TILE_N"]
        // block["STORE_N"],
        "setmaxnreg": 2,
    }
    assert {text: ptx.count(text) for text in counts} == counts, str(config)
    assert f"constant({cute_gemm.shared_bytes(config)} : i64)" in str(code.ir_module), str(config)
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [cuobjdump, "-res-usage", next(folder.glob("*.cubin"))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # 65,536 registers for 384 threads, nothing spilled.
    assert re.search("REG:168 STACK:0 .* LOCAL:0 ", usage), f"{config}: {usage}"


@pytest.mark.slow  # needs the extra cute
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("which", "dtype"),
    [(slice(1), torch.bfloat16), (slice(-1, None), torch.float16), (slice(None), torch.bfloat16)],
)
def test_code_of_cute_gemm_has_wgmma_tma_and_the_shared_memory_that_was_foreseen(
    which: slice, dtype: torch.dtype, tmp_path: Path
):
    """The first config, one of another schedule, and further all: instructions by number, registers
    without spills.
    """
    for config in cute_gemm.search_space(4096, 4096, 4096)[which]:
        check_code(config, dtype, tmp_path)
