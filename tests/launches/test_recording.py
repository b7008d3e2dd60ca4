"""Launches that are recorded, and those that are predicted from them: compiled ahead, or dropped on
all ranks. On the fake H200.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_tune import autotune, contextual_autotune
from dist_tune.compiler.candidate import Candidate
from dist_tune.compiler.patches import replaced
from dist_tune.configs import as_configs, describe_all
from dist_tune.launches import LaunchRecorder, RecordedLaunch, around_launches, predict
from dist_tune.testing import FakeH200
from tests.worlds import on_each_rank


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, ROWS: tl.constexpr = 1):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def twice(x):
    return 2 * x


@triton.jit
def thrice(x):
    return 3 * x


@triton.jit
# An argument with the name of a parameter of our wrappers.
def act_kernel(x_ptr, ACT: tl.constexpr, kernel: tl.constexpr):
    at = tl.arange(0, kernel)
    tl.store(x_ptr + at, ACT(tl.load(x_ptr + at)))


@triton.jit
def descriptor_kernel(x_desc, y_desc, BLOCK: tl.constexpr):
    y_desc.store([0, 0], x_desc.load([0, 0]))


@triton.jit
def dot_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    t = tl.load(x_ptr + at[:, None] * n + at[None, :])
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(4):
        acc = tl.dot(tl.load(x_ptr + k * BLOCK + at[:, None] * n + at[None, :]), t, acc)
    tl.store(y_ptr + at[:, None] * n + at[None, :], acc)


def tiles(*blocks: int, **options: Any) -> list[dict[str, Any]]:
    return [{"config": triton.Config({"BLOCK": block}, **options)} for block in blocks]


def x_and_y() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(256), torch.zeros(256, dtype=torch.float16)


@contextmanager
def recording(recorder: LaunchRecorder) -> Any:
    """The launches in this block are recorded, and are not made."""
    with (
        replaced(JITFunction, "run", lambda run: lambda *args, **kwargs: None),
        around_launches(recorder.record),
    ):
        yield


def record(function: Any, space: Any, candidate: int, *args: Any) -> list[RecordedLaunch]:
    """The launches of a function, ``f[]``, with one of its configs."""
    recorder = LaunchRecorder([("f[]", candidate)])
    with recording(recorder):
        function(*args, **as_configs(space, function)[candidate])
    return recorder.launches["f[]", candidate]


def predicted(space: Any, launches: list[RecordedLaunch]) -> dict[int, list[RecordedLaunch]]:
    """Of all configs, from the launches with one of them."""
    return predict(
        as_configs(space, lambda **config: None),
        describe_all(space),
        {each.candidate: launches for each in launches},
        range(len(space)),
    )


def note_waits() -> list[str]:
    """The launches that wait for a compilation, from now on."""
    waited: list[str] = []
    triton.knobs.runtime.jit_cache_hook = lambda **facts: (
        None if facts["is_manual_warmup"] else waited.append(facts["repr"])
    )
    return waited


def key(launch: RecordedLaunch) -> str:
    """Of the kernel that Triton would compile."""
    return Candidate(RecordedLaunch, launch).compilation.key


def predicted_and_true(function: Any, space: Any, *args: Any) -> list[tuple[list[str], list[str]]]:
    """For each predicted launch: the keys that are predicted for all candidates, and those of the
    launches that follow.
    """
    made = [record(function, space, i, *args) for i in range(len(space))]
    found = predicted(space, made[0])
    assert [*found] == [*range(len(space))]
    runs = [[key(each) for each in launches] for launches in found.values()]
    true = [[key(each) for each in launches] for launches in zip(*made, strict=True)]
    return [
        ([*each], next((keys for keys in true if keys[0] == each[0]), []))
        for each in zip(*runs, strict=True)
    ]


FOLLOWED: dict[str, tuple[Any, Any]] = {
    "all that a config has": (
        lambda x, y, config: copy_kernel[(1,)](x, y, 256, **config.all_kwargs()),
        [*tiles(16, 32, num_warps=2), *tiles(16, num_stages=5)],
    ),
    "constants and one option": (
        lambda x, y, config: copy_kernel[(1,)](
            x, y, 255, num_warps=config.num_warps, **config.kwargs
        ),
        [*tiles(16, 32, num_warps=2), *tiles(16)],
    ),
    "by position": (
        lambda x, y, block: copy_kernel[lambda meta: (1,)](x, y, 256, block, 4),
        [{"block": b} for b in (16, 64)],
    ),
    "in other letters": (
        lambda x, y, rows, Block: copy_kernel[(1,)](x, y, 1, BLOCK=Block, ROWS=rows),
        [{"Block": 16, "rows": r} for r in (2, 8)],
    ),
    "beside what is not handed on": (
        lambda x, y, block, mode: copy_kernel[(1,)](x, y, 256, BLOCK=block),
        [{"block": b, "mode": mode} for b in (16, 32) for mode in ("a", "b")],
    ),
    "functions": (
        lambda x, y, act: act_kernel[(1,)](x, ACT=act, kernel=16),
        [{"act": twice}, {"act": thrice}],
    ),
    "to an unaligned tensor": (
        lambda x, y, config: copy_kernel[(1,)](x[1:], y, 16, **config.kwargs),
        tiles(16, 32),
    ),
    "to several launches": (
        lambda x, y, config: (
            [copy_kernel[(1,)](a, b, 16, **config.kwargs) for a, b in ((x, y), (y, x))]
            + [act_kernel[(1,)](x, twice, 32)]
        ),
        tiles(16, 32),
    ),
}


def alone(**options: Any) -> Any:
    """A test on a fake H200 with little shared memory; Triton asks for its size once for all."""

    def decorate(body: Any) -> Any:
        @functools.wraps(body)
        def on_small_device(rank: int, *case: Any) -> Any:
            FakeH200.shared_limit_bytes = 4_000
            return body(rank, *case)

        return on_each_rank(1, is_dist=False, modes=["fake"], **options)(on_small_device)

    return decorate


@alone(cases=[*FOLLOWED])
def test_a_prediction_is_what_will_be_compiled(rank: int, name: str):
    """To the key of Triton's disk cache, for every candidate and every launch that a config
    reaches.
    """
    launches = predicted_and_true(*FOLLOWED[name], *x_and_y())
    assert len(launches) == (2 if name == "to several launches" else 1)
    for predicted, true in launches:
        assert predicted == true
        assert all(predicted)
        assert len(set(predicted)) > 1


@alone(cases=[True, False])
def test_descriptors_are_predicted(rank: int, hook: bool):
    """Where a hook sets their blocks, or the function, whose descriptors stay as they are: by the
    constant of the same value.
    """

    def set_block(nargs: dict[str, Any]) -> None:
        for name in ("x_desc", "y_desc"):
            nargs[name].block_shape = [nargs["BLOCK"], 64]

    mine: list[Any] = []

    def function(x: torch.Tensor, config: triton.Config) -> None:
        mine.append(
            [TensorDescriptor.from_tensor(x, [config.kwargs["BLOCK"], 64]) for _ in range(2)]
        )
        descriptor_kernel[(1,)](*mine[-1], **config.kwargs)

    compared = predicted_and_true(
        function, tiles(16, 32, pre_hook=set_block if hook else None), torch.zeros(64, 64)
    )
    assert [(predicted == true, len(set(predicted))) for predicted, true in compared] == [(True, 2)]
    assert [each.block_shape for each in mine[0]] == [[16, 64], [16, 64]]


@alone()
def test_what_does_not_follow_is_not_predicted(rank: int):
    """A value made of a config's, a function that launches nothing."""

    def doubled(x: torch.Tensor, y: torch.Tensor, block: int) -> None:
        copy_kernel[(1,)](x, y, 256, BLOCK=2 * block)

    space = [{"block": 16}, {"block": 32}]
    assert [predicted(space, record(doubled, space, 0, *x_and_y())), predicted([{}], [])] == [
        {}
    ] * 2


