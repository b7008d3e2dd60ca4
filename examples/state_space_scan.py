"""A state-space model's chunked scan (as in Mamba 2), forward and backward, on all ranks that
torchrun starts: 15 sites, 110 configs.

The host reads `best_config` of three kernels right after their launches, as public libraries do;
other configs zero what they add to in a `pre_hook`. The kernels and their launches stand in
state_space_forward.py and state_space_backward.py and know nothing of tuning.

- check: results and gradients of the tuning call and of the next one, beside a recurrence in plain
  torch
- tune: seconds by phase
- perf: the first call, the step on the device and its host time, beside the same step under vanilla
  `triton.autotune`

    launch/launch.sh examples/state_space_scan.py --case check
    launch/launch.sh examples/state_space_scan.py --case tune --shape 2,4096,16,64,128,256
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F

from examples import beside_vanilla  # before triton: without a GPU it chooses the interpreter

from rich.console import Console  # isort: skip

from dist_tune import contextual_autotune
from examples.state_space_backward import backward
from examples.state_space_forward import forward
from kernels import harness

SIZES = "B,L,H,P,N,Q"
NAMES = ("x", "dt", "a", "bias", "d", "b", "c")
N_SHARED = 3
"""Of the gradients those of a, bias and d, which all ranks share, are reduced."""


class ChunkedScan(torch.autograd.Function):
    """Y of x [B, L, H, P], dt [B, L, H], a, bias, d [H], b and c [B, L, N], in chunks of q rows; L
    is a multiple of q, a power of two.
    """

    @staticmethod
    def forward(ctx: Any, q: int, *inputs: torch.Tensor) -> torch.Tensor:
        """The scan; keeps what the backward pass needs."""
        # Chunks of all sequences one after the other.
        chunked = tuple(
            each if each.dim() == 1 else each.reshape(-1, q, *each.shape[2:]) for each in inputs
        )
        x, dt, a, bias, d, b, c = chunked
        ctx.n_chunks = inputs[0].shape[1] // q
        y, kept = forward(x, dt, (a, bias, d), b, c, ctx.n_chunks)
        ctx.save_for_backward(*chunked, *kept)
        result: torch.Tensor = y.view_as(inputs[0])
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gradients of all inputs but the size of the chunks."""
        saved, (dy,) = ctx.saved_tensors, gradients
        inputs, kept = saved[: len(NAMES)], saved[len(NAMES) :]
        found = backward(dy.contiguous().view_as(inputs[0]), inputs, kept, ctx.n_chunks)
        shape = dy.shape[:2]
        return None, *(
            each if each.dim() == 1 else each.view(*shape, *each.shape[2:]) for each in found
        )


