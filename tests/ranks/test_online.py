"""Steps that may not be repeated, tuned in their own calls: what is launched, what it costs, and
how it ends.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from triton.runtime.jit import JITFunction

from dist_tune import autotune, contextual_autotune
from dist_tune.measure import Clock
from dist_tune.ranks import Ranks
from dist_tune.records import Cache
from dist_tune.testing import ExactTime, Outcome
from tests.steps import (
    FACES,
    Face,
    Layer,
    accumulate_kernel,
    add_kernel,
    all_reduced,
    autotuned,
    best,
    is_unpatched,
    launch,
    named,
    online_threads,
    run_job,
    shift_kernel,
)
from tests.worlds import further, gathered, log, on_each_rank, on_ranks

MS = {16: 1.0, 32: 0.5, 64: 0.25, 128: 0.8}
SPEEDS = {**MS, 256: 0.7, 512: 0.6}
OPTIONS: Any = {"is_dist": True, "max_slowdown": 0.5, "n_repeat": 2}
IS_OVER = "is not tuned any further"


class Launches:
    """What this rank launches in each call, and how long that takes."""

    def __init__(self, ms: Callable[[int], float] = MS.__getitem__) -> None:
        """``ms(block)``: of a launch; it may raise."""
        os.environ["DIST_TUNE_DEADLINE_S"] = "30"  # a busy machine stops a thread for seconds
        self.by_call: list[list[int]] = []
        self.ms = ms

    def note(self, block: int) -> tuple[int]:
        """Called by a launch for its grid, within the time that is measured."""
        self.by_call[-1].append(block)
        ExactTime.pass_ms(self.ms(block))
        return (1,)

    def launch(self, kernel: Any, x: torch.Tensor) -> None:
        kernel[lambda meta: self.note(meta["BLOCK"])](x, torch.zeros_like(x), x.numel())

    def of(self, step: Callable[..., Any]) -> Callable[[int], Any]:
        """The step, each of whose calls is told from the one before."""

        def call(k: int) -> Any:
            self.by_call.append([])
            return step(k)

        return call

    def alike(self) -> list[list[int]]:
        """What all ranks have launched in each call: the same, or this fails with the first call in
        which it was not.
        """
        differing = [
            (k, calls)
            for k, calls in enumerate(zip(*gathered(self.by_call), strict=False))
            if calls[1:] != calls[:-1]
        ]
        assert not differing, f"call {differing[0][0]} of {len(self.by_call)}: {differing[0][1]}"
        return self.by_call


class Job(Launches):
    """A step under either decorator that counts its calls in what it has captured, so that these
    are its trials.
    """

    def __init__(
        self,
        face: Face = "contextual",
        ms: Callable[[int], float] = MS.__getitem__,
        *,
        blocks: tuple[int, ...] = tuple(MS),
        rest: Callable[[float], float] = float,
        name: str = "step",
        **options: Any,
    ) -> None:
        """``rest``: of the step, called with its number.

        Its launch is told to ``note`` of the object.
        """
        super().__init__(ms)
        count, options = torch.zeros(1), {"max_slowdown": 0.5, "n_repeat": 2, **options}
        self.kernel = autotuned(blocks=blocks)

        def counted() -> float:
            count.add_(1.0)
            return rest(float(count))

        def step(x: torch.Tensor) -> float:
            self.launch(self.kernel, x)
            return counted()

        def function(x: torch.Tensor, BLOCK: int) -> float:
            self.note(BLOCK)
            return counted()

        if face == "contextual":
            self.tuned: Any = contextual_autotune(is_dist=dist.is_initialized(), **options)(
                named(name, step)
            )
        else:
            self.tuned = autotune(
                [{"BLOCK": block} for block in blocks], lambda x: x.numel(), **options
            )(named(name, function))

    def __call__(self, k: int, n: int = 64) -> float:
        return float(self.of(lambda k: self.tuned(torch.zeros(n)))(k))

    @property
    def best(self) -> list[int]:
        return [record.best.fields["BLOCK"] for record in self.tuned.records]


def counts(values: list[float], n: int = 1) -> bool:
    """Whether each call has counted once on each of ``n`` ranks."""
    return values == [n * (k + 1.0) for k in range(len(values))]


def summed(count: float) -> float:
    """A collective, which holds the ranks together."""
    return float(all_reduced(torch.tensor(count)))


# -- what is launched ------------------------------------------------------------------------------


@on_each_rank(cases=FACES)
def test_the_slowest_rank_decides(rank: int, face: Face):
    """Config 64 is the fastest on rank 0 alone: each call launches one config, once, on both ranks;
    its value is the untuned one.

    Nothing watches such a step, after its first run.
    """
    threads = list[str]()
    """In the latest call that was tuned: one that ended before may take a busy machine long."""

    def rest(count: float) -> float:
        names = [each.name for each in threading.enumerate()]
        if "dist_tune online" in names:
            threads[:] = names
        return summed(count)

    job = Job(face, lambda block: 0.75 if (rank, block) == (1, 64) else MS[block], rest=rest)
    values = run_job(job)
    calls = job.alike()
    assert counts(values, 2)
    assert {len(call) for call in calls[1:]} == {1}
    assert {block for call in calls for block in call} == set(MS)
    assert (job.best, calls[-5:]) == ([32], [[32]] * 5)
    assert is_unpatched()
    assert {each.name for each in threading.enumerate() if "dist_tune" in each.name} <= {
        "dist_tune presence"
    }
    assert ("dist_tune online" in threads, "dist_tune watchdog" in threads) == (True, False)


@on_each_rank(1, cases=FACES, is_dist=False, modes=("fake",))
def test_a_rank_alone_finds_its_winner(rank: int, face: Face):
    """Kernels are compiled beside its calls; one that does not compile, of a block that is no power
    of two, never runs.
    """
    job = Job(
        face, {**MS, 48: 0.1}.__getitem__, blocks=(*MS, 48) if face == "contextual" else tuple(MS)
    )
    assert counts(run_job(job))
    assert (job.best, job.by_call[-1]) == ([64], [64])
    assert {block for call in job.by_call for block in call} == set(MS)


@on_each_rank(cases=[further(("", -1)), further(("calls", 1)), ("in force", 0)], is_alone=True)
def test_ranks_that_drift_apart_launch_the_same_in_each_call(rank: int, case: tuple[str, int]):
    """No collective holds them.

    A vote that comes after the step has come to the batch is a no of all; a call waits for a late
    verdict.
    """
    own, n_met = Ranks.reduce, 0

    def reduce(ranks: Ranks, topic: str, *args: Any, **options: Any) -> Any:
        nonlocal n_met
        value = own(ranks, topic, *args, **options)
        n_met += topic == case[0]
        # After batches that try nothing yet, and that were quickly agreed on.
        if (topic, rank) == case and n_met in (4, 6):
            # Until calls have passed the batch, or one has waited for it.
            n_late, waited_s = len(job.by_call) + 100, 0.0
            while len(job.by_call) < n_late and waited_s < 0.5:
                n_calls = len(job.by_call)
                time.sleep(0.01)
                waited_s = waited_s + 0.01 if len(job.by_call) == n_calls else 0.0
        return value

    job = Job(name=f"step {case[0]}")  # the ranks leave a case after different numbers of calls
    values, n_left = list[float](), 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "reduce", reduce)
        while n_left and len(values) < 20_000:
            values.append(job(0))
            n_left -= len(values) > 1 and not online_threads()
            time.sleep(1e-3)
    job.alike()
    assert counts(values)
    assert job.best == [64]


@on_each_rank()
def test_ranks_that_nothing_holds_together_share_no_trials(rank: int):
    """One is 600 calls ahead: batches would begin later and later."""
    job = Job(name="a step far ahead")
    values = [job(0) for _ in range(1 if rank else 600)]
    dist.barrier()
    while online_threads() and len(values) < 5000:
        values.append(job(0))
        time.sleep(1e-3)
    assert counts(values)
    assert "calls apart: nothing in the step holds them together" in log()


class Late:
    """An event of a device that comes to it three calls later. Whoever asks for it is noted."""

    def __init__(self, job: Launches, note: Callable[[str], object]) -> None:
        self.job, self.note = job, note

    def record(self) -> None:
        self.at_s, self.at_call = ExactTime.now(), len(self.job.by_call)

    def query(self) -> bool:
        self.note("query")
        return len(self.job.by_call) >= self.at_call + 3

    def elapsed_time(self, end: Late) -> float:
        self.note("elapsed_time")
        return (end.at_s - self.at_s) * 1e3


@contextmanager
def asked(job: Launches) -> Iterator[list[str]]:
    """What this thread asks of stores, events and the device, from the second call on."""
    found, mine = list[str](), threading.get_ident()

    def note(what: str) -> None:
        if threading.get_ident() == mine and len(job.by_call) > 1:
            found.append(what)

    def noted(name: str, own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(name)
            return own(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind in (dist.Store, dist.PrefixStore, dist.FileStore, dist.TCPStore, dist.HashStore):
            for name in [
                name
                for name, own in vars(kind).items()
                if callable(own) and not name.startswith("_")
            ]:
                patch.setattr(kind, name, noted(f"{kind.__name__}.{name}", getattr(kind, name)))
        patch.setattr(torch.cuda, "synchronize", noted("synchronize", torch.cuda.synchronize))
        patch.setattr(Clock, "event", lambda clock: Late(job, note))
        yield found


@on_each_rank(cases=FACES)
def test_a_step_neither_talks_nor_waits(rank: int, face: Face):
    """From the second call on its thread asks no store, no event and no device, also where these
    are done calls later.
    """
    job = Job(face, rest=summed)
    with asked(job) as found:
        run_job(job)
    assert found == []
    assert (job.best, len(job.alike()) > 5) == ([64], True)


@on_each_rank(1, is_dist=False, modes=("fake",))
def test_no_launch_of_the_second_call_compiles(rank: int):
    """The first call runs what compiles fastest, the next ones the first config: for both kinds of
    an argument that it has met.
    """
    kernel, x, count, mine = (
        autotuned(shift_kernel, blocks=(128, 16, 32)),
        torch.zeros(256),
        torch.zeros(1),
        threading.get_ident(),
    )

    @contextual_autotune(search="online", cache=False)
    def step() -> None:
        for shift in (7, 16, 1):
            kernel[(1,)](x, x, 256, shift)
        count.add_(1.0)

    compiled, own = list[str](), vars(JITFunction)["_do_" + "compile"]

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.extend([self.fn.__name__] if threading.get_ident() == mine else [])
        return own(self, *args, **kwargs)

    step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_" + "compile", noted)
        step()
    assert compiled == []


@on_each_rank()
def test_a_launch_of_another_thread_is_no_trial(rank: int):
    """While a call tries a config, a thread of the program's launches the same kernel: with what is
    in use.
    """
    launches, kernel, x, count, beside = (
        Launches(),
        autotuned(blocks=(16, 64)),
        torch.zeros(64),
        torch.zeros(1),
        list[int](),
    )

    def other() -> None:
        launches.launch(kernel, x)
        beside.append(launches.by_call[-1].pop())

    @contextual_autotune(**OPTIONS)
    def step(k: int) -> float:
        if k > 2:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        launches.launch(kernel, x)
        count.add_(1.0)
        return summed(float(count))

    assert counts(run_job(launches.of(step)), 2)
    assert best(kernel) == [64]
    first_trial = [call[-1] for call in launches.by_call].index(64)
    assert beside[first_trial - 3] == 16


@on_each_rank()
def test_kernels_that_are_made_in_each_call_are_tuned(rank: int):
    """Two of them with one key and other configs: neither gets a config of the other's, though
    Python uses their places in memory again.
    """
    launches, x, count = Launches(), torch.zeros(64), torch.zeros(1)

    @contextual_autotune(**OPTIONS)
    def step(k: int) -> float:
        launches.launch(autotuned(blocks=(16, 64)), x)
        launches.launch(autotuned(accumulate_kernel, blocks=(32, 128)), x)
        count.add_(1.0)
        return float(count)

    run_job(launches.of(step))
    calls = launches.alike()
    assert {tuple(call[-2:]) for call in calls} == {(a, b) for a in (16, 64) for b in (32, 128)}
    assert calls[-5:] == [[64, 32]] * 5


@on_each_rank(cases=["reset_to_zero", "restore_value"])
def test_real_calls_zero_and_restore_nothing(rank: int, case: str):
    """A kernel adds to its output: after k calls k times its input, as with a config that Triton
    knows; hooks as often as launches.
    """
    hooked = list[int]()
    listed = [
        triton.Config({"BLOCK": block}, pre_hook=lambda nargs: hooked.append(nargs["BLOCK"]))
        for block in (16, 32, 64)
    ]
    options: Any = {case: ["y_ptr"]}
    kernel, x, y = (
        autotuned(accumulate_kernel, configs=listed, **options),
        torch.ones(64),
        torch.zeros(64),
    )

    @contextual_autotune(**OPTIONS, search="online")
    def step(k: int) -> float:
        return float(launch(kernel, x, y).sum())

    values = run_job(step)
    assert counts(values, 64)
    assert (len(hooked), best(kernel)) == (len(values), [64])


# -- keys and steps --------------------------------------------------------------------------------


@on_each_rank(cases=FACES)
def test_each_key_gets_its_winner(rank: int, face: Face):
    """Two take turns, and a third one begins later: each call gives its own value, and runs one
    config on both ranks.
    """
    job = Job(face, search="online")
    assert counts(run_job(lambda k: job(k, 64 << (k % 2 if k < 12 else k % 3))))
    assert {len(call) for call in job.alike()} == {1}
    assert job.best == [64] * 3


@on_each_rank()
def test_a_key_of_one_rank_alone_keeps_no_other_from_its_winner(rank: int):
    """Rank 1 has launches that rank 0 has not: beside one of both, in a call in which nothing else
    is new, and later again.
    """
    launches, kernel, count = Launches(), autotuned(blocks=tuple(MS)), torch.zeros(1)

    @contextual_autotune(**OPTIONS)
    def step(*sizes: int) -> float:
        for n in sizes:
            launches.launch(kernel, torch.zeros(n))
        count.add_(1.0)
        return float(count)

    run_job(launches.of(lambda k: step(64, *[128] * rank)))
    launches.of(lambda k: step(256 if rank else 64))(0)
    dist.barrier()
    run_job(launches.of(lambda k: step(512)))
    winners = {key[0]: config.kwargs["BLOCK"] for key, config in kernel.cache.items()}
    assert [winners[n] for n in ([64, 128, 512] if rank else [64, 512])] == [64] * (2 + rank)


@on_each_rank()
def test_two_steps_that_share_a_kernel_are_tuned_beside_one_another(rank: int):
    """As a training and an evaluation step: each has its own calls and trials, and both end with
    the winner.
    """
    launches, kernel, x, count = (
        Launches(),
        autotuned(blocks=tuple(MS)),
        torch.zeros(64),
        torch.zeros(1),
    )

    def made(name: str) -> Any:
        def step() -> float:
            launches.launch(kernel, x)
            count.add_(1.0)
            return float(count)

        return contextual_autotune(**OPTIONS)(named(name, step))

    train, evaluate = made("train"), made("evaluate")
    assert counts(run_job(launches.of(lambda k: train() if k % 3 else evaluate())))
    assert (launches.alike()[-3:], best(kernel)) == ([[64]] * 3, [64])
    assert IS_OVER not in log()


@on_each_rank()
def test_a_step_that_is_decorated_anew_gives_its_values(rank: int):
    """In the middle of a tuning of the object before, which ends with a line, because its calls do
    not come any more.
    """
    launches, kernel, x, count = (
        Launches(),
        autotuned(blocks=tuple(MS)),
        torch.zeros(64),
        torch.zeros(1),
    )

    def step(k: int) -> float:
        launches.launch(kernel, x)
        count.add_(1.0)
        return float(count)

    steps = [contextual_autotune(**OPTIONS)(named("a step decorated anew", step)) for _ in range(2)]
    assert counts(run_job(launches.of(lambda k: steps[k >= 30](k))))
    assert len(launches.alike()) > 30
    assert "its calls do not come to this tuning" in log()


# -- what fails ------------------------------------------------------------------------------------


@on_each_rank(cases=["on one rank", "on all ranks"])
def test_a_launch_that_fails_is_made_again_in_its_call(rank: int, case: str):
    """The fastest config raises in its launch: the call's value is right, the config is out on all
    ranks, and the others have raced.
    """
    failed, fails = list[int](), rank == 1 or case == "on all ranks"

    def ms(block: int) -> float:
        if block == 64 and fails:
            failed.append(block)
            raise RuntimeError("this config does not run here")
        return MS[block]

    job = Job(ms=ms, rest=summed)
    assert counts(run_job(job), 2)
    assert (job.best, len(failed)) == ([32], int(fails))
    assert {block for call in job.by_call for block in call} == set(MS)
    (record,) = job.tuned.records
    assert [bool(each.failure) for each in record.candidates] == [False, False, True, False]
    assert "this config does not run here" in str(record.candidates[2].failure)


@on_each_rank(cases=["before", "after"])
def test_a_call_of_a_function_is_made_again_only_if_nothing_has_happened(rank: int, case: str):
    """A config that raises before the step has done anything costs nothing; after a write its error
    is the user's, once.
    """
    count, raised = torch.zeros(1), list[str]()

    @autotune([{"part": k} for k in range(3)], None, search="online", max_slowdown=1.0, cache=False)
    def step(part: int) -> float:
        for place in ("before", "after"):
            if (part, place) == (1, case):
                raise ValueError("no such part")
            count.add_(place == "before")
        ExactTime.pass_ms(3.0 - part)
        return float(count)

    def call(k: int) -> float:
        try:
            return step()
        except ValueError as error:
            raised.extend(error.__notes__)
            return float(count)

    assert counts(run_job(call))
    assert [each.index("so that the call is not made again") > 0 for each in raised] == [True] * (
        case == "after"
    )
    assert IS_OVER not in log()


@on_each_rank(cases=["on all ranks", "on rank 1 alone", "before the launch"])
def test_an_error_of_the_users_costs_a_call_and_no_more(rank: int, case: str):
    """Every seventh call raises, after its launch or before it, on all ranks or on one in a step
    without collectives.
    """
    launches, kernel, x, count, raised = (
        Launches(),
        autotuned(blocks=tuple(MS)),
        torch.zeros(64),
        torch.zeros(1),
        list[int](),
    )

    @contextual_autotune(**OPTIONS)
    def step(k: int) -> float:
        raises = k % 7 == 6 and (rank == 1 or "alone" not in case)
        if raises and "before" in case:
            raise StopIteration
        launches.launch(kernel, x)
        count.add_(1.0)
        if raises:
            raise ValueError("no more")
        return float(count)

    def call(k: int) -> None:
        try:
            step(k)
        except (ValueError, StopIteration):
            raised.append(k)

    n_calls = len(run_job(launches.of(call)))
    assert raised == ([*range(6, n_calls, 7)] if rank == 1 or "alone" not in case else [])
    assert {block for call in launches.alike() for block in call} == set(MS)
    assert (best(kernel), is_unpatched()) == ([64], True)


# -- what it costs ---------------------------------------------------------------------------------


@on_each_rank()
def test_what_trials_take_stays_within_the_share(rank: int):
    """One config takes 30 times as long, and is launched once; with that launch the whole job takes
    5% longer at most.

    Between calls Triton finds what is in use: no trial, and a faster config each time that it is
    another one.
    """
    ms = {16: 1.0, 32: 0.9, 64: 30.0, 128: 1.1}
    job = Job(
        ms=ms.__getitem__, rest=lambda count: (ExactTime.pass_ms(4.0), count)[1], max_slowdown=0.05
    )
    used = list[int]()

    def call(k: int) -> None:
        job(k)
        used.extend(best(job.kernel))

    n_calls = len(run_job(call, n_more=1))
    assert (len(used), [ms[block] for block in used]) == (
        n_calls,
        sorted((ms[block] for block in used), reverse=True),
    )
    calls = [call[-1] for call in job.alike()]  # the first is made twice, to see whether it may be
    assert (calls.count(64), job.best) == (1, [32])
    job_ms, spent_ms, in_use = 0.0, 0.0, calls[0]
    for block in calls:
        job_ms += 4.0 + ms[block]
        spent_ms += max(0.0, ms[block] - ms[in_use])
        in_use = min(in_use, block, key=ms.__getitem__)
    assert spent_ms <= 0.05 * job_ms + 1.0


@on_each_rank()
def test_without_a_share_nothing_is_tuned_online(rank: int):
    """The step goes on with its first config, and a line says that it is not tuned."""
    job = Job(max_slowdown=0)
    assert counts([job(k) for k in range(5)])
    assert (job.best, online_threads(), job.alike()[1:]) == ([], [], [[16]] * 4)
    assert "not tuned; split it, or give reset=" in log()


@on_each_rank()
def test_a_jobs_own_pauses_are_not_the_tunings(rank: int):
    """A checkpoint of 100 ms every 40 calls, and a late loader: told are what trials took, and the
    step of most plain calls.

    That is 6 ms with the first config, and 5.25 with the winner.
    """
    job, dice = (
        Job(rest=lambda count: (ExactTime.pass_ms(3.9), summed(count))[1], max_slowdown=0.05),
        random.Random(0),
    )

    def call(k: int) -> float:
        ExactTime.pass_ms(100.0 if k % 40 == 17 else 20.0 if dice.random() < 0.05 else 0.0)
        return job(k)

    run_job(call)
    told = re.search(
        r"which took ([\d.]+)% of the job's time \(at most 5%\)[\s\S]*step ([\d.]+) -> ([\d.]+) ms",
        log(),
    )
    assert told is not None
    share, *step_ms = map(float, told.groups())
    assert share <= 6.0
    assert step_ms == pytest.approx([6.0, 5.25], abs=0.15)
    assert "slowest rank" not in log()


@on_each_rank()
def test_kernels_whose_times_hold_gaps_are_not_chosen_by_them(rank: int):
    """The device waits for the host in each launch of one kernel: it keeps its config, and the
    reason says so.
    """
    launches, kernels = (
        Launches(),
        (autotuned(add_kernel, blocks=(16, 64)), autotuned(accumulate_kernel, blocks=(16, 64))),
    )
    x, count = torch.zeros(64), torch.zeros(1)

    @contextual_autotune(**OPTIONS)
    def step(k: int) -> float:
        for each in kernels:
            launches.launch(each, x)
        count.add_(1.0)
        return summed(float(count))

    def has_gap(clock: Clock, span: Any) -> bool:
        return len(launches.by_call[-1]) == 2  # of the second launch of a call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "has_gap", has_gap)
        run_job(launches.of(step))
    assert [best(each) for each in kernels] == [[64], [16]]
    reasons = {each.kernel.rpartition(".")[2]: each.reason for each in step.records}
    assert "the device waited for the host in each of its launches" in reasons["accumulate_kernel"]


# -- jobs that end first ---------------------------------------------------------------------------


def has_agreed(n: int) -> bool:
    """Whether ranks have agreed on times ``n`` times, as a journal says."""
    for path in Path(os.environ["DIST_TUNE_CACHE_DIR"]).glob("journals/*.jsonl"):
        with suppress(FileNotFoundError):  # deleted at the end of the tuning, by another rank too
            if path.read_bytes().count(b'"kind":"agreed"') >= n:
                return True
    return False


def start(rank: int, how: str = "", n_agreed: int = 1000, n_calls: int = 4000) -> dict[str, Any]:
    """One start of a job: until it is tuned, or ranks have agreed on times so often, or after so
    many calls.

    ``how``: of rank 1, which alone ends before its tuning then. A job that "talks" has a collective
    in its step.
    """
    job = Job(
        ms=SPEEDS.__getitem__,
        blocks=tuple(SPEEDS),
        rest=summed if "talks" in how else float,
        max_slowdown=0.3,
        n_repeat=5,
    )
    values, error, n_more = list[float](), "", 3
    while (
        n_more and len(values) < n_calls and not ((rank == 1 or not how) and has_agreed(n_agreed))
    ):
        try:
            values.append(job(0))
        except RuntimeError as raised:  # of a collective
            error = str(raised)
            break
        time.sleep(1e-3)
        n_more -= len(values) > 1 and not online_threads()
    if "killed" in how and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    atexit._run_exitfuncs()
    tried = {block for call in job.by_call for block in call}
    left = counts(values, 2 if "talks" in how else 1), len(online_threads())
    return {"left": left, "error": error, "best": job.best, "tried": sorted(tried)}


def started(folder: Path, *options: Any) -> list[Outcome]:
    """One start on two ranks, with the caches of those before.

    It leaves no thread, and each call has counted once.
    """
    folders = {f"DIST_TUNE_{name}_DIR": str(folder / name.lower()) for name in ("CACHE", "LOG")}
    outcomes = on_ranks(2, start, *options, env=folders)
    for outcome in outcomes:
        assert outcome.error == "Died" or outcome.value["left"] == (True, 0), outcome
    return outcomes


def ends(outcomes: list[Outcome]) -> list[str]:
    """What was said of the end of the tuning, in logs that go on from start to start."""
    return [line for each in outcomes for line in each.log.splitlines() if IS_OVER in line]


@pytest.mark.parametrize("how", ["", "killed", "leaves"])
def test_a_job_that_ends_first_goes_on_in_its_next_start(tmp_path: Path, how: str):
    """Ended on all ranks, or on one, or killed between trials: a line says how far it came, and
    what has lost is not tried again.
    """
    first = started(tmp_path, how, 4)
    assert [outcome.error for outcome in first] == ["", "Died" * (how == "killed")]
    assert len(ends(first)) == 2 - (how == "killed")
    if how != "killed":
        assert all(
            "the program ended first after" in line and "timed calls are missing" in line
            for line in ends(first)
        ), ends(first)
        assert not any(" ERROR " in each.log for each in first)
    assert list((tmp_path / "cache" / "journals").glob("*.jsonl"))
    again = started(tmp_path)
    assert "the times of 6 candidates are taken from an earlier attempt's journal" in again[0].log
    assert [found.value["best"] for found in again] == [[64]] * 2
    assert all({*found.value["tried"]} < {*SPEEDS} for found in again)
    assert not list((tmp_path / "cache" / "journals").glob("*.jsonl"))
    # By calls, on the slowest rank.
    (entry,) = Cache(tmp_path / "cache").entries()
    logged = re.findall(r"([\d.]+) -> ([\d.]+) ms .*, tuned in", again[0].log)[-1]
    assert entry.record.step_ms == pytest.approx([float(each) for each in logged], rel=1e-2)


def test_a_job_that_ends_with_its_first_call_says_so(tmp_path: Path):
    """Once a rank, without an error."""
    outcomes = started(tmp_path, "", 1000, 1)
    assert len(ends(outcomes)) == 2
    assert all(
        "the program ended first, before a config was timed" in line
        and "the next start goes on" in line
        for line in ends(outcomes)
    )
    assert not any(" ERROR " in each.log for each in outcomes)


def test_an_error_of_a_collective_with_a_dead_rank_is_the_users(tmp_path: Path):
    """Rank 1 is killed between trials of a step that talks: the tuning ends with a line and no
    thread.
    """
    first, second = started(tmp_path, "killed, talks", 4)
    assert (second.error, bool(first.value["error"])) == ("Died", True)
    assert len(ends([first])) == 1


# -- training loops --------------------------------------------------------------------------------

DDP = DistributedDataParallel
LOOPS: dict[str, Any] = {
    "fused AdamW and a schedule": (DDP, 1),
    "FSDP2": (fully_shard, 1),
    "accumulation": (DDP, 4),
}
"""Name -> what is done to the model, and how many calls make one step of the optimizer."""
BLOCKS = (64, 128)
"""Of 128 elements: under the interpreter each program takes its time, so that the last one is the
faster one by far.
"""


def trained(case: str, n_calls: int = 0) -> tuple[list[Any], list[torch.Tensor], Any]:
    """Losses; parameters, gradients, what the optimizer holds, and the next random number; the
    kernel.

    Tuned to the end, or untuned for ``n_calls``.
    """
    wrap, every = LOOPS[case]
    kernel = autotuned(blocks=BLOCKS if not n_calls else BLOCKS[:1])
    torch.manual_seed(5)
    model = wrap(Layer(kernel))
    optimizer = AdamW(model.parameters(), lr=0.01, fused=wrap is DDP)
    schedule = CosineAnnealingLR(optimizer, 100)
    torch.manual_seed(7)

    def step(k: int) -> Any:
        loss = model(torch.full((2, 64), 1.0 + k % 3 + dist.get_rank())).square().mean()
        loss.backward()
        if k % every == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss.detach()

    tuned = contextual_autotune(is_dist=True, max_slowdown=1.0, n_repeat=1)(step)
    losses = [step(k) for k in range(n_calls)] if n_calls else run_job(tuned)
    kept = [
        value
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    ]
    held = [
        *model.parameters(),
        *(each.grad for each in model.parameters() if each.grad is not None),
        *kept,
    ]
    local = [getattr(each, "to_local", lambda each=each: each)().detach().clone() for each in held]
    return losses, [*local, torch.rand(1)], kernel


@on_each_rank(cases=list(LOOPS), is_alone=True)
def test_a_training_loop_is_tuned_while_it_runs(rank: int, case: str):
    """All that it trains is the untuned loop's to the bit, dropout as well; each key of the kernel
    has the fastest config at the end.
    """
    losses, state, kernel = trained(case)
    plain_losses, plain_state, _ = trained(case, len(losses))
    assert losses == plain_losses
    assert len(state) == len(plain_state)
    assert all(map(torch.equal, state, plain_state))
    assert {config.kwargs["BLOCK"] for config in kernel.cache.values()} == {BLOCKS[-1]}
    assert IS_OVER not in log()
