"""A config from the cache is checked once where the function has a check: what was right when it was tuned may be wrong now."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import CacheMissError, autotune, contextual_autotune
from dist_tune.testing import values
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once
BLOCKS = [{"block": block} for block in (1, 2, 4)]
state: dict[str, Any] = {"wrong": (), "asked": 0, "ran": []}
"""Not seen by the fingerprint: lists, dicts and what is in them may change."""


def _reference(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    state["asked"] += 1
    y = x.clone()
    if dist.is_initialized():
        dist.all_reduce(y)
    return y + c


def _step(x: torch.Tensor, c: torch.Tensor, block: int) -> torch.Tensor:
    state["ran"].append(block)
    y = x.clone()
    if dist.is_initialized():
        dist.all_reduce(y)
    return c.copy_(y + c + 30 * (block in state["wrong"]))


def _tuned() -> tuple[Any, list[float], io.StringIO]:
    state.update(asked=0, ran=[])
    function = autotune(BLOCKS, None, check=_reference, n_warmup=0, n_repeat=1)(_step)
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        return function, function(torch.ones(2), torch.ones(2)).tolist(), terminal


def _recalled(rank: int, folder: str, has_records: bool) -> Any:
    os.environ["DIST_TUNE_CACHE_DIR"] = f"{folder}/{rank if not has_records else 0}"
    first, *_ = _tuned()
    winner = first.records[0].best.fields["block"]
    if not has_records and rank == 1:  # it gets the record of the other
        for path in Path(f"{folder}/1").rglob("*.json"):
            path.unlink()
    dist.barrier()
    _, hit, _ = _tuned()
    cost = state["asked"], state["ran"] == [winner]
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    if rank == 1:
        state["wrong"] = (winner,)
    again, value, terminal = _tuned()
    dist.barrier()
    last, value_of_last, _ = _tuned()
    state["wrong"] = ()
    chosen = [each.records[0].best.fields["block"] != winner for each in (again, last)]
    recalled = [[each.is_recalled for each in one.records] for one in (again, last)]
    return hit, cost, value, value_of_last, chosen, recalled, terminal.getvalue()


@pytest.mark.parametrize("has_records", [True, False])
def test_a_record_that_is_wrong_on_some_rank_is_tuned_anew_on_all(tmp_path: Path, has_records: bool):
    """A hit costs one question to the reference and no run; the terminal says which rank was wrong, and the new record replaces the old."""
    got = values(on_ranks(2, _recalled, str(tmp_path), has_records))
    for hit, cost, value, value_of_last, chosen, recalled, _ in got:
        assert hit == value == value_of_last == [3.0, 3.0]
        assert cost == (1, True)
        assert chosen == [True, True]
        assert recalled == [[False], [True]]
    assert "the config from the cache answers wrongly, and it is tuned anew: rank 1: wrong by 30" in got[0][-1]


def test_alone_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And with DIST_TUNE_REQUIRE_CACHE it is an error."""
    for name, setting in {"VERBOSITY": "quiet", "LOG_DIR": str(tmp_path / "logs"), "CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(f"DIST_TUNE_{name}", setting)
    winner = _tuned()[0].records[0].best.fields["block"]
    monkeypatch.setitem(state, "wrong", (winner,))
    monkeypatch.setenv("DIST_TUNE_REQUIRE_CACHE", "1")
    with pytest.raises(CacheMissError, match="the config from the cache answers wrongly, rank 0: wrong by 30"):
        _tuned()
    monkeypatch.delenv("DIST_TUNE_REQUIRE_CACHE")
    function, value, _ = _tuned()
    assert value == [2.0, 2.0]
    assert function.records[0].best.fields["block"] != winner


def _inside(rank: int, folder: str) -> Any:
    os.environ["DIST_TUNE_CACHE_DIR"] = folder

    def tuned() -> Any:
        state.update(asked=0, ran=[])
        function = autotune(BLOCKS, None, check=_reference, n_warmup=0, n_repeat=1)(_step)

        def closure() -> torch.Tensor:
            return function(torch.ones(2), torch.ones(2)) * 2

        step = contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1)(closure)
        value = step().tolist()
        return value, step.records[0].best.fields["block"], step.records[0].is_recalled, state["asked"]

    value, winner, *_ = tuned()
    dist.barrier()
    hit = tuned()
    dist.barrier()
    state["wrong"] = (winner,) if rank == 1 else ()
    again = tuned()
    return value, hit == (value, winner, True, 1), again[0], again[1] != winner, again[2]


def test_inside_a_closure_it_is_the_same(tmp_path: Path):
    """The first run of the closure is judged, so a hit makes no replay."""
    expected = ([6.0, 6.0], True, [6.0, 6.0], True, False)
    assert values(on_ranks(2, _inside, str(tmp_path))) == [expected] * 2
