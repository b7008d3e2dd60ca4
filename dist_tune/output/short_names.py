"""Names for people: of a closure, and of sites by kernel and tuning key. Pure.

Names are short as long as they tell the sites of one tuning apart. Logs, events and records hold the whole label.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

KEY_WIDTH = 60
"""Characters of a key in a name, at most."""
_DTYPE = re.compile(r"(?:torch|triton\.language)\.(\w+)")
_TENSOR = re.compile(r"\(\(([\d,]*)\),\([\d,]*\),(torch\.\w+)\)")
_SHORT = ((re.compile(r"^bfloat(?=\d)"), "bf"), (re.compile(r"^float(?=\d)"), "fp"))
_OPENING, _CLOSING = "([{", ")]}"


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
