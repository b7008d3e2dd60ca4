"""Words, numbers and names for people, on one line of a log, a terminal, a report or a message.

Pure.

Names of sites are short as long as they tell the sites of one tuning apart. Events and records hold
the whole label.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pydantic_core import ValidationError

_MAX_MISTAKE = 200
"""Characters of one that a message tells."""
KEY_WIDTH = 60
"""Characters of a key in a name, at most."""
_NUMBER = re.compile(r"|\d[\d.]*x?( [\w%]{1,3})?")
"""A cell that stands to the right."""
_DTYPE = re.compile(r"(?:torch|triton\.language)\.(?:(bfloat|float)(?=\d))?")
_TENSOR = re.compile(r"\(\(([\d,]*)\),\([\d,]*\),(torch\.\w+)\)")
_ALL_DTYPES = re.compile(r"(?:(?<=^\[)|,)torch\.\w+(?:,torch\.\w+)*\]$")


def printable(text: str) -> str:
    r"""The text with control characters, line ends and invisible characters as Python writes them:
    ``\n``, ``\x1b``.

    A newline in a name would begin a line of its own, which could pass for another event, and an
    escape sequence would reach the terminal.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def first_mistake(error: ValueError) -> str:
    """The first mistake that pydantic has found, where it is and what; of another error its text.

    One line.
    """
    text = str(error)
    if isinstance(error, ValidationError):
        mistakes = error.errors(include_url=False, include_input=False, include_context=False)
        # A file of another version has unknown fields, too, which pydantic before 2.14 tells first.
        first = min(mistakes, key=lambda each: each["type"] == "extra_forbidden")
        own = first["msg"].removeprefix("Value error, ")  # of a validator of ours, which says all
        text = (
            own
            if own != first["msg"]
            else ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        )
    return shortened(printable(text), _MAX_MISTAKE)


def shortened(text: str, limit: int = 240) -> str:
    """A text for one line, of at most ``limit`` characters, the last one an ellipsis; the log and
    the JSON documents have all of it.
    """
    return text if len(text) <= limit else f"{text[: limit - 1]}\N{HORIZONTAL ELLIPSIS}"


def plain(text: object, limit: int = 160) -> str:
    """One printable line of at most ``limit`` characters."""
    return shortened(printable(" ".join(str(text).split())), limit)


def table(rows: Sequence[Mapping[str, object]], *, has_header: bool = True) -> list[str]:
    """Rows, each heading -> cell, as aligned lines.

    Numbers stand to the right, empty columns are left out. Of no rows no lines.

    No line is broken: of a pipe or a file each is a row, and a terminal folds those that are too
    long.
    """
    columns = {
        heading: [_cell(row[heading]) for row in rows] for heading in (rows[0] if rows else ())
    }
    aligned = []
    # By columns: a table of 200 rows by cells takes a hundredth of a tuning.
    for heading, cells in columns.items():
        if any(cells):
            align = str.rjust if all(map(_NUMBER.fullmatch, cells)) else str.ljust
            texts = [plain(heading, 40), *cells] if has_header else cells
            width = max(map(len, texts))
            aligned.append([align(text, width) for text in texts])
    return ["  ".join(texts).rstrip() for texts in zip(*aligned, strict=True)]


def _cell(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else value
    return f"{text:.4f}" if isinstance(text, float) else "" if text is None else plain(text, 400)


def amount(n: int, noun: str) -> str:
    """Number and noun: "1 site", "2 sites"."""
    return f"1 {noun}" if n == 1 else f"{n} {noun}s"


def kernels_told(kernels: Iterable[str], step: str) -> str:
    """Sites by their kernels: "3 kernels", "1 kernel at 2 keys"; empty for a function alone, whose
    kernel is named as the step is.
    """
    counts = Counter(kernels)
    if list(counts.elements()) == [step]:
        return ""
    told, n_keys = amount(len(counts), "kernel"), counts.total()
    return f"{told} at {n_keys} keys" if n_keys > len(counts) else told


def phase_told(name: str) -> str:
    """A field of ``Seconds``, as people read it: "meetings" of files are "waits"."""
    return "waits" if name == "meetings" else name


def milliseconds(ms: float) -> str:
    """Three digits or more, as people compare them: "0.0146", "0.146", "12.3", "1234"."""
    return (
        f"{ms:.4f}"
        if ms < 0.1
        else f"{ms:.3f}"
        if ms < 10
        else f"{ms:.1f}"
        if ms < 100
        else f"{ms:.0f}"
    )


def closure_name(name: str) -> str:
    """A function's name without its module: "step"; of a lambda with the function that makes it,
    "tune.<lambda>".
    """
    parts = [part for part in name.split(".") if part not in ("<locals>", "__main__")]
    n_kept = 2 if parts[-1] == "<lambda>" else 1
    return ".".join(parts[-n_kept:])


def kernel_and_key(label: str) -> tuple[str, str]:
    """Both in the label of a site: "m.gemm[64,bf16]", with "#2" behind it for another kernel of one
    name.
    """
    kernel, _, key = label.partition("[")
    return kernel, f"[{key.rpartition(']')[0]}]"


def site_names(sites: Sequence[tuple[str, str]], otherwise: Sequence[str]) -> list[str]:
    """A name for each site of one tuning, given by kernel and key: "gemm [4096, 11008]", and no two
    alike.

    Values of ``key=`` alone; where sites have these in common, the whole key; ``otherwise`` where
    that is the same, too.
    """
    forms = [
        (site_name(kernel, key), f"{kernel} {_spaced(key)}", other)
        for (kernel, key), other in zip(sites, otherwise, strict=True)
    ]
    counts = [Counter(names) for names in zip(*forms, strict=True)]
    return [
        next(
            name
            for name, n_sites in zip(names, counts, strict=True)
            if n_sites[name] == 1 or name is names[2]
        )
        for names in forms
    ]


def site_name(kernel: str, key: str) -> str:
    """Kernel and the values of ``key=``: "gemm [4096, 11008]", with at most ``KEY_WIDTH``
    characters of them; the kernel alone without any.

    Triton appends the dtypes of all arguments to the values of ``key=``: ten words that are the
    same in all shapes. A tensor reads "4096x11008 bf16".
    """
    values = _spaced(_TENSOR.sub(_shape, _ALL_DTYPES.sub("]", key))).replace("'None'", "None")
    values = shortened(values, KEY_WIDTH)
    return f"{kernel.rpartition('.')[2] or kernel} {values.removeprefix('[]')}".rstrip()


def _shape(tensor: re.Match[str]) -> str:
    return f"{'x'.join(size for size in tensor[1].split(',') if size) or 'scalar'} {tensor[2]}"


def _spaced(key: str) -> str:
    """With short dtypes, and a space behind each comma."""
    return re.sub(
        r", *",
        ", ",
        _DTYPE.sub(lambda dtype: {"bfloat": "bf", "float": "fp", None: ""}[dtype[1]], key),
    )
