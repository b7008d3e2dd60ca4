"""The compilations of one tuning, and the threads that run them beside the replay that goes on.

Knows which candidates to compile and in which order; nothing of how, nor of ranks.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any

import triton
from triton.compiler.compiler import max_shared_mem

from dist_tune.compiler import leftovers
from dist_tune.compiler.candidate import Candidate, Compilable, Compilation, Failure, Resources
from dist_tune.compiler.output import quiet_terminal
from dist_tune.compiler.partition import KEY_CHARS, order
from dist_tune.compiler.patches import FrontEnd, Job, patched
from dist_tune.compiler.processes import CannotStartError, CompilerCrashError, Worker, Workers, is_possible
from dist_tune.compiler.triton_cache import await_digest, begin_digest, is_cached, known_need, writable_folder
from dist_tune.compiler.worker import Made, compile_kernel
from dist_tune.measure import is_interpreted
from dist_tune.output import CompiledCandidate

MIN_THREADS_FOR_PROCESSES = 4
"""Fewer threads do not wait for one another enough to be worth the start of processes."""


_DISK_S = 0.05
"""A compilation that took no longer may have been found in Triton's disk cache."""
EXIT_WAIT_S = 10.0
"""Longest wait for compiling threads at the end of the process."""


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """A compilation in the queue, with the first candidate that asked for it."""

    compilation: Compilation
    label: str
    """Of the site."""
    order: tuple[float, int]
    """Sort key among the candidates of its site (``partition.order``)."""
    candidate: int


class Pace:
    """Seconds that compilations take, by site."""

    def __init__(self) -> None:
        self._pace_s: dict[str, float] = {}
        """Site -> seconds of its latest compilation, per root of its estimated cost."""

    def turn(self, queued: Queued) -> tuple[float, int, str, int]:
        """Sort key: the longest first, by what the site's latest compilation took; of equals the smallest tiles."""
        expected_s = self._pace_s.get(queued.label, 1.0) * sqrt(-queued.order[0])
        return -expected_s, queued.order[1], queued.label, queued.candidate

    def note(self, queued: Queued) -> None:
        """Learn from a compilation that has just ended."""
        started_at = queued.compilation.started_at
        if started_at is not None and queued.order[0] and (took_s := time.monotonic() - started_at) > _DISK_S:
            self._pace_s[queued.label] = took_s / sqrt(-queued.order[0])


@dataclass
class Work:
    """Compilations of one tuning on this rank, since they began."""

    stage_s: dict[str, float] = field(default_factory=dict)
    """CPU-seconds of each stage, over all threads; of ptxas, the stage "cubin", wall seconds."""
    busy_s: float = 0.0
    """Seconds in which threads were at work, over all threads."""
    wall_s: float = 0.0
    n_compiled: int = 0
    n_equal: int = 0
    """Kernels that took over the result of an equal one after TTGIR."""
    n_found: int = 0
    """Kernels found in Triton's disk cache."""
    n_failed: int = 0
    slowest: Compilation | None = None
    slowest_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def add(self, compilation: Compilation, busy_s: float, stage_s: Mapping[str, float]) -> None:
        """Count a compilation that has ended."""
        self.busy_s += busy_s
        for name, seconds in stage_s.items():
            self.stage_s[name] = self.stage_s.get(name, 0.0) + seconds
        if isinstance(compilation.result, Failure):
            self.n_failed += 1
        elif not stage_s:
            self.n_found += 1
        elif "ttgir" in stage_s and "llir" not in stage_s:
            self.n_equal += 1
        else:
            self.n_compiled += 1
        if busy_s > self.slowest_s:
            self.slowest, self.slowest_s = compilation, busy_s


