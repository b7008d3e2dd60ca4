"""The kind of GPU that torch was built for, and what differs between kinds: NVIDIA's by CUDA, AMD's
by HIP, Intel's by XPU.

Knows torch alone. AMD's GPUs are torch.cuda and "cuda", too. Nothing is measured on the last two
kinds: they take the plainest way.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, Literal

import torch

_found = torch.accelerator.current_accelerator()  # asks no driver
api: Any = torch.xpu if _found is not None and _found.type == "xpu" else torch.cuda
"""torch's functions for these GPUs.

Not ``torch.accelerator``, which has no timed events, random states or properties.
"""
_FLUSH_BYTES = 256 << 20
"""As in Triton's own benchmark, on all of its devices: an MI300X has as much cache behind the L2
that its properties name.
"""


def device_type() -> Literal["cuda", "xpu"]:
    """As in ``torch.device``."""
    return "xpu" if api is torch.xpu else "cuda"


def kind() -> Literal["cuda", "hip", "xpu"]:
    """As the backend of Triton's target; "cuda" without a GPU, too."""
    return "hip" if device_type() == "cuda" and torch.version.hip else device_type()


def runtime() -> str | None:
    """Version that torch was built with: "13.0" of CUDA, else with its name, as "hip 6.4.2" or "xpu
    20250101"; None of none.
    """
    return torch.version.cuda if kind() == "cuda" else f"{kind()} {getattr(torch.version, kind())}"


def name() -> str:
    """Of the current GPU.

    On HIP and XPU with its compute units, because a part of a GPU has the name of the whole one.
    """
    own: str = api.get_device_name()
    if kind() == "cuda":
        return own
    properties = api.get_device_properties(api.current_device())
    if kind() == "xpu":
        return f"{own}, {properties.max_compute_units} compute units"
    return (
        f"{own}, {properties.gcnArchName.partition(':')[0]}, {properties.multi_processor_count}"
        " compute units"
    )


def free_bytes(device: torch.device) -> float:
    """Memory of a GPU that is free, with what torch's allocator holds and does not use."""
    held: int = api.memory_reserved(device)
    try:
        free, _ = api.mem_get_info(device)
    except RuntimeError:
        if kind() != "xpu":
            raise
        # Some of Intel's do not say; other processes may have some of it.
        free = api.get_device_properties(device).total_memory - held
    return float(free + held - api.memory_allocated(device))


def flush_cache() -> None:
    """Queue writes of more than the caches of the current GPU hold."""
    n_bytes = (
        _FLUSH_BYTES
        if kind() != "cuda"
        else 2 * api.get_device_properties(api.current_device()).L2_cache_size
    )
    # Writing twice the L2 evicts the data that the last replay left there. Freed at once: the
    # replay may need the memory.
    with suppress(torch.OutOfMemoryError):
        torch.empty(n_bytes, dtype=torch.uint8, device=device_type()).zero_()


def allow_captures() -> None:
    """Let other threads capture CUDA graphs while this one asks for events: in CUDA's first mode
    that would end a capture.
    """
    if kind() == "cuda" and api.is_available():
        with suppress(OSError, AttributeError):
            relaxed = ctypes.c_int(2)
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def spin(ms: float) -> None:
    """Queue a kernel that keeps an NVIDIA GPU busy for some milliseconds; nothing on HIP, whose
    clocks differ, and XPU, which has none.
    """
    if kind() == "cuda":
        api._sleep(int(ms * 2e6))  # at least as long as asked on any clock up to 2 GHz
