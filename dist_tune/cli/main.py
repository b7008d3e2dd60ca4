"""The command ``dist-tune``: records in the cache, reasons for misses, and checks of this machine.

``python -m dist_tune`` is the same. With ``--json`` there is one JSON document on stdout and nothing else; warnings and errors go to
stderr. Exit codes: 0 done, 1 not found, refused or broken, 2 not understood, 3 done without a log file that is damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from dist_tune import __version__
from dist_tune.cli import stdout

COMMANDS = {
    "show": "dist_tune.cli.commands:show",
    "report": "dist_tune.cli.report:report",
    "watch": "dist_tune.cli.report:watch",
    "diff": "dist_tune.cli.report:diff",
    "trace": "dist_tune.cli.report:trace",
    "doctor": "dist_tune.cli.commands:doctor",
    "launch": "dist_tune.cli.commands:launch",
    "cache path": "dist_tune.cli.commands:path",
    "cache ls": "dist_tune.cli.commands:ls",
    "cache show": "dist_tune.cli.commands:show",
    "cache explain": "dist_tune.cli.commands:explain",
    "cache export": "dist_tune.cli.commands:export",
    "cache merge": "dist_tune.cli.commands:merge",
    "cache clear": "dist_tune.cli.commands:clear",
}
"""Command -> module and function, whose signature typer reads. These modules import nothing heavy, or ``--help`` would take seconds."""
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # of click, or of typer's own copy of it
_EXAMPLES = (
    "Examples:",
    "dist-tune cache ls --since 2h   what was tuned lately, and what won",
    "dist-tune show gemm             all candidates of a tuning, fastest first",
    "dist-tune cache explain gemm    why it is tuned again here",
    "dist-tune report                a page of the last tuning",
    "dist-tune doctor                what works on this machine",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    stdout.open_closed()
    if words[:1] == ["launch"]:  # before the parser, because "--", -m and --help among them are torchrun's or the script's
        from dist_tune.launch import main as launch

        return launch(words[1:])
    if is_bare := " ".join(words) in {name.rpartition(" ")[0] for name in COMMANDS}:  # nothing, or "cache": nothing was asked for
        words.append("--help")
    try:
        # Not standalone: a command's exit code comes back, and an error of the command line as an exception.
        exit_code = int(_parser().main(words, prog_name="dist-tune", standalone_mode=False) or 0)
    except _USAGE_ERROR as error:
        return _not_understood(error, as_json="--json" in words)
    except typer.Abort:
        return 130
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton", "numpy"):
            raise
        return _not_installed(error.name, as_json="--json" in words)
    except OSError as error:  # of stdout; an error of a file is a part of the answer
        stdout.discard()
        sys.stderr.write(f"dist-tune: stdout: {error.strerror or error}\n")
        return 1
    return 2 if is_bare else exit_code


def _not_understood(error: Exception, *, as_json: bool) -> int:
    if as_json:
        from dist_tune.cli.answering import failure, give

        return give(lambda: failure(2, error.format_message()), as_json=True)  # type: ignore[attr-defined]
    error.show()  # type: ignore[attr-defined]
    return 2


def _not_installed(package: str, *, as_json: bool) -> int:
    from dist_tune.cli.answering import failure, give

    reason = f"{package} is not installed for {sys.executable}: pip install {package} there, or run dist-tune with the Python that has it"
    return give(lambda: failure(1, reason), as_json=as_json)


def _parser() -> TyperGroup:
    # Frames and colours for a terminal alone: a pipe is for a program or a pager, and loading them takes half the time of a help.
    mode: Any = "rich" if sys.stdout.isatty() else None
    names = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(epilog="\n\n".join(_EXAMPLES), context_settings=names, rich_markup_mode=mode)
    app.callback()(_options)
    on_cache = typer.Typer(help="Records of finished tunings in DIST_TUNE_CACHE_DIR.", rich_markup_mode=mode)
    for name, target in COMMANDS.items():
        group, _, command = name.rpartition(" ")
        (on_cache if group else app).command(command)(resolve_name(target))
    app.add_typer(on_cache, name="cache")
    parser = get_command(app)
    assert isinstance(parser, TyperGroup)
    return parser


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"dist_tune {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Look after dist_tune."""
