"""An MLP in a data-parallel training loop with two batch sizes; its activation is a kernel of triton.autotune, forward and backward.

The decorator stands above what may be repeated: forward, backward and the all-reduce of gradients. The optimizer steps outside of it. Each
batch size is tuned once, in the first step that has it. At the end the loss is compared with that of the same loop without a tuner.

    launch/launch.sh examples/mlp_training.py
    launch/launch.sh examples/mlp_training.py --width 4096 --batches 512 2048
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import nn

import examples  # noqa: F401  # chooses the interpreter where there is no GPU
from dist_tune import contextual_autotune
from kernels import harness


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block in (1024, 4096) for warps in (4, 8)], key=["n", "IS_BACKWARD"]
)
@triton.jit
def squared_relu_kernel(x_ptr, grad_ptr, y_ptr, n, IS_BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    """relu(x)**2, or its gradient times the one that comes in."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.maximum(tl.load(x_ptr + at, mask=at < n), 0.0)
    y = 2.0 * x * tl.load(grad_ptr + at, mask=at < n) if IS_BACKWARD else x * x
    tl.store(y_ptr + at, y, mask=at < n)


def _launch(x: torch.Tensor, grad: torch.Tensor, is_backward: bool) -> torch.Tensor:
    y = torch.empty_like(x)
    squared_relu_kernel[lambda config: (triton.cdiv(x.numel(), config["BLOCK"]),)](x, grad.contiguous(), y, x.numel(), is_backward)
    return y


class SquaredRelu(torch.autograd.Function):
    """The activation, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """relu(x)**2 of the same shape."""
        ctx.save_for_backward(x)
        return _launch(x, x, False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of x."""
        (x,) = ctx.saved_tensors
        return _launch(x, grad, True)


def train(options: argparse.Namespace, device: torch.device, tuner: Callable[[Callable[..., float]], Callable[..., float]]) -> list[float]:
    """Losses of all steps."""
    torch.manual_seed(0)
    up, down = (
        nn.Linear(*sizes, bias=False, device=device) for sizes in ((options.width, 4 * options.width), (4 * options.width, options.width))
    )
    parameters = [up.weight, down.weight]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    @tuner
    def gradients(x: torch.Tensor, target: torch.Tensor) -> float:
        loss = nn.functional.mse_loss(down(SquaredRelu.apply(up(x))), target)
        loss.backward()
        for each in parameters:
            dist.all_reduce(each.grad)
        return loss.item()

    def step(x: torch.Tensor, target: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = gradients(x, target)
        optimizer.step()
        return loss

    batches = [options.batches[i % len(options.batches)] for i in range(options.steps)]
    return [step(*(torch.randn(n, options.width, device=device) for _ in "xt")) for n in batches]


def main() -> None:
    """Train twice, tuned and untuned, and compare the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64, help="of input and output; the hidden layer is four times as wide")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64], help="rows on each rank, taken in turn")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    device, console = harness.join_ranks()
    tuned = train(options, device, contextual_autotune(is_dist=True))
    plain = train(options, device, lambda step: step)
    torch.testing.assert_close(torch.tensor(tuned), torch.tensor(plain), rtol=1e-4, atol=1e-5)
    console.print(f"{len(squared_relu_kernel.cache)} keys tuned; last loss {tuned[-1]:.4f}, untuned {plain[-1]:.4f}")  # on rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
