"""Signatures of the commands: typer builds the parser and the help from them. Each returns its exit code.

Imports nothing heavy, because ``--help`` imports all of it: a command's work is imported when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from dist_tune.cli.tables import Answer

_A_KEY = "a record's id or any beginning that no other id has, the name of its file, or a kernel's name for all its records"
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")]
Key = Annotated[str, typer.Argument(metavar="KEY", show_default=False, help=f"{_A_KEY[0].upper()}{_A_KEY[1:]}.")]
AnyKey = Annotated[str | None, typer.Argument(metavar="KEY", show_default=False, help=f"{_A_KEY}; all records if left out.".capitalize())]
Order = Literal["kernel", "age", "ms", "seconds"]
_UNITS = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGO = re.compile(rf"(\d{{1,9}}) ?({'|'.join(_UNITS)})")


def since(text: str | datetime) -> datetime:
    """A moment in the past as people write it: "30min", "2h", "3d", "2026-03-01".

    It has its time zone; a date or time without one is this machine's.

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


def answered(ask: Callable[[], Answer], as_json: bool, failed: int = 1) -> int:
    """The exit code of a command, after its answer was written; ``failed`` where it cannot do what was asked."""
    from dist_tune.cli.answering import give

    return give(ask, as_json=as_json, failed=failed)


def doctor(as_json: AsJson = False) -> int:
    """What works on this machine, and what does not.

    Each thing is tried, and comes with the reason and what to do. Exit code 1 if nothing can be tuned here.
    """
    from dist_tune.cli.doctor import run

    return answered(run, as_json)


def path(as_json: AsJson = False) -> int:
    """Where the records are."""
    from dist_tune.cli.records import cache

    return answered(cache.path, as_json)


def ls(
    kernel: Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Of kernels with this in their name.")] = "",
    device: Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Made on devices with this in their name.")] = "",
    newer: Annotated[
        datetime | None,
        typer.Option("--since", parser=since, metavar="WHEN", help="Made since then: 30min, 2h, 3d, or a date like 2026-03-01."),
    ] = None,
    sort: Annotated[Order, typer.Option(help="By name, by age with the newest last, by the winner's time, or by the tuning's.")] = "kernel",
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="The configs that ended their process twice, and do not run any more.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """All records: what won, where and when.

    Exit code 1 if files are damaged.
    """
    from dist_tune.cli.records import cache
    from dist_tune.cli.records.selection import Filter

    if quarantine and (kernel or device or newer):
        raise typer.BadParameter("lists configs of all kernels: --kernel, --device and --since choose records", param_hint="--quarantine")
    return answered(lambda: cache.ls(cache.opened(), Filter(kernel, device, newer), sort=sort, is_quarantine=quarantine), as_json)


def show(key: Key, as_json: AsJson = False) -> int:
    """One record with all its candidates."""
    from dist_tune.cli.records import cache

    return answered(lambda: cache.show(cache.opened(), key), as_json)


def explain(key: AnyKey = None, as_json: AsJson = False) -> int:
    """Reasons why records would be used here, or not.

    Exit code 1 if files are damaged.
    """
    from dist_tune.cli.records import cache, explain

    return answered(lambda: explain.explain(cache.opened(), key), as_json)


def export(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", readable=False, help="An earlier export there is replaced, anything else is left alone.")
    ],
    name: Annotated[str | None, typer.Option(metavar="KEY", show_default=False, help="These records only; see show.")] = None,
    as_json: AsJson = False,
) -> int:
    """Write records into one file.

    Exit code 1 if files are damaged, unless KEY chooses records: no export holds those.
    """
    from dist_tune.cli.records import cache

    return answered(lambda: cache.export(cache.opened(), file, name), as_json)


def merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", readable=False, help="An exported file, a record's file, or a folder of such files.")
    ],
    as_json: AsJson = False,
) -> int:
    """Take in records from files and folders.

    Of two with one key the better measured stays. Exit code 1 if any is refused.
    """
    from dist_tune.cli.records import cache

    return answered(lambda: cache.merge(cache.opened(), files), as_json)


def clear(
    key: AnyKey = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Let configs in quarantine run again: all, or those of a kernel KEY.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> int:
    """Delete records."""
    from dist_tune.cli.records import cache

    return answered(lambda: cache.clear(cache.opened(), key, is_quarantine=quarantine, is_sure=yes), as_json)


def launch() -> int:
    """Start ranks by torchrun, with defaults for this machine.

    All that follows is torchrun's and the script's.
    """
    raise AssertionError("main hands these words over before they are parsed")
