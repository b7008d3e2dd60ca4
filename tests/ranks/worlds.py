"""Ranks whose times do not depend on how busy the machine is: what is chosen among kernels is the same in every run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dist_tune import testing

on_ranks = partial(testing.on_ranks, clock="exact", timeout_s=110.0)


def on_fake(n: int, function: Callable[..., Any], *args: Any, is_dist: bool = True, **env: str) -> list[testing.Outcome]:
    """Real compilation."""
    # Triton 3.9 warns on the terminal if this is not set.
    return on_ranks(n, function, *args, mode="fake", is_dist=is_dist, env={"TRITON_DEFAULT_FP_FUSION": "1", **env})
