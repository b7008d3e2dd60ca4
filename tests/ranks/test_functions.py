"""An autotuned function on several ranks: what it takes and promises, its checks and references,
and what is told of a good call.
"""

from __future__ import annotations

import contextlib
import enum
import io
import itertools
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dist_tune import (
    CacheMissError,
    DistTuneError,
    NestedTuningError,
    autotune,
    contextual_autotune,
    matches,
    prune_by_shared_memory,
    to_hashable,
)
from dist_tune.testing import ExactTime
from tests.steps import (
    BLOCKS,
    FACES,
    QUICK,
    Face,
    Step,
    add_kernel,
    all_reduced,
    autotuned,
    best,
    chosen,
    failures,
    is_unpatched,
    launch,
    named,
    names,
    quiet,
    runs_of_this_process,
    shape_of,
    told,
    tuned,
)
from tests.worlds import folder, log, on_each_rank, shown

X = torch.ones(4)

# -- who decides -----------------------------------------------------------------------------------


@on_each_rank(cases=FACES)
def test_the_slowest_rank_decides_and_a_steady_call_is_an_ordinary_one(rank: int, face: Face):
    """Block 16 is fastest on rank 0 and slowest on rank 1: both take 32.

    Later calls run once, need no other rank and log nothing.
    """
    step = Step(
        face, [{16: 1, 32: 15, 64: 40}, {16: 60, 32: 15, 64: 40}][rank], name=f"steady {face}"
    )  # ranks tell calls apart by names
    step(X)
    assert step.best == [32]
    step.ran.clear()
    before = log()
    for _ in range(3 * (rank == 0)):
        step(X)
    assert (step.ran, log() == before, is_unpatched()) == ([32] * 3 * (rank == 0), True, True)


@on_each_rank()
def test_a_group_decides_for_itself(rank: int):
    """Each has its own winner for one key, and the slower one rules the world; strangers are
    refused.
    """
    groups = [dist.new_group([each]) for each in (0, 1)]

    @autotune(BLOCKS, shape_of, n_warmup=0, n_repeat=2)
    def step(x: torch.Tensor, block: int, group: Any = None) -> torch.Tensor:
        ExactTime.pass_ms([{1: 1, 2: 40, 4: 20}, {1: 40, 2: 1, 4: 20}][rank][block])
        return all_reduced(x.clone()) if group is None else x

    mine: Any = {"group": groups[rank], "autotune_pg": groups[rank]}
    assert [step(X, **each)[0].item() for each in (mine, dict[str, Any](), mine)] == [1.0, 2.0, 1.0]
    assert chosen(step) == [f"block={1 + rank}", "block=4"]
    # So a job of another size hits where its groups are the same.
    assert [each.environment.world_size for each in step.records] == [1, 2]
    with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
        step(torch.ones(5), autotune_pg=groups[1 - rank])


@on_each_rank()
def test_a_function_inside_another_or_inside_a_closure_is_one_of_its_sites(rank: int):
    """The outer one tunes all of them at once, kernels of triton.autotune too; with ranks that it
    does not ask it says so.
    """
    ran, kernel, alone = list[str](), autotuned(blocks=(16, 32)), dist.new_group([0])

    @autotune(BLOCKS, shape_of, **QUICK)
    def inner(x: torch.Tensor, block: int) -> torch.Tensor:
        ran.append("inner")
        return launch(kernel, x)

    @autotune(BLOCKS[1:], shape_of, **QUICK)
    def outer(x: torch.Tensor, block: int) -> Any:
        ran.append("outer")
        return inner(all_reduced(inner(x)), autotune=False)

    assert outer(torch.zeros(64))[0].item() == 2 + 1
    assert [name for name, _ in names(outer)] == ["add_kernel", "inner", "outer"]
    ran.clear()
    outer(torch.zeros(64))
    assert ran == ["outer", "inner", "inner"]
    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: inner(x) + launch(kernel, x))
    assert step(torch.zeros(128))[0].item() == 2.0
    assert [name for name, _ in names(step)] == ["add_kernel", "inner"]
    inner(torch.zeros(128))
    assert inner.records == []
    with pytest.raises(NestedTuningError, match=r"decides with ranks \[0, 1\].*autotune_pg"):
        contextual_autotune()(lambda: inner(torch.zeros(256)))()
    if rank == 0:
        with pytest.raises(NestedTuningError, match=r"decides with ranks \[1\]"):
            contextual_autotune(is_dist=True, group=alone)(lambda: inner(torch.zeros(512)))()


