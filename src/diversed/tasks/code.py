"""Python programs: MBPP (Austin et al. 2021, the full set) and HumanEval (Chen et al. 2021).

The score is pass@1: 1 where every test of a problem holds, else 0. The reward is the fraction of its assertions that
hold, so that a nearly right program is told from an empty one. Programs run in :mod:`diversed.tasks.sandbox`.

MBPP's prompts show the tests, as published: a program that writes down their answers passes honestly.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diversed.tasks.contract import Example, Task, text_of
from diversed.tasks.rows import Row, Source, load_rows
from diversed.tasks.sandbox import Outcome, Program, run_tests

MBPP_SHOTS = (2, 3, 4)  # task ids, the published ones
MBPP_STOPS = ("[DONE]",)
HUMANEVAL_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")
FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)

_MBPP_FILE = (("mbpp/mbpp-full.jsonl.gz", 0, None),)
_MBPP = Source(
    "mbpp",
    ("google-research-datasets/mbpp", "full"),
    {split: split for split in ("prompt", "train", "validation", "test")},
    dict.fromkeys(("prompt", "train", "validation", "test"), _MBPP_FILE),
    text=lambda row: str(row["text"]),
    split_of=lambda row: str(row["split"]),
)
_HUMANEVAL = Source(
    "humaneval",
    ("openai/openai_humaneval", None),
    {"test": "test"},
    {"test": (("humaneval/humaneval.jsonl.gz", 0, None),)},
    text=lambda row: str(row["prompt"]),
)


def load_mbpp(name: str, *, split: str, n: int | None, seed: int, data_dir: str | Path | None, chat: bool) -> Task:
    """Text prompts show the three published examples, which come from a split of their own."""
    rows = load_rows(_MBPP, split, n, data_dir)
    shots = [] if chat else [r for r in load_rows(_MBPP, "prompt", None, data_dir) if r["task_id"] in MBPP_SHOTS]
    before = "".join(f"{_mbpp_question(s)}\n[BEGIN]\n{_lines(s['code'])}\n[DONE]\n\n" for s in shots)
    examples = []
    for row in rows:
        prompt: Any = f"{before}{_mbpp_question(row)}\n[BEGIN]\n"
        solution = f"{_lines(row['code'])}\n[DONE]"
        if chat:
            prompt = [{"role": "user", "content": f"{_mbpp_question(row)}\nAnswer with one block of Python code."}]
            solution = f"```python\n{_lines(row['code'])}\n```"
        examples.append(Example(prompt, row, solution))
    return Task(name, split, examples, mbpp_pass, mbpp_fraction, "pass@1", 256, () if chat else MBPP_STOPS)


def _lines(code: str) -> str:
    return code.replace("\r\n", "\n").strip("\n")


def _mbpp_question(row: Row) -> str:
    tests = "\n".join(row["test_list"])
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} "
        f"Your code should pass these tests:\n\n{tests}"
    )


def load_humaneval(name: str, *, split: str, n: int | None, seed: int, data_dir: str | Path | None, chat: bool) -> Task:
    """Text prompts are the published ones: a function's head, to be continued. There is a test split only."""
    examples = []
    for row in load_rows(_HUMANEVAL, split, n, data_dir):
        head = row["prompt"]
        ask = "Complete this Python function. Answer with one block of Python code that holds the whole function."
        prompt: Any = [{"role": "user", "content": f"{ask}\n\n```python\n{head}```"}] if chat else head
        # The row's own `prompt` would be taken for the question.
        columns = {key: value for key, value in row.items() if key != "prompt"} | {"head": head}
        examples.append(Example(prompt, columns, None if chat else row["canonical_solution"]))
    stops = () if chat else HUMANEVAL_STOPS
    return Task(name, split, examples, humaneval_pass, humaneval_fraction, "pass@1", 384, stops)


def mbpp_program(row: Row, code: str) -> Program:
    """A row's tests around ``code``. What the tests may reach in it is what the reference solution defines."""
    reference, setup = ast.parse(_lines(row["code"])), _lines(row.get("test_setup_code") or "")
    used = {
        node.id
        for test in (setup, *row["test_list"])
        for node in ast.walk(ast.parse(test))
        if isinstance(node, ast.Name)
    }
    names = tuple(sorted(used & _defined(reference)))
    return Program(code, tests=tuple(row["test_list"]), names=names, setup=f"{_imports(reference, used)}\n{setup}")


