"""Every task: splits that share nothing, rewards that tell right from wrong, and judge's contract."""

from __future__ import annotations

import math
import sys
import types
from dataclasses import replace

import pytest

from diversed.tasks import SPLITS, TASKS, Example, code, judge, load_task
from diversed.tasks.contract import text_of
from diversed.tasks.sandbox import run_tests

ROWS = [Example("a", {"k": 1, "word": "x"}), Example("b", {"k": 2, "word": "y"})]
SUMMARIES = ("cnndm", "xsum")


def text(prompt) -> str:
    return " ".join((prompt if isinstance(prompt, str) else prompt[-1]["content"]).split())


def right_and_wrong(example, name) -> tuple[str, str]:
    columns = example.columns
    if name in ("shop", "tally"):
        return columns["solution"], f" so\n#### {columns['answer'] + 1}"
    if name == "gsm8k":
        return columns["answer"], "#### -1"
    if name == "mbpp":
        return columns["code"], "def nothing(): pass"
    if name == "humaneval":
        return columns["canonical_solution"], "    return None\n"
    return columns["reference"], "zzz"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_score_and_reward_tell_right_from_wrong(name, chat, folder):
    task = load_task(name, n=1, data_dir=folder, chat=chat)
    examples = task.examples * 2
    answers = right_and_wrong(task.examples[0], name)
    if chat and name == "humaneval":
        answers = tuple(f"Here:\n```python\n{task.examples[0].columns['head']}{a}```\nDone." for a in answers)
    assert isinstance(examples[0].prompt, str) != (chat and name not in ("shop", "tally"))
    for function in (task.score, task.reward):
        assert judge(function, examples, answers) == [pytest.approx(1.0), pytest.approx(0.0)]


@pytest.mark.parametrize("name", ["mbpp", "humaneval"])
def test_score_and_reward_of_the_same_programs_come_from_one_run(name, folder, monkeypatch):
    runs = []

    def counted(programs):
        runs.append(len(programs))
        return run_tests(programs)

    monkeypatch.setattr(code, "run_tests", counted)
    task = load_task(name, n=1, data_dir=folder)
    for answer in right_and_wrong(task.examples[0], name):
        assert judge(task.score, task.examples, [answer]) == judge(task.reward, task.examples, [answer])
    assert runs == [1, 1]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_answers_to_learn_from_are_right_and_stand_as_the_examples_do(name, chat, folder):
    task = load_task(name, data_dir=folder, chat=chat, n=1)
    (example,) = task.examples
    if name == "humaneval" and chat:  # its solution is a body without its function
        assert example.completion is None
        return
    assert judge(task.score, task.examples, [example.completion]) == [pytest.approx(1.0)]
    assert "<<" not in example.completion
    assert "\r" not in example.completion
    if isinstance(example.prompt, str) and name != "humaneval":
        assert example.completion[0].isspace() == example.prompt.endswith(":")


@pytest.mark.parametrize("name", [t for t in TASKS if t != "humaneval"])
def test_splits_share_no_prompt(name, folder):
    seen = {split: {text(e.prompt) for e in load_task(name, split=split, data_dir=folder).examples} for split in SPLITS}
    assert all(seen.values())
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", [t for t in TASKS if t != "humaneval"])
def test_real_splits_share_no_prompt_and_have_the_sizes_of_the_data(name, chat, real):
    seen = {}
    for split in SPLITS:
        task = load_task(name, split=split, data_dir=real, chat=chat)
        assert (task.name, task.split) == (name, split)
        seen[split] = [text(e.prompt) for e in task.examples]
    assert not set(seen["train"]) & set(seen["validation"])
    assert not set(seen["train"]) & set(seen["test"])
    assert not set(seen["validation"]) & set(seen["test"])
    sizes = {
        "shop": (4000, 1000, 1000), "tally": (4000, 1000, 1000), "gsm8k": (6965, 500, 1319), "mbpp": (371, 90, 500),
        "cnndm": (595, 100, 500), "xsum": (299, 100, 1000), "wmt": (1298, 108, 586),
    }  # fmt: skip
    assert tuple(len(seen[split]) for split in SPLITS) == sizes[name]


