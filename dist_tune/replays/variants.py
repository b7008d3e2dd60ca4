"""The variants of each site's kernel on this rank: one for each specialisation of the arguments that its launches had, or may have.

A variant of a candidate is a kernel of its own, compiled and loaded apart from the others. Knows nothing of other ranks, except in
``counts``; what is found here is reported at the next meeting (``dist_tune.tuning.settling``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dist_tune.cache import digest
from dist_tune.compiler import Compiler, Failure, compile_cost
from dist_tune.runtime import Argument, Tunable, foreseen, has_heuristics, specialisation
from dist_tune.sites import Site, Sites, Variant

if TYPE_CHECKING:
    from dist_tune.output import Story

MAX_VARIANTS = 8
"""Variants of a site, if one of its arguments has had more than ``_MAX_CLASSES`` classes."""
_MAX_CLASSES = 4
"""An int has three, a tensor two."""
_MAX_FINITE = 64
"""Variants of a site in any case."""
_MAX_FORESEEN = 2
"""Arguments that change at once and are foreseen to change apart from one another."""
_FREQUENT = 0.25
"""Share of replays from which on a variant that they met is compiled for all candidates at once."""
_MAX_SHOWN = 5
_CODE, _HEURISTICS = "its code", "its heuristics"
_ASKED = "asked"
"""In place of a site's label: a launch whose compile keys are read, and no more."""


