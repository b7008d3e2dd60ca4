"""What is kept of a finished tuning.

pydantic models, because records leave the process: into the log today, into the cache and reports built on them. They
hold plain values only, never a live config, tensor or kernel.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1


class Environment(BaseModel):
    """Where a tuning ran."""

    model_config = ConfigDict(frozen=True)

    device: str
    """Name of the GPU, or of the processor."""
    world_size: int
    """Ranks that decided together."""
    python: str
    torch: str
    triton: str
    cuda: str | None


class CandidateRecord(BaseModel):
    """What came of one candidate. Times are milliseconds."""

    model_config = ConfigDict(frozen=True)

    index: int
    config: str
    """On one line, as in the log."""
    fields: dict[str, Any]
    """The same as values: the kernel's constants, ``num_warps``, ``num_stages``, ..."""
    latency_ms: float | None = None
    """Agreed time: MAX over ranks of the median launch. None if it was not measured on all ranks."""
    spread_ms: float | None = None
    """Median distance of the slowest rank's launches from their median."""
    closure_ms: float | None = None
    """MAX over ranks of the median replay in which it ran."""
    rank_latencies_ms: dict[int, float] = {}
    """Global rank -> its median launch."""
    failure: str | None = None
    """Why it was dropped, and on which rank."""
    shared_bytes: int | None = None
    n_regs: int | None = None
    n_spills: int | None = None


class TuningRecord(BaseModel):
    """One finished tuning of one site."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = SCHEMA_VERSION
    closure: str
    kernel: str
    key: str
    winner: int
    """Index into ``candidates``."""
    candidates: list[CandidateRecord]
    n_replays: int
    """Replays of the whole tuning, of all its sites, with discovery and the final run."""
    seconds: float
    environment: Environment

    @property
    def best(self) -> CandidateRecord:
        """The winner."""
        return self.candidates[self.winner]


def environment(world_size: int) -> Environment:
    """The environment of this process."""
    on_gpu = torch.cuda.is_available()
    return Environment(
        device=torch.cuda.get_device_name() if on_gpu else platform.machine(),
        world_size=world_size,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a build used from its source tree
        return "unknown"
