"""Paired comparisons: intervals that cover, interpolation that is a mixture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diversed.evaluation.compare import (
    Measured,
    at_acceptance,
    by_setting,
    gain_at_equal_acceptance,
    paired_difference,
    score_at_acceptance,
    statements,
)
from diversed.evaluation.settings import Setting
from diversed.evaluation.sweep import Measurement

TIME = {"prefill": 0.0, "draft": 0.0, "target": 1.0, "verification": 0.0, "rest": 0.0}


def measurement(setting: Setting, start: int, scores: list[float], accepted: int, rejected: int) -> Measurement:
    n = len(scores)
    counts = {"drafted": [9] * n, "accepted": [accepted] * n, "rejected": [rejected] * n, "target_calls": [3] * n}
    return Measurement(setting, start, "scored", 0, scores, **counts, tokens=[9] * n, time=TIME)


def test_the_paired_interval_covers_at_its_nominal_rate() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        difficulty = rng.normal(size=120)
        a, b = ((difficulty + rng.normal(size=120) + shift > 0).astype(float) for shift in (0.3, 0.0))
        _, (low, high) = paired_difference(a, b)
        covered += low <= TRUE_DIFFERENCE <= high
    assert 0.93 <= covered / 1000 <= 0.97


# P(d + e + 0.3 > 0) - 1/2 with d, e standard normal: the normal distribution function at 0.3 / sqrt(2), less a half.
TRUE_DIFFERENCE = 0.0839967


def test_pairing_is_sharper_than_two_separate_means() -> None:
    rng = np.random.default_rng(1)
    difficulty = (rng.random(500) < 0.5).astype(float)
    better = np.maximum(difficulty, (rng.random(500) < 0.1).astype(float))
    mean, (low, high) = paired_difference(better, difficulty)
    assert mean == pytest.approx(float(better.mean() - difficulty.mean()))
    assert low > 0
    unpaired = 1.96 * (better.var(ddof=1) / 500 + difficulty.var(ddof=1) / 500) ** 0.5
    assert high - low < unpaired


def test_parts_of_a_setting_come_together_in_order() -> None:
    a, b = Setting("lossless"), Setting("static:0.5")
    parts = [
        measurement(a, 2, [0.0, 1.0], 1, 3),
        measurement(b, 0, [1.0, 1.0], 4, 0),
        measurement(a, 0, [1.0, 0.5], 3, 1),
    ]
    found = by_setting(parts, kind="scored")
    assert found[a].scores.tolist() == [1.0, 0.5, 0.0, 1.0]
    assert found[a].acceptance == pytest.approx(8 / 16)
    assert found[b].acceptance == 1.0
    assert by_setting(parts, kind="timed") == {}


def accepting(setting: Setting, scores: list[float], accepted: int) -> Measured:
    """Of ten drafts a prompt."""
    n = len(scores)
    parts = [measurement(setting, 0, scores, accepted, 10 - accepted)]
    found = by_setting(parts, kind="scored")[setting]
    assert found.examined.tolist() == [10.0] * n
    return found


def test_between_two_settings_lies_their_mixture() -> None:
    low = Measured(Setting("static:0.8"), np.array([1.0, 1.0, 0.0]), 0.5, (0.4, 0.6))
    high = Measured(Setting("static:0.2"), np.array([0.0, 1.0, 0.0]), 0.9, (0.8, 1.0))
    between = at_acceptance([high, low], 0.6)
    assert between is not None
    np.testing.assert_allclose(between, [0.75, 1.0, 0.0])
    assert at_acceptance([high, low], 0.95) is None
    assert at_acceptance([high, low], 0.4) is None


def test_statements_compare_with_the_target_and_with_static_at_equal_acceptance() -> None:
    target, mine = Setting("target-only", None, 0), Setting("learned", 0.5)
    curve = [Setting("lossless"), Setting("static:0")]
    measured = {
        target: Measured(target, np.array([1.0, 1.0, 1.0, 0.0]), None, None),
        curve[0]: accepting(curve[0], [1.0, 1.0, 1.0, 0.0], 6),
        curve[1]: accepting(curve[1], [0.0, 0.0, 0.0, 0.0], 10),
        mine: accepting(mine, [1.0, 1.0, 0.0, 0.0], 9),
    }
    statement = next(s for s in statements(measured, target, curve) if s.setting == mine)
    assert statement.over_target == pytest.approx(-0.25)
    assert statement.over_static == pytest.approx(0.5 - 0.25 * 0.75)
    low, high = statement.over_static_ci
    assert low < statement.over_static < high


def simulated(rng: np.random.Generator, n: int, right: float, accept: float, ease: np.ndarray, name: str) -> Measured:
    """A setting on n prompts: its score depends on how easy a prompt is, and so does what it accepts."""
    scores = (rng.random(n) < np.clip(right + 0.3 * ease, 0, 1)).astype(float)
    examined = rng.integers(20, 60, n).astype(float)
    accepted = rng.binomial(examined.astype(int), np.clip(accept + 0.1 * ease, 0, 1)).astype(float)
    return Measured(Setting(name), scores, accepted.sum() / examined.sum(), None, accepted, examined)


def test_the_bootstrap_at_equal_acceptance_covers_at_its_nominal_rate() -> None:
    """Ours is right .8 of the time at acceptance .7; the rival's line there is .6 (halfway between .7 and .5)."""
    rng = np.random.default_rng(3)
    runs, covered = 300, 0
    for run in range(runs):
        ease = rng.uniform(-0.5, 0.5, 120)
        ours = simulated(rng, 120, 0.8, 0.7, ease, "learned")
        curve = [simulated(rng, 120, 0.7, 0.6, ease, "a"), simulated(rng, 120, 0.5, 0.8, ease, "b")]
        found = gain_at_equal_acceptance(ours, curve, draws=300, seed=run)
        assert found is not None
        gain, (low, high) = found
        assert low < gain < high
        covered += low <= 0.2 <= high
    assert 0.92 <= covered / runs <= 0.98