_kernels: list[Any] = []


@on_each_rank()
def test_a_cached_function_still_tunes_the_kernels_inside(rank: int):
    """The function's config comes from the cache, so it runs with that alone; its kernels are sites
    of that run. cache=False tunes anew.
    """

    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        runs_of_this_process.append(block)
        return launch(_kernels[-1], x)

    for n, are_recalled, n_blocks, options in (
        (64, (False, False), 3, {}),
        (64, (True, True), 1, {}),
        (192, (False, True), 1, {}),
        (64, (), 3, QUICK),
    ):
        runs_of_this_process.clear()
        _kernels.append(autotuned(blocks=(16, 32)))
        function = autotune(BLOCKS, None, **{"n_warmup": 0, "n_repeat": 1, **options})(step)
        assert function(torch.zeros(n))[0].item() == 1.0
        assert (len({*runs_of_this_process}), len(best(_kernels[-1]))) == (n_blocks, 1)
        assert not are_recalled or names(function) == [
            *zip(("add_kernel", "step"), are_recalled, strict=True)
        ]


# -- what it takes ---------------------------------------------------------------------------------


@on_each_rank()
def test_the_seeds_example_runs_as_written(rank: int):
    """Configs in a mapping, both ways to index them in prune_fn, to_hashable, the call-time
    keywords; verbose is rank 0's alone.
    """
    space = [
        {"gemm_config": triton.Config({"BLOCK": b}, num_warps=w)}
        for b in (16, 32, 64)
        for w in (4, 8)
    ]
    seen, ran = list[Any](), list[int]()

    def key_fn(A: torch.Tensor, ctx: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return to_hashable(A), ctx["num_ranks"]

    def prune_fn(
        config: Any, A: torch.Tensor, ctx: dict[str, Any], *args: Any, **kwargs: Any
    ) -> bool:
        inner = config["gemm_config"]
        seen.append((config["BLOCK"], inner["BLOCK"], inner.kwargs["BLOCK"], config.num_warps))
        return prune_by_shared_memory(config, A, *args, **kwargs) and bool(
            inner.kwargs["BLOCK"] > 16
        )

    @autotune(config_space=space + space[:2], key_fn=key_fn, prune_fn=prune_fn, **QUICK)
    def my_gemm(
        A: torch.Tensor,
        ctx: dict[str, Any],
        gemm_config: triton.Config,
        straggler_option: Any = None,
    ) -> torch.Tensor:
        ran.append(block := gemm_config.kwargs["BLOCK"])
        y = torch.empty_like(A)
        add_kernel[(triton.cdiv(A.numel(), block),)](A, y, A.numel(), BLOCK=block)
        return y

    x, ctx = torch.arange(40.0), {"num_ranks": 2}
    results = [my_gemm(x, ctx, autotune=False)]
    assert ran == [16]
    lines = shown(
        lambda: results.append(my_gemm(x, ctx, autotune_verbose=True, straggler_option=(0, 1)))
    )
    ran.clear()
    results.append(my_gemm(x, ctx=ctx, autotune=True))
    assert all(torch.equal(y, x + 1) for y in results)
    assert (len(ran), len(my_gemm.configs)) == (1, 6)
    # Once for each form of a call with this key.
    assert seen == [(b, b, b, w) for b in (16, 32, 64) for w in (4, 8)] * 2
    assert re.search(r"BLOCK=(32|64)", chosen(my_gemm)[0])
    assert any(re.match(r"  3  +\d", line) for line in lines)  # a row of the table


class _Policy:
    """Reads like any other object of its class, and is equal to none."""

    def __init__(self, ms: float) -> None:
        self.ms = ms


class _Mode(enum.Enum):
    SLOW = 20


def _slow(ms: float = 20.0) -> float:
    return ms


@on_each_rank()
def test_config_values_are_of_any_kind(rank: int):
    """Enums, functions, dtypes, tuples, tensors, objects; two that read alike are two, and the
    right one of them wins.
    """
    modes = [
        _Mode.SLOW,
        _slow,
        lambda: 20.0,
        lambda: 20.0,
        torch.float32,
        (1, "a"),
        _Policy(20.0),
        _Policy(1.0),
        None,
        _Mode.SLOW,
        20.0,
        "20.0",
        torch.arange(2),
    ]

    @autotune([{"mode": mode} for mode in modes], None, n_warmup=1, n_repeat=3)
    def step(mode: Any) -> Any:
        ExactTime.pass_ms(getattr(mode, "ms", 20.0))
        return getattr(mode, "ms", mode)

    call: Any = step
    assert (call(), call()) == (1.0, 1.0)
    texts = [each.config for each in step.records[0].candidates]
    assert len(texts) == len({*texts}) == 12
    assert not any("0x" in text for text in texts)
    assert [sum(word in text for text in texts) for word in ("_Policy", "<lambda>")] == [2, 2]
    assert [text for text in texts if "20.0" in text] == ["mode=20.0", "mode='20.0'"]


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@on_each_rank(cases=[None, _plus_one])
def test_a_result_of_a_collective_may_be_an_argument(rank: int, check: Any):
    """It is waited for before it is copied, with a check, too."""
    x: Any = all_reduce(torch.full((1 << 10,), rank + 1.0), "sum", [0, 1])
    step = autotune(BLOCKS, None, check=check, **QUICK)(lambda x, block: x + 1)
    assert (bool((step(x) == 4).all()), failures(step)) == (True, [None] * 3)


@on_each_rank()
def test_a_distributed_tensor_is_changed_once(rank: int):
    """Its part on this rank is what is copied and put back, because the function is not tuned."""
    x: Any = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (2,)), [Shard(0)])
    step: Any = autotune(BLOCKS, None, **QUICK)(lambda x, block: x.add_(1))
    assert (step(x).to_local().tolist(), step.records) == ([2.0] * 4, [])


