# a script that prints
"""Relative errors of GEMM-ReduceScatter's ways to send partial results, computed in torch with the
roundings of each way.

python benchmarks/row_parallel_errors.py
"""

from __future__ import annotations

import argparse

import torch

M, N, K = 256, 256, 8192


def main() -> None:
    """Print ||C - exact|| / ||exact|| for both types and two numbers of ranks."""
    print(
        f"torch {torch.__version__}, M, N, K = {M}, {N}, {K}; float32 partial results, the"
        " operands' type, own part unrounded"
    )
    for dtype in (torch.bfloat16, torch.float16):
        for n_ranks in (2, 8):
            torch.manual_seed(0)
            a, b = (torch.randn(rows, K).to(dtype) for rows in (M, N))
            exact = a.double() @ b.double().T
            parts = [
                x.float() @ y.float().T
                for x, y in zip(a.chunk(n_ranks, 1), b.chunk(n_ranks, 1), strict=True)
            ]
            rounded = [part.to(dtype).float() for part in parts]
            sums = (sum(parts), sum(rounded), sum([parts[0], *rounded[1:]]))
            errors = [
                float((total.to(dtype).double() - exact).norm() / exact.norm())  # type: ignore[union-attr]
                for total in sums
            ]
            print(str(dtype), n_ranks, *(f"{error:.1e}" for error in errors))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    main()