class Compiler:
    """The compilations of one tuning, by label of the site, and the threads that run them."""

    def __init__(self, n_threads: int, stuck_after_s: float) -> None:
        self.n_threads = n_threads
        self.ended: deque[CompiledCandidate] = deque()
        """Compilations that have ended; the reader takes them out."""
        self._stuck_after_s = stuck_after_s
        self._sites: dict[str, list[Candidate]] = {}
        self._by_key: dict[str, Compilation] = {}
        self._orders: dict[str, list[tuple[float, int]]] = {}
        """Site -> sort keys of its candidates."""
        self._pace = Pace()
        self._queue: list[Queued] = []
        self._threads: dict[threading.Thread, Queued | None] = {}
        """Each with the compilation that it runs."""
        self._workers: dict[threading.Thread, int] = {}  # each with its number, the lowest that was free
        self._lock = threading.Lock()
        """Guards the queue and the threads."""
        self._front_end = FrontEnd()
        self._processes = Workers()
        self._work: Work | None = None
        """Since the last ``take_work``; None before the first compilation."""
        self._shared_limit_bytes: int | None = None
        self._patches = ExitStack()
        self._use = ExitStack()
        """Of files, until the end of the tuning."""
        self._is_open = self._uses_processes = False

    def begin(
        self, label: str, launch: Compilable, configs: list[triton.Config], first: Collection[int], awaited: int | None = None
    ) -> None:
        """Add a site, and queue the candidates of ``first``; the ``awaited`` one, which a launch needs, starts before all others."""
        self._open()
        self._orders[label] = [order(config) for config in configs]
        early = {} if awaited is None else {awaited: self._candidate(launch, configs[awaited])}
        for i, candidate in early.items():
            self._start_now(self._queued(label, i, candidate.compilation))
        self._sites[label] = [early.get(i) or self._candidate(launch, config) for i, config in enumerate(configs)]
        self.queue(label, first)

    def rename(self, labels: Mapping[str, str]) -> None:
        """Give sites other labels: old -> new."""
        self._sites.update({labels[old]: self._sites.pop(old) for old in [*self._sites] if old in labels})
        self._orders.update({labels[old]: self._orders.pop(old) for old in [*self._orders] if old in labels})

    def keys(self, label: str) -> str:
        """The site's compile keys in a row, as ranks compare them."""
        return "".join(each.compilation.key[:KEY_CHARS].ljust(KEY_CHARS) for each in self._sites[label])

    def queue(self, label: str, candidates: Collection[int]) -> None:
        """Compile these in the threads, the longest of all sites first, so that a long one does not run alone at the end."""
        if candidates:
            self._open()  # also for a later wave of a guided search
        wanted = [self._queued(label, i, self._sites[label][i].compilation) for i in sorted(candidates)]
        with self._lock:
            self._queue.extend(each for each in wanted if each.compilation.is_queued and not self._is_taken(each.compilation))
        self._start_threads()

    def dequeue(self, label: str) -> None:
        """Compile no more of a site for now, but go on with what has begun."""
        with self._lock:
            self._queue = [each for each in self._queue if all(each.compilation is not mine.compilation for mine in self._sites[label])]

    def adopt(self, label: str, candidate: int, launch: Compilable, config: triton.Config) -> bool:
        """Put the loaded candidate into the memory of a kernel object made anew; False if that object is another kernel."""
        known, made_anew = self._sites[label][candidate].compilation, Candidate(launch, config)
        if not known.done.is_set() or made_anew.compilation.key != known.key:
            return False
        made_anew.compilation = known
        return not isinstance(made_anew.load(), Failure)

    def load(self, label: str, candidate: int, *, is_early: bool = False) -> Resources | Failure | None:
        """Load the candidate onto the device without a launch, compiling it at once if need be. None under the interpreter.

        ``is_early``: others are still compiled; None where the machine has failed, which may load it after them.
        """
        compilation = self._sites[label][candidate].compilation
        self._start_now(self._queued(label, candidate, compilation))
        # This rank posts nothing meanwhile: a stuck compilation must fail before the other ranks take this one for lost.
        for _ in self._wait([compilation], 2 / 3 * self._stuck_after_s):
            pass
        compilation.run_again(self._shared_limit_bytes)
        return self._sites[label][candidate].load(is_early=is_early)

    def wait(self, label: str, candidates: Collection[int]) -> Iterator[int]:
        """Wait until these are compiled; yields the number that are not, several times a second."""
        return self._wait([self._sites[label][i].compilation for i in candidates], self._stuck_after_s)

    def retry(self, label: str, candidates: Collection[int]) -> None:
        """Compile those of these that the machine has failed once more, each alone."""
        for compilation in [self._sites[label][i].compilation for i in candidates]:
            compilation.run_again(self._shared_limit_bytes)

    def pending(self, label: str) -> set[int]:
        """Candidates that are not compiled yet."""
        return {i for i, each in enumerate(self._sites[label]) if not each.compilation.done.is_set()}

    def ready(self, label: str) -> set[int]:
        """Candidates that are compiled and not loaded yet."""
        return {i for i, each in enumerate(self._sites[label]) if each.is_ready}

    def on_disk(self, label: str, candidates: Collection[int]) -> set[int]:
        """Those of them that another process has compiled into Triton's cache folder by now."""
        return {i for i in candidates if (each := self._sites[label][i].compilation).is_queued and is_cached(each.key)}

    def known_need(self, label: str, candidate: int) -> int | None:
        """Bytes of shared memory that a candidate needs, if that was too much for some device."""
        return known_need(self._sites[label][candidate].compilation.key)

    def kernels(self, label: str) -> list[str]:
        """What each candidate came to: equal digests are of equal kernels, empty ones of what failed or is not compiled yet."""
        return [each.kernel() if each.compilation.done.is_set() else "" for each in self._sites[label]]

    def take_work(self) -> Work | None:
        """The work of the threads since the last time; None if they have compiled nothing."""
        work, self._work = self._work, None
        if work is None or not work.n_compiled + work.n_equal + work.n_found + work.n_failed:
            return None
        work.wall_s = time.monotonic() - work.began
        return work

    def place(self, wanted: Compilation) -> tuple[str, int] | None:
        """The first site and candidate with this compilation."""
        sites = self._sites.items()
        return next(((label, i) for label, every in sites for i, each in enumerate(every) if each.compilation is wanted), None)

    def failures(self, label: str) -> dict[int, Failure]:
        """Candidates that failed to compile so far."""
        return {i: result for i, each in enumerate(self._sites[label]) if isinstance(result := each.compilation.result, Failure)}

    def close(self) -> None:
        """Give the terminal and Triton back, and let the threads end, each after the compilation that it runs."""
        with self._lock:
            self._queue.clear()
        self._is_open = False
        self._patches.close()

    def end(self) -> None:
        """Close, at the end of the tuning: processes without work end, and others after it."""
        self.close()
        self._processes.end()
        self._use.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads, but not for those with a compilation that was given up."""
        end = time.monotonic() + timeout_s
        for thread, queued in list(self._threads.items()):
            if queued is None or not queued.compilation.is_given_up:
                thread.join(max(0.0, end - time.monotonic()))

    def _open(self) -> None:
        """Prepare Triton and this process, unless they are."""
        if self._is_open:
            return
        _open.add(self)
        self._work = self._work or Work()
        if not is_interpreted():
            begin_digest()  # beside the start of the driver
            self._use.enter_context(leftovers.in_use())
            self._patches.enter_context(writable_folder())
            self._uses_processes = self.n_threads >= MIN_THREADS_FOR_PROCESSES and is_possible()
            await_digest()
            self._patches.enter_context(patched())
            self._patches.enter_context(quiet_terminal.redirected())
        self._is_open = True

    def _candidate(self, launch: Compilable, config: triton.Config) -> Candidate:
        candidate = Candidate(launch, config)
        if candidate.compilation.key and not candidate.compilation.done.is_set():
            candidate.compilation = self._by_key.setdefault(candidate.compilation.key, candidate.compilation)
            if self._shared_limit_bytes is None:
                with suppress(RuntimeError, KeyError, AttributeError):  # a backend without that number
                    self._shared_limit_bytes = max_shared_mem(triton.runtime.driver.active.get_current_device())
        return candidate

    def _wait(self, compilations: list[Compilation], stuck_after_s: float) -> Iterator[int]:
        while pending := [each for each in compilations if not each.done.is_set()]:
            now = time.monotonic()
            for each in pending:
                if each.started_at is not None and now - each.started_at > stuck_after_s:
                    each.give_up(f"TimeoutError: has been compiling for {stuck_after_s:g} s; DIST_TUNE_DEADLINE_S sets the limit")
            self._start_threads()
            yield len(pending)
            pending[0].done.wait(0.05)

    def _queued(self, label: str, candidate: int, compilation: Compilation) -> Queued:
        return Queued(compilation, label, self._orders[label][candidate], candidate)

    def _is_taken(self, compilation: Compilation) -> bool:
        return any(running is not None and running.compilation is compilation for running in self._threads.values())

    def _start_now(self, queued: Queued) -> None:
        """Give a compilation that a launch waits for a thread beyond ``n_threads``, because other ranks may wait for that launch."""
        with self._lock:
            if queued.compilation.is_queued and not self._is_taken(queued.compilation):
                self._start_thread(queued)

    def _start_threads(self) -> None:
        """Start threads for the queue, also in place of stuck ones."""
        with self._lock:
            for _ in range(min(self.n_threads - self._n_running(), len(self._queue))):
                self._start_thread(None)

    def _n_running(self) -> int:
        return sum(each is None or not (each.compilation.is_given_up or each.compilation.is_waiting) for each in self._threads.values())

    def _start_thread(self, queued: Queued | None) -> None:
        # A daemon, because a compilation that never ends must not keep the process from ending.
        thread = threading.Thread(target=self._run, args=[queued], name="dist_tune compiler", daemon=True)
        self._threads[thread] = queued
        self._workers[thread] = min({*range(len(self._workers) + 1)}.difference(self._workers.values()))
        try:
            thread.start()
        except RuntimeError:  # no more threads in this process
            del self._threads[thread], self._workers[thread]
            raise

    def _run(self, queued: Queued | None) -> None:
        """Run one compilation, then those of the queue."""
        thread, is_urgent = threading.current_thread(), queued is not None
        try:
            while True:
                if queued is not None:
                    self._compile(queued, thread, is_urgent=is_urgent)
                    is_urgent = False
                with self._lock:
                    self._threads[thread] = None  # it counts again if it was given up
                    if not self._queue or self._n_running() > self.n_threads:
                        del self._threads[thread]
                        return
                    self._threads[thread] = queued = min(self._queue, key=self._pace.turn)
                    self._queue.remove(queued)
        finally:
            with self._lock:
                self._threads.pop(thread, None)
                self._workers.pop(thread, None)

    def _compile(self, queued: Queued, thread: threading.Thread, *, is_urgent: bool) -> None:
        compilation, began = queued.compilation, time.time()
        # A process starts beside the front end.
        processes = self._processes.take() if self._uses_processes and not is_cached(compilation.key) else []
        job = Job(self._front_end, partial(self._compile_stages, compilation, processes), is_urgent=is_urgent)
        with job.under_way():
            has_run = compilation.run(self._shared_limit_bytes)
        for each in processes:
            self._processes.give(each)
        seconds = time.time() - began
        is_found = has_run and not job.seconds and not compilation.has_failed
        if has_run:
            self.ended.append(CompiledCandidate(queued.label, queued.candidate, time.time(), seconds, self._workers[thread], is_found))
        self._pace.note(queued)
        with self._lock:
            if has_run and self._work is not None:
                self._work.add(compilation, seconds, job.seconds)

    def _compile_stages(self, compilation: Compilation, processes: list[Worker], *kernel: Any) -> Made:
        """Run the stages of a kernel in a process, or in this one. A crash that does not come again costs nothing."""
        is_again = False
        request = *kernel, self._shared_limit_bytes, leftovers.temporary_folder()

        def on_wait() -> None:
            compilation.is_waiting = True  # this thread does not count as running
            self._start_threads()

        try:
            while processes:
                compilation.worker = processes[-1]
                try:
                    return processes[-1].ask(request, on_wait)
                except CannotStartError:
                    processes.clear()
                except CompilerCrashError:
                    if compilation.is_given_up or is_again:
                        raise
                    is_again = True
                    processes += self._processes.take()
            return compile_kernel(on_wait, *request)
        finally:
            compilation.is_waiting = False


_open: weakref.WeakSet[Compiler] = weakref.WeakSet()
"""Those whose threads may be at work."""


@atexit.register
def _end_all() -> None:
    # Python ends daemon threads when they ask for the interpreter's lock again; in a compiler's C++ that aborts the process.
    for compiler in list(_open):
        compiler.end()
        compiler.join(EXIT_WAIT_S)


def n_compile_threads(n_ranks_of_host: int) -> int:
    """This process's part of the cores that it may run on. Ranks of the job that take no part in the tuning count as well."""
    n_ranks = max(n_ranks_of_host, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, len(os.sched_getaffinity(0)) // n_ranks)