# -- keys ------------------------------------------------------------------------------------------


numbers, layers = itertools.count(100), [SimpleNamespace(number=k) for k in range(8)]
KEYS: dict[str, tuple[Any, Any, int]] = {
    "counter": (lambda x, k: next(numbers), lambda k: (X, 0), 3),
    "float": (lambda x, scale: (to_hashable(x), scale), lambda k: (X, 0.1 * k), 3),
    "shapes": (lambda x, n: to_hashable(x), lambda k: (torch.zeros(k + 1), 0), 8),
    "names": (lambda x, mode: mode, lambda k: (X, "abcdefgh"[k]), 8),
    "layers": (lambda layer, x: layer.number, lambda k: (layers[k], X), 8),
    "modes that arguments do not show, each called twice": (
        lambda x, k: next(numbers) // 2,
        lambda k: (X, 0),
        4,
    ),
}
"""Key function, arguments of a call by its number, and tunings in 8 calls."""


@on_each_rank(cases=[*KEYS])
def test_a_key_that_never_repeats_is_told_of(rank: int, case: str):
    """Of arguments that are alike three are tuned, and one line on the first rank says why.

    A loop over shapes tunes them all.
    """
    key_fn, arguments, n_tunings = KEYS[case]
    function: Any = autotune(BLOCKS[:2], key_fn, **QUICK)(lambda *args, block=0: len(args))
    lines = shown(lambda: [function(*arguments(k)) for k in range(8)])
    assert len(function.records) == n_tunings
    words = "has a key that never repeats: 3 tunings in as many calls with arguments alike, keys ["
    assert [words in line for line in lines] == [True] * (n_tunings == 3)


@on_each_rank()
def test_ranks_with_different_keys_and_different_arguments(rank: int):
    """Different keys at once are two sites of one tuning.

    A key that is new on one rank alone runs a known config there.
    """
    by_shape = autotune(BLOCKS, shape_of, **QUICK)(named("by shape", lambda x, block: x))
    by_value = autotune(BLOCKS, shape_of, **QUICK)(named("by value", lambda x, block: x.sum()))
    assert by_shape(torch.zeros(2 + rank)).numel() == 2 + rank
    assert by_value(torch.full((3,), float(rank))).item() == 3.0 * rank
    os.environ["DIST_TUNE_DEADLINE_S"] = "1"  # which rank 0 waits for, and then goes on
    by_shape(torch.zeros(2))
    assert len(by_shape.records) == 2


