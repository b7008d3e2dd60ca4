"""An autotuned function on real ranks: who decides, what it takes, and one answer on all ranks where something goes wrong."""

from __future__ import annotations

import contextlib
import enum
import io
import itertools
import os
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dist_tune import DistTuneError, NestedTuningError, autotune, contextual_autotune, prune_by_shared_memory, to_hashable
from dist_tune.testing import ExactTime
from dist_tune.tuning import notices
from tests.steps import (
    BLOCKS,
    QUICK,
    add_kernel,
    autotuned,
    best,
    chosen,
    failures,
    is_unpatched,
    launch,
    named,
    names,
    runs_of_this_process,
    shape_of,
    told,
    tuned,
)
from tests.worlds import DEADLINE_S, gathered, log, on_each_rank

# -- who decides -------------------------------------------------------------------------------------------------------


@on_each_rank()
def test_the_slowest_rank_decides_and_a_steady_call_is_an_ordinary_one(rank: int):
    """Block 1 is fastest on rank 0 and slowest on rank 1: both take 2. Later calls run once, talk to nobody and log nothing."""
    ms = [{1: 1, 2: 15, 4: 40}, {1: 60, 2: 15, 4: 40}][rank]
    ran: list[int] = []

    @autotune(BLOCKS, shape_of, n_warmup=1, n_repeat=2)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        ran.append(block)
        ExactTime.pass_ms(ms[block])
        return x + block

    assert step(torch.zeros(4)).tolist() == [2.0] * 4
    (record,) = step.records
    assert (chosen(step), record.n_replays) == (["block=2"], len(ran))
    assert record.candidates[0].rank_latencies_ms[1] > record.candidates[0].rank_latencies_ms[0] + 30

    ran.clear()
    before, talk = log(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("set", "get", "add", "check", "wait", "compare_set", "multi_get"):
            patch.setattr(dist.PrefixStore, name, lambda *args, name=name: talk.append(name))
        for _ in range(3):
            step(torch.zeros(4))
    assert (ran, talk, log() == before, is_unpatched()) == ([2, 2, 2], [], True, True)


@on_each_rank(4)
def test_two_groups_tune_at_once_and_the_world_for_itself(rank: int):
    """Each group has its own winner for one key, and the slower group rules the world; strangers are refused. Also of closures."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]

    @autotune(BLOCKS, shape_of, n_warmup=0, n_repeat=2)
    def step(x: torch.Tensor, block: int, group: Any = None) -> torch.Tensor:
        ExactTime.pass_ms(({1: 1, 2: 40, 4: 20} if rank < 2 else {1: 40, 2: 1, 4: 20})[block])
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    x = torch.ones(4)
    given: Any = {"group": mine, "autotune_pg": mine}
    assert [step(x, **each)[0].item() for each in (given, dict[str, Any](), given)] == [2.0, 4.0, 2.0]
    assert chosen(step) == [f"block={1 if rank < 2 else 2}", "block=4"]
    assert [each.environment.world_size for each in step.records] == [2, 4]  # so a job of another size hits where its groups are the same
    with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
        step(torch.ones(5), autotune_pg=groups[1 - rank // 2])
    kernel = autotuned(blocks=(16, 32))
    for pair in (0, 1):  # one group tunes while the other waits in a barrier of the world
        if rank // 2 == pair:
            tuned(kernel, group=mine)(torch.zeros(64))
        dist.barrier()
    with pytest.raises(ValueError, match="not in the group"):
        tuned(kernel, group=groups[1 - rank // 2])(torch.zeros(128))
    chosen_blocks = gathered(best(kernel))
    assert (chosen_blocks[0], chosen_blocks[2]) == (chosen_blocks[1], chosen_blocks[3])


@on_each_rank()
def test_a_function_inside_another_or_inside_a_closure_is_one_of_its_sites(rank: int):
    """The outer one tunes all of them at once, kernels of triton.autotune too; with ranks that it does not ask it says so."""
    ran: Counter[str] = Counter()
    kernel = autotuned(blocks=(16, 32))
    alone = dist.new_group([0])

    @autotune(BLOCKS, shape_of, **QUICK)
    def inner(x: torch.Tensor, block: int) -> torch.Tensor:
        ran["inner"] += 1
        return launch(kernel, x)

    @autotune(BLOCKS[1:], shape_of, **QUICK)
    def outer(x: torch.Tensor, block: int) -> torch.Tensor:
        ran["outer"] += 1
        y = inner(x)
        dist.all_reduce(y)
        z: torch.Tensor = inner(y, autotune=False)
        return z

    assert outer(torch.zeros(64))[0].item() == 2 + 1
    assert [name for name, _ in names(outer)] == ["add_kernel", "inner", "outer"]
    assert len(best(kernel)) == 1
    ran.clear()
    outer(torch.zeros(64))
    assert ran == {"outer": 1, "inner": 2}

    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: inner(x) + launch(kernel, x))
    assert step(torch.zeros(128))[0].item() == 2.0
    assert [name for name, _ in names(step)] == ["add_kernel", "inner"]
    n_records = len(inner.records)
    inner(torch.zeros(128))
    assert len(inner.records) == n_records
    with pytest.raises(NestedTuningError, match=r"decides with ranks \[0, 1\].*autotune_pg"):
        contextual_autotune()(lambda: inner(torch.zeros(256)))()
    if rank == 0:
        with pytest.raises(NestedTuningError, match=r"decides with ranks \[1\]"):
            contextual_autotune(is_dist=True, group=alone)(lambda: inner(torch.zeros(512)))()


@on_each_rank()
def test_a_cached_function_still_tunes_the_kernels_inside(rank: int):
    """The function's config comes from the cache, so it runs with that alone; its kernels are sites of that run. cache=False tunes anew."""
    ran, kernel = runs_of_this_process, autotuned(blocks=(16, 32))

    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        runs_of_this_process.append(block)
        return launch(kernel, x)

    def called(n: int, **options: Any) -> Any:
        ran.clear()
        function = autotune(BLOCKS, None, n_warmup=0, n_repeat=1, **options)(step)
        assert function(torch.zeros(n))[0].item() == 1.0
        return function

    called(64)
    kernel.cache.clear()
    assert names(called(64)) == [("add_kernel", True), ("step", True)]
    assert (len(set(ran)), len(best(kernel))) == (1, 1)
    assert names(called(192)) == [("add_kernel", False), ("step", True)]  # a new key for the kernel
    assert (len(ran) > 3, len(set(ran)), len(best(kernel))) == (True, 1, 2)  # runs for the kernel's configs
    called(64, cache=False)
    assert {*ran} == {1, 2, 4}


# -- what it takes -----------------------------------------------------------------------------------------------------


@on_each_rank()
def test_the_seeds_example_runs_as_written(rank: int):
    """Configs in a mapping, both ways to index them in prune_fn, to_hashable, the call-time keywords; verbose is rank 0's alone."""
    space = [{"gemm_config": triton.Config({"BLOCK": b, "GROUP": 1}, num_warps=w)} for b in (16, 32, 64) for w in (4, 8)]
    seen: list[Any] = []
    ran: list[triton.Config] = []

    def key_fn(A: torch.Tensor, ctx: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return to_hashable(A), ctx["num_ranks"]

    def prune_fn(config: Any, A: torch.Tensor, ctx: dict[str, Any], *args: Any, **kwargs: Any) -> bool:
        inner = config["gemm_config"]
        seen.append((config["BLOCK"], inner["BLOCK"], inner.kwargs["BLOCK"], inner.all_kwargs()["BLOCK"], config.num_warps))
        return prune_by_shared_memory(config, A, *args, **kwargs) and bool(inner.kwargs["BLOCK"] > 16)

    @autotune(config_space=space + space[:2], key_fn=key_fn, prune_fn=prune_fn, **QUICK)
    def my_gemm(A: torch.Tensor, ctx: dict[str, Any], gemm_config: triton.Config, straggler_option: Any = None) -> torch.Tensor:
        ran.append(gemm_config)
        y = torch.empty_like(A)
        add_kernel[(triton.cdiv(A.numel(), gemm_config.kwargs["BLOCK"]),)](A, y, A.numel(), BLOCK=gemm_config.kwargs["BLOCK"])
        return y

    x, ctx = torch.arange(40.0), {"num_ranks": 2, "workspace": torch.zeros(1)}
    results = [my_gemm(x, ctx, autotune=False)]
    assert ran.pop().kwargs["BLOCK"] == 16
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        results.append(my_gemm(x, ctx, autotune_verbose=True, straggler_option=(0, 1)))
    ran.clear()
    results.append(my_gemm(x, ctx=ctx, autotune=True))
    assert all(torch.equal(y, x + 1) for y in results)
    assert (len(ran), len(my_gemm.configs)) == (1, 6)
    assert seen == [(b, b, b, b, w) for b in (16, 32, 64) for w in (4, 8)] * 2  # once for each form of a call with this key
    assert re.search(r"BLOCK=(32|64)", chosen(my_gemm)[0])
    if rank == 0:
        assert re.search(r"^dist_tune:   3  +\d", terminal.getvalue(), re.MULTILINE)  # a row of the table
        assert "winner: " in terminal.getvalue()
    else:
        assert terminal.getvalue() == ""


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
    """Enums, functions, dtypes, tuples, tensors, objects; two that read alike are two, and the right one of them wins."""
    modes = [
        _Mode.SLOW, _slow, lambda: 20.0, lambda: 20.0, torch.float32, (1, "a"), _Policy(20.0), _Policy(1.0), None, _Mode.SLOW, 20.0, "20.0",
        torch.arange(2),
    ]  # fmt: skip

    @autotune([{"mode": mode} for mode in modes], None, n_warmup=1, n_repeat=3)
    def step(mode: Any) -> Any:
        ExactTime.pass_ms(getattr(mode, "ms", 20.0))
        return getattr(mode, "ms", mode)

    call: Any = step
    assert (call(), call()) == (1.0, 1.0)
    texts = [each.config for each in step.records[0].candidates]
    assert len(texts) == len(set(texts)) == 12
    assert not any("0x" in text for text in texts)
    assert [sum(word in text for text in texts) for word in ("_Policy", "<lambda>")] == [2, 2]
    assert [text for text in texts if "20.0" in text] == ["mode=20.0", "mode='20.0'"]


@on_each_rank()
def test_without_tuning_the_nearest_record_decides_if_asked(rank: int):
    """No record: the first config. An exact one, a near one: on all ranks, though one has none; one line with both shapes.

    Nothing of it counts for calls that may tune, nor for the line of DIST_TUNE_MODE at the program's end.
    """
    own = os.environ["DIST_TUNE_CACHE_DIR"] = f"{os.environ['DIST_TUNE_CACHE_DIR']}/{rank}"
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    ran = runs_of_this_process

    def step(x: torch.Tensor, block: int) -> int:
        ExactTime.pass_ms({1: 30, 2: 1, 4: 30}[block])
        runs_of_this_process.append(block)
        return block

    def new(nearest: bool = True) -> Any:
        return autotune(BLOCKS, shape_of, nearest=nearest, n_warmup=0, n_repeat=2)(step)

    x, near = torch.zeros(1024, 8), torch.zeros(1000, 8)
    assert new()(x, autotune=False) == 1
    if rank == 1:  # one rank's directory stays empty
        os.environ["DIST_TUNE_CACHE_DIR"] += " elsewhere"
    new()(x)
    os.environ["DIST_TUNE_CACHE_DIR"] = own
    ran.clear()
    fresh = new()
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        assert fresh(x, autotune=False) == 2
        assert [fresh(near, autotune=False) for _ in range(3)] == [2, 2, 2]
    assert ran == [2, 2, 2, 2]
    told = [line for line in terminal.getvalue().splitlines() if "the nearest is of" in line]
    assert ["[1000, 8]" in line and "[1024,8]" in line and "block=2" in line for line in told] == [True] * (rank == 0)
    assert notices._uses == {}
    assert new(nearest=False)(x, autotune=False) == 1
    assert (fresh(near), len(fresh.records)) == (2, 2), "a call that may tune has tuned"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert new()(x, autotune=False) == 2, "under capture each rank looks into its own cache"


@on_each_rank()
def test_kernels_inside_a_call_that_uses_the_nearest_record_follow(rank: int):
    """They are not tuned either: their first config, where they have no record."""
    kernel, runs = autotuned(blocks=(64, 32, 16)), []

    def work(x: torch.Tensor, factor: int) -> torch.Tensor:
        runs.append(factor)
        return launch(kernel, x)

    step: Any = autotune([{"factor": 3}, {"factor": 1}], lambda x: x.numel(), nearest=True)(work)
    for _ in range(2):
        step(torch.zeros(64), autotune=False)
    assert (runs, best(kernel), step.records) == ([3, 3], [64], [])


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@on_each_rank()
def test_a_result_of_a_collective_may_be_an_argument(rank: int):
    """It is waited for before it is copied, with a check, too."""
    for check in (None, _plus_one):
        x: Any = all_reduce(torch.full((1 << 10,), rank + 1.0), "sum", list(range(2)))
        step = autotune(BLOCKS, None, check=check, **QUICK)(lambda x, block: x + 1)
        assert bool((step(x) == 4).all())
        assert failures(step) == [None] * 3


@on_each_rank()
def test_a_distributed_tensor_is_changed_once(rank: int):
    """Its part on this rank is what is copied and put back, because the function is not tuned."""
    x: Any = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (2,)), [Shard(0)])
    step: Any = autotune(BLOCKS, None, **QUICK)(lambda x, block: x.add_(1))
    assert step(x).to_local().tolist() == [2.0] * 4
    assert step.records == []


