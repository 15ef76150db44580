"""From measured costs and recorded texts to the speed of any verifier at any N, measured or not."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diversed.evaluation.settings import TARGET_ONLY, Setting
from diversed.evaluation.statistics import Interval, mean_interval, percentile_interval, resamples
from diversed.evaluation.sweep import LONGEST_BLOCK, Measurement, by_prompt
from diversed.theory import Costs, speedup_with_prompt

Floats = NDArray[np.float64]


def target_step(measurements: Sequence[Measurement], temperature: float) -> float | None:
    """Seconds of one target-only step, one prompt at a time: the median over prompts. None where it was not timed."""
    baseline = Setting(TARGET_ONLY, None, 0, temperature)
    times = [
        (m.seconds - m.time["prefill"]) / sum(m.tokens)
        for m in measurements
        if m.kind == "timed" and m.setting == baseline
    ]
    return float(np.median(times)) if times else None


def costs_of(measurements: Sequence[Measurement], setting: Setting) -> Costs | None:
    """The costs of a setting in target-only steps, from the timed passes at its temperature.

    What models cost (c, and v with its growth in N) is pooled over all verifiers; what a verdict costs (part of v, and
    h) is the verifier's own. Each is a median over prompts. At one N alone v cannot be told from its growth, which is
    then taken to be 0. None where nothing was timed.
    """
    step = target_step(measurements, setting.temperature)
    timed = [m for m in measurements if m.kind == "timed" and m.setting.temperature == setting.temperature]
    drafting = [m for m in timed if m.setting.speculates]
    mine = [m for m in drafting if m.setting.at_n(0) == setting.at_n(0)]
    if step is None or not mine:
        return None
    draft = np.median([m.time["draft"] / (sum(m.target_calls) * m.setting.num_speculative_tokens) for m in drafting])
    base, slope = line([(m.setting.num_speculative_tokens, m.time["target"] / sum(m.target_calls)) for m in drafting])
    verdict, verdict_slope = line(
        [(m.setting.num_speculative_tokens, m.time["verification"] / sum(m.target_calls)) for m in mine]
    )
    rest = np.median([m.time["rest"] / sum(m.target_calls) for m in mine])
    prefill = np.median([m.time["prefill"] / len(m.tokens) for m in drafting])
    alone = [m for m in timed if m.setting.verifier == TARGET_ONLY]
    target_prefill = np.median([m.time["prefill"] / len(m.tokens) for m in alone])
    return Costs(
        draft_step=float(draft) / step,
        verification=(base + verdict) / step,
        per_token=(slope + verdict_slope) / step,
        overhead=float(rest) / step,
        prefill=float(prefill) / step,
        target_prefill=float(target_prefill) / step,
    )


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope, 0 or above, of the medians at each N."""
    by_n: dict[int, list[float]] = {}
    for n, value in points:
        by_n.setdefault(n, []).append(value)
    xs = np.array(sorted(by_n), dtype=float)
    ys = np.array([np.median(by_n[n]) for n in sorted(by_n)])
    slope = float(np.polyfit(xs, ys, 1)[0]) if len(xs) > 1 else 0.0
    slope = max(slope, 0.0)
    return float(ys.mean() - slope * xs.mean()), slope


def traced(measurements: Sequence[Measurement], setting: Setting) -> list[Measurement]:
    """The traced passes of a setting's verifier, quality and temperature, at the largest N they were made with."""
    mine = [m for m in measurements if m.kind == "traced" and m.trace and m.setting.at_n(0) == setting.at_n(0)]
    largest = max((m.setting.num_speculative_tokens for m in mine), default=0)
    return [m for m in mine if m.setting.num_speculative_tokens == largest]


def judged(measurements: Sequence[Measurement], setting: Setting) -> list[Measurement]:
    """The passes that scored a setting's verifier, quality and temperature on all prompts, at the N nearest its own."""
    mine = [m for m in measurements if m.setting.at_n(0) == setting.at_n(0)]
    # In batches of one the timed passes score as well.
    mine = [m for m in mine if m.kind == "scored"] or [m for m in mine if m.kind == "timed"]
    wanted, there = setting.num_speculative_tokens, {m.setting.num_speculative_tokens for m in mine}
    nearest = min(there, key=lambda n: (abs(n - wanted), n), default=wanted)
    return [m for m in mine if m.setting.num_speculative_tokens == nearest]


def score_of(measurements: Sequence[Measurement]) -> tuple[float, Interval]:
    """Mean score and its interval, of prompts: one asked under several seeds counts once."""
    return mean_interval([statistics.fmean(scores) for scores in by_prompt(measurements, "scores").values()])


def target_seconds(measurements: Sequence[Measurement], temperature: float, tokens: float) -> float | None:
    """Seconds per token of target-only decoding for answers of so many tokens, the prompt's share included: medians
    over prompts, as speed-ups are. None where it was not timed."""
    step = target_step(measurements, temperature)
    baseline = Setting(TARGET_ONLY, None, 0, temperature)
    prefill = [m.time["prefill"] / len(m.tokens) for m in measurements if m.kind == "timed" and m.setting == baseline]
    return None if step is None else step + float(np.median(prefill)) / tokens


@dataclass(frozen=True)
class Foretold:
    """What is expected of a setting: one row of a plan."""

    setting: Setting
    score: float
    score_ci: Interval
    block_efficiency: float  #: tokens per target pass
    speedup: float
    speedup_ci: Interval | None
    seconds_per_token: float


def foretell(measurements: Sequence[Measurement], setting: Setting, costs: Costs | None = None) -> Foretold | None:
    """Score, target passes and speed of a setting, whose N need not have been measured.

    The number of target passes comes from texts recorded for its verifier, quality and temperature, the score from the
    scored passes; costs from the timed passes, or as given. The interval of the speed-up speaks of prompts, not of the
    costs. None where there is no trace or no timing, or N lies beyond what traces foretell.
    """
    n = setting.num_speculative_tokens
    texts = traced(measurements, setting)
    costs = costs_of(measurements, setting) if costs is None else costs
    blocks = [b[n - 1] for m in texts if m.trace for b in m.trace["blocks"] if b is not None and n <= LONGEST_BLOCK]
    tokens = [t for m in texts for t in m.tokens]
    alone = target_seconds(measurements, setting.temperature, float(np.mean(tokens))) if tokens else None
    if costs is None or alone is None or not blocks or len(blocks) != len(tokens):
        return None
    weights = resamples(len(tokens))
    b, t = np.array(blocks), np.array(tokens, dtype=float)
    mean_tokens, mean_blocks = weights @ t / len(t), weights @ b / len(t)
    drawn = speedup_with_prompt(mean_tokens, mean_blocks, n, costs)
    speed = speedup_with_prompt(float(t.mean()), float(b.mean()), n, costs)
    score, score_ci = score_of(judged(measurements, setting) or texts)
    return Foretold(
        setting, score, score_ci, float(t.sum() / b.sum()), speed, percentile_interval(drawn), alone / speed
    )