# -- what goes wrong -------------------------------------------------------------------------------


DROPPED: list[tuple[dict[int, list[int]], str]] = [
    ({1: [16]}, "before"),
    ({1: [16]}, "after"),
    ({0: [32], 1: [16]}, "after"),
    ({0: [16, 32], 1: [64]}, "before"),
]
"""Rank -> blocks that raise there; before or after the collectives."""


@on_each_rank(cases=DROPPED)
def test_a_config_that_fails_on_one_rank_is_dropped_on_all(
    rank: int, case: tuple[dict[int, list[int]], str]
):
    """Before its collectives another config stands in; behind them nothing is run.

    Where none is left, one error says so, at once.
    """
    on, where = case

    def stop(here: str) -> None:
        if step.ran[-1] in on.get(rank, []) and where == here:
            raise RuntimeError(f"block {step.ran[-1]} is out on rank {rank}")

    def rest(y: torch.Tensor) -> torch.Tensor:
        all_reduced(all_reduced(y))
        stop("after")
        return y

    os.environ["DIST_TUNE_DEADLINE_S"] = "60"  # nothing waits for it
    step = Step("function", act=lambda block: stop("before"), rest=rest, cache=False)
    out = {
        block: f"rank {rank}: RuntimeError: block {block} is out on rank {rank}"
        for rank, blocks in on.items()
        for block in blocks
    }
    if len(out) == 3:
        error, message, seconds = told(lambda: step(torch.zeros(64)))
        assert (error, "none of its 3 configs runs" in message, seconds < 30) == (
            "NoValidConfigError",
            True,
            True,
        )
        assert re.search(r"RuntimeError: block \d+ is out on rank", message)
    else:
        assert step(torch.zeros(64))[0].item() == 4.0
        assert step.failures == [out.get(block) for block in (16, 32, 64)]
        assert step.best[0] not in out
    assert is_unpatched()


@on_each_rank(
    cases=[lambda config, x: dist.get_rank() == 0 and config["block"] > 1, lambda config, x: None]
)
def test_a_rule_that_keeps_nothing_is_an_error_on_all_ranks(rank: int, rule: Any):
    """At once, also where another rank's keeps some; it says that it is the rule."""
    os.environ["DIST_TUNE_DEADLINE_S"] = "60"
    function: Any = autotune(BLOCKS, None, rule, **QUICK)(lambda x, block: x)
    error, message, seconds = told(lambda: function(1))
    assert (error, "prune_fn keeps none of 3 configs" in message, seconds < 30) == (
        "NoValidConfigError",
        True,
        True,
    )


