"""The record of a finished tuning, the key under which it is found again, and its JSON.

pydantic models, because records leave the process: into the log, the cache and reports. They hold
plain values only, and nothing in them is evaluated: a config is found again by its description
among the candidates of the program that looks it up.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from dist_tune.log import first_mistake

Scalar = bool | int | float | str | None
Milliseconds = Annotated[float, Field(ge=0)]
# Files may be damaged: no NaN, no unknown field. A NaN is written as one, so that reading refuses
# it.
_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class BrokenRecordError(ValueError):
    """No record of this version of dist_tune. The message is the reason, on one short line."""


def digest(texts: Sequence[str]) -> str:
    """Short identity of a list of texts, such as described configs."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


HARDWARE = ("device", "world_size", "ranks_per_host")
"""Fields of a ``CacheKey`` that times depend on."""
SOFTWARE = ("torch", "triton", "cuda")
"""Fields that DIST_TUNE_VERSION_CHECK=0 leaves out of the key."""


class _Machine(BaseModel):
    model_config = _STRICT

    device: str
    """Name of the GPU or processor."""
    world_size: int
    """Ranks of the tuning."""
    ranks_per_host: int
    """Ranks of the tuning on each machine."""
    torch: str
    """Version."""
    triton: str
    """Version."""
    cuda: str | None
    """Version that torch was built with; of AMD's and Intel's runtimes with the name, as "hip
    6.4.2"; None without one.
    """


class Environment(_Machine):
    """Hardware and software of a tuning."""

    device_count: int
    """GPUs that a process sees.

    Not in the key: it changes when a job is resized, and the group of the step may be the same.
    """
    python: str
    """Version, as "3.11". Not in the key, because no time depends on it."""

    @property
    def keyed(self) -> dict[str, Any]:
        """The fields that a ``CacheKey`` has."""
        return self.model_dump(include={*HARDWARE, *SOFTWARE})


class CacheKey(_Machine):
    """A record is used again if all of these are equal."""

    name: str
    """Name of the kernel or function with its module."""
    source: str
    """Digest of its code and of all it calls."""
    key: str
    """Tuning key: sizes, dtypes."""
    candidates: str
    """Digest of the described candidates, in order."""


class CandidateRecord(BaseModel):
    """The result of one candidate. Times are milliseconds."""

    model_config = _STRICT

    index: int
    """Place in the list of candidates."""
    config: str
    """On one line, as in the log."""
    fields: dict[str, Scalar]
    """The config as values: the kernel's constants, ``num_warps``, ``num_stages``, ..."""
    latency_ms: Milliseconds | None = None
    """Reduced time: MAX over ranks of the median launch.

    None if it was not measured on all ranks.
    """
    spread_ms: Milliseconds | None = None
    """Median distance of the slowest rank's launches from their median."""
    closure_ms: float | None = None
    """MAX over ranks of the median replay in which it ran, less the effect of other sites'
    candidates.
    """
    n_replays: int = 0
    """Timed replays on the rank with the fewest."""
    rank_latencies_ms: dict[int, Milliseconds] = {}
    """Global rank -> its median launch; of more than 16 ranks the slowest and the fastest."""
    failure: str | None = None
    """Reason why it was dropped, with the rank."""
    left: str | None = None
    """Part of the search after which it ran no more, as "left the race after round 1"; None for
    those that stayed to the end.
    """
    equal_to: int | None = None
    """The candidate of lower index with the same kernel, which raced for both: the times are that
    one's.
    """
    shared_bytes: int | None = None
    """Bytes of shared memory that a program takes; None where it is not known."""
    n_regs: int | None = None
    """Registers of a thread."""
    n_spills: int | None = None
    """Registers of a thread that are spilled to memory."""

    @property
    def known_spread_ms(self) -> float | None:
        """``spread_ms``; None where it was timed in one replay, because one sample has no
        spread.
        """
        return self.spread_ms if self.n_replays > 1 else None


