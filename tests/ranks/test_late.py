"""Ranks that are late, stopped, silent or gone, and configs that never return: who is waited for,
who is named, whose process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import re
import signal
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import triton

from dist_tune.compiler import pool
from dist_tune.testing import values
from tests.steps import (
    FACES,
    Face,
    Step,
    all_reduced,
    autotuned,
    launch,
    stop_for,
    threads_left,
    told,
    tuned,
)
from tests.worlds import (
    DEADLINE_S,
    Wire,
    caught,
    further,
    gathered,
    has_ended,
    left_with,
    log,
    log_of,
    on_each_rank,
    on_ranks,
    over_tcp,
    until,
)

X = torch.zeros(64)

# -- late ------------------------------------------------------------------------------------------


@on_each_rank(
    3,
    cases=[
        ("contextual", 1, "normal"),
        ("function", 1, "quiet"),
        further(("contextual", 0, "normal")),
    ],
)
def test_a_late_rank_costs_waiting_and_is_told_on_one_terminal(
    rank: int, case: tuple[Face, int, str]
):
    """Later than two deadlines, within the timeout of its group.

    The first rank tells it once; where that is the late one, the next.
    """
    face, late, shown = case
    os.environ |= {"DIST_TUNE_DEADLINE_S": "1.5", "DIST_TUNE_VERBOSITY": shown}
    step, teller = Step(face), int(late == 0)
    dist.barrier()
    if rank == late:
        until(lambda: f"WARNING rank {late} is late" in log_of(teller))
        time.sleep(1.5)
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        y = step(X)
    lines = re.findall(
        rf"^dist_tune: rank {late} has not come to call \d of step, \d s$",
        terminal.getvalue(),
        re.MULTILINE,
    )
    assert (
        len(lines)
        == terminal.getvalue().count("has not come")
        == ((rank, shown) == (teller, "normal"))
    )
    return y[0].item(), step.best


@on_each_rank()
def test_a_rank_that_is_stopped_or_takes_long_for_good_reason_is_waited_for(rank: int):
    """A first run in which it is stopped, a reset and a replay, each beyond the deadline: neither
    its watchdog nor its peer gives up.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = "2"

    def is_told_after_a_stop() -> bool:
        """The thread that tells it may have been asking its peers meanwhile."""
        stop_for(2.5)
        threading.Event().wait(0.5)
        return "rank 1 did not run for" in log_of(1)

    def rest(y: torch.Tensor) -> torch.Tensor:
        n = len(step.ran)
        if (rank, n) == (1, 1):
            until(lambda: "WARNING rank 1 is late" in log_of(0))
            until(is_told_after_a_stop)
        time.sleep(2.5 if (rank, n) == (1, 2) else 0.0)
        return y

    step: Step = Step(
        "contextual",
        rest=rest,
        reset=lambda: time.sleep(2.5 if rank and len(step.ran) == 1 else 0.0),
    )
    y = step(X)
    assert re.search(
        "WARNING rank 1 is late: .* its first run of tests.steps.step, call 1", log_of(0)
    )
    assert "rank 0 is late" not in log_of(1)
    return step.best, y[0].item(), threads_left()


