# a script that prints
"""Steps of public libraries, forward, backward and all-reduce of gradients, tuned on two CPU ranks
under Triton's interpreter.

Each step is called three times: tuned, once more, and without dist_tune, by which the first is
compared; lengths differ between ranks.

    PYTHONPATH=FOLDER_OF_THE_LIBRARY launch/launch.sh benchmarks/library_steps.py NAME

NAME: attorch, moe-ops, mamba, late-interaction, flash-sinkhorn, liger.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import triton.testing
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

Step = Callable[..., list[torch.Tensor]]
CAPABILITY, DEVICE_NAME = (9, 0), "NVIDIA H200"


def pretend_a_gpu() -> None:
    """Answer what libraries ask of torch and Triton when they are imported; kernels run under the
    interpreter.
    """

    def bench(run: Callable[[], object], *args: object, **kwargs: object) -> list[float]:
        run()
        return [1.0] * 3

    cuda: Any = torch.cuda
    cuda.get_device_capability, cuda.get_device_name = (
        (lambda *args: CAPABILITY),
        (lambda *args: DEVICE_NAME),
    )
    facts = {
        "multi_processor_count": 132,
        "total_memory": 140 << 30,
        "L2_cache_size": 50 << 20,
        "shared_memory_per_block_optin": 232448,
    }
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        name=DEVICE_NAME, major=9, minor=0, warp_size=32, **facts
    )
    cuda.device, cuda.current_device, cuda.synchronize = (
        (lambda *args: contextlib.nullcontext()),
        (lambda *args: 0),
        (lambda *args: None),
    )
    testing: Any = triton.testing
    testing.do_bench = bench
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    active = types.SimpleNamespace(
        get_benchmarker=lambda: bench,
        get_current_device=lambda: 0,
        get_current_target=lambda: target,
        get_current_stream=lambda *args: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    driver.set_active(active)


def attorch_step(rank: int) -> tuple[Step, Iterator[tuple[Any, ...]]]:
    """A small network and its loss, the batch different on each rank."""
    library: Any = importlib.import_module("attorch")
    first, norm = (
        library.Linear(32, 64, act_func="gelu", device="cpu"),
        library.LayerNorm(64, device="cpu"),
    )
    net = torch.nn.Sequential(
        first, norm, library.GLU(act_func="silu"), library.Linear(32, 16, device="cpu")
    )
    loss = library.CrossEntropyLoss()

    def step(x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        value = loss(net(x), target)
        gradients = torch.autograd.grad(value, list(net.parameters()))
        for each in gradients:
            dist.all_reduce(each)
        return [value, *gradients]

    return step, (
        (torch.randn(n, 32), torch.randint(0, 16, (n,))) for n in (48 + 16 * rank, 49 + 16 * rank)
    )


def moe_step(rank: int) -> tuple[Step, Iterator[tuple[Any, ...]]]:
    """Tokens permuted by expert, a grouped product, and back."""
    library: Any = importlib.import_module("moe_ops")
    grouped_gemm = importlib.import_module("moe_ops.grouped_gemm_ops").grouped_gemm
    experts = torch.randn(4, 32, 32).requires_grad_()

    def step(x: torch.Tensor, logits: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        weights, chosen = torch.topk(torch.softmax(logits, -1), 2)
        weights = weights.float().detach().requires_grad_()
        rows, row_of, offsets = library.permute(x, chosen.int(), 0, 4)
        y = library.unpermute(grouped_gemm(rows, experts, offsets), row_of, weights, len(x), 2)
        gradients = torch.autograd.grad(y.square().mean(), [x, experts, weights])
        dist.all_reduce(gradients[1])
        return [y, *gradients]

    return step, ((torch.randn(n, 32), torch.randn(n, 4)) for n in (16 + 8 * rank, 32))


def mamba_step(rank: int) -> tuple[Step, Iterator[tuple[Any, ...]]]:
    """A chunked scan with sequence numbers, and a norm of its results."""
    # Without its __init__, which imports compiled CUDA code.
    package: Any = types.ModuleType("mamba_ssm")
    package.__path__ = [f"{each}/mamba_ssm" for each in sys.path]
    sys.modules["mamba_ssm"] = package
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    norm = importlib.import_module("mamba_ssm.ops.triton.layer_norm").layer_norm_fn
    decay, weight = (-torch.rand(2) - 0.1).requires_grad_(), torch.ones(16).requires_grad_()

    def step(
        x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, numbers: torch.Tensor
    ) -> list[torch.Tensor]:
        y = scan(x, dt, decay, b, c, 16, D=None, seq_idx=numbers)
        y = norm(y.reshape(-1, 16), weight, None, eps=1e-5, is_rms_norm=True)
        gradients = torch.autograd.grad(y.square().mean(), [x, dt, decay, b, c, weight])
        for each in (gradients[2], gradients[5]):
            dist.all_reduce(each)
        return [y, *gradients]

    n = 32 + 16 * rank
    x, b, c = (torch.randn(1, n, heads, 16).requires_grad_() for heads in (2, 1, 1))
    return step, iter(
        [(x, torch.rand(1, n, 2).requires_grad_(), b, c, (torch.arange(n) // 20).int()[None])]
    )


def late_interaction_step(rank: int) -> tuple[Step, Iterator[tuple[Any, ...]]]:
    """Scores of queries and documents of unequal lengths."""
    score = importlib.import_module("late_interaction_kernels.varlen").maxsim_varlen

    def step(*operands: Any) -> list[torch.Tensor]:
        scores = score(*operands)
        gradients = torch.autograd.grad(scores.square().mean(), operands[:2])
        total = torch.stack([each.sum() for each in gradients])
        dist.all_reduce(total)
        return [scores, *gradients, total]

    def made(k: int) -> tuple[Any, ...]:
        lengths = torch.tensor([5, 9 + 3 * rank, 7]), torch.tensor([12, 20 + rank + k, 17])
        rows = (torch.randn(int(each.sum()), 16).requires_grad_() for each in lengths)
        begins = (torch.nn.functional.pad(each.cumsum(0), (1, 0)).int() for each in lengths)
        return (*rows, *begins, *(int(each.max()) for each in lengths))

    return step, map(made, (0, 1))


def sinkhorn_step(rank: int) -> tuple[Step, Iterator[tuple[Any, ...]]]:
    """Two half-steps of Sinkhorn's iteration, on tensors that say they are on a GPU."""
    lse = importlib.import_module(
        "flash_sinkhorn.kernels.sinkhorn_flashstyle_sqeuclid"
    ).flashsinkhorn_lse

    class OnGpu(torch.Tensor):
        is_cuda = True
        __torch_function__: Any = torch._C._disabled_torch_function_impl

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x, y = x.as_subclass(OnGpu), y.as_subclass(OnGpu)
        f = lse(x, y, torch.zeros(len(y)).as_subclass(OnGpu), 0.5, allow_tf32=False)
        g = lse(y, x, f.as_subclass(OnGpu), 0.5, allow_tf32=False)
        mean = g.mean()[None]
        dist.all_reduce(mean)
        return [f, g, mean]

    return step, (
        (torch.randn(n, 16), torch.randn(m, 16)) for n, m in ((40 + 40 * rank, 70), (50, 66))
    )


