"""The sites of one closure as this rank sees them: entered at their first launch, given a config at
the end.

Knows candidates, their compilation and this rank's cache. Knows nothing of replays or of other
ranks; what is found here is reported at the next meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import Any

from dist_tune.compiler import Compiler, Failure, Resources, await_digest, quickest
from dist_tune.errors import CandidateFailure, FailureKind, Failures
from dist_tune.launches import Slot, Timings, Tunable, specialisation
from dist_tune.log import Story
from dist_tune.records import CacheLookup, TuningRecord
from dist_tune.search import Replay, SearchName, guide_of
from dist_tune.sites.restart import TuningJournal
from dist_tune.sites.site import Site, Variant


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
        self.fills_at_once = True
        """False where the step goes on meanwhile: a config comes into use at a call that ranks
        agree on.
        """
        self.racing: dict[str, list[str]] = {}
        """Label -> the candidates that race, described: a rank that comes to the site later counts
        its own as they do.
        """
        self.lookup = lookup
        self.journal = journal
        self.story = story
        self._search = search
        self._compiler = compiler
        self._labels: dict[tuple[int, str], tuple[Any, str]] = {}
        """By id of the decorated object, and name and key; with the object, so that its id is not
        given to another one.
        """
        self._kinds: dict[str, dict[str, Callable[[], Mapping[str, str]]]] = {}
        """Name and key -> labels of the kernels met there, in the order of their first launches,
        with their identities.
        """
        self._hit_slots: dict[str, Slot] = {}
        self._uncached: set[str] = set()
        self._outcomes: dict[str, tuple[str, TuningRecord | None]] = {}
        """Label -> the config that all ranks use, described, and its record."""
        self._to_reset: set[str] = set()

    @property
    def new(self) -> list[str]:
        """Sites that this rank has yet to report."""
        return [label for label, site in self.met.items() if site.is_new and not site.is_given_up]

    # -- during a replay ---------------------------------------------------------------------------

    def meet(self, launch: Tunable) -> Site:
        """The site of a launch; entered if it is new."""
        label = self._label_of(launch)
        site = self.met.get(label)
        if site is None:
            site = self._enter(label, launch)
            self.met[site.label] = site
        site.slots.setdefault(id(launch.owner), launch.slot)
        return site

    def remember_hit(self, launch: Tunable) -> None:
        """Note the config that Triton has for a launch; in the final run, zero once as vanilla
        Triton does.
        """
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
        """Load a candidate onto the device, waiting for its compilation; False if it cannot run
        here.

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

    def launching(
        self, label: str, index: int, *, is_scheduled: bool
    ) -> AbstractContextManager[None]:
        """Around the launch of a candidate: note it where a death of the process is to be told from
        outside.
        """
        return nullcontext() if is_scheduled else self.journal.launching(label, index)

    def fail(self, site: Site, index: int, failure: CandidateFailure, output: str = "") -> None:
        """Note that a candidate cannot run here. ``output``: of the compiler."""
        site.failures[index] = failure
        self.journal.dropped({site.label: {index: failure}})
        # Of a predicted launch, which may not be made.
        tell = self.story.warning if site.label in self.met else self.story.debug
        tell(
            f"site={site.label} candidate={index} cannot run here: {failure.reason}"
            f' config="{site.texts[index]}"'
        )
        if output.strip():
            self.story.debug(
                f"site={site.label} candidate={index} the compiler wrote:\n{output.rstrip()}"
            )

    def told(self, schedule: Replay) -> str:
        """The candidates of a replay, for people."""
        known = {label: each.candidate for label, each in schedule.items() if label in self.met}
        known = known or {
            label: site.first_guess
            for label, site in self.met.items()
            if site.is_whole and site.winner is None
        }
        return "".join(
            f', {label} candidate {i} "{self.met[label].texts[i]}"' for label, i in known.items()
        )

    # -- between replays ---------------------------------------------------------------------------

    def take_failures(self, sites: Iterable[Site] | None = None) -> Failures:
        """Failures on this rank that are new since the last time: all ranks hear of each once."""
        news = {}
        for site in self.met.values() if sites is None else sites:
            failures = {
                i: failure for i, failure in site.failures.items() if i not in site.reported
            }
            if failures and not site.is_given_up:  # other ranks may do without one that is
                news[site.label] = failures
                site.reported |= failures.keys()
        return news

    def go_on(
        self,
        labels: Sequence[str],
        barred: Mapping[str, Mapping[int, str]],
        deaths: Mapping[str, Mapping[int, int]],
    ) -> None:
        """Run no candidate that some rank's journal bars, and last those that were under way at
        ``deaths`` of any rank's process.
        """
        for label in [label for label in labels if label in self.met]:
            self.met[label].suspects |= deaths.get(label, {}).keys()
            self.journal.begin_site(label, deaths.get(label, {}))
        for label in barred.keys() & self.met.keys():
            site = self.met[label]
            for i, reason in barred[label].items():
                site.failures.setdefault(i, CandidateFailure(FailureKind.QUARANTINED, reason))
            site.reported |= barred[label].keys()

    def restrict(self, texts: Mapping[str, list[str]]) -> list[str]:
        """Keep of some sites the candidates that all ranks have, described, in this order, and look
        for a record of these.

        The sites that have fewer candidates here now, and no record.
        """
        fewer = []
        for label in [
            text for text in texts if text in self.met and self.met[text].texts != texts[text]
        ]:
            site = self.met[label]
            n_before = len(site.texts)
            kept, site.record = site.keep(texts[label]), None
            for variant in site.variants:
                self._compiler.keep(variant.label, kept)
            has_record = self._look_up(site, lambda source=site.source: source)  # type: ignore[misc]  # mypy knows no defaults of lambdas
            fewer += [label] if len(kept) < n_before and not has_record else []
        return fewer

    def look_again(self, labels: Iterable[str]) -> None:
        """Take the records that another job has left meanwhile; where it has not, the journal that
        it had is this rank's.
        """
        self.journal.is_taken(0.1)
        for label in [
            label for label in labels if label in self.met and label not in self._uncached
        ]:
            site, record = self.met[label], self.lookup.look_again(label)
            if record is not None:
                site.record, site.stand_in = record, record.winner
            else:
                self.journal.enter(site)

    def forget(self, labels: Iterable[str], *, uses_records: bool = False) -> None:
        """Forget the configs that these sites have here, because not all ranks have the same, or
        they answer wrongly: they are tuned.

        They are met anew, as misses, and without a record unless ``uses_records``.
        """
        for label in labels:
            site, slots = (
                self.met.get(label),
                [slot] if (slot := self._hit_slots.pop(label, None)) is not None else [],
            )
            if not uses_records:
                self._uncached.add(label)
                self._outcomes.pop(label, None)
                if site is not None and (site.record is not None or site.winner is not None):
                    slots += self.met.pop(label).slots.values()
            for slot in slots:
                slot.clear()
            if slots:
                self.story.info(
                    f"site={label} is tuned although this rank has a config: not all ranks can use"
                    " the same one"
                )

    def captured(self) -> dict[str, dict[str, str]]:
        """Label -> the code of its kernel and what that has captured, by name, for the ranks to
        compare.

        Of a function the code alone, unless it has namesakes here: functions capture buffers and
        groups, which are each rank's own.
        """
        found = {}
        for kinds in self._kinds.values():
            for label, identify in kinds.items():
                identity = identify()
                # What comes after the code's own.
                names = [*takewhile(lambda name: name not in ("heuristics", "key_fn"), identity)]
                found[label] = {
                    name: identity[name]
                    for name in (names[:1] if "key_fn" in identity and len(kinds) == 1 else names)
                }
        return found

    def apply(self, label: str, config: str, record: TuningRecord | None = None) -> None:
        """Use a config from now on; at a site not met here yet as soon as it is met.

        ``record``: with the times of all candidates.
        """
        self._outcomes[label] = config, record
        site = self.met.get(label)
        if site is None or site.is_given_up:
            return
        self._put_to_use(site)
        if self.fills_at_once:
            site.fill()

    def tell(self, labels: Iterable[str]) -> None:
        """Tell of the configs that were tuned here, as vanilla Triton does, each once.

        Raises:
            Exception: from a listener of Triton's knobs.
        """
        for site in [self.met[label] for label in labels if label in self.met]:
            if site.winner is not None:
                [*site.slots.values()][-1].tell()

    def leave_given_up(self) -> None:
        """Let Triton launch the first config where none runs here: it raises the error that the
        step expects.
        """
        for site in self.met.values():
            if site.is_given_up:
                for slot in site.slots.values():
                    slot.fill(
                        site.configs[0],
                        Timings([(config, (inf, inf, inf)) for config in site.configs]),
                    )

    def reset_once(self, labels: set[str]) -> None:
        """In the run to come, which counts, kernels of these sites zero once as vanilla Triton
        does.
        """
        self._to_reset = labels

    # -- a new site --------------------------------------------------------------------------------

    def _enter(self, label: str, launch: Tunable) -> Site:
        configs, texts, n_removed = launch.candidates()
        if launch.slot.fits is not None:
            launch.slot.fits.keep(launch.exact, dict(zip(texts, configs, strict=True)))
        racing = self.racing.get(label, texts)
        if not {*racing} & {*texts}:  # a site of this rank alone
            racing, label = texts, f"{label}#apart"
            self._labels[id(launch.owner), launch.name + launch.key_text] = launch.owner, label
        site = Site(
            label,
            launch.name,
            launch.key_text,
            configs,
            texts,
            n_removed,
            is_compiled=launch.is_compiled,
            is_whole=launch.is_whole,
            prepare=launch.prepare,
            identify=launch.identify,
        )
        if racing != texts:
            site.keep(racing)
            configs, texts = site.configs, site.texts
        # Others have tuned it; it is met in the final run.
        if label in self._outcomes and self._outcomes[label][0] in texts:
            self._put_to_use(site)
            return site
        site.checker = launch.checker()
        # On all ranks alike, whether they have a record or not: a reference may be collective.
        site.is_unchecked = site.checker is not None and not launch.is_whole
        has_record = self._look_up(site, lambda: launch.code())
        site.source = self.lookup.source(label)
        if has_record:
            await_digest()  # for the launch that follows
            return site
        if self.lookup.may_tune:
            near = launch.slot.nearest()
            site.near = next((i for i, config in enumerate(configs) if config is near), None)
        else:
            site.near = self.lookup.nearest_config(label, texts)
            site.stand_in = site.near or 0
        if launch.is_compiled:
            guide = guide_of(
                self._search, texts, n_threads=self._compiler.n_threads * self._compiler.n_ranks
            )
            site.untried = guide.untried if guide is not None else set()
            # Where nothing is tuned only the first run needs anything.
            first = set(range(len(configs))) - site.untried if self.lookup.mode == "tune" else set()
            site.quickest = sorted(
                quickest(configs),
                key=lambda i: (i in site.failures, i in site.suspects, i in site.untried),
            )
            site.variants.append(Variant(label, specialisation(launch)))
            self._compiler.begin(label, launch, dict(enumerate(configs)), first, site.first_guess)
        return site

    def _look_up(self, site: Site, source: Callable[[], str]) -> bool:
        """True if there is a record of a new site; else what earlier attempts have left of it is
        noted.
        """
        record = self.lookup.look_up(site.label, (site.kernel, site.key), source, site.texts)
        if record is not None and site.label not in self._uncached:
            site.record, site.stand_in = record, record.winner
            return True
        self.journal.enter(site)
        self.story.site(site.label, site.texts, site.n_removed)
        return False

    def adopt(self, first: Sites) -> None:
        """Enter the sites that another tuning has met and left untuned, without another launch of
        theirs.
        """
        self._labels, self._kinds = first._labels, first._kinds
        for label, old in first.met.items():
            if old.record is None and old.winner is not None:
                new = replace(old, is_new=True, winner=None, timings=Timings(), reported=set())
                new.stand_in = old.configs.index(old.winner)
                self._look_up(new, lambda source=old.source: source)  # type: ignore[misc]  # mypy knows no defaults of lambdas
                self.met[label] = new

    def _label_of(self, launch: Tunable) -> str:
        base = launch.name + launch.key_text
        if (id(launch.owner), base) not in self._labels:
            kinds, identify = self._kinds.setdefault(base, {}), launch.identify
            # One that is alone is not read here, because that takes half a millisecond.
            label = next(
                (label for label, kind in kinds.items() if kind() == identify()),
                f"{base}#{len(kinds) + 1}" if kinds else base,
            )
            kinds[label] = identify
            self._labels[id(launch.owner), base] = launch.owner, label
        return self._labels[id(launch.owner), base][1]

    def _put_to_use(self, site: Site) -> None:
        """Let a site have its config, with times as vanilla Triton has them: a median, and two with
        half of the launches between them.
        """
        config, record = self._outcomes[site.label]
        site.is_new = False
        site.winner = site.configs[site.texts.index(config)]
        quantiles_ms = dict.fromkeys(range(len(site.configs)), (inf, inf, inf))
        measured = record.candidates if record is not None else []
        for candidate in measured:
            if candidate.latency_ms is not None and candidate.failure is None:
                # The median absolute deviation.
                ms, spread_ms = (candidate.latency_ms, candidate.spread_ms or 0.0)
                quantiles_ms[candidate.index] = ms, max(0.0, ms - spread_ms), ms + spread_ms
        timed = [(each, quantiles_ms[i]) for i, each in enumerate(site.configs)]
        site.timings = Timings(timed, record.seconds if record is not None else 0.0)
