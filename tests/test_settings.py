"""The environment variables, by name, and environments that hold anything."""

from __future__ import annotations

import os
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
from dist_tune.settings import Settings, SettingsError, read_settings, unread_variables, variables_read

OURS, THEIRS = "DIST_TUNE_", "TRITON_DIST_AUTOTUNE_"
DEFAULTS = {
    "deadline_s": 30.0, "log_dir": Path(".autotune_logs"), "log_level": "INFO", "progress": None, "verbosity": None,
    "cache_dir": "~/.dist_tune/autotune", "cache_path": "", "always_tune": False, "cache_shared": False,
    "version_check": True, "require_cache": False, "mode": None,
}  # fmt: skip
ENVIRONMENTS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"ALWAYS_TUNE": "1", f"{OURS}ALWAYS_TUNE": "", f"{OURS}DEADLINE_S": ""}, {}),  # without the prefix, or empty
    (
        {f"{OURS}DEADLINE_S": "2.5", f"{OURS}LOG_LEVEL": "TRACE", f"{OURS}LOG_DIR": "/x/y", f"{OURS}CACHE_DIR": "/x"},
        {"deadline_s": 2.5, "log_level": "TRACE", "log_dir": Path("/x/y"), "cache_dir": "/x"},
    ),
    ({f"{OURS}VERBOSITY": "quiet", f"{OURS}PROGRESS": "0"}, {"verbosity": "quiet", "progress": False}),
    ({f"{OURS}REQUIRE_CACHE": "1", f"{OURS}CACHE_SHARED": "1"}, {"require_cache": True, "cache_shared": True}),
    ({f"{THEIRS}ALWAYS_TUNE": "1", f"{THEIRS}VERSION_CHECK": "0"}, {"always_tune": True, "version_check": False}),
    ({f"{THEIRS}ALWAYS_TUNE": "1", f"{OURS}ALWAYS_TUNE": "0"}, {}),  # where both are set, ours counts
    ({f"{THEIRS}ALWAYS_TUNE": "1", f"{OURS}ALWAYS_TUNE": ""}, {"always_tune": True}),
]


Set = Callable[..., None]


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets variables of ours, and unsets all others, even those that all tests have."""

    def put(**texts: str) -> None:
        for name in [name for name in os.environ if name.upper().startswith((OURS, THEIRS))]:
            monkeypatch.delenv(name)
        for name, text in texts.items():
            monkeypatch.setenv(name if name.startswith(THEIRS) else f"{OURS}{name}", text)

    put()
    return put


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings, each of which tests/test_files.py gives once."""
    texts: list[str] = []
    monkeypatch.setattr("dist_tune.settings.warn_once", texts.append)
    return texts


@pytest.mark.parametrize(("environment", "changed"), ENVIRONMENTS)
def test_each_setting_has_its_variable(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], changed: dict[str, Any]):
    """DIST_TUNE_ and the field in capitals, or a name that programs have from elsewhere; all others keep their defaults."""
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert Settings().model_dump() == {**DEFAULTS, **changed}  # set after the import, as by a launcher


def test_a_misspelt_variable_is_told(setting: Set, told: list[str]):
    """With the name that was meant; a variable that a script of kernels/ reads is no mistake."""
    setting(CONFIG_DIR="/x", CACHE_DRI="/x")
    read_settings()
    assert told == ["dist_tune: DIST_TUNE_CACHE_DRI is not read: did you mean DIST_TUNE_CACHE_DIR?"]
    assert unread_variables(["DIST_TUNE_QUX"])[0].endswith("QUX is not read: known are " + ", ".join(variables_read()))


