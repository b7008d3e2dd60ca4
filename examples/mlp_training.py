"""An MLP in a data-parallel training loop, tuned whole by one decorator; its activation is a
kernel, forward and backward.

The step takes the next batch, steps its optimizer and its schedule: it may not be repeated, and is
tuned in its own calls, each of which counts. At the end parameters and losses are compared with
those of the same loop without a tuner, to the bit.

    launch/launch.sh examples/mlp_training.py
    launch/launch.sh examples/mlp_training.py --width 4096 --rows 2048 --steps 2000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import examples  # noqa: F401  # chooses the interpreter where there is no GPU
from dist_tune import contextual_autotune
from kernels import harness

Step = Callable[[], torch.Tensor]


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": block}, num_warps=warps)
        for block in (1024, 4096)
        for warps in (4, 8)
    ],
    key=["n", "IS_BACKWARD"],
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
    squared_relu_kernel[lambda config: (triton.cdiv(x.numel(), config["BLOCK"]),)](
        x, grad.contiguous(), y, x.numel(), is_backward
    )
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


def batches(rows: int, width: int) -> Iterator[torch.Tensor]:
    """Inputs and targets of this rank, of shape (rows, 2, width), without end."""
    dice = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randn(8 * rows, 2, width, generator=dice)
    while True:
        for (batch,) in DataLoader(TensorDataset(data), rows, shuffle=True, generator=dice):
            yield batch


def train(
    options: argparse.Namespace, device: torch.device, tuner: Callable[[Step], Step]
) -> tuple[list[torch.Tensor], int]:
    """Losses of all steps and the parameters at the end; number of the step that ended the tuning,
    0 if none did.
    """
    torch.manual_seed(0)
    up, down = (
        nn.Linear(*sizes, bias=False, device=device)
        for sizes in ((options.width, 4 * options.width), (4 * options.width, options.width))
    )
    parameters = [up.weight, down.weight]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    data = batches(options.rows, options.width)

    @tuner
    def step() -> torch.Tensor:
        x, target = next(data).to(device).unbind(1)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(down(SquaredRelu.apply(up(x))), target)
        loss.backward()
        for each in parameters:
            dist.all_reduce(each.grad)
        optimizer.step()
        schedule.step()
        return loss.detach()

    losses, n_tuning = [], 0
    for number in range(1, options.steps + 1):
        losses.append(step())
        n_tuning = n_tuning or number * bool(getattr(step, "records", ()))
    return [torch.stack(losses), *parameters], n_tuning


def main() -> None:
    """Train twice, tuned and untuned, and compare what was trained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--width",
        type=int,
        default=64,
        help="of input and output; the hidden layer is four times as wide",
    )
    parser.add_argument("--rows", type=int, default=32, help="of a batch, on each rank")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    device, console = harness.join_ranks()
    tuned, n_tuning = train(options, device, contextual_autotune(is_dist=True))
    found = [(key[1], config) for key, config in squared_relu_kernel.cache.items()]
    directions = {True: "backward", False: "forward"}
    configs = ", ".join(
        f"{directions[is_backward]} BLOCK={config.kwargs['BLOCK']}" for is_backward, config in found
    )
    squared_relu_kernel.cache.clear()
    plain, _ = train(
        options, device, contextual_autotune(is_dist=True, max_slowdown=0, cache=False)
    )  # with the first config
    is_same = all(map(torch.equal, tuned, plain))
    ended = (
        f"tuned in {n_tuning} of {options.steps} steps"
        if n_tuning
        else f"not tuned to the end in {options.steps} steps"
    )
    are = "are" if is_same else "ARE NOT"
    console.print(
        f"{ended}; losses and parameters {are} those of the untuned loop; {configs}"
    )  # on rank 0
    dist.destroy_process_group()
    sys.exit(not (is_same and n_tuning))


if __name__ == "__main__":
    main()
