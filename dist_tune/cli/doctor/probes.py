"""Probes of a machine, each independent of the others: a state, a fact, and advice.

An exception of a probe is a finding, too: see doctor.py.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from filelock import FileLock

from dist_tune import runtime
from dist_tune.cli.doctor.machine import Gpu

State = Literal["ok", "warn", "off", "fail"]
"""``off``: absent, and not needed; ``warn``: works with a restriction."""
Found = tuple[State, str, str]
"""State, fact, advice."""
_STEP_TOTAL = 3
_BUSY_PERCENT, _BUSY_MIB = 5, 2048
"""Limits above which another job uses the GPU. An idle H200 shows less than 1 GiB."""


def interception() -> Found:
    """Check that misses of triton.autotune kernels can be intercepted."""
    runtime.interception.triton_patch()
    return "ok", f"Autotuner.run of Triton {triton.__version__} is understood", ""


def _sum_steps(total, n):  # type: ignore[no-untyped-def]  # Triton compiles annotations, too
    accumulator = tl.full([16], 0, tl.int32)  # not tl.zeros: that is a kernel itself, interpreted or not since Triton was imported
    for _ in range(n):  # a bound known at run time: numpy 2.4 breaks just these in the interpreter of Triton 3.6
        accumulator += 1
    tl.store(total + tl.arange(0, 16), accumulator)


def _ran(kernel: Any, device: str) -> float:
    """Seconds of a first launch, compilation included; raises if the result is wrong."""
    start = time.perf_counter()
    total = torch.zeros(16, dtype=torch.int32, device=device)
    kernel[(1,)](total, _STEP_TOTAL)
    if total.tolist() != [_STEP_TOTAL] * 16:
        raise ArithmeticError(f"a kernel that counts to {_STEP_TOTAL} came to {total.tolist()}")
    return time.perf_counter() - start


def triton_on_gpu(gpus: Sequence[Gpu]) -> Found:
    """Compile a kernel and run it."""
    if not gpus:
        why = "this torch has no CUDA" if torch.version.cuda is None else "torch sees no GPU: no driver, or hidden by CUDA_VISIBLE_DEVICES"
        return "off", why, ""
    if triton.knobs.runtime.interpret:
        return "off", "TRITON_INTERPRET=1: kernels are interpreted, not compiled", "unset it to tune for this GPU"
    seconds = _ran(triton.runtime.jit.JITFunction(_sum_steps), "cuda")
    target = triton.runtime.driver.active.get_current_target()
    return "ok", f"a kernel compiled for {target.backend}:{target.arch} and ran, {seconds:.1f} s", ""


def interpreter() -> Found:
    """Run a kernel in the interpreter, as TRITON_INTERPRET=1 would."""
    import numpy  # here: neither torch nor Triton requires it, and its absence is a finding
    from triton.runtime.interpreter import InterpretedFunction

    _ran(InterpretedFunction(_sum_steps), "cpu")
    is_chosen = triton.knobs.runtime.interpret
    fact = f"works with numpy {numpy.__version__}; {'chosen by TRITON_INTERPRET=1' if is_chosen else 'TRITON_INTERPRET=1 chooses it'}"
    if is_chosen and torch.cuda.is_available():
        return "warn", f"{fact}, although there is a GPU", "unset it to tune for the GPU"
    return "ok", fact, ""


def events(gpus: Sequence[Gpu]) -> Found:
    """Time something with CUDA events."""
    if not gpus:
        return "off", "no GPU: times are the host's", ""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        return "warn", "CUDA_LAUNCH_BLOCKING is set: launches wait for each other, and gaps are timed", "unset it before tuning"
    filled = torch.zeros(1 << 20, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    filled.zero_()
    end.record()
    end.synchronize()
    elapsed_ms = start.elapsed_time(end)
    if elapsed_ms <= 0:
        raise ArithmeticError(f"filling 4 MiB took {elapsed_ms} ms")
    return "ok", f"filling 4 MiB took {elapsed_ms:.4f} ms", ""


def idle(gpus: Sequence[Gpu]) -> Found:
    """Look for other jobs on the GPUs."""
    if not gpus or all(each.used_mib is None for each in gpus):
        return "off", "no GPU" if not gpus else "nvidia-smi does not say", ""
    busy = [each for each in gpus if (each.busy_percent or 0) > _BUSY_PERCENT or (each.used_mib or 0) > _BUSY_MIB]
    if not busy:
        return "ok", "no other process uses them", ""
    who = ", ".join(f"GPU {each.index} ({(each.used_mib or 0) / 1024:.1f} GiB, {each.busy_percent or 0} % busy)" for each in busy)
    return "warn", f"in use: {who}", "what is tuned beside another job is tuned for that company: nvidia-smi names the processes"


def peers(links: Sequence[Sequence[str]]) -> Found:
    """Check that each GPU reads every other one's memory; ``links`` as machine.links gives them."""
    if len(links) < 2:
        return "off", "fewer than two GPUs", ""
    without = [(row, column) for row, cells in enumerate(links) for column, cell in enumerate(cells) if cell == "none"]
    if not without:
        return "ok", "every GPU reads every other one's memory", ""
    pairs = ", ".join(f"{row}->{column}" for row, column in without[:6]) + (", ..." if len(without) > 6 else "")
    return "warn", f"{len(without)} pairs without: {pairs}", "steps that push into peers' memory do not run; NCCL goes over the host"


