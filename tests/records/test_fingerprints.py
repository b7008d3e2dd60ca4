"""Fingerprints of code: equal wherever the code is the same, different wherever it does something
else, and nothing is asked or run.
"""

import ast
import contextlib
import dataclasses
import enum
import functools
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import types
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dist_tune import autotune
from dist_tune.records import read_code
from tests.steps import BLOCKS, quiet

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

def launches(x):
    kernel[(1,)](x, 16)
'''  # noqa: E501
NAMES = [
    "step",
    "of_layer",
    "factory",
    "cached",
    "bound",
    "method",
    "Layer",
    "kernel",
    "launches",
    "doubled",
    "made",
]


@pytest.fixture(autouse=True)
def _no_modules_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    unload()


def unload() -> None:
    for name in [
        each for each in sys.modules if each in ("helpers", "program") or each.startswith("lazy_")
    ]:
        del sys.modules[name]
    importlib.invalidate_caches()


def fingerprint(function: object) -> str:
    """The digest of all code of a function."""
    return read_code(function).digest


def fingerprints(folder: Path, program: str = PROGRAM, helpers: str = HELPERS) -> dict[str, str]:
    """Of the names of a program in its own file, with the module that it imports beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("helpers", helpers), ("program", program)):
        (folder / f"{name}.py").write_text(text)
    unload()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        loaded = vars(importlib.import_module("program"))
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


# -- what counts as code ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fingerprints(tmp_path_factory.mktemp("unchanged"))


MOVED = {
    "Does much.": "Does something else.",
    '"""Doubles."""': '"""Twice."""',
    "by=2):": "by = 2,\n    ):",
    "[near(each)": "[(near(\n        each))",
    "return weight * width": "return (weight*width)",
    "    x = tl.load": "    # loads\n\n    x = tl.load",
    "\ndef ": "\n\n\n# And one more.\n\ndef ",
}
"""The same code, some lines down and laid out otherwise, with other comments and docstrings."""


@pytest.mark.once
@pytest.mark.processes
def test_place_comments_and_hash_seed_do_not_count(tmp_path: Path):
    """Another process, hash seed and folder, lines moved, comments added: all fingerprints are the
    same, and no two are.
    """
    here, moved = fingerprints(tmp_path / "here"), PROGRAM
    for old, new in MOVED.items():
        moved = moved.replace(old, new)
    (tmp_path / "program.py").write_text("# A comment\n\n" + moved)
    (tmp_path / "helpers.py").write_text("# A comment\n\n" + HELPERS)
    again = "import json, program; from tests.records.test_fingerprints import NAMES, fingerprint; "
    again += "print(json.dumps({name: fingerprint(vars(program)[name]) for name in NAMES}))"
    path = os.pathsep.join(
        [str(Path(__file__).parents[2]), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", again],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == here
    assert len(set(here.values())) == len(here)


def test_versions_of_python_do_not_count(unchanged: dict[str, str]):
    """The same digits with Python 3.11, 3.12 and 3.13; a change of them makes all records
    useless.
    """
    digits = {
        "made": "9b97f05a4f3bf7bf",
        "Layer": "d0ca771c05adbd77",
        "doubled": "7d67f0d283452698",
        "of_layer": "06a5a5806ec2c790",
    }
    assert {name: unchanged[name] for name in digits} == digits


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("LIMIT = 7", "LIMIT = 8", "step"),
        ('"fp32": 4', '"fp32": 8', "step"),
        ("torch.bfloat16", "torch.float16", "step"),
        ('"pull", "mpi"}\nDTYPE', '"pull"}\nDTYPE', "step"),
        ('"pull", "mpi"}:', '"pull"}:', "step"),
        ('{"middle": middle, ', "{", "step"),
        ("FAST = 1", "FAST = 3", "step"),
        ("by=2", "by=3", "step of_layer cached bound method Layer"),
        ("1e-5", "1e-6", "step"),
        ("x, *, eps", "x, eps", "step"),
        ("WIDTH = 4", "WIDTH = 5", "of_layer method Layer"),
        ("self.inner(x)", "self.inner(-x)", "of_layer method Layer"),
        ("return x - 1", "return x", "of_layer method Layer"),
        ("return 10", "return 11", "of_layer method Layer"),
        ("made(6,", "made(7,", "factory"),
        ("torch.empty(2, 3)", "torch.empty(2, 4)", "factory"),
        ("(x)\n        return weight", "(-x)\n        return weight", "factory made"),
        ("by=9", "by=8", "bound"),
        ("return x * 2", "return x * 3", "kernel launches doubled"),
        ("% 16 == 0", "% 8 == 0", "kernel launches"),
        ("n, BLOCK: tl", "n, MORE, BLOCK: tl", "kernel launches"),
        (".zero_()", ".fill_(1)", "kernel launches"),
        (
            '"BLOCK": 32',
            '"BLOCK": 64',
            "launches",
        ),  # the candidates of the kernel itself are stated elsewhere
        ("@triton.jit(noinline=True)", "@triton.jit", "kernel launches doubled"),
        ('key=["n"]', 'key=["n"], reset_to_zero=["x_ptr"]', "kernel launches"),
        ('key=["n"]', 'key=["n"], post_hook=pre_hook', "kernel launches"),
        # Callees in other modules, two levels down, by a module's attribute or imported by name;
        # what nobody calls does not count.
        ("return x + 1", "return x + 2", "step"),
        ("SCALE = 3", "SCALE = 4", "step"),
        ("constexpr(8)", "constexpr(16)", "kernel launches"),
        ("x / PARTS", "x * PARTS", "kernel launches"),
        ("x):\n    return x\n", "x):\n    return -x\n", ""),
        # State and words: counters, docstrings, what tensors hold, caches of tensors, and globals
        # that the code does not name.
        ("N_CALLS = 0", "N_CALLS = 5", ""),
        ("Adds.", "Subtracts.", ""),
        ("torch.empty(2, 3)", "torch.ones(2, 3)", ""),
        ("_CACHE = {}", "_CACHE = {(1, 2): (torch.empty(3), 7)}", ""),
        ("import helpers\n", "import helpers\nunrelated = 7\nUNRELATED = 8\n", ""),
    ],
)
def test_what_does_something_else_reads_otherwise(
    tmp_path: Path, unchanged: dict[str, str], old: str, new: str, changed: str
):
    """One change in the program or its helpers changes the fingerprints of all that uses it, and of
    nothing else.
    """
    assert (old in PROGRAM) != (old in HELPERS)
    now = fingerprints(tmp_path, PROGRAM.replace(old, new), HELPERS.replace(old, new))
    assert [name for name in NAMES if now[name] != unchanged[name]] == sorted(
        changed.split(), key=NAMES.index
    )


def test_what_may_change_while_the_program_runs_is_state():
    """A captured variable that the code assigns to, a global in lower case that is no constexpr and
    no code.
    """

    def counting(step: int) -> Callable[[], int]:
        n_calls = 0

        def inner() -> int:
            nonlocal n_calls
            n_calls += step
            return n_calls

        return inner

    function = counting(2)
    before = fingerprint(function)
    assert [function(), function()] == [2, 4]
    assert fingerprint(function) == before != fingerprint(counting(3))
    one, other = (
        [with_globals("def f(): return width", width=each) for each in (n, [n], {"n": n})]
        for n in (1, 2)
    )
    assert [*map(fingerprint, one)] == [*map(fingerprint, other)]
    one, other = (
        [
            with_globals("def f(): return width", width=each)
            for each in (tl.constexpr(n), returning(n))
        ]
        for n in (1, 2)
    )
    assert not {*map(fingerprint, one)} & {*map(fingerprint, other)}


# -- imports and files -----------------------------------------------------------------------------

FILES = {
    "lazy_helper": (
        "from lazy_deeper import deep\n# words\ndef work(x):\n    return deep(x)\ndef other(x):\n  "
        "  return x\n"
    ),
    "lazy_deeper": "def deep(x):\n    return x + 1\n",
    "lazy_pack/__init__": "",
    "lazy_pack/inner": "def deepest(x):\n    return x + 1\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the files, found by import, and none of them loaded."""
    for name, text in FILES.items():
        (tmp_path / name).with_suffix(".py").parent.mkdir(exist_ok=True)
        (tmp_path / name).with_suffix(".py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("form", "module"),
    [
        ("from lazy_helper import work\n    return work(x)", "lazy_helper"),
        ("import lazy_helper\n    return lazy_helper.work(x)", "lazy_helper"),
        ("from lazy_pack import inner\n    return inner.deepest(x)", "lazy_pack.inner"),
        ("from .inner import deepest\n    return deepest(x)", "lazy_pack.inner"),
    ],
)
def test_an_import_within_a_function_is_followed_if_it_is_loaded(
    folder: Path, form: str, module: str
):
    """Otherwise it is named, and nothing is loaded for that."""
    (folder / "lazy_user.py").write_text(f"def f(x):\n    {form}\n")

    def read() -> tuple[str, list[str]]:
        user = importlib.import_module("lazy_user")
        vars(user)["__package__"] = "lazy_pack"
        code = read_code(user.f)
        unload()
        return code.digest, code.not_followed

    before, (named,) = read()
    assert named.startswith(module.partition(".")[0])
    found = []
    for line in ("+ 1", "+ 1  # words", "- 1"):
        for each in ("lazy_deeper", "lazy_pack/inner"):
            (folder / f"{each}.py").write_text(FILES[each].replace("+ 1", line))
        importlib.import_module(module)
        found.append(read())
    assert [named for _, named in found] == [[]] * 3
    digests = [digest for digest, _ in found]
    assert before != digests[0] == digests[1] != digests[2]


def test_what_is_not_followed_is_named(folder: Path):
    """Modules that are not loaded, and names that the code computes; libraries are not listed."""
    (folder / "lazy_user.py").write_text(
        "def f(x, name):\n    import json, torch.nn, math\n    from lazy_absent import one, two\n  "
        "  import lazy_broken\n    import importlib\n    importlib.import_module(name)\n    from"
        " ....beyond import all\n"
    )
    expected = [
        "....beyond.all",
        "import_module(...)",
        "lazy_absent.one",
        "lazy_absent.two",
        "lazy_broken",
    ]
    assert read_code(importlib.import_module("lazy_user").f).not_followed == expected


def test_a_file_that_has_changed_since_it_was_loaded_does_not_count(folder: Path):
    """The code in memory does: its fingerprint is not that of the new file."""
    stale = importlib.import_module("lazy_pack.inner").deepest
    (folder / "lazy_pack" / "inner.py").write_text("def deepest(x):\n    return x - 1\n")
    read = fingerprint(stale)
    unload()
    assert fingerprint(importlib.import_module("lazy_pack.inner").deepest) != read


@pytest.mark.once
def test_an_edit_of_a_helper_tunes_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Comments and layout of a helper that the tuned function calls do not; the record says which
    import is not in its source.
    """
    quiet(monkeypatch, tmp_path)
    (folder / "lazy_step.py").write_text(
        "import lazy_helper\ndef step(x, block):\n    try:\n        from lazy_absent import one\n"
        "    except ImportError:\n        one = 1\n    return lazy_helper.work(x) * one\n"
    )

    def is_hit() -> bool:
        unload()
        tuned = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(
            importlib.import_module("lazy_step").step
        )
        tuned(torch.ones(2))
        assert tuned.records[0].not_followed == ["lazy_absent.one"]
        return bool(tuned.records[0].is_recalled)

    assert [is_hit(), is_hit()] == [False, True]
    (folder / "lazy_deeper.py").write_text(
        "# words\n\ndef deep(x):\n    return (x\n            + 1)\n"
    )
    assert is_hit()
    (folder / "lazy_deeper.py").write_text("def deep(x):\n    return x + 2 - 1\n")
    assert [is_hit(), is_hit()] == [False, True]


def test_code_without_a_source_is_read():
    """Functions made by exec, lambdas, and a body that calls itself or its caller."""
    codes = [
        *(f"def f({arguments}): return x" for arguments in ("x", "*x", "x, /", "x, y")),
        *("def f(x): return f(x - 1)", "def f(x): yield x", "f = lambda x: x * 2"),
        *(f"def f(x): return g(x)\ndef g(x): return f({argument})" for argument in ("x", "-x")),
        *(
            f"def f(x):\n    try: return x\n    except {error}: return 1"
            for error in ("OSError", "ValueError")
        ),
        *(f"def f(x): return [y * {n} for y in x]" for n in (2, 3)),
        *(f"class f:\n    def g(self): return {n}" for n in (1, 2)),
    ]
    read = [fingerprint(with_globals(code)) for code in codes]
    assert len(set(read)) == len(codes)
    assert [fingerprint(with_globals(code)) for code in codes] == read


def test_libraries_are_not_entered(monkeypatch: pytest.MonkeyPatch):
    """Their versions are in a record. But a user's file may have a library's name."""
    calls_json = with_globals("def f(x): return m.dumps(x)", m=json)
    before = fingerprint(calls_json)
    monkeypatch.setattr(json.JSONEncoder, "encode", adding)
    assert fingerprint(calls_json) == before
    own = types.ModuleType("turtledemo")
    own.__file__ = "/home/user/turtledemo.py"
    monkeypatch.setitem(sys.modules, "turtledemo", own)
    read = []
    for code in ("def f(x): return x", "def f(x): return -x"):
        exec(code, vars(own))
        read.append(fingerprint(with_globals("def f(x): return m.f(x)", m=own)))
    assert read[0] != read[1]


# -- values, and what holds code -------------------------------------------------------------------


class Mode(enum.Enum):
    FAST = 1
    SAFE = 2


VALUES: list[Any] = [
    *(
        None,
        True,
        1,
        1.0,
        "1",
        b"1",
        (1,),
        [1],
        {1: 1},
        {1},
        (),
        2,
        -0.0,
        0.0,
        float("nan"),
        float("inf"),
        "",
        1 << 70,
        10**5000,
    ),
    *(
        torch.float16,
        torch.float32,
        torch.empty(2),
        torch.empty(3),
        torch.empty(2, dtype=torch.int8),
        torch.empty(2, 1),
    ),
    *(
        tl.float16,
        tl.bfloat16,
        tl.constexpr(3),
        tl.constexpr(4),
        triton.Config({"A": 1}),
        triton.Config({"A": 2}),
    ),
    *(
        np.int64(1),
        np.int64(2),
        np.zeros(2),
        np.zeros(3),
        np.dtype("f4"),
        range(3),
        "x" * 5000,
        "x" * 4999 + "y",
    ),
    *((1, (2, 3)), ((1, 2), 3), [[1], 2], [[1, 2]], {"a": {"b": 1}}, {"a": {"b": 2}}, *Mode),
    *(len, max, returning, fingerprint, threading.Lock(), enum.Enum, torch.device("cpu")),
]


def test_captured_values_are_told_apart():
    """Every scalar, container, dtype, shape, constexpr and function; also where Python holds them
    equal.
    """
    read = [fingerprint(returning(value)) for value in VALUES]
    assert len(set(read)) == len(read)
    assert [fingerprint(returning(value)) for value in VALUES] == read


@dataclasses.dataclass
class Config:
    rank: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (threading.Lock(), threading.Lock()),
        (torch.device("cuda", 0), torch.device("cuda", 1)),
        (torch.zeros(3), torch.ones(3)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Config(rank=0), Config(rank=1)),
        (torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)),
    ],
)
def test_what_may_differ_between_ranks_does_not_count(one: object, other: object):
    """Objects by their class, a tensor without what is in it, a dict in any order.

    Plain attributes tell two kernels apart all the same.
    """
    assert fingerprint(returning(one)) == fingerprint(returning(other))
    captured = [read_code(returning(each)).captured for each in (one, other)]
    assert (captured[0] == captured[1]) == (type(one) not in (Config, torch.nn.Linear))
    assert captured[0]["code"] == captured[1]["code"]


class Compiled:
    """As numba keeps what it compiles."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.py_func = function

    def __call__(self, x: int) -> Any:
        return self.py_func(x)


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "lru_cache": functools.lru_cache,
    "partial": functools.partial,
    "wraps": lambda function: functools.wraps(function)(lambda *args: function(*args)),
    "no_grad": torch.no_grad(),
    "contextmanager": contextlib.contextmanager,
    "callable object": Compiled,
    "bound method": lambda function: types.MethodType(function, 7),
    "staticmethod": staticmethod,
    "property": property,
    "subclass": lambda function: type("Made", (type("Base", (), {"method": function}),), {}),
    "object": lambda function: type("Made", (), {"method": function})(),
    "module": lambda function: type("Made", (torch.nn.Module,), {"forward": function})(),
    "dict": lambda function: {"a": [function]},
    "set": lambda function: {function, len},
    "cached_property": functools.cached_property,
    "custom_op": lambda function: types.SimpleNamespace(_init_fn=function),
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_are_looked_through(wrapper: Callable[[Callable[..., Any]], Any]):
    """The same wrapper around two functions is two things; whether it is called, captured, a
    default or a global.
    """
    for place in (
        lambda thing: thing,
        returning,
        lambda thing: with_globals("def f(x=thing): return x", thing=thing),
        lambda thing: with_globals("def f(): return THING", THING=thing),
    ):
        assert fingerprint(place(wrapper(adding))) != fingerprint(place(wrapper(subtracting)))
        assert fingerprint(place(wrapper(adding))) == fingerprint(place(wrapper(adding)))


# -- objects that refuse to answer, and huge ones --------------------------------------------------


asked: list[int] = []


def refuse(*args: object, **kwargs: object) -> Any:
    asked.append(1)
    raise RuntimeError("asked")


QUESTIONS = (
    "repr",
    "str",
    "hash",
    "eq",
    "len",
    "iter",
    "bool",
    "call",
    "format",
    "getattr",
    "getattribute",
    "getitem",
)


class RefusingMeta(type):
    __getattribute__ = __hash__ = __eq__ = __instancecheck__ = __subclasscheck__ = __repr__ = refuse


class Partial(functools.partial[Any]):
    func = property(refuse)


@functools.cache
def nasty() -> dict[str, Any]:
    refusing: dict[str, Any] = {f"__{name}__": refuse for name in QUESTIONS}
    kinds: list[Any] = [
        type(f"Nasty_{base.__name__}", (base,), refusing)
        for base in (object, str, int, tuple, list, dict, set)
    ]
    cyclic: list[Any] = [{}]
    cyclic[0]["again"] = cyclic
    deep: list[Any] = []
    shared: list[Any] = []
    for _ in range(5_000):  # five times as deep as Python's stack
        deep, shared = [deep], [shared, shared]
    loop = types.SimpleNamespace()
    loop.fn = loop.__wrapped__ = loop
    lazy = types.ModuleType("asking")
    lazy.__getattr__ = refuse  # type: ignore[method-assign]
    return {
        **{kind.__name__: kind.__new__(kind) for kind in kinds},
        "class attribute": type(
            "Nasty", (), {"p": property(refuse), "__class__": property(refuse)}
        )(),
        "dict property": type(
            "Nasty", (), {"__dict__": property(refuse), "__module__": 5, "__slots__": ()}
        )(),
        "metaclass": object.__new__(RefusingMeta("Nasty", (), {})),  # type: ignore[arg-type]
        "class": RefusingMeta("Nasty", (), {}),
        "cyclic": cyclic,
        "wraps itself": loop,
        "deep": deep,
        "shared": shared,
        "partial": Partial(len),
        "mock": unittest.mock.MagicMock(),
        "ops": torch.ops.aten,
        "lazy module": lazy,
        "configs": types.SimpleNamespace(fn=adding, configs=5),
        "empty cell": with_globals("def f():\n    def g(): return x\n    return g\n    x = 1")(),
    }


def from_below(depth: int, function: object) -> str:
    """The fingerprint as it is with less of the stack left."""
    return from_below(depth - 1, function) if depth else fingerprint(function)


@pytest.mark.parametrize("name", nasty())
def test_nothing_raises_and_nothing_hides_the_code_beside_it(name: str):
    """Objects that refuse to answer, and are not asked, wherever they are: a result, and another
    one when the code beside them changes.
    """
    thing = nasty()[name]
    asked.clear()
    assert len(fingerprint(thing)) == 16
    assert fingerprint(returning(thing)) == from_below(300, returning(thing))
    for places in (
        [returning(thing, 1), returning(thing, 2)],
        [with_globals(f"def f(): return odd.a, {n}", odd=thing) for n in (1, 2)],
        [with_globals(f"def f(): return ODD, {n}", ODD=[thing]) for n in (1, 2)],
        [
            with_globals(f"class f:\n    ODD = odd\n    def g(self): return {n}", odd=thing)
            for n in (1, 2)
        ],
        [with_globals(f"def f(x={{1: odd}}, *, y=odd): return {n}", odd=thing) for n in (1, 2)],
    ):
        one, other = map(fingerprint, places)
        assert one != other
    assert name == "dict property" or not asked


def seconds(function: object) -> float:
    """Of this thread alone: other processes may keep the processor busy."""
    began = time.thread_time()
    fingerprint(function)
    return time.thread_time() - began


def test_huge_values_take_no_time():
    """Captured or a constant of the module: their start counts, and their length; what is beyond
    four thousand elements does not.
    """
    for value in (
        range(10**9),
        [0] * 10**6,
        {n: str(n) for n in range(10**5)},
        set(map(str, range(10**5))),
        "x" * 10**7,
        1 << 10**6,
    ):
        assert seconds(returning(value)) < 1
        assert seconds(with_globals("def f(): return VALUE", VALUE=value)) < 1
    one, other = [0] * 10**5, [0] * (10**5 - 1) + [1]
    assert (
        fingerprint(returning(one))
        == fingerprint(returning(other))
        != fingerprint(returning(one[:-1]))
    )


def test_many_callees_take_no_time():
    """The last of a thousand counts, and that of a chain of 1,500; of three thousand those that
    come first.
    """
    many = {f"g{n:04}": returning(n) for n in range(3000)}
    thousand = f"def f(): return [{','.join(sorted(many)[:1000])}]"
    everything = f"def f(): return [{','.join(many)}]"
    chain = (
        "\n".join(f"def f{n}(x): return f{n + 1}(x)" for n in range(1500))
        + "\nf = f0\ndef f1500(x): return "
    )
    same, other = {"g2999": returning(-1)}, {"g0999": returning(-1)}
    assert fingerprint(with_globals(thousand, **many)) != fingerprint(
        with_globals(thousand, **many | other)
    )
    assert fingerprint(with_globals(everything, **many)) == fingerprint(
        with_globals(everything, **many | same)
    )
    assert fingerprint(with_globals(chain + "x")) != fingerprint(with_globals(chain + "-x"))
    assert seconds(with_globals(everything, **many)) < 1


def test_a_parser_that_loses_count_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As Python 3.11's does, where another thread parses during a garbage collection: the digest is
    the same.
    """
    expected, own, n_failed = fingerprints(tmp_path / "one")["of_layer"], ast.parse, 0

    def parse(source: str) -> ast.Module:
        nonlocal n_failed
        n_failed += 1
        if n_failed < 4:
            raise SystemError("AST constructor recursion depth mismatch")
        return own(source)

    monkeypatch.setattr(ast, "parse", parse)
    assert fingerprints(tmp_path / "other")["of_layer"] == expected
    assert n_failed >= 4
