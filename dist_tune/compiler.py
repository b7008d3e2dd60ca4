"""The compilations of one tuning, and the threads that run them.

Knows which candidates to compile and in which order, and nothing of how, nor of ranks. From the first miss on, threads compile beside
the replay that goes on.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import triton
from triton.compiler.compiler import max_shared_mem

from dist_tune.compile import Compilation, Failure, Resources
from dist_tune.launch import Launch
from dist_tune.shares import KEY_CHARS
from dist_tune.terminal import quiet_terminal


def host_of_cache() -> str:
    """This machine and Triton's cache folder on it: processes with the same answer share compiled kernels."""
    folder = Path(triton.knobs.cache.dir)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        return f"{socket.gethostname()} {status.st_dev}:{status.st_ino}"
    return f"{socket.gethostname()} process {os.getpid()}"


def n_compile_threads(n_ranks_of_host: int) -> int:
    """This process's part of the cores that it may run on."""
    return max(1, len(os.sched_getaffinity(0)) // n_ranks_of_host)


def _effort(config: triton.Config) -> float:
    """Roughly how long a config takes to compile, compared with others of its kernel: tiles per warp, then depth.

    Rank correlation 0.9 with the measured time over 216 configs of a GEMM (logs/compile-cpu).
    """
    effort: float = 1.0 / config.num_warps
    for value in config.kwargs.values():
        if isinstance(value, int) and value > 1:
            effort *= value
    return float(effort * (1 + config.num_stages / 100))


class Compiler:
    """The compilations of one tuning, and the threads that run them. Sites are told apart by their labels."""

    def __init__(self, n_threads: int, stuck_after_s: float) -> None:
        self.n_threads = n_threads
        self._stuck_after_s = stuck_after_s
        self._sites: dict[str, list[Compilation]] = {}
        self._by_key: dict[str, Compilation] = {}
        self._efforts: dict[str, list[float]] = {}
        self._waiting: deque[Compilation] = deque()
        self._condition = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._shared_limit_bytes: int | None = None
        self._is_open = False

    def begin(self, label: str, launch: Launch, configs: list[triton.Config], first: Collection[int]) -> None:
        """Take up a site, and begin with candidate 0 and those of ``first``."""
        if not self._is_open:
            quiet_terminal.enter()
            self._is_open = True
        self._sites[label] = [self._compilation(launch, config) for config in configs]
        self._efforts[label] = [_effort(config) for config in configs]
        if self._shared_limit_bytes is None and any(not each.done.is_set() for each in self._sites[label]):
            with suppress(RuntimeError, KeyError, AttributeError):  # a backend without that number
                self._shared_limit_bytes = max_shared_mem(triton.runtime.driver.active.get_current_device())
        with self._condition:
            # The launch that waits for us comes first.
            self._waiting.extend(each for each in self._sites[label][:1] if not each.done.is_set())
        self.queue(label, first)

    def keys(self, label: str) -> str:
        """The site's compile keys in a row, as ranks compare them."""
        return "".join(each.key[:KEY_CHARS].ljust(KEY_CHARS) for each in self._sites[label])

    def queue(self, label: str, candidates: Collection[int]) -> None:
        """Compile these in the threads, those that take longest first: the last to end shall not be the longest."""
        order = sorted(candidates, key=lambda i: (-self._efforts[label][i], i))
        with self._condition:
            self._waiting.extend(self._sites[label][i] for i in order if not self._sites[label][i].done.is_set())
            self._condition.notify_all()
            n_new = min(self.n_threads - len(self._threads), len(self._waiting))
        for _ in range(n_new):
            # Daemons: a compilation that never ends must not keep the process from ending.
            thread = threading.Thread(target=self._work, name="dist_tune compiler", daemon=True)
            self._threads.append(thread)
            thread.start()

    def load(self, label: str, candidate: int) -> Resources | Failure | None:
        """The candidate on the device, not launched; compiled next if it is not yet. None under the interpreter."""
        compilation = self._sites[label][candidate]
        if not compilation.done.is_set() and compilation.began is None:
            with self._condition:
                self._waiting.appendleft(compilation)
            self.queue(label, [])
        for _ in self._wait([compilation]):
            pass
        return compilation.load()

    def wait(self, label: str, candidates: Collection[int]) -> Iterator[int]:
        """Until these are compiled: yields how many are not, several times a second."""
        return self._wait([self._sites[label][i] for i in candidates])

    def known_need(self, label: str, candidate: int) -> int | None:
        """Bytes of shared memory that a candidate needs, where that was found to be too much."""
        return self._sites[label][candidate].known_need()

    def failures(self, label: str) -> dict[int, Failure]:
        """Candidates that did not compile so far."""
        return {i: each.outcome for i, each in enumerate(self._sites[label]) if isinstance(each.outcome, Failure)}

    def close(self) -> None:
        """Give the terminal back and let the threads end."""
        with self._condition:
            self._waiting.clear()
            is_open, self._is_open = self._is_open, False
            self._condition.notify_all()
        self._threads = []
        for compilations in self._sites.values():
            for each in compilations:
                each.abandon()
        if is_open:
            quiet_terminal.leave()

    def _compilation(self, launch: Launch, config: triton.Config) -> Compilation:
        compilation = Compilation(launch, config)
        other = self._by_key.setdefault(compilation.key, compilation)
        if compilation.key and other is not compilation and not compilation.done.is_set():
            compilation.follow(other)
        return compilation

    def _wait(self, compilations: list[Compilation]) -> Iterator[int]:
        while pending := [each for each in compilations if not each.done.is_set()]:
            now = time.monotonic()
            for each in pending:
                if each.began is not None and now - each.began > self._stuck_after_s:
                    each.give_up(f"TimeoutError: has been compiling for {self._stuck_after_s:g} s; DIST_TUNE_DEADLINE_S sets the limit")
            yield len(pending)
            pending[0].done.wait(0.05)

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and self._is_open:
                    self._condition.wait()
                if not self._is_open:
                    return
                compilation = self._waiting.popleft()
            compilation.run(self._shared_limit_bytes)
