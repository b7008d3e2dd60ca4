"""Steps whose launches change from call to call: arguments of another class, sizes in buckets,
uneven lengths.
"""

from __future__ import annotations

import _thread
import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from dist_tune import autotune, contextual_autotune, power_of_two
from dist_tune.testing import ExactTime, FakeH200
from tests.steps import (
    FACES,
    Bare,
    Face,
    Filed,
    Step,
    accumulate_kernel,
    all_reduced,
    autotuned,
    best,
    configs,
    constants_of,
    is_unpatched,
    launch,
    run_job,
    shift_kernel,
    told,
    tuned,
)
from tests.worlds import further, gathered, log, on_each_rank

once = pytest.mark.once

# -- arguments whose class changes -----------------------------------------------------------------

MS = {16: 12.0, 32: 3.0}
"""What a launch takes, by block."""
COMPILATION_MS = 1000.0


@triton.jit
def constant_kernel(x_ptr, y_ptr, n, step: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + step, mask=at < n)


@triton.jit
def heuristic_kernel(x_ptr, y_ptr, n, epoch, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + epoch + EVEN, mask=at < n)


@triton.jit
def picky_kernel(x_ptr, y_ptr, n, epoch, FAILS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.static_assert(not (FAILS and BLOCK == 32 and epoch != 1))
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + epoch, mask=at < n)


@triton.jit
def plain_kernel(x_ptr, step: tl.constexpr):
    tl.store(x_ptr, step)


def fresh(kernel: Any = shift_kernel, **options: Any) -> Any:
    """Autotuned, with nothing of an earlier step in its memory."""
    return autotuned(triton.jit(kernel.fn), tuple(MS), **options)


def records_of(step: Callable[[int], object], **options: Any) -> list[Any]:
    """The records of a tuning of ``step(k)`` in its k-th run.

    By the clock of the test, a launch that compiles takes a second.
    """
    # What other steps of this module have compiled.
    os.environ["TRITON_CACHE_DIR"] = str(Path(os.environ["DIST_TUNE_CACHE_DIR"]).parents[1])
    FakeH200.launch_ms = staticmethod(
        lambda source, _: MS.get(constants_of(source).get("BLOCK", 0), 0.0)
    )
    n_runs = 0

    def run() -> None:
        nonlocal n_runs
        n_runs += 1
        step(n_runs)

    def compiles(*, is_manual_warmup: bool, **facts: Any) -> None:
        ExactTime.pass_ms(0.0 if is_manual_warmup else COMPILATION_MS)

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = compiles
        decorated = contextual_autotune(
            **{"is_dist": True, "n_warmup": 1, "n_repeat": 2, "cache": False, **options}
        )(run)
        decorated()
    return decorated.records


def launching(
    argument: Callable[[int], Any], kernel: Any = None, *more: Any, n: int = 64
) -> Callable[[int], Any]:
    """A step that launches a kernel with ``argument`` of the number of its run."""
    kernel, x, y = kernel or fresh(), torch.zeros(64), torch.zeros(64)
    return lambda k: kernel[(1,)](x, y, n, argument(k), *more)


def with_heuristics(argument: Callable[[int], int]) -> Any:
    return launching(
        argument,
        autotuned(
            triton.heuristics({"EVEN": lambda args: args["epoch"] % args["BLOCK"] == 0})(
                triton.jit(heuristic_kernel.fn)
            ),
            tuple(MS),
        ),
    )


def two_sites() -> Callable[[int], Any]:
    sites = [launching(lambda k, i=i: 64 if (k + i) % 2 else 100, n=64 - i) for i in range(2)]  # type: ignore[misc]
    return lambda k: [site(k) for site in sites]


def unaligned() -> Callable[[int], Any]:
    kernel, whole, y = fresh(), torch.zeros(65), torch.zeros(64)
    return lambda k: kernel[(1,)](whole[k % 2 :][:64], y, 64, 3)


def beside(n_values: int) -> Callable[[int], Any]:
    step, x = launching(lambda k: 3), torch.zeros(64)
    return lambda k: (plain_kernel[(1,)](x, k % n_values), step(k))


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


def wrapped(swallows: bool) -> Callable[[int], Any]:
    return launching(lambda k: k, autotuned(Wrapped(fresh().fn, swallows), tuple(MS)))


