"""The single-GPU examples in kernels/, under the Triton interpreter, and compiled for a GPU that is not there."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.programs import Done, run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
CHECKS = {
    "vector_add": ("--dtype", "fp32", "--dtype", "bf16", "--shape", "1", "--shape", "1025"),
    "matmul": ("--dtype", "bf16", "--shape", "1,1,1", "--shape", "17,33,20"),
    "softmax": ("--dtype", "fp16", "--shape", "1,1", "--shape", "3,257"),
    "persistent_gemm": ("--dtype", "fp16", "--shape", "1,1,1", "--shape", "33,17,35"),
}
N_RESULTS = {"vector_add": 4 * 2 * 3, "matmul": 2 * 2 * 4, "softmax": 2 * 3 * 3, "persistent_gemm": 2 + 5}
"""Shapes and dtypes, problems, configs and the tuner's choice."""


def run(cwd: Path, *command: str, **variables: str) -> Done:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DIST_TUNE_VERBOSITY": "quiet"}
    environment |= {"DIST_TUNE_CACHE_DIR": str(cwd / "cache"), "TRITON_CACHE_DIR": str(cwd / "triton"), **variables}
    return run_python(*command, cwd=cwd, env=environment)


def printed(cwd: Path, program: str, interpret: str = "1") -> list[str]:
    """Lines of a program that succeeds."""
    (cwd / "program.py").write_text(program)
    done = run(cwd, "program.py", TRITON_INTERPRET=interpret)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.once
def test_tuning_leaves_the_callers_tensors_right(tmp_path: Path):
    """A sum that is tuned in place has been added once, one of a split product to zeros alone; a later call adds again."""
    lines = printed(
        tmp_path,
        "import torch\n"
        "from dist_tune import contextual_autotune\n"
        "from kernels.guides import accumulate, add_product\n"
        "total, x = torch.full((1025,), 5.0), torch.ones(1025)\n"
        "is_same = accumulate(total, x) is total\n"
        "print(is_same, total.unique().tolist(), accumulate.records[0].n_replays > 2)\n"
        "print(accumulate(total, x).unique().tolist())\n"
        "a, b, c = torch.ones(17, 70, dtype=torch.float16), torch.ones(70, 9, dtype=torch.float16), torch.zeros(17, 9)\n"
        "tuned = contextual_autotune(cache=False)(add_product)\n"
        "tuned(a, b, c)\n"
        "print(c.unique().tolist(), tuned.records[0].n_replays > 3)\n"
        "tuned(a, b, c)\n"
        "print(c.unique().tolist(), len(tuned.records))\n",
    )
    assert lines == ["True [6.0] True", "[7.0]", "[70.0] True", "[140.0] 1"]


@pytest.mark.once
def test_softmax_of_rows_without_a_finite_element_is_that_of_torch(tmp_path: Path):
    """Blocks of -inf before the first number, rows of -inf, infinities, and no columns at all."""
    lines = printed(
        tmp_path,
        "import torch\n"
        "from kernels.guides import softmax, softmax_kernel\n"
        "inf = float('inf')\n"
        "x = torch.randn(4, 200)\n"
        "x[0, :150], x[1], x[2, 3], x[3, 100:] = -inf, -inf, inf, -inf\n"
        "for config in (*softmax_kernel.configs, None):\n"
        "    print(torch.allclose(softmax(x, config), torch.softmax(x, 1), equal_nan=True))\n"
        "print(softmax(x)[1].isnan().all().item(), softmax(torch.ones(3, 0)).shape, softmax(torch.ones(0, 3)).shape)\n"
        "print(len(softmax.records), softmax(torch.randn(7, 200)).sum().item() > 6.99, len(softmax.records))\n",
    )
    assert lines == ["True", "True", "True", "True torch.Size([3, 0]) torch.Size([0, 3])", "1 True 1"]


@pytest.mark.once
def test_shapes_of_a_bucket_share_a_result(tmp_path: Path):
    """The second shape tunes nothing and is right; one beyond the bucket, and another dtype, are tuned."""
    program = (
        "import torch\n"
        "from kernels.persistent_gemm import persistent_gemm\n"
        "fp16, bf16 = torch.float16, torch.bfloat16\n"
        "for m, n, k, dtype in ((64, 20, 20, fp16), (33, 32, 17, fp16), (65, 20, 20, fp16), (64, 20, 20, bf16)):\n"
        "    a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)\n"
        "    error = (persistent_gemm(a, b) - a.float() @ b.float().T).norm() / (a.float() @ b.float().T).norm()\n"
        "    print(len(persistent_gemm.records), bool(error < 0.008))\n"
    )
    assert printed(tmp_path, program) == ["1 True", "1 True", "2 True", "3 True"]