# -- keys that never come again ----------------------------------------------------------------------------------------


def _tunings(key_fn: Any, calls: list[tuple[Any, ...]]) -> tuple[int, list[str]]:
    """Tunings in a list of calls, and the lines about keys."""
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    function = autotune(BLOCKS[:2], key_fn, **QUICK)(lambda *args, block=0: len(args))
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        for args in calls:
            assert function(*args) == len(args)
    return len(function.records), [line for line in terminal.getvalue().splitlines() if "never repeats" in line]


def _check_endless(rank: int, keys: dict[str, tuple[Any, list[tuple[Any, ...]]]]) -> None:
    for key_fn, calls in keys.values():
        n_tunings, lines = _tunings(key_fn, calls)
        assert (n_tunings, len(lines)) == (3, int(rank == 0))
        for line in lines:
            assert "has a key that never repeats: 3 tunings in as many calls with arguments alike, keys [" in line
            assert "let key_fn return only what decides whether a config can be used again: not tuned" in line
            assert line.count("[") == line.count("]") == 3, line


@on_each_rank()
def test_a_key_that_never_repeats_is_told_of(rank: int):
    """A counter and a float as keys of arguments that are alike: three are tuned, and one line on the first rank says why."""
    x, numbers = torch.zeros(4), itertools.count(100)
    floats = (lambda x, scale: (to_hashable(x), scale)), [(x, 0.1 * i) for i in range(6)]
    _check_endless(rank, {"counter": ((lambda x: next(numbers)), [(x,)] * 6), "float": floats})