class Case(NamedTuple):
    make: Callable[[int], Callable[[int], Any]]
    """The step of a rank."""
    n_variants: list[int]
    """Of each record."""
    told: str = ""
    options: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "an epoch that counts up, from elsewhere on each rank": Case(
        lambda rank: launching(lambda k: k + 13 * rank), [2]
    ),
    "heuristics of an epoch": Case(lambda rank: with_heuristics(lambda k: k), [2]),
    "heuristics of multiples of 16": Case(
        lambda rank: with_heuristics(lambda k: 16 * (k % 8 + 1)), [2], "", {"search": "exhaustive"}
    ),
    "a stride at two sites out of step": Case(lambda rank: two_sites(), [2, 2]),
    "a slice that is not aligned in turn with one that is": Case(lambda rank: unaligned(), [2]),
    "no warm-up": Case(
        lambda rank: launching(lambda k: (64, 100)[k % 2]), [2], "", {"n_warmup": 0}
    ),
    "five constants in turn": Case(
        lambda rank: launching(lambda k: k % 5, fresh(constant_kernel)), [5]
    ),
    "a constant that counts up": Case(
        lambda rank: launching(lambda k: k, fresh(constant_kernel)),
        [],
        "its argument step is compiled in, and had 9 values (1, 2, 3, 4, 5, ...). "
        "If it decides nothing about the code, take tl.constexpr off step and decorate "
        'the kernel with @triton.jit(do_not_specialize=["step"])',
    ),
    "a kernel made anew in each run": Case(lambda rank: lambda k: launching(lambda k: 3)(k), [1]),
    "five constants of one beside it": Case(
        lambda rank: beside(5), [1], "does not count: it compiled tests.ranks.test_variants.plain"
    ),
    "a constant beside it that counts up": Case(
        lambda rank: beside(10**6), [], "plain_kernel, which was compiled in 8 timed replays"
    ),
    "a wrapper that passes errors on": Case(lambda rank: wrapped(False), [2]),
    "a wrapper that passes over errors": Case(
        lambda rank: wrapped(True), [1], "does not count: it compiled tests.steps.shift_kernel"
    ),
}
ON_BOTH = ("heuristics of an epoch", "a slice that is", "a constant", "a wrapper that passes over")
"""With both Tritons: how each tells arguments apart."""
FURTHER = (
    "heuristics of multiples of 16",
    "a stride at two sites out of step",
    "five constants in turn",
    "a wrapper that passes errors on",
)


@on_each_rank(
    modes=["fake"],
    cases=[
        pytest.param(
            name,
            marks=pytest.mark.slow if name in FURTHER else [once] * (not name.startswith(ON_BOTH)),
        )
        for name in CASES
    ],
)
def test_no_replay_that_counts_compiles(rank: int, name: str):
    """Each candidate has the time of its launches alone, whichever classes they meet; a step
    without an end of them is told of once.
    """
    case = CASES[name]
    records = records_of(case.make(rank), **case.options)
    assert [each.n_variants for each in records] == case.n_variants
    assert all(
        0 < each.latency_ms < COMPILATION_MS for record in records for each in record.candidates
    )
    assert {record.best.fields["BLOCK"] for record in records} <= {32}
    assert log().count(case.told) == 1 or (case.n_variants and case.told in log())


@once
@on_each_rank(modes=["fake"], cases=[2, 5])
def test_a_config_that_fails_for_another_class_is_out(rank: int, at: int):
    """Of an argument that changes in the second run, or in the middle of the race, on one rank
    alone.
    """
    (record,) = records_of(launching(lambda k: 1 if k < at else 2, fresh(picky_kernel), rank == 1))
    assert ["rank 1" in (each.failure or "") for each in record.candidates] == [False, True]


@once
@on_each_rank(modes=["fake"])
def test_hooks_and_tensors_of_launches_that_are_made_again(rank: int):
    """Each ``pre_hook`` has its ``post_hook``, and ``restore_value`` and ``reset_to_zero`` act,
    where a launch has to be compiled first.
    """
    calls, tensors = Counter[str](), [torch.ones(64) for _ in range(3)]

    def pre_hook(args: dict[str, Any], reset_only: bool = False) -> None:
        calls["pre"] += not reset_only

    def post_hook(args: dict[str, Any], exception: BaseException | None) -> None:
        calls["post"] += 1

    hooked, restoring = (
        fresh(pre_hook=pre_hook, post_hook=post_hook),
        fresh(restore_value=["y_ptr"], reset_to_zero=["x_ptr"]),
    )
    x, y, z = tensors
    assert len(records_of(lambda k: (hooked[(1,)](x, y, 64, k), restoring[(1,)](z, y, 64, k)))) == 2
    assert calls["pre"] == calls["post"] > 0
    assert [each[0].item() for each in tensors] == [1.0, 1.0, 0.0]


