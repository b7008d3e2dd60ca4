"""Notices of a tuning in which nothing failed: a line in the log for each, and one of each kind on
the first rank's terminal.
"""

from __future__ import annotations

import atexit
import re
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from dist_tune import __version__
from dist_tune.configs import triton_version
from dist_tune.files import Told, rank_of_job, to_terminal
from dist_tune.launches import unheard_tuners
from dist_tune.log import Story, amount, closure_name
from dist_tune.ranks import Ranks, member_ranks
from dist_tune.settings import NEAREST, Settings, read_settings
from dist_tune.validation import deferred_value, within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dist_tune.records import TuningRecord
    from dist_tune.tuning.context import TuningContext


TESTED = {"torch": ("2.11", "2.14"), "triton": ("3.6", "3.9")}
"""Package -> oldest and newest version that this release is tested with.

Older ones are not installed beside this package.
"""


of_process = Told()
"""Topics that were told for all decorated objects."""
_uses = Counter[str]()
"""Sites by what has given them their config where DIST_TUNE_MODE let them not be tuned: an "exact"
record, the "nearest", or "first".
"""


def notice(
    context: TuningContext,
    told: Mapping[str, str],
    level: str = "warning",
    once: Told | None = None,
) -> None:
    """Write a line for each topic (topic -> text) to the log, and the first of those that are new
    to the terminal.

    What was told before is no more than a detail. ``once``: by default for the decorated object.
    """
    log, once = context.story, once or context.options.told
    new = [topic for topic in told if once.is_new(topic)]
    more = f" (and so of {len(new) - 1} more: {log.path})" if len(new) > 1 else ""
    for topic, text in told.items():
        write = getattr(log, level if topic in new else "debug")
        write(text, shown=topic in new[:1] and text + more)


def count_use(mode: str, settings: Settings, how: str) -> None:
    """Count a site for the line at the end of the program.

    ``mode``: of the rank whose mode allows least.
    """
    if mode == NEAREST:
        return
    if of_process.is_new("uses") and rank_of_job() == 0 and settings.shown != "quiet":
        atexit.register(_tell_of_uses, mode)
    _uses[how] += 1


def _tell_of_uses(mode: str) -> None:
    told = (
        f"{_uses['exact']} of their own record, {_uses['nearest']} of the nearest, {_uses['first']}"
        " the first that runs"
    )
    to_terminal(
        f"dist_tune: DIST_TUNE_MODE={mode}: {amount(_uses.total(), 'config')} without a tuning:"
        f" {told}\n"
    )


def tell_of_first_run(context: TuningContext, value: Any, *, is_watched: bool) -> None:
    """After the first run of a closure: nothing of it could be heard, or ranks decide that could
    decide together.
    """
    name, sites = context.name, context.sites
    if kind := deferred_value(value):
        text = (
            f"{name} returned a {kind}, which has not run when it returns: nothing of it is tuned."
            f" {within(kind)}"
        )
        notice(context, {"deferred": text})
    elif is_watched and not sites.met and not sites.hits and not context.entries:
        unheard = ", ".join(unheard_tuners())
        hint = (
            f"Left alone are kernels of {unheard}, which tune in a run of their own: use"
            " triton.autotune. "
            if unheard
            else ""
        )
        text = (
            f"{name}: nothing tunable was launched in this call, no triton.autotune kernel with"
            f" several configs and no function of autotune. {hint}Decorate the function that"
            " launches them"
        )
        notice(context, {"nothing": text})
    if (buckets := context.replays.trials.buckets) is not None:
        notice(context, buckets.told(name))
    n_ranks = len(member_ranks(None))
    if context.ranks.is_alone and n_ranks > 1 and sites.met:
        text = (
            f"{name}: each rank chooses alone; ranks may disagree: a process group of {n_ranks}"
            " ranks is initialised and is_dist was not given. Pass is_dist=True to decide together"
        )
        notice(context, {"alone": text})


def tell_of_untuned(context: TuningContext, why_not: str) -> None:
    """A call is not tuned."""
    notice(context, {"not tuned": f"{closure_name(context.name)} {why_not}"})


