"""The command ``dist-tune``: its commands with their options, and its exit codes.

``python -m dist_tune`` is the same. With ``--json`` there is one JSON document on stdout and
nothing else; warnings and errors go to stderr. Exit codes: 0 done, 1 not found, refused or broken,
2 not understood. Imports nothing heavy, or ``--help`` would take seconds: what a command does is
imported when it runs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.main import get_command

from dist_tune import __version__
from dist_tune.cli.render import Answer, RefusedError, complain, write_file

# Of click, or of typer's own copy of it.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
_EXAMPLES = (
    "Examples:",
    "dist-tune cache ls --since 2h   what was tuned lately, and what won",
    "dist-tune show gemm             all candidates of a tuning, fastest first",
    "dist-tune cache explain gemm    why it is tuned again here",
    "dist-tune report                a page of the last tuning",
    "dist-tune doctor                what works on this machine",
)
_CONVERSIONS = (
    "Show what a file holds, and write records for vLLM:",
    'dist-tune convert "E=8,N=512,device_name=NVIDIA_H200.json"',
    "dist-tune convert fused_moe_kernel --to vllm --set E=8 --set N=512 -o out",
)
# Of convert.py
_FACTS = (
    "E, N, device_name, dtype, block_shape, per_channel_quant, down, triton_version, kernel, name,"
    " size"
)
_A_KEY = (
    "A record's id or any beginning that no other id has, or a kernel's name for all its records"
)
_SOURCES = "Records: files, exports, cache folders, ids, kernels; the last tuning's if left out."
_TARGET = (
    "A file: an earlier export there is replaced, anything else is left alone. With / at its end a"
    " folder: records are added to it."
)
_ALL_WORDS = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
_AGO = re.compile(r"(\d{1,9}) ?(s|m|min|h|d|w)")
_UNITS = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}

AnEngine = Literal["vllm", "sglang", "fla", "aiter"]
Order = Literal["kernel", "age", "ms", "seconds"]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")
]
Key = Annotated[str, typer.Argument(metavar="KEY", help=f"{_A_KEY}.")]
AnyKey = Annotated[
    str | None, typer.Argument(metavar="KEY", help=f"{_A_KEY}; all records if left out.")
]
# readable=False of paths: one that may not be read is a line of the command's, no error of usage.
Device = Annotated[
    str,
    typer.Option(
        metavar="TEXT", show_default=False, help="Made on devices with this in their name."
    ),
]

_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    epilog="\n\n".join(_EXAMPLES),
    context_settings=_HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
)
on_cache = typer.Typer(
    help="Records of finished tunings in DIST_TUNE_CACHE_DIR.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and write its answer; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    failed = 2 if words[:1] == ["diff"] else 1  # of which 1 says that a winner is slower
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        # The text alone: the line of the library that it comes from is of no use at a terminal.
        warnings.showwarning = lambda message, *_args, **_options: complain(str(message))
        try:
            answer = _ask(words, failed)
            # Both sides of a comparison may be one folder.
            for problem in dict.fromkeys(answer.problems):
                complain(problem)
            if "--json" in words or answer.lines:
                typer.echo(
                    json.dumps(answer.values, indent=1)
                    if "--json" in words
                    else "\n".join(answer.lines)
                )
                sys.stdout.flush()
        except OSError as error:  # the disk is full, or the reader has gone, as of ``| head``
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                complain(f"stdout: {error.strerror}")
            return 0 if isinstance(error, BrokenPipeError) else failed
    return answer.exit_code


def _ask(words: list[str], failed: int) -> Answer:
    """The answer of a command, also where it cannot do what was asked."""
    try:
        answer: Answer | int | None = get_command(app).main(
            words, prog_name="dist-tune", standalone_mode=False
        )
        # A help is written already.
        return answer if isinstance(answer, Answer) else Answer({}, exit_code=answer or 0)
    except _USAGE_ERROR as error:
        error.show()  # type: ignore[attr-defined]
        return Answer({"error": str(error)}, exit_code=2)
    except (RefusedError, typer.Abort) as error:
        reason = str(error) or "nothing is deleted"  # the answer to the only question was no
    except OSError as error:
        if error.strerror and not error.filename:  # of a help
            raise
        reason = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
    except ValueError as error:
        from dist_tune.settings import SettingsError

        if not isinstance(error, SettingsError):
            raise
        reason, failed = str(error), 2
    return Answer({"error": reason}, exit_code=failed, problems=[reason])


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"dist_tune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Look after dist_tune."""