@alone()
def test_a_block_of_two_possible_sources_is_not_predicted(rank: int):
    """A size that two constants have may follow from either, where they differ in another config; a
    launch with different ones tells.
    """

    def square(x: torch.Tensor, BLOCK: int, COLUMNS: int) -> None:
        tile = TensorDescriptor.from_tensor(x, [BLOCK, COLUMNS])
        either_kernel[(1,)](tile, tile, BLOCK=BLOCK, COLUMNS=COLUMNS, IS_DESCRIPTOR=True)

    space, x = [{"BLOCK": block, "COLUMNS": 16} for block in (16, 32)], torch.zeros(64, 64)

    def blocks(launches: list[RecordedLaunch]) -> dict[int, list[Any]]:
        return {
            i: [each.given["x"].block_shape for each in found]
            for i, found in predicted(space, launches).items()
        }

    assert blocks(record(square, space, 0, x)) == {0: [[16, 16]]}
    recorded = record(square, space, 1, x)
    assert blocks(recorded) == {0: [[16, 16]], 1: [[32, 16]]}
    recorded[0].given["x"].layout = "of the block, as in Gluon"
    assert blocks(recorded) == {1: [[32, 16]]}


@alone()
def test_a_kernel_that_is_launched_often_hides_no_other(rank: int):
    """Two launches of each kernel count; and no tensor is kept alive by the recorded launches, nor
    one in a tuple.
    """

    def many(x: torch.Tensor, config: triton.Config) -> None:
        for n in range(50):
            copy_kernel[(1,)](x, x, n, **config.kwargs)
        dot_kernel[(1,)](x, x, 16, **config.kwargs)
        act_kernel[(1,)]((x, 1), twice, 32)

    x = torch.zeros(256)
    launches = record(many, tiles(16, 32), 0, x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert [each.kernel.fn.__name__ for each in launches] == [
        "copy_kernel",
        "copy_kernel",
        "dot_kernel",
        "act_kernel",
    ]
    assert ([len(each) for each in predicted(tiles(16, 32), launches).values()], alive()) == (
        [3, 3],
        None,
    )


@alone()
def test_triton_is_restored(rank: int):
    """Also after an exception.

    Launches outside the function, on other threads, and warm-ups are not heard.
    """
    own, (x, y), under_way = vars(JITFunction)["run"], x_and_y(), list[tuple[str, int]]()
    recorder = LaunchRecorder(under_way)

    def launch() -> None:
        copy_kernel[(1,)](x, y, 256, BLOCK=16)

    def fail() -> None:
        with around_launches(recorder.record):
            launch()  # outside the function
            under_way.append(("f[]", 0))
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
            copy_kernel.warmup(x, y, 256, BLOCK=16, grid=(1,))
            assert not any(recorder.launches.values())
            launch()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    launch()
    assert (len(recorder.launches["f[]", 0]), vars(JITFunction)["run"] is own) == (1, True)


@alone()
def test_only_the_launch_that_was_predicted_ends_as_predicted(rank: int):
    """With other sizes, too.

    A launch with other constants, options, dtypes or alignments, or of another candidate, is made.
    """
    x, y = x_and_y()
    launches = record(
        lambda x, y, config: copy_kernel[(1,)](x, y, 256, **config.kwargs), tiles(16, 32), 0, x, y
    )
    (failing,), reason = (
        predicted(tiles(16, 32), launches)[1],
        "rank 1: OutOfResources: out of resource: x",
    )
    attempts: list[tuple[bool, int, Any]] = [
        (True, 1, lambda: copy_kernel[(1,)](x, y, 256, BLOCK=32)),
        (True, 1, lambda: copy_kernel[(1,)](x, y, 512, BLOCK=32)),
        (False, 1, lambda: copy_kernel[(1,)](x, y, 100, BLOCK=32)),
        (False, 1, lambda: copy_kernel[(1,)](x, y, 1, BLOCK=32)),
        (False, 1, lambda: copy_kernel[(1,)](x[1:], y, 256, BLOCK=32)),
        (False, 0, lambda: copy_kernel[(1,)](x, y, 256, BLOCK=32)),
        (False, 1, lambda: copy_kernel[(1,)](x, y, 256, BLOCK=16)),
        (False, 1, lambda: copy_kernel[(1,)](x, y, 256, BLOCK=32, num_warps=2)),
        (False, 1, lambda: copy_kernel[(1,)](y, y, 256, BLOCK=32)),
        (False, 1, lambda: act_kernel[(1,)](x, twice, 32)),
    ]
    for ends, candidate, launch in attempts:
        recorder = LaunchRecorder([("f[]", candidate)])
        recorder.failures = [(failing, reason)]
        with (
            recording(recorder),
            pytest.raises(triton.OutOfResources, match=reason) if ends else nullcontext(),
        ):
            launch()


@alone()
def test_a_tuning_compiles_ahead_and_believes_launches_rather_than_predictions(rank: int):
    """One launch waits for a compilation; what does not fit is dropped; a config that the function
    tames, or does not use, is not.

    Nor is one whose launch has another row length, by which loads are not pipelined.
    """
    waited = note_waits()
    x = torch.ones(128, 128, dtype=torch.float16)

    def tune(stages_of: Any, n_of: Any = lambda n: 128) -> Any:
        @autotune(
            [{"config": triton.Config({}, num_stages=n)} for n in (2, 3, 12)],
            None,
            n_warmup=0,
            n_repeat=1,
            cache=False,
        )
        def tuned(x: torch.Tensor, config: triton.Config) -> None:
            n = n_of(config.num_stages)
            dot_kernel[(1,)](
                x, x, n, BLOCK=16, num_warps=1, num_stages=stages_of(config.num_stages)
            )

        tuned(x)
        assert all(each.shared_bytes for each in tuned.records[0].candidates) or stages_of(12) != 12
        return [each.failure for each in tuned.records[0].candidates]

    *fit, too_large = tune(lambda n: n)
    assert (len(waited), fit) == (1, [None, None])
    assert "OutOfResources: out of resource: shared memory" in too_large
    assert (
        tune(lambda n: min(n, 3))
        == tune(lambda n: 2)
        == tune(lambda n: n, lambda n: 127 if n == 12 else 128)
        == [None] * 3
    )
    triton.knobs.runtime.jit_cache_hook = None


@triton.jit
def either_kernel(x, y, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, IS_DESCRIPTOR: tl.constexpr):
    if IS_DESCRIPTOR:
        y.store([0, 0], x.load([0, 0]))
    else:
        at = tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at))


