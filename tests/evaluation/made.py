"""A bench made up of known numbers: costs, keep probabilities and scores one can compute with by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

from diversed.engine.output import TimeSplit
from diversed.evaluation.settings import DRAFT_ONLY, TARGET_ONLY, Setting
from diversed.evaluation.sweep import LONGEST_BLOCK, Measurement
from diversed.theory import expected_blocks

STEP, DRAFT, PASS, EACH, VERDICT, REST = 0.010, 0.001, 0.011, 0.0002, 0.0005, 0.0003  # seconds
TOKENS, PROMPTS, TIMED = 40, 8, 6
SETTINGS = {  # acceptance at every position, and right answers out of eight
    Setting("lossless", None, 3): (0.4, 8),
    Setting("lossless", None, 5): (0.4, 8),
    Setting("static:0.5", None, 3): (0.7, 5),
    Setting("static:0.5", None, 5): (0.7, 5),
    Setting("static:0.1", None, 3): (0.9, 2),
    Setting("static:0.1", None, 5): (0.9, 2),
    Setting("head", 0.5, 3): (0.8, 8),
    Setting("head", 0.5, 5): (0.8, 7),
}
CONFIG = {
    "target": "big", "draft": "small", "task": "shop", "split": "test", "n": PROMPTS, "max_new_tokens": 64,
    "batch_size": PROMPTS, "timing_n": TIMED, "trace_n": PROMPTS, "seed": 0, "dtype": "float32",
}  # fmt: skip
PROVENANCE = CONFIG | {"score": "exact match", "device": "cpu", "threads": 1, "diversed": "0", "torch": "2"}


def one(setting: Setting, start: int, end: int, kind: str, rate: float, right: int) -> Measurement:
    n, width = end - start, setting.num_speculative_tokens
    blocks = expected_blocks([rate] * TOKENS, width) if width else float(TOKENS)
    alone = DRAFT if setting.verifier == DRAFT_ONLY else STEP
    seconds = {
        "prefill": 0.0,
        "draft": n * blocks * width * DRAFT,
        "target": n * (blocks * (PASS + width * EACH) if width else TOKENS * alone),
        "verification": n * blocks * VERDICT if width else 0.0,
        "rest": n * blocks * REST if width else 0.0,
        "compile": 7.0,  # once, so that no figure may contain it
    }
    assert list(seconds) == [f.name for f in fields(TimeSplit)]
    every_n = [expected_blocks([rate] * TOKENS, k) for k in range(1, LONGEST_BLOCK + 1)]
    trace = {
        "positions": [TOKENS] * n, "total_variation": [0.6 * TOKENS] * n, "acceptance": [rate * TOKENS] * n,
        "bias": [(rate - 0.4) * TOKENS] * n, "blocks": [every_n] * n,
    }  # fmt: skip
    return Measurement(
        setting,
        start,
        kind,  # type: ignore[arg-type]
        0,
        scores=[float(i < right) for i in range(start, end)],
        drafted=[100 if width else 0] * n,
        accepted=[round(100 * rate) if width else 0] * n,
        rejected=[100 - round(100 * rate) if width else 0] * n,
        target_calls=[blocks] * n,  # type: ignore[list-item]
        tokens=[TOKENS] * n,
        time=seconds,
        trace=trace if kind == "traced" else None,
        head="abc" if setting.quality is not None else None,
        trained_on="tally" if setting.quality is not None else None,
    )


def made_bench() -> list[Measurement]:
    alone = {Setting(TARGET_ONLY, None, 0): (0.0, 8), Setting(DRAFT_ONLY, None, 0): (0.0, 1)}
    found = []
    for setting, (rate, right) in (alone | SETTINGS).items():
        found += [one(setting, i, i + 1, "timed", rate, right) for i in range(TIMED)]
        found.append(one(setting, 0, PROMPTS, "scored", rate, right))
        if setting.num_speculative_tokens == 5:
            found.append(one(setting, 0, PROMPTS, "traced", rate, right))
    return found


def write_bench(path: Path, measurements: list[Measurement], **config: object) -> Path:
    settings = list(dict.fromkeys([Setting(TARGET_ONLY, None, 0), Setting(DRAFT_ONLY, None, 0), *SETTINGS]))
    lines = [
        {"config": CONFIG | config, "provenance": PROVENANCE | config},
        {"planned": [asdict(s) for s in settings], "further_seeds": []},
        *map(asdict, measurements),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
