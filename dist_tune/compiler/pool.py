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
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import triton
from triton.compiler.compiler import max_shared_mem

from dist_tune.compiler.candidate import Candidate, Compilable, Compilation, Failure, Resources
from dist_tune.compiler.partition import KEY_CHARS, order
from dist_tune.compiler.passes.front_end import FrontEndLock, one_front_end
from dist_tune.compiler.passes.stages import Stages, Work, watched_stages
from dist_tune.compiler.subprocesses import leftovers, processes
from dist_tune.compiler.subprocesses.output import quiet_terminal
from dist_tune.compiler.subprocesses.workers import workers
from dist_tune.compiler.triton_cache import await_digest, begin_digest, is_cached, known_need, writable_folder
from dist_tune.measure import is_interpreted

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


class Compiler:
    """The compilations of one tuning, by label of the site, and the threads that run them."""

    def __init__(self, n_threads: int, stuck_after_s: float) -> None:
        self.n_threads = n_threads
        self.ended: deque[tuple[str, dict[str, Any]]] = deque()
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
        self._jobs: dict[threading.Thread, processes.Job | None] = {}
        """Each with its latest place in another process."""
        self._workers: dict[threading.Thread, int] = {}  # each with its number, the lowest that was free
        self._lock = threading.Lock()
        """Guards the queue and the threads."""
        self._front_end = FrontEndLock()
        self._stages = Stages(self._start_threads)
        self._shared_limit_bytes: int | None = None
        self._patches = ExitStack()
        self._use = ExitStack()
        """Of processes, until the end of the tuning."""
        self._is_open = self._uses_processes = False
        self._is_background = False
        """True while a replay goes on, and its launches may wait for one compilation: the others leave that one the way."""

    def begin(
        self, label: str, launch: Compilable, configs: list[triton.Config], first: Collection[int], awaited: int | None = None
    ) -> None:
        """Add a site, and queue the candidates of ``first``; the ``awaited`` one, which a launch needs, starts before all others."""
        self._open(len(first))
        self._orders[label] = [order(config) for config in configs]
        early = {} if awaited is None else {awaited: self._candidate(launch, configs[awaited])}
        for i, candidate in early.items():
            self._is_background = True
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
            self._open(len(candidates))  # also for a later wave of a guided search
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
        self._is_background = False  # no replay goes on, so all processes take what the machine has
        for job in [*self._jobs.values()]:
            if job is not None:
                job.hurry()
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
        return self._stages.take_work()

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
        self._use.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads, but not for those with a compilation that was given up."""
        end = time.monotonic() + timeout_s
        for thread, queued in list(self._threads.items()):
            if queued is None or not queued.compilation.is_given_up:
                thread.join(max(0.0, end - time.monotonic()))

    def _open(self, n_soon: int) -> None:
        """Prepare Triton and this process, unless they are; ``n_soon``: compilations that are about to begin."""
        if self._is_open:
            return
        _open.add(self)
        self._stages.begin()
        self._patches.callback(self._front_end.close)
        self._patches.callback(self._stages.close)
        n_workers = 1 + min(self.n_threads, n_soon) if self.n_threads >= MIN_THREADS_FOR_PROCESSES else 0
        self._uses_processes = prepare(n_workers, self._patches, self._use)
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
                    with self._lock:
                        stuck = [thread for thread, running in self._threads.items() if running and running.compilation is each]
                    for thread in stuck:
                        self._front_end.release(thread.ident)
                    each.give_up(f"TimeoutError: has been compiling for {stuck_after_s:g} s; DIST_TUNE_DEADLINE_S sets the limit")
                    for thread in stuck:
                        if (job := self._jobs.get(thread)) is not None:
                            job.end()
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
                    if is_urgent:
                        self._front_end.acquire(is_urgent=True)
                    place = partial(processes.in_process, is_urgent=is_urgent or not self._is_background)
                    with place() if self._uses_processes else nullcontext() as self._jobs[thread]:
                        began = time.time()
                        is_cached = self._stages.run(queued.compilation, self._shared_limit_bytes)
                        facts = {"seconds": time.time() - began, "worker": self._workers[thread], "is_cached": is_cached}
                        self.ended.append((queued.label, {"candidate": queued.candidate, "at": time.time(), **facts}))
                    self._pace.note(queued)
                    is_urgent = False
                    self._front_end.release()  # if it did not come as far as the front end
                    self._threads[thread] = None  # it counts again if it was given up
                # Before the next one is taken from the queue: the longest are to leave the front end first.
                self._front_end.acquire()
                with self._lock:
                    if not self._queue or self._n_running() > self.n_threads:
                        del self._threads[thread]
                        return
                    self._threads[thread] = queued = min(self._queue, key=self._pace.turn)
                    self._queue.remove(queued)
        finally:
            self._front_end.release()
            with self._lock:
                self._threads.pop(thread, None)
                self._workers.pop(thread, None)
                self._jobs.pop(thread, None)


_open: weakref.WeakSet[Compiler] = weakref.WeakSet()
"""Those whose threads may be at work."""


def prepare(n_workers: int, patches: ExitStack, use: ExitStack) -> bool:
    """Put all in place until ``patches`` is closed, processes and their files until ``use`` is; True if there are such processes.

    ``n_workers``: processes to start; 0 where the compilation stays in this one.
    """
    if is_interpreted():
        return False
    begin_digest()  # beside the start of the driver
    use.enter_context(leftovers.in_use())
    patches.enter_context(writable_folder())
    uses_processes = n_workers > 0 and processes.is_possible()
    if uses_processes:
        use.enter_context(workers.in_use())
        patches.enter_context(processes.other_processes())
        workers.start(n_workers)
    await_digest()
    for part in (one_front_end, watched_stages, quiet_terminal.redirected):
        patches.enter_context(part())
    return uses_processes


@atexit.register
def _end_all() -> None:
    # Python ends daemon threads when they ask for the interpreter's lock again; in a compiler's C++ that aborts the process.
    for compiler in list(_open):
        compiler.end()
        compiler.join(EXIT_WAIT_S)


def n_compile_threads(n_ranks_of_host: int) -> int:
    """This process's part of the cores that it may run on."""
    return max(1, len(os.sched_getaffinity(0)) // n_ranks_of_host)
