"""GSM8K (Cobbe et al. 2021): grade-school word problems, scored by the final number.

The data set has no validation split: the last 500 rows of train serve as one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from diversed.tasks.contract import Example, Task, text_of
from diversed.tasks.rows import Source, load_rows

SHOTS = 8
STOPS = ("\nQuestion:",)
INSTRUCTION = 'Solve the problem step by step. End with a line "#### " followed by the answer as a number alone.'

_SOURCE = Source(
    "gsm8k",
    ("openai/gsm8k", "main"),
    {"train": "train[:-500]", "validation": "train[-500:]", "test": "test"},
    {
        "train": (("gsm8k/gsm8k-train.jsonl.gz", 0, 6973),),
        "validation": (("gsm8k/gsm8k-train.jsonl.gz", 6973, None),),
        "test": (("gsm8k/gsm8k-test.jsonl.gz", 0, None),),
    },
    text=lambda row: str(row["question"]),
)


def load(name: str, *, split: str, n: int | None, seed: int, data_dir: str | Path | None, chat: bool) -> Task:
    """Text prompts show the first 8 training problems, without their calculator marks ``<<...>>``; these 8 are not
    among the training examples."""
    skip = SHOTS if split == "train" else 0
    rows = load_rows(_SOURCE, split, n, data_dir, skip)
    shots = [] if chat else load_rows(_SOURCE, "train", SHOTS, data_dir)
    before = "".join(f"Question: {shot['question']}\nAnswer: {plain(shot['answer'])}\n\n" for shot in shots)
    examples = []
    for row in rows:
        final = str(final_number(row["answer"]))
        prompt: Any = f"{before}Question: {row['question']}\nAnswer:"
        if chat:
            prompt = [{"role": "user", "content": f"{INSTRUCTION}\n\n{row['question']}"}]
        # `solution` is what TRL's accuracy_reward compares with.
        solution = plain(row["answer"])
        columns = row | {"final_answer": final, "solution": final}
        examples.append(Example(prompt, columns, solution if chat else f" {solution}"))
    return Task(name, split, examples, exact_match, exact_match, "exact match", 256, () if chat else STOPS)


def plain(answer: str) -> str:
    return re.sub(r"<<.*?>>", "", answer)


_NUMBER = r"-?\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_STATED = re.compile(r"####\s*(" + _NUMBER + ")")


def final_number(text: str) -> Decimal | None:
    """The number after the first ``####``, or else the last number of the text, or None where there is none.

    Compared by value: ``1,200``, ``$1200`` and ``1200.00`` are one number.
    """
    stated = _STATED.search(text)
    found = stated.group(1) if stated else next(iter(re.findall(_NUMBER, text)[::-1]), None)
    if found is None:
        return None
    try:
        return Decimal(found.replace(",", "").replace("$", ""))
    except InvalidOperation:  # "--3"
        return None


def exact_match(prompts: Any, completions: Sequence[Any], final_answer: Sequence[str], **columns: Any) -> list[float]:
    """1 where the final number is the right one, else 0. What follows a made-up next question does not count."""
    given = (final_number(text_of(c, STOPS)) for c in completions)
    return [
        float(number is not None and number == Decimal(right))
        for number, right in zip(given, final_answer, strict=True)
    ]
