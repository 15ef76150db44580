"""A user's own rows, rewards and tasks, and what is said where they are wrong."""

from __future__ import annotations

import gzip
import json

import pytest

from diversed.tasks import SPLITS, judge, load_function, load_task

REWARD = "def length(completions, **columns):\n    return [len(c) / 10 for c in completions]\nnumber = 3\n"


@pytest.fixture
def reward(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    return f"{tmp_path}/rewards.py:length"


@pytest.fixture
def rows(tmp_path):
    def write(*lines):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return write


def test_rows_without_a_split_are_divided_for_ever(rows, reward):
    path = rows(*({"prompt": f"question {i}", "k": i} for i in range(1000)))
    prompts = {s: {e.prompt for e in load_task(path, split=s, reward=reward).examples} for s in SPLITS}
    assert sum(map(len, prompts.values())) == len(set.union(*prompts.values())) == 1000
    assert 760 < len(prompts["train"]) < 840
    assert 70 < len(prompts["test"]) < 130
    fewer = rows(*({"prompt": f"question {i}"} for i in range(500)))
    assert {e.prompt for e in load_task(fewer, split="train", reward=reward).examples} <= prompts["train"]


def test_a_split_column_decides_and_test_goes_before_train(rows, reward):
    lines = [{"prompt": p, "split": s} for p, s in (("a", "train"), ("b", "test"), ("b", "train"), ("c", "validation"))]
    path = rows(*lines)
    assert [[e.prompt for e in load_task(path, split=s, reward=reward).examples] for s in SPLITS] == [
        ["a"],
        ["c"],
        ["b"],
    ]
    task = load_task(path, split="train", reward=reward)
    assert task.score is task.reward
    assert judge(task.reward, task.examples, ["12345"]) == [0.5]
    assert task.examples[0].columns == {}


def test_prompts_may_be_chats(rows, reward):
    chat = [{"role": "user", "content": "hello"}]
    path = rows({"prompt": chat, "split": "test"}, {"prompt": "text", "split": "test"})
    with pytest.raises(ValueError, match="some prompts are texts and some are chats"):
        load_task(path, reward=reward)
    prompts = [e.prompt for e in load_task(path, reward=reward, chat=True).examples]
    assert prompts == [chat, [{"role": "user", "content": "text"}]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "line 2 is no JSON"),
        ("[1]", "line 2 is no JSON object"),
        ({"question": "a"}, r"line 2 has no key 'prompt' \(it has: question\)"),
        ({"prompt": ""}, "line 2: 'prompt' must be a text"),
        ({"prompt": [{"content": "a"}]}, "line 2: 'prompt' must be a text"),
        ({"prompt": "a", "split": "dev"}, "line 2: split='dev' is unknown"),
        ({"prompt": "a", "completions": 1}, "line 2 has a column 'completions'"),
    ],
)
def test_a_bad_row_is_named_by_its_line(rows, reward, line, message):
    with pytest.raises(ValueError, match=message):
        load_task(rows({"prompt": "fine", "split": "test"}, line), reward=reward)


def test_files_without_what_is_asked_for(rows, reward, tmp_path):
    path = rows({"prompt": "a", "split": "test"})
    with pytest.raises(ValueError, match="needs a reward"):
        load_task(path)
    with pytest.raises(ValueError, match=r"split='train' of .* has no rows"):
        load_task(path, split="train", reward=reward)
    with pytest.raises(ValueError, match="n=2 is more than the 1 rows"):
        load_task(path, n=2, reward=reward)
    with pytest.raises(ValueError, match="is no file"):
        load_task(str(tmp_path / "absent.jsonl"), reward=reward)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("length", "write file.py:function or package.module:function"),
        ("absent.py:length", "there is no file 'absent.py'"),
        ("no_such_module_here:f", "cannot be imported"),
        ("{folder}/rewards.py:width", r"no function 'width' \(it has: length\)"),
        ("{folder}/rewards.py:number", "no function 'number'"),
        ("{folder}/broken.py:f", "cannot be run .ZeroDivisionError"),
        ("json:nothing", "json has no function 'nothing'"),
    ],
)
def test_a_reward_that_cannot_be_found_is_named(spec, message, reward, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=message):
        load_function(spec.format(folder=tmp_path))