@alone()
def test_one_config_of_each_kind_waits_for_its_compilation(rank: int):
    """Those that differ in numbers alone are predicted from it, also the blocks of descriptors that
    the function makes.
    """
    waited = note_waits()
    space = [
        {"BLOCK": n, "IS_DESCRIPTOR": is_one} for n in (16, 32, 64, 128) for is_one in (False, True)
    ]

    @autotune(space, None, n_warmup=0, n_repeat=1, cache=False)
    def tuned(x: torch.Tensor, BLOCK: int, IS_DESCRIPTOR: bool) -> None:
        operands = [
            TensorDescriptor.from_tensor(x, [BLOCK, 8]) if IS_DESCRIPTOR else x for _ in range(2)
        ]
        either_kernel[(1,)](
            *operands, BLOCK=BLOCK, COLUMNS=8, IS_DESCRIPTOR=IS_DESCRIPTOR, num_warps=4
        )

    tuned(torch.ones(256, 256, dtype=torch.float16))
    triton.knobs.runtime.jit_cache_hook = None
    assert [each.failure for each in tuned.records[0].candidates] == [None] * 8
    assert len(waited) == 2


@triton.jit
def late_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))


@triton.jit
def kind_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))


@triton.jit
def part_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@alone()
def test_a_one_is_of_another_kind_than_larger_numbers(rank: int):
    """As a K that is not split: another dtype follows.

    One launch of each kind waits, and none is compiled for nothing.
    """
    waited = note_waits()

    @autotune(
        [{"N_SPLITS": n, "BLOCK": block} for n in (1, 2, 4) for block in (16, 32, 64, 128)],
        None,
        n_warmup=0,
        n_repeat=1,
        cache=False,
    )
    def tuned(x: torch.Tensor, y: torch.Tensor, N_SPLITS: int, BLOCK: int) -> None:
        part_kernel[(N_SPLITS,)](x, y if N_SPLITS == 1 else y.float(), BLOCK=BLOCK)

    tuned(*x_and_y())
    triton.knobs.runtime.jit_cache_hook = None
    made = [*Path(os.environ["TRITON_CACHE_DIR"]).rglob("part_kernel.cubin")]
    assert [each.failure for each in tuned.records[0].candidates] == [None] * 12
    assert (len(waited), len(made)) == (2, 4 + 4)


