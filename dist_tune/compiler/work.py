"""The work of compiling threads: seconds by stage, kernels by fate, the slowest of them.

Pure numbers, and nothing of how they are measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_tune.compiler.candidate import Compilation

FRONT_END = "front_end"
"""From Python to optimized TTIR."""
PTXAS = "ptxas"
"""A child process; its seconds are wall time."""
STAGES = (FRONT_END, "ttgir", "llir", "ptx", PTXAS)


@dataclass
class Work:
    """Compilations of one tuning on this rank, since they began."""

    stage_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """CPU-seconds of each stage, over all threads; of ptxas wall seconds."""
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
    """Seconds of the slowest one, without waiting for an equal one."""
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def n_kernels(self) -> int:
        """All of them."""
        return self.n_compiled + self.n_equal + self.n_found + self.n_failed

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of all stages, ptxas included."""
        return sum(self.stage_s.values())

    @property
    def n_at_work(self) -> float:
        """Threads at work on average."""
        return self.busy_s / self.wall_s if self.wall_s > 0 else 0.0

    def add(self, compilation: Compilation, busy_s: float, stage_s: Mapping[str, float], *, is_equal: bool) -> None:
        """Count a compilation that has ended. For any thread."""
        with self._lock:
            self.busy_s += busy_s
            for name, seconds in stage_s.items():
                self.stage_s[name] = self.stage_s.get(name, 0.0) + seconds
            if compilation.has_failed:
                self.n_failed += 1
            elif not stage_s:
                self.n_found += 1
            elif is_equal:
                self.n_equal += 1
            else:
                self.n_compiled += 1
            if busy_s > self.slowest_s:
                self.slowest, self.slowest_s = compilation, busy_s

    def ended(self) -> Work:
        """This, with the seconds from its beginning until now."""
        self.wall_s = time.monotonic() - self._began
        return self
