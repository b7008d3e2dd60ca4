"""Digests of texts. Apart from ``configs``, so that reading a record imports no Triton."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def digest(texts: Sequence[str]) -> str:
    """Short identity of a list of texts, such as described configs."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
