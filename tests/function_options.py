"""What the tests of calls of a function that has configs share: its configs, options and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

QUICK: Any = {"n_warmup": 0, "n_repeat": 1, "cache": False}
BLOCKS = [{"block": block} for block in (1, 2, 4)]


def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No progress, and folders of the test's own."""
    for name, value in {"VERBOSITY": "quiet", "LOG_DIR": str(tmp_path / "logs"), "CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(f"DIST_TUNE_{name}", value)
