"""``install`` and ``python -m dist_tune.install``: what is wrapped, when, what is said, and that a
program does not notice.
"""

from __future__ import annotations

import atexit
import copy
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Generator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dist_tune
from tests.programs import ROOT, Done, of_checkout, run_python

MODULE = """
import functools

class Base:
    def inherited(self):
        return self

class Trainer(Base):
    n_steps = 3
    class Inner:
        def step(self):
            return self
    def training_step(self, x):
        return x + 1
    @staticmethod
    def static(x):
        return x
    @classmethod
    def made(cls):
        return cls
    @property
    def shown(self):
        return 1
    def batches(self):
        yield 1
    async def wait(self):
        pass

def step(x):
    return x * 2

class Meta(type):
    def made_by_meta(cls, x):
        return x

class Made(metaclass=Meta):
    pass

trainer = Trainer()
trainer.callback = step
alias = step
part = functools.partial(step, 1)

class Subclass(Trainer):
    def training_step(self, x, *, by=2):
        return super().training_step(x) * by

def made(n):
    global counted
    def counted():
        return n
    counted.__qualname__ = "counted"

made(7)

class Slotted:
    __slots__ = ()
    def step(self):
        return 1

slotted = Slotted()
"""


@pytest.fixture(autouse=True)
def at_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[list[Callable[[], None]]]:
    """Modules of a folder of its own, and ``install`` without targets of other tests; what it
    leaves to the end of the program.
    """
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delattr(sys, "last_type", raising=False)
    monkeypatch.setattr(dist_tune, "install", dist_tune.install)
    monkeypatch.delitem(sys.modules, "dist_tune.install")
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(atexit, "register", ends.append)
        monkeypatch.setattr(
            dist_tune, "install", importlib.import_module("dist_tune.install").install
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/__init__.py").touch()
    (tmp_path / "shop/trainer.py").write_text(MODULE)
    (tmp_path / "shop/loop.py").write_text(
        "from shop.trainer import step\n\ndef run(x):\n    return step(x)\n"
    )
    yield ends
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shop", "zipped")]:
        del sys.modules[name]


@pytest.fixture
def ended(
    at_end: list[Callable[[], None]], capfd: pytest.CaptureFixture[str]
) -> Callable[[], list[str]]:
    """Ends the program; what it has said."""

    def lines() -> list[str]:
        for end in at_end:
            end()
        return capfd.readouterr().err.splitlines()

    return lines


def loaded(*targets: str, name: str = "shop.trainer") -> ModuleType:
    """The module with these functions of it installed."""
    for target in targets:
        dist_tune.install(f"{name}:{target}")
    return importlib.import_module(name)


def is_wrapped(function: object) -> bool:
    return hasattr(function, "records")


# -- what is wrapped -------------------------------------------------------------------------------


# A target, what else is wrapped then because it is the same function, and what a program does with
# it.
TARGETS = """
step                    alias trainer.callback loop.step  step(2), alias(2), part(), loop.run(2), again(step) is step, again(part)()
alias                                                     alias(2), again(alias) is alias, again(step) is step
Trainer.training_step   trainer.training_step             Trainer().training_step(1), again(Trainer().training_step)(1), again(Trainer)
Trainer.static          trainer.static Subclass.static    Trainer().static(5), Trainer.static(5), kind("static")
Trainer.made            trainer.made Subclass.made        Trainer().made(), again(Trainer.made) == Trainer.made, kind("made")
Trainer.inherited       trainer.inherited                 type(Trainer().inherited()), again(Trainer.inherited) is Trainer.inherited
Trainer.Inner.step                                        type(Trainer.Inner().step())
Subclass.training_step                                    Subclass().training_step(2), signature(Subclass.training_step)
Subclass.static                                           Subclass().static(5), Subclass.static(5)
Subclass.made                                             Subclass().made(), Subclass.made()
counted                                                   counted(), again(counted) is counted
trainer.training_step                                     trainer.training_step(1)
trainer.static                                            trainer.static(5)
trainer.made                                              trainer.made()
trainer.inherited                                         trainer.inherited() is trainer, [each.inherited() is each for each in copies()]
trainer.callback                                          trainer.callback(3), again(trainer.callback) is trainer.callback
"""  # noqa: E501
ROWS = [
    (line[:24].strip(), line[24:58].split(), line[58:]) for line in TARGETS.strip().splitlines()
]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("target", "others", "use"), ROWS)
def test_functions_and_methods_of_all_kinds_act_as_before(
    target: str, others: list[str], use: str, is_late: bool
):
    """Installed before the import or after it: for one class or one object, pickled, with its
    defaults, cells and ``super()``.
    """

    def seen(text: str) -> Any:
        shop, loop = (importlib.import_module(f"shop.{name}") for name in ("trainer", "loop"))
        again = lambda value: pickle.loads(pickle.dumps(value))  # noqa: E731  # for the expressions
        tools = {
            "copies": lambda: (copy.deepcopy(shop.trainer), again(shop.trainer)),
            "kind": lambda name: type(vars(shop.Trainer)[name]),
        }
        return eval(
            text,
            {**vars(shop), **tools, "again": again, "loop": loop, "signature": inspect.signature},
        )

    before = repr(seen(use))
    for name in ("shop.trainer", "shop.loop") if not is_late else ():
        del sys.modules[name]
    loaded(target)
    assert repr(seen(use)) == before
    names = ["Base.inherited", "loop.step", "loop.run", *(name for name, *_ in ROWS)]
    assert {name for name in names if is_wrapped(seen(name))} == {target, *others}


