"""One (kernel, key) of a closure as this rank sees it, and what is said when it cannot go on.

Knows nothing of launching or of other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dist_tune.compiler import Resources
from dist_tune.errors import (
    CandidateFailure,
    CaptureError,
    DistTuneError,
    FailureKind,
    MachineError,
    NoValidConfigError,
)
from dist_tune.launches import Argument, NoFitError, Slot, Timings, Tunable
from dist_tune.measure import Checker, is_capturing
from dist_tune.records import TuningRecord

# After one of these the device's context is gone and every later call fails: nothing can stand in.
_FATAL = re.compile(
    r"illegal memory access|misaligned address|illegal instruction|illegal address|device-side"
    r" assert triggered|launch timed out|"
    r"unspecified launch failure|hardware stack error|invalid program"
    r" counter|uncorrectable|device_lost",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Variant:
    """A specialisation of the arguments of a site's launches, for which each candidate is a kernel
    of its own.
    """

    label: str
    """Of its compilations, on this rank alone; the first variant of a site has the site's."""
    arguments: dict[str, Argument]
    """Of its first launch, by name."""
    loaded: set[int] = field(default_factory=set)
    """Candidates on the device."""

    @property
    def compiled(self) -> dict[str, str]:
        """Name -> class of the argument."""
        return {name: argument.compiled for name, argument in self.arguments.items()}


@dataclass(slots=True)
class Site:
    """One (kernel, key) of the closure; a function with configs is a kernel in this sense."""

    label: str
    """Kernel and key, "module.kernel[4096,4096,torch.bfloat16]": what ranks match sites by.

    A second kernel of that name and key, of other code or with other captured values, has "#2"
    behind it, by the order of first launches.
    """
    kernel: str
    key: str
    configs: list[Any]
    texts: list[str]
    """The configs described, in order."""
    n_removed: int = 0
    """Configs that prune rules removed."""
    source: str = ""
    """Digest of the code; empty where no cache is asked."""
    """Imports in the code that the digest leaves out."""
    is_compiled: bool = True
    """True if candidates are compiled ahead of their first launch; those of a function run once
    instead, untimed.
    """
    is_whole: bool = False
    """True for a function that is the whole closure."""
    prepare: Callable[[Any], None] | None = None
    """Called before a replay, with its config."""
    identify: Callable[[], Mapping[str, str]] = dict
    """Of its first launch, see ``Tunable``."""
    checker: Checker | None = None
    is_new: bool = True
    """True until it is reported to the others and loaded."""
    record: TuningRecord | None = None
    """Of this rank's cache."""
    is_unchecked: bool = False
    """True if the next result is to be judged: of a config from the cache, or inside a closure the
    first one.
    """
    slots: dict[int, Slot] = field(default_factory=dict)
    """Places for the winner, by the identity of the decorated object."""
    failures: dict[int, CandidateFailure] = field(default_factory=dict)
    """Candidate -> why it cannot win, as found here."""
    suspects: set[int] = field(default_factory=set)
    """Candidates under way when an earlier process of this rank died: not for launches that any
    candidate can make.
    """
    reported: set[int] = field(default_factory=set)
    """Failures that the other ranks have heard of."""
    changes: dict[int, set[str]] = field(default_factory=dict)
    """Candidate whose results were right -> arguments that it changed though they are no outputs.
    """
    resources: dict[int, Resources] = field(default_factory=dict)
    equal: dict[int, int] = field(default_factory=dict)
    """Candidate -> the one of lower index with the same kernel on all ranks."""
    variants: list[Variant] = field(default_factory=list)
    """Specialisations of its arguments, if its candidates are compiled ahead."""
    untried: set[int] = field(default_factory=set)
    """Candidates that a guided search has not come to: not compiled, or of a function not run.

    The set of its entry.
    """
    near: int | None = None
    """The candidate that is in use for the nearest other key: the best guess before anything is
    known.
    """
    quickest: list[int] = field(default_factory=list)
    """Candidates that are compiled ahead, from the quickest to compile on: the first run needs one
    of them, and waits for it.
    """
    stand_in: int | None = None
    """A candidate that has run here, for launches whose own candidate fails."""
    is_replayed: bool = False
    """True once a replay has launched it."""
    is_given_up: bool = False
    """True if a launch found no candidate that runs here, and raised.

    If the step lives on, it does without the kernel.
    """
    last_error: Exception | None = None
    has_gaps: bool = False
    """True once the device has waited for the host inside a timed launch: it spins before later
    ones.
    """
    winner: Any = None
    timings: Timings = field(default_factory=Timings)
    """Of the tuning that chose the winner."""

    def fill(self) -> None:
        """Bring the winner into use."""
        for slot in self.slots.values():
            slot.fill(self.winner, self.timings)

    def keep(self, texts: Sequence[str]) -> list[int]:
        """Keep the candidates of these ``texts``, counted anew in this order; the number of each
        before.

        A text that this rank lacks, of a site that races on other ranks, is a candidate that fails
        here; the first config is in its place.
        """
        kept = [self.texts.index(text) if text in self.texts else 0 for text in texts]
        now = {old: new for new, old in reversed([*enumerate(kept)])}
        self.n_removed += max(0, len(self.texts) - len(texts))
        self.failures = {now[i]: failure for i, failure in self.failures.items() if i in now}
        for i, text in enumerate(texts):
            if text not in self.texts:
                self.failures[i] = CandidateFailure(
                    FailureKind.LAUNCH, "its prune rules leave it out on this rank"
                )
        self.configs, self.texts = [self.configs[i] for i in kept], [*texts]
        self.resources = {now[i]: resource for i, resource in self.resources.items() if i in now}
        self.suspects, self.untried = set(), {now[i] for i in self.untried & now.keys()}
        self.quickest = [now[i] for i in self.quickest if i in now]
        self.near, self.stand_in = (
            now.get(i) if i is not None else None for i in (self.near, self.stand_in)
        )
        for variant in self.variants:
            variant.loaded = {now[i] for i in variant.loaded & now.keys()}
        return kept

    @property
    def first_guess(self) -> int:
        """The candidate for a launch of which nothing is asked: one known to run, the quickest to
        compile, or that of the nearest key.
        """
        first = next(i for i in (self.stand_in, *self.quickest[:1], self.near, 0) if i is not None)
        # None where all are in quarantine: its launch tells.
        return first if first not in self.suspects else next(self.order(None), first)

    def order(self, first: int | None) -> Iterator[int]:
        """Candidates to try for a launch: the one asked for, one known to run, the quickest to
        compile, then by index.
        """
        # Most launches need the first alone, and the turn of all of them would take a tenth of the
        # host's time in a replay of 200.
        if is_asked := first is not None and first not in self.failures:
            yield first
        wanted = [index for index in (first, self.stand_in) if index is not None]
        order = list(
            dict.fromkeys(
                [
                    *wanted,
                    *self.quickest,
                    *sorted(range(len(self.configs)), key=lambda i: i in self.untried),
                ]
            )
        )
        order.sort(key=lambda i: i in self.suspects and i != first)
        # The one asked for may race for other ranks though its kernel is another's here.
        running = [
            i for i in order if i not in self.failures and i != first and i not in self.equal
        ]
        # A candidate with a wrong result runs: where nothing else does, it keeps the ranks in step.
        is_none = not running and not is_asked
        wrong = {
            i for i, failure in self.failures.items() if failure.kind is FailureKind.WRONG_RESULT
        }
        yield from [i for i in order if i in wrong] if is_none else running


