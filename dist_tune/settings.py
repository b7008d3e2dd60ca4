"""The ``DIST_TUNE_*`` environment variables.

Read once per tuning by whoever starts it, never at import, so that a test or a launcher may set them late.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of one tuning. Raises pydantic's ``ValidationError`` naming the variable that cannot be read."""

    model_config = SettingsConfigDict(env_prefix="DIST_TUNE_", frozen=True)

    deadline_s: float = Field(default=30.0, gt=0)
    """Seconds without any progress of a rank before its peers give up, and the timeout of process groups while tuning."""
    log_dir: Path = Path(".autotune_logs")
    """Where ``rank-<i>.log`` goes; relative to the working directory."""
    log_level: str = Field(default="DEBUG", pattern="^(TRACE|DEBUG|INFO|WARNING)$")
    """Least severe level written to the file; TRACE has a line for every launch that was timed."""
    progress: bool = True
    """Whether rank 0 says on stderr what is being tuned and what won."""