@on_each_rank(1, is_dist=False)
def test_an_address_is_a_key_that_never_repeats(rank: int):
    alive = [torch.zeros(4) for _ in range(6)]
    _check_endless(rank, {"memory": ((lambda x: x.data_ptr()), [(each,) for each in alive])})


@on_each_rank()
def test_a_loop_over_shapes_tunes_them_all(rank: int):
    """Ten shapes, sizes or names once each, and the layers of a model; and modes that arguments do not show, each called twice."""
    x, shapes, layers, modes = torch.zeros(64), range(1, 11), [SimpleNamespace(number=i) for i in range(6)], iter([0, 0, 1, 1, 2, 2, 3, 3])
    found = [
        _tunings(to_hashable, [(torch.zeros(n),) for n in shapes]),
        _tunings(lambda n: n, [(n,) for n in shapes]),
        _tunings(lambda x, n: n, [(x, n) for n in shapes]),
        _tunings(lambda layer, x: layer.number, [(layer, x) for layer in layers]),
        _tunings(lambda x, mode: mode, [(x, mode) for mode in "abcde"]),
        _tunings(lambda x: next(modes), [(x,)] * 8),
    ]
    assert found == [(n, []) for n in (10, 10, 10, 6, 5, 4)]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


DROPPED: list[tuple[dict[int, list[int]], str]] = [
    ({1: [1]}, "before"), ({1: [1]}, "after"), ({0: [2], 1: [1]}, "before"), ({0: [2], 1: [1]}, "after"),
    ({0: [1, 2, 4], 1: [1, 2, 4]}, "before"), ({0: [1, 2], 1: [4]}, "before"),
]  # fmt: skip
"""Rank -> blocks that raise there; before or after the collectives."""


