"""Statistics of samples: their middle, their spread, and those that are no accidents. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median(samples: Sequence[float]) -> float:
    """Middle sample, the lower one of two: one hiccup does not move it, and hiccups only ever add
    time.
    """
    return statistics.median_low(samples)


def without_outliers(samples: Sequence[float], max_share: float = 0.5) -> Sequence[float]:
    """The samples within 5 x the median absolute deviation (MAD) of their median, or within 0.5 %:
    equal samples have a MAD of 0.

    All samples, where fewer than five, or where more than ``max_share`` of them are further away:
    these are a second mode of what is measured and no accidents, and a mean without them would be
    too low. A median does not mind; at most half are ever further away.
    """
    if len(samples) < 5:
        return samples
    middle, mad = statistics.median(samples), spread(samples)
    staying = [
        sample for sample in samples if abs(sample - middle) <= max(5 * mad, 0.005 * abs(middle))
    ]
    return staying if len(samples) - len(staying) <= max_share * len(samples) else samples


def spread(samples: Sequence[float]) -> float:
    """Median absolute deviation (MAD), in the samples' unit: how far a repeat is likely to be
    off.
    """
    middle = statistics.median(samples)
    return statistics.median([abs(sample - middle) for sample in samples])
