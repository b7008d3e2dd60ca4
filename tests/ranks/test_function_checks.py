"""Which configs an autotuned function may win with: those that answer rightly on all ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import CacheMissError, NoValidConfigError, autotune, contextual_autotune, matches
from dist_tune.testing import values
from tests.ranks.kernels import add_kernel
from tests.ranks.world import DEADLINE_S
from tests.ranks.worlds import on_ranks

BLOCKS = [{"block": block} for block in (1, 2, 4)]
pytestmark = pytest.mark.once
QUICK: Any = {"n_warmup": 0, "n_repeat": 1, "cache": False}
Results = list[dict[str, Any]]
"""What each rank came to, by scenario."""


@pytest.fixture(scope="module")
def pair() -> Results:
    return values(on_ranks(2, _scenarios))


def _scenarios(rank: int) -> dict[str, Any]:
    scenarios = (
        _wrong_on_one_rank, _raises_the_words_of_a_check, _writes_a_part, _writes_nothing, _in_place, _all_wrong, _collective_reference,
        _context, _kept,
    )  # fmt: skip
    return {each.__name__: each(rank) for each in scenarios}


def failures(function: Any) -> list[str | None]:
    return [each.failure for each in function.records[-1].candidates]


def _wrong_on_one_rank(rank: int) -> Any:
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        time.sleep(block * 1e-2)
        return x + 1 + 30 * (block == 1 and rank == 1)

    def is_right(result: torch.Tensor, x: torch.Tensor) -> bool:
        return bool((result == x + 1).all())

    def asserts(result: torch.Tensor, x: torch.Tensor) -> None:
        assert is_right(result, x), f"off by {(result - x - 1).max().item()}"

    told = []
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    for check in (lambda x: x + 1, is_right, asserts, matches(lambda x: x + 1.001, rtol=0.01)):
        function = autotune(BLOCKS, None, check=check, **QUICK)(step)
        with contextlib.redirect_stderr(io.StringIO()) as terminal:
            y = function(torch.ones(4))
        record = function.records[0]
        told.append((y.tolist(), record.best.config, failures(function), record.candidates[0].n_replays, terminal.getvalue()))
    os.environ["DIST_TUNE_VERBOSITY"] = "quiet"
    return told


def test_what_is_wrong_on_one_rank_is_dropped_on_all_before_it_is_timed(pair: Results):
    """With each kind of check; the first rank's terminal shows the error with its size, whichever rank found it."""
    got = [each["_wrong_on_one_rank"] for each in pair]
    assert [each[:4] for each in got[0]] == [each[:4] for each in got[1]]
    for y, config, (first, *others), n_timed, _ in got[0]:
        assert y == [2.0] * 4
        assert config == "block=2"
        assert first.startswith("rank 1: ")
        assert "the result is wrong" in first
        assert others == [None, None]
        assert n_timed == 0
    reasons = [each[2][0] for each in got[0]]
    assert "wrong by 30 at [0] (got 32, expected 2; 4 of 4 elements beyond" in reasons[0]
    assert "is_right returned False" in reasons[1]
    assert "off by 30.0" in reasons[2]
    assert "wrong by 30 at [0] (got 32, expected 2.001" in reasons[3]
    assert all(reason in each[4] for reason, each in zip(reasons, got[0], strict=True))
    assert not any("wrong" in each[4] for each in got[1])


