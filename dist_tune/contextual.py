"""``contextual_autotune``: tune the ``triton.autotune`` kernels of a function inside the step they
belong to.

Decides when to tune, and does little where there is nothing to tune.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial, update_wrapper
from threading import RLock, get_ident
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast
from weakref import WeakValueDictionary

from torch.compiler import is_dynamo_compiling

from dist_tune.errors import DistTuneError, NestedTuningError
from dist_tune.files import warn_once
from dist_tune.keys import call_signature, lasting_signature
from dist_tune.launches import Buckets, Listener, Timings, Tunable, interception, own_runs
from dist_tune.log import Story
from dist_tune.measure import StepState, is_capturing, is_traced
from dist_tune.ranks import Calls, Ranks, check_group, group_of, member_ranks
from dist_tune.records import CacheLookup, TuningRecord
from dist_tune.replays import FirstRun
from dist_tune.search import Objective, Plan, SearchName
from dist_tune.settings import Settings, check_mode, read_settings
from dist_tune.sites import Site, check_not_capturing, in_turn
from dist_tune.tuning import (
    Online,
    TunedClosure,
    Tuning,
    TuningOptions,
    count_use,
    notice_of_tracing,
)
from dist_tune.validation import check_function, check_online, check_ordinary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

P = ParamSpec("P")
R = TypeVar("R")
_ALWAYS = 8
"""Calls in which such a site asks for a meeting; after these in every call whose number is a power
of two. Asking costs about 0.1 s.
"""


def contextual_autotune(
    is_dist: bool = False,
    n_repeat: int = 5,
    n_warmup: int = 3,
    *,
    group: ProcessGroup | None = None,
    reset: Callable[[], object] | None = None,
    release: Sequence[Any] = (),
    search: SearchName | None = None,
    objective: Objective = "closure",
    budget_s: float | None = None,
    max_slowdown: float = 0.05,
    cache: bool = True,
    bucket: Mapping[str, Mapping[str, Callable[[int], Hashable]]] | None = None,
) -> Callable[[Callable[P, R]], TunedClosure[P, R]]:
    """Tune all ``triton.autotune`` kernels that a function launches by replaying the whole
    function.

    A call that meets a kernel without a config for its key replays the function until every such
    kernel has one, then runs it once more and returns that value. Any other call is an ordinary
    call. With ``is_dist`` all ranks of ``group`` must call the function; a config that fails on any
    rank is dropped on all, and the slowest rank's time decides.

    A function is replayed only if that gives the same value and leaves the same state, or with
    ``reset``. Any other one is tuned online: its next calls run with other configs each, are timed,
    and count; nothing is repeated. One line says why (docs/side-effects.md).

    Args:
        is_dist: whether the ranks of ``group`` decide together. Needs an initialised process group
            at the first call.
        n_repeat: timed replays, at least 1: of each candidate in an exhaustive search, of a
            finalist in a round of finals; rounds of the race at most.
        n_warmup: untimed replays: of each candidate in an exhaustive search, once before a race.
        group: the ranks that decide, all that the function's collectives touch; None is the world.
        reset: called before each replay but the first, which finds the state that the caller left.
        release: tensors and functions that let a config go on which never returns: flags that a
            kernel spins on, filled with ones from another stream, and functions, called by another
            thread. That config is dropped on all ranks. Without it the process ends.
        search: "racing" times every candidate once and goes on with the promising ones;
            "exhaustive" gives all the same number of replays; "guided" compiles and times a spread
            of the candidates, then those that resemble the good ones. None: guided at a site with
            more than 64 candidates and more than ten for each compile thread, racing at others.
            "online": in the calls to come, without a replay.
        objective: "closure" compares the last few candidates by the time of the whole function,
            "kernel" by the kernel's alone, "graph" by replays of the function as a CUDA graph,
            where all ranks can capture it; else one line says why, and it is "closure".
        budget_s: seconds after which the search ends with what it knows, on all ranks at once, when
            what is under way is finished. Candidates that were not measured by then are named in
            the log and the record.
        max_slowdown: share of the job's time that tuning online may cost, from 0 to 1; with 0
            nothing is tuned online.
        cache: whether winners are kept on disk, and taken from there when all ranks can use the
            same.
        bucket: sizes that count as one in the key of a kernel that cannot be edited: name or
            pattern of kernels -> argument -> ``power_of_two``, ``size_classes(...)``, a function of
            one size. Tuned at the sizes of a bucket's first call, for all of it.

    Raises:
        TypeError: a number of replays is not an int, ``budget_s`` is no number, ``reset`` no
            function, ``group`` no process group, ``bucket`` no such mapping, or what is decorated
            is not an ordinary function.
        ValueError: ``n_repeat`` < 1, ``n_warmup`` < 0, ``budget_s`` <= 0 or not finite, an unknown
            ``search`` or ``objective``, ``objective="graph"`` where ``search`` has no finals,
            ``max_slowdown`` not from 0 to 1, ``reset`` or ``max_slowdown=0`` with
            ``search="online"``, a ``group`` without ``is_dist``; at a call: this rank is not in
            ``group``.
        DistTuneError: at a call, on all ranks: see ``dist_tune.errors``.
    """
    if callable(is_dist):
        raise TypeError(
            "contextual_autotune takes options, not the function: write @contextual_autotune() or"
            " @contextual_autotune(is_dist=True)"
        )
    check_function("reset", reset, "reset()")
    if group is not None and not is_dist:
        raise ValueError(
            "group= is given but is_dist is False: pass is_dist=True to decide together with the"
            " ranks of the group"
        )
    check_group("group", group)
    plan = Plan(n_warmup, n_repeat, search, objective, budget_s)
    buckets = None if bucket is None else Buckets(bucket)
    check_online(search, max_slowdown, reset=reset)

    def decorate(function: Callable[P, R]) -> TunedClosure[P, R]:
        # Bound again, so that a copy of its object has it for itself.
        if isinstance(function, MethodType):
            return cast(
                "TunedClosure[P, R]", MethodType(decorate(function.__func__), function.__self__)
            )
        check_ordinary(function, "contextual_autotune")
        options = TuningOptions(
            plan,
            reset,
            uses_cache=cache,
            release=release,
            max_slowdown=max_slowdown,
            buckets=buckets,
        )
        return _ClosureTuner(function, is_dist, group, options).tuned()

    return decorate


class Untuned:
    """Sites of one closure that this rank has met without the others."""

    def __init__(self) -> None:
        self._sites: dict[tuple[int, str], list[Any]] = {}
        """(Identity of the decorated object, key) -> site and number of its calls."""

    def remember(self, sites: Iterable[Site]) -> None:
        """Add sites, or keep those that are known."""
        for site in sites:
            for owner in site.slots:
                self._sites.setdefault((owner, site.key), [site, 0])

    def config(self, launch: Tunable) -> Any:
        """The config for a launch that shall not ask for a meeting; None for one that is new, or
        whose turn it is.
        """
        entry = self._sites.get((id(launch.owner), launch.key_text)) if self._sites else None
        if entry is None:
            return None
        entry[1] += 1
        site, n_calls = entry
        is_due = n_calls <= _ALWAYS or n_calls & (n_calls - 1) == 0
        return (
            None
            if is_due
            else site.configs[next(i for i in (site.stand_in, site.near, 0) if i is not None)]
        )


class MadeAnew:
    """Kernels that a function decorates anew in each call, and their configs: from the third call
    on they cost no meeting.

    All ranks use one config for a kernel, so each of them may go on with it by itself.
    """

    def __init__(self) -> None:
        self._met = set[str]()
        self._configs = defaultdict[str, list[tuple[Mapping[str, str], str]]](list)
        """Name and key -> identities of kernels that were met with it in a second tuning, each with
        its config, described.
        """
        self._asked = WeakValueDictionary[tuple[int, str], Any]()
        """Kernels that have asked, by identity and key: one that has lost its config since is to be
        tuned.
        """

    def remember(self, sites: Iterable[Site]) -> None:
        """Note the sites of a tuning."""
        for site in sites:
            if site.winner is not None and (name := site.kernel + site.key) in self._met:
                self._configs[name].insert(
                    0, (site.identify(), site.texts[site.configs.index(site.winner)])
                )  # the latest first
        self._met.update(site.kernel + site.key for site in sites)

    def config(self, launch: Tunable) -> Any:
        """The config for a launch without one, of a kernel that was met as another object; else
        None.
        """
        asking = id(launch.owner), launch.key_text
        has_asked = asking in self._asked
        self._asked[asking] = launch.owner
        if has_asked:
            return None
        for identity, text in self._configs.get(launch.name + launch.key_text, ()):
            if identity == launch.identify():
                configs, texts, _ = launch.candidates()
                return dict(zip(texts, configs, strict=True)).get(text)
        return None


class Tuner:
    """What a decorated function keeps between calls. Base of both decorators'."""

    def __init__(self, name: str, options: TuningOptions) -> None:
        if not member_ranks(None):  # else in the first call, where the other ranks hear of it
            check_mode()
        self.name, self.options = name, options
        self.records: list[TuningRecord] = []
        self.untuned = Untuned()
        self.tell_of_tracing = notice_of_tracing(name)
        self.turn = RLock()
        """Threads that come to a first call together, or miss together, wait for what one of them
        finds.
        """
        self.online: Online | None = None
        """The tuning beside the calls, while there is one."""

    def keep(self, tuning: Tuning) -> None:
        """Keep what a tuning has found: the function's own record after those of kernels inside,
        none twice.
        """
        found = sorted(tuning.records, key=lambda each: each.kernel == self.name)
        # A kernel made anew in each call has its own again.
        self.records += [each for each in found if each not in self.records]
        self.untuned.remember(tuning.untuned)

    def begin_online(self, tuning: Tuning, calls: Calls) -> bool:
        """Tune in the calls to come what this ``tuning`` found that no call may be repeated for;
        false if that cannot begin.
        """
        if self.online is not None:  # begun by another thread
            tuning.end_compiler()
            return False
        try:
            self.online = Online(self.name, tuning, calls, self.keep)
        except (DistTuneError, RuntimeError, OSError) as error:
            # A store that is gone, no thread, no descriptor: the job goes on as it is.
            tuning.end_compiler()
            warn_once(f"{self.name} is not tuned in the calls to come: {error}")
        return self.online is not None

    def ranks(self, deadline_s: float, group: ProcessGroup | None = None) -> Ranks:
        """The ranks that decide together in a call; ``group``: that of this call, where calls name
        one.
        """
        raise NotImplementedError

    def under_capture(
        self, launch: Tunable, settings: Settings, group: ProcessGroup | None = None
    ) -> Any:
        """The config for a launch without one while a CUDA graph is captured, where ``settings``
        let nothing be tuned.

        Each rank finds it by itself, because a capture waits for no other rank.

        Raises:
            CaptureError: the mode is another one.
        """
        if settings.may_tune:
            check_not_capturing(launch, self.name)
        (configs, texts, _), members, label = (
            launch.candidates(),
            self.ranks(settings.deadline_s, group),
            launch.name + launch.key_text,
        )
        world = {"world_size": len(members.members), "ranks_per_host": members.neighbours[1]}
        with closing(Story(settings, members.rank)) as log:
            lookup = CacheLookup(settings, log, is_used=self.options.uses_cache, **world)
            record = lookup.look_up(
                label, (launch.name, launch.key_text), lambda: launch.code(), texts
            )
            index = (
                texts.index(record.best.config)
                if record is not None
                else lookup.nearest_config(label, texts)
            )
        count_use(
            settings.effective_mode,
            settings,
            "exact" if record is not None else "nearest" if index is not None else "first",
        )
        chosen = configs[index or 0]
        if launch.is_compiled:  # another one where it does not compile or load here
            chosen = next((each for each in [chosen, *configs] if _loads(launch, each)), chosen)
        launch.slot.fill(chosen, Timings())
        return chosen

    def check_nested(self, group: ProcessGroup | None) -> None:
        """Refuse a call inside a closure that does not ask all ranks of the group, and so cannot
        tune for them.
        """
        outer = interception.listener_here()
        if missing := member_ranks(group) - (outer.members if outer is not None else frozenset()):
            raise NestedTuningError(
                f"{self.name} decides with ranks {sorted(missing)}, but it is called inside a tuned"
                " closure that does not ask them. Give the outer closure is_dist=True and a group"
                " that contains theirs, or this one a smaller group (group=, autotune_pg=)."
            )


