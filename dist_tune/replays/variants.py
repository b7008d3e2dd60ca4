"""The variants of each site's kernel on this rank: one for each specialisation of the arguments
that its launches asked for.

A variant of a candidate is a kernel of its own, compiled and loaded apart from the others. A launch
whose kernel is not in memory asks for one; between replays all candidates in the race are compiled
for it. Knows nothing of other ranks, except in ``counts``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dist_tune.compiler import Compiler, compile_cost
from dist_tune.launches import Tunable, specialisation
from dist_tune.sites import Site, Sites, Variant

if TYPE_CHECKING:
    from dist_tune.log import Story

MAX_VARIANTS = 8
"""Variants of a site, if one of its arguments has had more than ``_MAX_CLASSES`` classes; timed
replays that compile a kernel beside it.
"""
_MAX_CLASSES = 4
"""An int has three, a tensor two."""
_MAX_SHOWN = 5


class Variants:
    """All variants of one tuning on this rank."""

    def __init__(self, sites: Sites, compiler: Compiler, log: Story) -> None:
        self.counts: dict[str, int] = {}
        """Site -> variants on the rank with the most, as of the latest meeting.

        The same on all ranks.
        """
        self.endless = ""
        """The reason why a site's variants have no end; empty as long as they may have one."""
        self._sites = sites
        self._compiler = compiler
        self._log = log
        self._lazy: Counter[tuple[str, ...]] = Counter()
        """Kernel, and functions under way with their candidates -> compilations within timed
        replays.
        """

    def ready(self, site: Site, launch: Tunable, index: int) -> tuple[int | None, bool]:
        """The candidate to launch in place of one that is not in memory, and True if it is the one
        asked for.

        A candidate that is loaded for these arguments, else the one that compiles fastest; None if
        none runs here. Loads it.
        """
        if self.endless:
            return index, False
        label = self._compiler.known_as(
            [each.label for each in site.variants], index, launch, site.configs[index]
        )
        variant = next(
            (each for each in site.variants if each.label == label), None
        ) or self._enter(site, launch)
        if index in variant.loaded:  # for a kernel object that was made anew in the step
            return index, True
        running = [i for i in range(len(site.configs)) if i not in site.failures]
        for i in sorted(
            running, key=lambda i: (i not in variant.loaded, compile_cost(site.configs[i]), i)
        ):
            if self._sites.load(site, i, variant):
                return i, False
        return None, False

    def on_compilation(self, kernel: Any, around: Sequence[str]) -> str:
        """Note that a timed replay compiles a kernel that is not tuned, inside these functions; its
        name.
        """
        name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
        self._lazy[name, *around] += 1
        if self._lazy[name, *around] > MAX_VARIANTS:
            self.endless = self.endless or (
                f"launches kernel {name}, which was compiled in {MAX_VARIANTS} timed replays: an"
                " argument that is compiled in keeps changing. Use"
                " @triton.jit(do_not_specialize=[...]), or no tl.constexpr"
            )
        return name

    def _enter(self, site: Site, launch: Tunable) -> Variant:
        variant = Variant(f"{site.label} > {len(site.variants)}", specialisation(launch))
        first = site.variants[0].arguments
        told = [
            f"{name} is {argument.text}"
            for name, argument in variant.arguments.items()
            if name not in first or first[name] != argument
        ]
        told += [f"{name} is not given" for name in first if name not in variant.arguments]
        self._log.info(
            f"site={site.label} variant={len(site.variants) + 1} is compiled:"
            f" {'; '.join(told) or 'other code'}"
        )
        site.variants.append(variant)
        self._compiler.begin(variant.label, launch, dict(enumerate(site.configs)), [])
        self._check_end(site)
        return variant

    def _check_end(self, site: Site) -> None:
        met = [variant.arguments for variant in site.variants]
        classes = {
            name: {each[name].compiled: each[name] for each in met if name in each}
            for each in met
            for name in each
        }
        name, found = max(classes.items(), key=lambda item: len(item[1]), default=("", {}))
        compiled = [variant.compiled for variant in site.variants]
        # Of one argument, and of the code around equal ones.
        has_end = max(len(found), *map(compiled.count, compiled)) <= _MAX_CLASSES
        if self.endless or has_end or len(met) <= MAX_VARIANTS:
            return
        asked = f"asks for another compilation of every config in each launch of {site.label}"
        if len(found) <= _MAX_CLASSES:
            self.endless = (
                f"{asked}, because the kernel, or a value that it captures or takes from"
                " triton.heuristics, is another one"
            )
            return
        shown = ", ".join(each.text for each in list(found.values())[:_MAX_SHOWN])
        no_constant = (
            f"take tl.constexpr off {name} and " if next(iter(found.values())).is_constexpr else ""
        )
        self.endless = (
            f"{asked}: its argument {name} is compiled in, and had {len(found)} values ({shown},"
            " ...). If it decides nothing about "
            f"the code, {no_constant}decorate the kernel with"
            f' @triton.jit(do_not_specialize=["{name}"]); if it does, put it into key='
        )
