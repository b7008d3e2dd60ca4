"""The doctor: its report, the settings and the folders, and findings from checks that raise."""

import json
import os
from pathlib import Path

import pytest
import torch

from dist_tune.cli import doctor
from dist_tune.cli.doctor import Finding, probes
from dist_tune.cli.main import main
from dist_tune.errors import DistTuneError
from dist_tune.runtime import interception
from tests.doctor_machines import found, gpu, with_gpus

# Triton 3.6 under a numpy that warns of what 2.4 forbids.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")]


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache" / "of" / "records"))
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


# -- the whole -----------------------------------------------------------------------------------------------------


def test_this_machine_can_interpret(capsys: pytest.CaptureFixture[str]):
    """Without a GPU kernels are interpreted: a verdict, exit code 0, and each check has its line."""
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("Versions", torch.__version__, "interception", "Triton's interpreter", "c10d store", "cache folder"):
        assert word in text
    assert text.splitlines()[-1] == doctor.examine().verdict


def test_untested_versions_are_a_finding(monkeypatch: pytest.MonkeyPatch):
    """The warning of a tuning names this command."""
    assert next(each for each in doctor.examine().findings if each.name == "versions").state == "ok"
    monkeypatch.setattr("dist_tune.cli.doctor.examination.version", {"torch": "9.1", "triton": "3.6.0"}.get)
    found = next(each for each in doctor.examine().findings if each.name == "versions")
    assert (found.state, "torch 9.1 (2.11 to " in found.fact) == ("warn", True)


def test_nothing_is_left_behind(tmp_path: Path):
    """Folders that were not there are not there afterwards, and the ones that were are empty."""
    (tmp_path / "logs").mkdir()
    states = {each.name: each.state for each in doctor.examine().findings}
    assert (states["cache folder"], states["log folder"], states["Triton's disk cache"]) == ("ok", "ok", "ok")
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "logs"]


def test_the_report_is_one_json_document(capsys: pytest.CaptureFixture[str]):
    """With all that the page says, and nothing else on stdout."""
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"can_tune", "verdict", "versions", "gpus", "links", "variables", "findings"}
    assert report["versions"]["torch"] == torch.__version__
    assert report["variables"]["DIST_TUNE_LOG_DIR"] == os.environ["DIST_TUNE_LOG_DIR"]
    assert {each["state"] for each in report["findings"]} <= {"ok", "warn", "off", "fail"}


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    """The other checks go on."""

    def broken() -> None:
        raise OSError("libnuma.so.1: no such file")

    monkeypatch.setattr(probes, "store", broken)
    report = doctor.examine()
    (failed,) = [each for each in report.findings if each.state == "fail"]
    assert (failed.name, failed.fact) == ("c10d store", "OSError: libnuma.so.1: no such file")
    assert failed.advice
    assert report.can_tune


@pytest.mark.parametrize("broken", ["interception", "kernels", "settings"])
def test_where_nothing_can_be_tuned_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str):
    """No listening to Triton, no kernel that runs in any way, or settings that no tuning can read."""

    def fails(*_args: object) -> None:
        raise DistTuneError("not Triton's own")

    if broken == "interception":
        monkeypatch.setattr(interception, "triton_patch", fails)
    elif broken == "kernels":
        monkeypatch.setattr(probes, "interpreter", fails)
    else:
        monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "soon")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "Nothing can be tuned here" in text.splitlines()[-1]
    assert "FAIL" in text


def test_gpus_that_cannot_be_used_are_no_silence():
    """The interpreter works, and yet it is not all well."""
    states = {"settings": "ok", "interception": "ok", "Triton on the GPU": "fail", "Triton's interpreter": "ok"}
    findings = [Finding(name, state, "") for name, state in states.items()]  # type: ignore[arg-type]  # of str
    assert "GPUs cannot be used" in doctor.Report({}, [gpu()], [[""]], {}, findings).verdict
    findings[2] = Finding("Triton on the GPU", "ok", "")
    assert doctor.Report({}, [gpu(), gpu(1)], [], {}, findings).verdict == "Ready to tune on 2 GPUs."


def test_a_driver_that_raises_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch):
    with_gpus(monkeypatch, "a")

    def broken(_index: int) -> None:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    report = doctor.examine()
    assert (report.findings[0].name, report.findings[0].fact) == ("GPUs", "RuntimeError: CUDA error: unknown error")


def test_gpus_and_links_have_their_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A report of four GPUs, in whole."""
    links = [["" if row == column else "none" if (row, column) == (2, 3) else "NV18" for column in range(4)] for row in range(4)]
    findings = [
        Finding("settings", "ok", "[red]not markup[/red]"),
        Finding("interception", "ok", ""),
        Finding("Triton on the GPU", "ok", ""),
    ]
    report = doctor.Report({"torch": "2.13"}, [gpu(index, used_mib=512) for index in range(4)], links, {}, findings)
    monkeypatch.setattr("dist_tune.cli.doctor.examination.examine", lambda: report)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.count("NVIDIA H200") == 4
    assert text.count("NV18") == 11
    assert "none" in text
    assert "[red]not markup[/red]" in text
    assert "Ready to tune on 4 GPUs." in text
    assert all(line == line.rstrip() for line in text.splitlines())


# -- settings and folders --------------------------------------------------------------------------------------------


def test_a_misspelled_variable_is_found(monkeypatch: pytest.MonkeyPatch):
    """A variable that no setting reads is reported with the nearest known name."""
    monkeypatch.setenv("DIST_TUNE_DEADLINE", "300")
    finding = found("settings")
    assert (finding.state, finding.advice) == ("warn", "did you mean DIST_TUNE_DEADLINE_S?")
    assert "DIST_TUNE_DEADLINE" in finding.fact


def test_every_variable_is_known(monkeypatch: pytest.MonkeyPatch):
    """All settings under all their names, and one that means tuning every time is worth a word."""
    for name, value in {"ALWAYS_TUNE": "0", "VERSION_CHECK": "0", "REQUIRE_CACHE": "1", "PROGRESS": "0", "LOG_LEVEL": "INFO"}.items():
        monkeypatch.setenv(f"DIST_TUNE_{name}", value)
    assert found("settings").state == "ok"
    monkeypatch.setenv("DIST_TUNE_ALWAYS_TUNE", "1")
    assert found("settings").state == "warn"


def test_an_unreadable_variable_is_told_once(monkeypatch: pytest.MonkeyPatch):
    """With its name and value; folders that follow from the settings are not known then."""
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "soon")
    findings = {each.name: each for each in doctor.examine().findings}
    assert findings["settings"].state == "fail"
    assert "DIST_TUNE_DEADLINE_S='soon'" in findings["settings"].fact
    assert findings["cache folder"].state == "off"


@pytest.mark.parametrize("name", ["cache", "log"])
def test_a_folder_that_cannot_be_written_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str):
    """A file stands in its way; the variable that moves it is named."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(f"DIST_TUNE_{name.upper()}_DIR", str(tmp_path / "file" / "folder"))
    finding = found(f"{name} folder")
    assert finding.state == "fail"
    assert str(tmp_path / "file" / "folder") in finding.fact
    assert f"DIST_TUNE_{name.upper()}_DIR" in finding.advice


def test_a_folder_that_cannot_be_locked_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As on a network file system without locks."""

    def refused(*_args: object) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr("filelock._unix.fcntl.flock", refused)
    state, fact, _ = probes.folder(tmp_path, "X", "")
    assert state == "fail"
    assert "No locks available" in fact
    assert list(tmp_path.iterdir()) == []