def test_a_function_of_a_package_is_found():
    from diversed.tasks.maths import exact_match

    assert load_function("diversed.tasks.maths:exact_match") is exact_match


def test_answers_to_learn_from_go_on_from_the_prompt(rows):
    def completions(*given: dict) -> list[str | None]:
        path = rows(*(row | {"split": "test"} for row in given))
        return [e.completion for e in load_task(path, judged=False).examples]

    asked = {"prompt": "Question: How many?\nAnswer:"}
    chat = {"prompt": [{"role": "user", "content": "How many:"}]}
    assert completions(asked | {"completion": "Seven", "answer": "7"}) == ["Seven"]
    assert completions(asked | {"answer": "7"}, asked | {"prompt": "How many?", "solution": "7"}) == [" 7", "7"]
    assert completions(chat | {"reference": "7"}) == ["7"]
    assert completions(asked | {"answer": 7, "other": "x"}) == [None]


def test_a_damaged_archive_is_named(tmp_path, reward):
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(b'{"prompt": "a"}\n' * 1000)
    path.write_bytes(whole[:20] + b"\xff" * 8 + whole[28:])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz.* cannot be read"):
        load_task(str(path), reward=reward)


TASK = """
from dataclasses import dataclass
SCORE_NAME, MAX_NEW_TOKENS, STOP_STRINGS, PARTIAL_REWARD = "hits", 7, ["!"], True
@dataclass
class Row:
    word: str
def rows(split):
    if split == "test":
        return
    for word in ("a", "b"):
        yield {"prompt": f"{split} {word}", "word": Row(word).word}
def reward(prompts, completions, word, **columns):
    return [0.25 * (c == w) for c, w in zip(completions, word)]
def score(completions, word, **columns):
    return [float(c == w) for c, w in zip(completions, word)]
"""


def test_a_python_file_is_a_task(tmp_path, reward):
    path = tmp_path / "my_task.py"
    path.write_text(TASK)
    task = load_task(str(path), split="train")
    assert [e.prompt for e in task.examples] == ["train a", "train b"]
    assert (task.name, task.score_name, task.max_new_tokens, task.stop_strings) == ("my_task.py", "hits", 7, ("!",))
    assert task.partial_reward
    assert judge(task.reward, task.examples, ["a", "a"]) == [0.25, 0.0]
    assert judge(task.score, task.examples, ["a", "a"]) == [1.0, 0.0]
    other = load_task(str(path), split="train", n=1, reward=reward)
    assert not other.partial_reward  # that was said of the file's own reward
    assert judge(other.reward, other.examples, ["a"]) == [0.1]
    assert judge(other.score, other.examples, ["a"]) == [1.0]
    with pytest.raises(ValueError, match=r"split='test' .* has no rows"):
        load_task(str(path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(**_): return []", "no function 'rows'"),
        ("def rows(split): return [{'prompt': 'a'}]", "no function 'reward'"),
        ("def rows(split): return 1 / 0\ndef reward(**_): return []", "rows.'test'. raised ZeroDivisionError"),
        ("def rows(split): return [{'p': 'a'}]\ndef reward(**_): return []", r"row 0 has no key 'prompt'"),
        (
            "MAX_NEW_TOKENS = '5'\ndef rows(split): return [{'prompt': 'a'}]\ndef reward(**_): return []",
            "MAX_NEW_TOKENS='5'",
        ),
        (
            "PARTIAL_REWARD = 'yes'\ndef rows(split): return [{'prompt': 'a'}]\ndef reward(**_): return []",
            "PARTIAL_REWARD='yes'",
        ),
        ("def rows(split:", "cannot be run .SyntaxError"),
    ],
)
def test_a_python_file_that_is_no_task_is_told_why(tmp_path, source, message):
    path = tmp_path / "my_task.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message):
        load_task(str(path))
