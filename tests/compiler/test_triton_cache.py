"""Kernels that need too much shared memory are remembered in Triton's cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton
from triton.runtime.cache import FileCacheManager, get_cache_manager

from dist_tune.compiler.triton_cache import known_need, remember_need

KEY = "ab" * 32


class Elsewhere(FileCacheManager):  # type: ignore[misc]  # Triton is not typed
    """A cache manager that cannot be asked."""

    def get_file(self, filename: str) -> str | None:
        raise ConnectionError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's disk cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_the_need_is_remembered_in_the_kernel_s_folder(cache: Path):
    assert known_need(KEY) is None
    remember_need(KEY, 300_000)
    assert known_need(KEY) == 300_000
    assert Path(get_cache_manager(KEY).cache_dir, "dist_tune.json").exists()
    assert known_need("cd" * 32) is None
    assert known_need("") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"shared_bytes": "300000"}', '{"shared_bytes": true}', "\xff"])
def test_what_cannot_be_read_is_not_known(text: str, cache: Path):
    get_cache_manager(KEY).put(text.encode("latin-1"), "dist_tune.json")
    assert known_need(KEY) is None


@pytest.mark.parametrize("folder", ["", "/dev/null/cache"])
def test_a_cache_that_cannot_be_used_remembers_nothing(folder: str):
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        remember_need(KEY, 300_000)
        assert known_need(KEY) is None


def test_a_cache_manager_of_the_user_s_is_not_asked(cache: Path):
    """It may be far away, and may raise anything."""
    remember_need(KEY, 300_000)
    with triton.knobs.cache.scope():
        triton.knobs.cache.manager_class = Elsewhere
        remember_need(KEY, 400_000)
        assert known_need(KEY) is None
    assert known_need(KEY) == 300_000


def test_with_a_hook_in_the_compiler_nothing_is_remembered(cache: Path):
    """It may make another kernel of the same key, that needs more or less."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = lambda *args: ("", "")
        remember_need(KEY, 300_000)
    assert known_need(KEY) is None
