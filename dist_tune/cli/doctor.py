"""What works on this machine and what does not, each tried for real, with the reason and what to do about it.

Measures nothing and tunes nothing. Every check stands for itself: whatever it raises is what it found.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from pydantic import AliasChoices, ValidationError

from dist_tune.cli import machine, probes
from dist_tune.cli.machine import Gpu, SmiGpu
from dist_tune.cli.probes import Found, State
from dist_tune.settings import Settings

_SETTINGS, _INTERCEPTION, _ON_GPU, _INTERPRETED = "settings", "interception", "Triton on the GPU", "Triton's interpreter"
_MAX_CHARS = 500
"""Of another's error message that are kept."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one check."""

    name: str
    state: State
    fact: str
    advice: str = ""
    """What to do about it."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found."""

    versions: dict[str, str | None]
    gpus: list[Gpu]
    links: list[list[str]]
    """How each GPU reaches each other one, see ``machine.links``."""
    variables: dict[str, str]
    """Environment variables that change what is tuned or how."""
    findings: list[Finding]

    @property
    def can_tune(self) -> bool:
        """Whether Triton kernels can be tuned here in any way, be it under the interpreter."""
        works = {each.name for each in self.findings if each.state in ("ok", "warn")}
        return {_SETTINGS, _INTERCEPTION} <= works and bool(works & {_ON_GPU, _INTERPRETED})

    @property
    def verdict(self) -> str:
        """In one sentence."""
        states = {each.name: each.state for each in self.findings}
        if not self.can_tune:
            return "Nothing can be tuned here: see what fails above."
        if states[_ON_GPU] in ("ok", "warn"):
            return f"Ready to tune on {len(self.gpus)} GPU{'s' * (len(self.gpus) != 1)}."
        if self.gpus and states[_ON_GPU] == "fail":
            return "The GPUs cannot be used, see above. Under Triton's interpreter kernels can be tuned, and the times mean nothing."
        return "Kernels can be tuned here under Triton's interpreter only (TRITON_INTERPRET=1): good for tests, the times mean nothing."


def examine() -> Report:
    """Try everything. Takes seconds; on a GPU it compiles a kernel. Leaves no file behind."""
    smi = machine.smi_gpus()
    gpus, links, trouble = _hardware(smi)
    checks: list[tuple[str, Callable[[], Found], str]] = [
        (_SETTINGS, _all_settings, "correct or unset it: every tuning of this environment raises"),
        (_INTERCEPTION, probes.interception, "import dist_tune before what replaces it, or install a Triton that dist_tune knows"),
        (_ON_GPU, lambda: probes.triton_on_gpu(gpus), "Triton needs a C compiler, Python.h and a driver as new as its CUDA"),
        (_INTERPRETED, probes.interpreter, "TRITON_INTERPRET=1 needs numpy, and before Triton 3.7 numpy<2.4"),
        ("CUDA events", lambda: probes.events(gpus), "nvidia-smi and dmesg may say more"),
        ("idle GPUs", lambda: probes.idle(gpus), ""),
        ("peer access", lambda: probes.peers(links), ""),
        ("torch.distributed", lambda: probes.distributed(gpus), ""),
        ("c10d store", probes.store, "ranks meet over TCP: a firewall or a container may forbid the loopback device"),
        ("symmetric memory", lambda: probes.symmetric_memory(gpus), "only steps that use it need it"),
        ("cache folder", lambda: _folder("cache_dir", "every job tunes again"), ""),
        ("log folder", lambda: _folder("log_dir", "tunings are not explained"), ""),
        ("Triton's disk cache", probes.triton_cache, ""),
    ]
    findings = trouble + [_tried(*each) for each in checks]
    return Report(machine.versions(smi), gpus, links, _variables(), findings)


def _hardware(smi: list[SmiGpu]) -> tuple[list[Gpu], list[list[str]], list[Finding]]:
    """GPUs and links, or why there are none."""
    try:
        gpus = machine.gpus(smi)
        return gpus, machine.links(gpus), []
    except Exception as error:  # noqa: BLE001  # a driver that torch cannot talk to raises anything
        return [], [], [_failed("GPUs", error, f"nvidia-smi sees {len(smi)}; a reset or a new driver may help, dmesg may say more")]


def _tried(name: str, check: Callable[[], Found], advice: str) -> Finding:
    """``advice``: what to do if the check raises."""
    try:
        return Finding(name, *check())
    except Exception as error:  # noqa: BLE001  # a broken installation raises anything, and that is the finding
        return _failed(name, error, advice)


def _failed(name: str, error: Exception, advice: str) -> Finding:
    return Finding(name, "fail", f"{type(error).__name__}: {error}".strip()[:_MAX_CHARS], advice)


# -- settings ------------------------------------------------------------------------------------------------------


def _settings() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        wrong = [f"{each['loc'][0]}={each['input']!r}: {each['msg']}" for each in error.errors()]
        raise ValueError("; ".join(wrong)) from error


def _all_settings() -> Found:
    settings = _settings()
    names = _setting_names()
    unknown = sorted(name for name in os.environ if name.startswith("DIST_TUNE_") and name not in names)
    if unknown:
        meant = sorted({near for name in unknown for near in get_close_matches(name, names, n=1)})
        advice = f"did you mean {', '.join(meant)}?" if meant else f"known are {', '.join(names)}"
        return "warn", f"nobody reads {', '.join(unknown)}", advice
    if settings.always_tune:
        return "warn", "DIST_TUNE_ALWAYS_TUNE is set: no record is used", "unset it unless that is wanted"
    return "ok", "all variables are understood", ""


def _folder(field: str, otherwise: str) -> Found:
    try:
        folder: Path = getattr(_settings(), field)
    except ValueError:
        return "off", "not known: the settings cannot be read", ""
    return probes.folder(folder, f"DIST_TUNE_{field.upper()}", otherwise)


def _setting_names() -> list[str]:
    aliases = [field.validation_alias for field in Settings.model_fields.values()]
    choices = [alias.choices if isinstance(alias, AliasChoices) else [alias] for alias in aliases]
    return sorted(str(name) for names in choices for name in names if str(name).startswith("DIST_TUNE_"))


def _variables() -> dict[str, str]:
    prefixes = ("DIST_TUNE_", "TRITON_", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_", "NCCL_", "TORCH_NCCL_", "GLOO_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