class Seconds(BaseModel):
    """Time of a tuning on this rank, by phase."""

    model_config = _STRICT | ConfigDict(frozen=False)

    total: float = 0.0
    """Duration of the whole tuning."""
    discover: float = 0.0
    """From the first miss on: the step's first run, and the compilation that it waited for."""
    compile: float = 0.0
    """Until all candidates are loaded on all ranks."""
    race: float = 0.0
    """Replays until a few candidates are left; all replays of an exhaustive search."""
    finals: float = 0.0
    """Replays that compare the last few candidates."""
    apply: float = 0.0
    """The apply phase: the run whose value is returned."""
    meetings: float = 0.0
    """In exchanges between ranks, including the wait for the last one; a part of the phases above.
    """
    compile_cpu: float = 0.0
    """CPU-seconds of compilation over all threads of this rank; of ptxas, a child process, the wall
    time.
    """


class TuningRecord(BaseModel):
    """One finished tuning of one site."""

    model_config = _STRICT

    schema_version: Literal[4] = 4
    closure: str
    """Name of the function that was replayed."""
    kernel: str
    """Name of the kernel or function that was tuned, with its module."""
    key: str
    """Tuning key as text: sizes, dtypes."""
    source: str
    """Digest of its code and of all it calls; empty on a rank that never met the site."""
    winner: int
    """Index into ``candidates``."""
    reason: str = ""
    """The reason of the choice in words, as it was made; empty in records of earlier versions."""
    candidates: list[CandidateRecord]
    """All candidates, by index."""
    n_replays: int
    """Replays of the whole tuning, of all its sites, with discovery and the final run."""
    n_variants: int = 1
    """Kernels of each candidate, on the rank with the most: as for an int that is 1, a multiple of
    16, or neither.
    """
    step_ms: tuple[Milliseconds | None, Milliseconds | None] | None = None
    """The step before the tuning and with its winners, by calls of the job, on the slowest rank;
    None where replays were timed, of which ``closure_ms`` tells.
    """
    closure_weight: float = 0.0
    """Weight of the step's time where it differs from the kernel's, from 0 (within the noise) to 1.
    """
    seconds: float
    """Duration of the whole tuning, of all its sites."""
    spent: Seconds
    """Seconds by phase."""
    meeting_seconds: list[float] = []
    """Duration of each exchange on this rank, including the wait for the last rank."""
    environment: Environment
    """Hardware and versions."""
    tuned_at: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    """End of the tuning."""
    is_recalled: bool = Field(default=False, exclude=True)
    """Found in the cache by this call. Not stored."""

    @model_validator(mode="after")
    def _has_a_winner(self) -> Self:
        if not 0 <= self.winner < len(self.candidates) or self.best.failure is not None:
            raise ValueError(f"winner {self.winner} is no candidate that runs")
        return self

    @property
    def best(self) -> CandidateRecord:
        """The winner."""
        return self.candidates[self.winner]

    @property
    def cache_key(self) -> CacheKey:
        """The key under which it is stored."""
        described = digest([candidate.config for candidate in self.candidates])
        return CacheKey(
            name=self.kernel,
            source=self.source,
            key=self.key,
            candidates=described,
            **self.environment.keyed,
        )

    @property
    def n_samples(self) -> int:
        """Timed replays of all candidates: of two records of one key, the one with more is kept."""
        return sum(
            candidate.n_replays for candidate in self.candidates if candidate.equal_to is None
        )


def record_bytes(record: TuningRecord) -> bytes:
    """The record as one line of JSON without its line end.

    Raises:
        BrokenRecordError: it could not be read back, as with a NaN that was put into one of its
            dicts.
    """
    try:
        content = record.model_dump_json().encode()
    except ValueError as error:  # a string that is no text
        raise BrokenRecordError(first_mistake(error)) from error
    record_in(content)
    return content


def record_in(content: bytes) -> TuningRecord:
    """The record in a file's content. Nothing is evaluated.

    Raises:
        BrokenRecordError: it holds none, or one of another version of dist_tune.
    """
    try:
        return TuningRecord.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise BrokenRecordError(first_mistake(error)) from None  # the error holds the whole file


def environment(world_size: int, ranks_per_host: int) -> Environment:
    """The environment of this process."""
    import torch  # here, because records are read without it

    from dist_tune import accelerator
    from dist_tune.configs import triton_version

    on_gpu = accelerator.api.is_available()
    return Environment(
        device=accelerator.name() if on_gpu else platform.machine(),
        device_count=accelerator.api.device_count() if on_gpu else 0,
        world_size=world_size,
        ranks_per_host=ranks_per_host,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        torch=torch.__version__,
        triton=triton_version(),
        cuda=accelerator.runtime(),
    )
