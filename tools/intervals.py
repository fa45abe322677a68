"""95 % intervals of scores, and of what is left of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]
FORM = "95 %: Wilson's where every item is right or wrong, else bootstrap over items"

_RESAMPLES = 10_000
_Z = 1.959963984540054  # of the normal distribution, 2.5 % on each side


def mean_interval(scores: Sequence[float]) -> Interval:
    """Of the mean of scores between 0 and 1: Wilson's if all of them are 0 or 1, else by bootstrap (Efron 1979)."""
    if set(scores) <= {0, 1}:
        return wilson(round(sum(scores)), len(scores))
    values = np.asarray(scores, float)
    return _middle(values[_draws(len(values))].mean(axis=1))


def ratio_interval(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """Of Σ parts / Σ wholes over the same items, `wholes` above 0: see `mean_of_ratios_interval`."""
    return mean_of_ratios_interval([(parts, wholes)])


def mean_of_ratios_interval(cells: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """Of the mean over cells of Σ parts / Σ wholes, by bootstrap over each cell's items.

    Drawing from items that are all alike says nothing of those that were not tried. So it is Wilson's of how many
    are kept where every item is kept whole, or every one lost, and in a single cell of wholes that are alike also
    where some are.
    """
    kept = [part / whole for parts, wholes in cells for part, whole in zip(parts, wholes, strict=True)]
    alike = len(cells) == 1 and len(set(cells[0][1])) == 1
    if set(kept) in ({0}, {1}) or (alike and set(kept) <= {0, 1}):
        return wilson(round(sum(kept)), len(kept))
    means = np.zeros(_RESAMPLES)
    for cell, (parts, wholes) in enumerate(cells):
        drawn = _draws(len(wholes), cell)
        means += np.asarray(parts, float)[drawn].sum(axis=1) / np.asarray(wholes, float)[drawn].sum(axis=1)
    return _middle(means / len(cells))


def wilson(successes: int, trials: int) -> Interval:
    """Of a share of independent trials (Wilson 1927); `trials` above 0."""
    share, spread = successes / trials, _Z * _Z / trials
    centre = share + spread / 2
    reach = _Z * math.sqrt((share * (1 - share) + spread / 4) / trials)
    low, high = (centre - reach) / (1 + spread), (centre + reach) / (1 + spread)
    return 0.0 if successes == 0 else low, 1.0 if successes == trials else high


def _draws(items: int, stream: int = 0) -> np.ndarray:
    """Items drawn with replacement [resamples, items]; the same for the same numbers."""
    return np.random.default_rng(stream).integers(items, size=(_RESAMPLES, items))


def _middle(values: np.ndarray) -> Interval:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