@on_each_rank(cases=DROPPED)
def test_a_config_that_fails_on_one_rank_is_dropped_on_all(rank: int, case: tuple[dict[int, list[int]], str]):
    """Before its collectives another config stands in; behind them nothing is run. Where none is left, one error says so, at once."""
    on, where = case

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

    out = {block: rank for rank, blocks in on.items() for block in blocks}
    if len(out) == 3:
        error, message, seconds = told(lambda: step(torch.ones(4)))
        assert error == "NoValidConfigError"
        assert "none of its 3 configs runs" in message
        assert re.search(r"RuntimeError: block [14] is out on rank", message)
        assert seconds < DEADLINE_S
    else:
        assert step(torch.ones(4))[0].item() == 4.0
        told_of = {block: f"rank {by}: RuntimeError: block {block} is out on rank {by}" for block, by in out.items()}
        assert failures(step) == [told_of.get(block) for block in (1, 2, 4)]
        assert int(chosen(step)[0][-1]) not in out
    assert is_unpatched()


@on_each_rank()
def test_a_rule_that_keeps_nothing_is_an_error_on_all_ranks(rank: int):
    """At once, also where another rank's keeps some; it says that it is the rule."""
    rules: list[tuple[Any, str, str]] = [
        (lambda config, x: rank == 0 and config["block"] > 1, "NoValidConfigError", "prune_fn keeps none of 3 configs"),
        (lambda config, x: None, "NoValidConfigError", "prune_fn keeps none of 3 configs"),
    ]
    for rule, kind, words in rules:
        function = autotune(BLOCKS, None, rule, **QUICK)(named(f"pruned: {words}", lambda x, block: x))
        error, message, seconds = told(lambda function=function: function(1))
        assert (error, words in message, seconds < DEADLINE_S) == (kind, True, True)


