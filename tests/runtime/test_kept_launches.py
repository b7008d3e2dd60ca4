"""What wrappers keep of launches: taken from them while other threads launch."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from dist_tune.runtime import libraries

pytestmark = pytest.mark.once


def test_a_wrapper_may_keep_more_while_it_is_asked_what_it_has_kept(monkeypatch: pytest.MonkeyPatch):
    """Launches of other threads write to the same mapping."""
    mapping: dict[int, Any] = dict.fromkeys(range(2000))
    known, is_over = frozenset(mapping), threading.Event()

    def launch() -> None:
        n = len(known)
        while not is_over.is_set():
            mapping[n] = None
            n = n + 1 if n < 4000 else len(known)
            mapping.pop(n, None)

    thread, interval_s = threading.Thread(target=launch), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(2000):
            libraries.keepers[0] = {id(mapping): (mapping, known)}
            libraries.forget_kept(0)
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval_s)
    assert known <= mapping.keys()
