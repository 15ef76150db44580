"""Heads of several training seeds as one method: its score, and its gain over each rule, at equal acceptance.

    python benchmarks/seeds.py docs/results/smollm2-xsum/first-draft-t1*

Give folders of ``diversed bench`` that measured one task on the same prompts; heads trained with different seeds are
named alike but for a last ``-SEED``. A head's curve runs through its qualities and lossless verification, a rule's
through its settings and lossless, that of static weights on to the draft alone. In ``mixing requests``
some are verified lossless and the others left to the draft alone, a straight line. All are read off at the same
acceptance per position, by linear interpolation, and a method's curve is the mean of its heads'. Intervals are 95 %,
from a paired bootstrap over prompts; how much heads differ shows in the rows of the seeds. A rule measured in several
folders counts once, a setting that has not met all prompts yet not at all.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from diversed.evaluation.compare import MIXING, Measured, Scores, by_setting, curve_at, first_all, mixing_requests
from diversed.evaluation.statistics import percentile_interval
from diversed.evaluation.sweep import Measurement, read_measurements

RULES = ("static", "entropy", "fuzzy-tv", "opening", MIXING)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
# What makes answers comparable, and chunks the same ones.
SAME = ("target", "draft", "task", "split", "n", "examples", "max_new_tokens", "seed", "batch_size")


def read(folders: list[Path]) -> tuple[list[Measurement], int]:
    """Every measurement once, the first found, and the number of prompts."""
    found: dict[object, Measurement] = {}
    first: dict[str, Any] = {}
    settings: set[tuple[int, float]] = set()
    for folder in folders:
        recorded = read_measurements(folder / "measurements.jsonl")
        config = {k: recorded.config.get(k) for k in SAME}
        first = first | {k: v for k, v in config.items() if first.get(k) is None}  # not every file names its examples
        if any(v not in (None, first[k]) for k, v in config.items()):
            sys.exit(f"{folder} and {folders[0]} measured different things: {config} and {first}")
        for m in recorded.measurements:
            if found.setdefault(m.key, m).head != m.head:
                sys.exit(f"{folder}: another head than the first one's is called {m.setting.verifier}: rename it")
            settings.add((m.setting.num_speculative_tokens, m.setting.temperature))
    if len({n for n, _ in settings} - {0}) > 1 or len({t for _, t in settings}) > 1:
        sys.exit("the folders hold several N or temperatures, and curves are read off at one of each")
    return list(found.values()), int(first["n"])


def curves(measured: list[Measured]) -> dict[str, list[Measured]]:
    """The settings of every head and rule, with the ends of its curve."""
    ends = [m for m in measured if m.setting.verifier == "lossless"]
    draft = next((m for m in measured if m.setting.verifier == "draft-only"), None)
    mixed = mixing_requests(ends, draft)
    found = {"static": list(mixed or ends), MIXING: mixed}  # the draft alone is static:0
    for m in measured:
        family = m.setting.verifier if m.setting.quality is not None else m.setting.verifier.split(":")[0]
        if m.setting.quality is not None or family in RULES:
            found.setdefault(family, list(ends)).append(m)
    return found


def method_of(head: str) -> str:
    """A head's name without its training seed."""
    return re.sub(r"-\d+$", "", head)


def show(scores: Scores, form: str = "+.4f") -> str:
    """The value on the prompts as they are, and the interval over resamples."""
    interval = percentile_interval(scores[1:])
    if interval is None or np.isnan(scores[0]):
        return "–"
    return f"{scores[0]:{form}} ({interval[0]:{form}} to {interval[1]:{form}})"


def print_table(measurements: list[Measurement], n: int) -> None:
    measured = by_setting(measurements, kind="scored", prompts=range(n))
    target = next(m.scores for s, m in measured.items() if s.verifier == "target-only")
    weights = first_all(n, draws=2000, seed=0)
    alone = weights @ target / n
    found = curves(list(measured.values()))
    heads = sorted(name for name in found if name not in RULES)
    methods = sorted({method_of(name) for name in heads})
    print(f"n = {n} prompts; target-only {show(alone, '.4f')}\n")
    columns = ["acceptance", "verifier", "score", "over target", *(f"over {rule}" for rule in RULES)]
    print(f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|")
    for acceptance in ACCEPTANCES:
        at = np.full(len(weights), acceptance)
        read_off = {name: curve_at(weights, curve, at) for name, curve in found.items()}
        for method in methods:
            own = [name for name in heads if method_of(name) == method]
            rows = {name: read_off[name] for name in own}
            if len(own) > 1:
                rows[f"**{method}, mean of {len(own)}**"] = np.mean(list(rows.values()), axis=0)
            for name, scores in rows.items():
                gains = [show(scores - read_off[rule]) if rule in read_off else "–" for rule in RULES]
                print(
                    f"| {acceptance} | {name} | {show(scores, '.4f')} | {show(scores - alone)} | {' | '.join(gains)} |"
                )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print_table(*read([Path(name) for name in sys.argv[1:]]))