class Variants:
    """All variants of one tuning on this rank."""

    def __init__(self, sites: Sites, compiler: Compiler, log: Story) -> None:
        self.counts: dict[str, int] = {}
        """Site -> variants on the rank with the most, where there are several, as of the latest meeting. The same on all ranks."""
        self.endless = ""
        """The reason why a site's variants have no end; empty as long as they may have one."""
        self._sites = sites
        self._compiler = compiler
        self._log = log
        self._lazy: Counter[tuple[str, ...]] = Counter()
        """Kernel, and functions under way with their candidates -> compilations within timed replays."""
        self._warned: set[str] = set()
        self._n_replays = 0
        """Replays since the latest meeting about variants."""

    def begin_replay(self) -> None:
        """Count a replay."""
        self._n_replays += 1

    def n_by_site(self) -> dict[str, int]:
        """Site -> its variants so far, where there are several."""
        return {site.label: len(site.variants) for site in self._sites.met.values() if len(site.variants) > 1}

    def all(self) -> Iterator[tuple[Site, Variant]]:
        """Variants beside the first of each site that is tuned."""
        for site in self._sites.met.values():
            if site.winner is None and not site.is_given_up:
                yield from ((site, each) for each in site.variants[1:])

    def see(self, site: Site, launch: Tunable, replay: int, code: str = "") -> Variant:
        """The variant of a launch; entered if it is new, with those that may follow. ``code``: what tells kernel objects apart."""
        arguments = specialisation(launch)
        if code:
            arguments[_HEURISTICS if has_heuristics(launch) else _CODE] = Argument("other", code, code)
        variant = self._known(site, arguments)
        if variant is None:
            variant = self._enter(site, launch, arguments)
        variant.replays.add(replay)
        variant.is_foreseen = False
        return variant

    def ready(self, site: Site, launch: Tunable, index: int, replay: int) -> tuple[int | None, bool]:
        """The candidate to launch in place of one that is not in memory, and True if it is the one asked for.

        A candidate that is loaded for these arguments, else the one that compiles fastest; None if none runs here. Loads it.
        """
        variant = self.see(site, launch, replay)
        if self._is_adopted(site, variant, index, launch):
            return index, True
        if self._has(site, variant, index):  # other code with the same arguments
            self._compiler.begin(_ASKED, launch, site.configs, [])
            variant = self.see(site, launch, replay, code=digest([self._compiler.keys(_ASKED)]))
            if self._is_adopted(site, variant, index, launch):
                return index, True
        self._log.debug(f"site={site.label} replay={replay} candidate={index} is not loaded for {_differing(site, variant)}")
        if site.is_new:  # what is under way is most likely for arguments that do not come again; if not, it goes on after the next meeting
            self._compiler.dequeue(site.label)
        for i in self._in_turn(site, variant):
            if self._load(site, variant, i):
                return i, False
        return None, False

    @property
    def has_news(self) -> bool:
        """True if replays have met variants of compiled sites that are to be compiled for more candidates than they are."""
        return any(not site.is_new and not (each.is_known if not self.is_frequent(each) else each.is_full) for site, each in self.all())

    def is_frequent(self, variant: Variant) -> bool:
        """True if many of the latest replays met it; of one replay nothing follows."""
        return len(variant.replays) >= max(2.0, _FREQUENT * self._n_replays)

    def begin_interval(self) -> None:
        """After a meeting about variants: count replays anew."""
        self._n_replays = 0
        for site in self._sites.met.values():
            for each in site.variants:
                each.replays.clear()

    def rebase(self, replay: int) -> None:
        """After a first replay: where it did not meet a site's first variant, one that it met is the first from now on."""
        for site in self._sites.met.values():
            if not site.variants or not site.is_new or replay in site.variants[0].replays:
                continue
            new = next((each for each in site.variants if replay in each.replays), None)
            if new is None:
                continue
            old = site.variants[0]
            old.label = _label(site, old.arguments)
            self._compiler.rename({site.label: old.label, new.label: site.label})
            self._compiler.dequeue(old.label)
            site.variants.remove(new)
            site.variants.insert(0, new)

    def labels(self) -> dict[str, tuple[Site, Variant]]:
        """Variants beside the first ones by label, which is the same on all ranks for equal arguments; sites may have been renamed."""
        found = {}
        for site, variant in self.all():
            if variant.label != (label := _label(site, variant.arguments)):
                self._compiler.rename({variant.label: label})
                variant.label = label
            found[label] = site, variant
        return found

    def counts_against(self, replay: int, kernel: Any, around: Sequence[str]) -> bool:
        """Note that a timed replay compiles a kernel that is not tuned, inside these functions; True if the replay does not count."""
        name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
        self._lazy[name, *around] += 1
        if self._lazy[name, *around] > MAX_VARIANTS:
            if name not in self._warned:
                self._warned.add(name)
                self._log.warning(
                    f"kernel {name} was compiled in {MAX_VARIANTS} timed replays, and replays that compile it count from now on: an "
                    f"argument that is compiled in keeps changing. Use @triton.jit(do_not_specialize=[...]), or no tl.constexpr",
                    shown=True,
                )
            return False
        self._log.info(f"replay={replay} does not count: it compiled {name}")
        return True

    # -- a new variant -------------------------------------------------------------------------------------------

    def _known(self, site: Site, arguments: Mapping[str, Argument]) -> Variant | None:
        compiled = {name: each.compiled for name, each in arguments.items()}
        return next((each for each in site.variants if each.compiled == compiled), None)

    def _enter(self, site: Site, launch: Tunable, arguments: dict[str, Argument]) -> Variant:
        variant = self._add(site, launch, arguments)
        if len(site.variants) == 1:
            return variant
        before = site.variants[0].arguments
        changed = [name for name, each in arguments.items() if name not in before or before[name].compiled != each.compiled]
        told = [f"{name} was {before[name].text if name in before else 'another'}, is {arguments[name].text}" for name in changed]
        told += [f"{name} was {each.text}, is not given" for name, each in before.items() if name not in arguments]
        self._log.info(f"site={site.label} variant={len(site.variants)} is compiled: {'; '.join(told)}")
        ints = [name for name in changed if arguments[name].kind == "int"]
        for other in foreseen(launch, ints) if len(changed) <= _MAX_FORESEEN else ():
            likely = specialisation(other)
            if likely and self._known(site, likely) is None:
                likely_one = self._add(site, other, likely)
                likely_one.is_foreseen = True
                if site.is_new:  # beside the compilation of all others
                    self._compiler.queue(likely_one.label, self._in_turn(site, likely_one)[:1])
        self._check_end(site)
        return variant

    def _add(self, site: Site, launch: Tunable, arguments: dict[str, Argument]) -> Variant:
        variant = Variant(_label(site, arguments), arguments)
        if site.variants:
            self._compiler.begin(variant.label, launch, site.configs, [])
        site.variants.append(variant)
        return variant

    def _check_end(self, site: Site) -> None:
        met = [each.arguments for each in site.variants if not each.is_foreseen]
        classes = {name: {each[name].compiled: each[name] for each in met if name in each} for each in met for name in each}
        name, found = max(classes.items(), key=lambda item: len(item[1]))
        is_endless = len(found) > _MAX_CLASSES and name != _HEURISTICS
        if self.endless or len(met) <= (MAX_VARIANTS if is_endless else _MAX_FINITE):
            return
        shown = ", ".join(each.text for each in list(found.values())[:_MAX_SHOWN])
        kind = next(iter(found.values())).kind
        said = f"site {site.label}: {len(met)} launches in the step asked for {len(met)} different compilations of every config"
        if name in (_CODE, _HEURISTICS):
            what = "a value of triton.heuristics" if name == _HEURISTICS else "the kernel, or a value that it captures,"
            self.endless = (
                f"{said}, because {what} is another one in each. Define the kernel outside the step, with values that come again."
            )
            return
        how = (
            f'take tl.constexpr off {name} and decorate the kernel with @triton.jit(do_not_specialize=["{name}"])'
            if kind == "constexpr"
            else f'decorate the kernel with @triton.jit(do_not_specialize=["{name}"])'
        )
        self.endless = (
            f"{said}: its argument {name} is compiled in, and had {len(found)} values ({shown}, ...). If the value decides nothing about "
            f'the code, {how}; if it does, put "{name}" into the key of triton.autotune.'
        )

    def _has(self, site: Site, variant: Variant, index: int) -> bool:
        return index in variant.loaded or (variant is site.variants[0] and not site.is_new)

    def _is_adopted(self, site: Site, variant: Variant, index: int, launch: Tunable) -> bool:
        """True if the kernel object was made anew in the step, and has now got what was loaded for its predecessor."""
        label = self._label(site, variant)
        return self._has(site, variant, index) and self._compiler.adopt(label, index, launch, site.configs[index])

    def _load(self, site: Site, variant: Variant, index: int) -> bool:
        loaded = self._compiler.load(self._label(site, variant), index)
        if isinstance(loaded, Failure):
            self._sites.reject(site, index, loaded)
            return False
        variant.loaded.add(index)
        return True

    def _in_turn(self, site: Site, variant: Variant) -> list[int]:
        """Candidates that have not failed here: loaded ones first, then what compiles fastest."""
        running = [i for i in range(len(site.configs)) if i not in site.failures]
        return sorted(running, key=lambda i: (i not in variant.loaded, compile_cost(site.configs[i]), i))

    def _label(self, site: Site, variant: Variant) -> str:
        return site.label if variant is site.variants[0] else variant.label


def _label(site: Site, arguments: Mapping[str, Argument]) -> str:
    return f"{site.label} > {digest(sorted(f'{name} {each.compiled}' for name, each in arguments.items()))}"


def _differing(site: Site, variant: Variant) -> str:
    """The arguments by which a variant differs from the first."""
    first = site.variants[0].compiled
    return ", ".join(f"{name}={each.text}" for name, each in variant.arguments.items() if first.get(name) != each.compiled)
