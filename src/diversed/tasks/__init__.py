"""Tasks: prompts, the columns that go with them, scores and rewards.

A score or a reward follows TRL's contract, so that functions written for one serve the other: it is called with
``prompts``, ``completions`` and every column of the rows as a keyword list, and returns a number per completion.
:func:`judge` calls it and checks what comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from diversed.tasks import code, maths, own, summaries, translation, word_problems
from diversed.tasks.contract import SPLITS, Example, RewardFunction, Task, judge, request
from diversed.tasks.own import load_function

__all__ = ["SPLITS", "TASKS", "Example", "RewardFunction", "Task", "judge", "load_function", "load_task", "request"]

_LOADERS: dict[str, Callable[..., Task]] = {
    "shop": word_problems.load,
    "tally": word_problems.load,
    "gsm8k": maths.load,
    "mbpp": code.load_mbpp,
    "humaneval": code.load_humaneval,
    "cnndm": summaries.load,
    "xsum": summaries.load,
    "wmt": translation.load,
}
TASKS: tuple[str, ...] = tuple(_LOADERS)


def load_task(
    name: str,
    *,
    split: str = "test",
    n: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    chat: bool = False,
    reward: str | None = None,
    judged: bool = True,
) -> Task:
    """The first ``n`` examples of a task's split, with its score and its reward.

    Args:
        name: one of ``TASKS``; or your own: a JSON lines file (``rows.jsonl``), or a Python file (``my_task.py``),
            see :mod:`diversed.tasks.own`.
        split: ``train``, ``validation`` or ``test``. No prompt is in two of them.
        n: how many; None takes all rows. The word problems are endless: None means 4,000 of them for training and
            1,000 otherwise.
        seed: what the word problems are drawn from. Rows keep their order.
        data_dir: the folder that holds the data sets (default: ``$DIVERSED_DATA``); without one they come from the
            Hub through ``datasets``.
        chat: prompts as chats, for models with a chat template; else text to continue, with examples before it
            where the published recipe has them. The word problems are always text.
        reward: ``file.py:function`` or ``package.module:function`` instead of the task's own reward.
        judged: False where only prompts and columns are wanted; rows of your own then need no reward.

    Raises:
        ValueError: an unknown task or split, data that is not there, fewer rows than ``n``, with what to do.
    """
    if n is not None and n < 1:
        raise ValueError(f"n={n} must be at least 1")
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown: use one of {', '.join(SPLITS)}")
    if own.is_file_task(name):
        return own.load(name, split=split, n=n, chat=chat, reward=reward, judged=judged)
    if name not in _LOADERS:
        raise ValueError(
            f"task={name!r} is unknown: use one of {', '.join(TASKS)}, or your own file: rows.jsonl or my_task.py"
        )
    task = _LOADERS[name](name, split=split, n=n, seed=seed, data_dir=data_dir, chat=chat)
    if reward is None:
        return task
    # What the task says of its own reward on unfinished text is not known of another one.
    return replace(task, reward=load_function(reward), partial_reward=False)