@triton.jit
def rows_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + ROWS, mask=at < n)


@alone()
def test_kinds_may_share_a_kernel(rank: int):
    """One flag chooses the kernel, another one goes into it: the first launch of each kernel waits,
    and a leader's at most.
    """
    waited = note_waits()
    space = [
        {"IS_PLAIN": plain, "ROWS": rows, "BLOCK": block}
        for plain, rows, block in product((False, True), (False, True), (16, 32, 64, 128, 256))
    ]

    @autotune(space, None, n_warmup=0, n_repeat=1, cache=False)
    def tuned(x: torch.Tensor, y: torch.Tensor, IS_PLAIN: bool, ROWS: bool, BLOCK: int) -> None:
        (copy_kernel if IS_PLAIN else rows_kernel)[(1,)](x, y, 256, BLOCK=BLOCK, ROWS=ROWS)

    tuned(*x_and_y())
    triton.knobs.runtime.jit_cache_hook = None
    assert [each.failure for each in tuned.records[0].candidates] == [None] * len(space)
    assert len(waited) <= 3, waited


@triton.jit
def first_kernel(tensors, SHAPE: tl.constexpr):
    at = tl.arange(0, SHAPE[0])
    tl.store(tensors[0] + at, tl.load(tensors[0] + at))


@alone()
def test_tuples_are_followed_and_compared(rank: int):
    """A tuple in a config goes into the launch, and one of other tensors is another launch."""
    space, x = [{"SHAPE": (block, 1)} for block in (16, 32)], torch.zeros(64)
    found = predicted(
        space, record(lambda x, SHAPE: first_kernel[(1,)]((x,), SHAPE=SHAPE), space, 0, x)
    )
    assert [each.given["SHAPE"] for (each,) in found.values()] == [(16, 1), (32, 1)]
    assert [found[1][0].is_like(each[0]) for each in (found[0], found[1])] == [False, True]
    other = predicted(
        space, record(lambda x, SHAPE: first_kernel[(1,)]((x.half(),), SHAPE=SHAPE), space, 0, x)
    )
    assert not found[1][0].is_like(other[1][0])