def test_nothing_is_said_beyond_a_rivals_curve() -> None:
    curve = [accepting(Setting("a"), [1.0, 1.0, 0.0], 4), accepting(Setting("b"), [1.0, 0.0, 0.0], 6)]
    assert gain_at_equal_acceptance(accepting(Setting("x"), [1.0, 1.0, 1.0], 7), curve) is None
    assert gain_at_equal_acceptance(accepting(Setting("x"), [1.0, 1.0, 1.0], 5), curve[:1]) is None
    gain, _ = gain_at_equal_acceptance(accepting(Setting("x"), [1.0, 1.0, 1.0], 5), curve)
    assert gain == pytest.approx(0.5)


def test_several_seeds_are_averaged_prompt_by_prompt() -> None:
    a = Setting("lossless")
    one, other = measurement(a, 0, [1.0, 0.0], 3, 1), measurement(a, 0, [0.0, 0.0], 1, 3)
    found = by_setting([one, replace(other, seed=1)], kind="scored")[a]
    assert found.scores.tolist() == [0.5, 0.0]
    assert found.acceptance == pytest.approx(0.5)


def test_only_settings_that_met_all_prompts_are_compared() -> None:
    a, b = Setting("lossless"), Setting("static:0.5")
    parts = [measurement(a, 0, [1.0, 0.0], 3, 1), measurement(b, 0, [1.0], 3, 1)]
    assert set(by_setting(parts, kind="scored", prompts=range(2))) == {a}
    assert set(by_setting(parts, kind="scored", prompts=range(1))) == {a, b}


def test_the_score_of_a_curve_at_an_acceptance() -> None:
    curve = [accepting(Setting("a"), [1.0, 1.0, 1.0, 1.0], 4), accepting(Setting("b"), [1.0, 0.0, 0.0, 1.0], 6)]
    middle, (low, high) = score_at_acceptance(curve, 0.5)
    assert middle == pytest.approx(0.75)
    assert low < 0.75 < high
    assert score_at_acceptance(curve, 0.7) is None
    assert score_at_acceptance([], 0.7) is None
    # Where every prompt was right, four prompts still leave doubt.
    sure, (low, high) = score_at_acceptance([curve[0], accepting(Setting("c"), [1.0] * 4, 6)], 0.5)
    assert (sure, high) == (1.0, pytest.approx(1.0))
    assert low == pytest.approx(4 / (4 + 1.959964**2))
