"""Stdout as the shell leads it: to a terminal of any encoding, into a pipe that is read in part, into a full disk, or nowhere.

Imports nothing heavy.
"""

from __future__ import annotations

import os
import sys


def write_out(text: str) -> bool:
    """Write to stdout. False if its reader has gone, as ``| head``, which has seen enough.

    Raises:
        OSError: stdout cannot be written, as on a full disk; it names "stdout".
    """
    try:
        # A terminal that knows ASCII alone gets "\\xb7" and not a traceback.
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        discard()
        return False
    except OSError as error:
        discard()
        raise OSError(error.errno, error.strerror, "stdout") from None
    return True


def discard() -> None:
    """Let all that is still to be written go nowhere, or Python complains of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_closed() -> None:
    """Give the process the streams that its shell has closed (``>&-``): what is written there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for the rest of the process
