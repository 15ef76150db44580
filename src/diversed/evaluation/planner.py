"""Which verifier, quality and N meet a latency, a speed-up or a score, on measured costs and recorded texts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from diversed.evaluation.compare import by_setting, mixture_in_time, paired_difference
from diversed.evaluation.prediction import Foretold, costs_of, foretell, judged, score_of, target_seconds
from diversed.evaluation.rows import setting_of, summarise
from diversed.evaluation.settings import TARGET_ONLY, Setting
from diversed.evaluation.sweep import LONGEST_BLOCK, Measurement, Recorded
from diversed.verifiers.calibration import Calibration


@dataclass(frozen=True)
class Wish:
    """What a plan must meet; None where it does not matter."""

    latency_ms: float | None = None  #: per token, the prompt's share included
    min_quality: float | None = None  #: the task's score
    speedup: float | None = None  #: over target-only decoding

    def __post_init__(self) -> None:
        for name in ("latency_ms", "min_quality", "speedup"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r} must be a number above 0")

    def shortfall(self, point: Foretold) -> float:
        """How far a point misses, the sum of relative shortfalls; 0 where it meets everything."""
        missing = 0.0
        if self.latency_ms is not None:
            missing += max(0.0, 1000 * point.seconds_per_token / self.latency_ms - 1)
        if self.min_quality is not None:
            missing += max(0.0, 1 - point.score / self.min_quality)
        if self.speedup is not None:
            missing += max(0.0, 1 - point.speedup / self.speedup)
        return missing

    def __str__(self) -> str:
        parts = []
        if self.latency_ms is not None:
            parts.append(f"{self.latency_ms:g} ms a token")
        if self.min_quality is not None:
            parts.append(f"a score of {self.min_quality:g}")
        if self.speedup is not None:
            parts.append(f"a speed-up of {self.speedup:g}")
        return " with ".join(parts) or "nothing in particular"


def candidates(recorded: Recorded, temperature: float) -> list[Foretold]:
    """Target-only decoding, and every recorded verifier and quality at every N up to LONGEST_BLOCK.

    Raises:
        ValueError: nothing was timed or traced at this temperature.
    """
    measurements = recorded.measurements
    alone = target_only(measurements, temperature)
    if alone is None:
        known = sorted({m.setting.temperature for m in measurements if m.kind == "timed"})
        raise ValueError(
            f"temperature={temperature:g}: target-only decoding was not timed at it (timed at: "
            f"{', '.join(f'{t:g}' for t in known) or 'none'}); run diversed bench with timing_n above 0"
        )
    points = [alone]
    bases = dict.fromkeys(
        m.setting.at_n(1) for m in measurements if m.kind == "traced" and m.setting.temperature == temperature
    )
    for base in bases:
        costs = costs_of(measurements, base)
        if costs is not None:
            found = (foretell(measurements, base.at_n(n), costs) for n in range(1, LONGEST_BLOCK + 1))
            points += [f for f in found if f is not None]
    if len(points) == 1:
        raise ValueError(
            "trace: nothing was both traced and timed: run diversed bench with trace_n and timing_n above 0"
        )
    return points


def calibrated(head: str, calibration: Calibration) -> list[Foretold]:
    """Target-only decoding and the points of a head's calibration, which hold at its one N and temperature."""
    c = calibration.conditions
    step, n, temperature = c["target_seconds_per_token"], c["num_speculative_tokens"], c["temperature"]
    low, high = c["target_score_ci"]
    alone = Setting(TARGET_ONLY, None, 0, temperature)
    points = [Foretold(alone, c["target_score"], (low, high), 1.0, 1.0, (1.0, 1.0), step)]
    for p in calibration.points:
        setting = Setting(head, p.quality, n, temperature)
        speed = 1 / p.normalised_time
        points.append(Foretold(setting, p.score, p.score_ci, p.block_efficiency, speed, None, step * p.normalised_time))
    return points


def target_only(measurements: Sequence[Measurement], temperature: float) -> Foretold | None:
    """Not speculating, as a point beside the others."""
    setting = Setting(TARGET_ONLY, None, 0, temperature)
    tokens = [t for m in measurements if m.kind == "timed" and m.setting == setting for t in m.tokens]
    seconds = target_seconds(measurements, temperature, statistics.fmean(tokens)) if tokens else None
    if seconds is None:
        return None
    score, score_ci = score_of(judged(measurements, setting))
    return Foretold(setting, score, score_ci, 1.0, 1.0, (1.0, 1.0), seconds)


