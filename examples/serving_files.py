"""Files of configs for a serving engine: tuned ahead for the numbers of tokens that it serves, read
where it launches.

python examples/serving_files.py --tune --folder configs     # once, on the GPU that will serve;
shared out over ranks under torchrun python examples/serving_files.py --folder configs            #
the engine: no tuning, one look-up for each request
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
import triton.language as tl

import examples  # noqa: F401  # chooses the interpreter where there is no GPU
from dist_tune.offline import load_config, small_medium_large, tune_and_save_configs

FILE = "SILU_AND_MUL.json"
SPACE = [{"BLOCK": block, "num_warps": warps} for block in (1024, 4096) for warps in (4, 8)]
# The interpreter takes its time.
DEVICE, WIDTH = ("cuda", 4096) if torch.cuda.is_available() else ("cpu", 8)


@triton.jit
def silu_and_mul_kernel(gate_ptr, up_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """silu(gate) * up, element by element."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < n)
    tl.store(
        y_ptr + at, gate / (1.0 + tl.exp(-gate)) * tl.load(up_ptr + at, mask=at < n), mask=at < n
    )


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """silu(gate) * up of the same shape, launched with ``config``."""
    y = torch.empty_like(gate)
    silu_and_mul_kernel[(triton.cdiv(y.numel(), config["BLOCK"]),)](
        gate, up, y, y.numel(), **config
    )
    return y


def make_for_tokens(
    n_tokens: int,
) -> Callable[[dict[str, Any]], tuple[Callable[[], torch.Tensor], torch.Tensor]]:
    """Problem of one size: from a config to a run and what it is to return."""
    gate, up = (torch.randn(n_tokens, WIDTH, device=DEVICE) for _ in "gu")
    expected = torch.nn.functional.silu(gate) * up
    return lambda config: (lambda: silu_and_mul(gate, up, config), expected)


@cache
def config_of(folder: str, n_tokens: int) -> dict[str, Any]:
    """The engine's look-up: the config of the class of sizes, from the file."""
    return load_config(f"{folder}/{FILE}", M=n_tokens)


def main() -> None:
    """Tune and write the file, or serve some requests with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="write the file; without it: serve")
    parser.add_argument("--folder", default="configs")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[16, 512, 4096],
        help="tuned or served, one after the other",
    )
    options = parser.parse_args()
    if options.tune:
        tune_and_save_configs(
            options.tokens,
            make_for_tokens,
            SPACE,
            json_file_name=FILE,
            save_path=options.folder,
            classes=small_medium_large(),
            num_iters=3,
        )
        print(f"wrote {options.folder}/{FILE}")
        return
    for n_tokens in options.tokens:
        gate, up = (torch.randn(n_tokens, WIDTH, device=DEVICE) for _ in "gu")
        y = silu_and_mul(gate, up, config_of(options.folder, n_tokens))
        torch.testing.assert_close(y, torch.nn.functional.silu(gate) * up)
        print(f"{n_tokens} tokens: {config_of(options.folder, n_tokens)}")


if __name__ == "__main__":
    main()