@on_each_rank(cases=["prune_fn", "check", "reset", "key_fn", "call"])
def test_what_the_user_gave_raises_on_one_rank(rank: int, who: str):
    """That rank raises it, and the others hear of it at once, with its name; before a tuning they
    learn that it has passed, and go on.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = "60"

    def may_raise(name: str) -> bool:
        if name == who and rank == 1:
            raise ValueError(f"{name} had enough")
        return True

    function: Any = autotune(
        BLOCKS,
        lambda x: may_raise("key_fn"),
        lambda config, x: may_raise("prune_fn"),
        check=lambda result, x: may_raise("check"),
        reset=lambda: may_raise("reset"),
        **QUICK,
    )(named(f"step with {who}", lambda x, block: x))
    arguments: Any = (1,) if who != "call" or rank == 0 else (1, 2, 3)
    error, message, seconds = told(lambda: function(*arguments))
    assert (is_unpatched(), seconds < 30) == (True, True)
    if rank == 1:
        assert (error, f"{who} had enough" in message) == (
            ("TypeError", False) if who == "call" else ("ValueError", True)
        )
    elif who in ("key_fn", "call"):
        assert error == ""
    else:
        cause = f"{who} had enough" if who != "prune_fn" else "prune_fn of "
        assert (error, f"rank 1 raised ValueError: {cause}" in message) == ("PeerFailedError", True)


@on_each_rank()
def test_attempts_to_tune_within_a_tuning_do_not_hang(rank: int):
    """In prune_fn and in check a tuned function may be called, on all ranks alike; from reset it is
    refused.
    """
    refused: set[str] = set()
    function: Any = None

    def again() -> None:
        """A tuning inside a tuning, where ranks may not talk: in reset, before a replay."""
        try:
            function(2)
        except DistTuneError as error:
            refused.add(type(error).__name__)

    inner: Any = autotune(BLOCKS, lambda x: x, **QUICK)(lambda x, block: x)
    function = autotune(BLOCKS, lambda x: x, lambda config, x: inner(x) == x, reset=again, **QUICK)(
        lambda x, block: x
    )
    assert (function(1), refused, len(inner.records)) == (1, {"NestedTuningError"}, 1)
    checked: Any = autotune(BLOCKS, None, check=lambda x: inner(x) + 1, **QUICK)(
        lambda x, block: x + 1
    )
    assert (checked(5), len(checked.records)) == (6, 2)


@on_each_rank()
def test_a_captured_graph_uses_what_is_known(rank: int):
    """A new key is an error with what to do, on each rank for itself; a known one and
    autotune=False are ordinary calls.
    """
    function: Any = autotune(BLOCKS, lambda x: x, **QUICK)(lambda x, block: x)
    function(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        kind, message, _ = told(lambda: function(2))
        assert (function(1), function(2, autotune=False), kind) == (1, 2, "CaptureError")
    assert "<lambda>[2] has no config yet" in message
    assert "before the capture" in message


# -- checks ----------------------------------------------------------------------------------------


def _is_right(result: torch.Tensor, x: torch.Tensor) -> bool:
    return bool((result == x + 1).all())


def _is_near(result: torch.Tensor, x: torch.Tensor) -> bool:
    return bool((result - x - 1 < 9).all())


def _asserts(result: torch.Tensor, x: torch.Tensor) -> None:
    assert _is_right(result, x), f"off by {(result - x - 1).max().item()}"


@on_each_rank(
    cases=[
        (_plus_one, "wrong by 30 at [0] (got 32, expected 2; 4 of 4 elements beyond"),
        (_is_right, "is_right returned False"),
        (_asserts, "off by 30.0"),
        (matches(lambda x: x + 1.001, rtol=0.01), "wrong by 30 at [0] (got 32, expected 2.001"),
    ]
)
def test_what_is_wrong_on_one_rank_is_dropped_on_all_before_it_is_timed(
    rank: int, case: tuple[Any, str]
) -> Any:
    """With each kind of check; the first rank's terminal shows the error with its size, whichever
    rank found it.
    """
    check, words = case
    step = autotune(BLOCKS, None, check=check, **QUICK)(
        lambda x, block: x + 1 + 30 * (block == 1 and rank == 1)
    )
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        os.environ["DIST_TUNE_VERBOSITY"] = "normal"
        assert step(X).tolist() == [2.0] * 4
    reason, *others = failures(step)
    assert reason is not None
    assert (others, chosen(step) != ["block=1"], step.records[0].candidates[0].n_replays) == (
        [None] * 2,
        True,
        0,
    )
    assert (reason.startswith("rank 1: the result is wrong"), words in reason) == (True, True)
    assert (reason in terminal.getvalue()) == (rank == 0)
    return reason


@on_each_rank()
def test_all_wrong_is_one_clear_error(rank: int):
    """On all ranks, also where one rank alone finds them wrong, and at once: what is wrong still
    talks to the other ranks.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = "60"

    @autotune(BLOCKS, None, check=lambda x: x + rank, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        all_reduced(x.clone())
        return x

    error, message, seconds = told(lambda: step(X))
    assert (error, seconds < 30) == ("NoValidConfigError", True)
    assert "none of its 3 configs runs" in message
    assert "rank 1: the result is wrong" in message


@on_each_rank()
def test_a_reference_may_talk_to_other_ranks(rank: int):
    """It is asked equally often on all ranks, also where the first config fails on one of them."""

    def reference(x: torch.Tensor) -> torch.Tensor:
        return all_reduced(x.clone())

    @autotune(BLOCKS, None, check=reference, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        if block == 1 and rank == 1:
            raise RuntimeError("not here")
        return reference(x)

    assert step(X).tolist() == [2.0] * 4
    assert failures(step) == ["rank 1: RuntimeError: not here", None, None]


@on_each_rank()
def test_what_was_chosen_without_a_check_is_not_trusted_with_one(rank: int):
    """A check, and its code, are a part of what a record is kept under."""

    def is_recalled(check: Any) -> bool:
        function = autotune(BLOCKS, None, check=check, n_warmup=0, n_repeat=1)(plus_one)
        function(X)
        return function.records[0].is_recalled

    def plus_one(x: torch.Tensor, block: int) -> torch.Tensor:
        return x + 1

    assert [is_recalled(check) for check in (None, _is_right, _is_right, _is_near, None)] == [
        False,
        False,
        True,
        False,
        True,
    ]


state: dict[str, Any] = {}
"""Not a part of the code: lists, dicts and what is in them may change."""


def _all(x: torch.Tensor) -> torch.Tensor:
    return all_reduced(x.clone()) if dist.is_initialized() else x


def _sum(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    state["n_asked"] += 1
    return _all(x) + c


def _adds(x: torch.Tensor, c: torch.Tensor, block: int) -> torch.Tensor:
    state["ran"].append(block)
    return c.copy_(_all(x) + c + 30 * (block == state["wrong"]))


def _checked(wrong: int | None = None, *, is_inside: bool = False) -> tuple[Any, bool, float]:
    """A job of a function with a reference, or of a closure around it: winner, whether a record had
    it, value of the call.
    """
    state.update(wrong=wrong, n_asked=0, ran=[])
    function: Any = autotune(BLOCKS, None, check=_sum, n_warmup=0, n_repeat=1)(_adds)
    step = contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1)(
        lambda: function(torch.ones(2), torch.ones(2))
    )
    step, value = (
        (step, step()) if is_inside else (function, function(torch.ones(2), torch.ones(2)))
    )
    (record,) = step.records
    if dist.is_initialized():
        dist.barrier()
    return record.best.fields["block"], record.is_recalled, value[0].item()


@on_each_rank(cases=["one folder", "a folder each", "a record of one rank", "inside a closure"])
def test_a_record_that_is_wrong_on_some_rank_is_tuned_anew_on_all(rank: int, case: str):
    """A hit costs one question to the reference and no run; the terminal says which rank was wrong,
    and the new record replaces the old.
    """
    is_inside = case == "inside a closure"
    if case.startswith("a "):
        os.environ["DIST_TUNE_CACHE_DIR"] += f"/{rank}"
    winner, *_ = _checked(is_inside=is_inside)
    if case == "a record of one rank" and rank == 1:  # it gets the record of the other
        shutil.rmtree(folder())
    assert (_checked(is_inside=is_inside), state["n_asked"], state["ran"]) == (
        (winner, True, 3.0),
        1,
        [winner],
    )
    jobs: list[Any] = []
    lines = shown(
        lambda: jobs.extend(
            _checked(winner if rank == 1 else None, is_inside=is_inside) for _ in range(2)
        )
    )
    other = jobs[0][0]
    assert (jobs, other != winner) == ([(other, False, 3.0), (other, True, 3.0)], True)
    words = "the config from the cache answers wrongly, and it is tuned anew: rank 1: wrong by 30"
    assert is_inside or any(words in line for line in lines)


def test_alone_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And with DIST_TUNE_MODE=require it is an error."""
    quiet(monkeypatch, tmp_path)
    winner, *_ = _checked()
    with monkeypatch.context() as patch:
        patch.setenv("DIST_TUNE_MODE", "require")
        with pytest.raises(
            CacheMissError, match="the config from the cache answers wrongly, rank 0: wrong by 30"
        ):
            _checked(winner)
    again, *others = _checked(winner)
    assert (again != winner, others) == (True, [False, 2.0])


# -- what is told ----------------------------------------------------------------------------------


@on_each_rank()
def test_prune_rules_say_how_many_they_removed(rank: int):
    """By the first rank, once for each site, by a name for people; repeated configs are not
    counted.
    """
    kept = {
        "early_config_prune": lambda configs, named, **kw: [
            config for config in configs if config.kwargs["BLOCK"] > 16
        ]
    }
    step = tuned(autotuned(blocks=(16, 16, 32, 64), prune_configs_by=kept))
    rule: Any = lambda config, x: np.bool_(config["block"] > 1)  # noqa: E731
    function: Any = autotune(BLOCKS, lambda x: x, rule, **QUICK)(lambda x, block=0: x)
    lines = shown(lambda: [(step(torch.zeros(64)), function(3)) for _ in range(2)])
    assert lines == [
        f"prune rules removed 1 of 3 configs of {site}"
        for site in ("add_kernel [64]", "<lambda> [3]")
    ]


@on_each_rank()
def test_prune_fn_must_return_a_bool(rank: int):
    """A list, as Triton's early_config_prune returns it, was True; an error on all ranks that names
    it. Other kinds of bool are bools.
    """

    def call(verdict: Any) -> Any:
        function: Any = autotune(BLOCKS, lambda x: x, lambda config, x: verdict, **QUICK)(
            lambda x, block=0: x
        )
        return function(3)

    for verdict in ([{"block": 1}], "yes", 2):
        with pytest.raises(
            TypeError, match=re.escape(f"<lambda> returned {verdict!r}: it is asked of each config")
        ):
            call(verdict)
    assert [call(each) for each in (True, np.bool_(True), 1, torch.tensor(True))] == [3] * 4


@on_each_rank()
def test_a_closure_that_launches_nothing_tunable_says_so(rank: int):
    """Once for each closure; a kernel with one config is not tunable."""
    steps = [tuned(None, lambda x: len(x)), tuned(autotuned(blocks=(32,))), tuned(autotuned())]
    lines = shown(lambda: [step(torch.zeros(n)) for step in steps for n in (64, 64, 32)])
    assert [": nothing tunable was launched in this call" in line for line in lines] == [True] * 2


@on_each_rank()
def test_ranks_that_choose_alone_beside_others_say_so(rank: int):
    """Once for a closure without is_dist."""
    steps = [tuned(autotuned(), is_dist=is_dist, cache=False) for is_dist in (False, True)]
    (line,) = shown(lambda: [step(torch.zeros(n)) for step in steps for n in (64, 32)])
    assert (
        "each rank chooses alone; ranks may disagree: a process group of 2 ranks is initialised and"
        " is_dist was not given" in line
    )


@on_each_rank(1)
def test_one_rank_of_a_group_is_not_told_that_it_chooses_alone(rank: int):
    assert shown(lambda: tuned(autotuned(), is_dist=False)(torch.zeros(64))) == []


@on_each_rank()
def test_a_value_that_has_not_run_is_told(rank: int):
    """A generator, a coroutine or a context manager of a function that looks ordinary; once for
    each closure.
    """

    def numbers(x: torch.Tensor) -> Any:
        yield x

    async def later(x: torch.Tensor) -> Any:
        return x

    kinds = {
        "generator": numbers,
        "coroutine": later,
        "context manager": contextlib.contextmanager(numbers),
    }
    steps = [tuned(None, lambda x, make=make: make(x)) for make in kinds.values()]
    lines = shown(
        lambda: [getattr(step(torch.zeros(n)), "close", list)() for step in steps for n in (4, 8)]
    )
    for line, kind in zip(lines, kinds, strict=True):
        assert (
            f" returned a {kind}, which has not run when it returns: nothing of it is tuned."
            in line
        )
        assert line.endswith(f"and call it within the {kind}")


@on_each_rank()
def test_a_kernel_with_one_config_left_is_no_kernel_that_was_launched_once(rank: int):
    """There was nothing to compare: no warning says that replays did not launch it."""
    one_left, beside = (
        autotuned(prune_configs_by={"perf_model": lambda BLOCK, **named: BLOCK, "top_k": 1}),
        autotuned(blocks=(16, 32)),
    )
    tuned(None, lambda x: launch(beside, launch(one_left, x)))(torch.zeros(64))
    assert not re.search("is not tuned|WARNING", log())