@pytest.mark.parametrize(
    ("name", "texts", "allowed"),
    [
        ("DIST_TUNE_DEADLINE_S", "soon 0 -1 nan inf", "a number of seconds above 0, at most 86400"),
        ("DIST_TUNE_LOG_LEVEL", "LOUD", "TRACE, DEBUG, INFO or WARNING"),
        ("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "perhaps 2", "1, 0, true, false, yes, no, on or off"),
    ],
)
def test_a_bad_value_is_one_line_with_what_is_allowed(monkeypatch: pytest.MonkeyPatch, name: str, texts: str, allowed: str):
    for text in texts.split():
        monkeypatch.setenv(name, text)
        with pytest.raises(SettingsError) as caught:
            Settings()
        assert str(caught.value) == f"{name}={text!r} cannot be read: need {allowed}"


def test_the_log_s_folder_may_be_in_the_home_directory(setting: Set, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/h")
    setting(LOG_DIR="~/logs")
    assert Settings().log_dir == Path("/h/logs")


HOME = "~/.dist_tune/autotune"


@pytest.mark.parametrize(
    ("path", "folder", "folders"),
    [
        ("", "/c", ["/c"]),
        ("", "gs://c", [HOME, "gs://c"]),
        (":/a::~/b", "/c", ["/a", "~/b"]),
        ("a:s3://b/r:http://localhost:8080/r:simplecache::s3://b/r:memory://:b", "",
         ["a", "s3://b/r", "http://localhost:8080/r", "simplecache::s3://b/r", "memory://", "b"]),
        ("x/my.s3:/b:c://d", "", ["x/my.s3", "/b", "c", "//d"]),
        ("s3://b/c:/a", "/c", ["/c", "s3://b/c", "/a"]),
        ("s3://b/c:/a", "gs://c", [HOME, "s3://b/c", "/a"]),
        ("package://d/e:f", "/c", ["/c", "package://d/e", "f"]),
    ],
)  # fmt: skip
def test_of_several_folders_of_the_cache_the_first_path_is_written(setting: Set, path: str, folder: str, folders: list[str]):
    """And a URL, which stays whole, if it stands first."""
    setting(CACHE_PATH=path, CACHE_DIR=folder)
    assert Settings().cache_folders == folders
    assert Settings().is_cache_remote == ((path or folder).startswith(("s3:", "gs:")))


def test_a_tuning_goes_on_with_defaults_and_one_warning(setting: Set, told: list[str]):
    """Of the variables that cannot be read; the others count."""
    setting(DEADLINE_S="soon", PROGRESS="perhaps", ALWAYS_TUNE="1")
    settings = read_settings()
    assert (settings.deadline_s, settings.shown, settings.always_tune) == (30.0, "normal", True)
    (text,) = told
    assert text.startswith("dist_tune: DIST_TUNE_DEADLINE_S='soon' cannot be read: need a number")
    assert ("DIST_TUNE_PROGRESS='perhaps'" in text, "\n" in text) == (True, False)


def test_one_variable_says_how_much_is_shown():
    """And the older one counts where that is unset."""
    for verbosity, shown in {None: "quiet", "Quiet": "quiet", "verbose": "verbose", "normal": "normal"}.items():
        assert Settings(verbosity=verbosity, progress=False).shown == shown
    assert [Settings(progress=each).shown for each in (None, True)] == ["normal", "normal"]


def test_the_older_name_of_a_mode_says_the_new_one(setting: Set, told: list[str]):
    """Beside the new one it has no effect."""
    assert [Settings(mode=each, require_cache=True).effective_mode for each in (None, "Cached", "tune")] == ["require", "cached", "tune"]
    assert [Settings(mode=each).may_tune for each in (None, "require", "cached", "FIRST")] == [True, True, False, False]
    for mode in ("", "tune"):
        setting(MODE=mode, REQUIRE_CACHE="1")
        read_settings()
    older = "dist_tune: DIST_TUNE_REQUIRE_CACHE=1 is the older name of DIST_TUNE_MODE=require"
    assert told == [older, f"{older}, and has no effect beside it"]


MODE_WORDS = "need tune, cached, require or first"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"MODE": "off"}, f"DIST_TUNE_MODE='off' cannot be read: {MODE_WORDS}."),
        ({"MODE": "cachd"}, f"DIST_TUNE_MODE='cachd' cannot be read: {MODE_WORDS} (did you mean cached?)."),
        ({"MODE": "'Requre'", "DEADLINE_S": "soon"}, f"{MODE_WORDS} (did you mean require?)"),
        ({"REQUIRE_CACHE": "ture"}, "DIST_TUNE_REQUIRE_CACHE='ture' cannot be read: need 1, 0, true"),
        ({"MOD": "cached"}, "DIST_TUNE_MOD is not read: did you mean DIST_TUNE_MODE?."),
        ({"Modes": " requir", "ALWAYS_TUNE": "1"}, "DIST_TUNE_Modes is not read: did you mean DIST_TUNE_MODE?"),
        ({"REQUIRECACHE": "1", "MODE": ""}, "DIST_TUNE_REQUIRECACHE is not read: did you mean DIST_TUNE_REQUIRE_CACHE?"),
    ],
)
def test_a_misspelt_variable_that_may_forbid_to_tune_is_an_error(setting: Set, environment: dict[str, str], told: str):
    """One line with the nearest name, where a step is decorated; what merely says how to tune is still a default or a warning."""
    setting(**environment)
    for decorate in (contextual_autotune(), autotune([{"i": 1}, {"i": 2}], lambda x: x)):
        with pytest.raises(SettingsError) as caught:
            decorate(lambda x, i=0: x)
        assert (told in str(caught.value), str(caught.value).isprintable()) == (True, True), str(caught.value)


@pytest.mark.parametrize(
    "environment",
    [
        {"MODE": "cached", "REQUIRE_CACHE": "ture"}, {"MODE": " First ", "MOD": "require"}, {"REQUIRE_CACHE": "1", "MODE": "cachd"},
        {"MODEL": "llama"}, {"MOD": "tune"}, {"REQUIRE_CACH": "0"}, {"CACHE_SHARED": "ture", "VERSION_CHECK": "flase"}, {"Mode": "cached"},
    ],
)  # fmt: skip
@pytest.mark.usefixtures("told")
def test_what_another_variable_says_or_nobody_forbids_is_no_error(setting: Set, environment: dict[str, str]):
    """Where a mode can be read that one counts, and variables of other programs and versions cost a warning at most."""
    setting(**environment)
    contextual_autotune()(lambda x: x)
    mode = environment.get("MODE", environment.get("Mode", "")).strip().lower()
    assert read_settings().effective_mode == ("require" if environment.get("REQUIRE_CACHE") == "1" else mode or "tune")


NAMES = [*variables_read(), f"{THEIRS}ALWAYS_TUNE", "dist_tune_deadline_s", "Dist_Tune_Progress", "DIST_TUNE_", "DIST"]
TEXTS = (
    st.text(max_size=20)
    | st.binary(max_size=10).map(os.fsdecode)
    | st.sampled_from(
        ["1e999", "-0.0", "1_0", "٣", "0x10", " 1 ", "9" * 5000, "x" * 100_000, "\x1b[2J\nwinner=1", "TRACE\n", "true ", "{}", "~no/x"]
    )
).map(lambda text: text.replace("\0", ""))  # fmt: skip


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
    assert (caught.value.names != (), str(caught.value).isprintable(), len(str(caught.value)) < 2000) == (True, True, True)
