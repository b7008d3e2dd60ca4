"""Vector sums: y = a + b, and total += x in place.

Each is one `triton.autotune` kernel, launched by a function that is a step of `contextual_autotune`: that tunes such kernels where
they are launched, keeps the winners on disk, and works the same where the function is called inside a larger step. The
kernel's own cache gets the winner, so a later call costs what a plain Triton launch does.

    python kernels/vector_add.py --case check
    python kernels/vector_add.py --case perf --shape 16777216
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, also where the file itself was started
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is defined, so before the imports below

import triton
import triton.language as tl

from dist_tune import contextual_autotune
from kernels.single_gpu_cases import DTYPES, Example, Problem, Shape, main, random


def configs() -> list[triton.Config]:
    """Elements of a program and its warps: 2 to 32 elements a thread, in powers of two, for other sizes do not compile."""
    if triton.knobs.runtime.interpret:
        return [triton.Config({"BLOCK_SIZE": size}, num_warps=4) for size in (256, 1024)]
    sizes = [(1024, 4), (256, 4), (512, 8), (1024, 8), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8)]
    return [triton.Config({"BLOCK_SIZE": size}, num_warps=warps) for size, warps in sizes]


@triton.jit
def _offsets(n_elements, BLOCK_SIZE: tl.constexpr):
    """What this program is to do, and which of that there is."""
    # 64 bits: a 32-bit offset wraps around at 2**31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    return offsets, offsets < n_elements


@triton.autotune(configs=configs(), key=["n_elements"])
@triton.jit
def add_kernel(a, b, y, n_elements, BLOCK_SIZE: tl.constexpr):
    """Y = a + b, each [n_elements], contiguous; summed in float32."""
    offsets, inside = _offsets(n_elements, BLOCK_SIZE)
    total = tl.load(a + offsets, mask=inside).to(tl.float32) + tl.load(b + offsets, mask=inside).to(tl.float32)
    tl.store(y + offsets, total.to(y.dtype.element_ty), mask=inside)


# Its output is its input: every trial launch would add x once more, so the tuner has to put `total` back.
@triton.autotune(configs=configs(), key=["n_elements"], restore_value=["total"])
@triton.jit
def accumulate_kernel(total, x, n_elements, BLOCK_SIZE: tl.constexpr):
    """Total += x, each [n_elements], contiguous; summed in float32."""
    offsets, inside = _offsets(n_elements, BLOCK_SIZE)
    grown = tl.load(total + offsets, mask=inside).to(tl.float32) + tl.load(x + offsets, mask=inside).to(tl.float32)
    tl.store(total + offsets, grown.to(total.dtype.element_ty), mask=inside)


@contextual_autotune()
def vector_add(a: torch.Tensor, b: torch.Tensor, config: triton.Config | None = None) -> torch.Tensor:
    """A + b, of one shape, dtype and device, contiguous. `config` is used as it is; None leaves the choice to the tuner.

    Raises:
        ValueError: operands that do not go together.
    """
    _check_alike(a, b)
    y = torch.empty_like(a)
    _launch(add_kernel, (a, b, y), config)
    return y


@contextual_autotune()
def accumulate(total: torch.Tensor, x: torch.Tensor, config: triton.Config | None = None) -> torch.Tensor:
    """Add `x` to `total` in place, and return that; operands and `config` as in `vector_add`.

    Raises:
        ValueError: operands that do not go together.
    """
    _check_alike(total, x)
    _launch(accumulate_kernel, (total, x), config)
    return total


def _launch(kernel: Any, operands: tuple[torch.Tensor, ...], config: triton.Config | None) -> None:
    n_elements = operands[0].numel()
    if not n_elements:  # a GPU takes no empty grid
        return

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(n_elements, meta["BLOCK_SIZE"]),)

    if config is None:
        kernel[grid](*operands, n_elements)
    else:
        kernel.fn[grid](*operands, n_elements, **config.all_kwargs())


def _check_alike(x: torch.Tensor, y: torch.Tensor) -> None:
    is_alike = x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
    if not is_alike or x.dtype not in DTYPES.values() or not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError(
            f"need two contiguous tensors of one shape, device and dtype ({', '.join(DTYPES)}); "
            f"got {list(x.shape)} {x.dtype} {x.device} and {list(y.shape)} {y.dtype} {y.device}"
        )


def problems(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """Both sums of vectors of `shape`, [n]."""
    (n,) = shape
    a, b = random(n, dtype=dtype, device=device), random(n, dtype=dtype, device=device).flip(0)
    running = a.clone()  # grows without end while it is timed, which takes no longer

    def expected() -> torch.Tensor:
        return a.float() + b.float()

    name, limit, n_bytes = f"{{}} {list(shape)} {dtype}", torch.finfo(dtype).eps, 3 * n * a.element_size()
    yield Problem(
        name.format("a + b"), lambda config: vector_add(a, b, config), add_kernel.configs, expected, lambda: a + b, limit, n_bytes
    )
    yield Problem(
        name.format("total += x"),
        lambda config: accumulate(a.clone(), b, config),
        accumulate_kernel.configs,
        expected,
        lambda: running.add_(b),
        limit,
        n_bytes,
        timed=lambda config: accumulate(running, b, config),
    )


EXAMPLE = Example(
    "Vector sums: check their results, compare them with torch.",
    ("n",),
    ("fp32", "bf16", "fp16"),
    check_shapes=((1,), (255,), (1024,), (1025,), (5000,)),
    perf_shapes=((1 << 16,), (1 << 20,), (10_000_019,), (1 << 26,)),
    problems=problems,
)

if __name__ == "__main__":
    from kernels import vector_add as example  # records carry this module's name, not that of __main__

    sys.exit(main(example.EXAMPLE))
