"""Labels of sites: kernel and key, and a digest where kernels share these.

Ranks match sites by label. A kernel alone with its name and key goes by these if its code, and what that has captured, are the same on all
ranks. Namesakes are told apart by the same, or by their rules and hooks, in any order of launches. A value that is the
rank's own number on each rank is the same. Pure: an identity is text by name, see ``Tunable.identity``; its first entries are the code's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import combinations, takewhile

from dist_tune.cache import digest

Identity = Mapping[str, str]
SOURCE = "@source"
"""Name of a fingerprint of all of an identity; no value of a kernel's has such a name."""
_RULES = ("heuristics", "key_fn")
"""What comes after the code in the identities of kernels and of functions."""


def matched(by_rank: Mapping[int, Sequence[Identity]]) -> tuple[dict[int, list[str]], str]:
    """Match the kernels of one name and key: rank -> an ending for the label of each; none if all are one.

    And the values by which kernels of one code differ where ranks cannot know whether they are one; empty if there are none.
    """
    classes: list[tuple[int, Identity]] = []
    places: dict[int, list[int]] = {}
    names, order = _telling(list(by_rank.values())), list(by_rank)

    def differing(rank: int, one: Identity, other: int, two: Identity) -> list[str]:
        own = {(str(rank), str(other)), (str(order.index(rank)), str(order.index(other)))}
        pairs = {name: (one.get(name, "-"), two.get(name, "-")) for name in dict.fromkeys([*one, *two]) if name in names}
        return [name for name, (a, b) in pairs.items() if a != b and (a, b) not in own]

    for rank, kernels in by_rank.items():
        places[rank] = []
        for each in kernels:
            found = (k for k, known in enumerate(classes) if k not in places[rank] and not differing(rank, each, *known))
            places[rank].append(next(found, len(classes)))
            classes += [(rank, each)] * (places[rank][-1] == len(classes))
    if len(classes) == 1:
        return {}, ""
    for here, there in combinations({frozenset(each): None for each in places.values()}, 2):
        for k, other in [(k, other) for k in sorted(here - there) for other in sorted(there - here)]:
            (rank, one), (other_rank, two) = classes[k], classes[other]
            if one.get("code") == two.get("code"):
                values = differing(rank, one, other_rank, two)
                return {}, ", ".join(f"{name}={one.get(name)} on rank {rank}, {two.get(name)} on rank {other_rank}" for name in values)
    return {rank: [_ending(classes[k][1]) for k in each] for rank, each in places.items()}, ""


def is_unread(by_rank: Mapping[int, Sequence[Identity]]) -> bool:
    """True if kernels of one name and key differ in their fingerprints, or only some ranks tell these: identities are compared then."""
    return len({one.get(SOURCE) for each in by_rank.values() for one in each}) > 1


def _telling(by_rank: Sequence[Sequence[Identity]]) -> Container[str]:
    """Names of the values by which ranks match: where a rank has several kernels, those that tell them apart there.

    Names whose values are the same on all such ranks, if that is enough: others may be each rank's own. Where each rank has one kernel,
    all that its code has captured; but not of functions, which capture buffers and groups.
    """
    several = [kernels for kernels in by_rank if len(kernels) > 1]
    if not several:
        kernels = [each for kernels in by_rank for each in kernels if "key_fn" not in each]
        return {"code", *(name for each in kernels for name in takewhile(lambda name: name not in _RULES, each))}
    names = {name for kernels in several for each in kernels for name in each if len({one.get(name) for one in kernels}) > 1}
    shared = {name for name in names if len({tuple(sorted(one.get(name, "") for one in kernels)) for kernels in several}) == 1}
    is_enough = all(len({tuple(one.get(name) for name in sorted(shared)) for one in kernels}) == len(kernels) for kernels in several)
    return {*(shared if is_enough else names), "code"}


def _ending(identity: Identity) -> str:
    return f"{{{digest([f'{name}={value}' for name, value in sorted(identity.items())])[:8]}}}"


class Labels:
    """The labels of one tuning on this rank."""

    def __init__(self) -> None:
        self._met: dict[str, list[Identity]] = {}
        """Kernel and key -> kernels, in the order of their first launches."""
        self._endings: dict[str, Sequence[str]] = {}
        """Kernel and key -> endings of the labels of the first of them, once the ranks have agreed."""

    def of(self, base: str, identity: Identity) -> str:
        """The label of a kernel's site. ``base``: kernel and key."""
        met = self._met.setdefault(base, [])
        place = next((k for k, each in enumerate(met) if each is identity or each == identity), len(met))
        if place == len(met):
            met.append(identity)
        endings = self._endings.get(base, [""])
        return base + (endings[place] if place < len(endings) else _ending(identity))

    def kinds(self, sources: Mapping[str, str], unread: Container[str] = (), *, is_alone: bool = False) -> dict[str, list[dict[str, str]]]:
        """Kernel and key -> the kernels that this rank has met there and the ranks have not agreed on.

        A kernel alone by its fingerprint, of ``sources`` (by label) if it is there, because reading code costs half a millisecond, and
        in full if it is ``unread``. ``is_alone``: without kernels that are alone there, because no rank has others.
        """
        found = {}
        for base in self._met.keys() - self._endings.keys():
            kernels = self._met[base]
            if len(kernels) > 1 or base in unread:
                found[base] = [dict(each) for each in kernels]
            elif not is_alone:
                found[base] = [{SOURCE: sources.get(base) or _ending(kernels[0])}]
        return found

    def settle(self, endings: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Agree on endings from now on (kernel and key -> endings); returns old label -> new label."""
        renamed: dict[str, str] = {}
        for base in endings.keys() - self._endings.keys():
            met = self._met.get(base, [])
            old = [self.of(base, each) for each in met]
            self._endings[base] = endings[base]
            renamed |= {before: self.of(base, each) for before, each in zip(old, met, strict=True)}
        return {old: new for old, new in renamed.items() if old != new}