def test_the_loader_of_a_module_is_its_own():
    """Also after a reload, which is wrapped anew."""
    shop = loaded("step", "Trainer.made")
    assert [type(each) for each in (shop.__loader__, shop.__spec__.loader)] == [  # type: ignore[union-attr]
        SourceFileLoader
    ] * 2
    assert inspect.getsource(shop) == MODULE
    importlib.reload(shop)
    assert is_wrapped(shop.step)
    assert not is_wrapped(shop.step.__wrapped__)


def test_a_look_for_the_module_and_an_import_that_fails_do_not_spend_the_target(tmp_path: Path):
    """``find_spec`` loads nothing; a module that raised may be imported again."""
    (tmp_path / "shop/late.py").write_text("raise OSError\n")
    dist_tune.install("shop.late:step")
    assert importlib.util.find_spec("shop.late") is not None
    assert importlib.util.find_spec("shop.none") is None
    with pytest.raises(OSError):
        importlib.import_module("shop.late")
    (tmp_path / "shop/late.py").write_text("def step():\n    return 'at last'\n")
    importlib.invalidate_caches()
    shop = importlib.import_module("shop.late")
    assert (is_wrapped(shop.step), shop.step()) == (True, "at last")


def test_a_loader_of_several_modules_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One zipimporter serves all modules of its archive."""
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/a.py", "def step():\n    return 1\n")
        archive.writestr(
            "zipped/b.py", "from zipped.a import step as other\ndef step():\n    return 2\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path / "z.zip"))
    b = loaded("step", name="zipped.b")
    assert (is_wrapped(b.step), is_wrapped(b.other), b.step()) == (True, False, 2)


def test_a_folder_without_init_is_imported_as_ever(tmp_path: Path):
    (tmp_path / "shop/folder").mkdir()
    assert loaded("step", name="shop.folder").__path__


def test_a_function_of_a_module_whose_import_has_begun_is_told_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Installed by what the module imports: what it has defined before is wrapped, what comes later
    is not.
    """
    (tmp_path / "shop/setup.py").write_text(
        "import dist_tune\nfor name in 'step', 'late':\n   "
        " dist_tune.install(f'shop.begun:{name}')\n"
    )
    (tmp_path / "shop/begun.py").write_text(
        "def step(x):\n    return x\nimport shop.setup\ndef late(x):\n    return x\n"
    )
    shop = importlib.import_module("shop.begun")
    assert [is_wrapped(each) for each in (shop.step, shop.late)] == [True, False]
    told = (
        "dist_tune: shop.begun:late is not tuned: there is no such function yet: install it before"
        " the import of its module begins\n"
    )
    assert capfd.readouterr().err == told


# -- what is refused, and said ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "what"),
    [
        (
            "step shop.trainer shop: :step shop..a:step shop:a:b shop/a.py:step",
            r"package\.module:Class\.method, got ",
        ),
        ("__main__:step", "decorate the function of the program"),
        ("torch.optim:Adam.step", "or name that one"),
    ],
)
def test_a_target_that_cannot_be_wrapped_from_outside_is_refused(
    targets: str, what: str, ended: Callable[[], list[str]]
):
    """Or that has another form; nothing more is said of it."""
    for target in targets.split():
        with pytest.raises(ValueError, match=what):
            dist_tune.install(target)
    assert ended() == []


