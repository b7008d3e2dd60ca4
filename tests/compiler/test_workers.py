"""The processes that compile: used again, started ahead, ended with their rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_tune.compiler.subprocesses.workers import NICENESS, Worker, WorkerDiedError, Workers

pytestmark = [pytest.mark.once, pytest.mark.processes]


def is_gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def pool_() -> Iterator[Workers]:
    made = Workers()
    with made.in_use():
        yield made


class TestWorkers:
    """The processes themselves."""

    def test_they_end_with_the_last_tuning(self) -> None:
        """Idle ones at once, others when they are given back."""
        pool_ = Workers()
        with pool_.in_use():
            with pool_.in_use():
                pool_.start(2)
            taken = pool_.take(is_urgent=False)
            (idle,) = pool_._idle
            alive = [idle.is_alive]
        alive += [idle.is_alive, taken.is_alive]
        pool_.give(taken)
        assert [*alive, taken.is_alive] == [True, False, True, False]

    def test_one_is_used_again(self, pool_: Workers) -> None:
        """An idle process takes the next kernel."""
        first = pool_.take(is_urgent=False)
        pool_.give(first)
        assert pool_.take(is_urgent=False) is first
        first.end()

    def test_one_of_another_environment_is_not(self, pool_: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
        """Triton reads its settings from the environment."""
        first = pool_.take(is_urgent=False)
        pool_.give(first)
        monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
        later = pool_.take(is_urgent=False)
        assert later is not first
        for each in (first, later):
            each.end()

    def test_one_of_another_priority_changes_it_where_it_may(self, pool_: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
        """A lower priority is always allowed, a higher one not everywhere: then there is a new process."""
        urgent = pool_.take(is_urgent=True)
        pool_.give(urgent)
        first = pool_.take(is_urgent=False)
        assert first is urgent
        pool_.give(first)

        def forbidden(*args: int) -> None:
            raise PermissionError

        monkeypatch.setattr(os, "setpriority", forbidden)
        later = pool_.take(is_urgent=True)
        assert later is not first
        for each in (first, later):
            each.end()

    def test_several_are_started_before_they_are_needed(self, pool_: Workers) -> None:
        """The first of them for the launch that waits; those that are idle count."""
        pool_.start(2)
        pool_.start(3)
        taken = [pool_.take(is_urgent=True), pool_.take(is_urgent=False), pool_.take(is_urgent=False)]
        assert not pool_._idle
        assert [each.niceness for each in taken] == [0, NICENESS, NICENESS]
        for each in taken:
            each.end()

    def test_one_that_has_ended_is_not_given_out(self, pool_: Workers) -> None:
        """A process ends by itself when it has no work."""
        first = pool_.take(is_urgent=False)
        pool_.give(first)
        first._process.kill()
        first._process.wait()
        later = pool_.take(is_urgent=False)
        assert later is not first
        later.end()

    def test_it_ignores_ctrl_c_and_says_how_it_died(self) -> None:
        """An interrupt reaches the whole group of processes, and is the rank's to handle."""
        each = Worker(is_urgent=True)
        (result, *_) = each.ask((("no such file", None, None), "ttir"))
        assert len(result) == 3  # an error: it serves
        each._process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert each.is_alive
        each._process.kill()
        with pytest.raises(WorkerDiedError, match=r"exit code -9"):
            each.ask((None, "ttir"))

    def test_it_ends_with_its_rank_in_the_middle_of_a_kernel(self) -> None:
        """Also the compiler that it has started: ptxas may never end."""
        begin = "from dist_tune.compiler.subprocesses.workers import Worker\neach = Worker(is_urgent=False)\neach._greet()"
        text = f"import time, os\n{begin}\nprint(each._process.pid, flush=True)\ntime.sleep(60)"
        rank = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # as a stage that takes long
        child = subprocess.Popen(["/bin/sleep", "60"], process_group=pid)
        rank.kill()
        rank.wait()
        rank.stdout.close()
        os.kill(pid, signal.SIGCONT)
        assert is_gone(pid)
        assert child.wait(timeout=5) == -signal.SIGKILL

    def test_it_ends_with_its_rank(self) -> None:
        """A rank that is killed leaves no process behind."""
        begin = "from dist_tune.compiler.subprocesses.workers import Worker\nprint(Worker(is_urgent=False)._process.pid, flush=True)"
        text = f"import time\n{begin}\ntime.sleep(60)"
        rank = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        assert not is_gone(pid, within_s=0.5)
        rank.kill()
        rank.wait()
        rank.stdout.close()
        assert is_gone(pid)
