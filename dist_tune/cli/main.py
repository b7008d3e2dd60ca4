"""The command ``dist-tune``: records in the cache, reasons for misses, and checks of this machine.

``python -m dist_tune`` is the same. With ``--json`` there is one JSON document on stdout and nothing else; warnings and errors go to
stderr. Exit codes: 0 done, 1 not found, refused or broken, 2 not understood.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from dist_tune.cache import Cache
from dist_tune.cli import cache, doctor, explain
from dist_tune.cli.machine import package_version
from dist_tune.cli.tables import Answer, RefusedError, least_width, plain
from dist_tune.settings import Settings, SettingsError

_UNLIMITED = 10_000
"""Width of a pipe or a file in characters: one record, one line."""
_EXAMPLES = """examples:
  dist-tune cache ls              what has been tuned, for which machine, and what won
  dist-tune cache show gemm       all candidates of one tuning, fastest first
  dist-tune cache explain gemm    why it is tuned again here
  dist-tune doctor                what works on this machine, and what does not
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    Raises:
        SystemExit: code 2, the command line is not understood; code 0 after ``--help`` or ``--version``.
    """
    asked = _parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        # The text alone: the line of the library that it comes from is of no use at a terminal.
        warnings.showwarning = lambda message, *_args, **_kwargs: _complain(str(message))
        try:
            answer: Answer = asked.run(asked)
        except (RefusedError, OSError) as error:
            answer = _failure(1, str(error))
        except SettingsError as error:
            answer = _failure(2, str(error))
        except KeyboardInterrupt:
            return 130
    for problem in answer.problems:
        _complain(problem)
    try:
        sys.stdout.write(json.dumps(answer.values, indent=1) + "\n" if asked.json else _rendered(answer.page))
        sys.stdout.flush()
    except BrokenPipeError:  # ``| head`` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at its end
    return answer.exit_code


def _failure(exit_code: int, reason: str) -> Answer:
    return Answer({"error": reason}, [], exit_code, [reason])


def _rendered(page: Sequence[RenderableType]) -> str:
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, emoji=False)  # texts of records are no markup
    console.width = max(console.width, least_width(page)) if is_terminal else _UNLIMITED
    with console.capture() as rendered:
        for each in page:
            console.print(each)
    # Tables fill their last column with blanks, which only lengthen the lines of a pipe.
    text = "".join(f"{line if is_terminal else line.rstrip()}\n" for line in rendered.get().splitlines())
    # A terminal that knows ASCII alone gets "\xb7" and not a traceback.
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _complain(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(("dist-tune: ", "bold red"), plain(text, 2000)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dist-tune", description="Look after dist_tune.", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"dist_tune {package_version('dist-tune') or 'of a source tree'}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    about_cache = "Records of finished tunings in DIST_TUNE_CACHE_DIR."
    on_cache = commands.add_parser("cache", help="records of finished tunings", description=about_cache)
    _add_cache_commands(on_cache.add_subparsers(metavar="COMMAND", required=True))
    _command(commands, "doctor", doctor.run, "what works on this machine and what does not, with the reason and what to do")
    return parser


def _add_cache_commands(commands: Any) -> None:
    def add(command: Callable[[Cache, argparse.Namespace], Answer], what: str) -> argparse.ArgumentParser:
        def run(asked: argparse.Namespace) -> Answer:
            settings = Settings()
            return command(Cache(settings.cache_dir, is_shared=settings.cache_shared), asked)

        return _command(commands, command.__name__, run, what)

    key = "a record's id or the name of its file, or a kernel's name for all its records"
    add(cache.path, "where the records are")
    listed = add(cache.ls, "all records: what won, where and when")
    listed.add_argument("--quarantine", action="store_true", help="the configs that ended their process twice, and do not run any more")
    add(cache.show, "one record with all its candidates").add_argument("key", metavar="KEY", help=key)
    explained = add(explain.explain, "whether records would be used here, and if not, why")
    explained.add_argument("key", metavar="KEY", nargs="?", help=f"{key}; all records if left out")
    export = add(cache.export, "write records into one file")
    export.add_argument("file", metavar="FILE", type=Path, help="the file; an earlier export is replaced, anything else is left alone")
    export.add_argument("--name", metavar="KEY", help="these records only; see show")
    merge = add(cache.merge, "take in records; of two with one key the better measured stays")
    merge.add_argument("files", metavar="FILE", type=Path, nargs="+", help="an exported file, a record's file, or a folder of such files")
    clear = add(cache.clear, "delete records")
    clear.add_argument("key", metavar="KEY", nargs="?", help=f"{key}; all records if left out")
    clear.add_argument("--quarantine", action="store_true", help="let configs in quarantine run again: all, or those of a kernel KEY")
    clear.add_argument("--yes", action="store_true", help="do not ask")


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], Answer], what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, and nothing else there")
    parser.set_defaults(run=run)
    return parser
