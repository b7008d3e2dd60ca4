"""Steps whose kernels see sizes in buckets: uneven lengths, ranks in other buckets, later processes, hooks, what ranks hear of an error."""

from __future__ import annotations

import _thread
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import autotune, contextual_autotune, power_of_two
from dist_tune.testing import FakeH200, values
from tests.ranks.online_steps import BLOCKS, named, run_job
from tests.ranks.test_library_kernels import Bare, Filed
from tests.steps import accumulate_kernel, autotuned, best, configs, is_unpatched, launch, tuned
from tests.worlds import further, gathered, log, on_each_rank, on_ranks

BUCKET: Any = {"add_*": {"n": power_of_two}}
FLOATS = ("torch.float32", "torch.float32")
IN_BUCKETS = (*FLOATS, "in buckets")


def step_of(kernel: Any, bucket: Any = None, **options: Any) -> Any:
    """Adds one to each element, and sums them up over ranks."""

    def step(x: torch.Tensor) -> float:
        total = launch(kernel, x).sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total)

    return tuned(kernel, step, bucket=BUCKET if bucket is None else bucket, **{"is_dist": dist.is_initialized(), **options})


def _random_lengths(rank: int, kind: str) -> tuple[list[int], list[float], list[str], int]:
    drawn = random.Random("all" if kind == "equal" else rank)
    kernel = autotuned(blocks=(64, 128))
    step = step_of(kernel)
    lengths = [drawn.randint(1, 500) for _ in range(200)]
    got = [step(torch.zeros(n)) for n in lengths]
    return lengths, got, [each.key for each in step.records if not each.is_recalled], len(kernel.cache)


@pytest.mark.parametrize("kind", ["alone", further("equal"), "unequal"])
def test_200_random_lengths_tune_once_for_each_power_of_two(kind: str):
    """Of a kernel that a factory makes, on one rank and on two; where ranks have other lengths each sum is its own, and no rank waits."""
    found = values(
        on_ranks(1 if kind == "alone" else 2, _random_lengths, kind, is_dist=kind != "alone", env={"DIST_TUNE_DEADLINE_S": "20"})
    )
    sums = [float(sum(each)) for each in zip(*(lengths for lengths, *_ in found), strict=True)]
    for lengths, got, keys, n_cached in found:
        assert got == sums
        assert max(Counter(keys).values()) == 1
        buckets = {f"[{power_of_two(n)},torch.float32,torch.float32]" for n in lengths}
        assert len(buckets) > 6
        if kind == "unequal":
            assert len(keys) > 4  # some wait for a call in which both ranks miss them, or came from the other rank's record
        else:
            assert (set(keys), n_cached) == (buckets, len(buckets))


@on_each_rank()
def test_ranks_in_other_buckets_tune_both_of_them(rank: int):
    """In one call, each rank with its own; a rank that comes to the other's bucket later takes its config without a tuning."""
    kernel = autotuned(blocks=(16, 32))
    step = step_of(kernel)
    assert [step(torch.zeros(n)) for n in ((100, 300), (120, 290))[rank]] == [220.0, 590.0]
    assert [step(torch.zeros(n)) for n in ((300, 65), (70, 511))[rank]] == [370.0, 576.0]
    assert {key[0] for key in kernel.cache} == {128, 512}
    assert sorted(each.key[:5] for each in step.records if not each.is_recalled) == ["[128,", "[512,"]


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


wrong: list[tuple[int, Any]] = []
"""Sizes with a wrong result, and the config."""


