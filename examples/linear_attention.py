"""A layer of gated linear attention from flash-linear-attention, data-parallel: forward, backward
and the all-reduce of its gradients.

The library is used as it is, and one decorator above the training step tunes the kernels of
`chunk_gla` inside it, on all ranks at once. fla-core holds operators and no layers, so the layer
stands here: projections, gates and norm are torch's.

- check: results and gradients with dist_tune's choice beside those with vanilla `triton.autotune`'s
- perf: the first call, the step on the device and its host time, beside the same step under vanilla
  `triton.autotune`

    pip install 'dist_tune[examples]'
    launch/launch.sh examples/linear_attention.py --case check
    launch/launch.sh examples/linear_attention.py --case perf --vanilla compiled
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
from rich.console import Console
from torch import nn
from triton.runtime.autotuner import Autotuner

from dist_tune import contextual_autotune
from examples import beside_vanilla
from kernels import harness

SHAPE = (2, 4096, 8, 128)
LIMIT = 2e-2
REASON = (
    "a config sets the order of sums; results of a dozen kernels in a row are rounded to bfloat16"
    " (2**-9 each)"
)


class GatedLinearAttention(nn.Module):
    """Y [B, T, heads * head_dim] of x of that shape; a gate for each channel of the keys, by a
    projection of low rank.
    """

    def __init__(self, n_heads: int, head_dim: int, gate_rank: int = 16) -> None:
        super().__init__()
        # Imported here: where a GPU or the library is missing, this file can still say so.
        from fla.ops.gla import chunk_gla

        self.attend = chunk_gla
        width = n_heads * head_dim
        self.heads = (n_heads, head_dim)
        self.q, self.k, self.v, self.out_gate, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )
        self.gate = nn.Sequential(
            nn.Linear(width, gate_rank, bias=False), nn.Linear(gate_rank, width)
        )
        self.norm = nn.RMSNorm(head_dim, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        q, k, v = (project(x).unflatten(-1, self.heads) for project in (self.q, self.k, self.v))
        decay = F.logsigmoid(self.gate(x).float()).unflatten(-1, self.heads) / 16
        o, _ = self.attend(q, k, v, decay)
        y: torch.Tensor = self.out(self.norm(o).flatten(-2) * F.silu(self.out_gate(x)))
        return y


@contextual_autotune(is_dist=True)
def step(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """One data-parallel step: the layer's output, and gradients summed over ranks in its
    parameters. Collective.
    """
    layer.zero_grad(set_to_none=True)
    y: torch.Tensor = layer(x)
    y.backward(dy)
    for parameter in layer.parameters():
        dist.all_reduce(parameter.grad)
    return y.detach()


def missing() -> str:
    """What this example needs and does not find, and how to get it; empty if nothing."""
    if importlib.util.find_spec("fla") is None:
        return (
            "needs fla-core, which is not installed: pip install 'dist_tune[examples]', or"
            " '.[examples]' in a checkout"
        )
    return (
        ""
        if torch.cuda.is_available()
        else "needs GPUs: the kernels of flash-linear-attention do not run without"
    )


def arguments(
    shape: harness.Shape, device: torch.device
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Arguments of a step, bfloat16: weights are equal on all ranks, x and dy are not."""
    n, length, n_heads, head_dim = shape
    layer = GatedLinearAttention(n_heads, head_dim).to(device, torch.bfloat16)
    for parameter in layer.parameters():
        dist.broadcast(parameter.data, 0)
    x, dy = (
        torch.randn(n, length, n_heads * head_dim, device=device, dtype=torch.bfloat16)
        for _ in "xy"
    )
    return layer, x, dy


def results(
    run: Any, layer: nn.Module, x: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The output of a step, and the gradients that it leaves. Collective."""
    y = run(layer, x, dy)
    return {
        "y": y,
        **{
            f"d {name}": each.grad.clone()
            for name, each in layer.named_parameters()
            if each.grad is not None
        },
    }


def quick_vanilla(package: str) -> None:
    """Let vanilla's tuner time a config for 25 ms in place of 125: the check needs its choice to be
    one, and not the best.
    """
    for kernel in beside_vanilla.kernels_in(package, Autotuner):
        kernel.do_bench = partial(triton.testing.do_bench, warmup=5, rep=20)


def check(shape: harness.Shape, device: torch.device, console: Console) -> bool:
    """True if both choices give the same results but for rounding, on all ranks; prints a line.

    Collective.
    """
    given = arguments(shape, device)
    seconds = beside_vanilla.first_call_s(lambda: step(*given), device)
    ours, told = results(step, *given), beside_vanilla.phases(step.records, seconds)
    n_chosen = sum(map(len, beside_vanilla.choices_in("fla")))
    beside_vanilla.forget("fla")
    quick_vanilla("fla")
    results(step.__wrapped__, *given)
    vanilla = results(step.__wrapped__, *given)
    assert n_chosen == sum(map(len, beside_vanilla.choices_in("fla"))), (
        "vanilla has tuned other kernels"
    )
    errors = {name: harness.relative_error(ours[name], vanilla[name]) for name in vanilla}
    is_good, text = beside_vanilla.worst(errors, LIMIT, REASON, device)
    largest = max(harness.largest_error(ours[name], vanilla[name]) for name in vanilla)
    for name, error in errors.items():
        beside_vanilla.say(console, f"{name}: relative error {error:.1e}")
    beside_vanilla.say(
        console,
        f"check: {told}; {len(errors)} results, largest difference of an element {largest:.1e},"
        f" {text}",
    )
    return is_good


def main() -> int:
    """Run the case at every shape; 1 if a result was wrong."""
    parser = harness.command_line(
        "A data-parallel layer of gated linear attention: check its results, compare it with"
        " vanilla triton.autotune.",
        sizes="B,T,H,K",
        script="examples/linear_attention.py",
    )
    harness.add_cases(parser)
    beside_vanilla.add_options(parser)
    options = parser.parse_args()
    if lacking := missing():
        parser.error(lacking)
    options = harness.parsed(parser)
    # Records of earlier runs would leave nothing to tune.
    os.environ["DIST_TUNE_ALWAYS_TUNE"] = "1"
    device, console = harness.join_ranks()
    is_good = True
    for shape in options.shape or [SHAPE]:
        if options.case == "check":
            is_good &= check(shape, device, console)
        else:
            given = arguments(shape, device)
            beside_vanilla.perf(
                "fla",
                partial(step, *given),
                partial(step.__wrapped__, *given),
                options.vanilla,
                console,
            )
    dist.barrier()
    dist.destroy_process_group()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
