"""From the rows of a bench along the dial to a head's calibration."""

from __future__ import annotations

from collections.abc import Sequence

from diversed.evaluation.settings import TARGET_ONLY
from diversed.evaluation.sweep import Row
from diversed.verifiers.calibration import Calibration, CalibrationPoint


def calibration_of(rows: Sequence[Row]) -> Calibration:
    """The calibration of the one head among the rows, at their one N and temperature, target-only decoding beside it.

    Raises:
        ValueError: rows of several N or temperatures, or without speed.
    """
    mine = [r for r in rows if r["quality"] is not None]
    if any(r["normalised_time"] is None for r in mine):
        raise ValueError("timing_n=0 leaves the speed unmeasured: time at least one prompt")
    keys = ("verifier", "num_speculative_tokens", "temperature", "task")
    if len({tuple(r[k] for k in keys) for r in mine}) > 1:
        raise ValueError("rows: a calibration takes one head at one N and temperature")
    points = [
        CalibrationPoint(
            quality=r["quality"],
            acceptance=r["position_acceptance"],
            block_efficiency=r["block_efficiency"],
            normalised_time=r["normalised_time"],
            score=r["score"],
            score_ci=tuple(r["score_ci"]),
        )
        for r in mine
    ]
    wanted = ("target", "draft", "task", "split", "score", "dtype", "device", "threads", "timing_n", "seed")
    conditions = {k: mine[0]["provenance"].get(k) for k in wanted} if mine else {}
    if mine:
        conditions |= {k: mine[0][k] for k in ("num_speculative_tokens", "temperature", "n")}
    for r in rows:
        if r["verifier"] == TARGET_ONLY:
            conditions |= {
                "target_score": r["score"],
                "target_score_ci": r["score_ci"],
                "target_seconds_per_token": 1 / r["tokens_per_second"],
            }
    return Calibration.of(points, conditions)
