"""Lines with a checksum, of files that a process may leave half written: CRC-32 in hexadecimal, a blank, the text."""

from __future__ import annotations

import zlib


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