def _raises_the_words_of_a_check(rank: int) -> Any:
    @autotune(BLOCKS, None, check=lambda x: x + 1, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        if block == 1:
            raise RuntimeError("the result is wrong")
        return x + 1

    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        step(torch.ones(4))
    os.environ["DIST_TUNE_VERBOSITY"] = "quiet"
    return failures(step)[0], terminal.getvalue()


def test_a_launch_that_raises_is_no_wrong_result_whatever_its_message_says(pair: Results):
    """It is dropped, with its message in the record; the terminal is for results that a check refuses."""
    reason, terminal = pair[0]["_raises_the_words_of_a_check"]
    assert reason == "rank 0: RuntimeError: the result is wrong"
    assert terminal != ""
    assert "the result is wrong" not in terminal


def _writes_a_part(rank: int) -> Any:
    @autotune([{"block": 64}, {"block": 16}], None, check=lambda x: x + 1, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        y = torch.empty_like(x)
        add_kernel[(1,)](x, y, x.numel(), BLOCK=block)  # one block, however small
        return y

    return step(torch.ones(64)).tolist(), failures(step)


def test_a_kernel_that_writes_a_part_of_its_output_is_found_out(pair: Results):
    """The rest would hold what the last config wrote, if that had not been poisoned."""
    for y, (whole, part) in [each["_writes_a_part"] for each in pair]:
        assert y == [2.0] * 64
        assert whole is None
        assert "the result is wrong: " in part
        # 48, unless another thread has had the poisoned memory meanwhile: what it left there is wrong, too.
        assert re.search(r"[1-9]\d* of 64 elements", part)


def _writes_nothing(rank: int) -> Any:
    def fresh(x: torch.Tensor, block: int) -> torch.Tensor:
        y = torch.empty_like(x)
        return y if block > 1 else y.copy_(x + 1)

    def given(x: torch.Tensor, out: torch.Tensor, block: int) -> torch.Tensor:
        return out if block > 1 else torch.add(x, 1, out=out)

    told = []
    for function, arguments in ((fresh, ()), (given, (torch.zeros(64),))):
        for check in (lambda x, *out: x + 1, lambda result, x, *out: bool((result == x + 1).all())):
            tuned: Any = autotune(BLOCKS, None, check=check, **QUICK)(function)
            told.append((tuned(torch.ones(64), *arguments).tolist() == [2.0] * 64, failures(tuned)))
    return told


def test_configs_that_write_nothing_never_win(pair: Results):
    """Neither to memory of their own nor to what they are given, whoever checks."""
    for told in [each["_writes_nothing"] for each in pair]:
        for is_right, (writes, *nothing) in told:
            assert is_right
            assert writes is None
            assert all("the result is wrong" in each for each in nothing)


def _in_place(rank: int) -> Any:
    state = torch.full((4,), 3.0)
    kept = state.clone()

    @autotune(BLOCKS, None, check=lambda x: x * 2, reset=lambda: state.copy_(kept), **QUICK)
    def doubles(x: torch.Tensor, block: int) -> torch.Tensor:
        return x.mul_(2 if block < 4 else 3)

    result = doubles(state)
    return result is state, state.tolist(), failures(doubles)


def test_a_function_that_changes_its_input(pair: Results):
    """With reset= each run finds what the first one found, and the last one leaves what one call would."""
    for is_same, state, (one, two, four) in [each["_in_place"] for each in pair]:
        assert is_same
        assert state == [6.0] * 4
        assert (one, two) == (None, None)
        assert "wrong by 3 at [0] (got 9, expected 6" in four


def _all_wrong(rank: int) -> Any:
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        dist.all_reduce(x.clone())
        return x

    function = autotune(BLOCKS, None, check=lambda x: x + rank, **QUICK)(step)
    began = time.monotonic()
    with pytest.raises(NoValidConfigError, match="none of its 3 configs runs") as none:
        function(torch.ones(4))
    return "rank 1: the result is wrong" in str(none.value), time.monotonic() - began < DEADLINE_S


def test_all_wrong_is_one_clear_error(pair: Results):
    """On all ranks, also where one rank alone finds them wrong, and at once: what is wrong still talks to the other ranks."""
    assert [each["_all_wrong"] for each in pair] == [(True, True)] * 2


def _collective_reference(rank: int) -> Any:
    def reference(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @autotune(BLOCKS, None, check=reference, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        if block == 1 and rank == 1:
            raise RuntimeError("not here")
        y = x.clone()
        dist.all_reduce(y)
        return y

    return step(torch.ones(4)).tolist(), failures(step)


def test_a_reference_may_talk_to_other_ranks(pair: Results):
    """It is asked equally often on all ranks, also where the first config fails on one of them."""
    assert [each["_collective_reference"] for each in pair] == [([2.0] * 4, ["rank 1: RuntimeError: not here", None, None])] * 2


def _context(rank: int) -> Any:
    buffer, signal = torch.arange(4.0), torch.zeros(1, dtype=torch.int32)
    context = SimpleNamespace(buffer=buffer, signals=[signal], phase=0)
    seen = []

    @autotune(BLOCKS, None, check=lambda x, ctx: x + torch.arange(4.0), **QUICK)
    def step(x: torch.Tensor, ctx: Any, block: int) -> torch.Tensor:
        seen.append((ctx is context, ctx.buffer is buffer, ctx.buffer.tolist(), ctx.signals[0].item() == ctx.phase))
        ctx.phase += 1
        ctx.signals[0] += 1
        return torch.add(x, ctx.buffer)

    return step(torch.ones(4), context).tolist(), set(map(str, seen)), buffer.tolist(), context.phase == len(seen)


def test_what_a_context_holds_is_left_alone(pair: Results):
    """Symmetric memory and signals: nothing but the function writes there, and arguments are those of the caller."""
    for y, seen, buffer, is_counted in [each["_context"] for each in pair]:
        assert y == [1.0, 2.0, 3.0, 4.0]
        assert seen == {"(True, True, [0.0, 1.0, 2.0, 3.0], True)"}
        assert buffer == [0.0, 1.0, 2.0, 3.0]
        assert is_counted


def _is_right(result: torch.Tensor, x: torch.Tensor) -> bool:
    return bool((result == x + 1).all())


def _is_near(result: torch.Tensor, x: torch.Tensor) -> bool:
    return bool((result - x - 1 < 9).all())


def _kept(rank: int) -> Any:
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        return x + 1

    def tune(check: Any) -> Any:
        function = autotune(BLOCKS, None, check=check, n_warmup=0, n_repeat=1)(step)
        function(torch.ones(4))
        return function.records[0].is_recalled

    return tune(None), tune(_is_right), tune(_is_right), tune(_is_near), tune(None)


def test_what_was_chosen_without_a_check_is_not_trusted_with_one(pair: Results):
    """A check, and its code, are a part of what a record is kept under."""
    assert [each["_kept"] for each in pair] == [(False, False, True, False, True)] * 2


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
