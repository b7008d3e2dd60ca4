"""``dist-tune doctor``: what works on this machine, each thing tried for real.

Measures nothing and tunes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
import triton.language as tl
from torch.utils import collect_env

from dist_tune import __version__, accelerator, launches
from dist_tune.cli.render import Answer, facts, table
from dist_tune.records import Cache
from dist_tune.settings import Settings, unread_variables
from dist_tune.tuning import newer_than_tested

Found = tuple[str, str]
"""State ("ok", "warn" for what works with a restriction, "off" for what is not there, "fail"), and
what was found.
"""
_COLOURS = {"warn": "yellow", "fail": "red"}
_VERSIONS = ("os", "python_version", "torch_version", "nvidia_driver_version", "nvidia_gpu_models")


def examine() -> Answer:
    """Run all checks.

    Takes seconds; on a GPU it compiles a kernel. Leaves no file behind. Exit code 1 if nothing can
    be tuned here.
    """
    # Check, and the advice if it raises.
    checks: dict[str, tuple[Callable[[], Found], str]] = {
        "settings": (
            _settings,
            "correct or unset it: a tuning takes the default, or of DIST_TUNE_MODE does not begin",
        ),
        "Triton": (
            _triton,
            "remove what replaces Autotuner.run, or install a Triton that dist_tune knows",
        ),
        "GPU": (
            _gpu,
            (
                "Triton needs a C compiler, Python.h and a driver as new as torch's runtime;"
                " nvidia-smi and dmesg may say more"
            ),
        ),
        "interpreter": (
            _interpreter,
            "TRITON_INTERPRET=1 needs numpy, and before Triton 3.7 numpy<2.4",
        ),
        "cache folder": (
            _cache_folder,
            "every job tunes again: set DIST_TUNE_CACHE_DIR to a folder that can be written",
        ),
    }
    findings = []
    for name, (check, advice) in checks.items():
        try:
            state, fact = check()
        except Exception as error:  # noqa: BLE001  # a broken installation raises anything, and that is the finding
            state, fact = "fail", f"{type(error).__name__}: {error}".strip()[:500] + f". {advice}"
        findings.append({"state": state, "name": name, "fact": fact})
    works = {finding["name"] for finding in findings if finding["state"] in ("ok", "warn")}
    can_tune = {"settings", "Triton"} <= works and bool(works & {"GPU", "interpreter"})
    if not can_tune:
        verdict = "Nothing can be tuned here: see what fails above."
    elif "GPU" in works:
        verdict = f"Ready to tune on {accelerator.api.device_count()} x {accelerator.name()}."
    else:
        verdict = (
            "Kernels can be tuned here under Triton's interpreter only (TRITON_INTERPRET=1): good"
            " for tests, the times mean nothing."
        )
    known = collect_env.get_env_info()._asdict()
    own = {"dist_tune": __version__, "triton": triton.__version__, "runtime": accelerator.runtime()}
    versions = own | {name: known[name] for name in _VERSIONS}
    lines = [
        *facts(versions),
        *table(
            findings, [_COLOURS.get(finding["state"]) for finding in findings], has_header=False
        ),
        verdict,
    ]
    return Answer(
        {"can_tune": can_tune, "verdict": verdict, "versions": versions, "findings": findings},
        lines,
        0 if can_tune else 1,
    )


def _settings() -> Found:
    settings = Settings()  # raises for a value that cannot be read
    if unread := unread_variables(os.environ):
        return "warn", "; ".join(unread)
    if settings.always_tune:
        return "warn", "DIST_TUNE_ALWAYS_TUNE is set: no record is used"
    return "ok", "all variables are understood"


def _triton() -> Found:
    launches.interception.triton_patch()
    if newer := newer_than_tested({name: version(name) for name in ("torch", "triton")}):
        return "warn", f"{newer}. If a tuning fails, try a tested version"
    return "ok", f"Autotuner.run of Triton {triton.__version__} is understood"


def _sum_steps(total, n):  # type: ignore[no-untyped-def]  # Triton compiles annotations, too
    # Not tl.zeros: that is a kernel itself, interpreted or not since Triton was imported.
    accumulator = tl.full([16], 0, tl.int32)
    # A bound known at run time: numpy 2.4 breaks just these in the interpreter of Triton 3.6.
    for _ in range(n):
        accumulator += 1
    tl.store(total + tl.arange(0, 16), accumulator)


def _run(kernel: Any, device: str) -> None:
    total = torch.zeros(16, dtype=torch.int32, device=device)
    kernel[(1,)](total, 3)
    if total.tolist() != [3] * 16:
        raise ArithmeticError(f"a kernel that counts to 3 came to {total.tolist()}")


def _gpu() -> Found:
    if not accelerator.api.is_available():
        hiding = {
            "cuda": "CUDA_VISIBLE_DEVICES",
            "hip": "HIP_VISIBLE_DEVICES",
            "xpu": "ZE_AFFINITY_MASK",
        }[accelerator.kind()]
        return (
            "off",
            (
                f"none: no driver, or hidden by {hiding}"
                if accelerator.runtime()
                else "this torch has no CUDA, HIP or XPU"
            ),
        )
    if triton.knobs.runtime.interpret:
        return (
            "off",
            (
                "TRITON_INTERPRET=1: kernels are interpreted, not compiled. Unset it to tune for"
                " this GPU"
            ),
        )
    _run(triton.runtime.jit.JITFunction(_sum_steps), accelerator.device_type())
    ran = f"a kernel was compiled and ran on {accelerator.name()}"
    if accelerator.kind() == "cuda":
        return "ok", ran
    told = (
        f"dist_tune is not measured on {accelerator.kind().upper()}: Other devices in"
        " docs/libraries.md says what is plain there"
    )
    return "warn", f"{ran}. {told}"


def _interpreter() -> Found:
    # Here: it needs numpy, whose absence is a finding.
    from triton.runtime.interpreter import (
        InterpretedFunction,
    )

    _run(InterpretedFunction(_sum_steps), "cpu")
    return "ok", "a kernel ran; TRITON_INTERPRET=1 chooses it"


def _cache_folder() -> Found:
    path = Cache.of(Settings()).folder
    there = next(each for each in (path, *path.parents) if each.exists())
    with TemporaryDirectory(prefix=".doctor-", dir=there) as inside:
        Path(inside, "written").write_bytes(b"well")
    return "ok", f"{path} can be written"
