"""What a task is, and how its functions are called."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diversed.engine import ModelPair

RewardFunction = Callable[..., Sequence[float]]
"""TRL's contract: ``f(prompts, completions, **columns)`` returns a float per completion."""

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Example:
    prompt: str | Sequence[Mapping[str, str]]  #: text to continue, or a chat
    columns: Mapping[str, Any]  #: the row's other columns, handed to score and reward as keyword lists
    #: A right answer as text that goes on from the prompt, where the row has one: what a draft can learn from.
    completion: str | None = None


@dataclass(frozen=True)
class Task:
    """Examples of one split, and how completions of them are judged. Call ``score`` and ``reward`` by :func:`judge`."""

    name: str
    split: str
    examples: list[Example]
    score: RewardFunction  #: as published, in [0, 1]
    reward: RewardFunction  #: for training; the score itself where nothing better is known
    score_name: str
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    #: Whether ``reward`` of an unfinished answer says what it has earned so far: true of overlap with a reference,
    #: false of a result that stands at the end. Training then knows which token earned what.
    partial_reward: bool = False


def digest(examples: Sequence[Example]) -> str:
    """How many examples there are, and which: a hash of prompts and columns."""
    rows = [[e.prompt if isinstance(e.prompt, str) else list(e.prompt), dict(e.columns)] for e in examples]
    try:
        text = json.dumps(rows, sort_keys=True, default=lambda x: type(x).__name__)
    except TypeError:  # keys that have no order or are no JSON
        text = repr(rows)
    return f"{len(examples)} examples, {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def request(task: Task, examples: Sequence[Example]) -> dict[str, Any]:
    """The arguments of ``generate`` that answer these examples: prompts or chats, and where an answer ends."""
    prompts = [e.prompt for e in examples]
    return {
        "prompts" if isinstance(prompts[0], str) else "messages": prompts,
        "max_new_tokens": task.max_new_tokens,
        "stop_strings": list(task.stop_strings) or None,
    }


def check_prompts(pair: ModelPair, task: Task, rows: Iterable[int] | None = None) -> None:
    """Encode prompts of a task (``rows``; None: all) before anything is paid for: one that the engine refuses, being
    too long say, would end a run midway and again at every resume.

    Raises:
        ValueError: a prompt will not do; names its row.
    """
    from diversed.engine.prompts import encode_prompts

    for row in range(len(task.examples)) if rows is None else rows:
        asked = request(task, [task.examples[row]])
        try:
            encode_prompts(pair, asked.get("prompts"), messages=asked.get("messages"))
        except ValueError as error:
            raise ValueError(f"task={task.name!r}, {task.split} split, row {row}: {error}") from None


def name_of(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def text_of(completion: Any, stop_strings: Sequence[str] = ()) -> str:
    """The text of a completion in either form of TRL's contract: a string, or a list of messages (the last counts).

    A string ends before the first of ``stop_strings``, which the engine leaves at its end.
    """
    if not isinstance(completion, str):
        return str(completion[-1]["content"])
    ends = [end for end in (completion.find(stop) for stop in stop_strings) if end >= 0]
    return completion[: min(ends, default=len(completion))]


def judge(
    function: RewardFunction, examples: Sequence[Example], completions: Sequence[str], name: str = "reward"
) -> list[float]:
    """Call a score or reward on completions of examples, one each, and check what it returns.

    As in TRL, every column arrives as a keyword list, and a completion of a chat as ``[{"role": "assistant",
    "content": text}]``. A function without ``**kwargs`` gets the columns it names. ``completion_ids`` is not passed.

    Args:
        function: the score or reward.
        examples: what was asked.
        completions: the text that came back for each.
        name: what to call the function in an error: "score", "reward".

    Returns:
        A finite float per completion.

    Raises:
        ValueError: ``function`` raised, needs a column that the rows lack, or returned anything but one finite number
            per completion.
    """
    if len(examples) != len(completions):
        raise ValueError(f"completions: {len(completions)} given for {len(examples)} examples; give one each")
    if not examples:
        return []
    title = f"{name} function {name_of(function)!r}"
    given: dict[str, Any] = {key: [e.columns.get(key) for e in examples] for e in examples[:1] for key in e.columns}
    for example in examples:
        for key in example.columns.keys() - given.keys():  # rows of a file need not agree; TRL too fills in None
            given[key] = [e.columns.get(key) for e in examples]
    given["prompts"] = [e.prompt if isinstance(e.prompt, str) else list(e.prompt) for e in examples]
    given["completions"] = [
        text if isinstance(e.prompt, str) else [{"role": "assistant", "content": text}]
        for e, text in zip(examples, completions, strict=True)
    ]
    try:
        result = function(**_wanted(function, given, title))
        if isinstance(result, Iterator):
            result = list(result)  # a generator raises only now
    except _MissingColumnError as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise ValueError(
            f"{title} raised {type(error).__name__}: {error}. Mend it and go on: bench and eval with the same "
            "command, train with --resume added"
        ) from error
    return _checked(result, len(examples), title)


class _MissingColumnError(Exception):
    """Kept apart from what the function itself may raise."""


def _wanted(function: RewardFunction, given: dict[str, Any], title: str) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return given
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for p in named:
        if p.default is p.empty and p.name not in given:
            columns = ", ".join(sorted(given.keys() - {"prompts", "completions"})) or "none"
            raise _MissingColumnError(
                f"{title} needs the column {p.name!r}, which the rows do not have (they have: {columns}). Add it to "
                "the rows or give the parameter a default"
            )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    return {p.name: given[p.name] for p in named if p.name in given}


def _checked(result: Any, n: int, title: str) -> list[float]:
    try:
        values = list(result)
    except TypeError:
        raise ValueError(f"{title} returned {type(result).__name__}: return a list of {n} floats") from None
    if len(values) != n:
        raise ValueError(f"{title} returned {len(values)} values for {n} completions: return one each")
    numbers = []
    for i, value in enumerate(values):
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{title} returned {value!r} for completion {i}: return a finite number")
        numbers.append(number)
    return numbers
