"""The versions of torch and Triton that this release is tested with."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dist_tune import __version__

TESTED = {"torch": ("2.11", "2.13"), "triton": ("3.6", "3.9")}
"""Package -> oldest and newest version. Older ones are not installed beside this package."""


def newer_than_tested(installed: Mapping[str, str]) -> str:
    """A sentence about the packages whose version is above the tested ones, by its first two numbers; empty if there are none."""
    newer = [name for name, version in installed.items() if _numbers(version) > _numbers(TESTED[name][1])]
    if not newer:
        return ""
    told = " and ".join(f"{name} {installed[name]} ({' to '.join(TESTED[name])})" for name in newer)
    return (
        f"newer than dist_tune {__version__} is tested with: {told}. If a tuning fails, try a tested version; dist-tune doctor tells more"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
