"""``as_operator``: a function that launches kernels as one operator of torch, which ``torch.compile`` leaves whole and calls in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import update_wrapper, wraps
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

import torch

from dist_tune.output import plain
from dist_tune.tuning import TunedClosure
from dist_tune.validation import check_function, spelled

P = ParamSpec("P")
R = TypeVar("R")
_OF_CALLS = ("autotune", "autotune_verbose", "autotune_pg", "autotune_allow_arg_overwrite")
"""Keywords of a call of a function under ``autotune``, which an operator does not take."""


def as_operator(
    launcher: Callable[P, R], *, name: str = "", fake: Callable[..., object] | None = None, mutates_args: Iterable[str] = ()
) -> TunedClosure[P, R]:
    """Make a function that launches kernels one operator of torch: one node in a graph of ``torch.compile``, tuned when it first runs.

    Args:
        launcher: a step of ``contextual_autotune``, a function of ``autotune`` (what its configs fill is no argument of the operator) or a
            plain function, with annotations that ``torch.library.infer_schema`` knows. It may not return one of its arguments.
        name: "namespace::name" of the operator; by default "dist_tune::" and the launcher's name.
        fake: a function of the same arguments that returns empty tensors of the right shapes; needed unless the launcher returns None.
        mutates_args: names of the arguments that the launcher writes to.

    Returns:
        The operator, torch's ``CustomOpDef`` with the launcher's signature and ``records``. It has no backward of its own:
        ``torch.library.register_autograd`` and ``register_vmap`` take it, or its name.

    Raises:
        TypeError: ``launcher`` or ``fake`` is no function, ``fake`` or an annotation is missing, or torch has no such type.
        ValueError: ``name`` is not of this form, or another operator has it.
    """
    check_function("launcher", launcher, "a function that launches kernels", is_needed=True)
    check_function("fake", fake, "fake(*args, **kwargs) -> empty tensors")
    name = name or f"dist_tune::{getattr(launcher, '__name__', '')}"
    namespace, _, short = name.partition("::")
    if not (namespace.isidentifier() and short.isidentifier()):
        raise ValueError(f'name must be "namespace::name", got {spelled(name)}')
    if hasattr(getattr(torch.ops, namespace), short):  # torch would put this launcher in the place of that one
        raise ValueError(f"there is an operator {name} already: make it once, in the module, or give name= another one")
    try:
        signature, hints = inspect.signature(launcher), get_type_hints(launcher)
        left_out = set(_OF_CALLS).union(*launcher.configs) if hasattr(launcher, "configs") else ()
        kept = [each for each in signature.parameters.values() if each.name not in left_out]
        if missing := [each for each in ([each.name for each in kept] + ["return"]) if each not in hints]:
            raise TypeError(f"no annotation of {', '.join(missing)} (torch.Tensor, int, float, bool, ...; None where nothing is returned)")
        result = None if hints["return"] is type(None) else hints["return"]
        if fake is None and result is not None:
            raise TypeError("it returns tensors and has no fake=, a function of its arguments as lambda x, w: torch.empty_like(x)")
        signature = signature.replace(parameters=[each.replace(annotation=hints[each.name]) for each in kept], return_annotation=result)

        @wraps(launcher)
        def body(*args: Any, **kwargs: Any) -> Any:
            return launcher(*args, **kwargs)

        vars(body)["__signature__"] = signature
        operator: Any = torch.library.custom_op(name, body, mutates_args=mutates_args)
    except (NameError, TypeError, ValueError, NotImplementedError) as error:
        raise TypeError(f"{name} cannot be an operator: {plain(error, 400)}") from None
    if fake is not None:
        operator.register_fake(fake)
    update_wrapper(operator, launcher, updated=())
    vars(operator).update(__signature__=signature, records=getattr(launcher, "records", []), _tuner=getattr(launcher, "_tuner", None))
    return cast("TunedClosure[P, R]", operator)