def distributed(gpus: Sequence[Gpu]) -> Found:
    """List the backends over which ranks communicate, and look up the host's name as gloo does."""
    backends = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    present = ", ".join(name for name, is_there in backends.items() if is_there) or "none"
    if gpus and not backends["nccl"]:
        return "warn", f"backends: {present}", "without nccl the ranks' devices are not aligned before a replay"
    with suppress(OSError):
        socket.getaddrinfo(socket.gethostname(), None)
        return "ok", f"backends: {present}", ""
    advice = "gloo cannot connect its ranks: add it to /etc/hosts, or name an interface in GLOO_SOCKET_IFNAME"
    return "warn", f"backends: {present}; the host name {socket.gethostname()!r} cannot be looked up", advice


def store() -> Found:
    """Write to a TCPStore, on which ranks meet, and read it back."""
    start = time.perf_counter()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.set("doctor", "well")
    if store.get("doctor") != b"well":
        raise ArithmeticError("a value came back changed")
    return "ok", f"ranks of this host can meet, {(time.perf_counter() - start) * 1000:.1f} ms", ""


def symmetric_memory(gpus: Sequence[Gpu]) -> Found:
    """Allocate symmetric memory on this rank alone."""
    from torch.distributed import _symmetric_memory  # here: private, and its absence is a finding

    if not gpus:
        return "off", "can be imported, and needs GPUs", ""
    _symmetric_memory.empty(16, dtype=torch.uint8, device=torch.device("cuda"))
    return "ok", "can be allocated", ""


def folder(path: Path, variable: str, otherwise: str) -> Found:
    """Write, lock and read a file in a folder, and leave nothing behind, not even the folder."""
    missing: list[Path] = []
    try:
        path = path.expanduser().absolute()
        missing = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with TemporaryDirectory(prefix=".doctor-", dir=path, ignore_cleanup_errors=True) as inside, FileLock(f"{inside}/.lock", timeout=5):
            Path(inside, "written").write_bytes(b"well")
            if Path(inside, "written").replace(f"{inside}/renamed").read_bytes() != b"well":
                raise OSError("what is written there comes back changed")
        return "ok", f"{path} can be written and locked, {(time.perf_counter() - start) * 1000:.1f} ms", ""
    except (OSError, RuntimeError) as error:
        return "fail", f"{path}: {error}", f"{otherwise}: set {variable} to a folder that can be written"
    finally:
        with suppress(OSError):  # in use by another process already
            for each in missing:
                each.rmdir()


def triton_cache() -> Found:
    """Check Triton's own cache of compiled kernels, through which ranks share their work."""
    return folder(Path(triton.knobs.cache.dir), "TRITON_CACHE_DIR", "ranks cannot share what they compile")
