"""Types of decorated functions: what a call takes and returns, as type checkers and ``help`` see it.

Knows no tuner. At run time a decorated function is a plain function with these attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from dist_tune.cache import TuningRecord
from dist_tune.configs import FunctionConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)
E_contra = TypeVar("E_contra", contravariant=True)
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Instance = TypeVar("Instance")


class TunedClosure(Protocol[P, R_co]):
    """A decorated closure: the function itself, and what its tunings found."""

    records: list[TuningRecord]
    """One per tuned site, oldest first; equal on all ranks but for facts that only this rank measured."""

    __name__: str

    @property
    def __wrapped__(self) -> Callable[P, R_co]:
        """The function as it was decorated."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the closure; kernels that Triton has no config for are tuned first."""

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self: TunedClosure[Concatenate[Instance, Q], R], instance: Instance, owner: type | None = None) -> TunedClosure[Q, R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A method, where the closure is one."""


class _Takes1(Protocol[A_contra, Q, R_co]):
    """Takes a positional argument of a type, and others. Mypy infers these types from this, and not from ``TunedFunction`` itself."""

    @property
    def __wrapped__(self) -> Callable[Concatenate[A_contra, Q], R_co]: ...


class _Takes2(Protocol[A_contra, B_contra, Q, R_co]):
    """With two positional arguments."""

    @property
    def __wrapped__(self) -> Callable[Concatenate[A_contra, B_contra, Q], R_co]: ...


class _Takes3(Protocol[A_contra, B_contra, C_contra, Q, R_co]):
    """With three positional arguments."""

    @property
    def __wrapped__(self) -> Callable[Concatenate[A_contra, B_contra, C_contra, Q], R_co]: ...


class _Takes4(Protocol[A_contra, B_contra, C_contra, D_contra, Q, R_co]):
    """With four positional arguments."""

    @property
    def __wrapped__(self) -> Callable[Concatenate[A_contra, B_contra, C_contra, D_contra, Q], R_co]: ...


class _Takes5(Protocol[A_contra, B_contra, C_contra, D_contra, E_contra, Q, R_co]):
    """With five positional arguments."""

    @property
    def __wrapped__(self) -> Callable[Concatenate[A_contra, B_contra, C_contra, D_contra, E_contra, Q], R_co]: ...


class TunedFunction(Generic[P, R_co]):
    """A decorated function, and what its tunings found.

    Types cannot say which parameters the configs fill. A call may leave out those behind the first one to five; one with other
    keywords has all parameters that have no default. The arguments of a call with a keyword of the tuner are not checked.
    """

    records: list[TuningRecord]
    """One per tuned key, oldest first; equal on all ranks but for facts that only this rank measured."""
    configs: list[FunctionConfig]
    """The config space, without repeats."""

    __name__: str

    @property
    def __wrapped__(self) -> Callable[P, R_co]:
        """The function as it was decorated."""
        raise NotImplementedError

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __call__(self: _Takes1[A, Q, R], a: A, /) -> R: ...

    @overload
    def __call__(self: _Takes2[A, B, Q, R], a: A, b: B, /) -> R: ...

    @overload
    def __call__(self: _Takes3[A, B, C, Q, R], a: A, b: B, c: C, /) -> R: ...

    @overload
    def __call__(self: _Takes4[A, B, C, D, Q, R], a: A, b: B, c: C, d: D, /) -> R: ...

    @overload
    def __call__(self: _Takes5[A, B, C, D, E, Q, R], a: A, b: B, c: C, d: D, e: E, /) -> R: ...

    @overload
    def __call__(
        self, *args: Any, autotune: bool, autotune_verbose: bool = ..., autotune_pg: ProcessGroup | None = ...,
        autotune_allow_arg_overwrite: bool = ..., **kwargs: Any,
    ) -> R_co: ...  # fmt: skip

    @overload
    def __call__(
        self, *args: Any, autotune_verbose: bool, autotune_pg: ProcessGroup | None = ..., autotune_allow_arg_overwrite: bool = ...,
        **kwargs: Any,
    ) -> R_co: ...  # fmt: skip

    @overload
    def __call__(self, *args: Any, autotune_pg: ProcessGroup | None, autotune_allow_arg_overwrite: bool = ..., **kwargs: Any) -> R_co: ...

    @overload
    def __call__(self, *args: Any, autotune_allow_arg_overwrite: bool, **kwargs: Any) -> R_co: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the config for its key; tune first where there is none."""

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self: TunedFunction[Concatenate[Instance, Q], R], instance: Instance, owner: type | None = None) -> TunedFunction[Q, R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A method, where the function is one."""


def shown_signature(function: Callable[..., Any], call: inspect.Signature) -> inspect.Signature | None:
    """Signature of a function with the keyword-only parameters of the ``call`` in its place; None for builtins without one."""
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    added = [each for each in call.parameters.values() if each.kind is each.KEYWORD_ONLY and each.name not in own.parameters]
    parameters = list(own.parameters.values())
    end = len(parameters) - any(each.kind is each.VAR_KEYWORD for each in parameters)
    return own.replace(parameters=[*parameters[:end], *added, *parameters[end:]])