@once
@on_each_rank(modes=["fake"])
def test_a_function_whose_kernel_meets_other_classes(rank: int):
    """Each config of a function has its time, too."""
    x, y, epoch = torch.zeros(64), torch.zeros(64), 0
    FakeH200.launch_ms = staticmethod(lambda source, _: MS[constants_of(source)["BLOCK"]])

    @autotune([{"BLOCK": block} for block in MS], lambda n: n, n_warmup=1, n_repeat=2, cache=False)
    def step(n: int, BLOCK: int) -> None:
        nonlocal epoch
        epoch += 1
        shift_kernel[(1,)](x, y, n, epoch, BLOCK=BLOCK)

    step(64)
    (record,) = step.records
    assert [round(each.latency_ms or 0.0) for each in record.candidates] == [*MS.values()]


# -- sizes in buckets ------------------------------------------------------------------------------

POWERS: Any = {"*": {"n": power_of_two}}
FLOATS = ("torch.float32", "torch.float32")
QUICK: Any = {"n_warmup": 0, "n_repeat": 1, "cache": False}


def summing(face: Face = "contextual", **options: Any) -> Step:
    """The sum of all elements plus 1 over all ranks, with sizes in buckets."""
    bucket = POWERS if face == "contextual" else power_of_two
    return Step(
        face, (16, 32), rest=lambda y: float(all_reduced(y.sum())), **{"bucket": bucket, **options}
    )


def buckets(step: Any) -> list[int]:
    """Those that were tuned."""
    return [int(re.findall(r"\d+", each.key)[0]) for each in step.records if not each.is_recalled]


@once
@on_each_rank(cases=[(face, how) for face in FACES for how in ("equal", "unequal")])
def test_random_lengths_tune_once_for_each_power_of_two(rank: int, case: tuple[Face, str]):
    """Where ranks have other lengths each sum is its own, and no rank waits for one that needs no
    tuning.
    """
    face, how = case
    step, drawn = summing(face), random.Random(rank if how == "unequal" else 0)
    lengths = [int(2 ** drawn.uniform(3, 9)) for _ in range(60)]
    assert [step(torch.zeros(n)) for n in lengths] == [
        sum(each) for each in zip(*gathered(lengths), strict=True)
    ]
    found, met = buckets(step), {power_of_two(n) for n in lengths}
    assert max(Counter(found).values()) == 1
    # Of unequal ones some wait for a call in which both ranks miss them, or come from the other
    # rank's record.
    assert {*found} <= met
    assert len(found) > 3 if how == "unequal" else {*found} == met


@once
@on_each_rank()
def test_ranks_in_other_buckets_tune_both_of_them(rank: int):
    """In one call, each rank with its own; a rank that comes to the other's bucket later takes its
    config without a tuning.
    """
    step = summing()
    assert [step(torch.zeros(n)) for n in ((100, 300), (120, 290))[rank]] == [220.0, 590.0]
    assert [step(torch.zeros(n)) for n in ((300, 65), (70, 511))[rank]] == [370.0, 576.0]
    assert ({key[0] for key in step.kernel.cache}, sorted(buckets(step))) == (
        {128, 512},
        [128, 512],
    )


@triton.jit
def even_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Needs a BLOCK that divides n."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + 1.0)


@triton.jit
def asserting_kernel(x_ptr, y_ptr, n: tl.constexpr, BLOCK: tl.constexpr):
    """Says so itself."""
    tl.static_assert(n % BLOCK == 0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + 1.0)


@triton.jit
def masked_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < (n if not EVEN else 1 << 20)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=keep) + 1.0, mask=keep)


