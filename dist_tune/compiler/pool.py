"""The compilations of one tuning, and the threads that run them beside the replay that goes on.

Knows which candidates to compile and in which order; nothing of how, nor of ranks.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import triton
from triton.compiler.compiler import max_shared_mem

from dist_tune.compiler.candidate import Candidate, Compilable, Compilation, Failure, Resources
from dist_tune.compiler.front_end import FrontEndLock, one_front_end
from dist_tune.compiler.output import quiet_terminal
from dist_tune.compiler.partition import KEY_CHARS, order
from dist_tune.compiler.shared_memory import early_check, known_need

_EXIT_WAIT_S = 10.0
"""Longest wait for compiling threads at the end of the process."""
_compilers: weakref.WeakSet[Compiler] = weakref.WeakSet()
"""Those that may have threads."""


def host_of_cache() -> str:
    """This machine and Triton's cache folder on it: processes with equal answers share compiled kernels."""
    folder = Path(triton.knobs.cache.dir)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        return f"{socket.gethostname()} {status.st_dev}:{status.st_ino}"
    return f"{socket.gethostname()} process {os.getpid()}"


def n_compile_threads(n_ranks_of_host: int) -> int:
    """This process's part of the cores that it may run on. Ranks of the job that take no part in the tuning count as well."""
    n_ranks = max(n_ranks_of_host, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, len(os.sched_getaffinity(0)) // n_ranks)


class Compiler:
    """The compilations of one tuning, by label of the site, and the threads that run them."""

    def __init__(self, n_threads: int, stuck_after_s: float) -> None:
        self.n_threads = n_threads
        self._stuck_after_s = stuck_after_s
        self._sites: dict[str, list[Candidate]] = {}
        self._by_key: dict[str, Compilation] = {}
        self._orders: dict[str, list[tuple[float, int]]] = {}
        """Site -> sort keys of its candidates."""
        self._queue: deque[Compilation] = deque()
        self._threads: dict[threading.Thread, Compilation | None] = {}
        """Each with the compilation that it runs."""
        self._lock = threading.Lock()
        """Guards the queue and the threads."""
        self._front_end = FrontEndLock()
        self._shared_limit_bytes: int | None = None
        self._patches = ExitStack()
        self._is_open = False

    def begin(self, label: str, launch: Compilable, configs: list[triton.Config], first: Collection[int]) -> None:
        """Add a site, and queue the candidates of ``first``."""
        if not self._is_open:
            self._open()
        self._sites[label] = [self._candidate(launch, config) for config in configs]
        self._orders[label] = [order(config) for config in configs]
        if self._shared_limit_bytes is None and any(not each.compilation.done.is_set() for each in self._sites[label]):
            with suppress(RuntimeError, KeyError, AttributeError):  # a backend without that number
                self._shared_limit_bytes = max_shared_mem(triton.runtime.driver.active.get_current_device())
        self.queue(label, first)

    def rename(self, labels: Mapping[str, str]) -> None:
        """Give sites other labels: old -> new."""
        self._sites.update({labels[old]: self._sites.pop(old) for old in [*self._sites] if old in labels})
        self._orders.update({labels[old]: self._orders.pop(old) for old in [*self._orders] if old in labels})

    def keys(self, label: str) -> str:
        """The site's compile keys in a row, as ranks compare them."""
        return "".join(each.compilation.key[:KEY_CHARS].ljust(KEY_CHARS) for each in self._sites[label])

    def queue(self, label: str, candidates: Collection[int]) -> None:
        """Compile these in the threads, the longest first, so that a long one does not run alone at the end."""
        compilations = [self._sites[label][i].compilation for i in sorted(candidates, key=lambda i: (self._orders[label][i], i))]
        with self._lock:
            self._queue.extend(each for each in compilations if each.is_queued)
        self._start_threads()

    def load(self, label: str, candidate: int) -> Resources | Failure | None:
        """Load the candidate onto the device without a launch, compiling it at once if need be. None under the interpreter."""
        compilation = self._sites[label][candidate].compilation
        if compilation.is_queued:
            # A launch waits for it, and other ranks may wait for that launch, so it gets a thread beyond ``n_threads``.
            with self._lock:
                self._start_thread(compilation)
        # This rank posts nothing meanwhile: a stuck compilation must fail before the other ranks take this one for lost.
        for _ in self._wait([compilation], 2 / 3 * self._stuck_after_s):
            pass
        return self._sites[label][candidate].load()

    def wait(self, label: str, candidates: Collection[int]) -> Iterator[int]:
        """Wait until these are compiled; yields the number that are not, several times a second."""
        return self._wait([self._sites[label][i].compilation for i in candidates], self._stuck_after_s)

    def known_need(self, label: str, candidate: int) -> int | None:
        """Bytes of shared memory that a candidate needs, if that was too much for some device."""
        return known_need(self._sites[label][candidate].compilation.key)

    def failures(self, label: str) -> dict[int, Failure]:
        """Candidates that failed to compile so far."""
        results = enumerate(each.compilation.result for each in self._sites[label])
        return {i: result for i, result in results if isinstance(result, Failure)}

    def close(self) -> None:
        """Give the terminal and Triton back, and let the threads end, each after the compilation that it runs."""
        with self._lock:
            self._queue.clear()
        self._is_open = False
        self._patches.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads, but not for those with a compilation that was given up."""
        end = time.monotonic() + timeout_s
        for thread, compilation in list(self._threads.items()):
            if compilation is None or not compilation.is_given_up:
                thread.join(max(0.0, end - time.monotonic()))

    def _open(self) -> None:
        _compilers.add(self)
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        self._patches.callback(self._front_end.close)
        self._patches.enter_context(early_check())
        self._patches.enter_context(one_front_end())
        self._patches.enter_context(quiet_terminal.redirected())
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
                if each.started_at is not None and now - each.started_at > stuck_after_s:
                    with self._lock:
                        idents = [thread.ident for thread, running in self._threads.items() if running is each]
                    for ident in idents:
                        self._front_end.release(ident)
                    each.give_up(f"TimeoutError: has been compiling for {stuck_after_s:g} s; DIST_TUNE_DEADLINE_S sets the limit")
            self._start_threads()
            yield len(pending)
            pending[0].done.wait(0.05)

    def _start_threads(self) -> None:
        """Start threads for the queue, also in place of stuck ones."""
        with self._lock:
            for _ in range(min(self.n_threads - self._n_running(), len(self._queue))):
                self._start_thread(None)

    def _n_running(self) -> int:
        return sum(each is None or not each.is_given_up for each in self._threads.values())

    def _start_thread(self, compilation: Compilation | None) -> None:
        # A daemon, because a compilation that never ends must not keep the process from ending.
        thread = threading.Thread(target=self._run, args=[compilation], name="dist_tune compiler", daemon=True)
        self._threads[thread] = compilation
        try:
            thread.start()
        except RuntimeError:  # no more threads in this process
            del self._threads[thread]
            raise

    def _run(self, compilation: Compilation | None) -> None:
        """Run one compilation, then those of the queue."""
        thread = threading.current_thread()
        try:
            while True:
                if compilation is not None:
                    compilation.run(self._shared_limit_bytes)
                    self._front_end.release()  # if it did not come as far as the front end
                    self._threads[thread] = None  # it counts again if it was given up
                # Before the next one is taken from the queue: the longest are to leave the front end first.
                self._front_end.acquire()
                with self._lock:
                    if not self._queue or self._n_running() > self.n_threads:
                        del self._threads[thread]
                        return
                    self._threads[thread] = compilation = self._queue.popleft()
        finally:
            self._front_end.release()
            with self._lock:
                self._threads.pop(thread, None)


def _at_exit() -> None:
    # Python ends daemon threads when they ask for the interpreter's lock again; in a compiler's C++ that aborts the process.
    for compiler in list(_compilers):
        compiler.close()
        compiler.join(_EXIT_WAIT_S)
