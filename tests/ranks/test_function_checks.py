"""Which configs an autotuned function may win with: those that answer rightly on all ranks."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import CacheMissError, autotune, contextual_autotune, matches
from tests.steps import BLOCKS, QUICK, chosen, failures, told
from tests.worlds import DEADLINE_S, on_each_rank


def _reference(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _is_right(result: torch.Tensor, x: torch.Tensor) -> bool:
    return bool((result == x + 1).all())


def _is_near(result: torch.Tensor, x: torch.Tensor) -> bool:
    return bool((result - x - 1 < 9).all())


def _asserts(result: torch.Tensor, x: torch.Tensor) -> None:
    assert _is_right(result, x), f"off by {(result - x - 1).max().item()}"


@on_each_rank(
    cases=[
        (_reference, "wrong by 30 at [0] (got 32, expected 2; 4 of 4 elements beyond"),
        (_is_right, "is_right returned False"),
        (_asserts, "off by 30.0"),
        (matches(lambda x: x + 1.001, rtol=0.01), "wrong by 30 at [0] (got 32, expected 2.001"),
    ]
)
def test_what_is_wrong_on_one_rank_is_dropped_on_all_before_it_is_timed(rank: int, case: tuple[Any, str]) -> Any:
    """With each kind of check; the first rank's terminal shows the error with its size, whichever rank found it."""
    check, words = case
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    step = autotune(BLOCKS, None, check=check, **QUICK)(lambda x, block: x + 1 + 30 * (block == 1 and rank == 1))
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        assert step(torch.ones(4)).tolist() == [2.0] * 4
    reason, *others = failures(step)
    assert others == [None, None]
    assert chosen(step) != ["block=1"]
    assert reason is not None
    assert reason.startswith("rank 1: the result is wrong")
    assert words in reason
    assert step.records[0].candidates[0].n_replays == 0
    assert (reason in terminal.getvalue()) == ("wrong" in terminal.getvalue()) == (rank == 0)
    return reason


@on_each_rank()
def test_all_wrong_is_one_clear_error(rank: int):
    """On all ranks, also where one rank alone finds them wrong, and at once: what is wrong still talks to the other ranks."""

    @autotune(BLOCKS, None, check=lambda x: x + rank, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        dist.all_reduce(x.clone())
        return x

    error, message, seconds = told(lambda: step(torch.ones(4)))
    assert (error, seconds < DEADLINE_S) == ("NoValidConfigError", True)
    assert "none of its 3 configs runs" in message
    assert "rank 1: the result is wrong" in message


@on_each_rank()
def test_a_reference_may_talk_to_other_ranks(rank: int):
    """It is asked equally often on all ranks, also where the first config fails on one of them."""

    def reference(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @autotune(BLOCKS, None, check=reference, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        if block == 1 and rank == 1:
            raise RuntimeError("not here")
        return reference(x)

    assert step(torch.ones(4)).tolist() == [2.0] * 4
    assert failures(step) == ["rank 1: RuntimeError: not here", None, None]


@on_each_rank()
def test_what_was_chosen_without_a_check_is_not_trusted_with_one(rank: int):
    """A check, and its code, are a part of what a record is kept under."""

    def is_recalled(check: Any) -> bool:
        function = autotune(BLOCKS, None, check=check, n_warmup=0, n_repeat=1)(step)
        function(torch.ones(4))
        return function.records[0].is_recalled

    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        return x + 1

    assert [is_recalled(check) for check in (None, _is_right, _is_right, _is_near, None)] == [False, False, True, False, True]


# -- configs from the cache --------------------------------------------------------------------------------------------


state: dict[str, Any] = {"wrong": None, "asked": 0, "ran": []}
"""Not seen by the fingerprint: lists, dicts and what is in them may change."""


def _sum(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
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
    return c.copy_(y + c + 30 * (block == state["wrong"]))


def _tuned(is_inside: bool = False) -> tuple[Any, float, str]:
    """A new job: the tuned function, or the closure around it; the value of its call, and the terminal."""
    state.update(asked=0, ran=[])
    function = autotune(BLOCKS, None, check=_sum, n_warmup=0, n_repeat=1)(_step)
    closure = contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1)(lambda: function(torch.ones(2), torch.ones(2)))
    if dist.is_initialized():
        dist.barrier()
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        y = closure() if is_inside else function(torch.ones(2), torch.ones(2))
    return closure if is_inside else function, y[0].item(), terminal.getvalue()


def _winner(tuned: Any) -> int:
    block: int = tuned.records[0].best.fields["block"]
    return block


@on_each_rank(cases=["one folder", "a folder each", "a record of one rank", "inside a closure"])
def test_a_record_that_is_wrong_on_some_rank_is_tuned_anew_on_all(rank: int, case: str):
    """A hit costs one question to the reference and no run; the terminal says which rank was wrong, and the new record replaces the old."""
    if case.startswith("a "):
        os.environ["DIST_TUNE_CACHE_DIR"] += f"/{rank}"
    is_inside = case == "inside a closure"
    winner = _winner(_tuned(is_inside)[0])
    if case == "a record of one rank" and rank == 1:  # it gets the record of the other
        for path in Path(os.environ["DIST_TUNE_CACHE_DIR"]).rglob("*.json"):
            path.unlink()
    hit, value, _ = _tuned(is_inside)
    assert (_winner(hit), value, state["asked"], state["ran"]) == (winner, 3.0, 1, [winner])
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    state["wrong"] = winner if rank == 1 else None
    again, value, terminal = _tuned(is_inside)
    last, value_of_last, _ = _tuned(is_inside)
    state["wrong"] = None
    assert value == value_of_last == 3.0
    assert _winner(again) == _winner(last) != winner
    assert [one.records[0].is_recalled for one in (hit, again, last)] == [True, False, True]
    words = "the config from the cache answers wrongly, and it is tuned anew: rank 1: wrong by 30"
    assert (words in terminal) == (rank == 0 and not is_inside)


def test_alone_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And with DIST_TUNE_MODE=require it is an error."""
    for name, setting in {"VERBOSITY": "quiet", "LOG_DIR": str(tmp_path / "logs"), "CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(f"DIST_TUNE_{name}", setting)
    winner = _winner(_tuned()[0])
    monkeypatch.setitem(state, "wrong", winner)
    monkeypatch.setenv("DIST_TUNE_MODE", "require")
    with pytest.raises(CacheMissError, match="the config from the cache answers wrongly, rank 0: wrong by 30"):
        _tuned()
    monkeypatch.delenv("DIST_TUNE_MODE")
    again, value, _ = _tuned()
    assert (value, _winner(again) != winner) == (2.0, True)
