"""Notices of a tuning in which nothing failed: one line each on the first rank's terminal, once for a decorated object."""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from dist_tune import __version__
from dist_tune.configs import triton_version
from dist_tune.distributed import Ranks, member_ranks
from dist_tune.output import Story, amount, closure_name
from dist_tune.runtime import unheard_tuners
from dist_tune.settings import read_settings
from dist_tune.validation import deferred_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dist_tune.cache import TuningRecord
    from dist_tune.tuning.context import TuningContext


TESTED = {"torch": ("2.11", "2.13"), "triton": ("3.6", "3.9")}
"""Package -> oldest and newest version that this release is tested with. Older ones are not installed beside this package."""
_MAX_SHOWN = 3
"""Lines of one kind about the sites of a tuning on the terminal; those of more sites are in the log."""


class Notices:
    """The topics that were told of one decorated object."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def is_new(self, topic: str) -> bool:
        """True the first time that a topic is asked for; told from then on."""
        is_new = topic not in self._told
        self._told.add(topic)
        return is_new

    def say(self, log: Story, topic: str, text: str) -> bool:
        """Write a line to the log and to the first rank's terminal, unless the topic was told before; true if it was not."""
        if is_new := self.is_new(topic):
            log.warning(text, shown=True)
        return is_new

    def say_each(self, log: Story, told: Mapping[str, str], more: str) -> None:
        """Write a line for each topic (topic -> text) to the log, and the first few that were not told before to the terminal.

        ``more``: what is said there of the number of others.
        """
        new = [text for topic, text in told.items() if topic not in self._told]
        for topic, text in told.items():
            if topic in self._told:
                log.info(text)
        self._told.update(told)
        for k, text in enumerate(new):
            log.warning(text, shown=k < _MAX_SHOWN)
        if len(new) > _MAX_SHOWN:
            log.info(f"{len(new) - _MAX_SHOWN} {more}", shown=True)

    def note(self, log: Story, topic: str, text: str) -> None:
        """The same at level INFO."""
        if self.is_new(topic):
            log.info(text, shown=True)


of_process = Notices()
"""Told once for all decorated objects."""


def tell_of_first_run(context: TuningContext, value: Any, *, is_watched: bool) -> None:
    """After the first run of a closure: nothing of it could be heard, or ranks decide that could decide together."""
    name, sites = context.name, context.sites
    if kind := deferred_value(value):
        text = f"{name} returned a {kind}, which has not run when it returns: nothing of it is tuned. Decorate what runs it"
        context.notices.say(context.story, "deferred", text)
    elif is_watched and not sites.met and not sites.hits and not context.entries:
        unheard = ", ".join(unheard_tuners())
        hint = f"Left alone are kernels of {unheard}, which tune in a run of their own: use triton.autotune. " if unheard else ""
        text = (
            f"{name}: nothing tunable was launched in this call, no triton.autotune kernel with several configs and no function of "
            f"autotune. {hint}Decorate the function that launches them"
        )
        context.notices.say(context.story, "nothing", text)
    n_ranks = len(member_ranks(None))
    if context.ranks.is_alone and n_ranks > 1 and sites.met:
        text = (
            f"{name}: each rank chooses alone; ranks may disagree: a process group of {n_ranks} ranks is initialised and is_dist was not "
            f"given. Pass is_dist=True to decide together"
        )
        context.notices.say(context.story, "alone", text)


def tell_of_untuned(context: TuningContext, why_not: str) -> None:
    """Once for a decorated object, and each time in the log: a call is not tuned."""
    text = f"{closure_name(context.name)} {why_not}"
    if not context.notices.say(context.story, "not tuned", text):
        context.story.info(text)


def tell_of_repeated(context: TuningContext, names: Sequence[str]) -> None:
    """Once for a decorated object: what plain objects hold and each replay changes, which is the step's own business."""
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        text = f"{closure_name(context.name)} changes {shown}, and each replay does so again: give reset= if they must count once"
        context.notices.note(context.story, "repeated", text)


