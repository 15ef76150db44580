"""German to English: WMT16 from the Hub, or NTREX-128 (Federmann et al. 2022) from a folder.

A row's score is its sentence-level BLEU (sacrebleu) / 100. Published figures are corpus-level BLEU, which is not the
mean of these: compare settings with one another, not with papers. The reward is the sentence's chrF / 100, which is
denser: BLEU is near 0 for a sentence without a common run of four words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diversed.tasks.contract import Example, Task, text_of
from diversed.tasks.rows import Row, Source, bucket, load_rows

SHOTS = 5
STOPS = ("\n",)
INSTRUCTION = "Translate from German to English. Answer with the translation alone."


def _split_of(row: Row) -> str:
    """By document, about 60 / 10 / 30: sentences of one text must not be on both sides."""
    tenth = bucket(str(row["doc_id"]), 10)
    return "train" if tenth < 6 else "validation" if tenth == 6 else "test"


_FILE = (("ntrex_de_en/ntrex-de-en.jsonl.gz", 0, None),)
_SOURCE = Source(
    "wmt",
    ("wmt/wmt16", "de-en"),
    {"train": "train", "validation": "validation", "test": "test"},
    {"train": _FILE, "validation": _FILE, "test": _FILE},
    text=lambda row: str(row["translation"]["de"]),
    split_of=_split_of,
)


def load(name: str, *, split: str, n: int | None, seed: int, data_dir: str | Path | None, chat: bool) -> Task:
    """Text prompts show the first 5 training pairs, which are not among the training examples."""
    skip = SHOTS if split == "train" else 0
    rows = load_rows(_SOURCE, split, n, data_dir, skip)
    shots = [] if chat else load_rows(_SOURCE, "train", SHOTS, data_dir)
    before = "".join(f"German: {s['translation']['de']}\nEnglish: {s['translation']['en']}\n\n" for s in shots)
    examples = []
    for row in rows:
        german, english = row["translation"]["de"], row["translation"]["en"]
        prompt: Any = f"{before}German: {german}\nEnglish:"
        if chat:
            prompt = [{"role": "user", "content": f"{INSTRUCTION}\n\n{german}"}]
        examples.append(Example(prompt, row | {"reference": english}, english if chat else f" {english}"))
    stops = () if chat else STOPS
    return Task(name, split, examples, bleu, chrf, "sentence BLEU / 100", 128, stops, partial_reward=True)


def _sentences(measure: str, completions: Sequence[Any], reference: Sequence[str]) -> list[float]:
    try:
        import sacrebleu
    except ImportError as error:
        raise ValueError("BLEU and chrF need the extra 'eval': pip install 'diversed[eval]'") from error
    one = getattr(sacrebleu, measure)
    texts = (text_of(c, STOPS).strip() for c in completions)
    # min: a perfect sentence comes out at 100.00000000000004 now and then
    return [min(1.0, float(one(text, [right]).score) / 100) for text, right in zip(texts, reference, strict=True)]


def bleu(prompts: Any, completions: Sequence[Any], reference: Sequence[str], **columns: Any) -> list[float]:
    """Sentence-level BLEU / 100 per completion (sacrebleu's ``sentence_bleu``: effective order, exp smoothing)."""
    return _sentences("sentence_bleu", completions, reference)


def chrf(prompts: Any, completions: Sequence[Any], reference: Sequence[str], **columns: Any) -> list[float]:
    """Sentence-level chrF2 / 100 per completion (sacrebleu's ``sentence_chrf``)."""
    return _sentences("sentence_chrf", completions, reference)
