"""Vector sums: y = a + b, and total += x in place.

Each is one `triton.autotune` kernel, launched by a function that is a step of `contextual_autotune`: that tunes such kernels where
they are launched, keeps the winners on disk, and works the same where the function is called inside a larger step. The
kernel's own cache gets the winner, so a later call costs what a plain Triton launch does.

    python kernels/vector_add.py --case check
    python kernels/vector_add.py --case perf --shape 16777216
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # first: the kernel is loaded once, under the module name that its records carry
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from kernels.harness import main
    from kernels.single_gpu_cases import VECTOR_ADD

    sys.exit(main(VECTOR_ADD))

import torch
import triton
import triton.language as tl

from dist_tune import contextual_autotune

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    if not is_alike or x.dtype not in DTYPES or not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError(
            f"need two contiguous tensors of one shape, device and dtype (fp32, bf16, fp16); "
            f"got {list(x.shape)} {x.dtype} {x.device} and {list(y.shape)} {y.dtype} {y.device}"
        )
