"""Sizes in buckets for kernels whose ``key`` cannot be edited: what ``bucket=`` of a step says of
the kernels that it launches.

Knows names, keys and functions of a size. Knows nothing of listeners, ranks or where keys are
looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

from dist_tune.launches.libraries import own_runs
from dist_tune.launches.tunable import MAX_SIZES, Fits, name_of, rule_error
from dist_tune.validation import check_function, spelled


class Bucketing(dict[str, Callable[[Any], Any]]):
    """Argument of a kernel -> the function of its value whose result stands in the key; and what
    the sizes of buckets run.
    """

    def __init__(self, functions: Mapping[str, Callable[[Any], Any]]) -> None:
        super().__init__(functions)
        self.fits = Fits()
        self.coarse: dict[Any, Any] = {}
        """Key of an exact size -> that of its bucket."""

    def remember(self, exact: Any, key: Any) -> None:
        """The key of a size's bucket."""
        if len(self.coarse) >= MAX_SIZES:
            self.coarse.clear()
        self.coarse[exact] = key

    def known(self, cache: Any, exact: Any) -> Any:
        """The config that Triton may launch as it is at an exact size; None if that is yet to be
        seen.
        """
        config = cache.get(self.coarse.get(exact)) if type(cache) is dict else None
        found = None if config is None else self.fits.known((exact, id(config)), config)
        return None if found is None or found.pre_hook is not None else found


NO_BUCKETS = Bucketing({})
_FORM = (
    'bucket must map names of kernels to their arguments, as {"layer_norm_*": {"NB": power_of_two}}'
)


class Buckets:
    """Those of one step, and what there is to tell of them."""

    def __init__(self, given: Any) -> None:
        """``given``: name or pattern of kernels -> argument -> function of a size.

        TypeError or ValueError for what is no such mapping.
        """
        if not isinstance(given, Mapping):
            raise TypeError(f"{_FORM}, got {spelled(given)}")
        for pattern, arguments in given.items():
            if not isinstance(pattern, str) or not isinstance(arguments, Mapping):
                raise TypeError(f"{_FORM}, got {spelled(pattern)}: {spelled(arguments)}")
            if not arguments:
                raise ValueError(f"bucket names no argument of {pattern!r}: {_FORM}")
            for name, function in arguments.items():
                check_function(
                    f"bucket of {name!r} of {pattern!r}",
                    function,
                    "function(size), as power_of_two",
                    is_needed=True,
                )
        self._given = {pattern: dict(arguments) for pattern, arguments in given.items()}
        self._of = WeakKeyDictionary[Any, Bucketing]()
        self._names = set[str]()
        self._keyless = dict[str, str]()

    def of(self, kernel: Any) -> Bucketing:
        """Those of one kernel; empty for most."""
        if (found := self._of.get(kernel)) is None:
            found = self._of[kernel] = self._read(kernel)
        return found

    def told(self, step: str) -> dict[str, str]:
        """Topic -> text of what has no effect on the kernels that were launched so far."""
        kernels = ", ".join(sorted({name.rpartition(".")[2] for name in self._names}))
        unmatched = (
            [
                pattern
                for pattern in self._given
                if not any(_fits(name, pattern) for name in self._names)
            ]
            if kernels
            else []
        )
        misnamed = {
            pattern: f"{pattern!r}: no kernel launched so far is called so, they are {kernels}"
            for pattern in unmatched
        }
        return {
            f"bucket {name}": f"{step}: bucket= has no effect on {text}"
            for name, text in (misnamed | self._keyless).items()
        }

    def _read(self, kernel: Any) -> Bucketing:
        self._names.add(name := name_of(kernel.base_fn))
        # The first pattern wins.
        arguments = {
            each: fn
            for pattern in reversed(self._given)
            if _fits(name, pattern)
            for each, fn in self._given[pattern].items()
        }
        if not arguments or len(kernel.configs) < 2:
            return NO_BUCKETS
        keys, of_key = [*kernel.keys], f"whose key is {[*kernel.keys]}"
        if isinstance(kernel, tuple(own_runs)):
            keys, of_key = (
                [],
                (
                    f"whose tuner {type(kernel).__module__}.{type(kernel).__qualname__} makes the"
                    " key itself"
                ),
            )
        for argument in [each for each in arguments if each not in keys]:
            self._keyless[f"{name} {argument}"] = f"{argument!r} of {name}, {of_key}"
        return Bucketing(
            {
                each: _bucket(name, each, function)
                for each, function in arguments.items()
                if each in keys
            }
        )


def _fits(name: str, pattern: str) -> bool:
    """Whether a kernel of this name with its module is meant."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _bucket(kernel: str, argument: str, function: Callable[[int], Any]) -> Callable[[Any], Any]:
    def of(value: Any) -> Any:
        if type(value) is not int:  # a size that is not given, a switch
            return value
        try:
            found = function(value)
            # NaN, an object, the function that size_classes without its limits makes: no launch
            # would find its like again.
            if type(found) not in (int, str) and (found != found or {found} != {function(value)}):
                raise TypeError(
                    f"it returned {spelled(found)}, which is not equal to what it returns next"
                )
        except Exception as error:
            where = (
                f"it was asked of {argument}={value}, and must return what can be hashed and is"
                " equal each time, as an int"
            )
            raise rule_error("bucket", kernel, error, where) from error
        return found

    return of