def choose(points: Sequence[Foretold], wish: Wish) -> Foretold:
    """The point that meets the wish: the fastest where a score is asked for; else, of those whose score interval
    reaches the best score among them, the fastest.

    Raises:
        ValueError: none meets it; the message names the nearest.
    """
    good = [p for p in points if wish.shortfall(p) == 0]
    if not good:
        nearest = min(points, key=lambda p: (wish.shortfall(p), -p.speedup))
        raise ValueError(f"plan: no setting gives {wish}. Nearest: {describe(nearest)}")
    if wish.min_quality is None:
        best = max(p.score for p in good)
        good = [p for p in good if max(p.score, p.score_ci[1]) >= best]
    return max(good, key=lambda p: (p.speedup, p.score))


def best_per_verifier(points: Sequence[Foretold]) -> list[Foretold]:
    """The best N of each verifier and quality."""
    best: dict[Setting, Foretold] = {}
    for p in points:
        key = p.setting.at_n(0)
        if key not in best or p.speedup > best[key].speedup:
            best[key] = p
    return list(best.values())


def describe(point: Foretold) -> str:
    """One line: the setting and what to expect of it."""
    low, high = point.score_ci
    speed = f"speed-up {point.speedup:.2f}"
    if point.speedup_ci is not None and point.setting.verifier != TARGET_ONLY:
        speed += f" ({point.speedup_ci[0]:.2f} to {point.speedup_ci[1]:.2f})"
    n = f", N {point.setting.num_speculative_tokens}" if point.setting.num_speculative_tokens else ""
    return (
        f"{point.setting.label}{n}: {speed}, {1000 * point.seconds_per_token:.2f} ms a token, "
        f"{point.block_efficiency:.2f} tokens per target pass, score {point.score:.3f} ({low:.3f} to {high:.3f})"
    )


def advice(point: Foretold, points: Sequence[Foretold]) -> str:
    """Whether to speculate at all."""
    fastest = max(points, key=lambda p: p.speedup)
    lossless = max((p for p in points if p.setting.verifier == "lossless"), key=lambda p: p.speedup, default=None)
    if fastest.setting.verifier == TARGET_ONLY:
        return "Do not speculate: no verifier at any N is foretold to be faster than the target alone."
    if point.setting.verifier == TARGET_ONLY:
        return f"Do not speculate: what is faster does not keep the score. The fastest: {describe(fastest)}"
    if point.speedup_ci is not None and point.speedup_ci[0] <= 1:
        return "Whether this is faster than the target alone is not certain: its interval reaches 1."
    if lossless is not None and lossless.speedup < 1:
        return "Lossless speculation would be slower than the target alone here; only relaxed verification pays."
    return ""


def doubt(point: Foretold, wish: Wish) -> str:
    """One sentence where the score that was asked for lies within the interval of the point's: it may not be had."""
    low, _ = point.score_ci
    if wish.min_quality is None or low >= wish.min_quality:
        return ""
    return (
        f"Whether it keeps a score of {wish.min_quality:g} is not certain: its interval reaches down to {low:.3f}. "
        "More prompts (--n) would tell."
    )


def mixing(point: Foretold, recorded: Recorded) -> str:
    """One sentence where mixing requests keeps more of the score than a point in the same time and the intervals
    separate; nothing where they do not, or the draft alone was not timed."""
    settings = dict.fromkeys(m.setting for m in recorded.measurements)
    rows = summarise(recorded.measurements, settings, recorded.provenance)
    times = {setting_of(r): r["normalised_time"] for r in rows if r["normalised_time"] is not None}
    prompts = range(min((r["n"] for r in rows), default=0))
    measured = by_setting(recorded.measurements, kind=recorded.plan.judged, prompts=prompts)
    n = point.setting.num_speculative_tokens
    same = [s for s in measured if s.at_n(0) == point.setting.at_n(0)]
    mixed = mixture_in_time(measured, times, 1 / point.speedup, point.setting.temperature)
    if not same or mixed is None or len(prompts) < 2:
        return ""
    ours = measured[min(same, key=lambda s: abs(s.num_speculative_tokens - n))]
    gain, (low, high) = paired_difference(mixed.scores, ours.scores)
    if low <= 0:
        return ""
    return (
        f"Mixing requests keeps more in the same time: {100 * mixed.share:.0f} % of them to {mixed.strict.verifier}, "
        f"the others to the draft alone, scores {mixed.scores.mean():.3f}, {gain:+.3f} ({low:+.3f} to {high:+.3f})."
    )
