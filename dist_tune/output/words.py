"""Words, numbers and names for people, on one line of a log, a terminal, a report or a message. Pure.

Names of sites are short as long as they tell the sites of one tuning apart. Events and records hold the whole label.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from pydantic_core import ValidationError

_MAX_MISTAKE, _MAX_MISTAKES = 200, 1000
"""Characters of one that a message tells; naming more takes a second for every 100,000."""
_AS_FAST = 0.995
"""Gain from which it reads "1.00x"."""
KEY_WIDTH = 60
"""Characters of a key in a name, at most."""
_DTYPE = re.compile(r"(?:torch|triton\.language)\.(\w+)")
_TENSOR = re.compile(r"\(\(([\d,]*)\),\([\d,]*\),(torch\.\w+)\)")
_SHORT = ((re.compile(r"^bfloat(?=\d)"), "bf"), (re.compile(r"^float(?=\d)"), "fp"))
_OPENING, _CLOSING = "([{", ")]}"


def printable(text: str) -> str:
    r"""The text with control characters, line ends and invisible characters as Python writes them: ``\n``, ``\x1b``.

    A newline in a name would begin a line of its own, which could pass for another event, and an escape sequence would reach the terminal.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def first_mistake(error: ValueError) -> str:
    """The first mistake that pydantic has found, where it is and what; of another error its text. One line."""
    text = str(error)
    if isinstance(error, ValidationError):
        if (n_errors := error.error_count()) > _MAX_MISTAKES:
            return f"{n_errors} values do not fit"
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        own = first["msg"].removeprefix("Value error, ")  # of a validator of ours, which says all
        text = own if own != first["msg"] else ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
    text = printable(text)
    return text if len(text) <= _MAX_MISTAKE else f"{text[:_MAX_MISTAKE]}..."


def amount(n: int, noun: str) -> str:
    """Number and noun: "1 site", "2 sites"."""
    return f"{n} {noun}{'s' * (n != 1)}"


def gain_words(ratio: float, first: str) -> str:
    """The winner beside the first config: "1.43x the first config (0.209 ms)"; in percent if slower, because 0.95x reads like a gain."""
    if ratio >= _AS_FAST:
        return f"{ratio:.2f}x the first config ({first})"
    return f"{100 * (1 / ratio - 1):.0f} % slower than the first config by its kernel ({first})"


def lead_words(ahead: float) -> str:
    """The winner beside the fastest other: "2.1 % ahead of the next", "4.6x the next", "8.0 % behind the fastest kernel"."""
    if ahead >= 1:
        return f"{1 + ahead:.1f}x the next"
    return f"{100 * abs(ahead):.1f} % {'ahead of the next' if ahead >= 0 else 'behind the fastest kernel'}"


def milliseconds(ms: float) -> str:
    """Three digits or more, as people compare them: "0.146", "12.3", "1234"."""
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def closure_name(name: str) -> str:
    """A function's name without its module: "step"; of a lambda with the function that makes it, "tune.<lambda>"."""
    parts = [part for part in name.split(".") if part != "<locals>"]
    n_kept = 2 if parts[-1] == "<lambda>" else 1
    return ".".join(parts[-n_kept:])


def site_names(sites: Sequence[tuple[str, str]], otherwise: Sequence[str]) -> list[str]:
    """A name for each site of one tuning, given by kernel and key: "gemm [4096, 11008]", and no two alike.

    Values of ``key=`` alone; where sites differ in nothing else, with the dtypes of the arguments; then the whole key.
    ``otherwise``: names for sites of which kernel and key are the same.
    """
    steps = [
        [site_name(kernel, key) for kernel, key in sites],
        [f"{_kernel(kernel)} {brief_key(key, has_dtypes=True)}" for kernel, key in sites],
        [f"{kernel} {_spaced(key)}" for kernel, key in sites],
    ]
    names = list(otherwise)
    for step in reversed(steps):
        counts = Counter(step)
        names = [name if counts[name] == 1 else longer for name, longer in zip(step, names, strict=True)]
    return names


def site_name(kernel: str, key: str) -> str:
    """Kernel and the values of ``key=``: "gemm [4096, 11008]"; the kernel alone where there are none."""
    return f"{_kernel(kernel)} {brief_key(key)}".rstrip()


def brief_key(key: str, *, has_dtypes: bool = False) -> str:
    """A tuning key in at most ``KEY_WIDTH`` characters; empty where nothing is left. ``has_dtypes``: with those of the arguments.

    Triton appends the dtypes of all arguments to the values of ``key=``: ten words that are the same in all shapes.
    """
    if not (key.startswith("[") and key.endswith("]")):
        return _bound(_spaced(key), KEY_WIDTH)
    values, dtypes = _split(key[1:-1]), list[str]()
    while values and values[-1].startswith("torch."):
        dtypes.insert(0, _value(values.pop()))
    shown, end = [_value(each) for each in values], dtypes if has_dtypes else []
    text = ", ".join([*shown, *end])
    while len(text) > KEY_WIDTH - 2 and len(shown) > 1:
        shown.pop()
        text = ", ".join([*shown, "\N{HORIZONTAL ELLIPSIS}", *end])
    return f"[{_bound(text, KEY_WIDTH - 2)}]" if text else ""


def _kernel(name: str) -> str:
    return name.rpartition(".")[2] or name


def _bound(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}\N{HORIZONTAL ELLIPSIS}"


def _spaced(text: str) -> str:
    return text.replace("torch.", "").replace(", ", ",").replace(",", ", ")


def _value(text: str) -> str:
    """A value of a key: a tensor as "4096x11008 bf16", a dtype as "bf16", others as they are."""
    if text == "'None'":
        return "None"
    if tensor := _TENSOR.fullmatch(text):
        return f"{'x'.join(size for size in tensor[1].split(',') if size) or 'scalar'} {_value(tensor[2])}"
    if dtype := _DTYPE.fullmatch(text):
        name = dtype[1]
        for pattern, short in _SHORT:
            name = pattern.sub(short, name)
        return name
    return _spaced(text)


def _split(text: str) -> list[str]:
    """The values of a key, apart at commas outside of brackets and quotes."""
    values, depth, quote, begin = [], 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[at - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif char == "," and depth == 0:
            values.append(text[begin:at].strip())
            begin = at + 1
    rest = text[begin:].strip()
    return [*values, rest] if rest or values else []
