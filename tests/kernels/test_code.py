"""Code of kernels/ for a Hopper GPU that is not there: real compilation on the fake driver, and by CuTe DSL where it is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton

from dist_tune.testing import values
from kernels import cute_build, cute_gemm
from tests.worlds import further, on_fake, on_ranks

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
HALF_AN_SM = (227 * 1024 + 1024) // 2 - 1024
"""Bytes of shared memory that each of two programs on an SM may have."""


class Code(NamedTuple):
    name: str
    ptx: str
    shared_bytes: int


def compiled(rank: int, name: str) -> list[Code]:
    CASES[name][0]()
    files = sorted(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.ptx"))
    return [Code(file.stem, file.read_text(), json.loads(file.with_suffix(".json").read_text())["shared"]) for file in files]


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def ag_gemm() -> None:
    """Both loop forms; the second with columns that a descriptor cannot store."""
    from kernels.shard_gemm import make_config, multiply_shards

    for flatten, n in ((False, 256), (True, 255)):
        config = make_config(128, 128, 64, warps=4, stages=3, flatten=flatten)
        a, flags = half(256, 256), torch.ones(4, dtype=torch.int32)
        multiply_shards(a[:64], a, half(n, 256), half(256, n), flags, 1, 1, config)


def row_parallel() -> None:
    """A product of two programs on an SM, which sums, and a sum that is sent to all ranks."""
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    from kernels.push_gemm import make_config, push_gemm_kernel, set_block_shapes
    from kernels.sum_parts import sum_kernel

    a, table, flags = half(256, 256), torch.zeros(2).long(), torch.zeros(2, 32).int()
    config = make_config(128, 128, 64, warps=4, stages=3, split=True, per_sm=2, stagger=True)
    operands = [TensorDescriptor(a, [256, 256], [256, 1], [1, 1]) for _ in range(2)]
    args: tuple[Any, ...] = (*operands, a, table, table, table, flags, table, flags, None, None, 256, 256, 256, 128, 32, 1, 5, 0)
    set_block_shapes({**dict(zip(push_gemm_kernel.arg_names, args, strict=False)), **config.all_kwargs()})
    fixed: dict[str, Any] = {"WORLD": 2, "ELEMENT": tl.bfloat16, "FLAG_ROWS": 64}
    push = {"PARTS": 2, "INSIDE": True, "SPREAD": 0, "INTERPRETED": False}
    push_gemm_kernel.fn.warmup(*args, grid=(1,), **fixed, **push, **config.all_kwargs())
    args = (a, table, flags, table, table, 128, 256, 128, 32, 1, 5)
    sum_kernel.warmup(*args, grid=(1,), **fixed, PARTS=1, SOURCES=2, CHUNK_ROWS=128, ROWS=8, COLUMNS=512, num_warps=8)


def moe() -> None:
    """Both layers' products, and the sums that are pushed and reduced."""
    from kernels.grouped_gemm import Shards, check_configs, multiply_rows
    from kernels.moe_combine import Partials, push, reduce
    from kernels.routing import RowSorter

    a, b, c = half(256, 512), half(8, 512, 512), half(512, 512)
    flags, table = torch.zeros(2).int(), torch.zeros(2).long()
    rows = RowSorter([(256, 512), (0, 256)], 8, "part", CPU).sort(torch.zeros(256, 2).int())
    multiply_rows(a, b, c, rows, shards=Shards(a[:128], flags, 3, 1), config=check_configs()[0])
    multiply_rows(a, b, c, rows, done=flags, n_free_sms=8, config=check_configs()[1])
    partials = Partials(c, torch.zeros(256, 2), table, table, 1, 3)
    push(partials, flags, 2, 16)
    reduce(partials, c[:128], 16)


