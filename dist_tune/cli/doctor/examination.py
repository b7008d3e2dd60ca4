"""``dist-tune doctor``: what works on this machine, each thing tried for real, with the reason and the remedy.

Measures nothing and tunes nothing. Every check stands for itself: an exception is its finding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dist_tune.cli.doctor import machine, probes
from dist_tune.cli.doctor.machine import Gpu
from dist_tune.cli.doctor.probes import Found, State
from dist_tune.cli.tables import Answer, facts, grid, plain, size
from dist_tune.settings import Settings, SettingsError, unread_variables
from dist_tune.tuning import newer_than_tested

_SETTINGS, _INTERCEPTION, _ON_GPU, _INTERPRETED = "settings", "interception", "Triton on the GPU", "Triton's interpreter"
_VARIABLES = ("DIST_TUNE_", "TRITON_", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_", "NCCL_", "TORCH_NCCL_", "GLOO_")
_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "bold yellow"), "off": ("off", "dim"), "fail": ("FAIL", "bold red")}
_MAX_CHARS = 500
"""Length of a fact; error messages of other libraries can be longer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    state: State
    fact: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, and the machine that they are about."""

    versions: dict[str, str | None]
    gpus: list[Gpu]
    links: list[list[str]]
    """Connection of each GPU to each other one, see ``machine.links``."""
    variables: dict[str, str]
    """Environment variables that change the tuning."""
    findings: list[Finding]

    @property
    def can_tune(self) -> bool:
        """Triton kernels can be tuned here, if only under the interpreter."""
        works = {each.name for each in self.findings if each.state in ("ok", "warn")}
        return {_SETTINGS, _INTERCEPTION} <= works and bool(works & {_ON_GPU, _INTERPRETED})

    @property
    def verdict(self) -> str:
        """One sentence."""
        states = {each.name: each.state for each in self.findings}
        if not self.can_tune:
            return "Nothing can be tuned here: see what fails above."
        if states[_ON_GPU] in ("ok", "warn"):
            return f"Ready to tune on {len(self.gpus)} GPU{'s' * (len(self.gpus) != 1)}."
        if self.gpus and states[_ON_GPU] == "fail":
            return "The GPUs cannot be used, see above. Under Triton's interpreter kernels can be tuned, and the times mean nothing."
        return "Kernels can be tuned here under Triton's interpreter only (TRITON_INTERPRET=1): good for tests, the times mean nothing."


def run() -> Answer:
    """Examine this machine. Exit code 1 if nothing can be tuned here."""
    report = examine()
    return Answer({"can_tune": report.can_tune, "verdict": report.verdict, **asdict(report)}, _page(report), 0 if report.can_tune else 1)


def examine() -> Report:
    """Run all checks. Takes seconds; on a GPU it compiles a kernel. Leaves no file behind."""
    smi = machine.smi_gpus()
    findings = []
    try:
        gpus = machine.gpus(smi)
        links = machine.links(gpus)
    except Exception as error:  # noqa: BLE001  # a driver that torch cannot talk to raises anything
        gpus, links = [], []
        findings.append(_failed("GPUs", error, f"nvidia-smi sees {len(smi)}; a reset or a new driver may help, dmesg may say more"))
    # Name, check, and the advice if the check raises.
    checks: list[tuple[str, Callable[[], Found], str]] = [
        (_SETTINGS, _settings, "correct or unset it: a tuning warns and takes the default"),
        ("versions", _versions, ""),
        (_INTERCEPTION, probes.interception, "remove what replaces Autotuner.run, or install a Triton that dist_tune knows"),
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
    for name, check, advice in checks:
        try:
            findings.append(Finding(name, *check()))
        except Exception as error:  # noqa: BLE001  # a broken installation raises anything, and that is the finding
            findings.append(_failed(name, error, advice))
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return Report(machine.versions(smi), gpus, links, variables, findings)


def _failed(name: str, error: Exception, advice: str) -> Finding:
    return Finding(name, "fail", f"{type(error).__name__}: {error}".strip()[:_MAX_CHARS], advice)


def _settings() -> Found:
    settings = Settings()
    if unread := unread_variables(os.environ):
        names, meant = zip(*(each.split(": ", 1) for each in unread), strict=True)
        return "warn", "; ".join(names), "; ".join(dict.fromkeys(meant))
    if settings.always_tune:
        return "warn", "DIST_TUNE_ALWAYS_TUNE is set: no record is used", "unset it unless that is wanted"
    return "ok", "all variables are understood", ""


def _versions() -> Found:
    if newer := newer_than_tested({name: version(name) for name in ("torch", "triton")}):
        return "warn", newer, "if a tuning fails, try a tested version"
    return "ok", "torch and triton are of versions that are tested", ""


def _folder(field: str, otherwise: str) -> Found:
    try:
        folder = getattr(Settings(), field)
    except SettingsError:
        return "off", "not known: the settings cannot be read", ""
    return probes.folder(folder, f"DIST_TUNE_{field.upper()}", otherwise)


def _page(report: Report) -> list[RenderableType]:
    """The whole report, the verdict last."""
    sections = {
        "Versions": facts({name: plain(version or "-") for name, version in report.versions.items()}),
        "GPUs": _gpu_table(report.gpus),
        "Links": _link_table(report.links if len(report.links) > 1 else []),
        "Environment": facts({name: plain(value) for name, value in report.variables.items()}),
        "Checks": _finding_table(report.findings),
    }
    page: list[RenderableType] = []
    for title, table in sections.items():
        if table.row_count:
            page += [Text(title, style="bold"), table, ""]
    return [*page, Text(report.verdict, style="bold green" if report.can_tune else "bold red")]


def _gpu_table(gpus: Sequence[Gpu]) -> Table:
    numbers = ("sm", "memory", "in use", "busy", "SMs", "L2")
    table = grid("  #", "name", *numbers, right=("  #", *numbers))
    for gpu in gpus:
        used = size(gpu.used_mib * 2**20) if gpu.used_mib is not None else "?"
        busy = f"{gpu.busy_percent} %" if gpu.busy_percent is not None else "?"
        cells = [gpu.capability, size(gpu.memory_bytes), used, busy, str(gpu.n_multiprocessors), size(gpu.l2_bytes)]
        table.add_row(str(gpu.index), plain(gpu.name), *cells)
    return table


def _link_table(links: Sequence[Sequence[str]]) -> Table:
    numbers = [str(number) for number in range(len(links))]
    table = grid("  from", *numbers, right=("  from", *numbers))
    for number, cells in zip(numbers, links, strict=True):
        table.add_row(number, *(Text(cell or "-", style="bold red" if cell == "none" else "" if cell else "dim") for cell in cells))
    return table


def _finding_table(findings: Sequence[Finding]) -> Table:
    table = grid("", "", "")
    for finding in findings:
        mark, style = _MARKS[finding.state]
        muted = "dim" if finding.state == "off" else ""
        table.add_row(Text(f"  {mark}", style=style), finding.name, plain(finding.fact, _MAX_CHARS), style=muted)
        if finding.advice:
            table.add_row("", "", Text(f"-> {finding.advice}", style=muted or style))
    return table