def test_one_compiled_kernel_serves_all_shapes(tmp_path: Path):
    """Real sm_90 code, of one kernel for each dtype and config: sizes of 1, odd ones, multiples of 16. The other kernels compile, too."""
    lines = printed(
        tmp_path,
        "import torch\n"
        "from dist_tune import testing\n"
        "testing.install_fake_driver()\n"
        "import kernels.guides as g, kernels.persistent_gemm as p\n"
        "def ones(*shape): return torch.ones(shape, dtype=torch.float16)\n"
        "space = p.search_space(4096, 4096, 4096, torch.float16)\n"
        "for config in space[:2]:\n"
        "    for m, n, k in ((64, 64, 64), (1, 1, 1), (33, 17, 70), (300, 7, 16)):\n"
        "        p.persistent_gemm(ones(m, k), ones(n, k), config=config, autotune_allow_arg_overwrite=True)\n"
        "print([len(hashes) for hashes in p.kernels_by_key.values()], len(p.persistent_gemm_kernel.device_caches[0][0]))\n"
        "print(set(p.kernels_by_key) == {p.kernel_cache_key(torch.float16, config) for config in space[:2]})\n"
        "g.vector_add(ones(99), ones(99), config=g.add_kernel.configs[0])\n"
        "g.accumulate(ones(99), ones(99), config=g.accumulate_kernel.configs[0])\n"
        "g.softmax(ones(3, 4096), config=g.softmax_kernel.configs[1])\n"
        "g.matmul(ones(64, 64), ones(64, 64), config=g.matmul_kernel.configs[0])\n"
        "g.split_k_matmul(ones(64, 64), ones(64, 64), config=g.split_k_kernel.configs[0])\n"
        "print(*dict.fromkeys(testing.FakeH200.launches))\n",
        interpret="0",
    )
    assert lines[:2] == ["[1, 1] 2", "True"]
    assert lines[2].split() == [
        "persistent_gemm_kernel",
        "add_kernel",
        "accumulate_kernel",
        "softmax_kernel",
        "matmul_kernel",
        "split_k_kernel",
    ]
    asynchronous = [path.name for path in (tmp_path / "triton").rglob("*.ptx") if "cp.async" in path.read_text()]
    # Products and the staged softmax load ahead.
    assert sorted(asynchronous) == ["matmul_kernel.ptx", *["persistent_gemm_kernel.ptx"] * 2, "softmax_kernel.ptx", "split_k_kernel.ptx"]


@pytest.mark.once
def test_a_search_space_drops_what_does_not_fit_and_is_that_of_the_bucket(tmp_path: Path):
    """Less shared memory, fewer registers a thread, small sizes: fewer configs, each with its reason; equal in a bucket."""
    lines = printed(
        tmp_path,
        "import re, torch\n"
        "from dist_tune import testing\n"
        "testing.install_fake_driver()\n"
        "from kernels.persistent_gemm import all_configs, reason_to_drop, search_space\n"
        "fp16, large = torch.float16, (4096,) * 3\n"
        "def names(*args): return [str(config) for config in search_space(*args)]\n"
        "counts = [len(all_configs()), *(len(names(*large, fp16, limit)) for limit in (1 << 30, 232448, 100_000, 1000))]\n"
        "print(*counts, len(names(*large, fp16)) == counts[2])\n"
        "print(names(65, 128, 1000, fp16) == names(128, 65, 513, fp16), len(names(1, 1, 1, fp16)))\n"
        "reasons = [reason_to_drop(config, (64, 4096, 4096), fp16, 200_000) for config in all_configs()]\n"
        "print(sorted({re.sub(r'\\d+', 'N', reason) for reason in reasons}))\n"
        "print({c.kwargs['BLOCK_M'] * c.kwargs['BLOCK_N'] // c.num_warps // 32 for c in search_space(*large, fp16)})\n",
        interpret="0",
    )
    n_all, n_unlimited, n_hopper, n_small, n_none, is_default = lines[0].split()
    assert int(n_all) > int(n_unlimited) > int(n_hopper) > int(n_small) > int(n_none) == 0
    assert is_default == "True"
    assert lines[1] == "True 4"
    assert ast.literal_eval(lines[2]) == [
        "",
        "BLOCK_M=N is mostly padding for M=N",
        "needs N accumulators a thread, more than N",
        "needs N bytes of shared memory, there are N",
    ]
    assert max(ast.literal_eval(lines[3])) == 128


@pytest.mark.once
def test_operands_that_do_not_go_together_are_named(tmp_path: Path):
    """Shapes, dtypes and layouts that a kernel would read wrongly: a ValueError with what was given; an empty sum is no error."""
    lines = printed(
        tmp_path,
        "import torch\n"
        "from kernels.guides import accumulate, matmul, softmax, vector_add\n"
        "from kernels.persistent_gemm import persistent_gemm\n"
        "half = lambda *shape: torch.ones(shape, dtype=torch.float16)\n"
        "def said(function, *operands):\n"
        "    try: function(*operands)\n"
        "    except ValueError as error: print(error)\n"
        "said(vector_add, half(3), half(4))\n"
        "said(accumulate, half(3), half(3).bfloat16())\n"
        "said(matmul, half(4, 8), half(9, 8).T)\n"
        "said(matmul, half(0, 8), half(8, 8))\n"
        "said(softmax, half(4, 8).T)\n"
        "said(persistent_gemm, half(4, 8), half(8, 4))\n"
        "said(persistent_gemm, half(4, 8).float(), half(4, 8))\n"
        "print(vector_add(half(0), half(0)).shape)\n",
    )
    assert [line.partition("; got ")[2] or line for line in lines] == [
        "[3] torch.float16 cpu and [4] torch.float16 cpu",
        "[3] torch.float16 cpu and [3] torch.bfloat16 cpu",
        "[4, 8] torch.float16 and [8, 9] torch.float16",
        "nothing to multiply in [0, 8] @ [8, 8]",
        "[8, 4] torch.float16, strides (1, 8)",
        "[4, 8] and [8, 4]",
        "torch.float32 cpu and torch.float16 cpu",
        "torch.Size([0])",
    ]
