"""Machines for tests of the doctor: simulated GPUs, an ``nvidia-smi`` with a given output, and a single finding by its name."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_tune.cli import doctor
from dist_tune.cli.doctor import Finding
from dist_tune.cli.doctor.machine import Gpu

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\tNODE\t0-47\t0
GPU1\tNV18\t X \tSYS\tNODE\t0-47\t0
GPU3\tPIX\tSYS\t X \tSYS\t0-47\t0
NIC0\tNODE\tNODE\tSYS\t X

Legend:

  X    = Self
"""


def found(name: str) -> Finding:
    return next(each for each in doctor.examine().findings if each.name == name)


def gpu(index: int = 0, **changes: Any) -> Gpu:
    values = {"name": "NVIDIA H200", "capability": "9.0", "memory_bytes": 2**37, "n_multiprocessors": 132, "l2_bytes": 2**26}
    return Gpu(**{"index": index, **values, **changes})


def nvidia_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    path = folder / "bin" / "nvidia-smi"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


class Properties(SimpleNamespace):
    name, major, minor, total_memory, multi_processor_count, L2_cache_size = "NVIDIA H200", 9, 0, 2**37, 132, 2**26


def with_gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties(uuid=uuids[index]))