def since(text: str | datetime) -> datetime:
    """A moment in the past as people write it: "30min", "2h", "3d", "2026-03-01"; without a time
    zone it is this machine's.
    """
    if isinstance(text, datetime):
        return text
    try:
        if ago := _AGO.fullmatch(text.strip()):
            return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is neither a time like 30min, 2h, 3d nor a date like 2026-03-01 or"
            " 2026-03-01T12:00"
        ) from None


@on_cache.command()
@app.command()
def show(key: Key, as_json: AsJson = False) -> Answer:
    """One record with all its candidates."""
    from dist_tune.cli import records

    return records.show(key)


@app.command()
def report(
    sources: Annotated[list[str] | None, typer.Argument(metavar="RECORD", help=_SOURCES)] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", readable=False, help="The page; report.html if left out."),
    ] = None,
    as_text: Annotated[
        bool, typer.Option("--text", help="Lines on stdout; the page only with -o.")
    ] = False,
    as_json: AsJson = False,
) -> Answer:
    """A page about tunings."""
    from dist_tune.cli.report import records_of
    from dist_tune.log import amount
    from dist_tune.report import render, summary, text, tunings_of

    tunings = tunings_of(records_of(*sources or []))
    told = summary(tunings)
    lines = [text(tunings).rstrip("\n")] if as_text else []
    output = output or (None if as_text else Path("report.html"))
    if output is not None:
        write_file(output, render(tunings).encode())
        size = output.stat().st_size / 1024
        lines.append(f"{output}: {amount(len(told['sites']), 'site')}, {size:.0f} KiB")
    return Answer({"page": str(output) if output else None, **told}, lines)


@app.command()
def diff(
    before: Annotated[
        str,
        typer.Argument(metavar="A", help="A record's file or id, an export, a cache folder."),
    ],
    after: Annotated[str, typer.Argument(metavar="B", help="The same, of later.")],
    as_json: AsJson = False,
) -> Answer:
    """What changed between records.

    Exit code 1: a winner got slower by more than its noise. Exit code 2: records cannot be read, or
    have no kernel and key in common. Noise: the spread_ms of both winners added (the median
    distance of a launch from the median), and at least 1 % of the time.
    """
    from dist_tune.cli.report import records_of
    from dist_tune.log import amount
    from dist_tune.report import compare, comparison_lines

    first, second = records_of(before), records_of(after)
    found = compare(first, second)
    lines = comparison_lines(found)
    if found["pairs"]:
        return Answer(found, lines, 1 if found["n_slower"] else 0)
    counts = (
        f"{before} has {amount(len(first), 'record')}, {after} has {amount(len(second), 'record')}"
    )
    reason = f"nothing to compare: {counts}, with no kernel and key in common"
    return Answer({**found, "error": reason}, lines, 2, [reason])


@app.command(epilog="\n\n".join(_CONVERSIONS))
def convert(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Config files, folders of such; records: files, exports, ids, kernels.",
        ),
    ],
    engine: Annotated[
        AnEngine | None,
        typer.Option("--to", help="The engine that shall read it; without one, configs are shown."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The folder to write to; if left out, nothing is written."
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help=f"What a source lacks: {_FACTS}; a class's size, any=4096.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that are there, and keep them as *.bak.")
    ] = False,
    as_json: AsJson = False,
) -> Answer:
    """Config files of vLLM, SGLang, FLA and aiter, made of each other or of records."""
    from dist_tune.cli.convert import convert

    return convert(sources, engine, folder, given or [], replaces=force)


