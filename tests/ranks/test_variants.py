"""Arguments whose class changes from launch to launch: no launch of a replay that counts compiles its kernel. Fake driver.

All steps run in one world of two ranks; each test looks at what its own step came to.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from dist_tune import autotune, contextual_autotune
from dist_tune.compiler import replaced
from dist_tune.replays.trials import Trials
from dist_tune.runtime import interception
from dist_tune.testing import FakeH200, Outcome, values
from kernels import shard_gemm
from tests.steps import gemm_kernel, shift_kernel
from tests.worlds import on_ranks

pytestmark = pytest.mark.processes

MS = {16: 12.0, 32: 3.0, 64: 9.0, 128: 12.0}
"""What a launch takes, by block."""
STAGE_MS = {1: 6.0, 2: 4.0, 3: 1.0, 4: 2.0}


@triton.jit
def constant_kernel(x_ptr, y_ptr, n, step: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + step, mask=at < n)


@triton.jit
def heuristic_kernel(x_ptr, y_ptr, n, epoch, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + epoch + EVEN, mask=at < n)


def with_heuristics() -> Any:
    return triton.heuristics({"EVEN": lambda args: args["epoch"] % args["BLOCK"] == 0})(triton.jit(heuristic_kernel.fn))


@triton.jit
def picky_kernel(x_ptr, y_ptr, n, epoch, FAILS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.static_assert(not (FAILS and BLOCK == 32 and epoch != 1))
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + epoch, mask=at < n)


@triton.jit
def plain_kernel(x_ptr, step: tl.constexpr):
    tl.store(x_ptr, step)


def launch_ms(src: Any, metadata: Any) -> float:
    names = src.fn.arg_names
    if "BM" in names:  # of one step no stage matters, because the loop is gone
        return 0.2 if (names.index("K"),) in src.constants else STAGE_MS[metadata.num_stages]
    if "BLOCK" not in names:  # the GEMM's
        return 2.0 if metadata.num_warps == 8 else 6.0
    return MS[int(src.constants[(names.index("BLOCK"),)])]


def autotuned(
    kernel: Any = shift_kernel, blocks: tuple[int, ...] = (16, 32, 64, 128), warps: tuple[int, ...] = (4,), **options: Any
) -> Any:
    """A fresh autotuned kernel."""
    configs = [triton.Config({"BLOCK": block}, num_warps=each) for block in blocks for each in warps]
    if isinstance(kernel, JITFunction):
        kernel = triton.jit(kernel.fn)  # nothing of an earlier step is in its memory
    return triton.autotune(configs=configs, key=["n"], **options)(kernel)


class Watched:
    """Runs of a step, and the compilations inside its launches."""

    def __init__(self, step: Callable[[int], object], **options: Any) -> None:
        """``step`` is given the number of its run, from 1."""
        self.n_runs = self.n_in_timed = self.n_later = 0

        def run() -> None:
            self.n_runs += 1
            step(self.n_runs)

        self.tuned: Any = contextual_autotune(**{"is_dist": True, "n_warmup": 1, "n_repeat": 2, "cache": False, **options})(run)

    def result(self, n_calls: int = 0) -> Any:
        """Times that a timed launch compiled, blocks that won, variants, and candidates without a time; later calls follow."""
        with replaced(JITFunction, "_do_compile", self._counting):
            self.tuned()
            n_in_timed, self.n_later = self.n_in_timed, 0
            for _ in range(n_calls):
                self.tuned()
        untimed = [c.index for each in self.tuned.records for c in each.candidates if c.latency_ms is None and c.failure is None]
        records = self.tuned.records
        return n_in_timed, [each.best.fields.get("BLOCK") for each in records], [each.n_variants for each in records], untimed

    def _counting(self, compiled: Any) -> Any:
        def do_compile(kernel: Any, *args: Any) -> Any:
            listener = interception.listeners.get(threading.get_ident())
            is_timed = isinstance(listener, Trials) and any(trial.is_timed for trial in listener._schedule.values())
            is_launch = _async_compile.active_mode.get() is None
            self.n_in_timed += is_launch and is_timed
            self.n_later += is_launch
            return compiled(kernel, *args)

        return do_compile


def launching(kernel: Any, argument: Callable[[int], Any], *more: Any, **options: Any) -> Watched:
    """A step that launches the kernel with ``argument`` of the number of its run."""
    x, y = torch.zeros(64), torch.zeros(64)
    return Watched(lambda k: kernel[(1,)](x, y, 64, argument(k), *more), **options)


def counting(before: int) -> Any:
    return launching(autotuned(), lambda k: before + k).result()


def in_turn(rank: int, **options: Any) -> Any:
    return launching(autotuned(), lambda k: (64, 100)[k % 2], **options).result()


def two_sites(rank: int) -> Any:
    x, y, kernels = torch.zeros(64), torch.zeros(64), [autotuned(), autotuned()]

    def step(k: int) -> None:
        for i, kernel in enumerate(kernels):
            kernel[(1,)](x, y, 64 - i, 64 if (k + i) % 2 else 100)

    return Watched(step).result()


def unaligned(rank: int) -> Any:
    kernel, whole, y = autotuned(), torch.zeros(65), torch.zeros(64)
    return Watched(lambda k: kernel[(1,)](whole[k % 2 :][:64], y, 64, 3)).result()


def endless(rank: int, kernel: Any = constant_kernel) -> Any:
    step = launching(autotuned(kernel), lambda k: k)
    return step.result(n_calls=2)[1:], step.n_runs <= 25


def made_anew(rank: int) -> Any:
    """A kernel object of its own in each run, with the same code."""
    x, y = torch.zeros(64), torch.zeros(64)
    return Watched(lambda k: autotuned(triton.jit(shift_kernel.fn))[(1,)](x, y, 64, 3)).result()


def beside(rank: int, n_values: int) -> Any:
    kernel, x, y = autotuned(), torch.zeros(64), torch.zeros(64)

    def step(k: int) -> None:
        plain_kernel[(1,)](x, k % n_values)
        kernel[(1,)](x, y, 64, 3)

    return Watched(step).result()


def hooks(rank: int) -> Any:
    calls = Counter[str]()
    x, y, z = torch.ones(64), torch.ones(64), torch.ones(64)

    def pre_hook(args: dict[str, Any], reset_only: bool = False) -> None:
        calls["pre"] += not reset_only

    def post_hook(args: dict[str, Any], exception: BaseException | None) -> None:
        calls["post"] += 1

    hooked = autotuned(pre_hook=pre_hook, post_hook=post_hook)
    restoring = autotuned(restore_value=["y_ptr"], reset_to_zero=["x_ptr"])

    def step(k: int) -> None:
        hooked[(1,)](x, y, 64, k)
        restoring[(1,)](z, y, 64, k)

    n_in_timed, winners, _, untimed = Watched(step).result()
    return n_in_timed, winners, untimed, calls["pre"] == calls["post"] > 0, y.tolist() == [1.0] * 64, z.tolist() == [0.0] * 64


class Wrapped:
    """A layer of the user's between the autotuner and the kernel."""

    def __init__(self, fn: Any, swallows: bool) -> None:
        self.fn, self.arg_names, self.base_fn, self.swallows = fn, fn.arg_names, fn.fn, swallows

    def run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.fn.run(*args, **kwargs)
        except RuntimeError:
            raise AssertionError("an error of the tuner's own reached the user") from None
        except BaseException:
            if not self.swallows:
                raise