def humaneval_program(row: Row, code: str) -> Program:
    """A row's ``check`` around ``code``, the whole program. Helpers of the prompt that ``check`` calls are taken from
    the prompt, not from ``code``."""
    tests = f"{row['test']}\ncheck({row['entry_point']})\n"
    return Program(code, tests=(tests,), names=(row["entry_point"],), setup=row["head"] + "    pass\n")


def _defined(module: ast.Module) -> set[str]:
    """Names of the functions, classes and variables at a module's top level."""
    names = set[str]()
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names |= {t.id for t in statement.targets if isinstance(t, ast.Name)}
    return names


def _imports(module: ast.Module, used: set[str]) -> str:
    """The imports of a reference solution that its tests lean on: one test calls ``sys.getsizeof``."""
    found = [
        s
        for s in module.body
        if isinstance(s, ast.Import | ast.ImportFrom) and used & {a.asname or a.name.split(".")[0] for a in s.names}
    ]
    return "\n".join(map(ast.unparse, found))


def mbpp_code(completion: Any) -> str:
    """The program in a completion: its first fenced block, or all of it up to ``[DONE]``."""
    text = text_of(completion, MBPP_STOPS)
    fenced = FENCE.search(text)
    return fenced.group(1) if fenced else text.removeprefix("[BEGIN]\n")


def humaneval_code(completion: Any, head: str, entry_point: str) -> str:
    """The program in a completion: a fenced block that defines the function, after what the head imports; or the head
    and what continues it, up to the first line that belongs to something else."""
    text = text_of(completion)
    blocks = FENCE.findall(text)
    for block in blocks:
        if re.search(rf"^def\s+{re.escape(entry_point)}\b", block, re.MULTILINE):
            # The head with a body of its own: its imports and helpers stay at hand, its function is replaced.
            return f"{head}    pass\n\n{block}"
    return head + (blocks[0] if blocks else text_of(completion, HUMANEVAL_STOPS))


def _mbpp_outcomes(completions: Sequence[Any], columns: dict[str, Sequence[Any]]) -> list[Outcome]:
    rows = _as_rows(columns, len(completions))
    return _outcomes(tuple(mbpp_program(row, mbpp_code(c)) for row, c in zip(rows, completions, strict=True)))


def _humaneval_outcomes(completions: Sequence[Any], columns: dict[str, Sequence[Any]]) -> list[Outcome]:
    rows = _as_rows(columns, len(completions))
    return _outcomes(
        tuple(
            humaneval_program(row, humaneval_code(c, row["head"], row["entry_point"]))
            for row, c in zip(rows, completions, strict=True)
        )
    )


@functools.lru_cache(maxsize=1)
def _outcomes(programs: tuple[Program, ...]) -> list[Outcome]:
    """Score and reward of the same answers, asked for one after the other, come from one run."""
    return run_tests(programs)


def _as_rows(columns: dict[str, Sequence[Any]], n: int) -> list[Row]:
    return [{key: values[i] for key, values in columns.items()} for i in range(n)]


def mbpp_pass(prompts: Any, completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where all tests hold, else 0, per completion."""
    return [float(o.passed) for o in _mbpp_outcomes(completions, columns)]


def mbpp_fraction(prompts: Any, completions: Sequence[Any], **columns: Any) -> list[float]:
    """The fraction of assertions that hold, per completion; 1 exactly where all tests hold."""
    return [o.fraction for o in _mbpp_outcomes(completions, columns)]


def humaneval_pass(prompts: Any, completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where all tests hold, else 0, per completion."""
    return [float(o.passed) for o in _humaneval_outcomes(completions, columns)]


def humaneval_fraction(prompts: Any, completions: Sequence[Any], **columns: Any) -> list[float]:
    """The fraction of assertions that hold, per completion; 1 exactly where all tests hold."""
    return [o.fraction for o in _humaneval_outcomes(completions, columns)]