def tell_of_unmet(context: TuningContext, records: Mapping[str, TuningRecord]) -> None:
    """At the end of a tuning: sites of the first run that no replay has launched, so that their configs were not compared."""
    unmet = {}
    for label, record in records.items():
        site = context.sites.met.get(label)
        if (
            site is not None
            and len(site.configs) > 1
            and not site.is_replayed
            and record.best.latency_ms is None
            and context.replays.n_replays > 0
        ):
            unmet[f"unmet {label}"] = (
                f"site={label} is not tuned: the first run launched it and no replay did. The "
                f"step needs it once only, or something around it keeps the compiled kernel of the first launch: launch "
                f"it once before the first call of {context.name}, so that triton.autotune chooses"
            )
    context.notices.say_each(context.story, unmet, f"sites more were launched in the first run alone: {context.story.path}")


def newer_than_tested(installed: Mapping[str, str]) -> str:
    """Words about the packages whose version is above the tested ones, by its first two numbers; empty if there are none."""
    newer = [name for name, version in installed.items() if _numbers(version) > _numbers(TESTED[name][1])]
    if not newer:
        return ""
    told = " and ".join(f"{name} {installed[name]} ({' to '.join(TESTED[name])})" for name in newer)
    return f"newer than dist_tune {__version__} is tested with: {told}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def tell_of_sites(context: TuningContext, labels: Iterable[str]) -> None:
    """Before sites are tuned: untested versions, candidates that prune rules removed, and why the nearest record does not count."""
    if newer := newer_than_tested({"torch": torch.__version__, "triton": triton_version()}):
        of_process.say(context.story, "versions", f"{newer}. If a tuning fails, try a tested version; dist-tune doctor tries each part")
    numbers = context.story.numbers
    pruned: dict[str, tuple[int, int]] = {}
    missed: dict[str, str] = {}
    unknown: defaultdict[str, list[str]] = defaultdict(list)
    for label in sorted(labels, key=lambda each: numbers.get(each, len(numbers))):
        site = context.sites.met.get(label)
        if site is None:  # another rank's
            kernel, _, key = label.partition("[")
            context.story.site(label, (kernel, f"[{key}"), context.entries[label].texts)
            continue
        if site.n_removed:
            pruned[label] = site.n_removed, len(site.configs) + site.n_removed
        why, is_near, is_new_shape = context.lookup.reason_of_miss(label)
        context.story.site(label, (site.kernel, site.key), site.texts, n_pruned=site.n_removed, miss=why)
        if is_new_shape:  # as it should be: a line of the log, and no warning
            context.story.info(f"site={label} is tuned: {why}")
        elif is_near:
            missed[f"missed {label}"] = f"site={label} is tuned: {why}"
        else:
            unknown[why].append(label)
    for why, found in unknown.items():
        are = f"site={found[0]} is" if len(found) == 1 else f"sites {', '.join(str(numbers[label]) for label in found)} are"
        context.story.info(f"{are} tuned: {why}")
    _tell_of_pruned(context, pruned)
    context.notices.say_each(context.story, missed, f"sites more are tuned for such reasons: {context.story.path}")


def _tell_of_pruned(context: TuningContext, pruned: Mapping[str, tuple[int, int]]) -> None:
    """One line for all sites that were not told of before: a rule that is too strict costs speed, and no error. The log numbers each site.

    ``pruned``: label -> numbers of configs removed, and of all.
    """
    new = {label: counts for label, counts in pruned.items() if context.notices.is_new(f"pruned {label}")}
    if new:
        n_removed, n_all = map(sum, zip(*new.values(), strict=True))
        where = f"of site={next(iter(new))}" if len(new) == 1 else f"at {amount(len(new), 'site')}, each in {context.story.path}"
        context.story.info(f"prune rules removed {n_removed} of {n_all} configs {where}", shown=True)


def note_of_tracing(name: str) -> Callable[[], None]:
    """A function that writes one line to the log, the first time: a call was traced and not run. Dynamo calls it while it traces."""
    is_told = False

    def note() -> None:
        nonlocal is_told
        if not is_told:
            is_told = True
            with closing(Story(read_settings(), Ranks().rank)) as log:
                log.debug(f"{name} was traced, or called with tensors without data: first config, nothing tuned, nothing kept")

    vars(note)["_dynamo_marked_constant"] = True  # as torch.compiler.assume_constant_result does, which imports all of Dynamo
    return note
