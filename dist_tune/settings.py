"""The ``DIST_TUNE_*`` environment variables.

Read at the start of each tuning, never at import, so that a test or a launcher may set them late.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of one tuning. Raises pydantic's ``ValidationError`` naming the variable that cannot be read."""

    # Full names as aliases: an error about a value then names the variable.
    model_config = SettingsConfigDict(frozen=True)

    deadline_s: float = Field(default=30.0, gt=0, le=86400, allow_inf_nan=False, validation_alias="DIST_TUNE_DEADLINE_S")
    """Seconds without any progress of a rank before its peers give up, and the timeout of process groups while tuning."""
    log_dir: Path = Field(default=Path(".autotune_logs"), validation_alias="DIST_TUNE_LOG_DIR")
    """Folder of ``rank-<i>.log``; relative to the working directory."""
    log_level: str = Field(default="DEBUG", pattern="^(?i:TRACE|DEBUG|INFO|WARNING)$", validation_alias="DIST_TUNE_LOG_LEVEL")
    """Least severe level written to the file; TRACE has a line for every launch that was timed."""
    progress: bool = Field(default=True, validation_alias="DIST_TUNE_PROGRESS")
    """True: rank 0 writes to stderr what is being tuned and what won."""
    cache_dir: Path = Field(default=Path("~/.dist_tune/autotune"), validation_alias="DIST_TUNE_CACHE_DIR")
    """Folder of the records of finished tunings."""
    always_tune: bool = Field(default=False, validation_alias=AliasChoices("DIST_TUNE_ALWAYS_TUNE", "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE"))
    """True: tune although there is a record, and replace it."""
    version_check: bool = Field(
        default=True, validation_alias=AliasChoices("DIST_TUNE_VERSION_CHECK", "TRITON_DIST_AUTOTUNE_VERSION_CHECK")
    )
    """True: a record counts only with the versions of Python, torch, triton and CUDA that it was made with."""
    require_cache: bool = Field(default=False, validation_alias="DIST_TUNE_REQUIRE_CACHE")
    """True: a miss is an error and not a tuning, for jobs that must not spend time, or not choose."""