@on_each_rank(cases=["prune_fn", "check", "reset", "key_fn", "call"])
def test_what_the_user_gave_raises_on_one_rank(rank: int, who: str):
    """That rank raises it, and the others hear of it at once, with its name; before a tuning they learn that it has passed, and go on."""
    os.environ["DIST_TUNE_DEADLINE_S"] = "1"

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

    step = named(f"step with {who}", lambda x, block: x)
    function = autotune(BLOCKS, key_fn, prune_fn, check=check, reset=lambda: may_raise("reset"), **QUICK)(step)
    error, message, seconds = told(lambda: function(1) if who != "call" or rank == 0 else function(1, 2, 3))
    assert is_unpatched()
    if rank == 1:
        assert (error, f"{who} had enough" in message) == (("TypeError", False) if who == "call" else ("ValueError", True))
    elif who in ("key_fn", "call"):
        assert (error, seconds < 0.9) == ("", True)
    else:
        cause = f"{who} had enough" if who != "prune_fn" else "prune_fn of "
        assert (error, f"rank 1 raised ValueError: {cause}" in message, seconds < DEADLINE_S) == ("PeerFailedError", True, True)


@on_each_rank()
def test_ranks_with_different_keys_and_different_arguments(rank: int):
    """Different keys at once are two sites of one tuning. A key that is new on one rank alone runs a known config there."""
    os.environ["DIST_TUNE_DEADLINE_S"] = "1"
    by_shape = autotune(BLOCKS, shape_of, **QUICK)(named("by shape", lambda x, block: x))
    by_value = autotune(BLOCKS, shape_of, **QUICK)(named("by value", lambda x, block: x.sum()))
    assert by_shape(torch.zeros(2 + rank)).numel() == 2 + rank
    assert by_value(torch.full((3,), float(rank))).item() == 3.0 * rank
    assert told(lambda: by_shape(torch.zeros(2)))[0] == ""
    assert len(by_shape.records) == 2


@on_each_rank()
def test_attempts_to_tune_within_a_tuning_do_not_hang(rank: int):
    """In prune_fn and in check a tuned function may be called, on all ranks alike; from reset it is refused."""
    refused: set[str] = set()
    function: Any = None

    def again() -> None:
        """A tuning inside a tuning, where ranks may not talk: in reset, before a replay."""
        try:
            function(2)
        except DistTuneError as error:
            refused.add(type(error).__name__)

    inner = autotune(BLOCKS, lambda x: x, **QUICK)(lambda x, block: x)
    function = autotune(BLOCKS, lambda x: x, lambda config, x: inner(x) == x, reset=again, **QUICK)(lambda x, block: x)
    assert (function(1), refused, len(inner.records)) == (1, {"NestedTuningError"}, 1)
    checked = autotune(BLOCKS, None, check=lambda x: inner(x) + 1, **QUICK)(lambda x, block: x + 1)
    assert (checked(5), len(checked.records)) == (6, 2)


@on_each_rank()
def test_a_captured_graph_uses_what_is_known(rank: int):
    """A new key is an error with what to do, on each rank for itself; a known one and autotune=False are ordinary calls."""
    function: Any = autotune(BLOCKS, lambda x: x, **QUICK)(lambda x, block: x)
    function(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        kind, message, _ = told(lambda: function(2))
        assert (function(1), function(2, autotune=False), kind) == (1, 2, "CaptureError")
    assert "<lambda>[2] has no config yet" in message
    assert "before the capture" in message
