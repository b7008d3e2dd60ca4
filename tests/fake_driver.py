"""An H200 without a GPU: Triton compiles real sm_90 code, and a launch sleeps instead of running.

How long is a test's choice: ``FakeH200.launch_ms`` maps a launch to milliseconds, so that timings are what a test says.
Shared memory is checked by Triton itself against the H200's 232448 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": FakeH200.shared_limit_bytes, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return (1, 2, 64, 0, 1024)  # module, function, registers, spills, threads

    def unload_module(self, module: int) -> None:
        pass


class _Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self.src, self.metadata = src, metadata

    def __call__(self, *args: Any) -> None:
        FakeH200.launches.append(self.metadata.name)
        wait_s = FakeH200.launch_ms(self.src, self.metadata) / 1e3
        if wait_s:
            end = time.perf_counter() + wait_s
            time.sleep(max(0.0, wait_s - 2e-4))
            while time.perf_counter() < end:
                pass


class FakeH200:
    """The driver; its class attributes are what tests set and read."""

    launches: ClassVar[list[str]] = []
    shared_limit_bytes: ClassVar[int] = 232448
    launch_ms: ClassVar[Callable[[Any, Any], float]] = staticmethod(lambda src, metadata: 0.0)
    utils = _Utils()
    launcher_cls = _Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda


def install() -> None:
    """Make it Triton's driver."""
    driver.set_active(FakeH200())