UNFIT = """
Trainer.trainin_step    there is no such function
Traner.made             there is no such function
step.made               there is no such function
Traner.training_stp     there is no such function; the nearest is shop.trainer:Trainer.training_step
Trainer                 install wraps functions and methods, got the class Trainer
trainer                 install wraps functions and methods, got an object of type Trainer
Trainer.n_steps         install wraps functions and methods, got 3
Trainer.shown           install wraps functions and methods, got an object of type property
Made.made_by_meta       it is of Made's metaclass
Trainer.batches         makes a generator
Trainer.wait            makes a coroutine
slotted.step            attribute 'step' is read-only
"""


@pytest.mark.parametrize(
    ("target", "line"), [re.split("   +", line) for line in UNFIT.strip().splitlines()]
)
def test_what_cannot_be_wrapped_is_one_line_and_the_program_goes_on(
    target: str, line: str, ended: Callable[[], list[str]]
):
    """The module is as it was; nothing more is said at the end."""
    shop = loaded(target)
    (told,) = ended()
    assert told.startswith(f"dist_tune: shop.trainer:{target} is not tuned: ")
    assert line in told
    assert (type(shop.trainer), shop.Trainer.n_steps) == (shop.Trainer, 3)


def test_only_the_first_rank_says_it(
    monkeypatch: pytest.MonkeyPatch, ended: Callable[[], list[str]]
):
    monkeypatch.setenv("RANK", "1")
    loaded("nothing")
    assert ended() == []


def test_a_wrong_option_is_an_error_of_the_import():
    """As of the decorator, had it stood there."""
    dist_tune.install("shop.trainer:step", n_repeat=0)
    with pytest.raises(ValueError, match="n_repeat"):
        importlib.import_module("shop.trainer")


def test_the_end_says_what_was_never_imported_or_called(
    ended: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
):
    """Not what was called, and not after an exception that ended the program."""
    shop = loaded("step", "Trainer.training_step")
    dist_tune.install("shop.trainr:step")
    shop.step(1)
    *_, called, imported = ended()
    assert called.startswith(
        "dist_tune: shop.trainer:Trainer.training_step was never called, other than inside another"
        " tuned step: "
    )
    assert imported.startswith(
        "dist_tune: shop.trainr:step is not tuned: the program never imported shop.trainr. If that"
        " is the script, "
    )
    monkeypatch.setattr(sys, "last_type", RuntimeError, raising=False)
    assert ended() == []


# -- programs: Python as it starts and ends, with an empty module for Triton -----------------------

PROGRAM = '''
"""Shows itself."""
import atexit, os, pickle, sys, threading, time, typing
import shop.plain

class Mine:
    n: int

assert pickle.loads(pickle.dumps(Mine())) is not None
assert Mine.__annotations__ == {"n": int}, "a __future__ of another module"
main = sys.modules["__main__"]
print([sys.argv[1:], sys.path[0], __name__, __doc__, __file__, main.Mine is Mine, shop.plain.step(1)])
def show():
    print(pickle.loads(pickle.dumps(Mine())).n)

def later():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    show()

Mine.n = 5
threading.Thread(target=later).start()
atexit.register(show)
if "raise" in sys.argv:
    raise RuntimeError("mine")
if "interrupt" in sys.argv:
    raise KeyboardInterrupt
sys.exit(7 if "exit" in sys.argv else None)
'''  # noqa: E501
JOB = """
import sys
print("begins")
try:
    import shop.trainer
except Exception:
    pass
sys.path.insert(0, "own")
import zzzz
from outer.inner import steps
print(hasattr(zzzz.step, "records") and hasattr(steps.step, "records"))
"""
SPAWNING = """
import sys
import triton
import shop.trainer
from multiprocessing import get_context

if __name__ == "__main__":
    child = get_context(sys.argv[1]).Process(target=print, args=["child"])
    child.start()
    child.join()
    if "failed" in sys.argv:
        sys.exit("failed")
"""


def python(*words: str, cwd: Path) -> Done:
    env = {**os.environ, "PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}", "DIST_TUNE_VERBOSITY": "quiet"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("jobs/train.py", ""),
        ("jobs/train.py", "raise"),
        ("jobs/train.py", "exit"),
        ("jobs/train.py", "interrupt"),
        ("-m jobs.train", "raise"),
        ("-m jobs.train", "exit"),
        ("jobs/wrong.py", ""),
    ],
)
def test_a_program_does_not_notice(tmp_path: Path, program: str, how: str):
    """Its words, path, name, pickles, annotations, exit code and its part of a traceback are those
    of ``python program``.
    """
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/train.py").write_text(PROGRAM)
    (tmp_path / "shop/plain.py").write_text("def step(x):\n    return x\n")
    (tmp_path / "jobs/wrong.py").write_text("x = 1\nx = = 2\n")
    words = [*program.split(), "--step", "two words", "--", "--help", how]
    plain = python(*words, cwd=tmp_path)
    # One of them is wrapped, for which torch and Triton are imported.
    step = "shop.plain:step" if program + how == "jobs/train.pyraise" else "shop.loop:run"
    installed = python("-m", "dist_tune.install", "--step", step, *words, cwd=tmp_path)
    assert (installed.stdout, installed.returncode) == (plain.stdout, plain.returncode)
    assert (plain.returncode != 0) == bool(how or "wrong" in program)
    # Without "Traceback", below which frames of runpy stand.
    shown = [
        line
        for line in plain.stderr.splitlines(keepends=True)[1:]
        if "-m" not in words or "frozen runpy" not in line
    ]
    assert installed.stderr.endswith("".join(shown))


