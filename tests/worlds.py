"""Tests whose body runs on each rank.

Those of a module share a world of ranks, which takes longer to start than most bodies run.

Each body has an environment, logs and caches of its own. What it returns must be equal on all
ranks. Times do not depend on how busy the machine is: what is chosen among kernels is the same in
every run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import testing
from dist_tune.errors import DistTuneError
from dist_tune.settings import SettingsError
from dist_tune.testing import FakeH200, Mode, Outcome

Body = Callable[..., Any]
BODY_S = 240
"""Longest time of a body; then its rank ends by SIGALRM, and so do its world's tests."""

ENVIRONMENTS = {
    "fake": {
        "TRITON_DEFAULT_FP_FUSION": "1",
        "DIST_TUNE_DEADLINE_S": "60",
    },  # a compilation takes a busy machine long
    "gpu": {"DIST_TUNE_DEADLINE_S": "20"},
}
WITH_COMPILERS = ("tests.compiler.", "tests.ranks.test_compiled")
"""Modules whose ranks start processes that compile, as a user's do, for 0.3 CPU-s each.

Elsewhere ranks compile
in their own processes, as dist_tune does where Triton's compiler has a listener.
"""


class World(NamedTuple):
    module: str
    n: int
    is_dist: bool
    mode: Mode
    alone: str
    """The test that has a world of its own."""


class Turn(NamedTuple):
    """A body with a case."""

    name: str
    case: int | None = None


_worlds: dict[World, Future[dict[Turn, list[tuple[Any, str]]]]] = {}
"""What each rank returned in each turn, and a text about its error."""


def on_each_rank(
    n: int = 2,
    *,
    cases: Sequence[Any] = (),
    modes: Sequence[Mode] = ("interpret",),
    is_dist: bool = True,
    is_alone: bool = False,
) -> Any:
    """Make a test of a body that is called with the rank, and with a case if there are some.

    ``further(x)`` is a slow case.

    Of several modes the interpreter's runs with one Triton alone. A body that breaks its group
    ``is_alone`` in its world.
    """

    def decorate(body: Body) -> Any:
        def test(request: pytest.FixtureRequest, mode: Mode, case: int | None) -> None:
            check(request, turn_of(request.node))

        def test_of_one(request: pytest.FixtureRequest) -> None:
            check(request, turn_of(request.node))

        def turn_of(item: Any) -> tuple[World, Turn]:
            given: dict[str, Any] = (
                item.callspec.params
                if hasattr(item, "callspec")
                else {"mode": modes[0], "case": None}
            )
            return World(
                body.__module__, n, is_dist, given["mode"], body.__name__ * is_alone
            ), Turn(body.__name__, given["case"])

        made: Any = test if cases or len(modes) > 1 else test_of_one
        functools.update_wrapper(made, body)
        del made.__wrapped__  # pytest would ask it for its arguments
        made.turn_of, made.start, made.body, made.cases = (
            turn_of,
            start,
            body,
            [_plain(case) for case in cases],
        )
        if made is test:
            marks = {
                mode: [pytest.mark.once] * (mode == "interpret" and len(modes) > 1)
                for mode in modes
            }
            named: list[Any] = [
                (k, _name(case, k), getattr(case, "marks", ())) for k, case in enumerate(cases)
            ] or [(None, "", ())]
            rows = [
                pytest.param(
                    mode,
                    k,
                    marks=[*marks[mode], *more],
                    id="-".join(filter(None, [mode * (len(modes) > 1), name])),
                )
                for mode in modes
                for k, name, more in named
            ]
            made = pytest.mark.parametrize(("mode", "case"), rows)(made)
        return pytest.mark.processes(made)

    return decorate


def start(item: pytest.Item, pool: Executor) -> None:
    """Play the test's world in a thread, unless its ranks would share GPUs with others."""
    world, _ = item.function.turn_of(item)  # type: ignore[attr-defined]
    if world.mode != "gpu" and world not in _worlds:
        _worlds[world] = pool.submit(_play_all, item.session, world)


