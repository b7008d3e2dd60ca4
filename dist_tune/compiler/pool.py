"""The compilations of one tuning, and the threads that run them beside the replay that goes on.

Knows which candidates to compile and in which order; nothing of how. Ranks of a host share the work
without asking each other: each begins with another part of the candidates, passes over a kernel
that another process compiles, and comes back to it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import prod, sqrt
from typing import Any

import triton
from triton.compiler.compiler import max_shared_mem

from dist_tune.compiler.candidate import Candidate, Compilable, Resources
from dist_tune.compiler.compilation import Compilation, Failure, Toolchain, Turn, patched
from dist_tune.compiler.patches import SharedContext
from dist_tune.compiler.processes import folder_in_use, is_possible
from dist_tune.compiler.triton_cache import await_digest, begin_digest, writable_folder
from dist_tune.measure import is_interpreted
from dist_tune.ranks import run_in_thread

EXIT_WAIT_S = 10.0
"""Longest wait for compiling threads at the end of the process."""
_LOOK_S = 0.01
"""Between two looks at a kernel that another process compiles."""


def compile_cost(config: triton.Config) -> float:
    """Estimated time to compile, relative to other configs of the kernel: the product of its two
    largest block sizes, per warp.

    Rank correlation 0.9 with the measured time over 216 configs of a GEMM (logs/compile-cpu).
    """
    return float(prod(_blocks(config)[:2]) / config.num_warps)


def quickest(configs: Sequence[triton.Config]) -> list[int]:
    """Candidates from the quickest to compile to the slowest, by estimate; the same on all
    ranks.
    """
    return sorted(
        range(len(configs)),
        key=lambda i: (
            compile_cost(configs[i]),
            prod(_blocks(configs[i])),
            configs[i].num_stages,
            i,
        ),
    )


def turns(configs: Sequence[triton.Config], position: int, n_ranks: int) -> list[Turn]:
    """The turn of each candidate on the rank at ``position`` of the ``n_ranks`` of its host: first
    its own part of them.

    Then the longest; of equals the smallest tiles, because configs that exceed shared memory end
    early. Candidates that differ in warps and stages alone are in one part, because Triton's front
    end makes the same TTIR of them; if there are few such parts, those that differ in stages alone,
    which may come to the same kernel.
    """
    costs = [
        (-compile_cost(config), prod(_blocks(config)) * config.num_stages) for config in configs
    ]
    groups = [repr({**config.all_kwargs(), "num_stages": None}) for config in configs]
    together = [str(config.kwargs) for config in configs]
    if len(set(together)) < 2 * n_ranks:
        together = groups
    parts: dict[str, int] = {}
    for i in sorted(range(len(configs)), key=costs.__getitem__):
        parts.setdefault(together[i], len(parts))
    return [Turn((parts[together[i]] - position) % n_ranks, *costs[i]) for i in range(len(configs))]


def _blocks(config: triton.Config) -> list[int]:
    return sorted(
        (value for value in config.kwargs.values() if type(value) is int and value > 1),
        reverse=True,
    )


@contextmanager
def _prepared() -> Iterator[None]:
    with writable_folder(), patched():
        yield


prepared = SharedContext(_prepared)
"""Entered by each tuning while it compiles."""


class Compiler:
    """The compilations of one tuning, by label of the site, and the threads that run them."""

    def __init__(
        self, n_threads: int, stuck_after_s: float, position: int = 0, n_ranks: int = 1
    ) -> None:
        self.n_threads = n_threads
        self.n_ranks = n_ranks
        """Ranks of this host, which share the work."""
        self.n_ended = 0
        """Compilations that have ended so far."""
        self._position = position
        self._stuck_after_s = stuck_after_s
        self._sites: dict[str, dict[int, Candidate]] = {}
        self._by_key: dict[str, Compilation] = {}
        self._pace_s: dict[str, float] = {}
        """Site -> seconds of its latest compilation, per root of its estimated cost."""
        self._queue: list[Compilation] = []
        self._threads: dict[int, tuple[threading.Thread, Compilation | None]] = {}
        """Number, the lowest that was free -> the thread, and what it runs."""
        self._lock = threading.Lock()
        """Guards the queue and the threads."""
        self._tools = Toolchain(on_wait=self._start_threads)
        self._work: Counter[str] = Counter()
        self._patches = ExitStack()
        self._folder = ExitStack()
        self._is_open = self._is_held = False

    def begin(
        self,
        label: str,
        launch: Compilable,
        configs: Mapping[int, triton.Config],
        first: Collection[int],
        awaited: int | None = None,
    ) -> None:
        """Add a site, and queue the candidates of ``first``; the ``awaited`` one, which a launch
        needs, starts before all others.
        """
        self._open()
        found, order = (
            dict[int, Candidate](),
            dict(
                zip(configs, turns([*configs.values()], self._position, self.n_ranks), strict=True)
            ),
        )
        for i in sorted(configs, key=lambda i: i != awaited):
            found[i] = Candidate(launch, configs[i])
            compilation = found[i].compilation
            if compilation.key and not compilation.done.is_set():
                compilation.label, compilation.candidate, compilation.turn = label, i, order[i]
                found[i].compilation = self._by_key.setdefault(compilation.key, compilation)
                if self._tools.shared_limit_bytes is None:
                    # A backend without that number.
                    with suppress(RuntimeError, KeyError, AttributeError):
                        self._tools.shared_limit_bytes = max_shared_mem(
                            triton.runtime.driver.active.get_current_device()
                        )
            if i == awaited:
                self._start_now(found[i].compilation)
        self._sites[label] = {i: found[i] for i in configs}
        self.queue(label, first)

    def keep(self, label: str, kept: Sequence[int]) -> None:
        """Keep these candidates of a site, which are counted anew in this order."""
        before = self._sites[label]
        self._sites[label] = {i: before[old] for i, old in enumerate(kept)}
        wanted = [each.compilation for site in self._sites.values() for each in site.values()]
        with self._lock:
            self._queue = [each for each in self._queue if each in wanted]

    def postpone(self) -> None:
        """Begin nothing that is not asked for again."""
        with self._lock:
            self._queue.clear()

    def keys(self, label: str) -> str:
        """The site's candidates with their keys in Triton's disk cache, in a row."""
        return " ".join(f"{i}={each.compilation.key}" for i, each in self._sites[label].items())

    def queue(self, label: str, candidates: Collection[int]) -> None:
        """Compile these in the threads, the longest of all sites first, so that a long one does not
        run alone at the end.
        """
        if candidates:
            self._open()  # also for a later wave of a guided search
        wanted = [self._sites[label][i].compilation for i in sorted(candidates)]
        with self._lock:
            self._queue.extend(
                each for each in wanted if each.is_queued and each not in self._queue
            )
        self._start_threads()

    def known_as(
        self, labels: Sequence[str], candidate: int, launch: Compilable, config: triton.Config
    ) -> str | None:
        """Which of these sites the launch's kernel is compiled for, if any; its candidate, if
        loaded, is put into that kernel's memory.
        """
        made = Candidate(launch, config)
        known = {self._sites[label][candidate].compilation.key: label for label in reversed(labels)}
        label = known.get(made.compilation.key)
        if label is not None and self._sites[label][candidate].is_loaded:
            made.compilation = self._sites[label][candidate].compilation
            made.load()
        return label

    def load(self, label: str, candidate: int) -> Resources | Failure | None:
        """Load the candidate onto the device without a launch, compiling it at once if need be.

        None under the interpreter.
        """
        compilation = self._sites[label][candidate].compilation
        self._start_now(compilation)
        # This rank posts nothing meanwhile: a stuck compilation must fail before the other ranks
        # take this one for lost.
        for _ in self._wait([compilation], 2 / 3 * self._stuck_after_s):
            pass
        return self._sites[label][candidate].load()

    def wait(self, label: str, candidates: Collection[int]) -> Iterator[int]:
        """Wait until these are compiled; yields the number that are not, several times a second."""
        return self._wait(
            [self._sites[label][i].compilation for i in candidates], self._stuck_after_s
        )

    def pending(self, label: str) -> set[int]:
        """Candidates that are not compiled yet."""
        return {i for i, each in self._sites[label].items() if not each.compilation.done.is_set()}

    def ready(self, label: str) -> set[int]:
        """Candidates that are compiled and not loaded yet."""
        return {i for i, each in self._sites[label].items() if each.is_ready}

    def kernels(self, label: str) -> list[str]:
        """What each candidate came to: equal digests are of equal kernels, empty ones of what
        failed or is not compiled yet.
        """
        return [
            each.kernel() if each.compilation.done.is_set() else ""
            for each in self._sites[label].values()
        ]

    def failures(self, label: str) -> dict[int, Failure]:
        """Candidates that failed to compile so far."""
        return {
            i: result
            for i, each in self._sites[label].items()
            if isinstance(result := each.compilation.result, Failure)
        }

    def take_work(self) -> Counter[str]:
        """Kernels by their fate, and CPU-seconds by stage, since the last time."""
        with self._lock:
            work, self._work = self._work, Counter()
        return work

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Begin no compilation meanwhile, and stop those under way until the function is called
        that this gives.

        Others may wait for these: launches of other tunings, other ranks, other jobs.
        """
        self._is_held = True
        self._tools.hold()
        try:
            yield self._tools.go_on
        finally:
            self._is_held = False
            self._tools.go_on()
            self._start_threads()

    def close(self) -> None:
        """Give the terminal and Triton back, and let the threads end, each after the compilation
        that it runs.
        """
        with self._lock:
            self._queue.clear()
            self._is_open = False
        self._patches.close()

    def end(self) -> None:
        """Close, at the end of the tuning: processes without work end, and others after it."""
        self.close()
        self._tools.end()
        self._folder.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads, but not for those with a compilation that was given up."""
        end = time.monotonic() + timeout_s
        for thread, running in list(self._threads.values()):
            if running is None or not running.is_given_up:
                thread.join(max(0.0, end - time.monotonic()))

    def _open(self) -> None:
        """Prepare Triton and this process, unless they are."""
        if self._is_open:
            return
        _open.add(self)
        if not is_interpreted():
            begin_digest()  # beside the start of the driver
            self._folder.enter_context(folder_in_use())
            self._tools.uses_processes = is_possible()
            await_digest()
            self._patches.enter_context(prepared())
        self._is_open = True

    def _wait(self, compilations: list[Compilation], stuck_after_s: float) -> Iterator[int]:
        while pending := [
            compilation for compilation in compilations if not compilation.done.is_set()
        ]:
            now = time.monotonic()
            for each in pending:
                if now - (each.started_at or each.held_since or now) > stuck_after_s:
                    each.give_up(
                        f"TimeoutError: has been compiling for {stuck_after_s:g} s;"
                        " DIST_TUNE_DEADLINE_S sets the limit"
                    )
            self._start_threads()
            yield len(pending)
            pending[0].done.wait(0.05)

    # -- threads -----------------------------------------------------------------------------------

    def _start_now(self, compilation: Compilation) -> None:
        """Give a compilation that a launch waits for a thread beyond ``n_threads``, because other
        ranks may wait for that launch.
        """
        self._tools.go_on()
        with self._lock:
            if compilation.is_queued and all(
                running is not compilation for _, running in self._threads.values()
            ):
                self._start_thread(compilation)

    def _start_threads(self) -> None:
        """Start threads for the queue, also in place of stuck ones."""
        with self._lock:
            for _ in range(
                0 if self._is_held else min(self.n_threads - self._n_running(), len(self._queue))
            ):
                self._start_thread(None)

    def _n_running(self) -> int:
        return sum(
            each is None or not (each.is_given_up or each.is_waiting)
            for _, each in self._threads.values()
        )

    def _start_thread(self, compilation: Compilation | None) -> None:
        number = min({*range(len(self._threads) + 1)}.difference(self._threads))
        # A daemon, because a compilation that never ends must not keep the process from ending.
        # It touches _threads under the lock that the caller holds.
        thread = run_in_thread(partial(self._run, number, compilation), "compiler")
        self._threads[number] = thread, compilation

    def _run(self, number: int, urgent: Compilation | None) -> None:
        """Run one compilation, then those of the queue."""
        thread = threading.current_thread()
        try:
            # Another process may compile it; it is read from disk afterwards.
            while (
                urgent is not None
                and not self._compile(urgent, number, is_urgent=True)
                and urgent.is_queued
            ):
                time.sleep(_LOOK_S)
            while True:
                with self._lock:
                    self._threads[number] = thread, None  # it counts again if it was given up
                    if not self._queue or self._is_held or self._n_running() > self.n_threads:
                        del self._threads[number]
                        return
                    each = min(self._queue, key=self._turn)
                    self._queue.remove(each)
                    self._threads[number] = thread, each
                if not self._compile(each, number) and each.is_queued:
                    time.sleep(_LOOK_S if each.n_held > 1 else 0.0)
                    with self._lock:
                        self._queue += [each] if self._is_open else []
        finally:
            with self._lock:
                if self._threads.get(number, (None, None))[0] is thread:
                    del self._threads[number]

    def _turn(self, each: Compilation) -> tuple[int, int, float, int, str, int]:
        """Sort key: what another process compiles last; this rank's part; the longest first, by
        what the site's latest one took.
        """
        part, cost, tiles = each.turn
        return (
            each.n_held,
            part,
            -self._pace_s.get(each.label, 1.0) * sqrt(-cost),
            tiles,
            each.label,
            each.candidate,
        )

    def _compile(self, compilation: Compilation, number: int, *, is_urgent: bool = False) -> bool:
        """Run a compilation on the thread of this number; false if another thread or process
        does.
        """
        began = time.monotonic()

        def note(result: Any) -> None:
            seconds, stages, cost = (
                time.monotonic() - began,
                compilation.seconds,
                compilation.turn.cost,
            )
            is_equal = "ttgir" in stages and "llir" not in stages
            fate = "equal" if is_equal else "compiled" if stages else "on_disk"
            with self._lock:
                self._work.update({**stages, "failed" if isinstance(result, Failure) else fate: 1})
                if cost and fate == "compiled":
                    self._pace_s[compilation.label] = seconds / sqrt(-cost)
            self.n_ended += 1

        return compilation.run(self._tools, note, is_urgent=is_urgent)


_open: weakref.WeakSet[Compiler] = weakref.WeakSet()
"""Those whose threads may be at work."""


@atexit.register
def _end_all() -> None:
    # Python ends daemon threads when they ask for the interpreter's lock again; in a compiler's C++
    # that aborts the process.
    for compiler in list(_open):
        compiler.end()
        compiler.join(EXIT_WAIT_S)


def n_compile_threads(n_ranks_of_host: int) -> int:
    """This process's part of the cores that it may run on."""
    return max(1, len(os.sched_getaffinity(0)) // n_ranks_of_host)