def test_what_is_held_out_is_dropped_from_train(folder):
    questions = [e.columns["question"] for e in load_task("gsm8k", split="train", data_dir=folder).examples]
    assert len(questions) == 6973 - 8 - 1  # the shots, and the one that is in test
    assert not any("Ann has 20 and" in q for q in questions)
    ids = [e.columns["task_id"] for e in load_task("mbpp", split="train", data_dir=folder).examples]
    assert ids == [601, 602]
    for name in SUMMARIES:
        train = load_task(name, split="train", data_dir=folder).examples
        assert [e.columns["reference"] for e in train] == ["y", *(f"the summary {i} of it" for i in range(100, 103))]


def test_wmt_splits_by_document(folder):
    documents = [
        {e.columns["doc_id"] for e in load_task("wmt", split=split, data_dir=folder, chat=True).examples}
        for split in SPLITS
    ]
    assert sum(map(len, documents)) == len(set.union(*documents))


def test_humaneval_has_a_test_split_only(folder):
    for split in ("train", "validation"):
        with pytest.raises(ValueError, match=f"split='{split}': task humaneval has only test.*gsm8k"):
            load_task("humaneval", split=split, data_dir=folder)


def test_few_shot_prompts_end_where_the_answer_begins(folder):
    prompt = load_task("gsm8k", n=1, data_dir=folder).examples[0].prompt
    assert prompt.count("Question:") == 9
    assert "<<" not in prompt
    assert prompt.startswith("Question: Ann has 0 and 1. How many?\nAnswer: 0 + 1 = 1\n#### 1\n\nQuestion: Ann has 1")
    assert prompt.endswith("Question: Ann has 9000 and 1. How many?\nAnswer:")
    prompt = load_task("mbpp", n=1, data_dir=folder).examples[0].prompt
    assert prompt.count("[BEGIN]\n") == 4
    assert prompt.count("[DONE]") == 3
    assert "add_2(x):\n    return x + 2\n[DONE]" in prompt
    assert "assert add_11(1) == 12" in prompt
    assert prompt.endswith("\n[BEGIN]\n")
    prompt = load_task("wmt", n=1, data_dir=folder).examples[0].prompt
    assert prompt.count("German:") == prompt.count("English:") == 6
    assert prompt.endswith("\nEnglish:")


def test_sizes_are_checked(folder):
    assert len(load_task("mbpp", data_dir=folder).examples) == 4
    assert len(load_task("mbpp", n=2, data_dir=folder).examples) == 2
    with pytest.raises(ValueError, match="n=5 is more than the 4 rows of mbpp's split test"):
        load_task("mbpp", n=5, data_dir=folder)
    with pytest.raises(ValueError, match="n=0 must be"):
        load_task("mbpp", n=0, data_dir=folder)
    with pytest.raises(ValueError, match="split='dev' is unknown"):
        load_task("mbpp", split="dev", data_dir=folder)


