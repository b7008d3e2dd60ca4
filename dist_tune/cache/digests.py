"""Digests of texts, and lines with a checksum, of files that a process may leave half written: CRC-32 in hexadecimal, a blank, the text.

Knows texts and bytes, and imports neither torch nor Triton.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence


def digest(texts: Sequence[str]) -> str:
    """Short identity of a list of texts, such as described configs."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def sealed_line(text: bytes) -> bytes:
    """A text with its checksum and its line end."""
    return b"%08x %s\n" % (zlib.crc32(text), text)


def text_of(line: bytes) -> bytes | None:
    """The text of a line without its end; None if the line is torn or damaged."""
    checksum, _, text = line.partition(b" ")
    try:
        return text if int(checksum, 16) == zlib.crc32(text) else None
    except ValueError:
        return None
