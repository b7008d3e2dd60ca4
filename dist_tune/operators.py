"""``as_operator``: a function that launches kernels as one operator of torch, which
``torch.compile`` leaves whole and calls in Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import update_wrapper
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch

from dist_tune.tuning import TunedClosure
from dist_tune.validation import check_function, spelled

P = ParamSpec("P")
R = TypeVar("R")


def as_operator(
    launcher: Callable[P, R],
    *,
    name: str = "",
    fake: Callable[..., object] | None = None,
    mutates_args: Iterable[str] = (),
) -> TunedClosure[P, R]:
    """Make a function that launches kernels one operator of torch: one node in a graph of
    ``torch.compile``, tuned when it first runs.

    Args:
        launcher: a step of ``contextual_autotune``, a function of ``autotune`` (what its configs
            fill is no argument of the operator) or a plain function, with annotations that
            ``torch.library.infer_schema`` knows. It may not return one of its arguments.
        name: "namespace::name" of the operator; by default "dist_tune::" and the launcher's name.
        fake: a function of the same arguments that returns empty tensors of the right shapes, as
            torch's ``register_fake`` takes it. ``torch.compile`` needs it; not of a launcher that
            returns None.
        mutates_args: names of the arguments that the launcher writes to: ``torch.compile`` relies
            on this list.

    Returns:
        The operator, torch's ``CustomOpDef`` with the launcher's signature and ``records``. It has
        no backward of its own: ``torch.library.register_autograd`` and ``register_vmap`` take it,
        or its name.

    Raises:
        TypeError: ``launcher`` or ``fake`` is no function.
        ValueError: ``name`` is not of this form, or taken; nothing is returned or written; from
            torch: an annotation is missing or unfit.
    """
    check_function("launcher", launcher, "launcher(*args, **kwargs)", is_needed=True)
    check_function("fake", fake, "fake(*args, **kwargs) -> empty tensors")
    name = name or f"dist_tune::{getattr(launcher, '__name__', '')}"
    namespace, _, short = str(name).partition("::")
    # Torch would put this launcher in the place of that one.
    if not short.isidentifier() or hasattr(getattr(torch.ops, namespace), short):
        raise ValueError(
            'name must be "namespace::name" of an operator that is not there yet, got'
            f" {spelled(name)}"
        )

    def body(*args: Any, **kwargs: Any) -> Any:
        return launcher(*args, **kwargs)

    plain: Any = inspect.unwrap(getattr(launcher, "__func__", launcher))
    signature = inspect.signature(
        MethodType(plain, launcher.__self__) if isinstance(launcher, MethodType) else plain,
        eval_str=True,
    )
    filled = set[str]().union(*getattr(launcher, "configs", ()))
    signature = signature.replace(
        parameters=[
            parameter for parameter in signature.parameters.values() if parameter.name not in filled
        ]
    )
    # torch.compile removes such a node.
    if signature.return_annotation is None and not mutates_args:
        raise ValueError(
            f"{name} returns nothing and mutates nothing: name what it writes in mutates_args"
        )
    vars(body)["__signature__"] = signature
    operator: Any = torch.library.custom_op(name, body, mutates_args=mutates_args)
    if fake is not None:
        operator.register_fake(fake)
    update_wrapper(operator, launcher, updated=())
    vars(operator).update(__signature__=signature, records=getattr(launcher, "records", []))
    return cast("TunedClosure[P, R]", operator)