def cut_off(context: TuningContext) -> str:
    """How far a tuning has come that its program has ended."""
    race, n_calls = context.race, context.replays.n_calls
    n_all = sum(len(site.configs) for site in context.sites.met.values())
    n_timed = sum(len(race[label].times) for label in context.entries if label in race)
    after = f" after {amount(n_calls, 'call')}" if n_calls else ""
    name = closure_name(context.name)
    kept, then = (
        f"the times of {n_timed} of {n_all} configs are kept",
        "; the next start goes on from there",
    )
    if not context.lookup.folder:
        kept, then = "nothing is kept without a cache", ""
    if n_timed:
        n_missing = max(1, 3 * race.n_left // 2)  # with those of what is in use
        phase = "finals" if race.is_final else "race"
        missing = amount(n_missing, "timed call")
        far = f"in the {phase}: {kept}, and at most {missing} are missing"
    else:
        n_loaded = sum(
            len(variant.loaded)
            for site in context.sites.met.values()
            for variant in site.variants[:1]
        )
        far = f"before a config was timed: {n_loaded} of {n_all} are compiled"
    return f"{name} is not tuned any further: the program ended first{after}, {far}{then}"


def tell_of_repeated(context: TuningContext, names: Sequence[str]) -> None:
    """What plain objects hold and each replay changes, which is the step's own business."""
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        text = (
            f"{closure_name(context.name)} changes {shown}, and each replay does so again: give"
            " reset= if they must count once"
        )
        notice(context, {"repeated": text}, "info")


def tell_of_unmet(context: TuningContext, records: Mapping[str, TuningRecord]) -> None:
    """At the end of a tuning: sites of the first run that no replay has launched, so that their
    configs were not compared.
    """
    unmet = {}
    for label, record in records.items():
        site, is_timed = context.sites.met.get(label), record.best.latency_ms is not None
        if (
            site is not None
            and len(site.configs) > 1
            and not site.is_replayed
            and not is_timed
            and context.replays.n_replays > 0
        ):
            unmet[f"unmet {label}"] = (
                f"site={label} is not tuned: the first run launched it and no replay did. The step"
                " needs it once only, or something around it keeps the compiled kernel of the"
                f" first launch: launch it once before the first call of {context.name}, so that"
                " triton.autotune chooses"
            )
    notice(context, unmet)


def newer_than_tested(installed: Mapping[str, str]) -> str:
    """Words about the packages whose version is above the tested ones, by its first two numbers;
    empty if there are none.
    """
    newer = [
        name for name, version in installed.items() if _numbers(version) > _numbers(TESTED[name][1])
    ]
    if not newer:
        return ""
    told = " and ".join(f"{name} {installed[name]} ({' to '.join(TESTED[name])})" for name in newer)
    return f"newer than dist_tune {__version__} is tested with: {told}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def tell_of_sites(context: TuningContext, labels: Iterable[str]) -> None:
    """Before sites are tuned: candidates that prune rules removed, and why the nearest record does
    not count; in the log new versions.
    """
    if newer := newer_than_tested({"torch": torch.__version__, "triton": triton_version()}):
        context.story.info(
            f"{newer}. If a tuning fails, try a tested version; dist-tune doctor tries each part"
        )
    numbers = context.story.numbers
    pruned, missed = dict[str, str](), dict[str, str]()
    for label in sorted(labels, key=lambda each: numbers.get(each, len(numbers))):
        site = context.sites.met.get(label)
        if site is None:  # another rank's
            context.story.site(label, context.entries[label].texts)
            continue
        if site.n_removed:  # a rule that is too strict costs speed, and no error
            n_all = len(site.configs) + site.n_removed
            pruned[f"pruned {label}"] = (
                f"prune rules removed {site.n_removed} of {n_all} configs of site={label}"
            )
        why, is_stale = context.lookup.reason_of_miss(label)
        if is_stale:
            missed[f"missed {label}"] = f"site={label} is tuned: {why}"
        else:  # as it should be
            context.story.debug(f"site={label} is tuned: {why}")
    notice(context, pruned, "info")
    notice(context, missed)


def notice_of_tracing(name: str) -> Callable[[], None]:
    """A function that writes one line to the log, the first time: a call was traced and not run.

    Dynamo calls it while it traces.
    """
    told = Told()

    def note() -> None:
        if told.is_new(name):
            with closing(Story(read_settings(), Ranks().rank)) as log:
                log.debug(
                    f"{name} was traced, or called with tensors without data: first config, nothing"
                    " tuned, nothing kept"
                )

    vars(note)["_dynamo_marked_constant"] = (
        True  # as torch.compiler.assume_constant_result does, which imports all of Dynamo
    )
    return note
