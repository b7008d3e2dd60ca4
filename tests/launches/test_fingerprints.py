"""Digests of code: equal where the code is the same, different where it does something else; what
they miss costs no result.
"""

import contextlib
import enum
import functools
import importlib
import json
import os
import subprocess
import sys
import types
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import KernelInterface

from dist_tune import autotune
from dist_tune.launches import read_code
from tests.steps import BLOCKS, quiet

HELPERS = """
import triton
import triton.language as tl
from triton.runtime.jit import KernelInterface
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
from triton.runtime.jit import KernelInterface
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

PICKED = {near, middle, helpers.deepest, Mode, torch.nn.Linear, functools.partial, print, int}

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
    for name in [each for each in sys.modules if each in ("helpers", "program", "lazy_step")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def fingerprint(function: object) -> str:
    """The digest of all code of a function, or of a kernel that is launched."""
    return read_code(function, launches=isinstance(function, KernelInterface)).digest


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


# -- what counts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fingerprints(tmp_path_factory.mktemp("unchanged"))


@pytest.mark.once
@pytest.mark.processes
def test_folder_process_and_hash_seed_do_not_count(tmp_path: Path):
    """In another process, with another hash seed and folder, all digests are the same, and no two
    are.
    """
    here = fingerprints(tmp_path / "here")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helpers.py").write_text(HELPERS)
    again = "import json, program; from tests.launches.test_fingerprints import NAMES, fingerprint;"
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


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("LIMIT = 7", "LIMIT = 8", "step"),
        ('"fp32": 4', '"fp32": 8', "step"),
        ("torch.bfloat16", "torch.float16", "step"),
        ('"pull", "mpi"}\nDTYPE', '"pull"}\nDTYPE', "step"),
        ('"pull", "mpi"}:', '"pull"}:', "step"),
        ('{"middle": middle, ', "{", "step"),
        ("by=2", "by=3", "step of_layer cached bound method Layer"),
        ("1e-5", "1e-6", "step"),
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
        ("@triton.jit(noinline=True)", "@triton.jit", "kernel"),
        ('key=["n"]', 'key=["n"], reset_to_zero=["x_ptr"]', "kernel launches"),
        ('key=["n"]', 'key=["n"], post_hook=pre_hook', "kernel launches"),
        # Configs are the candidates, which are stated elsewhere.
        ('"BLOCK": 32', '"BLOCK": 64', ""),
        # Callees in other modules, two levels down, by a module's attribute or imported by name;
        # a function that is not called does not count.
        ("return x + 1", "return x + 2", "step"),
        ("SCALE = 3", "SCALE = 4", "step"),
        ("constexpr(8)", "constexpr(16)", "kernel launches"),
        ("x / PARTS", "x * PARTS", "kernel launches"),
        ("x):\n    return x\n", "x):\n    return -x\n", ""),
        # State: counters, what tensors hold, caches, and globals that the code does not name.
        ("torch.empty(2, 3)", "torch.ones(2, 3)", ""),
        ("_CACHE = {}", "_CACHE = {(1, 2): (torch.empty(3), 7)}", ""),
        ("import helpers\n", "import helpers; unrelated = 7; UNRELATED = 8\n", ""),
    ],
)
def test_what_does_something_else_reads_otherwise(
    tmp_path: Path, unchanged: dict[str, str], old: str, new: str, changed: str
):
    """One change in the program or its helpers changes the digests of all that uses it, and of
    nothing else.
    """
    assert (old in PROGRAM) != (old in HELPERS)
    now = fingerprints(tmp_path, PROGRAM.replace(old, new), HELPERS.replace(old, new))
    assert [name for name in NAMES if now[name] != unchanged[name]] == sorted(
        changed.split(), key=NAMES.index
    )


def test_code_without_a_source_is_read():
    """Functions made by exec, lambdas, and a body that calls itself or its caller."""
    codes = [
        *(f"def f({arguments}): return x" for arguments in ("x", "*x", "x, y")),
        *("def f(x): return f(x - 1)", "def f(x): yield x", "f = lambda x: x * 2"),
        *(f"def f(x): return g(x)\ndef g(x): return f({argument})" for argument in ("x", "-x")),
        *(f"def f(x): return [y * {n} for y in x]" for n in (2, 3)),
        *(f"class f:\n    def g(self): return {n}" for n in (1, 2)),
    ]
    read = [fingerprint(with_globals(code)) for code in codes]
    assert len(set(read)) == len(codes)
    assert [fingerprint(with_globals(code)) for code in codes] == read


class Mode(enum.Enum):
    FAST = 1
    SAFE = 2


class Options:
    def __init__(self, width: int) -> None:
        self.width = width


VALUES: list[Any] = [
    *(None, True, 1, 1.0, "1", b"1", (1,), [1], {1: 1}, {1}, (), 2, 1 << 70, 10**5000, "x" * 5000),
    *(torch.float16, torch.empty(2), torch.empty(3), torch.empty(2, dtype=torch.int8)),
    *(tl.float16, tl.bfloat16, tl.constexpr(3), tl.constexpr(4)),
    *(
        (1, (2, 3)),
        ((1, 2), 3),
        {"a": {"b": 1}},
        {"a": {"b": 2}},
        returning,
        fingerprint,
        Options,
        *Mode,
    ),
]


def test_captured_values_are_told_apart():
    """Scalars, containers, dtypes, shapes, constants and functions; an object by its class alone,
    in the digest, and by its plain attributes where two kernels of one factory are told apart.
    """
    read = [fingerprint(returning(value)) for value in VALUES]
    assert len(set(read)) == len(read)
    assert [fingerprint(returning(value)) for value in VALUES] == read
    one, other = read_code(returning(Options(1))), read_code(returning(Options(2)))
    assert one.digest == other.digest
    assert {name for name in one.captured if one.captured[name] != other.captured[name]} == {
        "value"
    }


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "lru_cache": functools.lru_cache,
    "partial": functools.partial,
    "wraps": lambda function: functools.wraps(function)(lambda *args: function(*args)),
    "no_grad": torch.no_grad(),
    "contextmanager": contextlib.contextmanager,
    "bound method": lambda function: types.MethodType(function, 7),
    "subclass": lambda function: type("Made", (type("Base", (), {"method": function}),), {}),
    "module": lambda function: type("Made", (torch.nn.Module,), {"forward": function})(),
    "custom_op": lambda function: types.SimpleNamespace(_init_fn=function),
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_are_looked_through(wrapper: Callable[[Callable[..., Any]], Any]):
    """The same wrapper around two functions is two things, called, captured or a global."""
    for place in (
        lambda thing: thing,
        returning,
        lambda thing: with_globals("def f(): return thing", thing=thing),
    ):
        assert fingerprint(place(wrapper(adding))) != fingerprint(place(wrapper(subtracting)))
        assert fingerprint(place(wrapper(adding))) == fingerprint(place(wrapper(adding)))


def refuse(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("asked")


class RefusingMeta(type):
    __getattribute__ = __hash__ = __eq__ = __instancecheck__ = __subclasscheck__ = __repr__ = refuse


def odd_things() -> dict[str, Any]:
    refusing: dict[str, Any] = {f"__{name}__": refuse for name in ("repr", "hash", "eq", "len")}
    loop, cyclic = types.SimpleNamespace(), list[Any]()
    loop.fn = loop.__wrapped__ = loop
    cyclic.append(cyclic)
    return {
        "object": type("Odd", (), refusing)(),
        "int": type("Odd", (int,), refusing)(),
        "metaclass": object.__new__(RefusingMeta("Odd", (), {})),  # type: ignore[arg-type]
        "cyclic": cyclic,
        "wraps itself": loop,
        "mock": unittest.mock.MagicMock(),
        "ops": torch.ops.aten,
        "huge": [0] * 10**6,
        "empty cell": with_globals("def f():\n    def g(): return x\n    return g\n    x = 1")(),
    }


@pytest.mark.parametrize("name", odd_things())
def test_nothing_raises_and_nothing_hides_the_code_beside_it(name: str):
    """Objects that refuse to answer, wherever they are: a result, and another one when the code
    beside them changes.
    """
    thing = odd_things()[name]
    assert len(fingerprint(thing)) == 16
    for places in (
        [returning(thing, 1), returning(thing, 2)],
        [with_globals(f"def f(): return odd.a, {n}", odd=thing) for n in (1, 2)],
        [with_globals(f"def f(): return ODD, {n}", ODD=[thing]) for n in (1, 2)],
    ):
        one, other = map(fingerprint, places)
        assert one != other


def test_of_many_callees_the_nearest_count():
    """The last of two hundred does, and that of a thousand does not: the work is bounded."""
    many = {f"g{n:04}": returning(n) for n in range(1000)}
    hundreds = f"def f(): return [{','.join([*many][:200])}]"
    everything = f"def f(): return [{','.join(many)}]"
    one, other = many | {"g0199": adding}, many | {"g0999": adding}
    assert fingerprint(with_globals(hundreds, **one)) != fingerprint(with_globals(hundreds, **many))
    assert fingerprint(with_globals(everything, **other)) == fingerprint(
        with_globals(everything, **many)
    )


@triton.jit
def calling_a_function(x):
    return adding(x)


@triton.jit
def calling_deep(x):
    return calling_a_function(x)


def test_a_kernel_that_cannot_be_compiled_is_read_and_keeps_no_key():
    """Triton would leave "recursion:name" as its key, which other kernels of the name have too."""
    assert fingerprint(calling_deep) != fingerprint(calling_a_function)
    assert (calling_deep.hash, calling_a_function.hash) == (None, None)
    with pytest.raises(RuntimeError, match="Unsupported function"):
        _ = calling_deep.cache_key


MODE = tl.constexpr(0)


@triton.jit
def of_a_mode(x):
    return x + MODE


def launching() -> Any:
    return of_a_mode


def test_a_kernel_that_is_not_launched_yet_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    """Triton takes its constants as they are at the launch: a step may set them before."""
    read_code(launching)
    assert (of_a_mode.hash, of_a_mode.used_global_vals) == (None, {})
    before = fingerprint(of_a_mode)
    of_a_mode.hash = None
    monkeypatch.setitem(globals(), "MODE", tl.constexpr(1))
    assert fingerprint(of_a_mode) != before


def of_ranks(code: str, loaded: str = "") -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        if loaded:
            patch.setitem(sys.modules, loaded, types.ModuleType(loaded))
        return read_code(with_globals(code)).captured


def test_what_one_rank_alone_has_imported_is_no_other_code():
    """A library that the function imports when it runs, as loggers of the first rank."""
    code = "def f(x):\n    import wandb\n    return x"
    assert of_ranks(code) == of_ranks(code, "wandb")


def addressed(x: int) -> int:
    return x


TABLE_OF = tl.constexpr(addressed)


@triton.jit
def with_an_object(x):
    return x + TABLE_OF


def test_a_constant_without_a_text_of_its_own_does_not_make_the_digest(
    monkeypatch: pytest.MonkeyPatch,
):
    """Triton's key would hold its address, another one in each process."""
    before = fingerprint(with_an_object)
    with_an_object.hash = None
    again = types.FunctionType(addressed.__code__, globals(), "addressed")
    monkeypatch.setitem(globals(), "TABLE_OF", tl.constexpr(again))
    assert fingerprint(with_an_object) == before


