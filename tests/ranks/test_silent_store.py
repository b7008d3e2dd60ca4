"""A store that goes silent, because packets are lost and no connection is reset, or whose host has ended; threads at a program's end."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import triton

from dist_tune import autotune
from dist_tune.compiler import pool
from dist_tune.distributed import Reduction, group_of
from dist_tune.testing import values
from tests.ranks.stuck import left_with
from tests.steps import autotuned, launch, online_threads, tuned
from tests.worlds import DEADLINE_S, caught, further, on_ranks, over_tcp


class Wire:
    """A port that leads to another one, until it is cut: then nothing arrives, and nothing is closed."""

    def __init__(self, port: int) -> None:
        self.is_cut = False
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._server.accept()
            there = socket.create_connection(("127.0.0.1", self._to))
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        while sent := source.recv(65536):
            while self.is_cut:
                time.sleep(1)
            sink.sendall(sent)
        sink.close()


def _cut_off(rank: int, at_run: int) -> Any:
    wires: list[Wire] = []

    def lead(port: int) -> int:
        wires.append(Wire(port))
        return int(wires[0].port)

    over_tcp(rank, lead=lead)
    kernel, runs = autotuned(), [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        time.sleep(2.0 if runs[0] == 1 else 0.02)  # the other rank has seen this one in its first run when the wire is cut there
        if wires and runs[0] == at_run:
            wires[0].is_cut = True
        return launch(kernel, x)

    call = tuned(kernel, step, n_repeat=20, search="exhaustive")
    began = time.monotonic()
    found = caught(lambda: call(torch.zeros(64)))
    seconds = time.monotonic() - began
    time.sleep(2 * DEADLINE_S)  # else the end of this process would close the wire
    return found.kind, found.message, seconds


@pytest.mark.parametrize("at_run", [further(1), 10])
def test_a_rank_that_is_cut_off_from_the_store_leaves(at_run: int):
    """In the first run and in the race: the cut rank leaves with exit code 86, its log says why, and the other rank raises an error."""
    first, second = on_ranks(2, _cut_off, at_run, timeout_s=30)
    left_with(second, 86)
    assert "the c10d store has not answered for" in second.log
    error, message, seconds = first.value
    assert error == "AbsentRanksError", message
    assert "ranks [1]" in message
    assert "1800 s" not in message
    assert seconds < 3 * DEADLINE_S + 2  # with the replays before


@Reduction
def _listed(parts: Mapping[int, str]) -> list[str]:
    return list(parts.values())


def _host_dies(rank: int) -> None:
    over_tcp(rank)
    ranks = group_of(None, 1.0)
    with ranks.calling("f") as place:
        ranks.enter(place)
        dist.barrier()
        if rank == 0:
            os._exit(0)
        while rank == 2:
            time.sleep(0.05)
            ranks.beat("replay 3")
        ranks.reduce("report", "", _listed)


def test_a_dead_store_ends_all_ranks():
    """The process that hosts the store is gone: those who wait and those who beat say so at once."""
    host, *others = on_ranks(3, _host_dies)
    assert host.error == "Died"
    for outcome, topic in zip(others, ("report", "replay 3"), strict=True):
        assert (outcome.error, outcome.seconds < 5.0) == ("StoreGoneError", True)
        assert f"the c10d store cannot be reached at '{topic}' of f" in outcome.message


def _host_ends(rank: int, face: str, is_late: bool) -> Any:
    over_tcp(rank)
    kernel = autotuned(blocks=(16, 32))
    step: Any = tuned(kernel, lambda x, n: float(launch(kernel, torch.ones(n)).sum()))
    if face == "function":
        step = autotune([{"block": 1}, {"block": 2}], key_fn=lambda x, n: n, n_repeat=1, n_warmup=0)(lambda x, n, block: 2.0 * n)
    step(torch.ones(64), 64)
    if rank == 0:
        time.sleep(0.5)
        os._exit(0)
    time.sleep(1.0 if is_late else 0.0)
    return [step(torch.ones(size), n) for size, n in ((96, 64), (128, 96), (64, 128))]


@pytest.mark.parametrize("is_late", [further(False), True])
@pytest.mark.parametrize("face", ["contextual", "function"])
def test_the_last_rank_goes_on_with_configs_it_knows(face: str, is_late: bool):
    """New shapes and new keys after the host of the store has ended its program are no error: nothing is tuned."""
    _, outcome = on_ranks(2, _host_ends, face, is_late)
    assert (outcome.error, outcome.value) == ("", [128.0, 192.0, 256.0]), outcome.message


def _group_ends(rank: int) -> bool:
    over_tcp(rank)
    tuned(autotuned(blocks=(16, 32)))(torch.zeros(64))
    store: Any = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    port = store.port
    dist.barrier()
    del store
    dist.destroy_process_group()
    gc.collect()
    if rank > 0:
        return True
    with contextlib.suppress(dist.DistError):
        return bool(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2)))
    return False


def test_the_host_of_the_store_lives_as_long_as_its_process():
    """Not only as long as the group: threads of peers that still answer would end in torch's warnings, with a stack each."""
    assert values(on_ranks(2, _group_ends)) == [True, True]


