"""The doctor: its report, and its findings about settings, the cache folder, kernels and GPUs."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.utils import collect_env
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from dist_tune import accelerator
from dist_tune.cli import doctor
from dist_tune.errors import DistTuneError
from dist_tune.launches import interception
from tests.cli_answers import run

KNOWN = collect_env.get_env_info()
UNITS = SimpleNamespace(gcnArchName="gfx942:xnack-", multi_processor_count=304)
# Triton 3.6 under a numpy that warns of what 2.4 forbids.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache" / "of" / "records"))
    monkeypatch.setattr(collect_env, "get_env_info", lambda: KNOWN)


def findings() -> dict[str, tuple[str, str]]:
    return {
        each["name"]: (each["state"], each["fact"]) for each in doctor.examine().values["findings"]
    }


def test_this_machine_can_interpret(tmp_path: Path):
    """Without a GPU kernels are interpreted: a verdict, exit code 0, a line for each check, and no
    file or folder left behind.
    """
    text = run("doctor").stdout
    report = json.loads(run("doctor", "--json").stdout)
    assert report.keys() == {"can_tune", "verdict", "versions", "findings"}
    assert text.splitlines()[-1] == report["verdict"]
    assert report["versions"]["torch_version"] == torch.__version__
    for word in (
        "torch_version",
        torch.__version__,
        *(each["name"] for each in report["findings"]),
    ):
        assert word in text
    assert [each["state"] for each in report["findings"]] == ["ok", "ok", "off", "ok", "ok"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["Triton", "interpreter", "settings"])
def test_where_nothing_can_be_tuned_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, broken: str
):
    """No listening to Triton, no kernel that runs in any way, or settings that no tuning can read;
    the other checks go on.
    """

    def fails(*_args: object) -> None:
        raise DistTuneError("not Triton's own")

    if broken == "settings":
        monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "soon")
    else:
        monkeypatch.setattr(
            *((interception, "triton_patch") if broken == "Triton" else (doctor, "_run")), fails
        )
    assert next(name for name, (state, _) in findings().items() if state == "fail") == broken
    reason = (
        "DIST_TUNE_DEADLINE_S='soon'"
        if broken == "settings"
        else "DistTuneError: not Triton's own. "
    )
    assert reason in findings()[broken][1]
    assert "Nothing can be tuned here" in run("doctor", code=1).stdout.splitlines()[-1]


def test_settings_and_versions_are_judged(monkeypatch: pytest.MonkeyPatch):
    """A misspelled variable is told with the nearest known name; tuning every time and untested
    versions are worth a word.
    """
    monkeypatch.setenv("DIST_TUNE_ALWAYS_TUNE", "1")
    assert findings()["settings"][0] == "warn"
    monkeypatch.setenv("DIST_TUNE_DEADLINE", "300")
    assert findings()["settings"] == (
        "warn",
        "DIST_TUNE_DEADLINE is not read: did you mean DIST_TUNE_DEADLINE_S?",
    )
    monkeypatch.setattr("dist_tune.cli.doctor.version", {"torch": "9.1", "triton": "3.6.0"}.get)
    state, fact = findings()["Triton"]
    assert (state, "torch 9.1 (2.11 to " in fact) == ("warn", True)


def test_a_folder_that_cannot_be_written_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A file stands in its way; the variable that moves it is named."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "file" / "folder"))
    state, fact = findings()["cache folder"]
    assert (state, str(tmp_path / "file") in fact, "DIST_TUNE_CACHE_DIR" in fact) == (
        "fail",
        True,
        True,
    )


def test_kernels_are_really_tried(monkeypatch: pytest.MonkeyPatch):
    """One that came to another result, or a numpy that the interpreter cannot work with, is seen;
    and the kernel compiles for a GPU.
    """
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "numpy", None)
        without.delitem(sys.modules, "triton.runtime.interpreter", raising=False)
        state, fact = findings()["interpreter"]
    assert (state, "numpy" in fact) == ("fail", True)
    with monkeypatch.context() as idle:
        idle.setattr(InterpretedFunction, "run", lambda *_args, **_options: None)
        state, fact = findings()["interpreter"]
    assert (state, "counts to 3" in fact) == ("fail", True)
    made = with_gpu(monkeypatch)
    assert findings()["GPU"][0] == "ok"
    source = ASTSource(JITFunction(made[0]), {"total": "*i32", "n": "i32"}, {})
    assert "ptx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm


def with_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two GPUs, whose memory is the host's and whose kernels are interpreted; the functions of
    these.
    """
    made: list[Any] = []

    def kernel(function: Any) -> Any:
        made.append(function)
        return InterpretedFunction(function)

    there = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda: "H200",
        "current_device": lambda: 0,
    }
    monkeypatch.setattr(
        accelerator, "api", SimpleNamespace(**there, get_device_properties=lambda device: UNITS)
    )
    zeros = torch.zeros
    monkeypatch.setattr(
        torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options)
    )
    monkeypatch.setattr("triton.runtime.jit.JITFunction", kernel)
    return made


def test_a_gpu_is_tried_and_told(monkeypatch: pytest.MonkeyPatch):
    """On AMD's with a warning; TRITON_INTERPRET=1 left over in a shell is why nothing is fast; and
    a driver may raise.
    """
    with_gpu(monkeypatch)
    assert run("doctor").stdout.splitlines()[-1] == "Ready to tune on 2 x H200."
    with monkeypatch.context() as other:
        other.setattr(torch.version, "hip", "6.4.2")
        state, fact = findings()["GPU"]
        assert (
            state,
            "ran on H200, gfx942, 304 compute units. dist_tune is not measured on HIP" in fact,
        ) == ("warn", True)
        assert doctor.examine().values["versions"]["runtime"] == "hip 6.4.2"
        other.setattr(accelerator, "api", SimpleNamespace(is_available=lambda: False))
        assert findings()["GPU"] == ("off", "none: no driver, or hidden by HIP_VISIBLE_DEVICES")
    with monkeypatch.context() as interpreting:
        interpreting.setenv("TRITON_INTERPRET", "1")
        assert findings()["GPU"] == (
            "off",
            (
                "TRITON_INTERPRET=1: kernels are interpreted, not compiled. Unset it to tune for"
                " this GPU"
            ),
        )

    def broken(_kernel: object) -> None:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr("triton.runtime.jit.JITFunction", broken)
    assert findings()["GPU"][0] == "fail"
    assert "interpreter only" in doctor.examine().values["verdict"]