def gradients_of(
    y: torch.Tensor, inputs: tuple[torch.Tensor, ...], dy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients of all inputs, those of what ranks share summed over ranks. Collective."""
    gradients = torch.autograd.grad(y, inputs, dy)
    for gradient in gradients[2 : 2 + N_SHARED]:
        dist.all_reduce(gradient)
    return y.detach(), *gradients


@contextual_autotune(is_dist=True)
def step(q: int, inputs: tuple[torch.Tensor, ...], dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The scan's result and its gradients. Collective."""
    return gradients_of(ChunkedScan.apply(q, *inputs), inputs, dy)


def recurrence(inputs: tuple[torch.Tensor, ...], dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same, one row of time after the other, in float32. Collective."""
    wide = tuple(each.detach().float().requires_grad_() for each in inputs)
    x, dt, a, bias, d, b, c = wide
    steps, state, rows = (
        F.softplus(dt + bias),
        x.new_zeros(x.shape[0], *x.shape[2:], b.shape[2]),
        [],
    )
    for t in range(x.shape[1]):
        added = (steps[:, t, :, None] * x[:, t])[..., None] * b[:, t, None, None, :]
        state = torch.exp(steps[:, t] * a)[..., None, None] * state + added
        rows.append((state * c[:, t, None, None, :]).sum(-1) + d[:, None] * x[:, t])
    return gradients_of(torch.stack(rows, 1), wide, dy.float())


def arguments(
    shape: harness.Shape, dtype: torch.dtype, device: torch.device
) -> tuple[int, tuple[torch.Tensor, ...], torch.Tensor]:
    """Arguments of a step: x, dt, b, c and dy differ between ranks; a, bias and d do not."""
    n, length, h, p, state_size, q = shape
    if length % q or q & (q - 1) or q < 16 or min(p, state_size) < 16 or p & (p - 1):
        raise ValueError(
            f"{SIZES} need L as a multiple of Q, Q and P as powers of two from 16, N from 16; got"
            f" {','.join(map(str, shape))}"
        )

    def draw(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(of)

    x, dt, b, c = (
        draw(n, length, h, p),
        draw(n, length, h, of=torch.float32),
        draw(n, length, state_size),
        draw(n, length, state_size),
    )
    a, bias, d = (
        torch.linspace(*ends, h, device=device) for ends in ((-1.0, -0.2), (-3.0, -1.0), (0.5, 1.5))
    )
    return (
        q,
        tuple(each.requires_grad_() for each in (x, dt, a, bias, d, b, c)),
        draw(n, length, h, p),
    )


def limit_of(dtype: torch.dtype, device: torch.device) -> tuple[float, str]:
    """The largest relative error of a right result, and why it may be so large."""
    if dtype == torch.bfloat16:
        return (
            3e-2,
            (
                "tiles are rounded to bfloat16 (2**-9) before each of four products in a row, and"
                " sums of decays cancel"
            ),
        )
    if device.type == "cuda":
        return (
            1e-2,
            "products of float32 are in TF32 (2**-11), four in a row, and sums of decays cancel",
        )
    return 1e-4, "float32 throughout (2**-24), sums of thousands of terms in another order"


def check(shape: harness.Shape, dtype: torch.dtype, device: torch.device, console: Console) -> bool:
    """True if the call that tunes and the next one are right on all ranks; prints a line.

    Collective.
    """
    given = arguments(shape, dtype, device)
    expected, (limit, reason) = recurrence(*given[1:]), limit_of(dtype, device)
    errors: dict[str, float] = {}
    for call in ("tuning call", "later call"):
        for name, got, right in zip(
            ("y", *(f"d{name}" for name in NAMES)), step(*given), expected, strict=True
        ):
            errors[f"{call}, {name}"] = harness.relative_error(got, right)
    n_sites = len(step.records)
    is_good, text = beside_vanilla.worst(errors, limit, reason, device)
    beside_vanilla.say(
        console, f"check: {SIZES}={','.join(map(str, shape))} {dtype}, {n_sites} sites, {text}"
    )
    return is_good


def tune(shape: harness.Shape, dtype: torch.dtype, device: torch.device, console: Console) -> bool:
    """Tune with nothing compiled; prints the sites and the seconds of each phase. Collective."""
    given = arguments(shape, dtype, device)
    with beside_vanilla.cold("examples"):
        seconds = beside_vanilla.first_call_s(lambda: step(*given), device)
    console.print(beside_vanilla.site_table(step.records))
    beside_vanilla.say(console, f"tune: {beside_vanilla.phases(step.records, seconds)}")
    return True


def main() -> int:
    """Run the case at every shape and dtype; 1 if a result was wrong."""
    parser = harness.command_line(
        "A state-space model's chunked scan: check its results, tune it, compare it with vanilla"
        " triton.autotune.",
        sizes=SIZES,
        dtypes=("bf16", "fp32"),
        script="examples/state_space_scan.py",
    )
    harness.add_cases(parser, "tune")
    beside_vanilla.add_options(parser)
    options: argparse.Namespace = harness.parsed(parser)
    # Records of earlier runs would leave nothing to tune.
    os.environ["DIST_TUNE_ALWAYS_TUNE"] = "1"
    device, console = harness.join_ranks()
    is_small, results = options.case == "check" or device.type == "cpu", []
    default = (2, 512, 4, 64, 128, 128) if is_small else (2, 4096, 16, 64, 128, 256)
    for shape, dtype in harness.chosen(
        options, [default if device.type == "cuda" else (1, 64, 1, 16, 16, 32)]
    ):
        step.records.clear()
        if options.case == "perf":
            given = arguments(shape, dtype, device)
            beside_vanilla.perf(
                "examples",
                partial(step, *given),
                partial(step.__wrapped__, *given),
                options.vanilla,
                console,
            )
        else:
            results.append(
                {"check": check, "tune": tune}[options.case](shape, dtype, device, console)
            )
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
