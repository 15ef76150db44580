"""Estimates with their 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Z = 1.959964  # the 97.5 % quantile of the normal distribution

Interval = tuple[float, float]


def mean_interval(values: Sequence[float]) -> tuple[float, Interval]:
    """Mean and interval: Wilson's for zeros and ones (valid near the ends), the normal one otherwise."""
    x = np.asarray(values, dtype=float)
    n, mean = len(x), float(x.mean())
    if np.isin(x, (0.0, 1.0)).all():
        centre = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
        half = Z / (1 + Z**2 / n) * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
        return mean, (max(0.0, centre - half), min(1.0, centre + half))
    return normal_interval(x)


def normal_interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, Interval]:
    """Mean and the interval of a normal approximation."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    half = Z * float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.inf
    return mean, (mean - half, mean + half)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, Interval]:
    """Pooled ratio sum(a)/sum(b), with sequences as clusters (delta method): tokens of one sequence are not
    independent, so counting them as if they were would make the interval too narrow."""
    a, b = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    total = float(b.sum())
    ratio = float(a.sum()) / total
    n = len(a)
    if n < 2:
        return ratio, (-math.inf, math.inf)
    half = Z * math.sqrt(n / (n - 1) * float(((a - ratio * b) ** 2).sum())) / total
    return ratio, (ratio - half, ratio + half)


def resamples(n: int, draws: int = 2000, seed: int = 0) -> NDArray[np.float64]:
    """How often each of ``n`` prompts is drawn in each bootstrap resample, [draws, n]; rows sum to n."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), size=draws).astype(float)


def percentile_interval(values: NDArray[np.float64]) -> Interval | None:
    """The middle 95 % of bootstrap values; None where more than one in twenty does not exist."""
    found = values[np.isfinite(values)]
    if len(found) < 0.95 * len(values):
        return None
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def median_interval(values: Sequence[float]) -> tuple[float, Interval | None]:
    """Median and the exact interval between two order statistics, whatever the distribution: the k-th value from either
    end, with k as large as 2 P(Binomial(n, 1/2) < k) <= 0.05 allows. None for fewer than six values, whose whole range
    misses the median more often than that."""
    x = np.sort(np.asarray(values, dtype=float))
    n, k, missed = len(x), 0, 0.0
    while (missed := missed + 2 * math.comb(n, k) / 2**n) <= 0.05:
        k += 1
    return float(np.median(x)), (float(x[k - 1]), float(x[n - k])) if k else None
