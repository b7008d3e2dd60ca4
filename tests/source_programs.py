"""Code for tests of its fingerprints: a program in two files, and functions made in place."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_tune.cache import read_code

HELPERS = """
import triton
import triton.language as tl
SCALE = 3
WIDE = tl.constexpr(8)

def deepest(x):
    return x + 1

def middle(x):
    return deepest(x) * SCALE

def unused(x):
    return x

@triton.jit
def halved(x, PARTS: tl.constexpr):
    return x / PARTS
"""
PROGRAM = '''
import enum
import functools
import torch
import triton
import triton.language as tl
import helpers
from helpers import WIDE, middle

LIMIT = 7
VAST = set(map(str, range(5000)))
TABLE = {"bf16": 2, "fp32": 4}
CHOICES = {"nccl", "gloo", "copy", "push", "pull", "mpi"}
DTYPE = torch.bfloat16
OPERATIONS = {"middle": middle, "deepest": helpers.deepest}
_CACHE = {}
n_calls = N_CALLS = 0

class Mode(enum.Enum):
    FAST = 1
    SAFE = 2

def near(x, by=2):
    """Adds."""
    return x + by

PICKED = {near, middle, helpers.deepest, Mode, torch.nn.Linear, functools.partial, print, int, float}

def step(x, *, eps: float = 1e-5):
    """Does much."""
    global n_calls, N_CALLS
    n_calls = N_CALLS = N_CALLS + 1
    if x in {"nccl", "gloo", "copy", "push", "pull", "mpi"}:
        return TABLE, CHOICES, VAST, DTYPE, _CACHE, PICKED, Mode.FAST
    return [near(each) + helpers.middle(each) for each in range(LIMIT)], OPERATIONS, eps

class Layer(torch.nn.Module):
    WIDTH = 4

    def forward(self, x):
        return self.inner(x)

    def inner(self, x):
        return near(x) * self.WIDTH

    @staticmethod
    def still(x):
        return x - 1

    @property
    def size(self):
        return 10

def of_layer(x):
    return Layer()(x)

def made(width, weight, log):
    count = 0
    def inner(x):
        nonlocal count
        count += 1
        log.append(x)
        return weight * width
    return inner

factory = made(6, torch.empty(2, 3), print)
cached = functools.lru_cache(maxsize=None)(near)
bound = functools.partial(near, by=9)
method = Layer().inner

def pre_hook(args):
    args["x_ptr"].zero_()

@triton.jit(noinline=True)
def doubled(x):
    return x * 2

@triton.autotune([triton.Config({"BLOCK": 16}, pre_hook=pre_hook), triton.Config({"BLOCK": 32})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % 16 == 0})
@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Doubles."""
    offsets = tl.arange(0, BLOCK) + WIDE
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(x_ptr + offsets, helpers.halved(doubled(x), 4), mask=offsets < n)

@triton.jit
def plain(x_ptr):
    tl.store(x_ptr, doubled(tl.load(x_ptr)))

def launches(x):
    kernel[(1,)](x, 16)
    plain[(1,)](x.T)
'''
NAMES = ["step", "of_layer", "factory", "cached", "bound", "method", "Layer", "kernel", "launches", "doubled", "made"]


def load(folder: Path, program: str = PROGRAM, helpers: str = HELPERS) -> dict[str, Any]:
    """The names of a program in its own file, with the module it imports beside it."""
    modules = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("helpers", helpers), ("program", program)):
        (folder / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    return vars(modules["program"])


def fingerprint(function: object) -> str:
    """The digest of all code of a function."""
    return read_code(function).digest


def fingerprints(folder: Path, program: str = PROGRAM, helpers: str = HELPERS) -> dict[str, str]:
    loaded = load(folder, program, helpers)
    return {name: fingerprint(loaded[name]) for name in NAMES}


def returning(value: object, other: int = 1) -> Callable[[], Any]:
    """A function that has captured a value."""

    def inner() -> Any:
        return value, other

    return inner


def with_globals(code: str, **names: object) -> Any:
    """A function ``f`` without a source, as typed into the interpreter."""
    scope: dict[str, Any] = {"__name__": "user", **names}
    exec(code, scope)
    return scope["f"]


def adding(x: int) -> int:
    return x + 1


def subtracting(x: int) -> int:
    return x - 1


class Compiled:
    """As numba keeps what it compiles."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.py_func = function

    def __call__(self, x: int) -> Any:
        return self.py_func(x)