@on_each_rank()
def test_a_rank_that_comes_too_late_gets_the_verdict_too(rank: int):
    """Its peer has given it up, later than their group and the deadline; it reads that, and does
    not wait.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = "1"
    step = Step("contextual", group=dist.new_group([0, 1], timeout=timedelta(seconds=0.5)))
    dist.barrier()
    if rank == 1:
        until(lambda: "ended by AbsentRanksError" in log_of(0))
    error = caught(lambda: step(X))
    assert (error.kind, "ranks [1] did not come" in error.message) == ("AbsentRanksError", True), (
        error.message
    )


@on_each_rank()
def test_timeouts_are_lowered_only_while_ranks_tune(rank: int):
    """Not in a first run, nor for a call that merely has new shapes; and they are given back, also
    after an error.
    """
    seen: list[list[float]] = []
    groups: list[Any] = [dist.group.WORLD, dist.new_group([0, 1], timeout=timedelta(seconds=0.5))]

    def note(y: torch.Tensor) -> None:
        seen.append(
            [
                group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                for group in groups
            ]
        )
        if y.numel() == 96:
            raise ValueError

    step = Step("contextual", rest=note)
    for x in (X, X.reshape(8, 8), torch.zeros(96)):
        with contextlib.suppress(ValueError):
            step(x)
        note(X)
    usual, short = [60.0, 0.5], [3.0, 0.5]
    assert seen == [usual, *[short] * (len(seen) - 6), *[usual] * 5]


# -- a store that is silent or gone ----------------------------------------------------------------


def _cut_off(rank: int, at_run: int) -> Any:
    wires: list[Wire] = []

    def lead(port: int) -> int:  # of rank 0, which hosts the store
        wires.append(Wire(port))
        return wires[0].port

    def rest(y: torch.Tensor) -> torch.Tensor:
        if wires and len(step.ran) == at_run:
            # Both have seen each other in this call by then.
            until(lambda: at_run > 1 or "rank 0 is late" in log_of(1))
            wires[0].is_cut = True
        return y

    over_tcp(rank, lead=lead)
    step = Step("contextual", rest=rest, n_repeat=20, search="exhaustive")
    found = caught(lambda: step(X))
    until(lambda: "exit code 86" in log_of(1))  # the end of this process would close the wire
    return found.kind, found.message


@pytest.mark.parametrize("at_run", [further(1), 10])
def test_a_rank_that_is_cut_off_from_the_store_leaves(at_run: int):
    """Packets are lost, and no connection is reset: the cut rank ends with exit code 86 and a word
    in its log, the other with an error.
    """
    first, second = on_ranks(2, _cut_off, at_run)
    left_with(second, 86)
    at_s = [
        float(each)
        for each in re.findall(r"the c10d store has not answered for (\d+\.\d) s", second.log)
    ]
    assert at_s[-1] >= 1.5 * DEADLINE_S - 0.1
    kind, message = first.value
    assert (kind, "ranks [1]" in message, "1800 s" in message) == (
        "AbsentRanksError",
        True,
        False,
    ), message


def _host_dies(rank: int) -> None:
    over_tcp(rank)
    pids = gathered(os.getpid())

    def rest(y: torch.Tensor) -> torch.Tensor:
        if len(step.ran) == 6 and rank == 0:
            os._exit(0)
        until(lambda: (len(step.ran), rank) != (6, 2) or has_ended(pids[0]))
        return y

    step = Step("contextual", rest=rest, n_repeat=20, search="exhaustive")
    step(X)


def test_a_dead_store_ends_all_ranks():
    """The process that hosts it is gone: a rank that waits in an exchange and one between replays
    say so.
    """
    host, *others = on_ranks(3, _host_dies)
    assert host.error == "Died"
    for outcome in others:
        assert outcome.error == "StoreGoneError", (
            f"{outcome.error}: {outcome.message}\n{outcome.notes}"
        )
        assert re.search(
            "the c10d store cannot be reached at '[^']*' of (tests.*)?step", outcome.message
        )


def _host_ends(rank: int) -> Any:
    over_tcp(rank)
    steps = [Step(face, name=face) for face in FACES]
    for step in steps:
        step(X)
    pids = gathered(os.getpid())
    if rank == 0:
        os._exit(0)
    until(lambda: has_ended(pids[0]))
    return [
        step(torch.ones(*shape)).sum().item()
        for step in steps
        for shape in ((8, 8), (96,), (128,), (64,))
    ]


def test_the_last_rank_goes_on_with_configs_it_knows():
    """New shapes and new keys after the host of the store has ended its program are no error:
    nothing is tuned.
    """
    _, outcome = on_ranks(2, _host_ends)
    assert (outcome.error, outcome.value) == ("", [128.0, 192.0, 256.0, 128.0] * 2), outcome.message


def _group_ends(rank: int) -> bool:
    over_tcp(rank)
    Step("contextual")(X)
    store: Any = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    port = store.port
    dist.barrier()
    del store
    dist.destroy_process_group()
    gc.collect()
    with contextlib.suppress(dist.DistError):
        return rank > 0 or bool(
            dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        )
    return False


def test_the_host_of_the_store_lives_as_long_as_its_process():
    """Not only as long as the group: threads of peers that still answer would end in torch's
    warnings, with a stack each.
    """
    assert values(on_ranks(2, _group_ends)) == [True, True]


# -- the end of a program: Python aborts it where a thread comes back from C++ then ----------------


def _left() -> list[str]:
    """The threads that are left when Python ends."""
    atexit._run_exitfuncs()
    return [each.name for each in threading.enumerate() if each.name.startswith("dist_tune")]


def _peer_ends(rank: int, how: str) -> Any:
    over_tcp(rank)
    kernel, weight, over = (
        autotuned(),
        torch.zeros(1),
        Path(os.environ["DIST_TUNE_LOG_DIR"], "over"),
    )

    def step(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if rank == 1 and how != "busy" and runs[0] == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        weight.add_(how != "killed")
        y = launch(kernel, x)
        return y if how == "busy" else all_reduced(y)

    call, runs = tuned(kernel, step, n_repeat=20, search="exhaustive"), [0]
    error = told(lambda: [call(X) for _ in range(3 if (rank, how) == (1, "busy") else 300)])[0]
    if (rank, how) == (1, "busy"):
        until(over.exists)
    left = _left()
    over.parent.mkdir(exist_ok=True)
    over.touch()
    return error, left


@pytest.mark.parametrize(
    ("how", "error"),
    [("killed", "AbsentRanksError"), ("killed online", "RuntimeError"), ("busy", "")],
)
def test_a_program_that_ends_leaves_no_thread_in_the_store(how: str, error: str):
    """Its host waits no more for a peer that was killed, nor an online tuning's thread in a meeting
    for one that lives, in a long call.
    """
    first, second = on_ranks(2, _peer_ends, how)
    assert second.error == "Died" if error else second.value == ("", [])
    assert first.value == (error, []), first.notes


def _compiles_for_ever(rank: int) -> list[str]:
    weight, kernel, stuck = torch.zeros(1), autotuned(blocks=(16, 32, 64, 128)), threading.Event()

    def listener(**facts: object) -> None:
        if float(weight) > 0:  # the first launch has its kernel
            stuck.set()
            time.sleep(1e6)

    def step() -> torch.Tensor:
        launch(kernel, X)
        return weight.add_(1.0)

    triton.knobs.compilation.listener, pool.EXIT_WAIT_S = listener, 0.1
    call = tuned(kernel, step, is_dist=False, max_slowdown=0.9)
    until(lambda: call() is not None and stuck.is_set())
    return _left()


def test_a_program_that_ends_waits_for_no_compilation_of_an_online_tuning():
    """Its thread ends all the same; of the compiler's, one may never."""
    (left,) = values(on_ranks(1, _compiles_for_ever, mode="fake", is_dist=False))
    assert {*left} == {"dist_tune compiler"}


