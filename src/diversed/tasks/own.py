"""Your own task, from a file.

``rows.jsonl`` (or ``.jsonl.gz``): JSON lines with ``prompt`` (a text, or a chat as a list of messages with ``role``
and ``content``) and any other columns; ``completion``, else ``answer``, ``solution`` or ``reference``, is what
``diversed distill --text given`` learns from. A column ``split`` says where a row belongs (``train``, ``validation``,
``test``); rows without it are divided 80 / 10 / 10 by a hash of the prompt. It needs ``reward="file.py:function"`` or
``"package.module:function"``, which is the score as well; its values should then lie in [0, 1].

``my_task.py``: a Python file, which is run, with

* ``rows(split)``: dicts with ``prompt`` and any other columns. What belongs to which split is this function's matter;
* ``reward(prompts, completions, **columns)``: a float per completion, as in TRL;
* optionally ``score`` (the reward where there is none), ``SCORE_NAME``, ``MAX_NEW_TOKENS`` (256), ``STOP_STRINGS``,
  ``PARTIAL_REWARD`` (whether this ``reward`` of an unfinished text says what it has earned so far; False).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from diversed.tasks.contract import SPLITS, Example, RewardFunction, Task
from diversed.tasks.rows import bucket, read_jsonl

MAX_NEW_TOKENS = 256
ANSWERS = ("answer", "solution", "reference")  # columns that may hold a right answer


def is_file_task(name: str) -> bool:
    return name.endswith((".jsonl", ".jsonl.gz", ".py"))


def load(name: str, *, split: str, n: int | None, chat: bool, reward: str | None, judged: bool) -> Task:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"task={name!r} is no file: check the path")
    if path.suffix == ".py":
        return _python_task(path, split, n, chat, reward)
    if reward is None and judged:
        raise ValueError(
            f"task={name!r} needs a reward: give reward='file.py:function' or 'package.module:function', called as "
            "function(prompts, completions, **columns) and returning a float per completion"
        )
    function = _unjudged if reward is None else load_function(reward)
    title = getattr(function, "__name__", "reward")
    examples = _taken(_of_split(path, split, chat), path, split, n)
    return Task(path.name, split, examples, function, function, title, MAX_NEW_TOKENS)


def _unjudged(**_: Any) -> list[float]:
    raise ValueError("these rows were loaded without a reward")


def _python_task(path: Path, split: str, n: int | None, chat: bool, reward: str | None) -> Task:
    module = _run_file(path)
    rows: Callable[[str], Iterable[Any]] = _function(module, "rows", str(path))
    own_reward: RewardFunction = load_function(reward) if reward else _function(module, "reward", str(path))
    score = _function(module, "score", str(path)) if hasattr(module, "score") else own_reward
    try:
        listed = list(rows(split))
    except Exception as error:
        raise ValueError(f"{path}: rows({split!r}) raised {type(error).__name__}: {error}") from error
    examples = (_example(row, f"{path}, rows({split!r}), row {i}", chat) for i, row in enumerate(listed))
    return Task(
        path.name,
        split,
        _taken(examples, path, split, n),
        score,
        own_reward,
        str(getattr(module, "SCORE_NAME", getattr(score, "__name__", "score"))),
        _max_new_tokens(module, path),
        _stop_strings(module, path),
        _partial_reward(module, path) and reward is None,
    )


def _stop_strings(module: ModuleType, path: Path) -> tuple[str, ...]:
    value = getattr(module, "STOP_STRINGS", ())
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"{path}: STOP_STRINGS={value!r} must be a string, or a list of strings that are not empty")
    return tuple(strings)


def _partial_reward(module: ModuleType, path: Path) -> bool:
    value = getattr(module, "PARTIAL_REWARD", False)
    if not isinstance(value, bool):
        raise ValueError(f"{path}: PARTIAL_REWARD={value!r} must be True or False")
    return value


def _max_new_tokens(module: ModuleType, path: Path) -> int:
    value = getattr(module, "MAX_NEW_TOKENS", MAX_NEW_TOKENS)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{path}: MAX_NEW_TOKENS={value!r} must be an integer of at least 1")
    return value


def _of_split(path: Path, split: str, chat: bool) -> Iterator[Example]:
    """The file's rows of a split, without those whose prompt is also in a split that goes before it."""
    order = ("test", "validation", "train")
    found: dict[str, list[tuple[str, Example]]] = {s: [] for s in order}
    for number, row in read_jsonl(path):
        where = f"{path}, line {number}"
        example = _example(row, where, chat)
        key = repr(row["prompt"])
        own_split = row.get("split")
        if own_split is None:
            tenth = bucket(key, 10)
            own_split = "test" if tenth == 0 else "validation" if tenth == 1 else "train"
        elif own_split not in SPLITS:
            raise ValueError(f"{where}: split={own_split!r} is unknown: use one of {', '.join(SPLITS)}")
        found[own_split].append((key, example))
    before = {key for s in order[: order.index(split)] for key, _ in found[s]}
    return (example for key, example in found[split] if key not in before)