def is_fatal(error: BaseException) -> bool:
    """True if the device is lost to this process after it."""
    return bool(_FATAL.search(str(error)))


def none_left(
    label: str, texts: Sequence[str], failures: Mapping[int, CandidateFailure], where: str
) -> DistTuneError:
    """The error where no config of a site is left, with the first reasons, and how many more there
    are.

    The machine's, if that failed some of them; Triton's own kind, too, where resources are short,
    for a step that does without the kernel.
    """
    if machine := [
        failure.reason for failure in failures.values() if failure.kind is FailureKind.MACHINE
    ]:
        first = (
            machine[0]
            if machine[0].startswith("rank ")
            else f"{where.removeprefix('on ')}: {machine[0]}"
        )
        return MachineError(
            f"site {label}: {len(machine)} of its {len(texts)} configs could not be tried, for no"
            f" fault of theirs; {first}. Give that rank's machine what it lacks (disk space,"
            " memory, ulimit -n, ulimit -u) and start again; nothing of this is kept."
        )
    shown = [
        f'  {index}: "{texts[index]}": {reason}'
        for index, (_, reason) in sorted(failures.items())[:5]
    ]
    more = f"\n  and {len(failures) - len(shown)} more" if len(failures) > len(shown) else ""
    advice = "Add a config that fits the device."
    same = {reason for _, reason in failures.values()}
    is_short = any(
        kind is FailureKind.LOAD or reason.startswith("OutOfResources")
        for kind, reason in failures.values()
    )
    is_launch_s = all(
        kind in (FailureKind.COMPILE, FailureKind.LAUNCH) for kind, _ in failures.values()
    )
    if (
        len(same) == 1
        and len(failures) > 1
        and is_launch_s
        and not is_short
        and "OutOfMemory" not in str(same)
    ):
        shown, more = [f"  each of them: {same.pop()}"], ""
        advice = "No config cures that: the launch, or what decorates the kernel, is at fault."
    # Triton's words where it finds no GPU, which say nothing of GPUs.
    if failures and all("active drivers ([])" in reason for _, reason in failures.values()):
        advice = (
            "Triton finds no GPU: make one visible, or set TRITON_INTERPRET=1 before kernels are"
            " defined, to run them on the CPU. dist-tune doctor tells what works here."
        )
    message = (
        f"site {label}: none of its {len(texts)} configs runs {where}:\n"
        + "\n".join(shown)
        + more
        + "\n"
        + advice
    )
    return NoFitError(message) if is_short else NoValidConfigError(message)


def check_not_capturing(launch: Tunable, closure: str) -> None:
    """Refuse to tune while a CUDA graph is being captured.

    Raises:
        CaptureError: it is.
    """
    if is_capturing():
        raise CaptureError(
            f"{launch.name}{launch.key_text} has no config yet and {closure} is being captured in a"
            " CUDA graph, where nothing can be tuned. Call it once with these shapes before the"
            " capture, or set DIST_TUNE_MODE=cached."
        )
