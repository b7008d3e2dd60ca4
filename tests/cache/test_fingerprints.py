"""Fingerprints of code: equal wherever the code is the same, different wherever it does something else."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton.language as tl

from dist_tune import autotune
from dist_tune.cache import read_code
from tests.function_options import BLOCKS, quiet
from tests.source_programs import HELPERS, NAMES, PROGRAM, fingerprint, fingerprints, load, returning, with_globals


@pytest.fixture(autouse=True)
def _no_modules_left():
    yield
    for name in ("helpers", "program"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fingerprints(tmp_path_factory.mktemp("unchanged"))


def moved(text: str) -> str:
    """The same code, some lines down and laid out otherwise, with other comments and docstrings."""
    text = text.replace("Does much.", "Does something else.").replace('"""Doubles."""', '"""Twice."""')
    text = (
        text.replace("by=2):", "by = 2,\n    ):")
        .replace("[near(each)", "[(near(\n        each))")
        .replace("return weight * width", "return (weight*width)")
    )
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
from tests.source_programs import fingerprint
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


def test_versions_of_python_do_not_count(unchanged: dict[str, str]):
    """The same digits with Python 3.11, 3.12 and 3.13; a change of them makes all records useless."""
    digits = {"made": "da470c8b87e2fe80", "Layer": "d6ca57b4f22870b2", "doubled": "409923f3004840e3", "of_layer": "ddd8be0f8ac723e7"}
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
        # Callees in other modules, two levels down, by a module's attribute or imported by name; what nobody calls does not count.
        ("return x + 1", "return x + 2", "step"),
        ("SCALE = 3", "SCALE = 4", "step"),
        ("constexpr(8)", "constexpr(16)", "kernel launches"),
        ("x / PARTS", "x * PARTS", "kernel launches"),
        ("PARTS: tl.constexpr", "PARTS", "kernel launches"),
        ("x):\n    return x\n", "x):\n    return -x\n", ""),
        # State and words: counters, docstrings, what tensors hold, caches of tensors, and globals that the code does not name.
        ("N_CALLS = 0", "N_CALLS = 5", ""),
        ("Adds.", "Subtracts.", ""),
        ("torch.empty(2, 3)", "torch.ones(2, 3)", ""),
        ("_CACHE = {}", "_CACHE = {(1, 2): (torch.empty(3), 7)}", ""),
        ("import helpers\n", "import helpers\nunrelated = 7\nUNRELATED = 8\n", ""),
    ],
)
def test_what_does_something_else_reads_otherwise(tmp_path: Path, unchanged: dict[str, str], old: str, new: str, changed: str):
    """One change in the program or its helpers changes the fingerprints of all that uses it, and of nothing else."""
    assert (old in PROGRAM) != (old in HELPERS)
    now = fingerprints(tmp_path, PROGRAM.replace(old, new), HELPERS.replace(old, new))
    assert [name for name in NAMES if now[name] != unchanged[name]] == sorted(changed.split(), key=NAMES.index)


def test_a_variable_that_the_code_assigns_to_is_state():
    """A counter of calls does not change what is called; a captured number that nobody assigns to does."""

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


def test_a_lower_case_global_may_be_state():
    """Unless it is a constexpr of Triton's, or code."""
    one, other = ([with_globals("def f(): return width", width=each) for each in (n, [n], {"n": n})] for n in (1, 2))
    assert [*map(fingerprint, one)] == [*map(fingerprint, other)]
    one, other = ([with_globals("def f(): return width", width=each) for each in (tl.constexpr(n), returning(n))] for n in (1, 2))
    assert not {*map(fingerprint, one)} & {*map(fingerprint, other)}


FILES = {
    "lazy_helper": "from lazy_deeper import deep\n# words\ndef work(x):\n    return deep(x)\ndef other(x):\n    return x\n",
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
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    unload(monkeypatch)
    return tmp_path


def unload(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("lazy_")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("form", "module"),
    [
        ("from lazy_helper import work\n    return work(x)", "lazy_helper"),
        ("import lazy_helper\n    return lazy_helper.work(x)", "lazy_helper"),
        ("from lazy_pack import inner\n    return inner.deepest(x)", "lazy_pack.inner"),
        ("from .inner import deepest\n    return deepest(x)", "lazy_pack.inner"),
    ],
)
def test_an_import_within_a_function_is_followed_if_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, form: str, module: str):
    """Otherwise it is named, and nothing is loaded for that."""
    (folder / "lazy_user.py").write_text(f"def f(x):\n    {form}\n")

    def read() -> tuple[str, list[str]]:
        user = importlib.import_module("lazy_user")
        vars(user)["__package__"] = "lazy_pack"
        digest, not_followed = read_code(user.f)
        unload(monkeypatch)
        return digest, not_followed

    before, not_followed = read()
    assert len(not_followed) == 1
    assert not_followed[0].startswith(module.partition(".")[0])
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
        "def f(x, name):\n    import json, torch.nn, math\n    from lazy_absent import one, two\n    import lazy_broken\n"
        "    import importlib\n    importlib.import_module(name)\n    from ....beyond import all\n"
    )
    expected = ["....beyond.all", "import_module(...)", "lazy_absent.one", "lazy_absent.two", "lazy_broken"]
    assert read_code(importlib.import_module("lazy_user").f).not_followed == expected


def test_a_file_that_has_changed_since_it_was_loaded_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The code in memory does: its fingerprint is not that of the new file."""
    stale = importlib.import_module("lazy_pack.inner").deepest
    (folder / "lazy_pack" / "inner.py").write_text("def deepest(x):\n    return x - 1\n")
    read = fingerprint(stale)
    unload(monkeypatch)
    assert fingerprint(importlib.import_module("lazy_pack.inner").deepest) != read


@pytest.mark.once
def test_an_edit_of_a_helper_tunes_anew(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Comments and layout of a helper that the tuned function calls do not; the record says which import is not in its source."""
    quiet(monkeypatch, tmp_path)
    (folder / "lazy_step.py").write_text(
        "import lazy_helper\ndef step(x, block):\n    try:\n        from lazy_absent import one\n"
        "    except ImportError:\n        one = 1\n    return lazy_helper.work(x) * one\n"
    )

    def is_hit() -> bool:
        unload(monkeypatch)
        tuned = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(importlib.import_module("lazy_step").step)
        tuned(torch.ones(2))
        assert tuned.records[0].not_followed == ["lazy_absent.one"]
        return bool(tuned.records[0].is_recalled)

    assert [is_hit(), is_hit()] == [False, True]
    (folder / "lazy_deeper.py").write_text("# words\n\ndef deep(x):\n    return (x\n            + 1)\n")
    assert is_hit()
    (folder / "lazy_deeper.py").write_text("def deep(x):\n    return x + 2 - 1\n")
    assert [is_hit(), is_hit()] == [False, True]
