"""CNN / Daily Mail from a folder, and ROUGE-2."""

from __future__ import annotations

import pytest

from diversed.tasks import judge, load_task, summaries


def test_rows_become_chats_with_cut_articles(folder):
    task = load_task("cnndm", n=2, data_dir=folder, chat=True)
    assert [e.columns["reference"] for e in task.examples] == ["a short summary 0", "a short summary 1"]
    content = task.examples[0].prompt[0]["content"]
    instruction = summaries.INSTRUCTIONS["cnndm"]
    assert content.startswith(instruction)
    assert len(content) == len(instruction) + 2 + summaries.ARTICLE_CHARACTERS
    assert (task.max_new_tokens, task.stop_strings) == (64, ())


def test_text_prompts_end_where_the_summary_begins(folder):
    task = load_task("xsum", n=1, data_dir=folder)
    prompt = task.examples[0].prompt
    assert prompt.startswith("Article: test 0 word")
    assert prompt.endswith("\n\nSummary:")
    assert len(prompt) == len("Article: \n\nSummary:") + summaries.ARTICLE_CHARACTERS


def test_a_summary_earns_its_reward_word_by_word(folder):
    task = load_task("cnndm", split="test", data_dir=folder)
    assert task.partial_reward
    assert not load_task("cnndm", split="test", data_dir=folder, reward="math:fsum").partial_reward
    example = task.examples[0]
    words = example.columns["reference"].split()
    earned = judge(task.reward, [example] * len(words), [" ".join(words[: i + 1]) for i in range(len(words))])
    assert earned == sorted(earned)
    assert earned[-1] == pytest.approx(1.0)


def test_rouge2_counts_pairs_of_words():
    pytest.importorskip("rouge_score")
    assert summaries.rouge2("the cat sat", "the cat sat") == 1.0
    assert summaries.rouge2("the cat sat", "a dog ran") == 0.0
    # "the cat", "cat sat" against "the cat", "cat slept": one of two pairs on either side
    assert summaries.rouge2("the cat sat", "the cat slept") == pytest.approx(0.5)


def test_missing_data_says_what_to_do(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"has no cnndm/cnndm-test\.jsonl\.gz"):
        load_task("cnndm", n=1, data_dir=tmp_path)
    with pytest.raises(ValueError, match="n=9 is more than the 3 rows"):
        load_task("cnndm", n=9, data_dir=folder)
    monkeypatch.setenv("DIVERSED_DATA", str(folder))
    assert len(load_task("cnndm", n=3).examples) == 3


def test_real_articles_load(real):
    task = load_task("cnndm", n=500, data_dir=real)
    assert len(task.examples) == 500
    assert all(e.columns["reference"] for e in task.examples)
