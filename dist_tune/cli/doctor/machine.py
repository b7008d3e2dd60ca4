"""Facts of this machine: versions, GPUs, and the links between them; doctor.py judges them.

Memory in use, load, driver version and links come from nvidia-smi, and are left out where it is not installed.
"""

from __future__ import annotations

import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dist_tune import __version__

_SMI_FIELDS = ("index", "uuid", "driver_version", "memory.used", "utilization.gpu")
_SMI_TIMEOUT_S = 20.0
"""A broken driver can make nvidia-smi hang."""


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """A GPU of the machine as nvidia-smi sees it, also where CUDA_VISIBLE_DEVICES hides it from this process."""

    index: int
    uuid: str
    driver: str
    used_mib: int | None
    busy_percent: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process sees."""

    index: int
    name: str
    capability: str
    memory_bytes: int
    n_multiprocessors: int
    l2_bytes: int
    used_mib: int | None = None
    """Memory in use by all other processes; None where nvidia-smi does not report it."""
    busy_percent: int | None = None
    """Share of the last sampling period in which a kernel ran."""
    smi_index: int | None = None


def versions(smi: list[SmiGpu]) -> dict[str, str | None]:
    """Version of each component, None if it is not installed."""
    return {
        "dist_tune": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "numpy": package_version("numpy"),
        "cuda": torch.version.cuda,
        "driver": _driver(smi),
        "nccl": _nccl(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def smi_gpus() -> list[SmiGpu]:
    """All GPUs of the machine, in nvidia-smi's order. Call it before torch touches one, or this process counts among its users."""
    found = []
    for line in _smi(f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits").splitlines():
        match [value.strip() for value in line.split(",")]:
            case [index, uuid, driver, used, busy] if index.isdigit():  # and no warning of the driver
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
    """Connection from each GPU (row) to each other one (column): "NV18", "PIX", ... by nvidia-smi, "peer" where it reports none.

    "none" where a GPU cannot read the other's memory; the diagonal is empty.
    """
    topology = parse_topology(_smi("topo", "-m")) if len(found) > 1 else {}
    return [[_link(one, other, topology) for other in found] for one in found]


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """(row, column) -> kind of link in the output of ``nvidia-smi topo -m``, by nvidia-smi's indices."""
    lines = [line.split() for line in text.splitlines()]
    # The heading begins with "GPU0" as well, unless that is underlined, but its second word is "GPU1".
    of_gpus = [words for words in lines if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0]) and not words[1].startswith("GPU")]
    rows = {int(name.removeprefix("GPU")): cells for name, *cells in of_gpus}
    return {(row, column): cell for row, cells in rows.items() for column, cell in zip(rows, cells, strict=False)}


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
    # Without NCCL the exception depends on the version of torch.
    with suppress(AttributeError, RuntimeError, ImportError, ValueError):
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    return None


def package_version(name: str) -> str | None:
    """Installed version of a package, None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:  # used from its source tree
        return None


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None  # "[N/A]" on GPUs that do not count


def _smi(*arguments: str) -> str:
    """Output of nvidia-smi; empty where it is missing, fails, or hangs."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=_SMI_TIMEOUT_S, errors="replace").stdout
    return ""
