"""Recorded launches, compiled ahead: as they were, or as other configs of a function will make them.

The launches of a function are unknown before it runs. But most functions pass the fields of their config on to a Triton kernel, under
the same names; so one recorded launch, with those fields exchanged, predicts what every other config will compile. The prediction can
be wrong where other arguments follow from the config, so it drops no config: a launch that does not compile or load fails when it is
made after all, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton

from dist_tune.configs import FunctionConfig
from dist_tune.runtime.recording import RecordedLaunch, is_same

_MAX_LAUNCHES = 8
"""Of one function; each costs about 0.1 ms a candidate to ask for."""
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


class LaunchConfig(triton.Config):  # type: ignore[misc]  # untyped
    """A recorded launch with other values of some arguments."""

    def __init__(self, launch: RecordedLaunch, changed: dict[str, Any], hook: Any = None) -> None:
        self.launch = launch
        self.kernel = launch.kernel
        self.changed = changed
        """Kernel's argument or option -> value. No others: a default that is spelled out makes another key in Triton's memory."""
        options = {name: value for name, value in changed.items() if name in _OPTIONS}
        super().__init__({name: value for name, value in changed.items() if name not in _OPTIONS}, pre_hook=hook, **options)

    @property
    def given(self) -> dict[str, Any]:
        """All arguments and options by name."""
        return {**self.launch.given, **self.changed}


class RecordedKernel:
    """The kernels of recorded launches. A ``Compilable``."""

    def compile(self, config: LaunchConfig) -> Any:
        """Triton's compiled kernel for the launch, not launched."""
        launch, given = config.launch, config.given
        if config.pre_hook is not None and _has_descriptor(launch):
            config.pre_hook(given)
        args = [given.pop(name) for name in config.kernel.arg_names[: len(launch.args)]]
        return config.kernel.run(*args, **{**given, "warmup": True})


@dataclass(frozen=True, slots=True)
class Precompile:
    """Candidates of a function's site at its launches."""

    label: str
    """The function's site and the kernel, in place of a site's label."""
    kernel: str
    configs: list[LaunchConfig]
    """Launches to compile."""
    function: str
    """The function's site."""
    candidates: Sequence[int]
    """The function's candidate of each launch."""


def precompiles(function: str, candidates: Sequence[FunctionConfig], launches: Sequence[RecordedLaunch]) -> list[Precompile]:
    """The launches of all candidates of a function's site, as far as recorded ones predict them."""
    found: list[Precompile] = []
    launches = [each for each in launches if each.label == function][:_MAX_LAUNCHES]
    if not launches:
        return []
    fields = [_fields(config) for config in candidates]
    hooks = [_hook(config) for config in candidates]
    for each in launches:
        mine, given = fields[each.candidate], each.given
        names = {name.lower(): name for name in mine}
        # Kernel's argument -> field of the config.
        followed = {name: field for name, value in given.items() if (field := names.get(name.lower())) and is_same(value, mine[field])}
        if not followed or (_has_descriptor(each) and None in hooks):
            continue
        configs = [
            LaunchConfig(each, {name: one.get(field, given[name]) for name, field in followed.items()}, hook)
            for one, hook in zip(fields, hooks, strict=True)
        ]
        kernel = each.kernel.fn.__qualname__.rpartition("<locals>.")[2]
        found.append(Precompile(f"{function} > {len(found)}.{kernel}", kernel, configs, function, range(len(configs))))
    return found


def as_recorded(function: str, launches: Sequence[RecordedLaunch]) -> Precompile:
    """The launches of dry runs with candidates of a function's site, as they will be made."""
    # Constants that are given again change nothing but the estimate of the compile cost.
    configs = [LaunchConfig(each, {name: value for name, value in each.kwargs.items() if type(value) is int}) for each in launches]
    return Precompile(
        f"{function} > dry runs", launches[0].kernel.fn.__qualname__, configs, function, [each.candidate for each in launches]
    )


def _fields(config: FunctionConfig) -> dict[str, Any]:
    """All values of a config, those of a ``triton.Config`` in it by their own names."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        fields |= value.all_kwargs() if isinstance(value, triton.Config) else {name: value}
    return fields


def _hook(config: FunctionConfig) -> Any:
    return next((value.pre_hook for value in config.values() if isinstance(value, triton.Config)), None)


def _has_descriptor(launch: RecordedLaunch) -> bool:
    return any(hasattr(value, "block_shape") for value in (*launch.args, *launch.kwargs.values()))
