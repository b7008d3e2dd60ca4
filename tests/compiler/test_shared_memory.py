"""Kernels that need too much shared memory: found out before they are assembled, and remembered on disk."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.cache import FileCacheManager, get_cache_manager

from dist_tune.compiler.shared_memory import early_check, known_need, remember_need, shared_limit

KEY = "ab" * 32
OWN = CUDABackend.make_ptx


class Elsewhere(FileCacheManager):  # type: ignore[misc]  # Triton is not typed
    """A cache manager that cannot be asked."""

    def get_file(self, filename: str) -> str | None:
        raise ConnectionError


@pytest.fixture
def ptx(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that reach Triton."""
    calls: list[Any] = []
    monkeypatch.setattr(CUDABackend, "make_ptx", lambda *args: calls.append(args))
    return calls


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's disk cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def make(shared: Any) -> Any:
    return CUDABackend.make_ptx("self", "src", {"shared": shared}, "opt", 90)


def test_what_needs_more_than_the_limit_ends_before_ptx(ptx: list[Any]):
    """With the error that Triton raises at loading; what fits, and what does not say what it needs, goes on to Triton."""
    with early_check():
        with shared_limit(100), pytest.raises(triton.OutOfResources, match="shared memory, Required: 101, Hardware limit: 100"):
            make(101)
        with shared_limit(100):
            make(100)
            make(None)
        make(101)
        with shared_limit(None):
            make(101)
    assert ptx == [("self", "src", {"shared": shared}, "opt", 90) for shared in (100, None, 101, 101)]


def test_other_threads_compile_as_always(ptx: list[Any]):
    with early_check(), shared_limit(100):
        thread = threading.Thread(target=make, args=[101])
        thread.start()
        thread.join()
    assert len(ptx) == 1


def test_the_last_user_gives_triton_back():
    """Two tunings in two threads; afterwards it is Triton's own method again."""
    with early_check():
        with early_check():
            assert CUDABackend.make_ptx is not OWN
        assert CUDABackend.make_ptx is not OWN
    assert CUDABackend.make_ptx is OWN


def test_a_wrapper_that_somebody_puts_around_it_stays(ptx: list[Any], monkeypatch: pytest.MonkeyPatch):
    """A profiler of the user's that comes in the middle, and is still there at the next tuning."""
    with early_check():
        inner = CUDABackend.make_ptx
        monkeypatch.setattr(CUDABackend, "make_ptx", wrapper := lambda *args: inner(*args))
    assert CUDABackend.make_ptx is wrapper
    with early_check(), shared_limit(100):
        make(99)
    assert CUDABackend.make_ptx is wrapper
    assert len(ptx) == 1


def test_a_triton_without_nvidia(monkeypatch: pytest.MonkeyPatch):
    """Nothing to patch: kernels are checked when they are loaded."""
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.compiler", None)
    with early_check(), shared_limit(100):
        assert CUDABackend.make_ptx is OWN


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
