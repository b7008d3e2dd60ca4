"""What this machine is: versions, GPUs, and the links between them.

Facts only, nothing is judged: see doctor.py. What nvidia-smi knows better than torch is asked of it where it is installed, and left
out where it is not.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

_SMI_FIELDS = ("index", "uuid", "driver_version", "memory.used", "utilization.gpu")
_SMI_TIMEOUT_S = 20.0
"""A broken driver can make nvidia-smi hang."""


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """One GPU of the machine as nvidia-smi sees it, also where CUDA_VISIBLE_DEVICES hides it."""

    index: int
    uuid: str
    driver: str
    used_mib: int | None
    """Memory in use by all processes."""
    busy_percent: int | None
    """Of the last sampling period, in which a kernel ran."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that this process sees."""

    index: int
    name: str
    capability: str
    memory_bytes: int
    n_multiprocessors: int
    l2_bytes: int
    used_mib: int | None = None
    """Memory in use by all processes, before this one touched the GPU; None where nvidia-smi does not say."""
    busy_percent: int | None = None
    smi_index: int | None = None
    """Its number in nvidia-smi."""


def versions(smi: list[SmiGpu]) -> dict[str, str | None]:
    """What is installed, by name; None for what is not there."""
    return {
        "dist_tune": _package("dist-tune"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _package("triton"),
        "numpy": _package("numpy"),
        "cuda": torch.version.cuda,
        "driver": _driver(smi),
        "nccl": _nccl(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def smi_gpus() -> list[SmiGpu]:
    """All GPUs of the machine, in nvidia-smi's order. Asked before torch touches one, or this process counts among its users."""
    found = []
    for line in _smi(f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits").splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_SMI_FIELDS) and values[0].isdigit():
            index, uuid, driver, used, busy = values
            found.append(SmiGpu(int(index), uuid, driver, _number(used), _number(busy)))
    return found


def gpus(smi: list[SmiGpu]) -> list[Gpu]:
    """The GPUs that this process sees; none without CUDA."""
    by_uuid = {each.uuid.removeprefix("GPU-"): each for each in smi}
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts: Any = torch.cuda.get_device_properties(index)
        known = by_uuid.get(str(getattr(facts, "uuid", "")).removeprefix("GPU-"))
        found.append(
            Gpu(
                index=index,
                name=facts.name,
                capability=f"{facts.major}.{facts.minor}",
                memory_bytes=facts.total_memory,
                n_multiprocessors=facts.multi_processor_count,
                l2_bytes=facts.L2_cache_size,
                used_mib=known.used_mib if known else None,
                busy_percent=known.busy_percent if known else None,
                smi_index=known.index if known else None,
            )
        )
    return found


def links(found: list[Gpu]) -> list[list[str]]:
    """How each GPU reaches each other one, row to column: "NV18", "PIX", ... as nvidia-smi says, "peer" where it does not.

    "none" where a GPU cannot read the other's memory; the diagonal is empty.
    """
    topology = parse_topology(_smi("topo", "-m")) if len(found) > 1 else {}
    return [[_link(one, other, topology) for other in found] for one in found]


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """From the output of ``nvidia-smi topo -m``: (row, column) -> kind of link, by nvidia-smi's numbers."""
    rows = []
    for line in text.splitlines():
        words = line.split()
        # The heading begins with a name, too, underlined or not, but its second word is one as well.
        if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0]) and not words[1].startswith("GPU"):
            rows.append(words)
    numbers = [int(words[0].removeprefix("GPU")) for words in rows]
    return {(row, column): cell for row, words in zip(numbers, rows, strict=True) for column, cell in zip(numbers, words[1:], strict=False)}


def _link(one: Gpu, other: Gpu, topology: dict[tuple[int, int], str]) -> str:
    if one.index == other.index:
        return ""
    if not torch.cuda.can_device_access_peer(one.index, other.index):
        return "none"
    if one.smi_index is None or other.smi_index is None:
        return "peer"
    return topology.get((one.smi_index, other.smi_index), "peer")


def _driver(smi: list[SmiGpu]) -> str | None:
    if smi:
        return smi[0].driver
    asked = getattr(torch._C, "_cuda_getDriverVersion", None)  # missing in a torch without CUDA
    number = asked() if asked else 0
    return f"of CUDA {number // 1000}.{number % 1000 // 10}" if number else None


def _nccl() -> str | None:
    # What is raised where NCCL was not built in has changed from torch to torch.
    with suppress(AttributeError, RuntimeError, ImportError, ValueError):
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    return None


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # used from its source tree
        return None


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None  # "[N/A]" on GPUs that do not count


def _smi(*arguments: str) -> str:
    """What nvidia-smi prints; empty where it is missing, fails, or hangs."""
    path = shutil.which("nvidia-smi")
    with suppress(OSError, subprocess.SubprocessError):
        if path:
            done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, errors="replace")
            return done.stdout if done.returncode == 0 else ""
    return ""
