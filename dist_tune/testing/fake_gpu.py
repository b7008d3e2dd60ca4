"""A GPU that is not there: kernels are compiled for it, launches take the time that a test says, by
a clock that a test may keep.
"""

from __future__ import annotations

import importlib
import math
import operator
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dist_tune.measure import Clock


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        limits = {"max_shared_mem": FakeH200.shared_limit_bytes, "max_num_regs": 65536}
        return {**limits, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        return (1, 2, 64, 0, 1024)  # module, function, registers, spills, threads

    def unload_module(self, module: int) -> None:
        pass


class ExactTime:
    """Clock of this process's spans, on the CPU, that moves only where a test says: times do not
    depend on how busy the machine is.
    """

    is_kept: ClassVar[bool] = False
    program_ms: ClassVar[float] = 0.1
    """Milliseconds of each program of an interpreted launch."""
    seconds: ClassVar[float] = 0.0

    @classmethod
    def keep(cls) -> None:
        """From here on, until the process ends.

        Launches of ``FakeH200`` take their ``launch_ms``, interpreted ones ``program_ms`` a
        program, a sleep of the main thread what it was asked for, and nothing else takes any time.
        """
        if cls.is_kept:
            return
        cls.is_kept = True
        Clock.now = cls.now
        builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
        set_grid, sleep = builder.set_grid_dim, time.sleep

        def set_grid_in_time(self: Any, *grid: int) -> None:  # called once a launch
            set_grid(self, *grid)
            # A grid made of the launch's own arguments has Triton's tensors in it.
            cls.pass_ms(cls.program_ms * math.prod(map(operator.index, grid)))

        def sleep_in_time(seconds: Any) -> None:
            sleep(seconds)
            if threading.current_thread() is threading.main_thread():
                cls.seconds += seconds

        builder.set_grid_dim, time.sleep = set_grid_in_time, sleep_in_time

    @classmethod
    def now(cls) -> float:
        """Seconds. A reading takes a microsecond: a time of zero would be no time."""
        cls.seconds += 1e-6
        return cls.seconds

    @classmethod
    def pass_ms(cls, ms: float) -> None:
        """Let milliseconds pass, without waiting."""
        cls.seconds += ms / 1e3


class _Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self.src, self.metadata = src, metadata

    def __call__(self, *args: Any) -> None:
        FakeH200.launches.append(self.metadata.name)
        wait_s = FakeH200.launch_ms(self.src, self.metadata) / 1e3
        if ExactTime.is_kept:
            ExactTime.pass_ms(wait_s * 1e3)
        elif wait_s:
            end = time.perf_counter() + wait_s
            time.sleep(max(0.0, wait_s - 2e-4))
            while time.perf_counter() < end:
                pass


class FakeH200:
    """A driver for Triton: kernels compile to real sm_90 code, a launch sleeps instead of running.

    Tests read and set its attributes.
    """

    launches: ClassVar[list[str]] = []
    """Names of the kernels launched so far."""
    shared_limit_bytes: ClassVar[int] = 232448
    """Shared memory of a block, which Triton itself checks; the H200's at first."""
    launch_ms: ClassVar[Callable[[Any, Any], float]] = staticmethod(lambda src, metadata: 0.0)
    """Milliseconds that the launch of a compiled kernel takes."""
    utils = _Utils()
    launcher_cls = _Launcher

    def get_current_target(self) -> GPUTarget:
        """Compute capability 9.0, warps of 32."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The default one."""
        return 0

    def get_device_interface(self) -> Any:
        """For synchronisation and events."""
        return torch.cuda


def install_fake_driver() -> None:
    """Make ``FakeH200`` Triton's driver in this process, whose ``TRITON_INTERPRET`` must not be 1.

    New tensors are filled, because its kernels write nothing: a step that returns them shall return
    the same each time.
    """
    # use_deterministic_algorithms imports torch._inductor: a CPU-second in each rank.
    torch.set_deterministic_debug_mode("warn")
    driver.set_active(FakeH200())
