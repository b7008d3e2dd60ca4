"""Shared by the tests of autotuned functions on real ranks."""

from __future__ import annotations

import time
from typing import Any

import torch

from dist_tune import TunedFunction

QUICK: Any = {"n_warmup": 0, "n_repeat": 1, "cache": False}
BLOCKS = [{"block": block} for block in (1, 2, 4)]
runs_of_this_process: list[int] = []
"""Not a variable of a test's function: what a function has captured is a part of its code, and so of its cache key."""


def shape_of(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return tuple(x.shape)


def chosen(function: TunedFunction[Any, Any]) -> list[str]:
    """The configs that its tunings ended with."""
    return [record.best.config for record in function.records]


def failures(tuned: Any) -> list[str | None]:
    """Why candidates of the last record failed."""
    return [each.failure for each in tuned.records[-1].candidates]


def names(tuned: Any) -> list[tuple[str, bool]]:
    """Kernels and functions of the records, and whether they came from the cache."""
    return sorted((record.kernel.rpartition(".")[2], record.is_recalled) for record in tuned.records)


def named(name: str, function: Any) -> Any:
    """A rank that has left one call may wait in the next one, and others come late: they tell calls apart by names."""
    function.__qualname__ = name
    return function


def told(call: Any) -> tuple[str, str, float]:
    """The error that a call raises, its message, and after how many seconds; empty if there is none."""
    began = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt, too
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began
