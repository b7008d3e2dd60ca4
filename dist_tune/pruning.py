"""Rules that say of a config of a matrix product, before anything is compiled, that it is not worth
it. For ``prune_fn``: True keeps.

Know the usual names of tile sizes, what the current device can do, and the operands; nothing of
what a kernel does with them, so a rule keeps what it does not understand, and without a GPU of
NVIDIA's everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

_CLEARLY_FLOPS_PER_BYTE = 600.0
"""In 16 bits: twice what the arithmetic of an A100 (156), H200 (206), B200 (281) or H100 (295)
takes at most, by both peaks.
"""


def prune_by_shared_memory(config: Any, a: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """True if the tiles of A [M, K] and B [K, N] that a pipelined loop over K holds fit into the
    shared memory of a block.

    ``config`` is a ``triton.Config`` or a mapping in which one may be; tiles are BLOCK_SIZE_M, _N
    and _K, or BLOCK_M, _N and _K. B is the first matrix among the other arguments with as many
    columns as ``a``, or as many rows; its elements are as large as those of ``a``, if there is
    none. Keeps all that may fit: one that does not after all costs a compilation.
    """
    own, limit_bytes = _numbers_of(config), _shared_limit_bytes()
    if not {"BLOCK_M", "BLOCK_N", "BLOCK_K"} <= own.keys() or limit_bytes is None or a.dim() < 2:
        return True
    b = next(
        (
            each
            for each in (*args, *kwargs.values())
            if _is_matrix(each) and a.shape[-1] in each.shape
        ),
        None,
    )
    stage_bytes = _staged_bytes(a, "BLOCK_M", own, is_k_last=True)
    b = a if b is None else b
    stage_bytes += _staged_bytes(b, "BLOCK_N", own, is_k_last=b.shape[-1] == a.shape[-1])
    # Triton 3.6 makes num_stages buffers on Hopper, where wgmma still reads the oldest while the
    # next is filled, one more around descriptors, and one less on Ampere, and on Hopper for tiles
    # or warps too few for wgmma. One less is what all have in common.
    return stage_bytes * ((own.get("num_stages") or 1) - 1) <= limit_bytes


def prune_by_group_size_m(
    config: Any, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """True if GROUP_SIZE_M is worth a try: 1 is not, in a product that is clearly bound by
    arithmetic and runs in several waves.

    With groups of one row, blocks that run at once share one row of tiles of A and read all of B
    for it. ``a`` is [M, K]; ``b`` is [N, K] or [K, N], as fits ``a``. Keeps what is bound by
    memory, what runs in one wave, groups of other sizes, and without a GPU everything.
    """
    own = _numbers_of(config)
    if (
        own.get("GROUP_M") != 1
        or not {"BLOCK_M", "BLOCK_N"} <= own.keys()
        or not _is_matrix(a)
        or not _is_matrix(b)
    ):
        return True
    m, k = a.shape
    n_multiprocessors, size = _n_multiprocessors(a), a.element_size()
    if n_multiprocessors is None or k not in b.shape or size > 4:
        return True
    n = b.shape[0] if b.shape[1] == k else b.shape[1]
    n_rows, n_columns = -(-m // own["BLOCK_M"]), -(-n // own["BLOCK_N"])
    moved_bytes = (m * k + k * n + m * n) * size
    is_compute_bound = 2 * m * n * k > _CLEARLY_FLOPS_PER_BYTE * 2 / size * moved_bytes
    return n_rows * n_columns <= n_multiprocessors or not is_compute_bound


def _numbers_of(config: Any) -> dict[str, int]:
    """Whole numbers of a ``triton.Config``, of the first one in a mapping, or of the mapping
    itself; BLOCK_SIZE_M as BLOCK_M.
    """
    values = dict(config) if isinstance(config, Mapping) else {}
    inner = next(
        (each for each in (config, *values.values()) if isinstance(each, triton.Config)), None
    )
    if inner is not None:
        values |= inner.all_kwargs()
    values |= {
        name.replace("_SIZE_", "_"): value for name, value in values.items() if "_SIZE_" in name
    }  # these count where both are there
    return {name: value for name, value in values.items() if isinstance(value, int)}


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2


def _staged_bytes(
    operand: torch.Tensor, block: str, own: Mapping[str, int], *, is_k_last: bool
) -> int:
    """Bytes of a tile of an operand in shared memory, for one stage; 0 where it may go through
    registers instead.
    """
    size = operand.element_size()
    tile_bytes = own[block] * own["BLOCK_K"] * size
    # An asynchronous copy moves at least 4 bytes a thread. Tensor cores read 8-bit operands along K
    # only; others are turned in registers.
    is_along_k = operand.stride(-1 if is_k_last else -2) == 1
    return (
        tile_bytes
        if tile_bytes >= 4 * 32 * (own.get("num_warps") or 4) and (size > 1 or is_along_k)
        else 0
    )


def _shared_limit_bytes() -> int | None:
    """Shared memory that a block may have on the current device; None without one, and on other
    GPUs, which stage tiles in other ways.
    """
    if triton.knobs.runtime.interpret:
        return None
    if torch.cuda.is_available() and not torch.version.hip:
        # torch keeps them; Triton's driver asks the device anew each time, which takes it a
        # millisecond.
        known = getattr(
            torch.cuda.get_device_properties(torch.cuda.current_device()),
            "shared_memory_per_block_optin",
            None,
        )
        if known:
            return int(known)
    try:
        driver = triton.runtime.driver.active
        if driver.get_current_target().backend != "cuda":
            return None
        return int(
            driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]
        )
    except (RuntimeError, AttributeError, KeyError, AssertionError):
        # No driver, or one without such a limit.
        return None


def _n_multiprocessors(a: torch.Tensor) -> int | None:
    is_nvidia = a.device.type == "cuda" and not torch.version.hip
    return torch.cuda.get_device_properties(a.device).multi_processor_count if is_nvidia else None
