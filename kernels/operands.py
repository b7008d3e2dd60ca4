"""What the products and the steps between ranks share: their operands, and the group of a step.

Knows no kernel.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton

from dist_tune import to_hashable

Shape = tuple[int, ...]
TMA_ALIGNMENT_BYTES = 16
"""What a tensor descriptor asks of its base address and of its row pitch."""


def check_operands(
    a: torch.Tensor, b: torch.Tensor, shapes: str = "A as [M, K] and B as [N, K]", n_dims: int = 2
) -> None:
    """Raise if A @ B.T cannot be computed; B has `n_dims` dimensions, the last two of which are its
    rows and columns.

    Raises:
        ValueError: with what is needed and what was given.
    """
    if a.dim() != 2 or b.dim() != n_dims or a.shape[-1] != b.shape[-1]:
        needed = f"need {shapes}"
    elif (
        a.dtype not in (torch.bfloat16, torch.float16) or b.dtype != a.dtype or b.device != a.device
    ):
        needed = "need bfloat16 or float16, the same for both, on one device"
    elif not a.numel() or not b.numel():
        needed = "nothing to multiply"
    else:
        return
    raise ValueError(
        f"{needed}; got {list(a.shape)} {a.dtype} {a.device} and {list(b.shape)} {b.dtype}"
        f" {b.device}"
    )


def loadable(operand: torch.Tensor) -> torch.Tensor:
    """`operand` as a tensor descriptor can read it: contiguous, aligned, K padded with zeros to a
    multiple of 16 bytes.
    """
    alignment = TMA_ALIGNMENT_BYTES // operand.element_size()
    if operand.shape[1] % alignment:
        return F.pad(operand, (0, -operand.shape[1] % alignment))
    if not operand.is_contiguous() or operand.data_ptr() % TMA_ALIGNMENT_BYTES:
        return operand.clone(memory_format=torch.contiguous_format)
    return operand


def output_for(like: torch.Tensor, shape: Shape, out: torch.Tensor | None) -> torch.Tensor:
    """`out` if it is given and fits, or else a new tensor of a shape, with the dtype and device of
    another.

    Raises:
        ValueError: it does not fit.
    """
    if out is None:
        return like.new_empty(shape)
    if (
        out.shape != shape
        or out.dtype != like.dtype
        or out.device != like.device
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"need out as contiguous {list(shape)} {like.dtype} on {like.device}; got"
            f" {list(out.shape)} {out.dtype}"
        )
    return out


class GroupStep:
    """A step on a process group; calling it queues the step on the current stream and returns its
    result.

    Collective: every rank of the group calls it, with the same shapes and dtype, and with the same
    routing if there is one. Sizes can be any number from 1 that ranks can share; where the depth of
    a product is no multiple of 8, both operands are padded first, which costs a copy of each.

    Args:
        group: the ranks that hold the operands; the default group if None.
        config: the product's launch config. None: the one in its kernel's cache, tuned on a miss by
            the tuner around the step.

    Attributes:
        rank: this rank in the group.
        n_ranks: W, the ranks of the group.
        n_local_ranks: how many of them share a machine, at most.
    """

    partial_dtype: torch.dtype | None = None
    """The type in which partial results travel; None: the operands' type."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, config: triton.Config | None = None
    ) -> None:
        self.config = config
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError(
                f"{type(self).__name__} needs a process group: call"
                " torch.distributed.init_process_group first"
            )
        self.group, self.rank, self.n_ranks = (
            group,
            dist.get_rank(group),
            dist.get_world_size(group),
        )
        # Torchrun numbers ranks host by host.
        n_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self.n_local_ranks = max(
            Counter(rank // n_per_host for rank in dist.get_process_group_ranks(group)).values()
        )


def key_fn(
    a: torch.Tensor, b: torch.Tensor, ctx: GroupStep, *args: Any, **kwargs: Any
) -> tuple[Hashable, ...]:
    """Calls of a step that share a config: the same operands and travelling type, on as many ranks,
    spread alike.
    """
    return to_hashable(a), to_hashable(b), str(ctx.partial_dtype), ctx.n_ranks, ctx.n_local_ranks
