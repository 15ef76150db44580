"""Summaries: CNN / Daily Mail (See et al. 2017, version 3.0.0) and XSum (Narayan et al. 2018).

The score is ROUGE-2 F with stemming (rouge-score), for XSum on the first 32 words of the completion, as published.
The reward is that with a little of ROUGE-1 and ROUGE-L F of the same text: ROUGE-2 alone is 0 for many short samples of
a small model and tells them not apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diversed.tasks.contract import Example, RewardFunction, Task, text_of
from diversed.tasks.rows import Source, load_rows

ARTICLE_CHARACTERS = 1500  # longer articles are cut: small models have small contexts
XSUM_WORDS = 32  # of a completion are scored
INSTRUCTIONS = {
    "cnndm": "Summarize the following article in a few sentences.",
    "xsum": "Summarize the following article in one sentence.",
}
STOPS = ("\n\n", "\nArticle:")

_SOURCES = {
    "cnndm": Source(
        "cnndm",
        ("abisee/cnn_dailymail", "3.0.0"),
        {"train": "train", "validation": "validation", "test": "test"},
        {
            # The folder's train excerpts are few, so what validation can spare goes to training as well.
            "train": (("cnndm/cnndm-train-excerpts.jsonl.gz", 0, None), ("cnndm/cnndm-validation.jsonl.gz", 100, None)),
            "validation": (("cnndm/cnndm-validation.jsonl.gz", 0, 100),),
            "test": (("cnndm/cnndm-test.jsonl.gz", 0, None),),
        },
        text=lambda row: str(row["article"]),
        key_characters=200,
    ),
    "xsum": Source(
        "xsum",
        ("EdinburghNLP/xsum", None),
        {"train": "train", "validation": "validation", "test": "test"},
        {
            "train": (("xsum/xsum-train-excerpts.jsonl.gz", 0, None), ("xsum/xsum-validation.jsonl.gz", 100, None)),
            "validation": (("xsum/xsum-validation.jsonl.gz", 0, 100),),
            "test": (("xsum/xsum-test.jsonl.gz", 0, None),),
        },
        text=lambda row: str(row["document"]),
        key_characters=200,
    ),
}
_COLUMNS = {"cnndm": ("article", "highlights"), "xsum": ("document", "summary")}


def load(name: str, *, split: str, n: int | None, seed: int, data_dir: str | Path | None, chat: bool) -> Task:
    article, summary = _COLUMNS[name]
    examples = [
        Example(
            _prompt(name, row[article], chat),
            row | {"reference": row[summary]},
            row[summary] if chat else f" {row[summary]}",
        )
        for row in load_rows(_SOURCES[name], split, n, data_dir)
    ]
    score, reward = _judges(XSUM_WORDS if name == "xsum" else None)
    title = "ROUGE-2 F" + (f", first {XSUM_WORDS} words" if name == "xsum" else "")
    return Task(name, split, examples, score, reward, title, 64, () if chat else STOPS, partial_reward=True)


def _prompt(name: str, article: str, chat: bool) -> str | list[dict[str, str]]:
    cut = article[:ARTICLE_CHARACTERS]
    if chat:
        return [{"role": "user", "content": f"{INSTRUCTIONS[name]}\n\n{cut}"}]
    return f"Article: {cut}\n\nSummary:"


def _judges(words: int | None) -> tuple[RewardFunction, RewardFunction]:
    def judged(measure: Callable[[str, str], float]) -> RewardFunction:
        def function(prompts: Any, completions: Sequence[Any], reference: Sequence[str], **columns: Any) -> list[float]:
            texts = (text_of(c, STOPS) for c in completions)
            if words is not None:
                texts = (" ".join(text.split()[:words]) for text in texts)
            return [measure(text, right) for text, right in zip(texts, reference, strict=True)]

        function.__name__ = measure.__name__
        return function

    return judged(rouge2), judged(rouge_blend)


def rouge2(completion: str, reference: str) -> float:
    """ROUGE-2 F1 with stemming (rouge-score), in [0, 1]."""
    return float(_scorer().score(reference, completion)["rouge2"].fmeasure)


def rouge_blend(completion: str, reference: str) -> float:
    """0.8 ROUGE-2 + 0.1 ROUGE-1 + 0.1 ROUGE-L, all F1 with stemming (rouge-score), in [0, 1]."""
    scores = _scorer().score(reference, completion)
    return float(sum(scores[k].fmeasure * w for k, w in (("rouge2", 0.8), ("rouge1", 0.1), ("rougeL", 0.1))))


def rouge_mean(completion: str, reference: str) -> float:
    """The mean of ROUGE-1, ROUGE-2 and ROUGE-L F1 with stemming (rouge-score), in [0, 1]."""
    scores = _scorer().score(reference, completion)
    return float(sum(scores[kind].fmeasure for kind in ("rouge1", "rouge2", "rougeL")) / 3)


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise ValueError("ROUGE needs the extra 'eval': pip install 'diversed[eval]'") from error
    return rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
