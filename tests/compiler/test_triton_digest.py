"""The digest of Triton's own files, made once in a process and ahead of the first launch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_tune import autotune, contextual_autotune
from dist_tune.compiler import triton_cache
from dist_tune.runtime import interception


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the threads that have made the digest in this test."""
    names: list[str] = []
    monkeypatch.setattr(triton_cache, "triton_key", lambda: names.append(threading.current_thread().name))
    triton_cache.begin_digest.cache_clear()
    yield names
    triton_cache.begin_digest.cache_clear()


def test_first_decoration_begins_the_digest(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch, which the first decoration of a process makes, begins it; one thread makes it while the program goes on."""
    monkeypatch.setattr(interception, "triton_patch", interception.triton_patch.__wrapped__)
    contextual_autotune()(lambda: None)
    autotune([{"block": 1}], key_fn=None)(lambda block: None)
    assert triton_cache.begin_digest.cache_info().currsize == 1
    triton_cache.await_digest()
    assert made == ["dist_tune digest"]


def test_hit_waits_for_the_digest(made: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A first call that finds its config comes before the thread has ended: it waits, and makes no second digest beside the thread's."""
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path))

    def step(block: int = 0) -> list[str]:
        return list(made)

    configs = [{"block": 1}, {"block": 2}]
    autotune(configs, key_fn=None)(step)()
    end = threading.Event()
    monkeypatch.setattr(triton_cache, "triton_key", lambda: made.extend(["late"] * end.wait(10.0)))
    triton_cache.begin_digest.cache_clear()
    triton_cache.begin_digest()
    tuned = autotune(configs, key_fn=None)(step)
    threading.Timer(0.05, end.set).start()
    assert tuned()[-1] == "late"
    assert tuned.records[0].is_recalled


def test_one_that_fails_says_nothing(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton raises the same error in its first launch, if there is one."""

    def fail() -> None:
        made.append("tried")
        raise OSError("cannot read libtriton.so")

    monkeypatch.setattr(triton_cache, "triton_key", fail)
    monkeypatch.setattr(threading, "excepthook", lambda args: made.append(f"told of {args.exc_value}"))
    triton_cache.await_digest()
    assert made == ["tried"]