# -- configs that never return ---------------------------------------------------------------------


def _hangs(rank: int, n_errors: int) -> None:
    """On the last rank, in a first run, after some that failed before a collective; others wait
    there meanwhile.
    """
    is_last = not dist.is_initialized() or rank == 1

    def rest(y: torch.Tensor) -> torch.Tensor:
        if is_last and len(step.ran) <= n_errors:
            raise ValueError("once")
        return all_reduced(y) if n_errors else y

    step: Step = Step(
        "contextual",
        rest=rest,
        act=lambda block: time.sleep(1000.0 if is_last and len(step.ran) > n_errors else 0.0),
    )
    for _ in range(n_errors * is_last):
        with contextlib.suppress(ValueError):
            step(X)
    step(X)


@pytest.mark.parametrize("n_errors", [0, 2])
def test_a_config_that_hangs_in_the_first_run_is_named(n_errors: int):
    """Peers wait for a rank in its first run, however long that takes, but not for a config; errors
    of calls before are not the cause.
    """
    first, second = on_ranks(2, _hangs, n_errors)
    left_with(second, 86)
    assert first.error == "StuckConfigError", f"{first.error}: {first.message}\n{first.notes}"
    assert all(
        word in first.message for word in ("rank 1", "candidate 0", "BLOCK=16", "discovery")
    ), first.message


