"""The environment variables, by name."""

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from dist_tune.settings import Settings

pytestmark = pytest.mark.once

VALUES = {
    "DEADLINE_S": ("2.5", 2.5), "LOG_DIR": ("/x/y", Path("/x/y")), "LOG_LEVEL": ("TRACE", "TRACE"), "PROGRESS": ("0", False),
    "CACHE_DIR": ("/x/cache", Path("/x/cache")), "ALWAYS_TUNE": ("1", True), "VERSION_CHECK": ("0", False), "REQUIRE_CACHE": ("1", True),
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
        "deadline_s": 30.0, "log_dir": Path(".autotune_logs"), "log_level": "DEBUG", "progress": True,
        "cache_dir": Path("~/.dist_tune/autotune"), "always_tune": False, "version_check": True, "require_cache": False,
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
    """What a launcher sets after the import counts, and an object once made does not change."""
    before = Settings()
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", "7")
    assert (before.deadline_s, Settings().deadline_s) == (30.0, 7.0)
    with pytest.raises(ValidationError, match="frozen"):
        before.deadline_s = 1.0


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


def test_a_deadline_is_finite(monkeypatch: pytest.MonkeyPatch):
    """No timeout of a process group can be infinite, and a meeting without an end is a hang."""
    monkeypatch.setenv("DIST_TUNE_DEADLINE_S", str(math.inf))
    with pytest.raises(ValueError):
        Settings()