def dividing(each: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
    return [config for config in each if named["n"] % config.kwargs["BLOCK"] == 0]


def made_of_size(each: list[Any], named: dict[str, Any], **_: Any) -> Any:
    """As a library's rule, which makes configs of the exact size."""
    for config in each:
        block = min(config.kwargs["BLOCK"], triton.next_power_of_2(named["n"]))
        yield triton.Config({"BLOCK": block, "EVEN": named["n"] % block == 0})


UNFIT: dict[str, Any] = {
    "a rule drops it": (even_kernel, dividing),
    "a rule makes it": (masked_kernel, made_of_size),
    "the kernel asserts": (asserting_kernel, None),
}
wrong: list[tuple[int, Any]] = []
"""Sizes with a wrong result, and the config."""


def unfit(kind: str = "a rule drops it") -> Any:
    base, rule = UNFIT[kind]
    return autotuned(
        base, (64, 128, 512), prune_configs_by={"early_config_prune": rule} if rule else None
    )


def over(kernel: Any, n: int) -> float:
    """Adds one to ``n`` elements of more, in a trial as in any launch; their sum over ranks."""
    x, y = torch.zeros(1024), torch.zeros(1024)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
    if (float(y[:n].min()), float(y[n:].sum())) != (1.0, 0.0):
        wrong.append((n, kernel.best_config))
    return float(all_reduced(y.sum()))


@once
@on_each_rank(
    cases=[
        *((kind, "replayed") for kind in UNFIT),
        ("a rule drops it", "in one step"),
        ("a rule drops it", "online"),
        *(further((kind, "online")) for kind in ("a rule makes it", "the kernel asserts")),
    ]
)
def test_a_config_is_used_only_at_sizes_of_its_bucket_where_it_fits(
    rank: int, case: tuple[str, str]
):
    """Tuned at 512, where one block is fastest, the bucket runs at 384 and 320 what fits there, in
    each call and trial.
    """
    kind, how = case
    wrong.clear()
    kernel, is_online = unfit(kind), how == "online"
    step: Any = contextual_autotune(
        is_dist=True, bucket=POWERS, search="online" if is_online else None, **QUICK
    )(lambda *sizes: sum(over(kernel, n) for n in sizes))
    calls = [(512, 384, 320)] if how == "in one step" else [(512,), (384,), (320,)]
    for sizes in calls * (20 if is_online else 2):
        assert step(*sizes) == 2.0 * sum(sizes)
    assert wrong == []
    assert len(buckets(step)) <= 1  # none online, which has not come to its end
    used = {n: (step(n), kernel.best_config.kwargs["BLOCK"])[1] for n in (512, 384, 320)}
    assert is_online or kind != "a rule drops it" or used[384] in (64, 128)


@once
@on_each_rank(cases=["replayed", "online"])
def test_ranks_at_other_sizes_of_a_bucket_use_what_fits_each(rank: int, how: str):
    """Rules drop another config on each rank: what both keep is tuned, and no rank dies; so at each
    size that follows, in one call too.
    """
    wrong.clear()
    kernel = unfit()
    step: Any = contextual_autotune(
        is_dist=True, bucket=POWERS, search="online" if how == "online" else None, **QUICK
    )(lambda *sizes: [over(kernel, n) for n in sizes])
    sizes = [512, 384, 320] * 4
    mine, other = (sizes, sizes[1:] + sizes[:1])[:: 1 - 2 * rank]
    assert [step(n)[0] for n in mine] == [n + m for n, m in zip(mine, other, strict=True)]
    assert step(*mine) == [n + m for n, m in zip(mine, other, strict=True)]
    assert wrong == []
    assert how == "online" or len(step.records[0].candidates) == 2


@once
@on_each_rank()
def test_the_size_that_names_a_bucket_does_not_find_its_config_elsewhere(rank: int):
    """In a step without buckets the kernel's rule drops at 512 what was tuned at 384 for the bucket
    of 512.
    """

    def prune(each: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
        return [config for config in each if (named["n"] == 512) == (config.kwargs["BLOCK"] == 64)]

    kernel = autotuned(prune_configs_by={"early_config_prune": prune})
    for bucket, n in ((POWERS, 384), ({}, 512)):
        contextual_autotune(is_dist=True, bucket=bucket, **QUICK)(over)(kernel, n)
    assert {
        key[0]: config.kwargs["BLOCK"] == 64
        for key, config in kernel.cache.items()
        if key[-1] != "in buckets"
    } == {512: True}
    assert len(kernel.cache) == 2


@once
@on_each_rank(cases=[power_of_two, None])
def test_a_function_s_rule_is_asked_at_each_size_of_a_bucket(rank: int, bucket: Any):
    """``prune_fn`` sees the exact size where ``bucket`` or ``key_fn`` rounds it; the next best
    config that it keeps is used there.
    """
    ran, asked = list[tuple[int, int]](), list[int]()

    def keep(config: Any, n: int) -> bool:
        asked.append(n)
        return bool(n % config["block"] == 0)

    space, key_fn = (
        [{"block": each} for each in (64, 128, 512)],
        (lambda n: n) if bucket else power_of_two,
    )

    @autotune(space, key_fn, keep, bucket=bucket, reset=list, **QUICK)
    def work(n: int, block: int) -> int:
        ran.append((n, block))
        return n

    assert [work(n) for n in (512, 384, 320)] == [512, 384, 320]
    n_asked = len(asked)
    assert [work(n) for n in (512, 384, 320)] == [512, 384, 320]
    assert [n % block for n, block in ran[-3:]] == [0, 0, 0]
    assert len(asked) == n_asked


@once
@on_each_rank()
def test_calls_that_differ_in_anything_a_rule_may_see_ask_it(rank: int):
    """Names of keywords, sizes in a tuple, a dtype: the key is one for all of them."""
    wrong.clear()

    def keep(config: Any, x: torch.Tensor, shape: tuple[int, int], m: int = 1, n: int = 1) -> bool:
        fits = (
            n % config["block"] == 0
            and shape[1] % config["block"] == 0
            and x.dtype is torch.float32
        )
        return bool(fits or config["block"] == 1)

    @autotune(
        [{"block": each} for each in (4, 1)], lambda *args, **kwargs: 0, keep, reset=list, **QUICK
    )
    def work(
        x: torch.Tensor, shape: tuple[int, int], m: int = 1, n: int = 1, *, block: int
    ) -> None:
        if not keep({"block": block}, x, shape, m, n):
            wrong.append((n, block))

    x = torch.zeros(4)
    work(x, (1, 4), m=3, n=4)
    for args, kwargs in [
        ((x, (1, 4)), {"n": 3, "m": 4}),
        ((x, (4, 1)), {"m": 3, "n": 4}),
        ((x.half(), (1, 4)), {"m": 3, "n": 4}),
    ]:
        work(*args, **kwargs)
    assert wrong == []


@once
@on_each_rank(cases=FACES)
def test_a_later_job_hits_the_record_of_a_bucket(rank: int, face: Face):
    """That of another size in it, and one of exactly its size, which was tuned without buckets."""
    exact: Any = {"bucket": {} if face == "contextual" else None}
    for options, n, is_hit in (
        ({}, 100, False),
        ({}, 70, True),
        (exact, 256, False),
        ({}, 200, True),
    ):
        step = summing(face, **options)
        step(torch.zeros(n + rank * (options is not exact)))
        assert [each.is_recalled for each in step.records] == [is_hit]


@once
@on_each_rank()
def test_a_config_for_the_exact_size_does_not_stand_for_the_bucket(rank: int):
    """One rank has it from vanilla tuning: without buckets all would use it, here all tune.

    Outside of the step exact sizes count.
    """
    asked = list[int]()

    def prune(each: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
        asked.append(named["n"])
        return each

    kernel = autotuned(
        prune_configs_by={"early_config_prune": prune},
        do_bench=lambda call, quantiles: (call(), [1.0] * 3)[1],
    )
    if rank == 1:
        kernel.cache[(100, *FLOATS)] = kernel.configs[0]
    step = tuned(kernel, bucket=POWERS)
    step(torch.zeros(100))
    assert {key[0] for key in kernel.cache} == {128, *[100] * rank}
    assert len({*gathered(kernel.cache[(128, *FLOATS, "in buckets")].kwargs["BLOCK"])}) == 1
    asked.clear()
    launch(kernel, torch.zeros(90))  # as ever: Triton tunes 90
    assert (asked, is_unpatched(), (90, *FLOATS) in kernel.cache) == ([90], True, True)


@once
@on_each_rank(cases=["hook", "library's cache"])
def test_a_known_config_that_triton_would_have_to_find(rank: int, case: str):
    """One with a hook, and one in a mapping of a library's own: launched without a meeting, with
    the hook called once.
    """
    hooked = list[int]()
    kernel = autotuned(
        configs=configs(
            16,
            32,
            **({"pre_hook": lambda full: hooked.append(full["n"])} if case == "hook" else {}),
        )
    )
    if case != "hook":
        kernel.cache = Bare()
    step = tuned(kernel, bucket=POWERS)
    step(torch.zeros(100))
    hooked.clear()
    before, n_records = log().count("meeting"), len(step.records)
    step(torch.zeros(128))  # a first call of new lengths
    for _ in range(4):
        step(torch.zeros(100))
    assert hooked == ([128, *[100] * 4] if case == "hook" else [])
    assert (len(step.records), kernel.nargs) == (n_records, None)
    assert log().count("meeting") - before <= 2


@once
@on_each_rank()
def test_a_kernel_that_is_decorated_in_each_call(rank: int):
    """It is known again by its bucket, after the second call without a meeting."""
    step: Any = tuned(None, lambda x: launch(autotuned(blocks=(16, 32)), x), bucket=POWERS)
    for n in (100, 100, 100, 100, 90, 120):
        assert step(torch.zeros(n + rank)).eq(1).all()
    assert buckets(step) == [128]


@once
@on_each_rank()
def test_tensors_that_are_restored_are_so_in_a_bucket(rank: int):
    """The launch that tunes changes its argument once, as each launch of the bucket after it."""
    kernel = autotuned(accumulate_kernel, restore_value=["y_ptr"])
    step: Any = tuned(kernel, lambda x, y: launch(kernel, x, y), bucket=POWERS, reset=lambda: None)
    for n in (100, 128, 100):
        y = torch.ones(n)
        assert step(torch.ones(n), y).eq(2).all()
    assert (len(step.records), len(kernel.cache)) == (1, 1)


@once
@on_each_rank()
def test_a_step_of_its_own_has_no_buckets(rank: int):
    """Two steps share a kernel: what one of them says of sizes is nothing to the other."""
    kernel = autotuned(blocks=(16, 32))
    coarse, exact = tuned(kernel, bucket=POWERS), tuned(kernel)
    for n in (100, 120):
        coarse(torch.zeros(n))
        exact(torch.zeros(n))
    assert (len(coarse.records), len(exact.records)) == (1, 2)
    assert {key[0] for key in kernel.cache} == {100, 120, 128}


@once
@on_each_rank(modes=["fake"])
def test_a_step_tuned_online_has_one_site_for_a_bucket(rank: int):
    """Its calls take turns in the sizes of one bucket and count once each; the winner is in use for
    all of them.
    """
    FakeH200.launch_ms = staticmethod(
        lambda source, _: {16: 1.0, 32: 0.5, 64: 0.25, 128: 0.8}[constants_of(source)["BLOCK"]]
    )
    kernel, weight = autotuned(blocks=(16, 32, 64, 128)), torch.zeros(1)

    def counted(x: torch.Tensor) -> float:
        launch(kernel, x)
        weight.add_(1.0)
        return float(all_reduced(weight.clone()))

    step = contextual_autotune(is_dist=True, search="online", max_slowdown=0.5, bucket=POWERS)(
        counted
    )
    got = run_job(lambda k: step(torch.zeros(100 + k % 7 + rank)))
    assert got == [2.0 * (k + 1) for k in range(len(got))]
    assert (best(kernel), {key[0] for key in kernel.cache}) == ([64], {128})
    assert [
        buckets(step),
        [each.best.latency_ms for each in step.records if not each.best.latency_ms],
    ] == [[128], []]


@once
@on_each_rank()
def test_a_backward_pass_on_a_thread_of_autograd_s(rank: int):
    """Such a thread was not started by Python's threading: the only step under way counts there,
    and its buckets.
    """
    kernel = autotuned(blocks=(16, 32))

    def step(x: torch.Tensor) -> torch.Tensor:
        done, made = _thread.allocate_lock(), list[torch.Tensor]()

        def backward() -> None:
            made.append(launch(kernel, x))
            done.release()

        done.acquire()
        _thread.start_new_thread(backward, ())
        done.acquire()
        return made[0]

    decorated = tuned(kernel, step, bucket=POWERS)
    for n in (100, 120, 100):
        assert decorated(torch.zeros(n)).eq(1).all()
    assert ({key[0] for key in kernel.cache}, buckets(decorated)) == ({128}, [128])


@once
@on_each_rank()
def test_what_has_no_effect_is_told_once(rank: int):
    """A name without a kernel, an argument that no key holds, a kernel whose tuner makes the key
    itself: a line each, in two calls.
    """
    kernel, own = (
        autotuned(blocks=(16, 32)),
        Filed(accumulate_kernel, accumulate_kernel.arg_names, configs(16, 32), ["n"], None, None),
    )
    bucket: Any = {"attend": {"T": power_of_two}, "a*": {"n": power_of_two, "T": power_of_two}}
    step = tuned(kernel, lambda x: (launch(own, x), launch(kernel, x))[1], bucket=bucket)
    for n in (100, 200, 400):
        step(torch.zeros(n))
    told = [
        line.partition("has no effect on ")[2]
        for line in log().splitlines()
        if "has no effect" in line and " WARNING " in line
    ]
    assert (
        told[0] == "'attend': no kernel launched so far is called so, they are accumulate_kernel,"
        " add_kernel"
    )
    assert [line.partition(", ")[0].replace("tests.steps.", "") for line in told[1:]] == [
        "'n' of accumulate_kernel",
        "'T' of accumulate_kernel",
        "'T' of add_kernel",
    ]
    assert {*own.cache} == {f"{n // 10}_torch.float32" for n in (100, 200, 400)}


@once
@on_each_rank(is_alone=True)
def test_a_bucket_function_that_raises_is_heard_by_other_ranks(rank: int):
    """Its rank has the error, the other one hears of it at once; nothing is left of the launch."""

    def bucket(size: int) -> int:
        if rank == 1 and size > 128:
            raise LookupError(f"no bucket for {size}")
        return power_of_two(size)

    step = summing(bucket={"add_kernel": {"n": bucket}})
    step(torch.zeros(100))
    kind, text, _ = told(lambda: step(torch.zeros(300)))
    assert kind == ("PeerFailedError", "ValueError")[rank]
    assert (
        "bucket of tests.steps.add_kernel raised LookupError: no bucket for 300; it was asked of"
        " n=300" in text
    )
    assert ("rank 1" in text or rank == 1, step.kernel.nargs, is_unpatched()) == (True, None, True)


# -- a public library's kernels in a step of uneven lengths ----------------------------------------

HEADS, DIM = 8, 128
LENGTHS = [[700, 1900, 1000, 1300], [1000, 1500, 760, 2000]]
"""Of each rank: 3 to 8 blocks of 2048 rows, which the library calls NB and has in the key."""


def norm_of_fla() -> Any:
    """``rms_norm``, imported as on a machine without a GPU: the fake one has no properties for fla
    to read.
    """
    fake = driver.active
    driver.set_active(None)
    try:
        with warnings.catch_warnings(action="ignore"):
            from fla.modules import layernorm
    finally:
        driver.set_active(fake)
    for kernel in (layernorm.layer_norm_fwd_kernel, layernorm.layer_norm_bwd_kernel.fn):
        kernel.configs = kernel.configs[:2]  # each takes a second to compile
    return layernorm.rms_norm


@pytest.mark.slow
@once
@on_each_rank(modes=["fake"])
def test_a_library_s_norm_is_tuned_once_for_each_power_of_two(rank: int):
    """flash-linear-attention's, forward and backward, with lengths of each rank's own; used as it
    is, but for the number of configs.
    """
    rms_norm, weight = norm_of_fla(), torch.ones(DIM, dtype=torch.bfloat16, requires_grad=True)

    @contextual_autotune(is_dist=True, bucket={"layer_norm_*": {"NB": power_of_two}})
    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = rms_norm(x, weight, None)
        (gradient,) = torch.autograd.grad(y.sum(), weight)
        all_reduced(gradient)
        return y.detach()

    assert [
        step(torch.zeros(1, n, HEADS, DIM, dtype=torch.bfloat16)).shape[1] for n in LENGTHS[rank]
    ] == LENGTHS[rank]
    keys = [
        (each.kernel.rpartition(".")[2], each.key.split(",")[1])
        for each in step.records
        if not each.is_recalled
    ]
    assert sorted(keys) == [
        (f"layer_norm_{way}_kernel", nb) for way in ("bwd", "fwd") for nb in ("4", "8")
    ]
