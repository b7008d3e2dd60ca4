"""kernels/ag_gemm.py: two gloo ranks under the Triton interpreter, and code for a GPU that is not there."""

import os
from pathlib import Path

import pytest

from tests.programs import Done, run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
AG_GEMM = str(ROOT / "kernels/ag_gemm.py")


def environment(cwd: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DIST_TUNE_CACHE_DIR": str(cwd / "cache")}


def run(cwd: Path, *command: str, n_ranks: int = 0, interpret: str = "1") -> Done:
    return run_python(*command, cwd=cwd, env={**environment(cwd), "TRITON_INTERPRET": interpret}, n_ranks=n_ranks)


def on_two_ranks(cwd: Path, *command: str) -> Done:
    return run(cwd, *command, n_ranks=2)


@pytest.mark.once
def test_the_function_gets_its_context_as_it_is_and_a_wrong_result_on_one_rank_drops_the_config(tmp_path: Path) -> None:
    """Every run has the caller's context and output; the reference gathers on all ranks, though rank 1 alone finds an error."""
    script = tmp_path / "function.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "import kernels.ag_gemm as ag, kernels.cases as cases, kernels.harness as harness\n"
        "from dist_tune import autotune, matches\n"
        "harness.join_ranks()\n"
        "def expected(a, b, *_, **__): return cases.STEPS['ag_gemm'].expected((a, b)).to(a.dtype)\n"
        "seen, ctx = [], ag.AllGatherGemm()\n"
        "def function(a, b, ctx, gemm_config, out=None):\n"
        "    seen.append((ctx, out))\n"
        "    c = ag.ag_gemm.__wrapped__(a, b, ctx, gemm_config, out)\n"
        "    if gemm_config.kwargs['BLOCK_N'] == 64 and dist.get_rank() == 1: c[3, 5] += 1\n"
        "    return c\n"
        "tune = autotune(ag.config_space()[:3], ag.key_fn, check=matches(expected), n_warmup=0, n_repeat=1, cache=False)\n"
        "a, b = ag.random_operands((4, 16, 8), torch.bfloat16, torch.device('cpu'))\n"
        "tuned, out = tune(function), torch.full((4, 8), float('nan'), dtype=a.dtype)\n"
        "is_out = tuned(a, b, ctx, out=out) is out and all(each == (ctx, out) for each in seen)\n"
        "failures = [each.failure for each in tuned.records[0].candidates]\n"
        "found = [None, None]\n"
        "dist.all_gather_object(found, (is_out, failures[:2], failures[2][:70], harness.worst_over_ranks(out, expected(a, b)) < 0.008))\n"
        "found.append(len(ag.ag_gemm_kernel.cache))  # of configs that were chosen for it, and not given to it\n"
        "if dist.get_rank() == 0: print(*found, sep='\\n', flush=True)\n"
        "dist.barrier()\n"
        # Not through the interpreter's end, where a thread of torch 2.13's gloo aborts the process if something still holds the group.
        "os._exit(0)\n"
    )
    done = on_two_ranks(tmp_path, str(script))
    assert done.returncode == 0, done.stderr
    _, *found, n_chosen = done.stdout.splitlines()
    assert (len(set(found)), n_chosen) == (1, "0")
    assert found[0].startswith("(True, [None, None], 'rank 1: the result is wrong: wrong by ")
    assert found[0].endswith(", True)")


def test_a_change_of_the_kernel_or_of_what_calls_it_makes_another_function(tmp_path: Path) -> None:
    """Records of the function count only for the step, the kernel and the helpers that they were made with."""
    script = tmp_path / "changes.py"
    script.write_text(
        "import kernels.ag_gemm as ag, kernels.shard_gemm as shard\n"
        "from dist_tune.cache import read_code\n"
        "def fingerprint(each): return read_code(each).digest\n"
        "def another(*args): return args\n"
        "def changed(owner, name, value=another):\n"
        "    before = getattr(owner, name)\n"
        "    setattr(owner, name, value)\n"
        "    try: return fingerprint(ag.ag_gemm.__wrapped__)\n"
        "    finally: setattr(owner, name, before)\n"
        "changes = [(ag.AllGatherGemm, '__call__'), (ag, 'loadable'), (ag, 'multiply_shards'), (shard, 'set_block_shapes')]\n"
        "changes.append((shard, 'tile_block', shard.wait_until))\n"
        "print(len({fingerprint(ag.ag_gemm.__wrapped__), *(changed(*change) for change in changes)}) - len(changes))\n"
        "print(changed(ag, 'random_operands') == fingerprint(ag.ag_gemm.__wrapped__))\n"
    )
    done = run(tmp_path, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1", "True"]


@pytest.mark.once
def test_operands_that_cannot_be_multiplied_are_named(tmp_path: Path) -> None:
    """Mixed dtypes, shapes that do not fit, an output of the wrong shape: a ValueError with what was given."""
    script = tmp_path / "operands.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from kernels.ag_gemm import AllGatherGemm, loadable\n"
        "def message(*operands):\n"
        "    try: step(*operands)\n"
        "    except ValueError as error: return str(error)\n"
        "try: AllGatherGemm()\n"
        "except ValueError as error: print(error)\n"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
        "from kernels.shard_gemm import make_config\n"
        "config = make_config(64, 64, 64, warps=4, stages=2)\n"
        "step, half = AllGatherGemm(config=config), lambda *shape: torch.ones(shape, dtype=torch.bfloat16)\n"
        "print(message(half(4, 8), half(4, 16)))\n"
        "print(message(half(4, 8), half(4, 8).half()))\n"
        "print(message(half(0, 8), half(4, 8)))\n"
        "print(message(half(4, 8), half(4, 8), half(4, 5)))\n"
        "odd, shifted, turned = half(3, 5), half(25)[1:].view(3, 8), half(8, 8).T\n"
        "print([(tuple(x.shape), x.is_contiguous(), x.data_ptr() % 16) for x in map(loadable, (odd, shifted, turned))])\n"
        "print(step(odd, odd).tolist() == [[5.0] * 3] * 3)\n"
        "import os\n"
        "dist.get_process_group_ranks, os.environ['LOCAL_WORLD_SIZE'] = (lambda group: [1, 2, 3, 4, 5]), '3'\n"
        "print(AllGatherGemm().n_ranks, AllGatherGemm().n_local_ranks)  # as on ranks 3 to 5, which share a machine\n"
    )
    done = run(tmp_path, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "AllGatherGemm needs a process group: call torch.distributed.init_process_group first",
        "need A's shard as [M / W, K] and B's as [N / W, K]; got A's shard [4, 8] torch.bfloat16, B's [4, 16] torch.bfloat16",
        "need bfloat16 or float16, the same for both, on one device; got A's shard [4, 8] torch.bfloat16, B's [4, 8] torch.float16",
        "nothing to multiply; got A's shard [0, 8] torch.bfloat16, B's [4, 8] torch.bfloat16",
        "need out as contiguous [4, 4] torch.bfloat16 on cpu; got [4, 5] torch.bfloat16",
        "[((3, 8), True, 0), ((3, 8), True, 0), ((8, 8), True, 0)]",
        "True",
        "1 3",
    ]


