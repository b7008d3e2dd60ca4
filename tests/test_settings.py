"""The environment variables, by name, and environments that hold anything."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune import autotune, contextual_autotune
from dist_tune.settings import (
    Settings,
    SettingsError,
    read_settings,
    unread_variables,
    variables_read,
)

OURS, THEIRS = "DIST_TUNE_", "TRITON_DIST_AUTOTUNE_"
DEFAULTS = {
    "deadline_s": 30.0,
    "log_dir": Path(".autotune_logs"),
    "log_level": "INFO",
    "verbosity": "normal",
    "cache_dir": "~/.dist_tune/autotune",
    "cache_path": "",
    "always_tune": False,
    "cache_shared": False,
    "version_check": True,
    "mode": None,
}
ENVIRONMENTS: list[tuple[str, dict[str, Any]]] = [
    (
        "ALWAYS_TUNE=1 DIST_TUNE_ALWAYS_TUNE= DIST_TUNE_DEADLINE_S=",
        {},
    ),  # without the prefix, or empty
    (
        (
            "DIST_TUNE_DEADLINE_S=2.5 DIST_TUNE_LOG_LEVEL=TRACE DIST_TUNE_LOG_DIR=/x/y"
            " DIST_TUNE_CACHE_DIR=/x"
        ),
        {"deadline_s": 2.5, "log_level": "TRACE", "log_dir": Path("/x/y"), "cache_dir": "/x"},
    ),
    (
        "DIST_TUNE_VERBOSITY=quiet DIST_TUNE_CACHE_SHARED=1",
        {"verbosity": "quiet", "cache_shared": True},
    ),
    (
        "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE=1 TRITON_DIST_AUTOTUNE_VERSION_CHECK=0",
        {"always_tune": True, "version_check": False},
    ),
    (
        "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE=1 DIST_TUNE_ALWAYS_TUNE=0",
        {},
    ),  # where both are set, ours counts
    ("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE=1 DIST_TUNE_ALWAYS_TUNE=", {"always_tune": True}),
]
Set = Callable[[str], None]


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets variables, as in "DIST_TUNE_MODE=tune" (of a value with blanks with underscores), and
    unsets all others of ours.
    """

    def put(texts: str) -> None:
        for name in [name for name in os.environ if name.upper().startswith((OURS, THEIRS))]:
            monkeypatch.delenv(name)
        for text in texts.split():
            name, _, value = text.partition("=")
            monkeypatch.setenv(name, value.replace("_", " ") if value.startswith("_") else value)

    put("")
    return put


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings, each of which tests/test_files.py gives once."""
    texts: list[str] = []
    monkeypatch.setattr("dist_tune.settings.warn_once", texts.append)
    return texts


@pytest.mark.parametrize(("environment", "changed"), ENVIRONMENTS)
def test_each_setting_has_its_variable(setting: Set, environment: str, changed: dict[str, Any]):
    """DIST_TUNE_ and the field in capitals, or a name that programs have from elsewhere; all others
    keep their defaults.
    """
    setting(environment)
    # Set after the import, as by a launcher.
    assert Settings().model_dump() == {**DEFAULTS, **changed}


def test_a_misspelt_variable_is_told(setting: Set, told: list[str]):
    """With the name that was meant; a variable that a script of kernels/ reads is no mistake."""
    setting("DIST_TUNE_CONFIG_DIR=/x DIST_TUNE_CACHE_DRI=/x")
    read_settings()
    assert told == ["dist_tune: DIST_TUNE_CACHE_DRI is not read: did you mean DIST_TUNE_CACHE_DIR?"]
    assert unread_variables(["DIST_TUNE_QUX"])[0].endswith(
        "QUX is not read: known are " + ", ".join(variables_read())
    )


@pytest.mark.parametrize(
    ("name", "texts", "allowed"),
    [
        ("DIST_TUNE_DEADLINE_S", "soon 0 -1 nan inf", "a number of seconds above 0, at most 86400"),
        ("DIST_TUNE_LOG_LEVEL", "LOUD", "TRACE, DEBUG, INFO or WARNING"),
        ("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "perhaps 2", "1, 0, true, false, yes, no, on or off"),
    ],
)
def test_a_bad_value_is_one_line_with_what_is_allowed(
    setting: Set, name: str, texts: str, allowed: str
):
    for text in texts.split():
        setting(f"{name}={text}")
        with pytest.raises(SettingsError) as caught:
            Settings()
        assert str(caught.value) == f"{name}={text!r} cannot be read: need {allowed}"


def test_the_log_s_folder_may_be_in_the_home_directory(
    setting: Set, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", "/h")
    setting("DIST_TUNE_LOG_DIR=~/logs")
    assert Settings().log_dir == Path("/h/logs")


HOME = "~/.dist_tune/autotune"


@pytest.mark.parametrize(
    ("path", "folder", "folders"),
    [
        ("", "/c", ["/c"]),
        ("", "gs://c", [HOME, "gs://c"]),
        (":/a::~/b", "/c", ["/a", "~/b"]),
        (
            "a:s3://b/r:http://localhost:8080/r:simplecache::s3://b/r:memory://:b",
            "",
            ["a", "s3://b/r", "http://localhost:8080/r", "simplecache::s3://b/r", "memory://", "b"],
        ),
        ("x/my.s3:/b:c://d", "", ["x/my.s3", "/b", "c", "//d"]),
        ("s3://b/c:/a", "/c", ["/c", "s3://b/c", "/a"]),
        ("s3://b/c:/a", "gs://c", [HOME, "s3://b/c", "/a"]),
        ("package://d/e:f", "/c", ["/c", "package://d/e", "f"]),
    ],
)
def test_of_several_folders_of_the_cache_the_first_path_is_written(
    setting: Set, path: str, folder: str, folders: list[str]
):
    """And a URL, which stays whole, if it stands first."""
    setting(f"DIST_TUNE_CACHE_PATH={path} DIST_TUNE_CACHE_DIR={folder}")
    assert Settings().cache_folders == folders
    assert Settings().is_cache_remote == ((path or folder).startswith(("s3:", "gs:")))


def test_a_tuning_goes_on_with_defaults_and_one_warning(setting: Set, told: list[str]):
    """Of the variables that cannot be read; the others count."""
    setting("DIST_TUNE_DEADLINE_S=soon DIST_TUNE_VERBOSITY=perhaps DIST_TUNE_ALWAYS_TUNE=1")
    settings = read_settings()
    assert (settings.deadline_s, settings.shown, settings.always_tune) == (30.0, "normal", True)
    (text,) = told
    assert text.startswith("dist_tune: DIST_TUNE_DEADLINE_S='soon' cannot be read: need a number")
    assert ("DIST_TUNE_VERBOSITY='perhaps'" in text, "\n" in text) == (True, False)


def test_the_case_of_words_does_not_matter():
    """Of a mode, which says whether anything is tuned, and of how much is shown."""
    assert [Settings(verbosity=each).shown for each in ("Quiet", "verbose")] == ["quiet", "verbose"]
    modes = [Settings(mode=each) for each in (None, "Require", "cached", "FIRST")]
    assert [each.effective_mode for each in modes] == ["tune", "require", "cached", "first"]
    assert [each.may_tune for each in modes] == [True, True, False, False]


MODES = "need tune, cached, require or first"
MISSPELT = f"""
DIST_TUNE_MODE=off                                    DIST_TUNE_MODE='off' cannot be read: {MODES}.
DIST_TUNE_MODE=cachd                                  DIST_TUNE_MODE='cachd' cannot be read: {MODES} (did you mean cached?).
DIST_TUNE_MODE='Requre' DIST_TUNE_DEADLINE_S=soon     {MODES} (did you mean require?)
DIST_TUNE_MOD=cached                                  DIST_TUNE_MOD is not read: did you mean DIST_TUNE_MODE?.
DIST_TUNE_Modes=_requir DIST_TUNE_ALWAYS_TUNE=1       DIST_TUNE_Modes is not read: did you mean DIST_TUNE_MODE?
DIST_TUNE_MODS=require DIST_TUNE_MODE=                DIST_TUNE_MODS is not read: did you mean DIST_TUNE_MODE?
"""  # noqa: E501


@pytest.mark.parametrize(
    ("environment", "line"), [re.split("   +", line) for line in MISSPELT.strip().splitlines()]
)
def test_a_misspelt_variable_that_may_forbid_to_tune_is_an_error(
    setting: Set, environment: str, line: str
):
    """One line with the nearest name, where a step is decorated; what merely says how to tune is
    still a default or a warning.
    """
    setting(environment)
    for decorate in (contextual_autotune(), autotune([{"i": 1}, {"i": 2}], lambda x: x)):
        with pytest.raises(SettingsError) as caught:
            decorate(lambda x, i=0: x)
        assert (line in str(caught.value), str(caught.value).isprintable()) == (True, True), str(
            caught.value
        )


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ("DIST_TUNE_MODE=cached DIST_TUNE_MODS=requir", "cached"),
        ("DIST_TUNE_MODE=_First_ DIST_TUNE_MOD=require", "first"),
        ("DIST_TUNE_Mode=cached", "cached"),
        ("DIST_TUNE_MODEL=llama", "tune"),
        ("DIST_TUNE_MOD=tune", "tune"),
        ("DIST_TUNE_REQUIRE_CACHE=1", "tune"),
        ("DIST_TUNE_CACHE_SHARED=ture DIST_TUNE_VERSION_CHECK=flase", "tune"),
    ],
)
def test_what_another_variable_says_or_nobody_forbids_is_no_error(
    setting: Set, environment: str, mode: str
):
    """Where a mode can be read that one counts, and variables of other programs and versions cost a
    warning at most.
    """
    setting(environment)
    contextual_autotune()(lambda x: x)
    assert read_settings().effective_mode == mode


NAMES = [
    *variables_read(),
    f"{THEIRS}ALWAYS_TUNE",
    "dist_tune_deadline_s",
    "Dist_Tune_Verbosity",
    "DIST_TUNE_",
    "DIST",
]
TEXTS = (
    st.text(max_size=20)
    | st.binary(max_size=10).map(os.fsdecode)
    | st.sampled_from(
        [
            "1e999",
            "-0.0",
            "1_0",
            "٣",
            "0x10",
            " 1 ",
            "9" * 5000,
            "x" * 100_000,
            "\x1b[2J\nwinner=1",
            "TRACE\n",
            "true ",
            "{}",
            "~no/x",
        ]
    )
).map(lambda text: text.replace("\0", ""))


@given(st.dictionaries(st.sampled_from(NAMES), TEXTS, max_size=4))
def test_any_environment_gives_settings_or_one_line(environment: dict[str, str]):
    """A tuning goes on with defaults in the place of what cannot be read."""
    with mock.patch.dict(os.environ, environment), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = read_settings()
        assert 0 < read.deadline_s <= 86400
        assert read.log_level.upper() in ("TRACE", "DEBUG", "INFO", "WARNING")
        with suppress(SettingsError):
            Settings()
            return
        with pytest.raises(SettingsError) as caught:
            Settings()
    assert (
        caught.value.names != (),
        str(caught.value).isprintable(),
        len(str(caught.value)) < 2000,
    ) == (True, True, True)
