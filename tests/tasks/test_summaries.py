"""CNN / Daily Mail from a folder, and ROUGE-2."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from diversed.tasks import load_task, summaries


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "cnndm").mkdir()
    with gzip.open(tmp_path / "cnndm" / "cnndm-test.jsonl.gz", "wt") as file:
        for i in range(3):
            file.write(json.dumps({"article": f"{i} " + "word " * 1000, "highlights": f"summary {i}"}) + "\n")
    return tmp_path


def test_rows_become_chats_with_cut_articles(folder):
    task = load_task("cnndm", n=2, data_dir=folder)
    assert [e.reference for e in task.examples] == ["summary 0", "summary 1"]
    content = task.examples[0].prompt[0]["content"]
    assert content.startswith(summaries.INSTRUCTION)
    assert len(content) == len(summaries.INSTRUCTION) + 2 + summaries.ARTICLE_CHARACTERS


def test_rouge2_counts_pairs_of_words():
    pytest.importorskip("rouge_score")
    assert summaries.rouge2("the cat sat", "the cat sat") == 1.0
    assert summaries.rouge2("the cat sat", "a dog ran") == 0.0
    # "the cat", "cat sat" against "the cat", "cat slept": one of two pairs on either side
    assert summaries.rouge2("the cat sat", "the cat slept") == pytest.approx(0.5)


def test_missing_data_says_what_to_do(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("DIVERSED_DATA", raising=False)
    with pytest.raises(ValueError, match="--data-dir"):
        load_task("cnndm", n=1)
    with pytest.raises(ValueError, match=r"has no cnndm/cnndm-validation\.jsonl\.gz"):
        load_task("cnndm", n=1, split="validation", data_dir=folder)
    with pytest.raises(ValueError, match="n=9 is more than the 3 rows"):
        load_task("cnndm", n=9, data_dir=folder)
    monkeypatch.setenv("DIVERSED_DATA", str(folder))
    assert len(load_task("cnndm", n=3).examples) == 3


@pytest.mark.skipif(
    not Path(os.environ.get("DIVERSED_DATA", "../shared/data"), "cnndm").is_dir(), reason="no folder with real articles"
)
def test_real_articles_load():
    task = load_task("cnndm", n=500, data_dir=os.environ.get("DIVERSED_DATA", "../shared/data"))
    assert len(task.examples) == 500
    assert all(e.reference for e in task.examples)
