"""Turns of sites that are launched inside one another: functions that take a config, and the kernels that they launch. Pure.

A kernel's time depends on the config of the function around it, which may leave it fewer SMs or give it other arguments, and the
function's time is the kernel's, too. So they do not race in the same replays. First what is inside races, beside one fixed config of the
functions around it; then the functions race, beside the winners inside. At last what the winning configs launch races once more with its
best few, if it has raced beside other configs. Each of these races has its finals. Sites that no function is around need no turns.
Where a fixed config fails in the middle of a race, that race begins anew beside another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

from dist_tune.search.plan import Trial
from dist_tune.search.site_race import NOT_MET, SiteRace

Nesting = Mapping[str, Mapping[str, Collection[int]]]
"""Site -> function around it -> the function's candidates that launch the site."""


class Turns:
    """Which sites race now, and what the others run meanwhile."""

    def __init__(self, sites: Mapping[str, SiteRace]) -> None:
        self.share_kept = 0.0
        """Share of a budget that is kept for functions that wait: half while kernels race, a quarter while functions around them do, ..."""
        self._sites = sites
        self._around: dict[str, dict[str, set[int]]] = {}
        self._fixed: dict[str, int] = {}
        """Function -> the candidate that it runs while it waits."""
        self._beside: dict[str, dict[str, int]] = {}
        """Site -> function around it -> the candidate beside which the site has raced."""
        self._active: frozenset[str] | None = None
        self._begun_anew: list[str] = []

    def note(self, nesting: Nesting) -> None:
        """Take in who is launched inside whom. Equal on all ranks."""
        for site, functions in nesting.items():
            for function, candidates in functions.items():
                if function != site:
                    self._around.setdefault(site, {}).setdefault(function, set()).update(candidates)

    @property
    def active(self) -> Collection[str]:
        """Sites whose turn it is."""
        return self._sites.keys() if self._active is None else self._active

    def take_begun_anew(self) -> list[str]:
        """Sites whose samples so far are of an earlier race, since the last time."""
        begun, self._begun_anew = self._begun_anew, []
        return begun

    @property
    def is_inside(self) -> bool:
        """True while functions wait for what is inside them."""
        return self.share_kept > 0

    def waits_for(self, name: str) -> bool:
        """True if functions wait for the site, which they launch."""
        return self.is_inside and bool(self._functions(name))

    def trial(self, name: str) -> Trial | None:
        """What a site runs in a replay of others: a function its fixed candidate, and what has raced its best."""
        candidate = self._fixed.get(name, self._sites[name].incumbent())
        return None if candidate is None else Trial(candidate, is_timed=False)

    def next(self, *, may_begin: bool) -> Collection[str]:
        """Find out whose turn it is, and return them. ``may_begin``: a race may begin anew; False where time has run out."""
        nested = [name for name in self._around if name in self._sites and self._functions(name)]
        if not nested:
            self._active, self.share_kept, self._fixed = None, 0.0, {}
            return self.active
        depths = {name: self._depth(name, ()) for name in nested}
        free = [name for name in self._sites if name not in depths]
        alone = [name for name in free if not any(name in self._functions(each) for each in nested)]
        for depth in sorted(set(depths.values())):
            racing = [name for name in nested if depths[name] == depth and self._sites[name].stage != "done"]
            if together := self._launched_together(racing):
                is_waited_for = any(self._sites[name].stage != "done" for name in free if name not in alone)
                self.share_kept = 0.5 ** (depth + 1) if is_waited_for else 0.0
                return self._let(together + alone)
        self.share_kept, self._fixed = 0.0, {}
        if any(self._sites[name].stage != "done" for name in free):
            return self._let(free)
        for depth in sorted(set(depths.values()), reverse=True):
            if anew := self._begun_again([name for name in nested if depths[name] == depth], may_begin=may_begin):
                return self._let(anew)
        return self._let([])

    def _let(self, names: Sequence[str]) -> Collection[str]:
        self._active = frozenset(names)
        return [name for name in self._sites if name in self._active]  # in the same order on all ranks

    def _functions(self, name: str) -> list[str]:
        return [function for function in self._around.get(name, ()) if function in self._sites]

    def _depth(self, name: str, seen: tuple[str, ...]) -> int:
        """Sites that lie inside one another within this one, at most."""
        inside = [each for each in self._around if name in self._functions(each) and each in self._sites and each not in (name, *seen)]
        return max((1 + self._depth(each, (*seen, name)) for each in inside), default=0)

    def _launched_together(self, racing: Sequence[str]) -> list[str]:
        """Those of the sites that run beside one setting of the functions around them; the setting is fixed."""
        for name in sorted(racing, key=lambda each: each not in self._beside):  # those under way go on
            fixed: dict[str, int] = {}
            for function in self._functions(name):
                candidates = self._sites[function].standings.alive() if self._sites[function].stage != "done" else ()
                if launching := [i for i in candidates if i in self._around[name][function]]:
                    fixed[function] = self._representative(function, launching)
            if not self._is_launched(name, fixed):
                continue
            together = [each for each in racing if self._is_launched(each, fixed)]
            settings = {each: self._setting(each, fixed) for each in together}
            self._fixed = {f: i for each in settings.values() for f, i in each.items() if self._sites[f].stage != "done"}
            for each, setting in settings.items():
                if self._is_other(each, setting) and self._sites[each].begin_anew():  # what was fixed has failed
                    self._begun_anew.append(each)
                self._beside[each] = setting
            return together
        return []

    def _representative(self, function: str, candidates: Sequence[int]) -> int:
        """The one beside which the rest races: the latest again, or the fastest by its warm-up, a suspect last."""
        if self._fixed.get(function) in candidates:
            return self._fixed[function]
        standings = self._sites[function].standings
        warm_ups, suspects = standings.warm_ups, standings.suspects
        return min(candidates, key=lambda i: (i in suspects, warm_ups[i].kernel_ms if i in warm_ups else inf, i))

    def _setting(self, name: str, fixed: Mapping[str, int]) -> dict[str, int]:
        """The functions around a site -> what they run."""
        return {each: fixed.get(each, best) for each in self._functions(name) if (best := self._sites[each].incumbent()) is not None}

    def _is_other(self, name: str, setting: Mapping[str, int]) -> bool:
        """True if the site has raced beside another config of a function around it."""
        return any(setting.get(function, i) != i for function, i in self._beside.get(name, {}).items())

    def _is_launched(self, name: str, fixed: Mapping[str, int], seen: tuple[str, ...] = ()) -> bool:
        """True if what some function around the site runs then launches it, itself or by way of another one inside."""
        setting, functions = self._setting(name, fixed), self._functions(name)
        return any(
            setting.get(each) in self._around[name][each]
            and not any(setting[each] in self._around.get(other, {}).get(each, ()) for other in functions)  # that one tells
            and (each in seen or not self._functions(each) or self._is_launched(each, fixed, (*seen, name)))
            for each in functions
        )

    def _begun_again(self, names: Sequence[str], *, may_begin: bool) -> list[str]:
        """Those of the sites that race anew, beside the functions' winners, and those that a probe may show to be launched elsewhere.

        Other sites that were never launched end with what is known.
        """
        anew, probed = [], []
        for name in names:
            site, setting = self._sites[name], self._setting(name, {})
            if not self._is_launched(name, {}):
                if site.is_probed and site.stage != "done" and name not in self._beside:
                    probed.append(name)
                else:
                    site.end(NOT_MET)
            elif may_begin and self._is_other(name, setting):
                self._beside[name] = setting
                if site.begin_anew():
                    anew.append(name)
        self._begun_anew += anew
        return anew + probed
