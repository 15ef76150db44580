"""A small folder of data in the layout of the real one."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest


def write(folder: Path, name: str, rows: list[dict]) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def sum_row(i: int) -> dict:
    return {
        "question": f"Ann has {i} and 1. How many?",
        "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1:,}",
    }


def mbpp_row(i: int, split: str) -> dict:
    return {
        "task_id": i,
        "split": split,
        "text": f"Write a function to add {i}.",
        "code": f"def add_{i}(x):\r\n    return x + {i}",
        "test_setup_code": "",
        "test_list": [f"assert add_{i}(1) == {i + 1}", f"assert add_{i}(5) == {i + 5}"],
    }


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder, "gsm8k/gsm8k-train.jsonl.gz", [sum_row(i) for i in range(7473)])
    # the last one is a training question as well
    write(folder, "gsm8k/gsm8k-test.jsonl.gz", [*(sum_row(i) for i in range(9000, 9009)), sum_row(20)])
    mbpp = [mbpp_row(i, "prompt") for i in range(1, 11)] + [mbpp_row(i, "test") for i in range(11, 15)]
    mbpp += [mbpp_row(511, "validation")] + [mbpp_row(i, "train") for i in (601, 602)]
    mbpp += [mbpp_row(603, "train") | {"text": mbpp_row(12, "test")["text"]}]
    write(folder, "mbpp/mbpp-full.jsonl.gz", mbpp)
    head = 'def twice(x):\n    """Twice x.\n    >>> twice(2)\n    4\n    """\n'
    test = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n"
    row = {"task_id": "HumanEval/0", "prompt": head, "entry_point": "twice", "test": test}
    write(folder, "humaneval/humaneval.jsonl.gz", [row | {"canonical_solution": "    return 2 * x\n"}])
    article = "{} " + "word " * 1000
    for task, text, summary in (("cnndm", "article", "highlights"), ("xsum", "document", "summary")):
        held = [{text: article.format(f"validation {i}"), summary: f"the summary {i} of it"} for i in range(103)]
        tests = [{text: article.format(f"test {i}"), summary: f"a short summary {i}"} for i in range(3)]
        # excerpts: one of a test article, cut short; one of their own
        own = [{text: article.format("test 1")[:400], summary: "x"}, {text: article.format("own"), summary: "y"}]
        write(folder, f"{task}/{task}-validation.jsonl.gz", held)
        write(folder, f"{task}/{task}-test.jsonl.gz", tests)
        write(folder, f"{task}/{task}-train-excerpts.jsonl.gz", own)
    write(
        folder,
        "ntrex_de_en/ntrex-de-en.jsonl.gz",
        [
            {
                "doc_id": f"doc {i // 5}",
                "translation": {"de": f"Das ist Satz {i} hier.", "en": f"This is sentence {i}."},
            }
            for i in range(300)
        ],
    )
    return folder


@pytest.fixture(scope="session")
def real() -> Path:
    folder = Path(os.environ.get("DIVERSED_DATA", "no-data"))
    if not (folder / "gsm8k").is_dir():
        pytest.skip("no folder with the real data sets: set DIVERSED_DATA")
    return folder