def wrapper(rank: int, swallows: bool) -> Any:
    step, n_launches = launching(autotuned(Wrapped(triton.jit(shift_kernel.fn), swallows)), lambda k: k), []
    n_in_timed, winners, _, untimed = step.result()
    for _ in range(3):
        FakeH200.launches.clear()
        step.tuned()
        n_launches.append(len(FakeH200.launches))
    return n_in_timed > 0, winners, untimed, n_launches, [c.failure for c in step.tuned.records[0].candidates]


def picky(rank: int, at: int) -> Any:
    step = launching(autotuned(picky_kernel, (16, 32, 64)), lambda k: 1 if k < at else 2, rank == 1)
    n_in_timed, winners, _, _ = step.result()
    return n_in_timed, winners, ["rank 1" in (each.failure or "") for each in step.tuned.records[0].candidates]


def function(rank: int) -> Any:
    x, y, epoch = torch.zeros(64), torch.zeros(64), 0

    @autotune([{"BLOCK": block} for block in MS], lambda n: n, n_warmup=1, n_repeat=2, cache=False)
    def step(n: int, BLOCK: int) -> None:
        nonlocal epoch
        epoch += 1
        shift_kernel[(1,)](x, y, n, epoch, BLOCK=BLOCK)

    step(64)
    record = step.records[0]
    return [each.index for each in record.candidates if each.latency_ms is None], record.best.fields["BLOCK"]


