"""The embedded pair's problems: right answers, fixed splits, two styles of the same problem."""

from __future__ import annotations

import re

import pytest

from diversed.tasks import load_task
from diversed.tasks.word_problems import FAMILIES, LARGEST, final_answer, problems, score, split_of


@pytest.mark.parametrize("family", FAMILIES)
def test_every_equation_of_a_solution_holds_and_the_last_one_is_the_answer(family):
    for p in problems("train", 400, family=family):
        facts = re.findall(r"(\d+) ([+*-]) (\d+) = (\d+)", p.solution)
        assert facts
        for a, op, b, value in facts:
            assert eval(f"{a}{op}{b}") == int(value)
            assert all(0 <= int(x) <= LARGEST for x in (a, b, value))
        assert int(facts[-1][3]) == p.answer == final_answer(p.solution)
        assert score(p, p.solution) == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_share_no_problem_whatever_the_seed(family):
    drawn = {
        split: {p.prompt for seed in range(3) for p in problems(split, 300, seed=seed, family=family)}
        for split in ("train", "validation", "test")
    }
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["validation"]
    assert not drawn["validation"] & drawn["test"]
    assert all(split_of(prompt) == split for split, prompts in drawn.items() for prompt in prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_styles_word_the_same_problems_differently(family):
    ours, theirs = (problems("train", 200, family=family, style=style) for style in ("target", "draft"))
    assert [p.prompt for p in ours] == [p.prompt for p in theirs]
    assert [p.answer for p in ours] == [p.answer for p in theirs]
    assert sum(a.solution != b.solution for a, b in zip(ours, theirs, strict=True)) > 190


def test_problems_are_distinct_and_reproducible():
    first = problems("test", 300, seed=4)
    assert len({p.prompt for p in first}) == 300
    assert first == problems("test", 300, seed=4)
    assert first != problems("test", 300, seed=5)


@pytest.mark.parametrize(
    ("text", "answer"), [("#### 42", 42), (" so 7.\n####  -3", -3), ("the answer is 5", None), ("####", None)]
)
def test_final_answer_reads_what_follows_the_mark(text, answer):
    assert final_answer(text) == answer


def test_a_wrong_or_missing_answer_scores_zero():
    p = problems("test", 1)[0]
    assert score(p, f"#### {p.answer + 1}") == 0.0
    assert score(p, f"the answer is {p.answer}") == 0.0


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="family='sums'"):
        problems("test", 1, family="sums")
    with pytest.raises(ValueError, match="n=0"):
        problems("test", 0)
    with pytest.raises(ValueError, match="task='nope' is unknown: use one of"):
        load_task("nope", n=1)
