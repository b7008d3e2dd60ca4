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

SCHEMA_VERSION = 2


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
    """MAX over ranks of the median replay in which it ran, less what other sites' candidates added to it."""
    n_replays: int = 0
    """Replays it was timed in, on the rank with the fewest."""
    rank_latencies_ms: dict[int, float] = {}
    """Global rank -> its median launch; of more than 16 ranks the slowest and the fastest."""
    failure: str | None = None
    """Why it was dropped, and on which rank."""
    left: str | None = None
    """When it left the race, being slower than others."""
    shared_bytes: int | None = None
    n_regs: int | None = None
    n_spills: int | None = None


class Seconds(BaseModel):
    """Where the time of a tuning went on this rank."""

    total: float = 0.0
    discover: float = 0.0
    """From the first miss to the roll call: the closure's first run, and the compilation that it waited for."""
    compile: float = 0.0
    """Until all candidates are loaded on all ranks."""
    race: float = 0.0
    """Replays until a few candidates are left; all of an exhaustive search."""
    finals: float = 0.0
    settle: float = 0.0
    """The run whose value is returned."""
    meetings: float = 0.0
    """In meetings, waiting for other ranks included; a part of the phases above."""


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
    closure_weight: float = 0.0
    """How far the closure's time was believed where it differs from the kernel's, from 0 (within the noise) to 1."""
    seconds: float
    """Of the whole tuning, of all its sites."""
    spent: Seconds
    meeting_seconds: list[float] = []
    """What each meeting took this rank; on the last rank to come it was for agreement alone, on others for waiting, too."""
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
