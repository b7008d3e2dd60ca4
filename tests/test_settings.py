"""The environment variables, by name."""

import math
import os
import warnings
from pathlib import Path

import pytest
from pydantic import ValidationError

from dist_tune.settings import Settings, SettingsError, read_settings, unread_variables, variables_read

pytestmark = pytest.mark.once

VALUES = {
    "DEADLINE_S": ("2.5", 2.5), "LOG_DIR": ("/x/y", Path("/x/y")), "LOG_LEVEL": ("TRACE", "TRACE"),
    "PROGRESS": ("0", False), "VERBOSITY": ("quiet", "quiet"),
    "CACHE_DIR": ("/x/cache", Path("/x/cache")), "ALWAYS_TUNE": ("1", True), "VERSION_CHECK": ("0", False), "REQUIRE_CACHE": ("1", True),
    "CACHE_SHARED": ("1", True), "ISOLATE": ("1", True),
}  # fmt: skip
ALIASES = {"ALWAYS_TUNE": "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "VERSION_CHECK": "TRITON_DIST_AUTOTUNE_VERSION_CHECK"}
"""Names that programs have from elsewhere."""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch):
    """Not even those that all tests have."""
    for name in (*(f"DIST_TUNE_{name}" for name in VALUES), *ALIASES.values()):
        monkeypatch.delenv(name, raising=False)


def test_defaults_need_no_environment():
    assert Settings().model_dump() == {
        "deadline_s": 30.0, "log_dir": Path(".autotune_logs"), "log_level": "DEBUG", "progress": None, "verbosity": None,
        "cache_dir": Path("~/.dist_tune/autotune"), "cache_path": "", "always_tune": False, "cache_shared": False,
        "version_check": True, "require_cache": False, "isolate": False,
    }  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_each_setting_has_its_variable(monkeypatch: pytest.MonkeyPatch, name: str):
    """DIST_TUNE_ and the field in capitals; the others keep their defaults, and a name without the prefix is not ours."""
    text, expected = VALUES[name]
    monkeypatch.setenv(name, text)
    assert getattr(Settings(), name.lower()) != expected
    monkeypatch.setenv(f"DIST_TUNE_{name}", text)
    assert Settings().model_dump() == {**Settings.model_construct().model_dump(), name.lower(): expected}


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_of_a_setting(monkeypatch: pytest.MonkeyPatch, name: str):
    """They mean the same; where both are set, ours counts."""
    text, expected = VALUES[name]
    monkeypatch.setenv(ALIASES[name], text)
    assert Settings().model_dump() == {**Settings.model_construct().model_dump(), name.lower(): expected}
    monkeypatch.setenv(f"DIST_TUNE_{name}", str(int(not expected)))
    assert getattr(Settings(), name.lower()) is not expected


def test_the_environment_is_read_late(monkeypatch: pytest.MonkeyPatch):
    """A variable that a launcher sets after the import counts, and an object once made does not change."""
    before = Settings()
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "7")
    assert (before.deadline_s, Settings().deadline_s) == (30.0, 7.0)
    with pytest.raises(ValidationError, match="frozen"):
        before.deadline_s = 1.0


def test_a_misspelt_variable_is_told(monkeypatch: pytest.MonkeyPatch):
    """Once, with the name that was meant; a variable that a script of kernels/ reads is no mistake."""
    monkeypatch.setattr("dist_tune.files._told", set())
    monkeypatch.setenv("DIST_TUNE_CONFIG_DIR", "/x")
    monkeypatch.setenv("DIST_TUNE_CACHE_DRI", "/x")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        read_settings()
        read_settings()
    assert [str(each.message) for each in told] == ["dist_tune: DIST_TUNE_CACHE_DRI is not read: did you mean DIST_TUNE_CACHE_DIR?"]
    assert unread_variables(["DIST_TUNE_QUX"])[0].endswith("QUX is not read: known are " + ", ".join(variables_read()))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DEADLINE_S", "soon"),
        ("DEADLINE_S", "0"),
        ("DEADLINE_S", "-1"),
        ("DEADLINE_S", "nan"),
        ("LOG_LEVEL", "LOUD"),
        ("PROGRESS", "perhaps"),
        ("ALWAYS_TUNE", "perhaps"),
        ("VERSION_CHECK", "2"),
        ("REQUIRE_CACHE", "maybe"),
    ],
)
def test_an_unreadable_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str):
    """As it is spelled in the environment, with what it holds."""
    monkeypatch.setenv(f"DIST_TUNE_{name}", text)
    with pytest.raises(ValueError) as caught:
        Settings()
    assert f"DIST_TUNE_{name}" in str(caught.value)
    assert text in str(caught.value)