def check(request: pytest.FixtureRequest, key: tuple[World, Turn]) -> None:
    """Assert that the test's body has ended on all ranks of its world, with the same value."""
    world, turn = key
    if world not in _worlds:
        _worlds[world] = Future()
        _worlds[world].set_result(_play_all(request.session, world))
    played = _worlds[world].result()[turn]
    failed = {rank: text for rank, (_, text) in enumerate(played) if text}
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())
    first, *others = [value for value, _ in played]
    assert others == [first] * len(others)


def _play_all(session: pytest.Session, world: World) -> dict[Turn, list[tuple[Any, str]]]:
    """The bodies of all selected tests of a world."""
    tests: list[tuple[Any, pytest.Item]] = [
        (getattr(item, "function", None), item) for item in session.items
    ]
    all_turns = [test.turn_of(item) for test, item in tests if hasattr(test, "turn_of")]
    turns = [each for its_world, each in all_turns if its_world == world]
    how: dict[str, Any] = {
        "mode": world.mode,
        "env": ENVIRONMENTS.get(world.mode),
        "is_dist": world.is_dist,
    }
    outcomes = on_ranks(
        world.n,
        _play,
        world.module,
        turns,
        clock="wall" if world.mode == "gpu" else "exact",
        timeout_s=BODY_S * len(turns),
        **how,
    )
    return {
        turn: [
            found.value[k] if found.value else (None, f"{found.message}\n{found.notes}")
            for found in outcomes
        ]
        for k, turn in enumerate(turns)
    }


def log() -> str:
    """What this rank has logged so far in this body."""
    path = Path(os.environ["DIST_TUNE_LOG_DIR"], f"rank-{os.environ['RANK']}.log")
    return path.read_text() if path.exists() else ""


def folder() -> Path:
    """Where the cache of this body lies."""
    return Path(os.environ["DIST_TUNE_CACHE_DIR"])


def is_interpreted() -> bool:
    """True where kernels are interpreted, so that they have results."""
    return os.environ["TRITON_INTERPRET"] == "1"


def _plain(case: Any) -> Any:
    return case.values[0] if hasattr(case, "marks") else case


def _name(case: Any, k: int) -> str:
    case = getattr(case, "id", None) or _plain(case)
    return str(getattr(case, "__name__", case if isinstance(case, str | int) else k))


def _play(rank: int, module: str, turns: Sequence[Turn]) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    root, environment = Path(os.environ["DIST_TUNE_CACHE_DIR"]).parent, dict(os.environ)
    faulthandler.register(signal.SIGALRM, chain=True)
    for k, turn in enumerate(turns):
        test = getattr(importlib.import_module(module), turn.name)
        for name in ("DIST_TUNE_CACHE_DIR", "DIST_TUNE_LOG_DIR", "TRITON_CACHE_DIR"):
            os.environ[name] = str(root / f"turn-{k}" / name.lower())
        launch_ms = FakeH200.launch_ms
        torch.manual_seed(0)
        signal.alarm(BODY_S)
        triton.knobs.compilation.listener = (
            None if module.startswith(WITH_COMPILERS) else lambda **_: None
        )
        try:
            found.append(
                (test.body(rank, *(() if turn.case is None else (test.cases[turn.case],))), "")
            )
        except Exception as error:  # noqa: BLE001  # of this body's test, not of all
            found.append((None, _told(error, inspect.getfile(test.body))))
        gc.enable()
        FakeH200.launch_ms = staticmethod(launch_ms)
        os.environ.clear()
        os.environ.update(environment)
        if dist.is_initialized() and k < len(turns) - 1:
            dist.barrier()
    signal.alarm(0)
    return found


def _told(error: Exception, path: str) -> str:
    """The traceback, with the values of variables of the test's file, and the log."""
    told = traceback.TracebackException.from_exception(error, capture_locals=True)
    for frame in told.stack:
        frame.locals = (
            {name: value[:200] for name, value in (frame.locals or {}).items()}
            if frame.filename == path
            else None
        )
    return "".join(told.format()) + log()


# -- worlds of a test's own, and what is asked of their ranks --------------------------------------