def one_gpu() -> None:
    """The guides, and the persistent product with two configs at four shapes."""
    import kernels.guides as g
    import kernels.persistent_gemm as p

    given: dict[str, Any] = {"autotune_allow_arg_overwrite": True}
    for config in p.search_space(4096, 4096, 4096, torch.bfloat16)[:2]:
        for m, n, k in ((64, 64, 64), (1, 1, 1), (33, 17, 70), (300, 7, 16)):
            p.persistent_gemm(half(m, k), half(n, k), config=config, **given)
    assert [len(hashes) for hashes in p.kernels_by_key.values()] == [1, 1]
    g.vector_add(half(99), half(99), config=g.add_kernel.configs[0])
    g.softmax(half(3, 4096), config=g.softmax_kernel.configs[1])
    g.matmul(half(64, 64), half(64, 64), config=g.matmul_kernel.configs[0])


def a8w8() -> None:
    """Whole blocks at three shapes in one, two and four splits; a ragged depth; tiles by TMA at two depths and one that it cannot read."""
    import kernels.gemm_a8w8_blockscale as gemm

    split = gemm.make_config(64, 128, warps=4, stages=3, splits=2, cache=".cg")
    for shape in ((256, 256, 512), (512, 1024, 1024), (7, 1024, 2048), (64, 256, 496)):
        for config in (gemm.DEFAULT_CONFIG, split, {**split, "NUM_KSPLIT": 4}):
            gemm.gemm_a8w8_blockscale(*gemm.random_inputs(*shape, CPU), config=config)
    tma = gemm.make_config(64, 128, warps=4, stages=3, tma=True)
    for depth in (1024, 512, 488):
        gemm.gemm_a8w8_blockscale(*gemm.random_inputs(256, 256, depth, CPU), config=tma)


BULK, WGMMA = "cp.async.bulk.tensor.2d.shared", "wgmma.mma_async"
SENT = ("sys.acquire", "global.sys.release.add", "st.global.v4", r"ld.global.cg[\w:.]*.v4")
CASES: dict[str, tuple[Callable[[], None], dict[str, tuple[int, tuple[str, ...]]]]] = {
    "AllGather-GEMM": (ag_gemm, {"ag_gemm_kernel": (2, ("acquire", "fence.proxy.async;", BULK, WGMMA))}),
    "row-parallel products": (row_parallel, {"push_gemm_kernel": (1, (*SENT, WGMMA, "nanosleep")), "sum_kernel": (1, SENT)}),
    "mixture of experts": (
        moe,
        {
            "grouped_gemm_kernel": (2, ("cp.async.cg.shared.global", "0x10", BULK, WGMMA)),
            "push_kernel": (1, ("sys", "release")),
            "reduce_kernel": (1, ("sys", "acquire", "ld.global.cg.v4")),
        },
    ),
    "one GPU": (
        one_gpu,
        {
            "persistent_gemm_kernel": (2, ("cp.async", WGMMA)),
            "matmul_kernel": (1, ("cp.async", WGMMA)),
            "softmax_kernel": (1, ("cp.async",)),
            "add_kernel": (1, ()),
        },
    ),
    "FP8 product": (a8w8, {"gemm_a8w8_blockscale_kernel": (6, (f"{WGMMA}.sync.aligned.m64n128k32.f32.e4m3.e4m3",))}),
}


@pytest.mark.parametrize("name", ["AllGather-GEMM", "row-parallel products", "mixture of experts", "one GPU", further("FP8 product")])
def test_kernels_compile_for_hopper_once_for_many_shapes(name: str):
    """Matrix and copy units, acquires and releases at the scope of the system, wide loads; one kernel for sizes 1, odd, multiples of 16."""
    (found,) = values(on_fake(1, compiled, name, is_dist=False))
    for kernel, (n, wanted) in CASES[name][1].items():
        codes = [code for code in found if code.name == kernel]
        assert (kernel, len(codes)) == (kernel, n)
        for code in codes:
            assert [each for each in wanted if not re.search(each, code.ptx)] == []
            # The release is one thread's: a barrier before it orders the stores of the others.
            releases = [at.start() for at in re.finditer(r"global\.sys\.release\.add", code.ptx)]
            assert all("bar.sync" in code.ptx[max(at - 600, 0) : at] for at in releases)
    if name == "FP8 product":
        assert [sum(what in code.ptx for code in found) for what in ("cp.async.bulk.tensor", "cp.async.cg")] == [1, 4]
    if name == "row-parallel products":  # two of them on an SM, with what the compiler adds to the stages
        assert next(code.shared_bytes for code in found if code.name == "push_gemm_kernel") <= HALF_AN_SM


