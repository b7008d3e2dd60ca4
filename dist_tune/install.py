"""``install``: ``contextual_autotune`` on a function of a program that is not edited, from the
import of its module on.

    python -m dist_tune.install --step package.module:Class.method [--is-dist] script.py [arguments]

runs a program so, as do ranks of ``dist-tune launch --step``. It ends where a target is not found
or cannot be wrapped. Knows how Python imports modules and runs programs.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import WRAPPER_ASSIGNMENTS, reduce
from importlib.machinery import ModuleSpec
from inspect import getattr_static, isroutine
from itertools import accumulate
from types import FunctionType, MethodType, ModuleType
from typing import Any

_targets: list[_Target] = []
"""All but those that could not be wrapped."""


@dataclass(eq=False)
class _Target:
    module: str
    name: str
    """In the module: "Class.method"."""
    options: dict[str, Any]
    is_needed: bool
    """True if the program ends where it cannot be wrapped."""
    missing: str = "there is no such function"
    tuner: Any = None
    """Set when the target is wrapped."""

    def tell(self, what: str) -> None:
        """One line on the terminal of the job's first rank, and not of its children, which import
        the same.
        """
        from multiprocessing import current_process

        # Here and below: what a process that tunes nothing need not import.
        from dist_tune.files import rank_of_job, to_terminal

        # Named before a child imports anything.
        if rank_of_job() == 0 and current_process().name == "MainProcess":
            to_terminal(f"dist_tune: {self.module}:{self.name} {what}\n")

    def wrap(self, module: Any) -> None:
        """Put the tuned function into its place, or say why that cannot be."""
        from dist_tune.contextual import contextual_autotune
        from dist_tune.validation import spelled

        decorate = contextual_autotune(**self.options)
        *outer, name = self.name.split(".")
        found: Any = ...
        try:
            parent = reduce(getattr, outer, module)
            found = getattr(parent, name)
            if isinstance(parent, type):  # as the class holds it; an object's method is bound
                found = getattr_static(parent, name, found)
                if all(name not in vars(each) for each in parent.__mro__):
                    raise TypeError(f"it is of {parent.__qualname__}'s metaclass")
            kind = type(found) if isinstance(found, staticmethod | classmethod) else None
            function = found.__func__ if kind else found
            if not isroutine(function):
                raise TypeError(f"install wraps functions and methods, got {spelled(function)}")
            if isinstance(function, FunctionType) and function.__qualname__ == self.name:
                tuned: Any = _exchange(function, decorate)
            else:  # inherited, under another name, an object's
                tuned = decorate(function)
                setattr(parent, name, kind(tuned) if kind else tuned)
        except (AttributeError, ImportError, RuntimeError, TypeError) as error:
            # The middle ones of modules that import names on use.
            _targets.remove(self)
            self.refuse(f"{self.missing}{self.nearest(module)}" if found is ... else str(error))
        else:
            self.tuner = vars(tuned)["_tuner"]
            # Pickle looks for it where it has been put.
            if not isinstance(tuned, MethodType) and tuned is not function:
                tuned.__module__, tuned.__qualname__ = self.module, self.name

    def refuse(self, why: str) -> None:
        """Say why it is not tuned; raises SystemExit if it is needed."""
        if self.is_needed:
            sys.exit(f"dist_tune: {self.module}:{self.name} is not tuned: {why}")
        self.tell(f"is not tuned: {why}")

    def nearest(self, module: Any) -> str:
        """The function or method of the module whose name is most like that of the target, as the
        end of a line; or nothing.
        """
        from difflib import get_close_matches

        members = getattr(module, "__dict__", {}).items()
        methods = [
            f"{name}.{each}"
            for name, cls in members
            if isinstance(cls, type)
            for each in dir(cls)
            if each[:2] != "__"
        ]
        near = get_close_matches(
            self.name, [*(name for name, each in members if isroutine(each)), *methods], 1
        )
        return f"; the nearest is {self.module}:{near[0]}" if near else ""

    def find(self) -> None:
        """Refuse it if there is no such module, as far as that shows without an import."""
        from difflib import get_close_matches
        from pkgutil import iter_modules

        path: Any = None
        if self.module in sys.modules:
            return
        for name in accumulate(self.module.split("."), "{}.{}".format):
            try:
                spec = _spec_of(name, path)
            # Within folders without __init__.py, whose paths follow from those that are imported
            except KeyError:
                return
            if spec is None:
                outer, _, last = name.rpartition(".")
                near = get_close_matches(
                    last,
                    [
                        each.name
                        for each in iter_modules(path)
                        if each.name not in sys.stdlib_module_names
                    ],
                    1,
                )
                # The program may add a folder to sys.path before it imports that.
                if not (outer or near):
                    return
                known = f"; the nearest is {'.'.join(filter(None, [outer, *near]))}" if near else ""
                self.refuse(f"there is no module {name} on sys.path when the program begins{known}")
                return
            path = spec.submodule_search_locations or []


def _exchange(function: FunctionType, decorate: Any) -> FunctionType:
    """Let the function itself run what is tuned: modules and objects may hold it by now, and pickle
    finds no other under its name.
    """
    own = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    for name in (*WRAPPER_ASSIGNMENTS, "__kwdefaults__"):
        setattr(own, name, getattr(function, name))
    vars(own).update(vars(function))
    tuned = decorate(own)
    vars(function).update(vars(tuned))
    # torch.compile cannot read a constant that is a function.
    function.__defaults__, function.__kwdefaults__ = (None, {"_dist_tune": tuned})
    # Python wants as many.
    function.__code__ = _run.__code__.replace(co_freevars=function.__code__.co_freevars)
    return function


def _run(*args: Any, _dist_tune: Any, **kwargs: Any) -> Any:
    return _dist_tune(*args, **kwargs)


def _spec_of(
    name: str, path: Sequence[str] | None, target: ModuleType | None = None
) -> ModuleSpec | None:
    found = (
        finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not _Finder
    )
    return next(filter(None, found), None)


class _Finder:
    """The first on ``sys.meta_path``: finds modules of targets by the other finders."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if all(each.module != name for each in _targets):
            return None
        spec = _spec_of(name, path, target)
        if spec is not None:
            spec.loader = spec.loader and _Loader(spec.loader)  # type: ignore[assignment]  # none of a folder without __init__.py
        return spec