def test_the_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """Real sm_90 code of both loop forms: matrix and copy units, an acquire, and a fence between the two kinds of access."""
    script = tmp_path / "compiled.py"
    script.write_text(
        "import torch\n"
        "from dist_tune import testing\n"
        "testing.install_fake_driver()\n"
        "from kernels.shard_gemm import ag_gemm_kernel, drop_hopeless, gpu_configs, make_config, multiply_shards\n"
        "a, b, c = (torch.ones(256, 256, dtype=torch.bfloat16) for _ in range(3))\n"
        "def n_kept(configs): return [len(drop_hopeless(configs, {'c': c, 'c_tiles': tiles})) for tiles in (None, c)]\n"
        "too_large = [make_config(128, 256, 64, warps=8, stages=4)] + gpu_configs()\n"
        "print(len(gpu_configs()), len(set(map(str, gpu_configs()))), *n_kept(gpu_configs()), *n_kept(too_large))\n"
        "for flatten, out in ((False, c), (True, c[:, :255].contiguous())):\n"
        "    config = make_config(128, 128, 64, warps=4, stages=3, flatten=flatten)\n"
        "    rows = out.shape[1]\n"
        "    multiply_shards(a[:64], a, b[:rows], out, torch.ones(4, dtype=torch.int32), 1, 1, config)\n"
        "print(testing.FakeH200.launches)\n"
    )
    done = run(tmp_path, "-c", f"import os; os.environ['TRITON_CACHE_DIR'] = 'cache'; exec(open({str(script)!r}).read())", interpret="0")
    assert done.returncode == 0, done.stderr
    counts, launches = done.stdout.splitlines()
    n_configs, *others = map(int, counts.split())
    # All of them distinct and all of them fit; a tile that does not fit beside its stages is dropped only where it is stored from there.
    assert others == [n_configs, n_configs, n_configs, n_configs + 1, n_configs]
    assert launches == "['ag_gemm_kernel', 'ag_gemm_kernel']"
    compiled = [path.read_text() for path in (tmp_path / "cache").rglob("*.ptx")]
    assert len(compiled) == 2
    for ptx in compiled:
        assert all(what in ptx for what in ("acquire", "fence.proxy.async;", "cp.async.bulk.tensor.2d.shared", "wgmma.mma_async"))


@pytest.mark.once
def test_a_failing_driver_call_names_the_function() -> None:
    """One function of the driver queues words of one value, another copies; either raises with its name and the error's number."""
    script = (
        "import torch, kernels.gather as gather\n"
        "from types import SimpleNamespace\n"
        "def function(name): return lambda *args: calls.append((name, args)) or status\n"
        "gather.driver_function, stream, words, calls = function, SimpleNamespace(cuda_stream=7), torch.zeros(4, dtype=torch.uint32), []\n"
        "ops, status = gather.MemoryOps([(gather.WRITE, words, 3), (gather.WAIT, words, 1)]), 0\n"
        "ops.queue(stream, 2**32 + 5)\n"
        "gather.copy(40, words, stream)\n"
        "(_, (_, count, queued, _)), (_, copied) = calls\n"
        "print(count, [(op.operation, op.address - words.data_ptr(), op.value) for op in queued])\n"
        "print(copied == (40, words.data_ptr(), 16, 7))\n"
        "status = 700\n"
        "for queue in (lambda: ops.queue(stream, 1), lambda: gather.copy(40, words, stream)):\n"
        "    try: queue()\n"
        "    except RuntimeError as error: print(error)\n"
    )
    done = run(ROOT, "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "2 [(2, 12, 5), (1, 4, 5)]",
        "True",
        "cuStreamBatchMemOp_v2 failed with CUDA driver error 700; cuda.h has its name",
        "cuMemcpyAsync failed with CUDA driver error 700; cuda.h has its name",
    ]
