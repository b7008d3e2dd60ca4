"""The ``DIST_TUNE_*`` environment variables.

Read once per tuning by whoever starts it, never at import, so that a test or a launcher may set them late.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of one tuning. Raises pydantic's ``ValidationError`` naming the variable that cannot be read."""

    # Full names as aliases: an error about a value then names the variable.
    model_config = SettingsConfigDict(frozen=True)

    deadline_s: float = Field(default=30.0, gt=0, le=86400, allow_inf_nan=False, validation_alias="DIST_TUNE_DEADLINE_S")
    """Seconds without any progress of a rank before its peers give up, and the timeout of process groups while tuning."""
    log_dir: Path = Field(default=Path(".autotune_logs"), validation_alias="DIST_TUNE_LOG_DIR")
    """Where ``rank-<i>.log`` goes; relative to the working directory."""
    log_level: str = Field(default="DEBUG", pattern="^(?i:TRACE|DEBUG|INFO|WARNING)$", validation_alias="DIST_TUNE_LOG_LEVEL")
    """Least severe level written to the file; TRACE has a line for every launch that was timed."""
    progress: bool = Field(default=True, validation_alias="DIST_TUNE_PROGRESS")
    """Whether rank 0 says on stderr what is being tuned and what won."""