def test_rows_come_from_the_hub_without_a_folder(monkeypatch):
    asked = []

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        return iter([{"question": f"{split} {i}?", "answer": f"#### {i}"} for i in range(12)])

    monkeypatch.delenv("DIVERSED_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    task = load_task("gsm8k", split="train", n=3, chat=True)
    assert [e.columns["question"] for e in task.examples] == [f"train[:-500] {i}?" for i in (8, 9, 10)]
    assert set(asked) == {("openai/gsm8k", "main", s) for s in ("train[:-500]", "train[-500:]", "test")}


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.delenv("DIVERSED_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"cannot load EdinburghNLP/xsum .*no route.*--data-dir.*xsum/xsum-test"):
        load_task("xsum", n=1)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"extra 'train': pip install 'diversed\[train\]'.*--data-dir"):
        load_task("xsum", n=1)


def test_another_reward_leaves_the_score(folder, tmp_path):
    (tmp_path / "mine.py").write_text("def short(completions):\n    return [-len(c) for c in completions]")
    task = load_task("gsm8k", n=1, data_dir=folder, reward=f"{tmp_path}/mine.py:short")
    assert judge(task.reward, task.examples, ["four"]) == [-4.0]
    assert judge(task.score, task.examples, ["#### 9,001"]) == [1.0]


# --- judge ----------------------------------------------------------------------------------------------------------


def test_judge_hands_over_keyword_lists():
    def f(prompts, completions, k, **columns):
        assert (prompts, completions, k, columns) == (["a", "b"], ["c", "d"], [1, 2], {"word": ["x", "y"]})
        return [1, 2]

    assert judge(f, ROWS, ["c", "d"]) == [1.0, 2.0]


def test_judge_wraps_completions_of_chats_as_trl_does():
    chat = [{"role": "user", "content": "q"}]

    def f(prompts, completions, **_):
        assert prompts == [chat]
        assert completions == [[{"role": "assistant", "content": "c"}]]
        return [float(text_of(completions[0]) == "c")]

    assert judge(f, [Example(chat, {})], ["c"]) == [1.0]


def test_judge_gives_a_function_without_kwargs_what_it_names():
    assert judge(lambda completions, k: [k[0], len(completions)], ROWS, ["c", "d"]) == [1.0, 2.0]
    assert judge(lambda completions, bonus=3: [bonus] * 2, ROWS, ["c", "d"]) == [3.0, 3.0]


def test_judge_fills_in_what_some_rows_lack():
    rows = [*ROWS, Example("c", {"extra": 5})]
    assert judge(lambda extra, **_: [x or 0 for x in extra], rows, ["", "", ""]) == [0.0, 0.0, 5.0]


def test_judge_names_a_missing_column():
    with pytest.raises(ValueError, match=r"reward function 'f' needs the column 'solution'.*they have: k, word"):
        judge(named(lambda completions, solution, **_: [0, 0]), ROWS, ["c", "d"])


def named(function):
    function.__name__ = "f"
    return function


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, None], "returned None for completion 1"),
        ([math.nan, 1.0], "returned nan for completion 0"),
        ([1.0, math.inf], "returned inf for completion 1"),
        (["1", 1.0], "returned '1' for completion 0"),
        (3.0, "returned float"),
    ],
)
def test_judge_checks_what_comes_back(result, message):
    with pytest.raises(ValueError, match=f"score function 'f' {message}"):
        judge(named(lambda **_: result), ROWS, ["c", "d"], "score")


def test_judge_turns_an_exception_into_one_error():
    def broken(**_):
        raise KeyError("gone")

    with pytest.raises(ValueError, match=r"reward function 'broken' raised KeyError: 'gone'.*with --resume added"):
        judge(broken, ROWS, ["c", "d"])
    with pytest.raises(ValueError, match="1 given for 2 examples"):
        judge(broken, ROWS, ["c"])
    assert judge(broken, [], []) == []


def test_rewards_of_tensors_and_numpy_are_floats():
    import numpy as np
    import torch

    assert judge(lambda **_: np.array([1, 2], dtype=np.float32), ROWS, ["c", "d"]) == [1.0, 2.0]
    assert judge(lambda **_: torch.tensor([1.0, 2.0]), ROWS, ["c", "d"]) == [1.0, 2.0]


def test_a_task_is_a_plain_value(folder):
    task = load_task("shop", n=2)
    assert replace(task, max_new_tokens=5).max_new_tokens == 5
    assert load_task("shop", n=2).examples == task.examples
    assert load_task("shop", n=2, seed=1).examples != task.examples
