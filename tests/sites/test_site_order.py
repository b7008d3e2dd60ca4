"""The turn of candidates for a launch."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.sites import Site

N = 5
INDEX = st.integers(0, N - 1)


class Watched(list[int]):
    """Candidates that count how often they are gone through."""

    n_read = 0

    def __iter__(self) -> Any:
        self.n_read += 1
        return super().__iter__()


def site_of(
    failed: dict[int, FailureKind],
    equal: set[int],
    suspects: set[int],
    stand_in: int | None,
    quickest: list[int],
) -> Site:
    """A site of five candidates."""
    site = Site("k[1]", "k", "[1]", list(range(N)), [f"c{i}" for i in range(N)])
    site.failures.update({i: CandidateFailure(kind, "") for i, kind in failed.items()})
    site.equal.update(dict.fromkeys(equal, 0))
    site.suspects, site.stand_in, site.quickest = suspects, stand_in, Watched(quickest)
    return site


@given(
    st.dictionaries(INDEX, st.sampled_from([FailureKind.LAUNCH, FailureKind.WRONG_RESULT])),
    st.sets(INDEX),
    st.sets(INDEX),
    st.none() | INDEX,
    st.permutations(range(N)),
    st.none() | INDEX,
)
def test_the_one_asked_for_comes_first_and_suspects_last(
    failed: dict[int, FailureKind],
    equal: set[int],
    suspects: set[int],
    stand_in: int | None,
    quickest: list[int],
    first: int | None,
):
    """None comes twice, none that has failed comes, but where nothing runs those with a wrong
    result do.
    """
    site = site_of(failed, equal, suspects, stand_in, quickest)
    order = list(site.order(first))
    running = {i for i in range(N) if i not in failed and (i == first or i not in equal)}
    assert len(order) == len(set(order))
    assert set(order) == (
        running or {i for i, kind in failed.items() if kind is FailureKind.WRONG_RESULT}
    )
    assert first not in running or order[0] == first
    rest = [i in suspects for i in order if i != first]
    assert rest == sorted(rest)


def test_a_launch_that_needs_no_other_puts_none_into_turn():
    """In a replay of a site with hundreds of candidates, that would be a tenth of the host's
    time.
    """
    site = site_of({}, set(), {1}, 2, [3, 1])
    assert next(site.order(4)) == 4
    assert site.quickest.n_read == 0  # type: ignore[attr-defined]
    assert list(site.order(4)) == [4, 2, 3, 0, 1]
