"""``install``: ``contextual_autotune`` on a function of a program that is not edited, from the import of its module on.

    python -m dist_tune.install --step package.module:Class.method [--is-dist] (script.py | -m module) [arguments]

runs a program so, as do ranks of ``dist-tune launch --step``. Knows how Python imports modules and runs programs.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from inspect import getattr_static, isroutine
from types import ModuleType
from typing import Any

_OWN = ("torch", "triton", "dist_tune")
_targets: list[_Target] = []
_waiting: dict[str, list[_Target]] = {}
"""Of these, by the module that was not imported yet."""


@dataclass
class _Target:
    text: str
    module: str
    options: dict[str, Any]
    is_early: bool
    """Installed before Python knew its program: by a sitecustomize, which is run for tools and workers, too."""
    tuner: Any = None
    """Set when the target is wrapped."""

    def tell(self, what: str, missing: str = "", names: Iterable[str] = ()) -> None:
        """One line on the terminal of the job's first rank, with those of the ``names`` that resemble a missing one."""
        from difflib import get_close_matches

        from dist_tune.files import rank_of_job, to_terminal  # here and below: what a process that tunes nothing need not import

        near = get_close_matches(missing, [*names])
        if rank_of_job() == 0:
            to_terminal(f"dist_tune: {self.text} {what}{'; near: ' * bool(near)}{', '.join(near)}\n")

    def wrap(self, owner: Any) -> None:
        """Put the tuned function into its place in the module ``owner``, or say why that cannot be."""
        from dist_tune.contextual import Tuner, contextual_autotune
        from dist_tune.validation import spelled

        decorate, parent, place, name = contextual_autotune(**self.options), owner, self.module, ""
        try:
            for name in self.text.partition(":")[2].split("."):
                parent, owner, place = owner, getattr(owner, name), f"{place}.{name}"
        except (AttributeError, ImportError, RuntimeError):  # the latter of modules that import their names on use
            return self.tell(f"is not tuned: {place} has no {name}", name, dir(owner))
        found = getattr_static(parent, name, owner)
        kind = type(found) if isinstance(found, staticmethod | classmethod) else None
        function = found.__func__ if kind else found
        if isinstance(getattr(function, "_tuner", None), Tuner):
            return self.tell("is decorated by dist_tune already, and is left as it is")
        try:
            if not isroutine(function):
                raise TypeError(f"install wraps functions and methods; got {spelled(function)}")
            tuned = decorate(function)
            setattr(parent, name, kind(tuned) if kind else tuned)
        except TypeError as error:  # also of what makes a generator or a coroutine, and of a class that is written in C
            return self.tell(f"is not tuned: {error}")
        self.tuner = vars(tuned)["_tuner"]
        return None

    def tell_end(self) -> None:
        """Say at the end of the program that the module was never imported, or the function never called."""
        if self.tuner is not None and not self.tuner.was_called:
            why = "a subclass may override it, or a module had imported it by its name before it was installed"
            self.tell(f"was never called, other than inside another tuned step: {why}")
        elif self.module in _waiting and self.module.rpartition(".")[2] == os.path.basename(sys.argv[0]).removesuffix(".py"):
            self.tell("is not tuned: its module is the program itself, which is __main__: decorate the step there")
        elif self.module in _waiting:
            self.tell(f"is not tuned: the program never imported {self.module}", self.module, sys.modules)