def gemm(rank: int) -> Any:
    blocks = ((64, 64, 4), (128, 64, 4), (128, 64, 8))
    configs = [shard_gemm.make_config(m, n, 64, warps=warps, stages=2) for m, n, warps in blocks]
    specialised = triton.jit(shard_gemm.ag_gemm_kernel.base_fn, do_not_specialize=["rank"])  # any int `epoch`, as of a plain kernel
    shard_gemm.ag_gemm_kernel = triton.autotune(configs=configs, key=["M", "N", "K"])(specialised)
    a, b, c, gathered = (torch.zeros(n, 128, dtype=torch.float16) for n in (128, 128, 256, 256))
    flags = torch.zeros(2, dtype=torch.int32)
    step = Watched(lambda k: shard_gemm.multiply_shards(a, gathered, b, c, flags, epoch=k, rank=rank))
    n_in_timed, *_ = step.result()
    (record,) = step.tuned.records
    return n_in_timed, record.best.fields["num_warps"], [each.index for each in record.candidates if each.n_replays == 0]


def equal_in_one(rank: int, lengths: tuple[int, ...]) -> Any:
    data = torch.zeros(64, 64, dtype=torch.bfloat16)
    kernel = triton.autotune([triton.Config({"BM": 32, "BN": 32}, num_stages=stages) for stages in STAGE_MS], key=[])(gemm_kernel)
    step = Watched(lambda k: [kernel[(1,)](data, data, data.float(), length) for length in lengths])
    step.result()
    return step.tuned.records[0].best.fields["num_stages"]


def not_tried(rank: int) -> Any:
    """All kernels are in memory from another key, also those that a guided search does not come to."""
    configs = [
        triton.Config({"BLOCK": block}, num_warps=n, num_stages=stages, maxnreg=regs)
        for stages in (1, 2)
        for block in (16, 32, 64)
        for n in (2, 4)
        for regs in (64, 128, 255)
    ]
    kernel, x, y = triton.autotune(configs, key=["n"])(shift_kernel), torch.zeros(512), torch.zeros(512)
    steps = [Watched(partial(lambda n, k: kernel[(1,)](x, y, n, 3), n), search=each) for each, n in (("racing", 256), ("guided", 512))]
    for step in steps:
        step.result()
    candidates = step.tuned.records[0].candidates
    untried = {i for i, each in enumerate(candidates) if each.left is not None and "not tried" in each.left}
    return len(untried) > 0, [each.index for each in candidates if each.equal_to in untried]


