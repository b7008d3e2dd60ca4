"""The doctor: its report, and its findings about settings, folders, kernels, ranks and GPUs."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from dist_tune.cli import doctor
from dist_tune.errors import DistTuneError
from dist_tune.runtime import interception
from tests.cli_answers import run

# Triton 3.6 under a numpy that warns of what 2.4 forbids.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")]


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache" / "of" / "records"))
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def findings() -> dict[str, dict[str, str]]:
    return {each["name"]: each for each in doctor.examine().values["findings"]}


def test_this_machine_can_interpret(tmp_path: Path):
    """Without a GPU kernels are interpreted: a verdict, exit code 0, a line for each check, and no file or folder left behind."""
    (tmp_path / "logs").mkdir()
    text = run("doctor").stdout
    for word in ("Versions", torch.__version__, "interception", "Triton's interpreter", "torch.distributed", "cache folder"):
        assert word in text
    report = json.loads(run("doctor", "--json").stdout)
    assert report.keys() == {"can_tune", "verdict", "versions", "gpus", "variables", "findings"}
    assert text.splitlines()[-1] == report["verdict"]
    assert report["versions"]["torch"] == torch.__version__
    assert report["variables"]["DIST_TUNE_LOG_DIR"] == os.environ["DIST_TUNE_LOG_DIR"]
    states = {each["name"]: each["state"] for each in report["findings"]}
    assert {states[name] for name in ("settings", "interception", "cache folder", "log folder", "Triton's disk cache")} == {"ok"}
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "logs"]


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    """The other checks go on."""

    def broken() -> None:
        raise OSError("libnuma.so.1: no such file")

    monkeypatch.setattr("torch.distributed.TCPStore", lambda *_args, **_options: broken())
    report = doctor.examine()
    (failed,) = [each for each in report.values["findings"] if each["state"] == "fail"]
    assert (failed["name"], failed["fact"]) == ("torch.distributed", "OSError: libnuma.so.1: no such file")
    assert failed["advice"]
    assert report.exit_code == 0


@pytest.mark.parametrize("broken", ["interception", "kernels", "settings"])
def test_where_nothing_can_be_tuned_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch, broken: str):
    """No listening to Triton, no kernel that runs in any way, or settings that no tuning can read."""

    def fails(*_args: object) -> None:
        raise DistTuneError("not Triton's own")

    if broken == "interception":
        monkeypatch.setattr(interception, "triton_patch", fails)
    elif broken == "kernels":
        monkeypatch.setattr(doctor, "_interpreter", fails)
    else:
        monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "soon")
        assert "DIST_TUNE_DEADLINE_S='soon'" in findings()["settings"]["fact"]
    text = run("doctor", code=1).stdout
    assert "Nothing can be tuned here" in text.splitlines()[-1]
    assert "fail" in text


def test_settings_and_versions_are_judged(monkeypatch: pytest.MonkeyPatch):
    """A misspelled variable is told with the nearest known name; tuning every time and untested versions are worth a word."""
    monkeypatch.setenv("DIST_TUNE_ALWAYS_TUNE", "1")
    assert findings()["settings"]["state"] == "warn"
    monkeypatch.setenv("DIST_TUNE_DEADLINE", "300")
    finding = findings()["settings"]
    assert (finding["state"], finding["advice"]) == ("warn", "did you mean DIST_TUNE_DEADLINE_S?")
    assert "DIST_TUNE_DEADLINE" in finding["fact"]
    monkeypatch.setattr("dist_tune.cli.doctor.version", {"torch": "9.1", "triton": "3.6.0"}.get)
    finding = findings()["interception"]
    assert (finding["state"], "torch 9.1 (2.11 to " in finding["fact"]) == ("warn", True)


@pytest.mark.parametrize("name", ["cache", "log"])
def test_a_folder_that_cannot_be_written_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str):
    """A file stands in its way, or it cannot be locked, as on some network file systems; the variable that moves it is named."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(f"DIST_TUNE_{name.upper()}_DIR", str(tmp_path / "file" / "folder"))
    finding = findings()[f"{name} folder"]
    assert finding["state"] == "fail"
    assert str(tmp_path / "file" / "folder") in finding["fact"]
    assert f"DIST_TUNE_{name.upper()}_DIR" in finding["advice"]

    def refused(*_args: object) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr("filelock._unix.fcntl.flock", refused)
    assert "No locks available" in findings()["Triton's disk cache"]["fact"]


# -- kernels, ranks, GPUs ----------------------------------------------------------------------------------------------


def test_the_interpreter_is_really_tried(monkeypatch: pytest.MonkeyPatch):
    """A kernel with a loop runs in it: one that came to another result, or a numpy that it cannot work with, is seen."""
    assert findings()["Triton's interpreter"]["state"] == "ok"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "numpy", None)
        finding = findings()["Triton's interpreter"]
    assert finding["state"] == "fail"
    assert "numpy" in finding["advice"]

    class Idle:
        def __getitem__(self, _grid: tuple[int, ...]) -> Any:
            return lambda *_args: None

    with pytest.raises(ArithmeticError, match="counts to 3"):
        doctor._run(Idle(), "cpu")


def test_the_kernel_compiles_for_a_gpu():
    """Triton compiles more of a function than Python runs, its annotations for one; only a GPU would tell otherwise."""
    source = ASTSource(JITFunction(doctor._sum_steps), {"total": "*i32", "n": "i32"}, {})
    assert "ptx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm


def test_a_host_without_a_name_is_found(monkeypatch: pytest.MonkeyPatch):
    """The gloo backend looks its own host up, and fails without saying what it looked for."""
    assert doctor._distributed()[0] == "ok"
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    state, fact, advice = doctor._distributed()
    assert (state, "no-such-host.invalid" in fact, "GLOO_SOCKET_IFNAME" in advice) == ("warn", True, True)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one in use; the first one cannot read its memory. No kernel runs on them."""
    known = SimpleNamespace(name="[red]H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: known)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**37 - (2**29, 2**36)[index], 2**37))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (0, 1))
    monkeypatch.setattr(doctor, "_run", lambda kernel, device: None)
    monkeypatch.setattr(
        triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    )


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_told_and_judged(monkeypatch: pytest.MonkeyPatch):
    """The memory that the driver itself takes does not count; pairs without peer access are named."""
    text = run("doctor").stdout
    assert text.count("[red]H200") == 2
    assert text.splitlines()[-1] == "Ready to tune on 2 GPUs."
    found = findings()
    assert (found["GPUs"]["state"], found["GPUs"]["fact"]) == ("warn", "in use: GPU 1 (65536 MiB)")
    assert (found["peer access"]["state"], found["peer access"]["fact"]) == ("warn", "none for 0->1")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "launches wait for each other" in findings()["GPUs"]["fact"]


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_cannot_be_used_are_no_silence(monkeypatch: pytest.MonkeyPatch):
    """TRITON_INTERPRET=1 left over in a shell is why nothing is fast; and a driver may raise."""
    with monkeypatch.context() as interpreting:
        interpreting.setenv("TRITON_INTERPRET", "1")
        found = findings()
    assert (found["Triton on the GPU"]["state"], found["Triton on the GPU"]["advice"]) == ("off", "unset it to tune for this GPU")

    def broken(*_args: object) -> None:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    monkeypatch.setattr(doctor, "_triton_on_gpu", broken)
    report = doctor.examine()
    assert "GPUs cannot be used" in report.values["verdict"]
    assert report.values["gpus"] == []
