"""``autotune``: tune a function over a space of configs, one of which is passed to it as keyword
arguments.

A function that the tuner calls itself is a closure with one site. Inside another tuned closure it
is one of that closure's sites.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, update_wrapper
from types import EllipsisType, MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from dist_tune.configs import FunctionConfig, as_configs, distinct
from dist_tune.contextual import Tuner
from dist_tune.errors import DistTuneError
from dist_tune.keys import exact_sizes, named_key, signature_of
from dist_tune.launches import FunctionLaunch, Slot, TunableFunction, interception
from dist_tune.measure import StepState, is_capturing, is_traced
from dist_tune.ranks import Calls, Ranks, check_group, group_of, member_ranks
from dist_tune.replays import FirstRun
from dist_tune.search import Plan, SearchName
from dist_tune.settings import NEAREST, Settings, read_settings
from dist_tune.sites import in_turn
from dist_tune.tuning import TunedFunction, Tuning, TuningOptions, shown_signature
from dist_tune.validation import check_function, check_online, check_ordinary, check_space

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

P = ParamSpec("P")
R = TypeVar("R")
_MANY_KEYS = 3
"""Keys tuned in a row for arguments that are alike: the sign of a key function that is wrong."""


def autotune(
    config_space: Iterable[Any] | EllipsisType = ...,
    key_fn: Callable[..., Hashable] | EllipsisType | None = ...,
    prune_fn: Callable[..., bool] | None = None,
    *,
    configs: Iterable[Any] | EllipsisType = ...,
    key: Iterable[str] | EllipsisType = ...,
    check: Callable[..., Any] | None = None,
    reset: Callable[[], object] | None = None,
    release: Sequence[Any] = (),
    n_warmup: int = 5,
    n_repeat: int = 10,
    search: SearchName | None = None,
    budget_s: float | None = None,
    max_slowdown: float = 0.05,
    cache: bool = True,
    bucket: Callable[[int], Hashable] | None = None,
    nearest: bool = False,
) -> Callable[[Callable[P, R]], TunedFunction[P, R]]:
    """Tune a function over a space of configs, by calling it; all ranks end with the config whose
    slowest rank is fastest.

    The first call with a new key is collective: all ranks of ``autotune_pg`` make it. It takes the
    config from the cache if all ranks can use the same, and tunes otherwise: every config (of many,
    those that a guided search comes to) runs once untimed, which drops what fails or answers
    wrongly on any rank, then they race, and the best few are compared again. Later calls are
    ordinary calls.

    Call-time keywords of the decorated function: ``autotune=False`` uses the first config and tunes
    nothing; ``autotune_verbose=True`` shows the account of a tuning on the first rank's terminal;
    ``autotune_pg`` is the process group that decides together (None: the world if there is one,
    else this process alone); ``autotune_allow_arg_overwrite=True`` lets the caller pass config
    arguments, which then take the place of those of every config.

    Args:
        config_space: the configs: mappings from keyword arguments to values of any kind, or values
            (a ``triton.Config``) for the parameter ``config``. The order must be the same on all
            ranks.
        key_fn: from the arguments of a call to what decides whether a config can be used again:
            sizes, dtypes. Hashable. None: one config for all calls.
        prune_fn: ``prune_fn(config, *args, **kwargs)``, True keeps.
            ``config["gemm_config"]["BLOCK_M"]`` and ``config["BLOCK_M"]`` work.
        configs: Triton's name of ``config_space``.
        key: in place of ``key_fn``, as in ``triton.autotune``: names of arguments. Their values and
            the dtypes of all tensors decide.
        check: ``check(result, *args, **kwargs)``, False or an AssertionError is wrong; or a
            function that returns the right result; or ``matches(reference, rtol=..., atol=...)``. A
            config from the cache is checked once, and tuned anew if it answers wrongly on any rank,
            and a winner is checked once more. Out is also a config that changes an argument which
            others leave as it is.
        reset: called before each replay but the first. Without it, tensors among the arguments are
            copied (also those of a module, up to a quarter of the GPU's free memory, 2 GiB on a
            CPU) and put back before each run, so that the call changes them once.
        release: what frees a config that never returns, which is dropped then: flags (tensors,
            filled with ones) and functions.
        n_warmup: untimed replays before the race.
        n_repeat: timed replays of each finalist in a round of finals; rounds of the race at most.
        search: "racing", "exhaustive", or "guided": a spread of the configs, then neighbours of the
            good ones; None: that, if over 64. "online": in the calls to come, each of which is made
            once; chosen by itself where a call may not be repeated.
        budget_s: seconds after which the search ends with the best config it knows; a run under way
            is finished first.
        max_slowdown: share of the job's time that tuning online may cost, from 0 to 1; with 0
            nothing is tuned online.
        cache: whether winners are kept on disk.
        bucket: what becomes of each int in a key: ``power_of_two``, ``size_classes(...)``, a
            function.
        nearest: whether ``autotune=False`` uses the config of the record, or of the nearest one, as
            ``DIST_TUNE_MODE=cached`` does, in place of the first. The first such call of a key is
            collective; inside a tuned step, where ranks do not talk, it is the first.

    Raises:
        TypeError: an option is not of its kind, both spellings of one were given, a config has a
            name that the function does not take, or what is decorated is not an ordinary function.
        ValueError: an empty config space, numbers out of range; at a call: a config argument was
            passed, or this rank is not in the group.
        DistTuneError: at a call, on all ranks: see ``dist_tune.errors``.
    """
    first: Any = config_space
    if callable(first) and key_fn is key is ...:
        raise TypeError(
            "autotune takes a config space and key_fn= or key=, not the function: write"
            " @autotune([{...}, ...], key_fn) above it"
        )
    space = check_space(*_one_of(config_space=config_space, configs=configs))
    key_option, key_given = _one_of(key_fn=key_fn, key=key)
    if key_option == "key_fn":
        hint = (
            f"; names of arguments go to key={key_given}"
            if isinstance(key_given, list | tuple | str)
            else ""
        )
        check_function("key_fn", key_given, f"key_fn(*args, **kwargs){hint}")
    check_function("prune_fn", prune_fn, "prune_fn(config, *args, **kwargs)")
    check_function(
        "check", check, "check(result, *args, **kwargs), a reference, or matches(reference)"
    )
    check_function("reset", reset, "reset()")
    check_function("bucket", bucket, "bucket(size), as power_of_two")
    plan = Plan(n_warmup, n_repeat, search, budget_s=budget_s)
    check_online(search, max_slowdown, reset=reset, check=check)

    def decorate(function: Callable[P, R]) -> TunedFunction[P, R]:
        if hasattr(function, "run") and hasattr(function, "__getitem__"):
            kernel = getattr(getattr(function, "fn", function), "__name__", "")
            raise TypeError(
                f"autotune decorates functions that launch kernels, and got the kernel {kernel}."
                " Those have triton.autotune"
            )
        check_ordinary(function, "autotune")
        configs, texts = distinct(as_configs(space, function))
        chosen = frozenset(name for config in configs for name in config)
        key_of = (
            named_key(key_given, function, chosen)
            if key_option == "key"
            else cast("Callable[..., Hashable] | None", key_given)
        )
        tunable = TunableFunction(
            function,
            configs,
            texts,
            key_of,
            prune_fn,
            check,
            bucket,
            n_bound=isinstance(function, MethodType),
        )
        options = TuningOptions(
            plan, reset, uses_cache=cache, release=release, max_slowdown=max_slowdown
        )
        tuned = _FunctionTuner(tunable, options, uses_nearest=nearest).tuned()
        # Bound again, so that a copy of its object has it for itself.
        return (
            cast("TunedFunction[P, R]", MethodType(tuned, function.__self__))
            if isinstance(function, MethodType)
            else tuned
        )

    return decorate


def _one_of(**spellings: object) -> tuple[str, Any]:
    """The one of two spellings of an option that was given, and its value."""
    given = [(name, value) for name, value in spellings.items() if value is not ...]
    if len(given) != 1:
        what = "both, which are two spellings of one option" if given else "neither"
        raise TypeError(f"autotune needs {'= or '.join(spellings)}=, got {what}: pass one of them")
    return given[0]


class _FunctionTuner(Tuner):
    """That of a function with configs."""

    def __init__(
        self, tunable: TunableFunction, options: TuningOptions, *, uses_nearest: bool
    ) -> None:
        super().__init__(tunable.name, options)
        self.tunable, self.uses_nearest = tunable, uses_nearest
        self.nearest: dict[Hashable, FunctionConfig] = {}
        """Configs that were looked up for calls which tune nothing, by group and key; each once,
        and outside of closures.
        """
        self.calls: defaultdict[ProcessGroup | None, Calls] = defaultdict(Calls)
        """By the group that decides."""
        self.tuned_keys: dict[Hashable, list[str]] = {}
        """Signature of the arguments -> keys tuned for it, as long as no call between them found
        its config.
        """
        self.last_tuned = 0
        """Number of the call that tuned last."""

    def tuned(self) -> TunedFunction[Any, Any]:
        """The function to put in its place; a plain function, so that it also works as a method."""
        function, winners, names, listeners = (
            self.tunable.body,
            self.tunable.winners,
            self.tunable.names,
            interception.listeners,
        )
        calls = self.calls
        interception.triton_patch()  # takes some milliseconds; here rather than in the first call
        key_fn = None if self.tunable.bucket or self.tunable.n_bound else self.tunable.key_fn
        key_of = self.tunable.key if key_fn is None else key_fn
        first, tell_of_tracing = self.tunable.configs[0], self.tell_of_tracing
        used = self.tunable.fits.used if self.tunable.fits is not None else None

        def call(
            *args: Any,
            autotune: bool = True,
            autotune_verbose: bool = False,
            autotune_pg: ProcessGroup | None = None,
            autotune_allow_arg_overwrite: bool = False,
            **kwargs: Any,
        ) -> Any:
            # A constant for Dynamo, which then traces nothing of what follows.
            if is_dynamo_compiling():
                tell_of_tracing()
                return function(*args, **{**first, **kwargs})
            is_fixed = bool(kwargs) and not names.isdisjoint(kwargs)
            if is_fixed:
                self.tunable.check_overwrite(kwargs, is_allowed=autotune_allow_arg_overwrite)
                if names <= kwargs.keys():
                    return function(*args, **kwargs)
            if not autotune:
                return self.call_untuned(args, kwargs, autotune_pg)
            try:
                key = self.tunable.key_of(args, kwargs) if is_fixed else key_of(*args, **kwargs)
            except BaseException as error:
                self.count_raised(autotune_pg)
                # Else it says so by itself.
                if key_fn is not None and not is_fixed and isinstance(error, Exception):
                    raise self.tunable.key_error(error, args, kwargs) from error
                raise
            slot_key = key if autotune_pg is None else (autotune_pg, key)
            try:
                config = winners.get(slot_key)
            except TypeError:
                check_group("autotune_pg", autotune_pg)
                if is_traced((args, kwargs)):  # symbolic sizes
                    return self.call_traced(args, kwargs)
                self.tunable.check_key(key)
                raise
            if config is not None and used is not None:
                try:
                    found = used.get(exact_sizes(args, kwargs))
                except TypeError:  # an object with a list as its shape
                    found = None
                config = found[1] if found is not None and found[0] is config else None
            if config is not None and not listeners:
                calls[autotune_pg].n_calls += 1
                return (
                    function(*args, **config)
                    if not kwargs
                    else function(*args, **{**config, **kwargs})
                )
            return self.call_new(key, args, kwargs, autotune_pg, is_verbose=autotune_verbose)

        signature = shown_signature(function, inspect.signature(call))
        wrapper = cast("TunedFunction[Any, Any]", update_wrapper(call, function))
        wrapper.records = self.records
        wrapper.configs = self.tunable.configs
        if signature is not None:
            vars(wrapper)["__signature__"] = signature
        return wrapper

    def ranks(self, deadline_s: float, group: ProcessGroup | None = None) -> Ranks:
        """The ranks of a call's ``autotune_pg``; of the world, if there is one; or this process
        alone.
        """
        return (
            group_of(group, deadline_s, self.name)
            if group is not None or member_ranks(None)
            else Ranks()
        )

    def call_new(
        self, key: Hashable, args: Any, kwargs: Any, group: ProcessGroup | None, *, is_verbose: bool
    ) -> Any:
        """A call that may have to tune, or that a tuning is listening to."""
        check_group("autotune_pg", group)
        listener = interception.listener_here()
        launch = FunctionLaunch(self.tunable, key, args, kwargs, group, is_whole=listener is None)
        if listener is not None and listener.launching is not None and listener.is_watching:
            listener.launching(launch)
        config = launch.slot.config
        if config is not None:
            return (
                launch.run_known(config)
                if listener is not None
                else self.call_known(launch, config, group)
            )
        if is_traced((args, kwargs)):
            return self.call_traced(args, kwargs)
        try:
            self.tunable.check_key(key)
            self.tunable.check_arguments(args, kwargs)
            if listener is None and is_capturing():
                config = self.under_capture(launch, read_settings(), group)
        except BaseException:
            self.count_raised(group)
            raise
        if config is not None:
            return self.call_known(launch, config, group)
        if listener is None:
            return self.call_counted(launch, group, read_settings(), is_verbose=is_verbose)
        self.check_nested(group)
        return listener.missed(launch)

    def call_known(
        self, launch: FunctionLaunch, config: FunctionConfig, group: ProcessGroup | None
    ) -> Any:
        """A call with nothing to tune."""
        self.calls[group].n_calls += 1
        return launch.run_known(config)

    def count_raised(self, group: ProcessGroup | None) -> None:
        """``key_fn`` raised, or the call is refused: count it, because peers may wait for this rank
        in it.
        """
        if interception.listener_here() is None:
            # No such group, which is not what went wrong first.
            with suppress(DistTuneError, ValueError):
                self.calls[group] = self.ranks(read_settings().deadline_s, group).calls(self.name)
            self.calls[group].n_calls += 1

    def call_counted(
        self,
        launch: FunctionLaunch,
        group: ProcessGroup | None,
        settings: Settings,
        *,
        is_verbose: bool,
    ) -> Any:
        """A call without a config outside of any tuning."""
        ranks = self.ranks(settings.deadline_s, group)
        with in_turn(self.turn, settings.deadline_s):
            if (
                settings.may_tune
                and (online := self.online) is not None
                and online.calls is self.calls[group]
            ):
                if online.runs.goes_on():
                    return online.runs.call(partial(_missed_here, launch))
                self.online = None
            config = launch.slot.config or self.untuned.config(launch)
            if config is None:
                return self.tune(launch, ranks, group, settings, is_verbose=is_verbose)
        return self.call_known(launch, config, group)

    def tune(
        self,
        launch: FunctionLaunch,
        ranks: Ranks,
        group: ProcessGroup | None,
        settings: Settings,
        *,
        is_verbose: bool,
    ) -> Any:
        """Choose the config for the launch's key, and return the call's value."""
        signature, options = (
            signature_of(launch.arguments),
            replace(self.options, is_verbose=is_verbose),
        )
        tuning = Tuning(launch.name, ranks, options, settings)
        self.calls[group] = ranks.calls(launch.name)
        n_calls = self.calls[group].n_calls
        # To be called again: with fresh arguments for a check.
        is_free = options.reset is not None or self.tunable.check is not None
        try:
            tuning.meet(launch)
            is_online, state = options.plan.search == "online", None
            if not (is_free or is_online) and settings.may_tune:
                state = StepState(launch.function, *launch.given)
            first = FirstRun(state, 'has search="online"' if is_online else "")
        except BaseException as error:  # the user's prune_fn: the other ranks must know
            tuning.leave(error)
            raise
        if n_calls != self.last_tuned + 1:
            self.tuned_keys.clear()
        keys = self.tuned_keys.setdefault(signature, [])
        if is_endless := len(keys) == _MANY_KEYS:
            told = (
                f"{len(keys)} tunings in as many calls with arguments alike, keys {', '.join(keys)}"
            )
            remedy = "let key_fn return only what decides whether a config can be used again"
            tuning.refuse(f"has a key that never repeats: {told}; {remedy}")
        value = tuning.tune(partial(tuning.trials.missed, launch), first)
        self.keep(tuning)
        if tuning.goes_online:
            self.begin_online(tuning, self.calls[group])
        if is_endless or not all(record.is_recalled for record in tuning.records):
            if not is_endless:
                keys.append(launch.key_text)
            self.last_tuned = n_calls
        return value

    def call_traced(self, args: Any, kwargs: Any) -> Any:
        """A call that computes no values."""
        self.tell_of_tracing()
        return self.tunable.body(*args, **{**self.tunable.configs[0], **kwargs})

    def call_untuned(self, args: Any, kwargs: Any, group: ProcessGroup | None) -> Any:
        """A call that tunes nothing: with the first config, or with what ``DIST_TUNE_MODE=cached``
        chooses.
        """
        if self.uses_nearest and not is_traced((args, kwargs)):
            key, is_whole = self.tunable.key_of(args, kwargs), interception.listener_here() is None
            self.tunable.check_key(key)
            launch = FunctionLaunch(self.tunable, key, args, kwargs, group, is_whole=is_whole)
            if launch.slot.config is None:
                launch.slot = Slot(self.nearest, (group, key), self.tunable.fits)
            if launch.slot.config is None and is_whole:
                settings = read_settings()
                settings = (
                    settings.model_copy(update={"mode": NEAREST}) if settings.may_tune else settings
                )
                if not is_capturing():
                    return self.call_counted(launch, group, settings, is_verbose=False)
                self.under_capture(launch, settings, group)
            if (config := launch.slot.config) is not None:
                return launch.run_known(config)
        return self.tunable.body(*args, **{**self.tunable.configs[0], **kwargs})


def _missed_here(launch: FunctionLaunch) -> Any:
    """A call that is tuned online: the launch of its listener, which knows the config."""
    listener = interception.listener_here()
    assert listener is not None
    return listener.missed(launch)