class _Finder:
    """On ``sys.meta_path`` while a module is awaited: finds it by the other finders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        for finder in [each for each in sys.meta_path if each is not _Finder] if name in _waiting else []:
            if (spec := finder.find_spec(name, path, target)) is not None:
                spec.loader = _Loader(spec.loader) if hasattr(spec.loader, "exec_module") else spec.loader  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Another loader, in whose place it stands until the module is loaded."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        name = module.__spec__.name
        self._loader.exec_module(module)
        _wrap(name, sys.modules.get(name, module))


def _wrap(name: str, module: object) -> None:
    """Wrap the targets in a module that is there, and leave no trace if no other module is awaited."""
    targets = _waiting.pop(name, ())
    if not _waiting:  # a list of its own, because another thread may be going through this one
        sys.meta_path = [each for each in sys.meta_path if each is not _Finder]
    for target in targets:
        target.wrap(module)


@atexit.register
def _tell_end() -> None:
    """For each target. An exception that ends the program says more, and children of multiprocessing have part of its work alone."""
    children = sys.modules.get("multiprocessing.process")
    program = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "").partition(".")[0]
    if not hasattr(sys, "last_type") and (children is None or children.parent_process() is None):
        for target in _targets:
            if not target.is_early or ("triton" in sys.modules and program not in _OWN):
                target.tell_end()


def install(target: str, **options: Any) -> None:
    """Put ``contextual_autotune(**options)`` on a function or method of a program that is not edited.

    Call it before the target's module is imported: in a sitecustomize, a conftest, the first line of the program. The target is wrapped
    at the end of that import; at once in a module that is there already, where names that others have imported from it stay as they are.
    If there is no such function, if it is no ordinary one, or if it was never imported or called by the end, the program goes on without,
    and the first rank says so in one line on stderr.

    Args:
        target: "package.module:function" or "package.module:Class.method": a method, also a static, a class or an inherited one, which is
            wrapped for the class that is named alone.
        options: those of ``contextual_autotune``, as ``is_dist=True``.

    Raises:
        ValueError: the target has no such form, or is in ``__main__``, torch, Triton or dist_tune.
        TypeError, ValueError: from the import of the target's module: an option is wrong, see ``contextual_autotune``.
    """
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(f"a target is package.module:function or package.module:Class.method, got {target!r}")
    if module == "__main__":
        raise ValueError(f"{target} cannot be wrapped from outside: decorate it in the program, which is __main__")
    if module.partition(".")[0] in _OWN:
        raise ValueError(f"{target} is needed to tune: name the function of your program or trainer that calls it")
    _targets.append(_Target(target, module, options, not hasattr(sys.modules.get("__main__"), "__file__")))
    _waiting.setdefault(module, []).append(_targets[-1])
    if module in sys.modules:
        _wrap(module, sys.modules[module])
    elif _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _CallableModule(ModuleType):
    """``dist_tune.install`` is the function, also where an import of this module has put the module in its place."""

    __call__ = staticmethod(install)


sys.modules[__name__].__class__ = _CallableModule


def main(words: Sequence[str]) -> None:
    """Install what ``--step`` names, and run the program that follows as Python would: its exceptions and exit codes are its own."""
    from argparse import ArgumentParser
    from pathlib import Path
    from runpy import run_module

    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--module"):
        at += 2 if words[at] == "--step" else 1
    parser = ArgumentParser("python -m dist_tune.install", "%(prog)s --step TARGET [--is-dist] (script.py | -m module) [arguments]")
    parser.add_argument(
        "--step", action="append", metavar="TARGET", required=True, help="package.module:Class.method; once or several times"
    )
    parser.add_argument("--is-dist", action="store_true", help="all ranks of the job decide together")
    options, program = parser.parse_args(words[:at]), words[at:]
    is_module = program[:1] in (["-m"], ["--module"])
    try:
        sys.argv[:], script = program[is_module:], os.path.abspath(program[is_module])
        source = b"" if is_module else Path(script).read_bytes()
        for step in options.step:
            install(step, is_dist=options.is_dist)
    except (ValueError, OSError, IndexError) as error:
        parser.exit(2, f"dist_tune.install: {'no program' if isinstance(error, IndexError) else error}\n")
    try:
        if is_module:
            run_module(program[1], run_name="__main__", alter_sys=True)
            return
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(script))
        sys.modules["__main__"] = module = ModuleType("__main__")
        module.__file__ = script
        exec(compile(source, script, "exec", dont_inherit=True), vars(module))
    except BaseException as error:  # raised again, with a traceback that begins in the program
        traceback, show = error.__traceback__, sys.excepthook
        while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
            traceback = traceback.tb_next
        sys.excepthook = lambda kind, value, _: show(kind, value.with_traceback(traceback), traceback)
        raise


if __name__ == "__main__":
    from dist_tune.install import main as run  # of the module that the program imports: one list of targets

    run(sys.argv[1:])
