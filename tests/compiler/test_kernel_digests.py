"""Digests of compiled kernels, by which equal candidates are found."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from typing import Any

import pytest
import triton

from dist_tune.compiler import candidate
from dist_tune.compiler.candidate import Candidate

pytestmark = pytest.mark.once
_Metadata = namedtuple("_Metadata", ["hash", "num_stages", "shared"])


class Source:
    constants, signature, attrs = {"BLOCK": 16}, {"x": "*fp32"}, {"x": 16}


class Compiled:
    """As Triton's: a binary, metadata and a source."""

    def __init__(self, binary: bytes = b"cubin", shared: int = 64) -> None:
        self.binary, self.src, self.metadata = binary, Source(), _Metadata(str(id(self)), 3, shared)

    @property
    def kernel(self) -> bytes:
        return self.binary

    def hashed(self) -> str:
        """The digest, of a candidate of its own, as a tuning makes it."""
        compiled = self

        class Launch:
            def compile(self, config: Any) -> Any:
                return compiled

        return Candidate(Launch(), triton.Config({})).kernel()


class Closed(Compiled):
    """No key of a dictionary."""

    __hash__ = None  # type: ignore[assignment]


def test_what_decides_a_launch_decides_the_digest():
    """Binary and shared memory do; the key in Triton's cache does not."""
    assert len({Compiled().hashed(), Compiled().hashed(), Closed().hashed()}) == 1
    assert len({Compiled().hashed(), Compiled(b"other").hashed(), Compiled(shared=128).hashed()}) == 3


def test_a_kernel_that_stays_in_memory_is_digested_once(monkeypatch: pytest.MonkeyPatch):
    """The next tuning of the process looks it up; a kernel that is gone leaves nothing behind."""
    known: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
    monkeypatch.setattr(candidate, "_digests", known)
    kernel = Compiled()
    digest = kernel.hashed()
    monkeypatch.setattr(candidate, "hashlib", None)
    assert kernel.hashed() == digest
    assert len(known) == 1
    del kernel
    gc.collect()
    assert not known
