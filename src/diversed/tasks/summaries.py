"""Summaries of CNN / Daily Mail articles (See et al. 2017, version 3.0.0), scored by ROUGE-2 F."""

from __future__ import annotations

import functools
import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARTICLE_CHARACTERS = 1500  # longer articles are cut: small models have small contexts
INSTRUCTION = "Summarize the following article in a few sentences."


@dataclass(frozen=True)
class Article:
    text: str
    highlights: str

    @property
    def chat(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{INSTRUCTION}\n\n{self.text[:ARTICLE_CHARACTERS]}"}]


def cnndm(split: str, n: int, data_dir: str | Path | None = None) -> list[Article]:
    """The first ``n`` rows of ``cnndm/cnndm-SPLIT.jsonl.gz`` under ``data_dir`` (or ``$DIVERSED_DATA``)."""
    folder = data_dir or os.environ.get("DIVERSED_DATA")
    if not folder:
        raise ValueError(
            "task=cnndm reads its articles from a folder: give --data-dir (or set DIVERSED_DATA) to one that holds "
            "cnndm/cnndm-test.jsonl.gz, JSON lines with 'article' and 'highlights'"
        )
    path = Path(folder) / "cnndm" / f"cnndm-{split}.jsonl.gz"
    if not path.is_file():
        raise ValueError(f"data_dir={str(folder)!r} has no {path.relative_to(folder)}: check the folder and the split")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(n), strict=False)]
    if len(rows) < n:
        raise ValueError(f"n={n} is more than the {len(rows)} rows of {path.name}")
    return [Article(row["article"], row["highlights"]) for row in rows]


def rouge2(completion: str, reference: str) -> float:
    """ROUGE-2 F1 with stemming (rouge-score)."""
    return float(_scorer().score(reference, completion)["rouge2"].fmeasure)


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise ValueError("ROUGE needs the extra 'eval': pip install 'diversed[eval]'") from error
    return rouge_scorer.RougeScorer(["rouge2"], use_stemmer=True)
