"""The prompts of Spec-Bench (Xia et al. 2024) as a task of your own.

    DIVERSED_DATA=DATA diversed bench --task examples/spec_bench.py --target TARGET --draft DRAFT --n 24

DATA holds ``spec_bench/spec-bench.jsonl.gz``: rows with ``task``, ``turns`` and ``reference``. First turns only, and
only rows with a reference to score; the kinds of task take turns, so that the first n rows hold some of each. The score
is the mean of ROUGE-1, ROUGE-2 and ROUGE-L F against the reference, one measure for translations, summaries, sums and
answers alike: good enough to see where a verifier begins to spoil them.
"""

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diversed.tasks.contract import text_of
from diversed.tasks.rows import read_jsonl
from diversed.tasks.summaries import rouge_mean

SCORE_NAME = "ROUGE F"
MAX_NEW_TOKENS = 64


def rows(split: str) -> Iterator[dict[str, Any]]:
    if split != "test":  # Spec-Bench is for measuring, not for training
        return
    kinds = defaultdict(list)
    for _, row in read_jsonl(Path(os.environ["DIVERSED_DATA"]) / "spec_bench/spec-bench.jsonl.gz"):
        if row["reference"]:
            kinds[row["task"]].append(row)
    for row in itertools.chain.from_iterable(itertools.zip_longest(*kinds.values())):
        if row is not None:
            prompt = [{"role": "user", "content": row["turns"][0]}]
            yield {"prompt": prompt, "kind": row["task"], "reference": as_text(row["reference"])}


def as_text(reference: Any) -> str:
    return " ".join(map(str, reference)) if isinstance(reference, list) else str(reference)


def reward(prompts: Any, completions: list[Any], reference: list[str], **columns: Any) -> list[float]:
    return [rouge_mean(text_of(c), right) for c, right in zip(completions, reference, strict=True)]
