"""A config from the cache is told of once for each closure, and not where the terminal is to be quiet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_tune import autotune
from tests.function_options import BLOCKS

pytestmark = pytest.mark.once


def _work(x: int, block: int) -> int:
    return x


def _tuned() -> Any:
    """The function decorated anew, as in another process."""
    return autotune(BLOCKS, lambda x: x, n_warmup=0, n_repeat=1)(_work)


@pytest.mark.parametrize(("verbosity", "n_told"), [("normal", 1), ("quiet", 0)])
def test_a_hit_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verbosity: str, n_told: int
):
    """Of two keys that the cache has, the first is told, with the day of its tuning; neither leaves events."""
    for name in ("DIST_TUNE_LOG_DIR", "DIST_TUNE_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("DIST_TUNE_PROGRESS", raising=False)
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", verbosity)
    first = _tuned()
    assert [first(1), first(2)] == [1, 2]
    events = (tmp_path / "DIST_TUNE_LOG_DIR" / "rank-0.jsonl").read_text()
    capsys.readouterr()
    again = _tuned()
    assert [again(1), again(2), again(1)] == [1, 2, 1]
    assert [each.is_recalled for each in again.records] == [True, True]
    told = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(told) == n_told
    assert all(line.startswith("dist_tune: tests.tuning.test_hit_notice._work: 1 site from the cache, tuned 20") for line in told)
    assert (tmp_path / "DIST_TUNE_LOG_DIR" / "rank-0.jsonl").read_text() == events