# The exit code and what the program prints, the words of the command, the end of the last line.
COMMANDS = """
2               --step shop jobs/job.py                           package.module:function or package.module:Class.method, got 'shop'
2               --step __main__:step jobs/job.py                  __main__:step cannot be wrapped from outside
2               --step shop.trainer:step                          no program
2               --step=shop.trainer:step -m                       no program
2               jobs/job.py                                       the following arguments are required: --step
2               --stp shop:step jobs/job.py                       error:
1 begins        --step shop.trainer:training_step jobs/job.py     function; the nearest is shop.trainer:Trainer.training_step
1 begins        --step shop.trainer:Trainer jobs/job.py           install wraps functions and methods, got the class Trainer
1               --step shop.trainr:step jobs/job.py               on sys.path when the program begins; the nearest is shop.trainer
1               --step shp.trainer:step jobs/job.py               no module shp on sys.path when the program begins; the nearest is shop
1               --step shop.trainer.step:x jobs/job.py            no module shop.trainer.step on sys.path when the program begins
0 begins True   --step zzzz:step --step=outer.inner.steps:step jobs/job.py
0 True          --step packed:step job.zip
"""  # noqa: E501


@pytest.mark.processes
@pytest.mark.parametrize("row", COMMANDS.strip().splitlines())
def test_a_step_of_the_command_is_found_or_ends_the_program(tmp_path: Path, row: str):
    """Before it begins where that shows without an import, else as soon as its module is imported,
    and with 2 if it is misunderstood.

    Found are also modules in folders without ``__init__.py``, in an archive, and in a folder that
    the program adds.
    """
    expected, words, line = re.fullmatch("(.*?)   +(.*?)(?:   +(.*))?", row).groups(default="")  # type: ignore[union-attr]
    (tmp_path / "jobs/outer/inner").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    (tmp_path / "shop").rename(tmp_path / "jobs/shop")  # found beside the program, and nowhere else
    for name in ("own/zzzz.py", "jobs/outer/inner/steps.py"):
        (tmp_path / name).write_text("def step():\n    return 1\n")
    (tmp_path / "jobs/job.py").write_text(JOB)
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as archive:
        test = "assert callable(dist_tune.install)\nprint(hasattr(packed.step, 'records'))\n"
        archive.writestr("__main__.py", f"import dist_tune, packed\n{test}")
        archive.writestr("packed.py", "def step():\n    return 2\n")
    done = run_python(
        "-m", "dist_tune.install", *words.split(), cwd=tmp_path, env=of_checkout(tmp_path)
    )
    assert f"{done.returncode} {' '.join(done.stdout.split())}".strip() == expected, done.stderr
    assert line in done.stderr.rstrip().rpartition("\n")[2]
    assert (done.stderr.count("\n") == 1) == (done.returncode == 1)


@pytest.mark.processes
def test_a_sitecustomize_imports_nothing_heavy_and_is_silent_in_tools(tmp_path: Path):
    """It runs in each Python, also in those that never import Triton, as torchrun."""
    (tmp_path / "sitecustomize.py").write_text(
        "import dist_tune\ndist_tune.install('shop.none:step')\n"
    )
    done = python(
        "-c", "import sys, shop\nprint({'torch', 'triton', 'numpy'} & {*sys.modules})", cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "job.py forkserver",
            "dist_tune: shop.none:step is not tuned: the program never imported shop.none. ",
        ),
        (
            "job.py spawn",
            "dist_tune: shop.none:step is not tuned: the program never imported shop.none. ",
        ),
        ("-m dist_tune.install --step shop.loop:run job.py spawn failed", "failed"),
    ],
)
def test_children_of_a_program_are_silent(tmp_path: Path, words: str, line: str):
    """The program itself hears of a module that it did not import, but not after a failure of
    another kind.
    """
    if "--step" not in words:
        (tmp_path / "sitecustomize.py").write_text(
            "import dist_tune\ndist_tune.install('shop.none:step')\n"
        )
    (tmp_path / "triton.py").touch()
    (tmp_path / "job.py").write_text(SPAWNING)
    done = python(*words.split(), cwd=tmp_path)
    assert (done.stdout, done.stderr.count("\n")) == ("child\n", 1), done.stderr
    assert done.stderr.startswith(line)


