"""A moment in the past as people write it: "30min", "2h", "3d", "2026-03-01"."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import typer

_UNITS = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGO = re.compile(rf"(\d{{1,9}}) ?({'|'.join(_UNITS)})")


def since(text: str | datetime) -> datetime:
    """The moment, with its time zone; a date or time without one is this machine's.

    Raises:
        typer.BadParameter: it is neither.
    """
    if isinstance(text, datetime):
        return text
    try:
        if ago := _AGO.fullmatch(text.strip()):
            return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is neither a time like 30min, 2h, 3d nor a date like 2026-03-01 or 2026-03-01T12:00") from None
