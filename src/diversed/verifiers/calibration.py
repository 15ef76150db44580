"""What each setting of the dial was measured to cost and to gain: the map that lets a request name its wish."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

FILE = "calibration.json"  # beside a head's config.json


@dataclass(frozen=True)
class CalibrationPoint:
    """One setting of the dial. The score and its interval are as measured; see :class:`Calibration` for the rest."""

    quality: float
    acceptance: float  #: per examined position
    block_efficiency: float
    normalised_time: float  #: time per token over that of target-only decoding
    score: float
    score_ci: tuple[float, float]


@dataclass(frozen=True)
class Calibration:
    """Measured points, by rising quality, made monotone: towards 1 acceptance and block efficiency do not rise, and
    normalised time and score do not fall. What was measured otherwise is noise and has been averaged away.

    ``conditions`` says where it holds: task, temperature, N, number of prompts, device. Between points values are
    interpolated; a request's own speed depends on its machine and batch.
    """

    points: tuple[CalibrationPoint, ...]
    conditions: dict[str, Any]

    @classmethod
    def of(cls, measured: Sequence[CalibrationPoint], conditions: dict[str, Any]) -> Calibration:
        """From points in any order, two or more."""
        if len(measured) < 2:
            raise ValueError(f"quality: a calibration needs two settings of the dial or more, and got {len(measured)}")
        points = sorted(measured, key=lambda p: p.quality)
        if len({p.quality for p in points}) < len(points):
            raise ValueError("quality: a calibration takes each setting of the dial once")
        times, scores = monotone([p.normalised_time for p in points]), monotone([p.score for p in points])
        rates = [-v for v in monotone([-p.acceptance for p in points])]
        lengths = [-v for v in monotone([-p.block_efficiency for p in points])]
        smooth = [
            replace(p, acceptance=rate, block_efficiency=length, normalised_time=time, score=score)
            for p, rate, length, time, score in zip(points, rates, lengths, times, scores, strict=True)
        ]
        return cls(tuple(smooth), conditions)

    def quality_for(self, *, min_quality: float | None = None, max_normalised_time: float | None = None) -> float:
        """The dial for a wish: the fastest setting with at least the score ``min_quality``; the best one that takes at
        most ``max_normalised_time``; with both, the fastest that meets both.

        Raises:
            ValueError: nothing measured meets it; the message names the nearest point.
        """
        if min_quality is None and max_normalised_time is None:
            raise ValueError("min_quality, max_normalised_time: give at least one of them")
        first, last = self.points[0], self.points[-1]
        lowest, highest = first.quality, last.quality
        if min_quality is not None:
            if last.score < min_quality:
                raise ValueError(
                    f"min_quality={min_quality:g}: the best measured score is {last.score:.3f}, at quality "
                    f"{last.quality:g} (normalised time {last.normalised_time:.2f})"
                )
            lowest = crossing([p.quality for p in self.points], [p.score for p in self.points], min_quality)
        if max_normalised_time is not None:
            if first.normalised_time > max_normalised_time:
                raise ValueError(
                    f"max_normalised_time={max_normalised_time:g}: the shortest measured is "
                    f"{first.normalised_time:.2f}, at quality {first.quality:g} (score {first.score:.3f})"
                )
            backwards = self.points[::-1]
            times = [-p.normalised_time for p in backwards]
            highest = crossing([p.quality for p in backwards], times, -max_normalised_time)
        if lowest > highest:
            at = self.at(lowest)
            raise ValueError(
                f"min_quality={min_quality:g} with max_normalised_time={max_normalised_time:g}: no quality gives both. "
                f"Nearest: quality {lowest:.3g}, with a score of {at.score:.3f} at time {at.normalised_time:.2f}"
            )
        return highest if min_quality is None else lowest

    def at(self, quality: float) -> CalibrationPoint:
        """Interpolated figures at any quality between the first and the last point; those of the end beyond them."""
        for low, high in zip(self.points, self.points[1:], strict=False):
            if quality <= high.quality:
                share = max(0.0, (quality - low.quality) / (high.quality - low.quality))
                a, b = asdict(low), asdict(high)
                mixed = {k: (1 - share) * a[k] + share * b[k] for k in a if k not in ("quality", "score_ci")}
                ends = [(1 - share) * x + share * y for x, y in zip(a["score_ci"], b["score_ci"], strict=True)]
                return CalibrationPoint(quality=quality, score_ci=(ends[0], ends[1]), **mixed)
        return self.points[-1]

    def save(self, folder: str | Path) -> Path:
        """Write ``calibration.json`` into a head's folder."""
        path = Path(folder) / FILE
        content = {"conditions": self.conditions, "points": [asdict(p) for p in self.points]}
        try:
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"head: {str(path)!r} cannot be written ({error.strerror})") from error
        return path


def load_calibration(source: str | Path, **kwargs: Any) -> Calibration | None:
    """The calibration beside a head in a folder or on the Hub; None where there is none."""
    path = Path(source) / FILE
    if not Path(source).is_dir():
        try:
            path = Path(hf_hub_download(str(source), FILE, **kwargs))
        except (OSError, ValueError):  # no such file there, or no way to ask
            return None
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        points = (CalibrationPoint(**(p | {"score_ci": tuple(p["score_ci"])})) for p in content["points"])
        return Calibration(tuple(points), content["conditions"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is no calibration ({error}): make it anew with diversed calibrate") from error


def monotone(values: Sequence[float]) -> list[float]:
    """The nearest non-falling sequence in least squares: pool adjacent violators (Ayer et al. 1955)."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]


def crossing(xs: Sequence[float], ys: Sequence[float], y: float) -> float:
    """Where the line through points of non-falling ``ys`` first reaches ``y``; its last y must."""
    if ys[0] >= y:
        return xs[0]
    i = next(i for i, value in enumerate(ys) if value >= y)
    return xs[i - 1] + (xs[i] - xs[i - 1]) * (y - ys[i - 1]) / (ys[i] - ys[i - 1])