def _taken(examples: Iterable[Example], path: Path, split: str, n: int | None) -> list[Example]:
    taken = list(examples)
    if not taken:
        raise ValueError(
            f"split={split!r} of {str(path)!r} has no rows: add some (in a JSON lines file, by the column 'split')"
        )
    if len({isinstance(e.prompt, str) for e in taken}) > 1:
        raise ValueError(
            f"{path}, split {split!r}: some prompts are texts and some are chats: write them all in one form"
        )
    if n is not None and len(taken) < n:
        raise ValueError(f"n={n} is more than the {len(taken)} rows of {str(path)!r} in split {split}: ask for fewer")
    return taken[:n]


def _example(row: Any, where: str, chat: bool) -> Example:
    if not isinstance(row, dict) or "prompt" not in row:
        keys = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no key 'prompt' (it has: {keys}): give each row a text or a list of messages")
    if taken := {"prompts", "completions"} & row.keys():
        raise ValueError(f"{where} has a column {min(taken)!r}, which rewards get from elsewhere: rename it")
    prompt = row["prompt"]
    if isinstance(prompt, str) and prompt:
        prompt = [{"role": "user", "content": prompt}] if chat else prompt
    elif not _is_chat(prompt):
        raise ValueError(
            f"{where}: 'prompt' must be a text that is not empty, or a list of messages with 'role' and 'content'"
        )
    columns = {key: value for key, value in row.items() if key not in ("prompt", "split")}
    return Example(prompt, columns, _completion(columns, prompt))


def _completion(columns: dict[str, Any], prompt: Any) -> str | None:
    """A row's ``completion`` as it stands, else its answer, after a space where the prompt ends in "Answer:"."""
    completion = columns.get("completion")
    if isinstance(completion, str):
        return completion
    answer = next((v for v in map(columns.get, ANSWERS) if isinstance(v, str)), None)
    asked = isinstance(prompt, str) and prompt.endswith(":")
    return f" {answer}" if answer and asked and not answer[:1].isspace() else answer


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in prompt)
    )


def load_function(spec: str) -> RewardFunction:
    """The function behind ``file.py:function`` or ``package.module:function``. The file or module is run.

    Raises:
        ValueError: not of that form, no such file, module or function, or it fails to load.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(f"reward={spec!r}: write file.py:function or package.module:function")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"reward={spec!r}: there is no file {place!r}; check the path")
        return cast(RewardFunction, _function(_run_file(path), name, place))
    try:
        module = importlib.import_module(place)
    except Exception as error:
        raise ValueError(
            f"reward={spec!r}: the module {place!r} cannot be imported ({type(error).__name__}: {error}); check the "
            "name, install it, or give a file: file.py:function"
        ) from error
    return cast(RewardFunction, _function(module, name, place))


def _function(module: ModuleType, name: str, place: str) -> Any:
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ValueError(f"{place} has no function {name!r} (it has: {', '.join(there[:20]) or 'none'})")
    return function


def _run_file(path: Path) -> ModuleType:
    # One module per file, whatever its name: two rewards.py must not shadow each other or an installed package.
    name = f"diversed_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{str(path)!r} cannot be run ({type(error).__name__}: {error}): mend it") from error
    return module
