"""The command ``dist-tune``: what is in the cache, why it misses, and what works on this machine.

``python -m dist_tune`` is the same. With ``--json`` there is one JSON document on stdout and nothing else; warnings and errors go to
stderr. Exit codes: 0 done, 1 not found, refused or broken, 2 not understood.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console, RenderableType
from rich.text import Text

from dist_tune.cache import Cache
from dist_tune.cli import cache, doctor_command, explain
from dist_tune.cli.cache import RefusedError
from dist_tune.cli.tables import Answer, least_width, plain
from dist_tune.settings import Settings

_UNLIMITED = 10_000
"""Characters of a line that goes into a pipe or a file: one record, one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit code.

    Raises:
        SystemExit: code 2, the command line is not understood; code 0 after ``--help`` or ``--version``.
    """
    asked = _parser().parse_args(argv)
    with _warnings_in_short():
        try:
            answer: Answer = asked.run(asked)
        except (RefusedError, OSError) as error:
            answer = Answer({"error": str(error)}, [], 1, [str(error)])
        except ValidationError as error:
            wrong = "; ".join(f"{each['loc'][0]}={each['input']!r}: {each['msg']}" for each in error.errors())
            answer = Answer({"error": wrong}, [], 2, [wrong])
        except KeyboardInterrupt:
            return 130
    return _say(answer, is_json=asked.json)


def _say(answer: Answer, *, is_json: bool) -> int:
    for problem in answer.problems:
        _complain(problem)
    try:
        if is_json:
            sys.stdout.write(json.dumps(answer.values, indent=1) + "\n")
        else:
            _show(answer.page)
        sys.stdout.flush()
    except BrokenPipeError:  # ``| head`` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at its end
    return answer.exit_code


def _show(page: Sequence[RenderableType]) -> None:
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False)
    console.width = max(console.width, least_width(page)) if is_terminal else _UNLIMITED
    with console.capture() as rendered:
        for each in page:
            console.print(each)
    lines = rendered.get().splitlines()
    # Tables fill their last column with blanks: no use to whoever greps.
    text = "".join(f"{line if is_terminal else line.rstrip()}\n" for line in lines)
    # A terminal that knows ASCII alone gets "\xb7" and not a traceback.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _complain(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(("dist-tune: ", "bold red"), plain(text, 2000)))


@contextmanager
def _warnings_in_short() -> Iterator[None]:
    """A warning is its text: nobody at a terminal asks for the line of the library that it comes from."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_args, **_kwargs: _complain(str(message))
        yield


# -- what can be asked -----------------------------------------------------------------------------------------------

_EXAMPLES = """examples:
  dist-tune cache ls              what has been tuned, for which machine, and what won
  dist-tune cache show gemm       all candidates of one tuning, fastest first
  dist-tune cache explain gemm    why it is tuned again here
  dist-tune doctor                what works on this machine, and what does not
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dist-tune", description="Look after dist_tune.", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"dist_tune {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    cache = commands.add_parser(
        "cache", help="records of finished tunings", description="Records of finished tunings in DIST_TUNE_CACHE_DIR."
    )
    _add_cache_commands(cache.add_subparsers(metavar="COMMAND", required=True))
    _command(commands, "doctor", doctor_command.run, "what works on this machine and what does not, with the reason and what to do")
    return parser


def _add_cache_commands(commands: Any) -> None:
    what = "a record's id or the name of its file, or a kernel's name for all its records"
    _command(commands, "path", _on_cache(cache.path), "where the records are")
    _command(commands, "ls", _on_cache(cache.ls), "all records: what won, where and when")
    _command(commands, "show", _on_cache(cache.show), "one record with all its candidates").add_argument("key", metavar="KEY", help=what)
    explained = _command(commands, "explain", _on_cache(explain.explain), "whether records would be used here, and if not, why")
    explained.add_argument("key", metavar="KEY", nargs="?", help=f"{what}; all records if left out")
    export = _command(commands, "export", _on_cache(cache.export), "write records into one file")
    export.add_argument("file", metavar="FILE", type=Path, help="the file; an earlier export is replaced, anything else is left alone")
    export.add_argument("--name", metavar="KEY", help="these records only; see show")
    merge = _command(commands, "merge", _on_cache(cache.merge), "take in records; of two with one key the better measured stays")
    merge.add_argument("files", metavar="FILE", type=Path, nargs="+", help="an exported file, a record's file, or a folder of such files")
    clear = _command(commands, "clear", _on_cache(cache.clear), "delete records")
    clear.add_argument("key", metavar="KEY", nargs="?", help=f"{what}; all records if left out")
    clear.add_argument("--yes", action="store_true", help="do not ask")


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], Answer], what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, and nothing else there")
    parser.set_defaults(run=run)
    return parser


def _on_cache(command: Callable[[Cache, argparse.Namespace], Answer]) -> Callable[[argparse.Namespace], Answer]:
    return lambda asked: command(Cache(Settings().cache_dir), asked)


def _version() -> str:
    try:
        return version("dist-tune")
    except PackageNotFoundError:  # used from its source tree
        return "of a source tree"