@app.command()
def doctor(as_json: AsJson = False) -> Answer:
    """Versions, GPUs, and what works on this machine, with the reason and what to do.

    Exit code 1 if nothing can be tuned here.
    """
    from dist_tune.cli.doctor import examine

    return examine()


@app.command(context_settings=_ALL_WORDS)
def launch(words: typer.Context) -> int:
    """Start ranks by torchrun, with defaults for this machine.

    All that follows is torchrun's and the script's.
    """
    script = Path(__file__).resolve().parents[1] / "launch.sh"
    # Sourced, so that $0 in its messages is the command as it was typed, and `python` a variable
    # that no child inherits.
    source = 'python=$1 script=$2; shift 2; source "$script"'
    try:
        os.execvp(
            "bash",
            ["bash", "-c", source, "dist-tune launch", sys.executable, str(script), *words.args],
        )
    except FileNotFoundError:
        raise RefusedError("bash is not installed, which launch.sh needs") from None


@on_cache.command()
def path(as_json: AsJson = False) -> Answer:
    """Where the records are."""
    from dist_tune.cli import records

    return records.path()


@on_cache.command()
def ls(
    kernel: Annotated[
        str,
        typer.Option(
            metavar="TEXT", show_default=False, help="Of kernels with this in their name."
        ),
    ] = "",
    device: Device = "",
    newer: Annotated[
        datetime | None,
        typer.Option(
            "--since", parser=since, metavar="WHEN", help="Since 30min, 2h, 3d, or a date."
        ),
    ] = None,
    sort: Annotated[
        Order,
        typer.Option(
            help="By name, by age with the newest last, by the winner's time, or by the tuning's."
        ),
    ] = "kernel",
    quarantine: Annotated[
        bool,
        typer.Option(
            "--quarantine", help="The configs that ended their process twice, and run no more."
        ),
    ] = False,
    as_json: AsJson = False,
) -> Answer:
    """All records: what won, where and when. Exit code 1 if files are damaged."""
    from dist_tune.cli import records

    return records.ls_quarantine() if quarantine else records.ls(kernel, device, newer, sort)


@on_cache.command()
def explain(key: AnyKey = None, as_json: AsJson = False) -> Answer:
    """Reasons why records would be used here, or not. Exit code 1 if files are damaged."""
    from dist_tune.cli import records

    return records.explain(key)


@on_cache.command()
def export(
    file: Annotated[str, typer.Argument(metavar="FILE|FOLDER/", help=_TARGET)],
    name: Annotated[
        str | None, typer.Option(metavar="KEY", help="These records only; see show.")
    ] = None,
    device: Device = "",
    as_json: AsJson = False,
) -> Answer:
    """Write records into one file, or into a folder for others' DIST_TUNE_CACHE_PATH.

    Exit code 1 if files are damaged, unless KEY chooses records: no export holds those.
    """
    from dist_tune.cli import records

    return records.export(file, name, device)


@on_cache.command()
def merge(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", readable=False, help="An export, a record's file, a folder of such."
        ),
    ],
    as_json: AsJson = False,
) -> Answer:
    """Take in records from files and folders.

    Of two with one key the better measured stays. Exit code 1 if any is refused.
    """
    from dist_tune.cli import records

    return records.merge(files)


@on_cache.command()
def clear(
    key: AnyKey = None,
    quarantine: Annotated[
        bool,
        typer.Option(
            "--quarantine", help="Let configs in quarantine run again: all, or a kernel's."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> Answer:
    """Delete records."""
    from dist_tune.cli import records

    return records.clear_quarantine(key) if quarantine else records.clear(key, is_sure=yes)


app.add_typer(on_cache, name="cache")
