"""Fingerprints of code: equal wherever the code is the same, different wherever it does something else."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import triton.language as tl

from dist_tune.cache.code.fingerprints import fingerprint
from tests.source_programs import HELPERS, NAMES, PROGRAM, fingerprints, load, returning, with_globals


@pytest.fixture(autouse=True)
def _no_modules_left():
    yield
    for name in ("helpers", "program"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fingerprints(tmp_path_factory.mktemp("unchanged"))


def moved(text: str) -> str:
    """The same code, some lines down, with other comments and docstrings."""
    text = text.replace("Does much.", "Does something else.").replace('"""Doubles."""', '"""Twice."""')
    text = text.replace("    x = tl.load", "    # loads\n\n    x = tl.load").replace("    return x +", "    # adds\n    return x +")
    return "# A comment\n\n\n" + text.replace("\ndef ", "\n\n\n# And one more.\n\ndef ")


@pytest.mark.once
@pytest.mark.processes
def test_place_comments_hash_seed_and_interpreter_do_not_count(tmp_path: Path):
    """Another process, hash seed and folder, lines moved, comments added, TRITON_INTERPRET, a launch: all fingerprints are the same."""
    here = fingerprints(tmp_path / "here")
    there = tmp_path / "there" / "deeper"
    load(there, moved(PROGRAM), moved(HELPERS))
    again = f"""
import json, sys
sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(there)!r}]
import program, torch
from dist_tune.cache.code.fingerprints import fingerprint
assert type(program.doubled).__name__ == "InterpretedFunction"
first = {{name: fingerprint(vars(program)[name]) for name in {NAMES}}}
program.plain[(1,)](torch.ones(4))  # adds names to the globals of the kernel, T among them
print(json.dumps([first, {{name: fingerprint(vars(program)[name]) for name in first}}]))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "77", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", again], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [here, here]
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
        ("FAST = 1", "FAST = 3", "step"),
        ("by=2", "by=3", "step of_layer cached bound method Layer"),
        ("1e-5", "1e-6", "step"),
        ("eps: float", "eps", "step"),
        ("x, *, eps", "x, eps", "step"),
        ("WIDTH = 4", "WIDTH = 5", "of_layer method Layer"),
        ("self.inner(x)", "self.inner(-x)", "of_layer method Layer"),
        ("return x - 1", "return x", "of_layer method Layer"),
        ("return 10", "return 11", "of_layer method Layer"),
        ("made(6,", "made(7,", "factory"),
        ("torch.empty(2, 3)", "torch.empty(2, 4)", "factory"),
        ("torch.empty(2, 3)", "torch.empty(2, 3).half()", "factory"),
        ("(x)\n        return weight", "(-x)\n        return weight", "factory made"),
        ("by=9", "by=8", "bound"),
        ("return x * 2", "return x * 3", "kernel launches doubled"),
        ("% 16 == 0", "% 8 == 0", "kernel launches"),
        ("n, BLOCK: tl", "n, MORE, BLOCK: tl", "kernel launches"),
        ("BLOCK: tl.constexpr", "BLOCK", "kernel launches"),
        (".zero_()", ".fill_(1)", "kernel launches"),
        ('"BLOCK": 32', '"BLOCK": 64', "launches"),  # the candidates of the kernel itself are stated elsewhere
        ("@triton.jit(noinline=True)", "@triton.jit", "kernel launches doubled"),
        ('key=["n"]', 'key=["n"], reset_to_zero=["x_ptr"]', "kernel launches"),
        ('key=["n"]', 'key=["n"], post_hook=pre_hook', "kernel launches"),
        ("(1,)](x, 16)", "(2,)](x, 16)", "launches"),
    ],
)
def test_what_does_something_else_reads_otherwise(tmp_path: Path, unchanged: dict[str, str], old: str, new: str, changed: str):
    """One change in the program changes the fingerprints of all that uses it, and of nothing else."""
    assert old in PROGRAM
    now = fingerprints(tmp_path, PROGRAM.replace(old, new))
    assert [name for name in NAMES if now[name] != unchanged[name]] == sorted(changed.split(), key=NAMES.index)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return x + 1", "return x + 2", "step"),
        ("SCALE = 3", "SCALE = 4", "step"),
        ("constexpr(8)", "constexpr(16)", "kernel launches"),
        ("x / PARTS", "x * PARTS", "kernel launches"),
        ("PARTS: tl.constexpr", "PARTS", "kernel launches"),
        ("    return x\n", "    return -x\n", ""),
    ],
)
def test_callees_in_other_modules_count(tmp_path: Path, unchanged: dict[str, str], old: str, new: str, changed: str):
    """Two levels down, by a module's attribute or imported by name, function or kernel; what nobody calls does not."""
    assert old in HELPERS
    now = fingerprints(tmp_path, PROGRAM, HELPERS.replace(old, new))
    assert [name for name in NAMES if now[name] != unchanged[name]] == changed.split()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("N_CALLS = 0", "N_CALLS = 5"),
        ("Adds.", "Subtracts."),
        ("torch.empty(2, 3)", "torch.ones(2, 3)"),
        ("_CACHE = {}", "_CACHE = {(1, 2): (torch.empty(3), 7)}"),
        ("import helpers\n", "import helpers\nunrelated = 7\nUNRELATED = 8\n"),
    ],
)
def test_state_and_words_do_not_count(tmp_path: Path, unchanged: dict[str, str], old: str, new: str):
    """Counters, docstrings, what tensors hold, caches of tensors, and globals that the code does not name."""
    assert old in PROGRAM
    assert fingerprints(tmp_path, PROGRAM.replace(old, new)) == unchanged


def test_a_variable_that_the_code_assigns_to_is_state():
    """A counter of calls does not change what is called; a captured number that nobody assigns to does."""

    def counting() -> Callable[[], int]:
        n_calls, step = 0, 2

        def inner() -> int:
            nonlocal n_calls
            n_calls += step
            return n_calls

        return inner

    function = counting()
    before = fingerprint(function)
    assert [function(), function()] == [2, 4]
    assert fingerprint(function) == before
    assert fingerprint(returning(2)) != fingerprint(returning(3))


def test_a_lower_case_global_may_be_state():
    """Unless it is a constexpr of Triton's, or code."""
    one, other = ([with_globals("def f(): return width", width=each) for each in (n, [n], {"n": n})] for n in (1, 2))
    assert [*map(fingerprint, one)] == [*map(fingerprint, other)]
    one, other = ([with_globals("def f(): return width", width=each) for each in (tl.constexpr(n), returning(n))] for n in (1, 2))
    assert not {*map(fingerprint, one)} & {*map(fingerprint, other)}


def test_use_does_not_count():
    """Specialised bytecode of a hot function, and a filled lru_cache."""
    hot, cached = with_globals("def f(x):\n    return x.real + x.imag * 2"), functools.lru_cache(returning)
    before = fingerprint(hot), fingerprint(cached)
    for number in range(5000):
        hot(number)
        cached(number)
    assert (fingerprint(hot), fingerprint(cached)) == before
