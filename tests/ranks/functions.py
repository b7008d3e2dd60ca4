"""Shared by the tests of autotuned functions on real ranks."""

from __future__ import annotations

from typing import Any

import torch

from dist_tune import TunedFunction

QUICK: Any = {"n_warmup": 0, "n_repeat": 1}
BLOCKS = [{"block": block} for block in (1, 2, 4)]
Results = list[dict[str, Any]]
"""The results of each rank, by scenario."""
runs_of_this_process: list[int] = []
"""Not a variable of a test's function: what a function has captured is a part of its code, and so of its cache key."""


def shape_of(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return tuple(x.shape)


def chosen(function: TunedFunction[Any, Any]) -> list[str]:
    """The configs that its tunings ended with."""
    return [record.best.config for record in function.records]
