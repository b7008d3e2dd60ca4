"""Environment variables that hold anything: settings within their limits, or one error line that names the variable."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.cache.store import Cache
from dist_tune.settings import Settings, SettingsError, read_settings
from tests.cached_records import record

pytestmark = pytest.mark.once

NAMES = [
    "DIST_TUNE_DEADLINE_S", "DIST_TUNE_LOG_DIR", "DIST_TUNE_LOG_LEVEL", "DIST_TUNE_VERBOSITY", "DIST_TUNE_PROGRESS", "DIST_TUNE_CACHE_DIR",
    "DIST_TUNE_ALWAYS_TUNE", "DIST_TUNE_VERSION_CHECK", "DIST_TUNE_REQUIRE_CACHE", "DIST_TUNE_CACHE_SHARED",
    "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "dist_tune_deadline_s", "Dist_Tune_Progress", "DIST_TUNE_", "DIST",
]  # fmt: skip
TEXTS = (
    st.text(max_size=20)
    | st.binary(max_size=10).map(os.fsdecode)
    | st.sampled_from(
        ["1e999", "-0.0", "1_0", "٣", "0x10", " 1 ", "9" * 5000, "x" * 100_000, "\x1b[2J\nwinner=1", "TRACE\n", "true ", "{}", "~no/x"]
    )
).map(lambda text: text.replace("\0", ""))  # fmt: skip
ENVIRONMENTS = st.dictionaries(st.sampled_from(NAMES), TEXTS, max_size=4)


@given(ENVIRONMENTS)
def test_any_environment_gives_settings_or_one_line(environment: dict[str, str]):
    """A tuning goes on with defaults in the place of what cannot be read."""
    with mock.patch.dict(os.environ, environment), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in set(os.environ) - set(environment):
            if "DIST" in name.upper():
                del os.environ[name]
        read = read_settings()
        assert 0 < read.deadline_s <= 86400
        assert read.log_level.upper() in ("TRACE", "DEBUG", "INFO", "WARNING")
        with suppress(SettingsError):
            Settings()
            return
        with pytest.raises(SettingsError) as caught:
            Settings()
    error = caught.value
    assert error.names
    assert str(error).isprintable()
    assert len(str(error)) < 2000


@pytest.mark.parametrize("folder", ["x" * 5000, "\udcff" * 300, "/dev/null", "/proc/self/x", "~nobody-here/x", "/dev/zero/x"], ids=ascii)
def test_an_impossible_cache_folder_costs_warnings(folder: str):
    """Nothing is found and nothing kept."""
    with mock.patch.dict(os.environ, {"DIST_TUNE_CACHE_DIR": folder}), warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        cache = Cache(read_settings().cache_dir)
        assert cache.store(record()) is None
        assert cache.find(record().cache_key) is None
        assert cache.entries() == []
