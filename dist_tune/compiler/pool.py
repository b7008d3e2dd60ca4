"""The compilations of one tuning, and the threads that run them.

Knows which candidates to compile and in which order, and nothing of how, nor of ranks. From the first miss on, threads compile beside
the replay that goes on.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import triton
from triton.compiler.compiler import max_shared_mem

from dist_tune.compiler.candidate import Candidate, Compilable, Compilation, Failure, Resources
from dist_tune.compiler.cost import order
from dist_tune.compiler.front_end import FrontEndLock, in_turn
from dist_tune.compiler.output import quiet_terminal
from dist_tune.compiler.partition import KEY_CHARS
from dist_tune.compiler.shared_memory import early_check, known_need

_EXIT_WAIT_S = 10.0
"""How long the end of the process waits for threads in the compiler."""
_compilers: weakref.WeakSet[Compiler] = weakref.WeakSet()
"""Those that may have threads."""


def host_of_cache() -> str:
    """This machine and Triton's cache folder on it: processes with the same answer share compiled kernels."""
    folder = Path(triton.knobs.cache.dir)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        return f"{socket.gethostname()} {status.st_dev}:{status.st_ino}"
    return f"{socket.gethostname()} process {os.getpid()}"


def n_compile_threads(n_ranks_of_host: int) -> int:
    """This process's part of the cores that it may run on: ranks that do not tune with it compile, too."""
    n_ranks = max(n_ranks_of_host, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, len(os.sched_getaffinity(0)) // n_ranks)


class Compiler:
    """The compilations of one tuning, and the threads that run them. Sites are told apart by their labels."""

    def __init__(self, n_threads: int, stuck_after_s: float) -> None:
        self.n_threads = n_threads
        self._stuck_after_s = stuck_after_s
        self._sites: dict[str, list[Candidate]] = {}
        self._by_key: dict[str, Compilation] = {}
        self._orders: dict[str, list[tuple[float, int]]] = {}
        """Site -> how to sort its candidates before they are compiled."""
        self._waiting: deque[Compilation] = deque()
        self._threads: dict[threading.Thread, Compilation | None] = {}
        """Each with what it is at."""
        self._lock = threading.Lock()
        """Guards the queue and the threads."""
        self._turns = FrontEndLock()
        self._shared_limit_bytes: int | None = None
        self._surroundings = ExitStack()
        self._is_open = False

    def begin(self, label: str, launch: Compilable, configs: list[triton.Config], first: Collection[int]) -> None:
        """Take up a site, and begin with candidate 0 and those of ``first``."""
        if not self._is_open:
            self._open()
        self._sites[label] = [self._candidate(launch, config) for config in configs]
        self._orders[label] = [order(config) for config in configs]
        if self._shared_limit_bytes is None and any(not each.compilation.done.is_set() for each in self._sites[label]):
            with suppress(RuntimeError, KeyError, AttributeError):  # a backend without that number
                self._shared_limit_bytes = max_shared_mem(triton.runtime.driver.active.get_current_device())
        self.queue(label, first)

    def keys(self, label: str) -> str:
        """The site's compile keys in a row, as ranks compare them."""
        return "".join(each.compilation.key[:KEY_CHARS].ljust(KEY_CHARS) for each in self._sites[label])

    def queue(self, label: str, candidates: Collection[int]) -> None:
        """Compile these in the threads, those that take longest first: the last to end shall not be the longest."""
        compilations = [self._sites[label][i].compilation for i in sorted(candidates, key=lambda i: (self._orders[label][i], i))]
        with self._lock:
            self._waiting.extend(each for each in compilations if each.is_waiting)
        self._start_threads()

    def load(self, label: str, candidate: int) -> Resources | Failure | None:
        """The candidate on the device, not launched; compiled at once if it is not yet. None under the interpreter."""
        compilation = self._sites[label][candidate].compilation
        if compilation.is_waiting:
            # A launch waits for it, and perhaps other ranks for that launch; the threads may all be at something longer.
            with self._lock:
                self._start_thread(compilation)
        # Nobody hears from this rank meanwhile: what does not end is to fail before the others take the rank for lost.
        for _ in self._wait([compilation], 2 / 3 * self._stuck_after_s):
            pass
        return self._sites[label][candidate].load()

    def wait(self, label: str, candidates: Collection[int]) -> Iterator[int]:
        """Until these are compiled: yields how many are not, several times a second."""
        return self._wait([self._sites[label][i].compilation for i in candidates], self._stuck_after_s)

    def known_need(self, label: str, candidate: int) -> int | None:
        """Bytes of shared memory that a candidate needs, where that was found to be too much."""
        return known_need(self._sites[label][candidate].compilation.key)

    def failures(self, label: str) -> dict[int, Failure]:
        """Candidates that did not compile so far."""
        outcomes = enumerate(each.compilation.outcome for each in self._sites[label])
        return {i: outcome for i, outcome in outcomes if isinstance(outcome, Failure)}

    def close(self) -> None:
        """Give the terminal and Triton back, and let the threads end; those in a compilation when it is through."""
        with self._lock:
            self._waiting.clear()
        self._is_open = False
        self._surroundings.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads that somebody still waits for."""
        end = time.monotonic() + timeout_s
        for thread, compilation in list(self._threads.items()):
            if compilation is None or not compilation.is_given_up:
                thread.join(max(0.0, end - time.monotonic()))

    def _open(self) -> None:
        _compilers.add(self)
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        self._surroundings.callback(self._turns.close)
        self._surroundings.enter_context(early_check())
        self._surroundings.enter_context(in_turn())
        quiet_terminal.enter()
        self._surroundings.callback(quiet_terminal.leave)
        self._is_open = True

    def _candidate(self, launch: Compilable, config: triton.Config) -> Candidate:
        candidate = Candidate(launch, config)
        if candidate.compilation.key and not candidate.compilation.done.is_set():
            candidate.compilation = self._by_key.setdefault(candidate.compilation.key, candidate.compilation)
        return candidate

    def _wait(self, compilations: list[Compilation], stuck_after_s: float) -> Iterator[int]:
        while pending := [each for each in compilations if not each.done.is_set()]:
            now = time.monotonic()
            for each in pending:
                if each.began is not None and now - each.began > stuck_after_s:
                    self._pass_on_turn_of(each)
                    each.give_up(f"TimeoutError: has been compiling for {stuck_after_s:g} s; DIST_TUNE_DEADLINE_S sets the limit")
            self._start_threads()
            yield len(pending)
            pending[0].done.wait(0.05)

    def _pass_on_turn_of(self, compilation: Compilation) -> None:
        with self._lock:
            idents = [thread.ident for thread, at in self._threads.items() if at is compilation]
        for ident in idents:
            self._turns.pass_on(ident)

    def _start_threads(self) -> None:
        """As many as there is work for; and others for those that do not come back."""
        with self._lock:
            for _ in range(min(self.n_threads - self._n_at_work(), len(self._waiting))):
                self._start_thread(None)

    def _n_at_work(self) -> int:
        return sum(each is None or not each.is_given_up for each in self._threads.values())

    def _start_thread(self, compilation: Compilation | None) -> None:
        # A daemon: a compilation that never ends must not keep the process from ending.
        thread = threading.Thread(target=self._work, args=[compilation], name="dist_tune compiler", daemon=True)
        self._threads[thread] = compilation
        try:
            thread.start()
        except RuntimeError:  # no more threads in this process
            del self._threads[thread]
            raise

    def _work(self, compilation: Compilation | None) -> None:
        """Compile one, then whatever waits."""
        me = threading.current_thread()
        try:
            while True:
                if compilation is not None:
                    compilation.run(self._shared_limit_bytes)
                    self._turns.pass_on()  # if it did not come as far as the front end
                # Before a compilation is taken up: those that take longest are to leave the front end first.
                self._turns.take()
                with self._lock:
                    if not self._waiting or self._n_at_work() > self.n_threads:
                        del self._threads[me]
                        return
                    self._threads[me] = compilation = self._waiting.popleft()
        finally:
            self._turns.pass_on()
            with self._lock:
                self._threads.pop(me, None)


def _at_exit() -> None:
    # Python ends daemon threads where they ask for the interpreter again, and C++ aborts the process if that is in a compiler.
    for compiler in list(_compilers):
        compiler.close()
        compiler.join(_EXIT_WAIT_S)