@alone()
def test_a_hook_that_wants_more_than_the_kernels_arguments_drops_nothing(rank: int):
    """The function gives it what it wants; nothing is predicted then."""

    def set_block(nargs: dict[str, Any]) -> None:
        nargs["x"].block_shape = nargs["y"].block_shape = [nargs["BLOCK"], 16]
        assert nargs["N"] == 16

    @autotune(tiles(16, 32, pre_hook=set_block), None, n_warmup=0, n_repeat=1, cache=False)
    def tuned(x: torch.Tensor, config: triton.Config) -> None:
        operands = {name: TensorDescriptor.from_tensor(x, [16, 16]) for name in ("x", "y")}
        config.pre_hook({**operands, **config.kwargs, "N": 16})
        either_kernel[(1,)](**operands, COLUMNS=8, IS_DESCRIPTOR=True, **config.all_kwargs())

    tuned(torch.ones(64, 64, dtype=torch.float16))
    assert [each.failure for each in tuned.records[0].candidates] == [None, None]


@alone()
def test_a_config_that_does_not_fit_tells_of_its_kind(rank: int):
    """Also of the launch that it is not given: the others of its kind wait for none, and their
    needs are known.
    """
    waited = note_waits()
    space = [
        {
            "KIND": "a",
            "N": 5,
            "config": triton.Config({"BLOCK": 16}, num_warps=1, num_stages=stages),
        }
        for stages in (2, 3)
    ]
    for n, stages in ((7, 12), (16, 2), (16, 3), (16, 4), (16, 5), (16, 6)):
        space.append(
            {
                "KIND": "b",
                "N": n,
                "config": triton.Config({"BLOCK": 16}, num_warps=1, num_stages=stages),
            }
        )

    @autotune(space, None, n_warmup=0, n_repeat=1, cache=False)
    def tuned(x: torch.Tensor, config: triton.Config, **rest: object) -> None:
        y = torch.ones(128, 128)
        copy_kernel[(1,)](x, y, 128, **config.kwargs)
        dot_kernel[(1,)](x, y, 128, **config.all_kwargs())

    tuned(torch.ones(128, 128, dtype=torch.float16))
    triton.knobs.runtime.jit_cache_hook = None
    found = tuned.records[0].candidates
    assert [i for i, each in enumerate(found) if each.failure] == [2]
    assert all(each.shared_bytes for each in found)
    assert len(waited) == 2, waited


@alone()
def test_of_two_functions_of_a_step_the_first_launches_wait_alone(rank: int):
    """Where one has more kinds, further configs of the other one run meanwhile: they are compiled
    ahead, too. The first launches wait.
    """
    waited = note_waits()
    few = [
        {"BLOCK": 2**k, "N": (1 + 2 * (kind == "a")) * 2**k, "KIND": kind}
        for kind in "ba"
        for k in range(2, 11)
    ]
    many = [{"BLOCK": 2**k, "KIND": kind} for kind in "abcdefgh" for k in (4, 5)]

    @autotune(few, None, n_warmup=0, n_repeat=1, cache=False)
    def of_two(x: torch.Tensor, BLOCK: int, N: int, KIND: str) -> None:
        late_kernel[(1,)](x, x, BLOCK=BLOCK, KIND=KIND)

    @autotune(many, None, n_warmup=0, n_repeat=1, cache=False)
    def of_eight(x: torch.Tensor, BLOCK: int, KIND: str) -> None:
        kind_kernel[(1,)](x, x, BLOCK=BLOCK, KIND=KIND)

    @contextual_autotune(is_dist=False, n_warmup=0, n_repeat=1, cache=False)
    def step(x: torch.Tensor) -> None:
        of_two(x)
        of_eight(x)

    step(torch.zeros(2048))
    triton.knobs.runtime.jit_cache_hook = None
    assert len(waited) == 2, waited