on_ranks = functools.partial(testing.on_ranks, clock="exact", timeout_s=110.0)


def on_fake(
    n: int, function: Callable[..., Any], *args: Any, is_dist: bool = True, **env: str
) -> list[testing.Outcome]:
    """Real compilation."""
    # Triton 3.9 warns on the terminal if this is not set.
    return on_ranks(
        n,
        function,
        *args,
        mode="fake",
        is_dist=is_dist,
        env={"TRITON_DEFAULT_FP_FUSION": "1", **env},
    )


ROOT = Path(__file__).parents[1]
DEADLINE_S = 3.0
"""Deadline of a tuning on ``on_ranks``; long enough for a compile on a busy machine."""


def same_error(
    outcomes: list[Outcome], error: str, *words: str, within_s: float = 3 * DEADLINE_S
) -> None:
    """Assert that all raised this error, in time, and that its message has the words."""
    for outcome in outcomes:
        assert outcome.error == error, f"{outcome.error}: {outcome.message}\n{outcome.notes}"
        for word in words:
            assert word in outcome.message
        assert outcome.seconds < within_s


def caught(call: Callable[[], object]) -> Any:
    """The error that ``call`` raises, as values; its ``kind`` is empty if there is none."""
    try:
        call()
    except (DistTuneError, SettingsError) as error:
        return SimpleNamespace(
            kind=type(error).__name__, message=str(error), cause=str(error.__cause__), **vars(error)
        )
    return SimpleNamespace(kind="", message="")


def gathered(value: object) -> list[Any]:
    """The values of all ranks, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def shown(work: Callable[[], object], *, all_lines: bool = False) -> list[str]:
    """Lines of ours on the first rank's terminal, for all ranks; without those that begin and end a
    tuning. Other ranks show nothing.
    """
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        work()
    lines = [
        line.removeprefix("dist_tune: ")
        for line in terminal.getvalue().splitlines()
        if line.startswith("dist_tune: ")
    ]
    first, *others = gathered(lines) if dist.is_initialized() else [lines]
    assert others == [[]] * len(others)
    return [
        line
        for line in first
        if all_lines or not (line.startswith("tuning ") or ", tuned " in line)
    ]


def over_tcp(rank: int, lead: Callable[[int], int] = lambda port: port) -> None:
    """Join a process group anew, over a TCP store that rank 0 hosts; others find it at the port to
    which ``lead`` leads.
    """
    n = dist.get_world_size()
    store = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    )
    port: list[Any] = [lead(store.port) if store is not None else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)


def further(*values: Any) -> Any:
    """A case that shows what another one shows; `make test` leaves it out, `make test-faults` runs
    it.
    """
    return pytest.param(*values, marks=pytest.mark.slow)


# -- waits, logs of other ranks, ends, and a wire to the store -------------------------------------


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until it holds; no time of ``ExactTime`` passes."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        threading.Event().wait(0.01)


def log_of(rank: int) -> str:
    """What another rank has logged so far in this body."""
    path = Path(os.environ["DIST_TUNE_LOG_DIR"], f"rank-{rank}.log")
    return path.read_text() if path.exists() else ""


def has_ended(pid: int) -> bool:
    """True once the process runs no more; its parent may not have waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def left_with(outcome: Outcome, code: int) -> None:
    """Assert that the rank ended its own process with this exit code."""
    assert outcome.error == "Died", (
        f"{outcome.error} {outcome.value}: {outcome.message}\n{outcome.notes}"
    )
    assert f"exit code {code}" in outcome.message, outcome.message


class Wire:
    """A port that leads to another one, until it is cut: then nothing arrives, and nothing is
    closed.
    """

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        """``delay_s``: of all that it carries."""
        self.is_cut, self.delay_s, self._to = False, delay_s, port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._server.accept()
            there = socket.create_connection(("127.0.0.1", self._to))
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        while sent := source.recv(65536):
            time.sleep(self.delay_s)
            while self.is_cut:
                time.sleep(1)
            sink.sendall(sent)
        sink.close()
