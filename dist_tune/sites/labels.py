"""Labels of sites: kernel and key, and with them what tells one kernel from another of the same name and key.

Ranks match sites by label. Kernels that are alone with their name and key on each rank go by these if their code is the same, even if
captured values differ, such as the rank's number. Kernels that share them on some rank go by the values in which they differ, on all
ranks and independent of the order in which a rank comes to them. Pure: an identity is text by name, see ``Tunable.identity``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence

Identity = Mapping[str, str]
SOURCE = "@source"
"""Name of the fingerprint in an identity that says no more than that; no value of a kernel's has such a name."""
_PLAIN = re.compile(r"[\w.+'-]+")
_ODD = re.compile(r"[^\w.@]+")


def suffix(identity: Identity, names: Iterable[str]) -> str:
    """Values of an identity by name, "{BLOCK=16,code=3f09d2c1a5b4}"; empty without names."""
    values = ((name, identity.get(name, "-")) for name in names)
    text = ",".join(f"{_ODD.sub('_', name)}={value if _PLAIN.fullmatch(value) else value.encode().hex()}" for name, value in values)
    return f"{{{text}}}" if text else ""


def differing(identities: Sequence[Identity]) -> list[str]:
    """Names of which these identities do not all have the same value, sorted."""
    if len(identities) < 2:  # of one kernel there may be hundreds of values
        return []
    names = {name for each in identities for name in each}
    return sorted(name for name in names if len({each.get(name) for each in identities}) > 1)


def telling(by_rank: Sequence[Sequence[Identity]]) -> list[str]:
    """The names that tell the kernels of one name and key apart; each rank brings those that it has met. Empty if all are one.

    Where a rank has several, names whose values are the same on all such ranks, if that is enough: then ranks agree which kernel is
    which. And the code, where ranks have different code.
    """
    mixed = [each for each in by_rank if len(each) > 1]
    names = sorted({name for each in mixed for name in differing(each)})
    shared = [name for name in names if len({tuple(sorted(one.get(name, "") for one in each)) for each in mixed}) == 1]
    is_enough = all(len({suffix(one, shared) for one in each}) == len(each) for each in mixed)
    by_code = {"code"} if len({one.get("code") for each in by_rank for one in each}) > 1 else set()
    return sorted({*(shared if is_enough else names), *by_code})


def is_unread(by_rank: Sequence[Sequence[Identity]]) -> bool:
    """True if kernels of one name and key differ in their fingerprints, or only some ranks tell these: codes are compared then."""
    return len({one.get(SOURCE) for each in by_rank for one in each}) > 1


class Labels:
    """The labels of one tuning on this rank."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, Identity]] = {}
        """Kernel and key -> label -> identity of the kernel that has it."""
        self._names: dict[str, Sequence[str]] = {}
        """Kernel and key -> names of values in its labels, the same on all ranks once they have agreed."""

    def of(self, base: str, identity: Identity) -> str:
        """The label of a kernel's site. ``base``: kernel and key."""
        names = self._names.get(base, ())
        label = base + suffix(identity, names)
        kinds = self._kinds.setdefault(base, {})
        owner = kinds.setdefault(label, identity)
        if owner is identity or owner == identity:
            return label
        # Another kernel has this label: until the ranks agree, or where they have done so before this one was met.
        label = base + suffix(identity, sorted({*names, *differing([owner, identity])}))
        kinds.setdefault(label, identity)
        return label

    def kinds(
        self, sources: Mapping[str, str] | None = None, unread: Container[str] = (), *, is_alone: bool = False
    ) -> dict[str, list[dict[str, str]]]:
        """Kernel and key -> the kernels that this rank has met there, each by its code and by what they differ in.

        A kernel alone by its fingerprint, which is equal where the code and all that it has captured are, if that is in ``sources`` (by
        label) and the kernel's code is not asked for (``unread``): reading the code costs half a millisecond for each kernel.
        Without those that the ranks have agreed on. ``is_alone``: also without kernels that are alone there, because no rank has others.
        """
        found = {}
        for base in self._kinds.keys() - self._names.keys():
            kinds = list(self._kinds[base].values())
            if is_alone and len(kinds) == 1:
                continue
            if len(kinds) == 1 and base not in unread and (source := (sources or {}).get(base)):
                found[base] = [{SOURCE: source}]
                continue
            names = {*differing(kinds), "code"}
            found[base] = [{name: each.get(name, "-") for name in names} for each in kinds]
        return found

    def settle(self, names: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Agree on the names of values (kernel and key -> names) from now on; returns old label -> new label."""
        renamed: dict[str, str] = {}
        for base, told in names.items():
            if base in self._names:
                continue
            self._names[base] = told
            kinds = self._kinds.pop(base, {})
            renamed |= {old: self.of(base, identity) for old, identity in kinds.items()}
        return {old: new for old, new in renamed.items() if old != new}
