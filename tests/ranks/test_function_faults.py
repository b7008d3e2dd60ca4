"""Faults of an autotuned function on real ranks: one answer on all ranks, and never a hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import DistTuneError, autotune
from dist_tune.testing import values
from tests.ranks.kernels import is_unpatched
from tests.ranks.world import DEADLINE_S
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once
QUICK: Any = {"n_warmup": 0, "n_repeat": 1, "cache": False}
BLOCKS = [{"block": block} for block in (1, 2, 4, 8)]
Results = list[dict[str, Any]]
"""The results of each rank, by scenario."""
DROPPED: list[tuple[dict[int, list[int]], str]] = [
    ({1: [1]}, "before"), ({1: [1]}, "after"), ({0: [2], 1: [1, 8]}, "before"), ({0: [2], 1: [1, 8]}, "after"),
]  # fmt: skip
HOPELESS: list[dict[int, list[int]]] = [{0: [1, 2, 4, 8], 1: [1, 2, 4, 8]}, {0: [1, 2], 1: [4, 8]}]


@pytest.fixture(scope="module")
def pair() -> Results:
    """Scenarios that two ranks can play one after the other in one world, for no error breaks its process group."""
    return values(on_ranks(2, _scenarios))


def _scenarios(rank: int) -> dict[str, Any]:
    return {
        "dropped": [_fails(rank, on, where) for on, where in DROPPED],
        "hopeless": [told(lambda on=on: _fails(rank, on, "before")) for on in HOPELESS],
        "raises": {who: told(lambda who=who: _raises(rank, who)) for who in ("prune_fn", "check", "reset")},
        **{each.__name__: each(rank) for each in (_prunes, _interrupted, _reenters, _captures)},
    }


def named(name: str, function: Any) -> Any:
    """A rank that has left one call may wait in the next one, and others come late: they tell calls apart by names."""
    function.__qualname__ = name
    return function


def told(call: Any) -> tuple[str, str, float]:
    """The error that a call raises, its message, and after how many seconds; empty if there is none."""
    began = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt, too
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _fails(rank: int, on: dict[int, list[int]], where: str) -> Any:
    """``on``: rank -> blocks that raise there; ``where`` among the two collectives."""

    @autotune(BLOCKS, None, n_warmup=1, n_repeat=2, cache=False)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        def stop(here: str) -> None:
            if block in on.get(rank, []) and where == here:
                raise RuntimeError(f"block {block} is out on rank {rank}")

        y = x.clone()
        stop("before")
        dist.all_reduce(y)
        dist.all_reduce(y)
        stop("after")
        return y

    y = step(torch.ones(4))
    record = step.records[0]
    return y[0].item(), record.best.config, [each.failure for each in record.candidates], is_unpatched()


@pytest.mark.parametrize("case", range(len(DROPPED)))
def test_a_config_that_fails_on_one_rank_is_dropped_on_all(pair: Results, case: int):
    """Before its collectives another config stands in; behind them nothing is run. On the first candidate and on others."""
    got, (on, _) = [each["dropped"][case] for each in pair], DROPPED[case]
    assert got[0] == got[1]
    y, config, failures, unpatched = got[0]
    assert unpatched
    assert y == 4.0
    out = {block: rank for rank, blocks in on.items() for block in blocks}
    for candidate, failure in zip(BLOCKS, failures, strict=True):
        block = candidate["block"]
        assert (failure is not None) == (block in out)
        if failure is not None:
            assert failure == f"rank {out[block]}: RuntimeError: block {block} is out on rank {out[block]}"
            assert config != f"block={block}"


def test_no_config_that_runs_everywhere_is_one_clear_error(pair: Results):
    """All fail on all ranks, or each on some rank."""
    for error, message, seconds in [each for rank in pair for each in rank["hopeless"]]:
        assert error == "NoValidConfigError"
        assert "none of its 4 configs runs" in message
        assert "RuntimeError: block 1 is out on rank" in message or "RuntimeError: block 4 is out on rank" in message
        assert seconds < DEADLINE_S


def _prunes(rank: int) -> Any:
    rules: list[Any] = [
        lambda config, x: rank == 0 or config["block"] > 1, lambda config, x: rank == 0 and config["block"] > 1, lambda config, x: None
    ]  # fmt: skip
    functions = [autotune(BLOCKS, None, rule, **QUICK)(named(f"pruned {i}", lambda x, block: x)) for i, rule in enumerate(rules)]
    return [told(lambda function=function: function(1)) for function in functions]


def test_configs_that_only_some_ranks_prune_are_an_error_on_all(pair: Results):
    """At once, with the first difference; a rule that keeps nothing says that it is the rule."""
    got = [each["_prunes"] for each in pair]
    assert [each[:2] for each in got[0]] == [each[:2] for each in got[1]]
    (differing, message, _), *nothing = got[0]
    assert differing == "RankMismatchError"
    assert 'first difference at index 0: "block=2" on rank 1, "block=1" before' in message
    for error, message, _ in nothing:
        assert error == "NoValidConfigError"
        assert "prune_fn keeps none of 4 configs" in message
    assert all(seconds < DEADLINE_S for rank in got for _, _, seconds in rank)


def _raises(rank: int, who: str) -> Any:
    def may_raise(name: str) -> None:
        if name == who and rank == 1:
            raise ValueError(f"{name} had enough")

    def key_fn(x: int) -> int:
        may_raise("key_fn")
        return x

    def prune_fn(config: Any, x: int) -> bool:
        may_raise("prune_fn")
        return True

    def check(result: Any, x: int) -> bool:
        may_raise("check")
        return True

    def reset() -> None:
        may_raise("reset")

    def step(x: int, block: int) -> int:
        return x

    function = autotune(BLOCKS, key_fn, prune_fn, check=check, reset=reset, **QUICK)(named(f"step with {who}", step))
    try:
        return function(1) if who != "call" or rank == 0 else function(1, 2, 3)
    finally:
        assert is_unpatched()


@pytest.mark.parametrize("who", ["prune_fn", "check", "reset"])
def test_what_the_user_gave_raises_on_one_rank(pair: Results, who: str):
    """That rank raises it, and the others hear of it at once, with its name."""
    theirs, mine = (each["raises"][who] for each in pair)
    assert mine[:2] == ("ValueError", f"{who} had enough")
    assert theirs[0] == "PeerFailedError"
    assert f"rank 1 raised ValueError: {who} had enough" in theirs[1]
    assert theirs[2] < DEADLINE_S


def _absent(rank: int) -> Any:
    left = []
    for who in ("key_fn", "call"):
        left.append(told(lambda who=who: _raises(rank, who)))
        dist.barrier()
    return left, _unequal(rank)


@pytest.fixture(scope="module")
def waiting() -> list[Any]:
    """Ranks that wait for others for a deadline of one second."""
    return values(on_ranks(2, _absent, env={"DIST_TUNE_DEADLINE_S": "1"}))


def test_a_call_that_fails_before_it_can_tune(waiting: list[Any]):
    """The others learn that this rank has passed the call: they go on alone, without an error."""
    theirs, mine = (each[0] for each in waiting)
    assert [each[0] for each in mine] == ["ValueError", "TypeError"]
    for error, _, seconds in theirs:
        assert error == ""
        assert seconds < 0.9


def _unequal(rank: int) -> Any:
    def by_shape(x: torch.Tensor, block: int) -> torch.Tensor:
        return x

    def by_value(x: torch.Tensor, block: int) -> torch.Tensor:
        return x.sum()

    function, other = (autotune(BLOCKS, lambda x: x.shape, **QUICK)(each) for each in (by_shape, by_value))
    first, equal = function(torch.zeros(2 + rank)).numel(), other(torch.full((3,), float(rank))).item()
    return first, equal, told(lambda: function(torch.zeros(2))), len(function.records)


def test_ranks_with_different_keys_and_different_arguments(waiting: list[Any]):
    """Different keys at once are two sites of one tuning. A key that is new on one rank alone runs a known config there."""
    got = [each[1] for each in waiting]
    assert [each[:2] for each in got] == [(2, 0.0), (3, 3.0)]
    assert got[0][2][0] == got[1][2][0] == ""
    assert [each[3] for each in got] == [2, 2]


def _reenters(rank: int) -> Any:
    function: Any = None
    told: list[str] = []

    def again() -> None:
        """A tuning inside a tuning, where ranks may not talk: in reset, before a replay."""
        try:
            function(2)
        except DistTuneError as error:
            told.append(type(error).__name__)

    def prune_fn(config: Any, x: int) -> bool:
        return bool(inner(x) == x)

    inner = autotune(BLOCKS, lambda x: x, **QUICK)(lambda x, block: x)
    function = autotune(BLOCKS, lambda x: x, prune_fn, reset=again, **QUICK)(lambda x, block: x)
    value = function(1)
    checked = autotune(BLOCKS, None, check=lambda x: inner(x) + 1, **QUICK)(lambda x, block: x + 1)
    return value, set(told), len(inner.records), checked(5), len(checked.records)


def test_attempts_to_tune_within_a_tuning_do_not_hang(pair: Results):
    """In prune_fn and in check a tuned function may be called, on all ranks alike; from reset it is refused."""
    assert [each["_reenters"] for each in pair] == [(1, {"NestedTuningError"}, 1, 6, 2)] * 2


def _captures(rank: int) -> Any:
    from dist_tune.sites import site

    function = autotune(BLOCKS, lambda x: x, **QUICK)(lambda x, block: x)
    function(1)
    vars(site)["is_capturing"] = lambda: True  # from here on
    kind, message, _ = told(lambda: function(2))
    return function(1), function(2, autotune=False), kind, message


def test_a_captured_graph_uses_what_is_known(pair: Results):
    """A new key is an error with what to do, on each rank for itself; a known one and autotune=False are ordinary calls."""
    for known, untuned, kind, message in [each["_captures"] for each in pair]:
        assert (known, untuned, kind) == (1, 2, "CaptureError")
        assert "<lambda>[2] has no config yet" in message
        assert "before the capture" in message


def _interrupted(rank: int) -> Any:
    calls: list[int] = []

    def step(x: int, block: int) -> int:
        calls.append(block)
        if rank == 0 and len(calls) == 3:
            raise KeyboardInterrupt
        return x

    function = autotune(BLOCKS, None, **QUICK)(step)
    first = told(lambda: function(1))[0], is_unpatched(), len(function.records)
    return first, function(2), len(function.records)


def test_an_interrupted_tuning_leaves_nothing_behind(pair: Results):
    """The ranks part with their errors, Triton is as it was, and the next call tunes."""
    got = [each["_interrupted"] for each in pair]
    assert [each[0] for each in got] == [("KeyboardInterrupt", True, 0), ("PeerFailedError", True, 0)]
    assert [each[1:] for each in got] == [(2, 1)] * 2