# -- the end of a program: Python aborts it where a thread comes back from C++ then ------------------------------------


def _left() -> list[str]:
    """The threads that are left when Python ends."""
    atexit._run_exitfuncs()
    return [each.name for each in threading.enumerate() if each.name.startswith("dist_tune")]


def _is_in(name: str) -> bool:
    """True if the thread of an online tuning is in a function of this name."""
    frames = sys._current_frames()
    stacks = [traceback.walk_stack(frames[each.ident]) for each in online_threads() if each.ident in frames]
    return any(frame.f_code.co_name == name for stack in stacks for frame, _ in stack)


def _peer_is_killed(rank: int, is_online: bool) -> Any:
    over_tcp(rank)
    kernel, runs, weight = autotuned(), [0], torch.zeros(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if rank == 1 and runs[0] == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_online:
            weight.add_(1.0)
        y = launch(kernel, x)
        dist.all_reduce(y)
        return y

    call = tuned(kernel, step, n_repeat=20, search="exhaustive")
    try:
        for _ in range(100):
            call(torch.zeros(64))
    except Exception as error:  # noqa: BLE001  # of dist_tune, or of the collective
        return type(error).__name__, _left()


@pytest.mark.parametrize(("is_online", "error"), [(False, "AbsentRanksError"), (True, "RuntimeError")])
def test_a_rank_whose_peer_was_killed_leaves_no_thread_in_the_store(is_online: bool, error: str):
    """It hosts the store, and waits no more for a peer that cannot say that it is over."""
    first, second = on_ranks(2, _peer_is_killed, is_online)
    assert second.error == "Died"
    assert first.value == (error, []), first.notes


def _peer_is_busy(rank: int, over: Path) -> Any:
    over_tcp(rank)
    kernel, weight = autotuned(), torch.zeros(1)

    def step(x: torch.Tensor) -> float:
        launch(kernel, x)
        weight.add_(1.0)
        return float(weight)

    call, began = tuned(kernel, step), time.monotonic()
    while float(weight) < 3 or (rank == 1 and not (float(weight) > 200 and _is_in("reduce"))):
        call(torch.zeros(64))
        assert time.monotonic() - began < 60
    while rank == 0 and not over.exists() and time.monotonic() - began < 60:
        time.sleep(0.01)
    left = _left()
    over.touch()
    return left


def test_a_program_that_ends_leaves_a_meeting_that_its_peer_does_not_come_to(tmp_path: Path):
    """The thread of an online tuning waits there for a peer in a long call, for as long as that lives."""
    assert values(on_ranks(2, _peer_is_busy, tmp_path / "over")) == [[], []]


def _compiles_for_ever(rank: int) -> list[str]:
    pool.EXIT_WAIT_S, weight, kernel, stuck = 0.1, torch.zeros(1), autotuned(blocks=(16, 32, 64, 128, 256, 512)), [0]

    def listener(**facts: object) -> None:
        if float(weight) > 0:  # the first launch has its kernel
            stuck[0] += 1
            time.sleep(1e6)

    triton.knobs.compilation.listener = listener

    def step() -> float:
        launch(kernel, torch.zeros(64))
        weight.add_(1.0)
        return float(weight)

    call, began = tuned(kernel, step, is_dist=False, max_slowdown=0.9), time.monotonic()
    while not (stuck[0] and _is_in("load_all")):
        call()
        time.sleep(1e-3)
        assert time.monotonic() - began < 60
    return _left()


def test_a_program_that_ends_waits_for_no_compilation_of_an_online_tuning():
    """Its thread ends all the same; of the compiler's, one may never."""
    ((*left,),) = values(on_ranks(1, _compiles_for_ever, mode="fake", is_dist=False))
    assert {*left} == {"dist_tune compiler"}