@pytest.mark.once
@on_each_rank(modes=["fake"])
def test_hooks_that_set_blocks_share_no_prediction(rank: int) -> list[str]:
    """Of a config that one rank has too little memory for, between two collectives: each rank knows
    it by its own block.
    """
    FakeH200.shared_limit_bytes = 4_000 if rank == 1 else 232_448

    def set_block(nargs: dict[str, Any]) -> None:
        nargs["x"].block_shape = nargs["y"].block_shape = [nargs["BLOCK"], 64]

    @autotune(tiles(16, 128, 32, pre_hook=set_block), None, n_warmup=0, n_repeat=1, cache=False)
    def step(x: torch.Tensor, config: triton.Config) -> None:
        operands = {name: TensorDescriptor.from_tensor(x, [16, 64]) for name in ("x", "y")}
        config.pre_hook({**operands, **config.kwargs})
        dist.all_reduce(torch.ones(4))
        either_kernel[(1,)](**operands, COLUMNS=8, IS_DESCRIPTOR=True, **config.all_kwargs())
        dist.all_reduce(torch.ones(4))

    step(torch.ones(512, 512, dtype=torch.float16))
    failures = [each.failure or "" for each in step.records[0].candidates]
    assert failures[0] == ""
    assert "rank 1: OutOfResources" in failures[1]
    return failures


@pytest.mark.once
@on_each_rank(modes=["fake"])
def test_a_launch_of_one_rank_alone_drops_its_config_on_all(rank: int) -> str:
    """The other rank launches that kernel with configs of another kind, and has no such launch to
    end.
    """
    FakeH200.shared_limit_bytes = 4_000 if rank == 1 else 232_448
    cases = [("b", 16, 2), ("a", 5, 2), ("a", 7, 3), ("b", 16, 12), ("b", 5, 3), ("b", 5, 4)]
    space = [
        {
            "KIND": kind,
            "N": n,
            "config": triton.Config({"BLOCK": 16}, num_warps=1, num_stages=stages),
        }
        for kind, n, stages in cases
    ]

    @autotune(space, None, n_warmup=0, n_repeat=1, cache=False)
    def step(x: torch.Tensor, KIND: str, config: triton.Config, **rest: object) -> None:
        y = torch.ones(128, 128)
        if KIND == "a" or rank == 1:
            dot_kernel[(1,)](x, y, 128, **config.all_kwargs())
        copy_kernel[(1,)](x, y, 128, **config.kwargs)

    step(torch.ones(128, 128, dtype=torch.float16))
    assert [i for i, each in enumerate(step.records[0].candidates) if each.failure] == [3]
    return step.records[0].best.config


@pytest.mark.once
@on_each_rank(modes=["fake"], cases=[False, True])
def test_shared_memory_that_one_rank_lacks_drops_the_config_on_all(
    rank: int, launches_more: bool
) -> str:
    """It is predicted, so that no rank launches what another one cannot, though there are
    collectives before and behind.

    Also where one rank launches another kernel before.
    """
    FakeH200.shared_limit_bytes = 4_000 if rank == 1 else 232_448
    space = [
        {"gemm_config": triton.Config({"BLOCK": 16}, num_warps=1, num_stages=stages)}
        for stages in (2, 3, 12)
    ]

    @autotune(space, None, n_warmup=0, n_repeat=1)
    def step(x: torch.Tensor, gemm_config: triton.Config) -> torch.Tensor:
        y = torch.ones(128, 128)
        dist.all_reduce(y[0])  # behind it a rank that cannot launch would be alone
        if launches_more and rank == 0:
            part_kernel[(1,)](x, y, BLOCK=gemm_config.kwargs["BLOCK"])
        dot_kernel[(1,)](x, y, 128, **gemm_config.all_kwargs())
        dist.all_reduce(y[0])
        return y

    step(torch.ones(128, 128, dtype=torch.float16))
    *fit, too_large = [each.failure or "" for each in step.records[0].candidates]
    assert fit == ["", ""]
    assert "rank 1: OutOfResources: out of resource: shared memory" in too_large
    return step.records[0].best.config