def dividing(each: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
    return [config for config in each if named["n"] % config.kwargs["BLOCK"] == 0]


def made_of_size(each: list[Any], named: dict[str, Any], **_: Any) -> Any:
    """As a library's rule, which makes configs of the exact size."""
    for config in each:
        block = min(config.kwargs["BLOCK"], triton.next_power_of_2(named["n"]))
        yield triton.Config({"BLOCK": block, "EVEN": named["n"] % block == 0})


UNFIT: dict[str, tuple[Any, Any]] = {
    "a rule drops it": (even_kernel, dividing),
    "the kernel asserts": (asserting_kernel, None),
    "a rule makes it": (masked_kernel, made_of_size),
}


def over(kernel: Any, n: int) -> torch.Tensor:
    """Adds one to ``n`` elements of more, in a trial as in any launch."""
    x, y = torch.zeros(1024), torch.zeros(1024)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
    if (float(y[:n].min()), float(y[n:].sum())) != (1.0, 0.0):
        wrong.append((n, kernel.best_config))
    return y


@on_each_rank(1, cases=[(kind, how) for kind in UNFIT for how in ("replayed", "online", "in one step")], is_dist=False)
def test_a_config_is_used_only_at_sizes_of_its_bucket_where_it_fits(rank: int, case: tuple[str, str]):
    """Tuned at 512, where one block is fastest, the bucket runs at 384 and 320 what fits there, in each call and trial."""
    kind, how = case
    wrong.clear()
    if kind == "a rule makes it" and triton.__version__ >= "3.9":
        return  # which takes no generator
    base, rule = UNFIT[kind]
    options: Any = {"prune_configs_by": {"early_config_prune": rule}} if rule else {}
    kernel = autotuned(base, blocks=(64, 128, 512), **options)
    search: Any = "online" if how == "online" else None
    decorate = contextual_autotune(bucket={"*": {"n": power_of_two}}, n_warmup=0, n_repeat=1, cache=False, search=search)
    step: Any = decorate(lambda *sizes: [over(kernel, n) for n in sizes])
    sizes = [512, 384, 320] * (20 if how == "online" else 2)
    for call in [sizes[:3], sizes[:3]] if how == "in one step" else [[n] for n in sizes]:
        step(*call)
    assert wrong == []
    assert len([each for each in step.records if not each.is_recalled]) <= 1  # none online, which has not come to its end
    used = {n: (step(n), kernel.best_config.kwargs["BLOCK"])[1] for n in (512, 384, 320)}
    assert how == "online" or kind != "a rule drops it" or used[384] in (64, 128)


@on_each_rank(1, is_dist=False)
def test_the_size_that_names_a_bucket_does_not_find_its_config_elsewhere(rank: int):
    """In a step without buckets the kernel's rule drops at 512 what was tuned at 384 for the bucket of 512."""

    def prune(each: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
        return [config for config in each if (named["n"] == 512) == (config.kwargs["BLOCK"] == 64)]

    kernel = autotuned(blocks=(16, 32, 64), prune_configs_by={"early_config_prune": prune})
    for bucket, n in (({"*": {"n": power_of_two}}, 384), (None, 512)):
        contextual_autotune(bucket=bucket, n_warmup=0, n_repeat=1, cache=False)(over)(kernel, n)
    assert {key[0]: config.kwargs["BLOCK"] == 64 for key, config in kernel.cache.items() if key[-1] != "in buckets"} == {512: True}
    assert len(kernel.cache) == 2


@on_each_rank(cases=["replayed", "online"])
def test_ranks_at_other_sizes_of_a_bucket_use_what_fits_each(rank: int, how: str):
    """Rules drop another config on each rank: what both keep is tuned, and no rank dies; so at each size that follows."""
    wrong.clear()
    kernel = autotuned(even_kernel, blocks=(64, 128, 512), prune_configs_by={"early_config_prune": dividing})

    def step(n: int) -> float:
        total = over(kernel, n).sum()
        dist.all_reduce(total)
        return float(total)

    search: Any = "online" if how == "online" else None
    tuned_step = tuned(kernel, step, bucket={"*": {"n": power_of_two}}, search=search)
    sizes = [(512, 384, 320), (384, 320, 512)]
    for n, other in zip(sizes[rank] * 4, sizes[1 - rank] * 4, strict=True):
        assert tuned_step(n) == n + other
    assert wrong == []
    assert how == "online" or [len(each.candidates) for each in tuned_step.records] == [2]


@on_each_rank(1, cases=[power_of_two, None], is_dist=False)
def test_a_function_s_rule_is_asked_at_each_size_of_a_bucket(rank: int, bucket: Any):
    """``prune_fn`` sees the exact size where ``bucket`` or ``key_fn`` rounds it; the next best config that it keeps is used there."""
    ran, asked = list[tuple[int, int]](), list[int]()

    def keep(config: Any, n: int) -> bool:
        asked.append(n)
        return bool(n % config["block"] == 0)

    @autotune(
        [{"block": each} for each in (64, 128, 512)], (lambda n: n) if bucket else power_of_two, keep,
        bucket=bucket, reset=list, n_warmup=0, n_repeat=1, cache=False,
    )  # fmt: skip
    def work(n: int, block: int) -> int:
        ran.append((n, block))
        return n

    assert [work(n) for n in (512, 384, 320)] == [512, 384, 320]
    n_asked = len(asked)
    assert [work(n) for n in (512, 384, 320)] == [512, 384, 320]
    assert [n % block for n, block in ran[-3:]] == [0, 0, 0]
    assert len(asked) == n_asked


@on_each_rank(1, is_dist=False)
def test_calls_that_differ_in_anything_a_rule_may_see_ask_it(rank: int):
    """Names of keywords, sizes in a tuple, a dtype: the key is one for all of them."""
    wrong.clear()

    def keep(config: Any, x: torch.Tensor, shape: tuple[int, int], m: int = 1, n: int = 1) -> bool:
        fits = n % config["block"] == 0 and shape[1] % config["block"] == 0 and x.dtype is torch.float32
        return bool(fits or config["block"] == 1)

    @autotune([{"block": each} for each in (4, 1)], lambda *args, **kwargs: 0, keep, reset=list, n_warmup=0, n_repeat=1, cache=False)
    def work(x: torch.Tensor, shape: tuple[int, int], m: int = 1, n: int = 1, *, block: int) -> None:
        if not keep({"block": block}, x, shape, m, n):
            wrong.append((n, block))

    x = torch.zeros(4)
    work(x, (1, 4), m=3, n=4)
    for args, kwargs in [((x, (1, 4)), {"n": 3, "m": 4}), ((x, (4, 1)), {"m": 3, "n": 4}), ((x.half(), (1, 4)), {"m": 3, "n": 4})]:
        work(*args, **kwargs)
    assert wrong == []


def _kept(rank: int, bucket: Any, n: int) -> tuple[list[bool], list[str], int]:
    kernel = autotuned(blocks=(16, 32))
    step = step_of(kernel, bucket)
    step(torch.zeros(n + rank))
    return [each.is_recalled for each in step.records], [each.key for each in step.records], len(kernel.cache)


def test_a_fresh_process_hits_the_record_of_a_bucket(tmp_path: Path):
    """That of another size in it, and one of exactly its size, which was tuned without buckets."""
    kept: Any = {"env": {"DIST_TUNE_CACHE_DIR": str(tmp_path)}}
    assert values(on_ranks(2, _kept, BUCKET, 100, **kept)) == [([False], ["[128,torch.float32,torch.float32]"], 1)] * 2
    assert values(on_ranks(2, _kept, BUCKET, 70, **kept)) == [([True], ["[128,torch.float32,torch.float32]"], 1)] * 2
    values(on_ranks(1, _kept, {}, 256, is_dist=False, **kept))
    assert values(on_ranks(1, _kept, BUCKET, 200, is_dist=False, **kept))[0][0] == [True]


@on_each_rank()
def test_a_config_for_the_exact_size_does_not_stand_for_the_bucket(rank: int):
    """One rank has it from vanilla tuning: without buckets all would use it, here all tune. Outside of the step exact sizes count."""
    n_vanilla, asked = 100, list[int]()

    def prune(each: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
        asked.append(named["n"])
        return each

    kernel = autotuned(prune_configs_by={"early_config_prune": prune}, do_bench=lambda call, quantiles: (call(), [1.0] * 3)[1])
    if rank == 1:
        kernel.cache[(n_vanilla, *FLOATS)] = kernel.configs[0]
    step = step_of(kernel)
    assert step(torch.zeros(n_vanilla)) == 200.0
    keys = {(128, *IN_BUCKETS), *([(n_vanilla, *FLOATS)] * rank)}
    assert (set(kernel.cache), len(step.records)) == (keys, 1)
    assert len({*gathered(kernel.cache[(128, *IN_BUCKETS)].kwargs["BLOCK"])}) == 1
    asked.clear()
    launch(kernel, torch.zeros(90))  # as ever: Triton tunes 90
    assert (asked, is_unpatched()) == ([90], True)
    assert (90, *FLOATS) in kernel.cache


@on_each_rank(cases=["hook", "library's cache"])
def test_a_known_config_that_triton_would_have_to_find(rank: int, case: str):
    """One with a hook, and one in a mapping of a library's own: launched without a meeting, with the hook called once."""
    hooked = list[int]()
    options = {"pre_hook": lambda full: hooked.append(full["n"])} if case == "hook" else {}
    kernel = autotuned(configs=configs(16, 32, **options))
    if case != "hook":
        kernel.cache = Bare()
    step = step_of(kernel)
    step(torch.zeros(100))
    hooked.clear()
    before, n_records = log().count("meeting"), len(step.records)
    step(torch.zeros(128))  # a first call of new lengths
    step(torch.zeros(100))
    assert [step(torch.zeros(100)) for _ in range(3)] == [200.0] * 3
    assert hooked == ([128, *[100] * 4] if case == "hook" else [])
    assert (len(step.records), kernel.nargs) == (n_records, None)
    assert log().count("meeting") - before <= 2


@on_each_rank()
def test_a_kernel_that_is_decorated_in_each_call(rank: int):
    """It is known again by its bucket, after the second call without a meeting."""
    step: Any = tuned(None, lambda x: launch(autotuned(blocks=(16, 32)), x), bucket=BUCKET)
    for n in (100, 100, 100, 100, 90, 120):
        assert step(torch.zeros(n + rank)).eq(1).all()
    assert [each.key for each in step.records if not each.is_recalled] == ["[128,torch.float32,torch.float32]"]


@on_each_rank()
def test_tensors_that_are_restored_are_so_in_a_bucket(rank: int):
    """The launch that tunes changes its argument once, as each launch of the bucket after it."""
    kernel = autotuned(accumulate_kernel, restore_value=["y_ptr"])
    step: Any = tuned(kernel, lambda x, y: launch(kernel, x, y), bucket={"*": {"n": power_of_two}}, reset=lambda: None)
    for n in (100, 128, 100):
        y = torch.ones(n)
        assert step(torch.ones(n), y).eq(2).all()
    assert (len(step.records), len(kernel.cache)) == (1, 1)


@on_each_rank()
def test_a_step_of_its_own_has_no_buckets(rank: int):
    """Two steps share a kernel: what one of them says of sizes is nothing to the other."""
    kernel = autotuned(blocks=(16, 32))
    coarse, exact = step_of(kernel), step_of(kernel, {})
    for n in (100, 120):
        coarse(torch.zeros(n))
        exact(torch.zeros(n))
    assert (len(coarse.records), len(exact.records)) == (1, 2)
    assert {key[0] for key in kernel.cache} == {100, 120, 128}


@on_each_rank(modes=("fake",))
def test_a_step_tuned_online_has_one_site_for_a_bucket(rank: int):
    """Its calls take turns in the sizes of one bucket and count once each; the winner is in use for all of them."""
    FakeH200.launch_ms = staticmethod(lambda source, _: {16: 1.0, 32: 0.5, 64: 0.25, 128: 0.8}[named(source)["BLOCK"]])
    kernel, weight = autotuned(blocks=BLOCKS), torch.zeros(1)

    @contextual_autotune(is_dist=True, search="online", max_slowdown=0.5, bucket=BUCKET)
    def step(k: int) -> float:
        launch(kernel, torch.zeros(100 + k % 7 + rank))
        weight.add_(1.0)
        total = weight.clone()
        dist.all_reduce(total)
        return float(total)

    got = run_job(step)
    assert got == [2.0 * (k + 1) for k in range(len(got))]
    assert (set(kernel.cache), best(kernel)) == ({(128, *IN_BUCKETS)}, [64])
    assert [each.key for each in step.records if each.best.latency_ms] == ["[128,torch.float32,torch.float32]"]


@on_each_rank()
def test_a_backward_pass_on_a_thread_of_autograd_s(rank: int):
    """Such a thread was not started by Python's threading: the only step under way counts there, and its buckets."""
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

    tuned_step = tuned(kernel, step, bucket=BUCKET)
    for n in (100, 120, 100):
        assert tuned_step(torch.zeros(n)).eq(1).all()
    assert ({key[0] for key in kernel.cache}, len(tuned_step.records)) == ({128}, 1)


@on_each_rank(is_dist=False, n=1)
def test_what_has_no_effect_is_told_once(rank: int):
    """A name without a kernel, an argument that no key holds, a kernel whose tuner makes the key itself: a line each, in two calls."""
    kernel = autotuned(blocks=(16, 32))
    own = Filed(accumulate_kernel, accumulate_kernel.arg_names, configs(16, 32), ["n"], None, None)

    def both(x: torch.Tensor) -> torch.Tensor:
        launch(own, x)
        return launch(kernel, x)

    step = tuned(kernel, both, bucket={"attend": {"T": power_of_two}, "a*": {"n": power_of_two, "T": power_of_two}}, is_dist=False)
    for n in (100, 200, 400):
        step(torch.zeros(n))
    name, told = (
        "tests.steps.",
        [line.partition("has no effect on ")[2] for line in log().splitlines() if "has no effect" in line and " WARNING " in line],
    )
    assert told == [
        "'attend': no kernel launched so far is called so, they are accumulate_kernel, add_kernel",
        f"'n' of {name}accumulate_kernel, whose tuner tests.ranks.test_library_kernels.Filed makes the key itself",
        f"'T' of {name}accumulate_kernel, whose tuner tests.ranks.test_library_kernels.Filed makes the key itself",
        f"'T' of {name}add_kernel, whose key is ['n']",
    ]
    assert {*own.cache} == {f"{n // 10}_torch.float32" for n in (100, 200, 400)}


def _raises(rank: int) -> Any:
    def bucket(size: int) -> int:
        if rank == 1 and size > 128:
            raise LookupError(f"no bucket for {size}")
        return power_of_two(size)

    kernel = autotuned(blocks=(16, 32))
    step = step_of(kernel, {"add_kernel": {"n": bucket}})
    step(torch.zeros(100))
    try:
        step(torch.zeros(300))
    except Exception as error:  # noqa: BLE001  # told to the test
        return type(error).__name__, str(error), kernel.nargs, is_unpatched()
    return None


def test_a_bucket_function_that_raises_is_heard_by_other_ranks():
    """Its rank has the error, the other one hears of it at once; nothing is left of the launch."""
    (kind, text, *left), (kind_1, text_1, *left_1) = values(on_ranks(2, _raises))
    assert (kind_1, left, left_1) == ("ValueError", [None, True], [None, True])
    assert text_1.startswith("bucket of tests.steps.add_kernel raised LookupError: no bucket for 300; it was asked of n=300")
    assert kind == "PeerFailedError"
    assert "rank 1" in text
    assert text_1 in text