STEPS: dict[str, tuple[Callable[[int], Any], Any]] = {
    "an epoch that counts up from 1": (lambda rank: launching(autotuned(), lambda k: k).result(), (0, [32], [2], [])),
    "an epoch of other classes on each rank": (
        lambda rank: launching(autotuned(), lambda k: k + (13, 30)[rank]).result(),
        (0, [32], [2], []),
    ),
    "heuristics of an epoch": (lambda rank: launching(autotuned(with_heuristics()), lambda k: k).result(), (0, [32], [2], [])),
    "heuristics of multiples of 16": (
        lambda rank: launching(autotuned(with_heuristics()), lambda k: 16 * (k % 8 + 1), search="exhaustive", n_repeat=8).result(8)[::3],
        (0, []),
    ),
    "a stride at two sites out of step": (two_sites, (0, [32, 32], [2, 2], [])),
    "a slice that is not aligned in turn with one that is": (unaligned, (0, [32], [2], [])),
    "no warm-up": (partial(in_turn, n_warmup=0), (0, [32], [2], [])),
    "an exhaustive search": (
        partial(in_turn, search="exhaustive"),
        (0, [32], [2], []),
    ),
    "five constants in turn": (lambda rank: launching(autotuned(constant_kernel, (16, 32)), lambda k: k % 5).result(), (0, [32], [5], [])),
    "a constant that counts up": (endless, (([], [], []), True)),
    "a kernel made anew in each run": (made_anew, (0, [32], [1], [])),
    "five constants of a kernel beside it": (lambda rank: beside(rank, 5), (2, [32], [1], [])),
    "a constant beside it that counts up": (lambda rank: beside(rank, 10**6)[1:], ([], [], [])),
    "hooks, restore_value and reset_to_zero": (hooks, (0, [32, 32], [], True, True, True)),
    "a wrapper that passes errors on": (lambda rank: wrapper(rank, False), (False, [32], [], [1] * 3, [None] * 4)),
    "a wrapper that passes over errors": (lambda rank: wrapper(rank, True), (True, [32], [], [1] * 3, [None] * 4)),
    "a candidate fails for the second class": (lambda rank: picky(rank, 2), (0, [64], [False, True, False])),
    "a candidate fails for a class met in the race": (lambda rank: picky(rank, 5), (0, [64], [False, True, False])),
    "a function's kernel with an epoch": (function, ([], 32)),
    "a GEMM with descriptors and an epoch": (gemm, (0, 8, [])),
    "stages matter in the second launch alone": (lambda rank: equal_in_one(rank, (1, 64)), 3),
    "stages matter in the first launch alone": (lambda rank: equal_in_one(rank, (64, 1)), 3),
    "kernels in memory that a search did not try": (not_tried, (True, [])),
}


ON_BOTH = (
    "an epoch that counts up from 1",
    "heuristics of an epoch",
    "a slice that is not aligned in turn with one that is",
    "a constant that counts up",
    "a constant beside it that counts up",
    "a wrapper that passes over errors",
)
"""With both Tritons: how each tells arguments apart."""


def _run(rank: int, names: list[str]) -> dict[str, Any]:
    FakeH200.launch_ms = launch_ms
    return {name: STEPS[name][0](rank) for name in names}


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> list[Outcome]:
    """Two ranks that have run the steps of all selected tests, in the table's order."""
    items: list[Any] = request.session.items
    selected = {item.callspec.params.get("name") for item in items if item.path == request.path and hasattr(item, "callspec")}
    return on_ranks(
        2,
        _run,
        [name for name in STEPS if name in selected],
        mode="fake",
        timeout_s=110,
        env={"TRITON_DEFAULT_FP_FUSION": "1", "DIST_TUNE_DEADLINE_S": "30"},
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.once] * (name not in ON_BOTH)) for name in STEPS])
def test_replays_that_count_compile_nothing_and_every_candidate_has_its_time(name: str, world: list[Outcome]) -> None:
    """Compilations in timed replays, winners, variants, candidates without a time: what the table says, on both ranks."""
    for got in values(world):
        assert got[name] == STEPS[name][1]


@pytest.mark.parametrize(
    "told",
    [
        "its argument step is compiled in, and had 9 values (1, 2, 3, 4, 5, ...)",
        'take tl.constexpr off step and decorate the kernel with @triton.jit(do_not_specialize=["step"])',
        "plain_kernel, which was compiled in 8 timed replays",
    ],
)
def test_what_has_no_end_is_told_once_with_the_remedy(told: str, world: list[Outcome]) -> None:
    """The tuned kernel's argument, which ends the tuning, and that of a kernel beside it."""
    for each in world:
        assert each.log.count(told) == 1


def test_a_replay_that_compiles_is_told_of_and_run_again(world: list[Outcome]) -> None:
    """By a kernel beside the tuned one, and by one whose wrapper keeps it from being compiled ahead."""
    for each in world:
        assert "does not count: it compiled tests.ranks.test_variants.plain_kernel" in each.log
        assert "does not count: it compiled tests.steps.shift_kernel" in each.log
