"""From measurements to rows: one for each setting, with the keys every command's JSON shares."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from diversed.evaluation.prediction import foretell, traced
from diversed.evaluation.settings import DRAFT_ONLY, TARGET_ONLY, Setting
from diversed.evaluation.statistics import Interval, mean_interval, median_interval, ratio_interval
from diversed.evaluation.sweep import PARTS, Kind, Measurement, Row, by_prompt, judged_kind


def summarise(measurements: Sequence[Measurement], settings: Iterable[Setting], provenance: Row) -> list[Row]:
    """One row per setting that was measured; what does not apply is None.

    ``normalised_time`` is the median over prompts, one at a time, of time per token over that of target-only decoding
    on the same prompt, at the same temperature in the same run; ``speedup`` its inverse. With several seeds a prompt's
    score is its mean over them, and ``seed`` lists them. ``bias`` is the mean TV(nu, p) over positions of texts that
    follow nu. ``predicted_speedup`` is what theory makes of recorded texts and measured costs.
    """
    judged = judged_kind(provenance["batch_size"])
    return [
        row_of(measurements, setting, judged, provenance)
        for setting in settings
        if any(m.setting == setting and m.kind == judged for m in measurements)
    ]


def row_of(measurements: Sequence[Measurement], setting: Setting, judged: Kind, provenance: Row) -> Row:
    mine = [m for m in measurements if m.setting == setting and m.kind == judged]
    counted = {
        name: by_prompt(mine, name) for name in ("scores", "drafted", "accepted", "rejected", "target_calls", "tokens")
    }
    score, score_ci = mean_interval([statistics.fmean(v) for v in counted["scores"].values()])
    drafted, accepted, rejected, calls, tokens = (
        [sum(v) for v in counted[name].values()]
        for name in ("drafted", "accepted", "rejected", "target_calls", "tokens")
    )
    examined = [a + r for a, r in zip(accepted, rejected, strict=True)]
    rate, rate_ci = pooled(accepted, drafted)
    at_position, at_position_ci = pooled(accepted, examined)
    seeds = sorted({m.seed for m in mine})
    baseline = Setting(TARGET_ONLY, None, 0, setting.temperature)
    ours, alone = time_per_token(measurements, setting), time_per_token(measurements, baseline)
    both = sorted(ours.keys() & alone.keys())
    normalised, normalised_ci = median_interval([ours[i] / alone[i] for i in both]) if both else (None, None)
    speed = None if normalised is None else 1 / normalised
    speed_ci = None if normalised_ci is None else (1 / normalised_ci[1], 1 / normalised_ci[0])
    foretold = foretell(measurements, setting) if setting.speculates else None
    bias, bias_ci = traced_mean(measurements, setting, "bias")
    return {
        "verifier": setting.verifier,
        "weight": setting.weight,
        "quality": setting.quality,
        "num_speculative_tokens": setting.num_speculative_tokens,
        "temperature": setting.temperature,
        "task": provenance["task"],
        "n": len(counted["scores"]),
        "score": score,
        "score_ci": score_ci,
        "acceptance_rate": rate,
        "acceptance_ci": rate_ci,
        "position_acceptance": at_position,
        "position_acceptance_ci": at_position_ci,
        "block_efficiency": 1 + sum(accepted) / sum(calls) if setting.speculates else None,
        "tokens_per_target_call": sum(tokens) / sum(calls) if setting.verifier != DRAFT_ONLY else None,
        "tokens_per_second": 1 / statistics.median(ours.values()) if ours else None,
        "normalised_time": normalised,
        "speedup": speed,
        "speedup_ci": speed_ci,
        "bias": bias,
        "bias_ci": bias_ci,
        "total_variation": traced_mean(measurements, setting, "total_variation")[0],
        "time_split": time_split(measurements, setting),
        "predicted_speedup": foretold.speedup if foretold else None,
        "predicted_speedup_ci": foretold.speedup_ci if foretold else None,
        "predicted_over_measured": foretold.speedup / speed if foretold and speed else None,
        "trained_on": next((m.trained_on for m in mine), None),
        "seed": seeds if len(seeds) > 1 else seeds[0],
        "provenance": provenance,
    }


def pooled(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float | None, Interval | None]:
    return ratio_interval(numerators, denominators) if sum(denominators) else (None, None)


def time_per_token(measurements: Sequence[Measurement], setting: Setting) -> dict[int, float]:
    """{prompt: seconds per token}, the prompt's prefill included; the median over seeds."""
    found: dict[int, list[float]] = {}
    for m in measurements:
        if m.kind == "timed" and m.setting == setting:
            found.setdefault(m.start, []).append(m.seconds / sum(m.tokens))
    return {i: statistics.median(v) for i, v in found.items()}


def time_split(measurements: Sequence[Measurement], setting: Setting) -> dict[str, float] | None:
    """Seconds per token of each part of the time, over the timed prompts; None where none was timed, or by a peer."""
    timed = [m for m in measurements if m.kind == "timed" and m.setting == setting]
    if not timed or setting.is_peer:
        return None
    tokens = sum(sum(m.tokens) for m in timed)
    return {part: sum(m.time[part] for m in timed) / tokens for part in PARTS}


def traced_mean(
    measurements: Sequence[Measurement], setting: Setting, name: str
) -> tuple[float | None, Interval | None]:
    """Mean over positions of what the traced pass of this verifier, quality and temperature recorded."""
    traces = [m.trace for m in traced(measurements, setting) if m.trace]
    sums = [value for trace in traces for value in trace[name]]
    positions = [count for trace in traces for count in trace["positions"]]
    if not sums or any(value is None for value in sums) or not np.sum(positions):
        return None, None
    return ratio_interval(sums, positions)


def setting_of(row: Row) -> Setting:
    return Setting(row["verifier"], row["quality"], row["num_speculative_tokens"], row["temperature"])


def at_one_n(rows: Sequence[Row]) -> tuple[int, list[Row]]:
    """The middle one of the measured N, and the rows at it, with those that do not speculate."""
    counts = sorted({r["num_speculative_tokens"] for r in rows} - {0})
    n = counts[len(counts) // 2] if counts else 0
    return n, [r for r in rows if r["num_speculative_tokens"] in (0, n)]
