"""Two settings on the same prompts: paired differences, and a rival's curve at equal acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diversed.evaluation.settings import DRAFT_ONLY, TARGET_ONLY, Setting, is_block
from diversed.evaluation.statistics import Interval, normal_interval, percentile_interval, ratio_interval, resamples
from diversed.evaluation.statistics import mean_interval as interval_of_mean
from diversed.evaluation.sweep import Kind, Measurement, by_prompt

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """One setting over a task's prompts, in order."""

    setting: Setting
    scores: Scores  #: [n], the mean over seeds
    acceptance: float | None  #: per examined position
    acceptance_ci: Interval | None
    accepted: Scores | None = None  #: [n], drafts that stayed
    examined: Scores | None = None  #: [n], drafts that were looked at


def by_setting(
    measurements: Sequence[Measurement], *, kind: Kind, prompts: range | None = None
) -> dict[Setting, Measured]:
    """Scores per prompt, and acceptance pooled, of every setting in the passes of one kind; of ``prompts`` only, where
    given, and then of the settings that met them all."""
    found: dict[Setting, list[Measurement]] = {}
    for m in measurements:
        if m.kind == kind:
            found.setdefault(m.setting, []).append(m)
    result = {}
    for setting, parts in found.items():
        values = {name: by_prompt(parts, name) for name in ("scores", "accepted", "rejected")}
        wanted = list(values["scores"]) if prompts is None else list(prompts)
        if not set(wanted) <= values["scores"].keys():
            continue
        scores = np.array([np.mean(values["scores"][i]) for i in wanted], dtype=np.float64)
        accepted = np.array([sum(values["accepted"][i]) for i in wanted], dtype=np.float64)
        examined = accepted + np.array([sum(values["rejected"][i]) for i in wanted], dtype=np.float64)
        rate, ci = ratio_interval(accepted.tolist(), examined.tolist()) if examined.sum() else (None, None)
        result[setting] = Measured(setting, scores, rate, ci, accepted, examined)
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


def gain_at_equal_acceptance(
    ours: Measured, curve: Sequence[Measured], *, draws: int = 2000, seed: int = 0
) -> tuple[float, Interval] | None:
    """How far a score lies above a rival's curve at the same acceptance: a paired bootstrap over prompts.

    Every resample of the prompts moves all scores and all acceptances, ours and the curve's, and is interpolated anew,
    so the interval also covers that acceptances are estimates. None where the curve does not reach our acceptance (in
    the data, or in more than one resample of twenty).
    """
    if ours.acceptance is None:
        return None
    weights = first_all(len(ours.scores), draws, seed)
    at, score = resampled(weights, ours)
    gains = score - curve_at(weights, curve, at)
    interval = percentile_interval(gains[1:])
    return None if interval is None or np.isnan(gains[0]) else (float(gains[0]), interval)


def score_at_acceptance(
    curve: Sequence[Measured], acceptance: float, *, draws: int = 2000, seed: int = 0
) -> tuple[float, Interval] | None:
    """The score of a curve at an acceptance, interpolated, with a bootstrap interval over prompts; None beyond it."""
    if not curve:
        return None
    weights = first_all(len(curve[0].scores), draws, seed)
    scores = curve_at(weights, curve, np.full(len(weights), acceptance))
    interval = percentile_interval(scores[1:])
    if interval is None or np.isnan(scores[0]):
        return None
    if scores[0] in (0.0, 1.0):  # all alike: resampling knows no doubt, Wilson's interval does
        interval = interval_of_mean([float(scores[0])] * weights.shape[1])[1]
    return float(scores[0]), interval


MIXING = "mixing requests"


def mixing_requests(lossless: Sequence[Measured], draft: Measured | None) -> list[Measured]:
    """The curve of using no relaxed verifier at all: some requests are verified lossless, the others left to the draft.

    A straight line between the two, ends included: what a verifier that decides token by token has to beat. Empty
    without either. Drawn as if the two wrote answers of one length.
    """
    if draft is None or not lossless:
        return []
    one = np.ones(len(draft.scores))
    return [*lossless, replace(draft, acceptance=1.0, acceptance_ci=(1.0, 1.0), accepted=one, examined=one)]


class Mixture(NamedTuple):
    """Requests split between the draft alone and a way of keeping the target's distribution."""

    strict: Setting  #: target-only or lossless, whichever is faster
    share: float  #: of the requests that go there
    scores: Scores  #: expected, for each prompt


def mixture_in_time(
    measured: Mapping[Setting, Measured], times: Mapping[Setting, float], time: float, temperature: float
) -> Mixture | None:
    """The split of the requests that takes a given time.

    Args:
        measured: scores on the same prompts.
        times: normalised times; time per token stands for time per request, as if all answers had one length.

    None where the ends were not measured and timed, or ``time`` does not lie between theirs.
    """
    known = [s for s in times if s in measured and s.temperature == temperature]
    draft = next((s for s in known if s.verifier == DRAFT_ONLY), None)
    strict = min((s for s in known if s.verifier in (TARGET_ONLY, "lossless")), key=times.__getitem__, default=None)
    if draft is None or strict is None or not times[draft] < time < times[strict]:
        return None
    share = (time - times[draft]) / (times[strict] - times[draft])
    return Mixture(strict, share, share * measured[strict].scores + (1 - share) * measured[draft].scores)


def first_all(n: int, draws: int, seed: int) -> Scores:
    """Resamples of ``n`` prompts, [1 + draws, n]; the first takes each prompt once."""
    return np.concatenate([np.ones((1, n)), resamples(n, draws, seed)])


def resampled(weights: Scores, m: Measured) -> tuple[Scores, Scores]:
    """Acceptance and score of a setting in each resample."""
    assert m.accepted is not None
    assert m.examined is not None
    return (weights @ m.accepted) / np.maximum(weights @ m.examined, 1e-12), weights @ m.scores / weights.shape[1]


def curve_at(weights: Scores, curve: Sequence[Measured], acceptance: Scores) -> Scores:
    """A curve's score in each resample at that resample's ``acceptance``; NaN beyond its ends."""
    points = [m for m in curve if m.acceptance is not None]
    if len(points) < 2:
        return np.full(len(weights), np.nan)
    rates, scores = (np.stack(x, 1) for x in zip(*(resampled(weights, m) for m in points), strict=True))
    order = np.argsort(rates, 1)
    rates, scores = np.take_along_axis(rates, order, 1), np.take_along_axis(scores, order, 1)
    rows = zip(acceptance, rates, scores, strict=True)
    return np.array([np.interp(x, xs, ys, left=np.nan, right=np.nan) for x, xs, ys in rows])


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
        others = [] if is_block(setting.verifier) else [r for r in rivals if r.setting != setting]
        against = gain_at_equal_acceptance(m, others)
        gain, gain_ci = (None, None) if against is None else against
        found.append(Statement(setting, score, score_ci, m.acceptance, m.acceptance_ci, over, over_ci, gain, gain_ci))
    return found