def test_a_lone_process_leaves_a_config_that_never_returns(tmp_path: Path):
    """As with peers, and without the temporary files that a peer would delete."""
    (outcome,) = on_ranks(1, _hangs, 0, is_dist=False, env={"TMPDIR": str(tmp_path)})
    left_with(outcome, 86)
    assert "candidate 0" in outcome.log
    assert list(tmp_path.glob("dist_tune-*")) == []


def _waits_for_ever(rank: int) -> None:
    def wait(block: int) -> None:
        time.sleep(1000.0 if block == 64 else 0.0)

    inside, outside = (
        (wait, lambda y: y) if rank else (lambda block: None, lambda y: wait(step.ran[-1]))
    )
    step: Step = Step("contextual", act=inside, rest=outside, search="exhaustive")
    step(X)


def test_a_rank_that_waits_for_one_that_hangs_names_it():
    """Rank 0 waits for rank 1 where no timeout frees it, so it leaves, too: later, and with rank
    1's message.
    """
    first, second = on_ranks(2, _waits_for_ever, env={"DIST_TUNE_DEADLINE_S": "4"})
    left_with(first, 86)
    left_with(second, 86)
    assert "The tuning had been ended before: rank 1: candidate 2" in first.log
    assert "ended before" not in second.log


@on_each_rank(cases=FACES)
def test_a_released_config_is_dropped_on_all_ranks(rank: int, face: Face):
    """On rank 1 it waits for a flag and an event: release= fills and calls them, from another
    thread, and the tuning goes on without it.
    """
    flag, free = torch.zeros(2), threading.Event()

    def act(block: int) -> None:
        if rank == 1 and block == 64:
            until(free.is_set)
            until(lambda: flag.tolist() == [1.0, 1.0])

    step = Step(
        face, act=act, rest=all_reduced, n_repeat=2, search="exhaustive", release=[flag, free.set]
    )
    y = step(X)
    assert [each is None for each in step.failures] == [True, True, False]
    # Rank 0 waited in the all-reduce of that replay, and may have released it a little earlier.
    assert re.match(
        r"rank [01]: (it did not return|a replay with it did not end) until release= was called",
        step.failures[2] or "",
    )
    assert rank == 0 or (
        "it did not return until release= was called" in log() and "in act" in log()
    )
    return step.best, y[0].item(), threads_left()


@on_each_rank(1, is_dist=False)
def test_nothing_watches_a_steady_call(rank: int):
    """While a tuning is under way there is one thread more, and after it none, nor a timer of
    faulthandler that could end the process.
    """
    during: set[str] = set()
    step, timers = Step("contextual", act=lambda block: during.update(threads_left())), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
            patch.setattr(
                faulthandler, name, lambda *args, name=name, **options: timers.append(name)
            )
        step(X)
        assert (during, threads_left()) == ({"dist_tune watchdog"}, [])
        assert (timers[0], timers[-1]) == ("dump_traceback_later", "cancel_dump_traceback_later")
        during.clear()
        timers.clear()
        step(X)
    assert (during, timers) == (set(), [])


@on_each_rank(1, is_dist=False)
def test_without_threads_a_tuning_goes_on_unwatched(rank: int):
    """A process that can start no more threads is warned once, and no config is blamed."""
    own = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if "watchdog" in thread.name:
            raise RuntimeError("can't start new thread")
        own(thread)

    step = Step("contextual")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as found:
        patch.setattr(threading.Thread, "start", start)
        warnings.simplefilter("always")
        step(X)
    assert step.failures == [None] * 3
    assert [str(each.message).partition(":")[0] for each in found] == [
        "dist_tune does not watch for configs that never return"
    ]