def liger_step(rank: int) -> tuple[Step, Iterator[tuple[Any, ...]]]:
    """A mixture of experts: products and sums of seven kernels, one of which adds to what
    `reset_to_zero` names.
    """
    layer = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    up, down = (
        (torch.randn(2, 64, 32) * 0.2).requires_grad_(),
        (torch.randn(2, 32, 32) * 0.2).requires_grad_(),
    )

    def step(x: torch.Tensor, logits: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        weights, chosen = torch.topk(torch.softmax(logits, -1), 1)
        weights = weights.detach().requires_grad_()
        y = layer.apply(x, up, down, chosen.int(), weights)
        gradients = torch.autograd.grad(y.square().mean(), [x, up, down, weights])
        for each in gradients[1:3]:
            dist.all_reduce(each)
        return [y, *gradients]

    return step, iter([(torch.randn(16 + 8 * rank, 32), torch.randn(16 + 8 * rank, 2))])


STEPS = {
    "attorch": attorch_step,
    "moe-ops": moe_step,
    "mamba": mamba_step,
    "late-interaction": late_interaction_step,
    "flash-sinkhorn": sinkhorn_step,
    "liger": liger_step,
}


def main(name: str) -> None:
    """Tune the step for each of its inputs, and print what came of it on each rank."""
    pretend_a_gpu()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    contextual_autotune = importlib.import_module("dist_tune").contextual_autotune
    torch.manual_seed(0)
    step, inputs = STEPS[name](rank)
    tuned = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1, cache=False)(step)
    for given in inputs:
        n_before, began = len(tuned.records), time.perf_counter()
        first = [each.detach().clone() for each in tuned(*given)]
        middle = time.perf_counter()
        again = [each.detach().clone() for each in tuned(*given)]
        ended = time.perf_counter()
        for kernel in gc.get_objects():  # so that the third call is tuned by Triton itself
            if issubclass(type(kernel), Autotuner):
                kernel.cache.clear()
        alone = [each.detach() for each in step(*given)]
        records = tuned.records[n_before:]
        chosen = {(each.kernel, each.key): each.best.config for each in records}
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, chosen)
        shared = set.intersection(*map(set, told))
        apart = max(float((a - b).abs().max()) for a, b in zip(first, alone, strict=True))
        results = "the same" if all(map(torch.equal, first, again)) else "OTHER"
        agreement = (
            "one config each"
            if all(told[0][each] == told[1][each] for each in shared)
            else "DIFFERENT configs"
        )
        n_candidates = sum(len(each.candidates) for each in records)
        print(
            f"{name}, rank {rank}: {len(records)} sites, {n_candidates} candidates, first call"
            f" {middle - began:.1f} s, second {ended - middle:.2f} s with {results} results;"
            f" {len(shared)} sites on both ranks, {agreement}; largest difference from the step"
            f" without dist_tune {apart:.1e}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=[*STEPS])
    main(parser.parse_args().name)