def test_the_log_folder_may_be_in_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As the cache's folder, also where no shell has expanded it: no folder is called ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", "~/logs")
    assert Settings().log_dir == tmp_path / "logs"


def test_a_deadline_is_finite(monkeypatch: pytest.MonkeyPatch):
    """No timeout of a process group can be infinite, and a meeting without an end is a hang."""
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", str(math.inf))
    with pytest.raises(ValueError):
        Settings()


@pytest.mark.parametrize("name", [*(f"DIST_TUNE_{name}" for name in VALUES), *ALIASES.values()])
def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch, name: str):
    """As a launcher exports it that has nothing to say; another name of the setting counts then."""
    monkeypatch.setenv(name, "")
    assert Settings() == Settings.model_construct()
    if name.removeprefix("DIST_TUNE_") in ALIASES:
        monkeypatch.setenv(ALIASES[name.removeprefix("DIST_TUNE_")], VALUES[name.removeprefix("DIST_TUNE_")][0])
        assert Settings() != Settings.model_construct()


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("DIST_TUNE_DEADLINE_S", "-1", "a number of seconds above 0, at most 86400"),
        ("DIST_TUNE_LOG_LEVEL", "LOUD", "TRACE, DEBUG, INFO or WARNING"),
        ("DIST_TUNE_PROGRESS", "perhaps", "1, 0, true, false, yes, no, on or off"),
        ("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "perhaps", "1, 0, true, false, yes, no, on or off"),
    ],
)
def test_a_bad_value_is_one_line_with_what_is_allowed(monkeypatch: pytest.MonkeyPatch, name: str, text: str, allowed: str):
    monkeypatch.setenv(name, text)
    with pytest.raises(SettingsError) as caught:
        Settings()
    assert str(caught.value) == f"{name}={text!r} cannot be read: need {allowed}"


def test_a_tuning_goes_on_with_defaults_and_one_warning(monkeypatch: pytest.MonkeyPatch):
    """Of the variables that cannot be read; the others count. The warning comes once, also where warnings are errors."""
    for name, text in {"DEADLINE_S": "soon", "PROGRESS": "perhaps", "ALWAYS_TUNE": "1"}.items():
        monkeypatch.setenv(f"DIST_TUNE_{name}", text)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        settings = [read_settings(), read_settings()]
    assert [(each.deadline_s, each.shown, each.always_tune) for each in settings] == [(30.0, "normal", True)] * 2
    (text,) = [str(each.message) for each in warned]
    assert text.startswith("dist_tune: DIST_TUNE_DEADLINE_S='soon' cannot be read: need a number")
    assert "DIST_TUNE_PROGRESS='perhaps'" in text
    assert "\n" not in text


def test_a_warning_that_is_an_error_ends_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """It is written to the terminal instead."""
    monkeypatch.setenv("DIST_TUNE_LOG_LEVEL", "LOUDER")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_settings().log_level == "DEBUG"
    assert "DIST_TUNE_LOG_LEVEL='LOUDER'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, "normal"),
        ({"DIST_TUNE_PROGRESS": "0"}, "quiet"),
        ({"DIST_TUNE_PROGRESS": "1"}, "normal"),
        ({"DIST_TUNE_VERBOSITY": "Quiet"}, "quiet"),
        ({"DIST_TUNE_VERBOSITY": "verbose"}, "verbose"),
        ({"DIST_TUNE_VERBOSITY": "normal", "DIST_TUNE_PROGRESS": "0"}, "normal"),
    ],
)
def test_one_variable_says_how_much_is_shown(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], shown: str):
    """And the older one counts where that is unset."""
    for name in ("DIST_TUNE_VERBOSITY", "DIST_TUNE_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Settings().shown == shown


def test_several_cache_folders(monkeypatch: pytest.MonkeyPatch):
    """The first is the one that is written, in place of DIST_TUNE_CACHE_DIR; without several that one is all."""
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", "/c")
    assert Settings().cache_folders == [Path("/c")]
    monkeypatch.setenv("DIST_TUNE_CACHE_PATH", os.pathsep.join(["", "/a", "", "~/b"]))
    assert (Settings().cache_dir, Settings().cache_folders) == (Path("/a"), [Path("/a"), Path("~/b")])
