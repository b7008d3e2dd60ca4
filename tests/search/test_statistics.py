"""Statistics of samples."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from dist_tune.search import median, spread, without_outliers


def test_one_hiccup_moves_neither_median_nor_spread():
    """Of an even number the lower middle sample counts, because hiccups only ever add time; the
    spread has no such bias.
    """
    for samples, expected in (
        ([2.0, 1.0, 3.0, 2.0, 1000.0], (2.0, 1.0)),
        ([1.0, 2.0, 4.0, 100.0], (2.0, 1.5)),
        ([5.0], (5.0, 0.0)),
    ):
        assert (median(samples), spread(samples)) == expected


def test_one_far_sample_of_five_is_left_out():
    """Of four it may be as right as the others; and equal samples have no spread to be measured
    by.
    """
    assert without_outliers([1.0, 1.01, 0.99, 1.02, 9.0]) == [1.0, 1.01, 0.99, 1.02]
    assert without_outliers([1.0, 1.01, 0.99, 9.0]) == [1.0, 1.01, 0.99, 9.0]
    assert without_outliers([1.0] * 5 + [1.004, 1.006]) == [1.0] * 5 + [1.004]


def test_more_outliers_than_a_limit_are_none():
    """A tenth of the samples may be accidents; a run that is slow every fourth time is so, and all
    its samples stay.
    """
    hiccups = [1.0] * 36 + [1.002, 9.0, 9.0, 9.0]
    assert without_outliers(hiccups, max_share=0.1) == hiccups[:37]
    for samples in ([*hiccups, 9.0, 9.0], [1.0, 1.0, 1.0, 5.0] * 10, [1.0] * 8 + [9.0]):
        assert without_outliers(samples, max_share=0.1) == samples


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=20))
def test_half_of_the_samples_are_no_outliers(samples: list[float]):
    """Those that stay are in their order, at least half of them, and any sample is one as far off
    as another that stays.
    """
    staying = without_outliers(samples)
    assert 2 * len(staying) >= len(samples)
    assert list(staying) == [each for each in samples if each in set(staying)]
    # Of an even number between two, unlike the package's own, which is the lower one.
    middle = statistics.median(samples)
    furthest = max(abs(each - middle) for each in staying)
    assert all(each in staying for each in samples if abs(each - middle) <= furthest)