# -- what they miss costs no result ----------------------------------------------------------------

STEP = """
import helper
part = helper.Part()

def step(x, block):
    return part.of(x, block)
"""
HELPER = """
class Part:
    def of(self, x, block):
        return x + 1
"""


added = [1.0]


def expected(x: torch.Tensor) -> torch.Tensor:
    return x + added[0]


@pytest.mark.once
def test_a_change_that_no_digest_sees_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The method of a global object is not read. Where it changes, the record counts, and the call
    has the result of the new code; ``check=`` is asked again, and where the recorded config is
    wrong now, another one is chosen.
    """
    quiet(monkeypatch, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazy_step.py").write_text(STEP.replace("helper", "helpers"))

    def call(helper: str) -> tuple[bool, float, Any]:
        (tmp_path / "helpers.py").write_text(helper)
        unload()
        tuned = autotune(BLOCKS, None, n_warmup=0, n_repeat=1, check=expected)(
            importlib.import_module("lazy_step").step
        )
        value = tuned(torch.ones(2))
        record = tuned.records[0]
        return record.is_recalled, value[0].item(), record.best.fields["block"]

    is_hit, value, winner = call(HELPER)
    assert (is_hit, value) == (False, 2.0)
    changed, added[0] = HELPER.replace("x + 1", "x + 7"), 7.0
    assert call(changed) == (True, 8.0, winner)
    is_hit, value, other = call(changed.replace("x + 7", f"x + 7 + 100 * (block == {winner})"))
    assert (is_hit, value) == (False, 8.0)
    assert other != winner


@pytest.mark.once
def test_an_edit_of_a_helper_tunes_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a function that the tuned one calls, in another module."""
    quiet(monkeypatch, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazy_step.py").write_text(
        "import helpers\ndef step(x, block):\n    return helpers.middle(x)\n"
    )

    def is_hit(helpers: str) -> bool:
        (tmp_path / "helpers.py").write_text(helpers)
        unload()
        importlib.import_module("helpers")
        tuned = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(
            importlib.import_module("lazy_step").step
        )
        tuned(torch.ones(2))
        return bool(tuned.records[0].is_recalled)

    assert [is_hit(HELPERS), is_hit(HELPERS)] == [False, True]
    changed = HELPERS.replace("return x + 1", "return x + 2 - 1")
    assert [is_hit(changed), is_hit(changed)] == [False, True]
