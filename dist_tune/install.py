"""``install``: ``contextual_autotune`` on a function of a program that is not edited, from the import of its module on.

    python -m dist_tune.install --step package.module:Class.method [--is-dist] (script.py | -m module) [arguments]

runs a program so, as do ranks of ``dist-tune launch --step``. Knows how Python imports modules and runs programs.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.machinery import ModuleSpec
from inspect import getattr_static, isroutine
from types import ModuleType
from typing import Any

_targets: list[_Target] = []
"""All but those that could not be wrapped."""


@dataclass(eq=False)
class _Target:
    module: str
    name: str
    """In the module: "Class.method"."""
    options: dict[str, Any]
    missing: str = "there is no such function"
    tuner: Any = None
    """Set when the target is wrapped."""

    def tell(self, what: str) -> None:
        """One line on the terminal of the job's first rank, and not of its children, which import the same."""
        from multiprocessing import current_process

        from dist_tune.files import rank_of_job, to_terminal  # here and below: what a process that tunes nothing need not import

        if rank_of_job() == 0 and current_process().name == "MainProcess":  # named before a child imports anything
            to_terminal(f"dist_tune: {self.module}:{self.name} {what}\n")

    def wrap(self, module: Any) -> None:
        """Put the tuned function into its place, or say why that cannot be."""
        from dist_tune.contextual import contextual_autotune
        from dist_tune.validation import spelled

        decorate = contextual_autotune(**self.options)
        *outer, name = self.name.split(".")
        try:
            parent = reduce(getattr, outer, module)
            found = getattr_static(parent, name, getattr(parent, name))
            if isinstance(parent, type) and all(name not in vars(each) for each in parent.__mro__):
                raise TypeError(f"it is of {parent.__qualname__}'s metaclass")
            kind = type(found) if isinstance(found, staticmethod | classmethod) else None
            function = found.__func__ if kind else found
            if not isroutine(function):
                raise TypeError(f"install wraps functions and methods, got {spelled(function)}")
            tuned = decorate(function)
            setattr(parent, name, kind(tuned) if kind else tuned)
        except (AttributeError, ImportError, RuntimeError, TypeError) as error:  # the middle ones of modules that import names on use
            _targets.remove(self)
            self.tell(f"is not tuned: {error if isinstance(error, TypeError) else self.missing}")
        else:
            self.tuner = vars(tuned)["_tuner"]


class _Finder:
    """The first on ``sys.meta_path``: finds modules of targets by the other finders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if all(each.module != name for each in _targets):
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not _Finder)
        spec = next(filter(None, found), None)
        if spec is not None:
            spec.loader = spec.loader and _Loader(spec.loader)  # type: ignore[assignment]  # none of a folder without __init__.py
        return spec


class _Loader:
    """Another loader, in whose place it stands until the module is loaded and its targets are wrapped."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        name = module.__spec__.name
        self._loader.exec_module(module)
        for target in [each for each in _targets if each.module == name]:
            target.wrap(sys.modules.get(name, module))


@atexit.register
def _tell_end() -> None:
    """Say which targets were never imported or called; after an exception, which says more, or in a tool, nothing."""
    if "triton" in sys.modules and not hasattr(sys, "last_type"):
        for target in _targets:
            if target.tuner is None:
                target.tell(f"is not tuned: the program never imported {target.module}. If that is the script, decorate the function there")
            elif not target.tuner.calls.n_calls:
                why = "a subclass may override it, or a module had imported it by its name before it was installed"
                target.tell(f"was never called, other than inside another tuned step: {why}")


def install(target: str, **options: Any) -> None:
    """Put ``contextual_autotune(**options)`` on a function or method of a program that is not edited.

    Call it before the target's module is imported: in a sitecustomize, a conftest, the first line of the program. The target is wrapped
    at the end of that import; at once in a module that is there already, where names that others have imported from it stay as they are.
    If there is no such function, if it is no ordinary one, or if it was never imported or called by the end, the program goes on without,
    and the main process of the first rank says so in one line on stderr.

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
    if module.partition(".")[0] in ("__main__", "torch", "triton", "dist_tune"):
        raise ValueError(f"{target} cannot be wrapped from outside: decorate the function of the program that calls it, or name that one")
    _targets.append(_Target(module, name, options))
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    if module in sys.modules:
        if getattr(sys.modules[module].__spec__, "_initializing", False):
            _targets[-1].missing = "there is no such function yet: install it before the import of its module begins"
        _targets[-1].wrap(sys.modules[module])


def main() -> None:
    """Install what ``--step`` names, and run the program that follows as Python would."""
    import runpy
    from argparse import REMAINDER, ArgumentParser
    from pathlib import Path
    from pkgutil import get_importer

    from dist_tune import install  # of the module that the program imports: one list of targets

    usage = "%(prog)s --step TARGET [--is-dist] (script.py | -m module) [arguments]"
    parser = ArgumentParser("python -m dist_tune.install", usage, allow_abbrev=False)
    parser.add_argument("--step", action="append", required=True, metavar="TARGET", help="package.module:Class.method; one or several")
    parser.add_argument("--is-dist", action="store_true", help="all ranks of the job decide together")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module")
    parser.add_argument("program", nargs=REMAINDER, help="script.py or module, and its arguments")
    options = parser.parse_args()
    if not options.program:
        parser.error("no program")
    sys.argv[:] = options.program
    try:
        for step in options.step:
            install(step, is_dist=options.is_dist)
    except ValueError as error:
        parser.error(str(error))
    script = os.path.abspath(sys.argv[0])
    if not (sys.flags.safe_path or options.module):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    program = sys.modules["__main__"] = ModuleType("__main__")  # stays: threads and exit handlers that outlive its code may pickle
    try:
        if options.module:
            runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]  # as python -m
        elif get_importer(script) or script.endswith(".pyc"):  # a folder, an archive
            runpy.run_path(script, run_name="__main__")
        else:
            vars(program).update(__file__=script, __cached__=None)
            exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), vars(program))
    except SystemExit as end:
        if end.code:
            sys.last_type = type(end)  # as of other exceptions
        raise


if __name__ == "__main__":
    main()
