"""Text of unknown origin on one line of a log, a terminal or a message.

Knows characters alone.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with control characters, line ends and invisible characters as Python writes them: ``\n``, ``\x1b``.

    A newline in a name would begin a line of its own, which could pass for another event, and an escape sequence would reach the terminal.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
