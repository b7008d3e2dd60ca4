"""Configs that never return, for the tests of the watchdog."""

from __future__ import annotations

import threading
import time
from typing import Any

import triton

from dist_tune.testing import Outcome
from tests.steps import autotuned

BLOCKS = (16, 32, 64, 128)
free = threading.Event()
"""Ends the hang "event" of this process."""


def threads_left() -> list[str]:
    """Names of the watchdog's threads in this process."""
    return [each.name for each in threading.enumerate() if "watchdog" in each.name]


def left_with(outcome: Outcome, code: int) -> None:
    """Assert that the rank ended its own process with this exit code."""
    assert outcome.error == "Died", f"{outcome.error} {outcome.value}: {outcome.message}\n{outcome.notes}"
    assert f"exit code {code}" in outcome.message, outcome.message


def hang(how: str) -> None:
    """Never return, or until this process is free."""
    free.wait() if how == "event" else time.sleep(1000)


def stuck_kernel(how: str, index: int, at_launch: int) -> Any:
    """A kernel of four configs, one of which hangs at its n-th launch in this process (0: never)."""
    n_launches = 0

    def hook(full: dict[str, Any]) -> None:
        nonlocal n_launches
        if full["BLOCK"] == BLOCKS[index]:
            n_launches += 1
            if n_launches == at_launch:
                hang(how)

    return autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook) for block in BLOCKS])
