"""Scores equal the published scorers on fixed outputs."""

from __future__ import annotations

from decimal import Decimal

import pytest

from diversed.tasks import Example, judge, load_task
from diversed.tasks.code import humaneval_code, mbpp_code
from diversed.tasks.maths import exact_match, final_number
from diversed.tasks.translation import bleu, chrf


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 7\n#### 8", "7"),
        ("#### 1,200", "1200"),
        ("#### $1,200.50.", "1200.50"),
        ("#### -3", "-3"),
        ("The answer is 42.", "42"),
        ("first 10, then 12 dogs", "12"),
        ("costs $18", "18"),
        ("half: .5", ".5"),
        ("no number", None),
        ("####", None),
    ],
)
def test_gsm8k_takes_the_stated_number_or_the_last_one(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_gsm8k_compares_values_and_ignores_a_next_question():
    rows = [Example("q", {"final_answer": "18"})] * 4
    answers = ["#### 18.00", "It is 18.\nQuestion: What is 5?", "#### 180", ""]
    assert judge(exact_match, rows, answers) == [1.0, 1.0, 0.0, 0.0]


PAIRS = [
    ("The cat sat on the mat.", "The cat sat on the mat."),
    ("A cat sat on a mat today.", "The cat sat on the mat."),
    ("Nothing in common", "The cat sat on the mat."),
    ("", "The cat sat on the mat."),
]


def test_translation_scores_are_sacrebleus():
    sacrebleu = pytest.importorskip("sacrebleu")
    rows = [Example("q", {"reference": right}) for _, right in PAIRS]
    texts = [f" {text}\nGerman: mehr" for text, _ in PAIRS]  # what follows the line does not count
    got = judge(bleu, rows, texts)
    assert got == pytest.approx([sacrebleu.sentence_bleu(t, [r]).score / 100 for t, r in PAIRS])
    assert got[0] == 1.0
    assert got[0] > got[1] > got[3] == 0.0
    assert judge(chrf, rows, texts) == pytest.approx([sacrebleu.sentence_chrf(t, [r]).score / 100 for t, r in PAIRS])


@pytest.mark.parametrize("name", ["cnndm", "xsum"])
def test_summary_scores_are_rouge_scores(name, folder):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"], True)
    task = load_task(name, n=1, data_dir=folder)
    right = task.examples[0].columns["reference"]
    early, late = f"A cat {right} sat", "filler " * 32 + right
    for text in (early, late):
        kept = " ".join(text.split()[:32]) if name == "xsum" else text
        scores = scorer.score(right, kept)
        assert judge(task.score, task.examples, [text]) == [pytest.approx(scores["rouge2"].fmeasure)]
        blend = 0.8 * scores["rouge2"].fmeasure + 0.1 * (scores["rouge1"].fmeasure + scores["rougeL"].fmeasure)
        assert judge(task.reward, task.examples, [text]) == [pytest.approx(blend)]
    assert (judge(task.score, task.examples, [late])[0] == 0.0) == (name == "xsum")
    assert judge(task.score, task.examples, [f"x\n\n{right}"]) == [0.0]  # after the stop string


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("def f():\n    pass\n[DONE]\nmore", "def f():\n    pass\n"),
        ("Sure:\n```python\ndef f(): pass\n```\nDone", "def f(): pass\n"),
        ("```\nx = 1", "x = 1"),
        ([{"role": "assistant", "content": "```py\nx = 1\n```"}], "x = 1\n"),
    ],
)
def test_mbpp_code_is_what_the_completion_holds(completion, code):
    assert mbpp_code(completion) == code


def test_humaneval_code_continues_the_head_or_replaces_it():
    head = 'import math\n\ndef f(x):\n    """Doc."""\n'
    assert humaneval_code("    return x\n\ndef main():\n    f(1)", head, "f") == f"{head}    return x\n"
    whole = humaneval_code("```python\ndef f(x):\n    return math.floor(x)\n```", head, "f")
    names: dict = {}
    exec(whole, names)
    assert names["f"](1.5) == 1
    assert humaneval_code("```python\n    return x\n```", head, "f") == f"{head}    return x\n"
    example_first = "Use it so:\n```python\nprint(f(1))\n```\n```python\ndef f(x):\n    return x\n```"
    assert humaneval_code(example_first, head, "f") == f"{head}    pass\n\ndef f(x):\n    return x\n"


def test_code_reward_is_the_fraction_and_the_score_all_or_nothing(folder):
    for name, half in (("mbpp", "def add_11(x):\n    return 12"), ("humaneval", "    return 4\n")):
        task = load_task(name, n=1, data_dir=folder)
        assert judge(task.reward, task.examples, [half]) == [0.5]
        assert judge(task.score, task.examples, [half]) == [0.0]
