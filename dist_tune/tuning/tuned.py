"""Types of decorated functions: what a call takes and returns, as type checkers and ``help`` see
it.

Knows no tuner. At run time a decorated function is a plain function with these attributes, and a
decorated bound method one of its object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, overload

from dist_tune.configs import FunctionConfig
from dist_tune.records import TuningRecord

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Instance = TypeVar("Instance")


class TunedClosure(Protocol[P, R_co]):
    """A decorated step: the function itself, and what its tunings found."""

    records: list[TuningRecord]
    """One per tuned site, oldest first; equal on all ranks but for facts that only this rank
    measured.
    """

    __name__: str

    @property
    def __wrapped__(self) -> Callable[P, R_co]:
        """The function as it was decorated; of a bound method the function that takes the object
        first.
        """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the step; kernels that Triton has no config for are tuned first."""

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(
        self: TunedClosure[Concatenate[Instance, Q], R],
        instance: Instance,
        owner: type | None = None,
    ) -> TunedClosure[Q, R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A method, where the step is one."""


class TunedFunction(Protocol[P, R_co]):
    """A decorated function, and what its tunings found.

    Types cannot say which parameters the configs fill, so a call with other arguments than the
    function's own is not wrong: editors show the function's parameters, and its return type is
    checked.
    """

    records: list[TuningRecord]
    """One per tuned key after those of kernels inside, oldest first; equal on all ranks but for
    facts that only this rank measured.
    """
    configs: list[FunctionConfig]
    """The config space, without repeats."""

    __name__: str

    @property
    def __wrapped__(self) -> Callable[P, R_co]:
        """The function as it was decorated; of a bound method the function that takes the object
        first.
        """

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> R_co: ...

    def __call__(self, *args: Any, **kwargs: Any) -> R_co:
        """Call the function with the config for its key; tune first where there is none."""

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        """A method, where the function is one."""


def shown_signature(
    function: Callable[..., Any], call: inspect.Signature
) -> inspect.Signature | None:
    """Signature of a function with the keyword-only parameters of the ``call`` in its place; None
    for builtins without one.
    """
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    added = [
        parameter
        for parameter in call.parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in own.parameters
    ]
    parameters = list(own.parameters.values())
    end = len(parameters) - any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return own.replace(parameters=[*parameters[:end], *added, *parameters[end:]])
