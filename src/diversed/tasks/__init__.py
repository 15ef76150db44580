"""Tasks: prompts, references and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diversed.tasks import summaries, word_problems


@dataclass(frozen=True)
class Example:
    prompt: str | Sequence[Mapping[str, str]]  #: text to continue, or a chat
    reference: Any


@dataclass(frozen=True)
class Task:
    """Examples and how to score a completion. ``score(completion, reference)`` lies in [0, 1]."""

    name: str
    examples: list[Example]
    score: Callable[[str, Any], float]
    score_name: str
    max_new_tokens: int


TASKS = ("shop", "tally", "cnndm")


def load_task(
    name: str, *, n: int, split: word_problems.Split = "test", seed: int = 0, data_dir: str | Path | None = None
) -> Task:
    """The first ``n`` examples of a task's split; the word problems make theirs from ``seed``.

    Raises:
        ValueError: an unknown task, or data that is not there, with what to do.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    if name in word_problems.FAMILIES:
        drawn = word_problems.problems(split, n, seed=seed, family=name)
        examples = [Example(p.prompt, p) for p in drawn]
        return Task(name, examples, lambda text, p: word_problems.score(p, text), "exact match", max_new_tokens=96)
    if name == "cnndm":
        rows = summaries.cnndm(split, n, data_dir)
        examples = [Example(row.chat, row.highlights) for row in rows]
        return Task(name, examples, summaries.rouge2, "ROUGE-2 F", max_new_tokens=64)
    raise ValueError(f"task={name!r} is unknown: use one of {', '.join(TASKS)}")
