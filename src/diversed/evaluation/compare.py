"""Two settings on the same prompts: paired differences, and a rival's curve at equal acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from diversed.evaluation.settings import Setting
from diversed.evaluation.statistics import Interval, normal_interval, ratio_interval
from diversed.evaluation.statistics import mean_interval as interval_of_mean
from diversed.evaluation.sweep import Measurement

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """One setting over a task's prompts, in order."""

    setting: Setting
    scores: Scores  #: [n]
    acceptance: float | None  #: per examined position
    acceptance_ci: Interval | None


def by_setting(measurements: Sequence[Measurement], *, timed: bool) -> dict[Setting, Measured]:
    """Scores per prompt, and acceptance pooled, of every setting; of the timed passes or of the others."""
    found: dict[Setting, list[Measurement]] = {}
    for m in measurements:
        if m.timed == timed:
            found.setdefault(m.setting, []).append(m)
    result = {}
    for setting, parts in found.items():
        parts.sort(key=lambda m: m.start)
        scores = np.array([s for m in parts for s in m.scores], dtype=np.float64)
        accepted = [a for m in parts for a in m.accepted]
        examined = [a + r for m in parts for a, r in zip(m.accepted, m.rejected, strict=True)]
        rate, ci = ratio_interval(accepted, examined) if sum(examined) else (None, None)
        result[setting] = Measured(setting, scores, rate, ci)
    return result


def paired_difference(ours: Scores, theirs: Scores) -> tuple[float, Interval]:
    """Mean of the differences prompt by prompt and its normal 95 % interval."""
    return normal_interval(ours - theirs)


def at_acceptance(curve: Sequence[Measured], acceptance: float) -> Scores | None:
    """A rival's score for each prompt at an acceptance between two of its settings, by linear interpolation.

    None outside the curve. Mixing two settings request by request gives just this line, so it can be had.
    """
    points = sorted((m for m in curve if m.acceptance is not None), key=lambda m: m.acceptance or 0.0)
    for low, high in pairwise(points):
        a, b = low.acceptance or 0.0, high.acceptance or 0.0
        if a <= acceptance <= b:
            share = (acceptance - a) / (b - a) if b > a else 0.0
            return (1 - share) * low.scores + share * high.scores
    return None


@dataclass(frozen=True)
class Statement:
    """A setting against target-only decoding, and against a static weight of equal acceptance."""

    setting: Setting
    score: float
    score_ci: Interval
    acceptance: float
    acceptance_ci: Interval
    over_target: float
    over_target_ci: Interval
    over_static: float | None
    over_static_ci: Interval | None


def statements(measured: dict[Setting, Measured], baseline: Setting, curve: Sequence[Setting]) -> list[Statement]:
    """One statement for each setting that has an acceptance."""
    rivals = [measured[s] for s in curve if s in measured]
    found = []
    for setting, m in measured.items():
        if m.acceptance is None or m.acceptance_ci is None:
            continue
        score, score_ci = interval_of_mean(m.scores.tolist())
        over, over_ci = paired_difference(m.scores, measured[baseline].scores)
        static = at_acceptance([r for r in rivals if r.setting != setting], m.acceptance)
        gain, gain_ci = (None, None) if static is None else paired_difference(m.scores, static)
        found.append(Statement(setting, score, score_ci, m.acceptance, m.acceptance_ci, over, over_ci, gain, gain_ci))
    return found