# -- a trainer of a library ------------------------------------------------------------------------

LIBRARY = {
    "trainers/__init__.py": (
        """
def __getattr__(name):
    if name != "Trainer":
        raise AttributeError(name)
    from trainers.trainer import Trainer
    return Trainer
"""
    ),
    "trainers/trainer.py": (
        """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self, model, optimizer, batches):
        self.model, self.optimizer, self.batches = DistributedDataParallel(model), optimizer, batches

    def training_step(self, model, inputs):
        model.train()
        loss = model(inputs["x"]).square().mean()
        loss.backward()
        return loss.detach()

    def train(self):
        self.losses = []
        for inputs in self.batches:
            loss = self.training_step(self.model, inputs)
            self.optimizer.step()
            self.optimizer.zero_grad()
            dist.all_reduce(loss)
            self.losses.append(loss.item())
"""  # noqa: E501
    ),
    "layers.py": (
        """
import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 128)], key=["n"])
@triton.jit
def scale_kernel(x, weight, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * tl.load(weight), mask=at < n)


def scaled(x, weight):
    y, n = torch.empty_like(x), x.numel()
    scale_kernel[lambda config: (triton.cdiv(n, config["BLOCK"]),)](x, weight, y, n)
    return y


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return scaled(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return scaled(grad.contiguous(), weight), (grad * x).sum().reshape(1)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.weight = torch.nn.Linear(64, 64), torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return Scale.apply(torch.nn.functional.dropout(self.linear(x), 0.1), self.weight)
"""
    ),
    "train.py": (
        """
import json
import os
from itertools import count, islice

import torch
import torch.distributed as dist
from layers import Layer, scale_kernel
from trainers import Trainer
from dist_tune.testing import ExactTime


def losses_of(step, steps):
    Trainer.training_step = step
    torch.manual_seed(0)
    model = Layer()
    batches = ({"x": torch.full((2, 64), 1.0 + k % 3 + dist.get_rank())} for k in steps)
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), batches)
    trainer.train()
    return trainer.losses


def until_tuned():
    for k in islice(count(), 2000):
        yield k
        is_over = torch.tensor(float(len(tuned.records)))
        dist.all_reduce(is_over, dist.ReduceOp.MIN)
        if is_over:
            return


ExactTime.keep()
dist.init_process_group("gloo")
tuned = Trainer.training_step
losses = losses_of(tuned, until_tuned())
is_same = losses == losses_of(tuned.__wrapped__, range(len(losses)))
with open(f"found-{dist.get_rank()}.json", "w") as file:
    records = [record.model_dump(mode="json") for record in tuned.records]
    in_use = [config.kwargs for config in scale_kernel.cache.values()]
    json.dump([is_same, [record["environment"]["world_size"] for record in records], in_use], file)
os._exit(0)  # torch may abort as its interpreter ends, without dist_tune, too
"""
    ),
}
TARGET = "trainers.trainer:Trainer.training_step"


@pytest.mark.processes
@pytest.mark.parametrize(
    "how", ["a word of the command", pytest.param("a sitecustomize", marks=pytest.mark.slow)]
)
def test_a_trainer_of_a_library_is_tuned_by(tmp_path: Path, how: str):
    """Both ranks train as untuned, say so, and take the faster config.

    Its step adds to gradients, and so is tuned in its own calls.
    """
    for name, text in LIBRARY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    env = of_checkout(tmp_path, str(tmp_path))
    if how == "a sitecustomize":
        (tmp_path / "sitecustomize.py").write_text(
            f"import dist_tune\ndist_tune.install({TARGET!r}, is_dist=True)\n"
        )
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--standalone",
            "train.py",
        ]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110, check=False
        )
    else:  # as tests/test_launch.py has it
        done = run_python(
            "-m",
            "dist_tune.install",
            "--step",
            TARGET,
            "--is-dist",
            "train.py",
            cwd=tmp_path,
            env=env,
            n_ranks=2,
        )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"found-{rank}.json").read_text()) == [
            True,
            [2],
            [{"BLOCK": 128}],
        ]
        assert "winner" in (tmp_path / f".autotune_logs/rank-{rank}.log").read_text()
