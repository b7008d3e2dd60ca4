"""The sites of one closure as this rank sees them: entered at their first launch, given a config at the end.

Knows candidates, their compilation and this rank's cache. Knows nothing of replays or of other ranks; what is found here is
reported at the next meeting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from math import inf
from typing import Any

from dist_tune.cache import CacheLookup
from dist_tune.compiler import Compiler, Failure, Resources, await_digest, quickest
from dist_tune.errors import CandidateFailure, FailureKind, Failures
from dist_tune.output import Story
from dist_tune.runtime import Slot, Timings, Tunable, specialisation
from dist_tune.search import Replay, SearchName, guide_of
from dist_tune.sites.journal import TuningJournal
from dist_tune.sites.site import Outcome, Site, Variant, take_failures


class Sites:
    """All sites met in a tuning on this rank."""

    def __init__(
        self,
        story: Story,
        compiler: Compiler,
        lookup: CacheLookup,
        journal: TuningJournal,
        search: SearchName | None = "racing",
    ) -> None:
        self.met: dict[str, Site] = {}
        self.hits: dict[str, str] = {}
        """Label -> config, for launches that Triton had a config for."""
        self.lookup = lookup
        self.journal = journal
        self.story = story
        self._log = story
        self._search = search
        self._compiler = compiler
        self._labels: dict[tuple[int, str], tuple[Any, str]] = {}
        """By id of the decorated object, and name and key; with the object, so that its id is not given to another one."""
        self._kinds: dict[str, dict[str, Mapping[str, str]]] = {}
        """Name and key -> labels of the kernels met there, in the order of their first launches, with their identities."""
        self._hit_slots: dict[str, Slot] = {}
        self._uncached: set[str] = set()
        self._outcomes: dict[str, Outcome] = {}
        self._to_reset: set[str] = set()

    @property
    def new(self) -> list[str]:
        """Sites that this rank has yet to report."""
        return [label for label, site in self.met.items() if site.is_new and not site.is_given_up]

    # -- during a replay -----------------------------------------------------------------------------------------

    def meet(self, launch: Tunable) -> Site:
        """The site of a launch; entered if it is new."""
        label = self._label_of(launch)
        site = self.met.get(label)
        if site is None:
            site = self.met[label] = self._enter(label, launch)
        site.slots.setdefault(id(launch.owner), launch.slot)
        return site

    def note_hit(self, launch: Tunable) -> None:
        """Note the config that Triton has for a launch; in the final run, zero once as vanilla Triton does."""
        config = launch.slot.config
        if config is None:
            return
        label = self._label_of(launch)
        self.hits[label] = launch.describe(config)
        self._hit_slots[label] = launch.slot
        if label in self._to_reset:
            self._to_reset.discard(label)
            launch.reset_only(config)

    def load(self, site: Site, index: int, variant: Variant | None = None) -> bool:
        """Load a candidate onto the device, waiting for its compilation; False if it cannot run here.

        ``variant``: None for the first one.
        """
        variant = variant or site.variants[0]
        loaded = self._compiler.load(variant.label, index)
        if isinstance(loaded, Resources):
            site.resources.setdefault(index, loaded)
        if isinstance(loaded, Failure):
            self.reject(site, index, loaded)
        else:
            variant.loaded.add(index)
        return not isinstance(loaded, Failure)

    def reject(self, site: Site, index: int, failure: Failure) -> None:
        """Note that a candidate does not compile or load here."""
        if failure.shared_bytes is not None:
            site.resources[index] = Resources(failure.shared_bytes, None, None)
        if index not in site.failures:
            self.fail(site, index, CandidateFailure(failure.kind, failure.reason), failure.output)

    def launching(self, label: str, index: int, replay: int, *, is_scheduled: bool) -> AbstractContextManager[None]:
        """Around the launch of a candidate: note it where a death of the process, or a hang, is to be told from outside."""
        self.story.starting({label: index}, replay)
        return nullcontext() if is_scheduled else self.journal.launching(label, index)

    def fail(self, site: Site, index: int, failure: CandidateFailure, output: str = "") -> None:
        """Note that a candidate cannot run here. ``output``: of the compiler."""
        site.failures[index] = failure
        self.story.dropped({site.label: {index: failure}})
        self._log.warning(f'site={site.label} candidate={index} cannot run here: {failure.reason} config="{site.texts[index]}"')
        if output.strip():
            self._log.debug(f"site={site.label} candidate={index} the compiler wrote:\n{output.rstrip()}")

    def told(self, schedule: Replay) -> str:
        """The candidates of a replay, for people."""
        known = {label: each.candidate for label, each in schedule.items() if label in self.met}
        return "".join(f', {label} candidate {i} "{self.met[label].texts[i]}"' for label, i in known.items())

    # -- between replays -----------------------------------------------------------------------------------------

    def take_failures(self) -> Failures:
        """Failures on this rank that are new since the last time: all ranks hear of each once."""
        return take_failures(self.met.values())

    def go_on(self, labels: Sequence[str], barred: Mapping[str, Mapping[int, str]], deaths: Mapping[str, Mapping[int, int]]) -> None:
        """Run no candidate that some rank's journal bars, and last those that were under way at ``deaths`` of any rank's process."""
        for label in [label for label in labels if label in self.met]:
            self.met[label].suspects |= deaths.get(label, {}).keys()
            self.journal.note(label, deaths.get(label, {}))
        for label in barred.keys() & self.met.keys():
            site = self.met[label]
            for i, reason in barred[label].items():
                site.failures.setdefault(i, CandidateFailure(FailureKind.QUARANTINED, reason))
            self.story.dropped({label: {i: CandidateFailure(FailureKind.QUARANTINED, reason) for i, reason in barred[label].items()}})
            site.reported |= barred[label].keys()

    def evict(self, labels: set[str]) -> None:
        """Forget the configs known for these sites, so that they are met as misses without a record; and all hits."""
        for label in labels & self._hit_slots.keys():
            self._hit_slots[label].clear()
            self._log.info(f"site={label} is tuned although this rank has a config: not all ranks have the same one")
        self.hits.clear()

    def distrust_records(self, labels: set[str]) -> None:
        """Use no records of these sites, because not all ranks can. Sites with a record are met anew."""
        for label in [label for label in labels & self.met.keys() if self.met[label].record is not None]:
            del self.met[label]
            self._log.info(f"site={label} is tuned although this rank has a record: not all ranks can use the same one")
        self._uncached |= labels

    def captured(self) -> dict[str, dict[str, str]]:
        """Label -> the code of its kernel and what that has captured, by name, for the ranks to compare.

        Of a function the code alone, unless it has namesakes here: functions capture buffers and groups, which are each rank's own.
        """
        found = {}
        for kinds in self._kinds.values():
            for label, identity in kinds.items():
                names = [*takewhile(lambda name: name not in ("heuristics", "key_fn"), identity)]  # what comes after the code's own
                found[label] = {name: identity[name] for name in (names[:1] if "key_fn" in identity and len(kinds) == 1 else names)}
        return found

    def refute(self, labels: set[str]) -> None:
        """Forget the configs that these sites have from the cache, because they answer wrongly: they are met as misses without a record."""
        for label in labels & self.met.keys():
            for slot in self.met.pop(label).slots.values():
                slot.clear()
        for label in labels:
            self._outcomes.pop(label, None)
        self._uncached |= labels

    def apply(self, label: str, outcome: Outcome) -> None:
        """Use a config from now on; at a site not met here yet as soon as it is met."""
        self._outcomes[label] = outcome
        site = self.met.get(label)
        if site is None or site.is_given_up:
            return
        _settle(site, outcome)
        for slot in site.slots.values():
            slot.fill(site.winner, site.timings)

    def tell(self, labels: Iterable[str]) -> None:
        """Tell of the configs that were tuned here, as vanilla Triton does, each once.

        Raises:
            Exception: from a listener of Triton's knobs.
        """
        for site in [self.met[label] for label in labels if label in self.met]:
            if site.winner is not None:
                [*site.slots.values()][-1].tell()

    def leave_given_up(self) -> None:
        """Let Triton launch the first config where none runs here: it raises the error that the step expects."""
        for site in self.met.values():
            if site.is_given_up:
                for slot in site.slots.values():
                    slot.fill(site.configs[0], Timings([(config, (inf, inf, inf)) for config in site.configs]))

    def reset_once(self, labels: set[str]) -> None:
        """In the run to come, which counts, kernels of these sites zero once as vanilla Triton does."""
        self._to_reset = labels

    # -- a new site ----------------------------------------------------------------------------------------------

    def _enter(self, label: str, launch: Tunable) -> Site:
        configs, texts, n_removed = launch.candidates()
        site = Site(
            label, launch.name, launch.key_text, configs, texts, n_removed,
            is_compiled=launch.is_compiled, is_whole=launch.is_whole, prepare=launch.prepare,
        )  # fmt: skip
        outcome = self._outcomes.get(label)
        if outcome is not None and outcome.winner in texts:  # the others have tuned it; this rank comes to it in the final run
            _settle(site, outcome)
            return site
        record = self.lookup.look_up(label, (launch.name, launch.key_text), lambda: launch.code().digest, texts)
        site.checker = launch.checker()
        # On all ranks alike, whether they have a record or not: a reference may be collective.
        site.is_unchecked = site.checker is not None and not launch.is_whole
        site.source = self.lookup.source(label)
        site.not_followed = launch.code().not_followed if site.source else []
        if record is not None and label not in self._uncached:
            site.record, site.stand_in = record, record.winner
            await_digest()  # for the launch that follows
            return site
        cache_key = self.journal.enter(site)
        self.story.site(label, (site.kernel, site.key), texts, n_pruned=site.n_removed, cache_key=cache_key)
        near = launch.slot.nearest()
        site.near = next((i for i, config in enumerate(configs) if config is near), None)
        if launch.is_compiled:
            guide = guide_of(self._search, texts, n_threads=self._compiler.n_threads * self._compiler.n_ranks)
            site.untried = guide.untried if guide is not None else set()
            # Where there has to be a record only the first run needs anything.
            first = [] if self.lookup.is_required else site.tried
            site.quickest = sorted(quickest(configs), key=lambda i: (i in site.suspects, i in site.untried))
            site.variants.append(Variant(label, specialisation(launch)))
            self._compiler.begin(label, launch, configs, first, site.quickest[0])
        return site

    def _label_of(self, launch: Tunable) -> str:
        base = launch.name + launch.key_text
        if (id(launch.owner), base) not in self._labels:
            kinds, identity = self._kinds.setdefault(base, {}), launch.identity
            label = next((label for label, each in kinds.items() if each == identity), f"{base}#{len(kinds) + 1}" if kinds else base)
            kinds[label] = identity
            self._labels[id(launch.owner), base] = launch.owner, label
        return self._labels[id(launch.owner), base][1]


def _settle(site: Site, outcome: Outcome) -> None:
    """Let a site have its config."""
    site.is_new = False
    site.winner = site.configs[site.texts.index(outcome.winner)]
    site.timings = Timings([(config, outcome.quantiles_ms(i)) for i, config in enumerate(site.configs)], outcome.seconds)