class _Loader:
    """Another loader, in whose place it stands until the module is loaded and its targets are
    wrapped.
    """

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
    """Say which targets were never imported or called; after an exception, which says more, or in a
    tool, nothing.
    """
    if "triton" in sys.modules and not hasattr(sys, "last_type"):
        for target in _targets:
            if target.tuner is None:
                target.tell(
                    f"is not tuned: the program never imported {target.module}. If that is the"
                    " script, decorate the function there"
                )
            elif not target.tuner.calls.n_calls:
                target.tell(
                    "was never called, other than inside another tuned step: a subclass may"
                    " override it"
                )


def install(target: str, **options: Any) -> None:
    """Put ``contextual_autotune(**options)`` on a function or method of a program that is not
    edited.

    Call it before the target's module is imported: in a sitecustomize, a conftest, the first line
    of the program. The target is wrapped at the end of that import; at once in a module that is
    there already. Others that have imported it by its name call it tuned, too. If there is no such
    function, if it is no ordinary one, or if it was never imported or called by the end, the
    program goes on without, and the main process of the first rank says so in one line on stderr.

    Args:
        target: "package.module:function" or "package.module:Class.method": a method, also a static,
            a class or an inherited one, which is wrapped for the class that is named alone; or
            "package.module:instance.method", for that object alone.
        options: those of ``contextual_autotune``, as ``is_dist=True``.

    Raises:
        ValueError: the target has no such form, or is in ``__main__``, torch, Triton or dist_tune.
        TypeError, ValueError: from the import of the target's module: an option is wrong, see
            ``contextual_autotune``.
    """
    add(target, options)


def add(target: str, options: dict[str, Any], *, is_needed: bool = False) -> None:
    """``install``; ``is_needed``: a step of the command, without which the program ends."""
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(
            f"a target is package.module:function or package.module:Class.method, got {target!r}"
        )
    if module.partition(".")[0] in ("__main__", "torch", "triton", "dist_tune"):
        raise ValueError(
            f"{target} cannot be wrapped from outside: decorate the function of the program that"
            " calls it, or name that one"
        )
    _targets.append(_Target(module, name, options, is_needed))
    if is_needed:
        _targets[-1].find()
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    if module in sys.modules:
        if getattr(sys.modules[module].__spec__, "_initializing", False):
            _targets[
                -1
            ].missing = (
                "there is no such function yet: install it before the import of its module begins"
            )
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
    parser.add_argument(
        "--step",
        action="append",
        required=True,
        metavar="TARGET",
        help="package.module:Class.method; one or several",
    )
    parser.add_argument(
        "--is-dist", action="store_true", help="all ranks of the job decide together"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module")
    parser.add_argument("program", nargs=REMAINDER, help="script.py or module, and its arguments")
    options = parser.parse_args()
    if not options.program:
        parser.error("no program")
    sys.argv[:] = options.program
    script = os.path.abspath(sys.argv[0])
    if not (sys.flags.safe_path or options.module):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    sys.path.insert(0, script)  # meanwhile, as it will be if the program is a folder or an archive
    try:
        for step in options.step:
            sys.modules[install.__module__].add(step, {"is_dist": options.is_dist}, is_needed=True)
    except ValueError as error:
        parser.error(str(error))
    sys.path.remove(script)
    # Stays: threads and exit handlers that outlive its code may pickle.
    program = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if options.module:
            runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]  # as python -m
        elif get_importer(script) or script.endswith(".pyc"):  # a folder, an archive
            runpy.run_path(script, run_name="__main__")
        else:
            vars(program).update(__file__=script, __cached__=None)
            exec(
                compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), vars(program)
            )
    except SystemExit as end:
        if end.code:
            sys.last_type = type(end)  # as of other exceptions
        raise


if __name__ == "__main__":
    main()