def _loads(launch: Tunable, config: Any) -> bool:
    try:
        kernel = launch.compile(config)
        if kernel is not None:
            kernel._init_handles()
    except Exception:  # noqa: BLE001  # whatever the compiler and the driver raise; where no config loads the launch raises it
        return False
    return True


class _ClosureTuner(Tuner, Generic[P, R]):
    """That of a closure. The ``Listener`` of calls that are expected to meet no miss."""

    is_watching = False
    launching = None

    def __init__(
        self,
        function: Callable[P, R],
        is_dist: bool,
        group: ProcessGroup | None,
        options: TuningOptions,
    ) -> None:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        super().__init__(f"{getattr(function, '__module__', '')}.{name}", options)
        self.function, self.is_dist, self.group, self.buckets = (
            function,
            is_dist,
            group,
            options.buckets,
        )
        self.calls = Calls()
        self.why_not = ""
        """Why no run of the function may be repeated, if a first run has shown it."""
        self.seen_online = set[object]()
        """Signatures of calls that were tuned online: as long as that goes on, none is in ``seen``.
        """
        self.seen = set[object]()
        """Signatures that have had their first call; one set for ever, because calls look into it
        themselves.
        """
        self.is_waived = False
        """True once ranks were found to be called with different arguments, so that only a miss is
        worth a meeting.
        """
        self.made_anew = MadeAnew()
        self.opened: dict[Listener, Tuning] = {}
        """By the listener that has taken this one's place: tunings begun by a miss in a call that
        expected none.
        """
        self.call: Callable[..., R] = function  # the function in the closure's place

    def tuned(self) -> TunedClosure[P, R]:
        """The function to put in the closure's place; a plain function, so that it also works as a
        method.
        """
        function, seen, listeners, patch = (
            self.function,
            self.seen,
            interception.listeners,
            interception.triton_patch(),
        )
        patch.has_buckets |= self.buckets is not None
        run, our_code, own_code, marks, mark = (
            patch.function,
            patch.our_code,
            patch.own_code,
            patch.marks,
            interception.DYNAMO_SKIPS,
        )
        tell_of_tracing = self.tell_of_tracing

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # A constant for Dynamo, which then traces nothing of what follows.
            if is_dynamo_compiling():
                tell_of_tracing()
                return function(*args, **kwargs)
            if listeners and interception.listener_here() is not None:
                if self.is_dist:
                    self.check_nested(self.group)
                return function(*args, **kwargs)
            try:
                signature = call_signature(args, kwargs) if args or kwargs else ()
                is_new = signature not in seen
                if is_new:
                    signature = lasting_signature(args, kwargs)
                    is_new = signature not in seen
            except TypeError:  # a shape that cannot be hashed
                signature, is_new = type(args), type(args) not in seen
            if is_new and (not self.is_waived or self.online is not None) and not is_capturing():
                return self.first_call_in_turn(signature, args, kwargs)
            # From here to the return nothing waits, logs or talks unless a kernel misses: push and
            # pop written out, for two calls less.
            ident = get_ident()
            listeners[ident] = self
            marks[mark] = True
            run.__code__ = our_code
            try:
                if own_runs:
                    interception.enter_own_runs()
                value = function(*args, **kwargs)
            except BaseException as error:
                # Raised again: only the listener is taken away, and peers are told.
                self.leave(interception.pop(), error)
                raise
            if listeners[ident] is self:
                del listeners[ident]
                if own_runs:
                    interception.leave_own_runs()
                if not listeners:
                    run.__code__ = own_code
                    marks.pop(mark, None)
                self.calls.n_calls += 1
                return value
            held = [value]
            del value
            return self.tune_missed(self.opened.pop(interception.pop()), args, kwargs, held)

        self.call = call
        wrapper = cast("TunedClosure[P, R]", update_wrapper(call, function))
        wrapper.records = self.records
        vars(wrapper)["_tuner"] = self  # for ``install``
        return wrapper

    def first_call_in_turn(self, signature: object, args: Any, kwargs: Any) -> R:
        """A call with arguments of a new kind; an ordinary one if another thread has made the first
        call meanwhile.
        """
        if is_traced((args, kwargs)):
            self.tell_of_tracing()
            return self.function(*args, **kwargs)
        if (online := self.online) is not None:
            self.seen_online.add(signature)
            if online.runs.goes_on():
                return online.runs.call(partial(self.function, *args, **kwargs))
            self.online = None
            self.seen.update(self.seen_online)
            return self.call(*args, **kwargs)
        with in_turn(self.turn, read_settings().deadline_s):
            if signature not in self.seen:
                value = self.first_call(args, kwargs)
                (self.seen if self.online is None else self.seen_online).add(signature)
                return value
        return self.call(*args, **kwargs)

    def first_call(self, args: Any, kwargs: Any) -> R:
        """A call with arguments of a new kind: heard from its beginning, and ended by a meeting,
        hit or miss.
        """
        tuning = self.open()
        interception.push(tuning.trials)
        try:
            first = self.first_run(args, kwargs, is_watched=True)
            with first.watched():
                first.end([self.function(*args, **kwargs)])
        except BaseException as error:
            # Raised again: peers are told, and the listener is taken away.
            interception.pop()
            tuning.leave(error)
            raise
        interception.pop()
        self.why_not = self.why_not or first.why_not
        return self.tune(tuning, args, kwargs, first, is_watched=True)

    def tune_missed(self, tuning: Tuning, args: Any, kwargs: Any, held: list[R]) -> R:
        """Go on from a run that had begun as an ordinary call, and returned what is ``held``."""
        try:
            first = self.first_run(args, kwargs, is_watched=False)
        except BaseException as error:  # raised again: peers are told
            tuning.leave(error)
            raise
        first.end(held)
        return self.tune(tuning, args, kwargs, first, is_watched=False)

    def tune(
        self, tuning: Tuning, args: Any, kwargs: Any, first: FirstRun, *, is_watched: bool
    ) -> R:
        """Go on from the first run of a call. ``is_watched``: it was heard from its beginning."""
        value = cast(
            "R",
            tuning.tune_after(
                partial(self.function, *args, **kwargs), first, is_watched=is_watched
            ),
        )
        self.keep(tuning)
        self.is_waived |= tuning.is_alone
        if tuning.goes_online and self.begin_online(tuning, self.calls):
            self.seen_online |= self.seen
            self.seen.clear()  # so that calls come to ``first_call_in_turn``
        return value

    def keep(self, tuning: Tuning) -> None:
        """Keep what it has found, and how kernels were told apart that are made anew in each
        call.
        """
        super().keep(tuning)
        self.made_anew.remember(() if tuning.is_alone else tuning.sites)

    def first_run(self, args: Any, kwargs: Any, *, is_watched: bool) -> FirstRun:
        """The first run of a call, made or yet to make; with ``reset`` the user answers for what it
        changes.
        """
        if self.options.reset is not None or not read_settings().may_tune:
            return FirstRun()
        if self.options.plan.search == "online":
            return FirstRun(why_not='has search="online"')
        # Of a run that was not heard from its beginning, what an earlier one has shown.
        return FirstRun(
            StepState(self.function, args, kwargs, is_watched=is_watched),
            "" if is_watched else self.why_not,
        )

    def leave(self, listener: Listener, error: BaseException) -> None:
        """A call raised that expected no miss: if it had begun to tune, the other ranks must
        know.
        """
        if (tuning := self.opened.pop(listener, None)) is not None:
            tuning.leave(error)
        else:
            self.calls.n_calls += 1

    def ranks(self, deadline_s: float, group: ProcessGroup | None = None) -> Ranks:
        """The ranks that decide together, in each call the same."""
        return group_of(self.group, deadline_s, self.name) if self.is_dist else Ranks()

    def open(self) -> Tuning:
        """A tuning for the call that begins."""
        settings = read_settings()
        ranks = self.ranks(settings.deadline_s)
        tuning = Tuning(self.name, ranks, self.options, settings)
        self.calls = ranks.calls(self.name)
        return tuning

    @property
    def members(self) -> frozenset[int]:
        """Global ranks that decide together."""
        return member_ranks(self.group) if self.is_dist else frozenset()

    def missed(self, launch: Tunable) -> Any:
        """A miss in a call that expected none: from here on this call is the first replay of a
        tuning.
        """
        if is_capturing():
            return launch.run(self.under_capture(launch, read_settings()), None, is_trial=False)
        if is_traced(launch.arguments):
            self.tell_of_tracing()
            configs, *_ = launch.candidates()
            return launch.run(configs[0], None)
        if (config := self.untuned.config(launch)) is not None:
            return launch.run_known(config)
        if (config := self.made_anew.config(launch)) is not None:
            launch.slot.fill(config, Timings())
            return launch.run(config, None)
        tuning = self.open()
        self.opened[tuning.trials] = tuning
        interception.replace(self, tuning.trials)
        return tuning.trials.missed(launch)