def digests(rank: int) -> list[bool]:
    """Whether the function's digest is another one where each of these is."""
    import kernels.ag_gemm as ag
    import kernels.shard_gemm as shard
    from dist_tune.cache import read_code
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
            patch.setattr(owner, name, shard.ag_gemm_kernel.fn if name == "tile_block" else output_for)
            found.append(read_code(ag.ag_gemm.__wrapped__).digest != unchanged)
    return found


def test_a_change_of_the_kernel_or_of_what_calls_it_makes_another_function():
    """Records of the function count only for the step, the kernel and the helpers that they were made with."""
    assert values(on_ranks(1, digests, is_dist=False)) == [[True, True, True, True, False]]


def check_code(config: triton.Config, dtype: torch.dtype, folder: Path) -> None:
    """Compile for sm_90a, which needs no GPU, and look at PTX, machine code and the launch."""
    pytest.importorskip("cutlass.cute", reason="needs the extra cute")
    pytest.importorskip("tvm_ffi", reason="needs the extra cute")
    from kernels.cute_kernel import compiled

    block, (_, items), folder = config.kwargs, cute_build.kernel_key(dtype, config), Path(tempfile.mkdtemp(dir=folder))
    code = compiled(cute_build.DTYPES[dtype], dict(items), f"{cute_build.OPTIONS} --keep-ptx --keep-cubin --dump-dir {folder}")
    ptx = next(folder.glob("*.ptx")).read_text(errors="replace")
    rows, n_boxes = block["TILE_M"] // (1 if block["PING_PONG"] else 2), block["TILE_K"] // 64  # a box of TMA has 128 bytes a row
    element = "f16" if dtype is torch.float16 else "bf16"
    counts = {
        f"wgmma.mma_async.sync.aligned.m64n{block['TILE_N']}k16.f32.{element}.{element}": rows // 64 * block["TILE_K"] // 16,
        "cp.async.bulk.tensor.2d.shared::cluster.global": 2 * n_boxes,
        ".multicast::cluster": n_boxes * (block["CLUSTER_M"] * block["CLUSTER_N"] - 1),
        "cp.async.bulk.tensor.2d.global.shared::cta": rows // 64 * block["TILE_N"] // block["STORE_N"],
        "setmaxnreg": 2,
    }
    assert {text: ptx.count(text) for text in counts} == counts, str(config)
    assert f"constant({cute_gemm.shared_bytes(config)} : i64)" in str(code.ir_module), str(config)
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([cuobjdump, "-res-usage", next(folder.glob("*.cubin"))], capture_output=True, text=True, check=True).stdout
    assert re.search("REG:168 STACK:0 .* LOCAL:0 ", usage), f"{config}: {usage}"  # 65,536 registers for 384 threads, nothing spilled


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("which", "dtype"), [(slice(1), torch.bfloat16), (slice(-1, None), torch.float16), further(slice(None), torch.bfloat16)]
)
def test_code_of_cute_gemm_has_wgmma_tma_and_the_shared_memory_that_was_foreseen(which: slice, dtype: torch.dtype, tmp_path: Path):
    """The first config, one of another schedule, and further all: instructions by number, registers without spills."""
    for config in cute_gemm.search_space(4096, 4096, 4096)[which]:
        check_code(config, dtype, tmp_path)
