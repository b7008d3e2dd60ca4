"""A cache of its own for each test of the command line, and the answers of commands on it."""

from pathlib import Path

import pytest

from dist_tune.cache.store import Cache
from tests.cli_answers import Answers


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cache:
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache"))
    return Cache(tmp_path / "cache")


@pytest.fixture
def ask(cache: Cache, capsys: pytest.CaptureFixture[str]) -> Answers:
    return Answers(capsys)
