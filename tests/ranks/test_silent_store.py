"""A store that goes silent: packets are lost, and no connection is reset."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune, contextual_autotune
from tests.cases import further
from tests.ranks.kernels import autotuned, launch
from tests.ranks.stuck import left_with
from tests.ranks.world import DEADLINE_S, caught
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


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


def cut_off(rank: int, at_run: int, after_s: float = 0.0) -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    wire = Wire(store.port) if store is not None else None
    port: list[Any] = [wire.port if wire is not None else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    kernel, runs = autotuned(), [0]

    @contextual_autotune(is_dist=True, n_repeat=20, n_warmup=0, search="exhaustive")
    def step(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        time.sleep(1.0 if runs[0] == 1 else 0.02)  # both ranks are in their first run when the wire is cut there
        if wire is not None and runs[0] == at_run:
            wire.is_cut = True
        time.sleep(after_s)
        return x if after_s else launch(kernel, x)

    began = time.monotonic()
    found = caught(lambda: step(torch.zeros(64)))
    seconds = time.monotonic() - began
    time.sleep(2 * DEADLINE_S)  # else the end of this process would close the wire
    return found.kind, found.message, seconds


@pytest.mark.parametrize("at_run", [pytest.param(1, marks=pytest.mark.slow), 10])
def test_a_rank_that_is_cut_off_from_the_store_leaves(at_run: int):
    """In the first run and in the race: the cut rank leaves with exit code 86, its log says why, and the other rank raises an error."""
    first, second = on_ranks(2, cut_off, at_run, timeout_s=30)
    left_with(second, 86)
    assert "the c10d store has not answered for" in second.log
    error, message, seconds = first.value
    assert error == "AbsentRanksError", message
    assert "ranks [1]" in message
    assert "1800 s" not in message
    assert seconds < 3 * DEADLINE_S + 2  # with the replays before


QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _host_ends(rank: int, face: str, is_late: bool) -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [store.port if store is not None else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    kernel = autotuned(blocks=(16, 32))
    step: Any = contextual_autotune(is_dist=True, **QUICK)(lambda x, n: float(launch(kernel, torch.ones(n)).sum()))
    if face == "function":
        step = autotune([{"block": 1}, {"block": 2}], key_fn=lambda x, n: n, **QUICK)(lambda x, n, block: 2.0 * n)
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
