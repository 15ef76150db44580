"""Intervals: hand-computed values, and coverage on simulated data."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diversed.evaluation.statistics import mean_interval, median_interval, percentile_interval, ratio_interval


def test_wilson_interval_by_hand():
    mean, (low, high) = mean_interval([1.0] * 8 + [0.0] * 2)
    assert mean == 0.8
    assert (low, high) == pytest.approx((0.49016, 0.94331), abs=1e-5)


def test_all_right_still_leaves_doubt():
    mean, (low, high) = mean_interval([1.0] * 50)
    assert mean == 1.0
    assert high == pytest.approx(1.0)
    assert low == pytest.approx(50 / (50 + 1.959964**2))


def test_normal_interval_by_hand():
    mean, (low, high) = mean_interval([0.1, 0.2, 0.6])
    assert mean == pytest.approx(0.3)
    assert high - low == pytest.approx(2 * 1.959964 * np.std([0.1, 0.2, 0.6], ddof=1) / np.sqrt(3))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.95])
def test_the_mean_is_covered_at_the_nominal_rate(p):
    rng = np.random.default_rng(0)
    hits = [low <= p <= high for x in rng.random((2000, 200)) for _, (low, high) in [mean_interval((x < p) * 1.0)]]
    assert 0.93 < np.mean(hits) < 0.97


def test_the_ratio_is_covered_when_sequences_differ():
    """Acceptance varies from sequence to sequence; an interval that took tokens for independent would be too short."""
    rng = np.random.default_rng(1)
    hits = []
    for _ in range(1500):
        drafted = rng.integers(20, 80, 100)
        accepted = rng.binomial(drafted, rng.beta(4, 4, 100))
        _, (low, high) = ratio_interval(accepted, drafted)
        hits.append(low <= 0.5 <= high)
    assert 0.92 < np.mean(hits) < 0.97


@pytest.mark.parametrize("n", [7, 11, 30])
def test_the_median_of_paired_times_is_covered(n):
    """Prompts differ, and the machine has hiccups; times of one prompt go together."""
    rng = np.random.default_rng(2)
    hits = []
    for _ in range(400):
        prompt = rng.lognormal(0, 0.3, n)
        ours, alone = (scale * prompt * rng.lognormal(0, 0.15, n) for scale in (0.5, 1.0))
        ratio, (low, high) = median_interval(ours / alone)
        assert low <= ratio <= high
        hits.append(low <= 0.5 <= high)
    k = {7: 1, 11: 2, 30: 10}[n]  # order statistics come in steps
    exact = 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n
    assert exact >= 0.95
    assert np.mean(hits) == pytest.approx(exact, abs=0.025)


def test_a_percentile_interval_needs_nearly_all_resamples():
    values = np.arange(1000.0)
    assert percentile_interval(values) == pytest.approx((24.975, 974.025))
    assert percentile_interval(np.where(values < 100, np.nan, values)) is None


def test_a_median_of_so_few_that_their_range_may_miss_it_has_no_interval():
    assert median_interval([1.0, 3.0]) == (2.0, None)
    assert median_interval([1.0, 3.0, 2.0, 5.0, 4.0]) == (3.0, None)  # all on one side of it: once in 16
    assert median_interval([1.0, 3.0, 2.0, 5.0, 4.0, 6.0])[1] is not None
