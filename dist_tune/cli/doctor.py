"""``dist-tune doctor``: what works on this machine, each thing tried for real, with the reason and the remedy.

Measures nothing and tunes nothing. Every check stands for itself: an exception is its finding.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from filelock import FileLock
from rich.text import Text
from torch.utils import collect_env

from dist_tune import __version__, runtime
from dist_tune.cli.render import Answer, Page, facts, table
from dist_tune.output import amount
from dist_tune.settings import Settings, unread_variables
from dist_tune.tuning import newer_than_tested

Found = tuple[str, str, str]
"""State of ``_STYLES``, fact, advice. ``off``: absent, and not needed; ``warn``: works with a restriction."""
_STYLES = {"ok": "", "warn": "bold yellow", "off": "dim", "fail": "bold red"}
_VARIABLES = ("DIST_TUNE_", "TRITON_", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_", "NCCL_", "TORCH_NCCL_", "GLOO_")
_STEP_TOTAL = 3
_IN_USE_MIB = 2048
"""Memory above which another job uses a GPU. An idle H200 shows less than half of it, with the context of this process."""
_INTERPRETED_ONLY = (
    "Kernels can be tuned here under Triton's interpreter only (TRITON_INTERPRET=1): good for tests, the times mean nothing."
)


def examine() -> Answer:
    """Run all checks. Takes seconds; on a GPU it compiles a kernel. Leaves no file behind. Exit code 1 if nothing can be tuned here."""
    # Check, and the advice if it raises.
    checks: dict[str, tuple[Callable[[], Found], str]] = {
        "settings": (_settings, "correct or unset it: a tuning warns and takes the default"),
        "interception": (_triton, "remove what replaces Autotuner.run, or install a Triton that dist_tune knows"),
        "GPUs": (_idle, "a reset or a new driver may help; nvidia-smi and dmesg may say more"),
        "Triton on the GPU": (_triton_on_gpu, "Triton needs a C compiler, Python.h and a driver as new as its CUDA"),
        "Triton's interpreter": (_interpreter, "TRITON_INTERPRET=1 needs numpy, and before Triton 3.7 numpy<2.4"),
        "peer access": (_peers, ""),
        "torch.distributed": (_distributed, "ranks meet over TCP: a firewall or a container may forbid the loopback device"),
        "cache folder": (lambda: _folder(Settings().cache_folders[0], "DIST_TUNE_CACHE_DIR", "every job tunes again"), ""),
        "log folder": (lambda: _folder(Settings().log_dir, "DIST_TUNE_LOG_DIR", "tunings are not explained"), ""),
        "Triton's disk cache": (lambda: _folder(triton.knobs.cache.dir, "TRITON_CACHE_DIR", "ranks cannot share what they compile"), ""),
    }
    findings = []
    for name, (check, advice) in checks.items():
        try:
            found = check()
        except Exception as error:  # noqa: BLE001  # a broken installation raises anything, and that is the finding
            found = ("fail", f"{type(error).__name__}: {error}".strip()[:500], advice)
        findings.append({"state": found[0], "name": name, "fact": found[1], "advice": found[2]})
    states = {each["name"]: each["state"] for each in findings}
    works = {name for name, state in states.items() if state in ("ok", "warn")}
    can_tune = {"settings", "interception"} <= works and bool(works & {"Triton on the GPU", "Triton's interpreter"})
    if not can_tune:
        verdict = "Nothing can be tuned here: see what fails above."
    elif "Triton on the GPU" in works:
        verdict = f"Ready to tune on {amount(torch.cuda.device_count(), 'GPU')}."
    else:
        has_failed = "fail" in (states["GPUs"], states["Triton on the GPU"])
        verdict = ("The GPUs cannot be used, see above. " if has_failed else "") + _INTERPRETED_ONLY
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    seen = _gpus() if states["GPUs"] != "fail" else []
    sections = {
        "Versions": facts(versions := _components()),
        "GPUs": table(seen),
        "Environment": facts(variables),
        "Checks": table(findings, [_STYLES[each["state"]] for each in findings], has_header=False),
    }
    page: Page = [part for title, rows in sections.items() if rows.row_count for part in (Text(title, style="bold"), rows)]
    page = [*page, Text(verdict, style="bold green" if can_tune else "bold red")]
    values = {"can_tune": can_tune, "verdict": verdict, "versions": versions, "gpus": seen, "variables": variables, "findings": findings}
    return Answer(values, page, 0 if can_tune else 1)


def _components() -> dict[str, str | None]:
    """Version of each component, None if it is not installed."""
    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    nccl = None
    with suppress(AttributeError, RuntimeError, ImportError, ValueError):  # without NCCL it depends on the version of torch
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    found = {"dist_tune": __version__, "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    return {**found, "cuda": torch.version.cuda, "driver": driver, "nccl": nccl, "system": platform.platform()}


def _gpus() -> list[dict[str, Any]]:
    """The GPUs that this process sees; none without CUDA."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        known: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpu = {"index": index, "name": known.name, "capability": f"{known.major}.{known.minor}", "memory_mib": total // 2**20}
        found.append({**gpu, "used_mib": (total - free) // 2**20, "n_multiprocessors": known.multi_processor_count})
    return found


# -- checks ------------------------------------------------------------------------------------------------------------


def _settings() -> Found:
    settings = Settings()  # raises for a value that cannot be read
    if unread := unread_variables(os.environ):
        names, meant = zip(*(each.split(": ", 1) for each in unread), strict=True)
        return "warn", "; ".join(names), "; ".join(dict.fromkeys(meant))
    if settings.always_tune:
        return "warn", "DIST_TUNE_ALWAYS_TUNE is set: no record is used", "unset it unless that is wanted"
    return "ok", "all variables are understood", ""


def _triton() -> Found:
    runtime.interception.triton_patch()
    if newer := newer_than_tested({name: version(name) for name in ("torch", "triton")}):
        return "warn", newer, "if a tuning fails, try a tested version"
    return "ok", f"Autotuner.run of Triton {triton.__version__} is understood", ""


def _idle() -> Found:
    seen = _gpus()
    if not seen:
        return "off", "this torch has no CUDA" if torch.version.cuda is None else "none: no driver, or hidden by CUDA_VISIBLE_DEVICES", ""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        return "warn", "CUDA_LAUNCH_BLOCKING is set: launches wait for each other, and gaps are timed", "unset it before tuning"
    if busy := [f"GPU {gpu['index']} ({gpu['used_mib']} MiB)" for gpu in seen if gpu["used_mib"] > _IN_USE_MIB]:
        return "warn", f"in use: {', '.join(busy)}", "what is tuned beside another job is tuned for that company: nvidia-smi names it"
    return "ok", "no other process uses them", ""


def _sum_steps(total, n):  # type: ignore[no-untyped-def]  # Triton compiles annotations, too
    accumulator = tl.full([16], 0, tl.int32)  # not tl.zeros: that is a kernel itself, interpreted or not since Triton was imported
    for _ in range(n):  # a bound known at run time: numpy 2.4 breaks just these in the interpreter of Triton 3.6
        accumulator += 1
    tl.store(total + tl.arange(0, 16), accumulator)


def _run(kernel: Any, device: str) -> None:
    total = torch.zeros(16, dtype=torch.int32, device=device)
    kernel[(1,)](total, _STEP_TOTAL)
    if total.tolist() != [_STEP_TOTAL] * 16:
        raise ArithmeticError(f"a kernel that counts to {_STEP_TOTAL} came to {total.tolist()}")


def _triton_on_gpu() -> Found:
    if not torch.cuda.is_available():
        return "off", "no GPU", ""
    if triton.knobs.runtime.interpret:
        return "off", "TRITON_INTERPRET=1: kernels are interpreted, not compiled", "unset it to tune for this GPU"
    _run(triton.runtime.jit.JITFunction(_sum_steps), "cuda")
    target = triton.runtime.driver.active.get_current_target()
    return "ok", f"a kernel compiled for {target.backend}:{target.arch} and ran", ""


def _interpreter() -> Found:
    import numpy  # here: neither torch nor Triton requires it, and its absence is a finding
    from triton.runtime.interpreter import InterpretedFunction

    _run(InterpretedFunction(_sum_steps), "cpu")
    return "ok", f"works with numpy {numpy.__version__}; TRITON_INTERPRET=1 chooses it", ""


def _peers() -> Found:
    pairs = list(permutations(range(torch.cuda.device_count()), 2))
    if without := [f"{one}->{other}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]:
        return "warn", f"none for {', '.join(without)}", "steps that push into peers' memory do not run; NCCL goes over the host"
    return ("ok", "every GPU reads every other one's memory", "") if pairs else ("off", "fewer than two GPUs", "")


def _distributed() -> Found:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.set("doctor", "well")
    if store.get("doctor") != b"well":
        raise ArithmeticError("a value came back changed")
    if torch.cuda.is_available() and not dist.is_nccl_available():
        return "warn", "there is no nccl", "without nccl the ranks' devices are not aligned before a replay"
    try:
        socket.getaddrinfo(socket.gethostname(), None)  # as gloo does
    except OSError:
        advice = "gloo cannot connect its ranks: add it to /etc/hosts, or name an interface in GLOO_SOCKET_IFNAME"
        return "warn", f"the host name {socket.gethostname()!r} cannot be looked up", advice
    return "ok", "ranks of this host can meet", ""


def _folder(path: str | Path, variable: str, otherwise: str) -> Found:
    path = Path(path).expanduser().absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    try:
        with TemporaryDirectory(prefix=".doctor-", dir=there, ignore_cleanup_errors=True) as inside, FileLock(f"{inside}/lock", timeout=5):
            Path(inside, "written").write_bytes(b"well")
            Path(inside, "written").replace(f"{inside}/renamed")
    except (OSError, RuntimeError) as error:
        return "fail", f"{path}: {error}", f"{otherwise}: set {variable} to a folder that can be written"
    return "ok", f"{path} can be written and locked", ""
