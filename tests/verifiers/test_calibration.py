"""The map from a wish to the dial: monotone, invertible, honest about its ends."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diversed.verifiers import EnsembleHead, LearnedEnsemble
from diversed.verifiers.calibration import Calibration, CalibrationPoint, monotone


def point(quality: float, score: float, time: float, acceptance: float = 0.5) -> CalibrationPoint:
    return CalibrationPoint(quality, acceptance, 1 + acceptance, time, score, (score - 0.1, score + 0.1))


MEASURED = Calibration.of([point(1.0, 0.9, 0.8), point(0.0, 0.5, 0.4), point(0.5, 0.8, 0.6)], {"task": "t"})


def test_pooling_by_hand() -> None:
    assert monotone([1, 3, 2, 4]) == [1, 2.5, 2.5, 4]
    assert monotone([3, 2, 1]) == [2, 2, 2]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12))
def test_pooling_gives_the_nearest_rising_sequence(values: list[float]) -> None:
    fitted = monotone(values)
    assert all(a <= b + 1e-9 for a, b in pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values), abs=1e-6)
    # Optimal: the residuals of any rising sequence are no smaller; try the sorted values and the running maximum.
    cost = sum((f - v) ** 2 for f, v in zip(fitted, values, strict=True))
    for other in (sorted(values), [max(values[: i + 1]) for i in range(len(values))]):
        assert cost <= sum((o - v) ** 2 for o, v in zip(other, values, strict=True)) + 1e-6


def test_wishes_by_hand() -> None:
    assert MEASURED.quality_for(min_quality=0.65) == pytest.approx(0.25)
    assert MEASURED.quality_for(min_quality=0.3) == 0.0
    assert MEASURED.quality_for(min_quality=0.9) == 1.0
    assert MEASURED.quality_for(max_normalised_time=0.5) == pytest.approx(0.25)
    assert MEASURED.quality_for(max_normalised_time=2.0) == 1.0
    assert MEASURED.quality_for(min_quality=0.65, max_normalised_time=0.7) == pytest.approx(0.25)
    assert MEASURED.at(0.25).score == pytest.approx(0.65)
    assert MEASURED.at(0.25).score_ci == pytest.approx((0.55, 0.75))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"min_quality": 0.95}, r"min_quality=0.95: the best measured score is 0.900, at quality 1"),
        ({"max_normalised_time": 0.3}, r"max_normalised_time=0.3: the shortest measured is 0.40, at quality 0"),
        ({"min_quality": 0.85, "max_normalised_time": 0.5}, r"no quality gives both. Nearest: quality 0.75"),
        ({}, "give at least one"),
    ],
)
def test_what_nothing_measured_meets_is_refused_with_the_nearest_point(wish: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MEASURED.quality_for(**wish)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 2)), min_size=2, max_size=8), st.floats(0, 1))
def test_the_dial_found_for_a_score_has_that_score(values: list[tuple[float, float]], share: float) -> None:
    """Interpolating at the answer gives at least what was asked for, and anything lower on the dial less."""
    last = len(values) - 1
    calibration = Calibration.of([point(i / last, s, t) for i, (s, t) in enumerate(values)], {})
    low, high = calibration.points[0].score, calibration.points[-1].score
    wanted = low + share * (high - low)
    found = calibration.quality_for(min_quality=wanted)
    assert calibration.at(found).score == pytest.approx(wanted, abs=1e-6)
    assert calibration.at(found / 2).score <= wanted + 1e-6


def test_a_head_keeps_its_calibration_and_answers_wishes(tmp_path) -> None:
    learned = LearnedEnsemble(EnsembleHead(4, 2))
    with pytest.raises(ValueError, match=r"no calibration.json"):
        learned.at(min_quality=0.5)
    learned.save_pretrained(tmp_path)
    MEASURED.save(tmp_path)
    again = LearnedEnsemble.from_pretrained(tmp_path)
    assert again.calibration == MEASURED
    assert again.at(min_quality=0.65).quality == pytest.approx(0.25)
    assert again.at(max_normalised_time=0.5).quality == pytest.approx(0.25)
    assert again.at(quality=0.7).quality == 0.7
    again.save_pretrained(tmp_path / "copy")
    assert LearnedEnsemble.from_pretrained(tmp_path / "copy").calibration == MEASURED
    with pytest.raises(ValueError, match="raw dial"):
        again.at(quality=0.5, min_quality=0.5)
    with pytest.raises(ValueError, match="give one of them"):
        again.at()
    (tmp_path / "calibration.json").write_text('{"points": [{}]}')
    with pytest.raises(ValueError, match="is no calibration"):
        LearnedEnsemble.from_pretrained(tmp_path)


def test_one_point_is_no_map() -> None:
    with pytest.raises(ValueError, match="two settings"):
        Calibration.of([point(0.5, 0.5, 0.5)], {})


def test_a_setting_of_the_dial_counts_once():
    point = CalibrationPoint(0.5, 0.8, 4.0, 0.5, 0.9, (0.8, 1.0))
    with pytest.raises(ValueError, match="each setting of the dial once"):
        Calibration.of([point, point, replace(point, quality=0.9)], {})
