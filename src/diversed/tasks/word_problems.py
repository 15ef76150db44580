"""Grade-school word problems with worked solutions: the task of the embedded pair.

Two families, each a stream of problems drawn from a seed:

* ``shop``: one- and two-step stories with ``+``, ``-`` and ``*``. Their solutions mix *style* tokens, which
  come from slots of synonyms and may vary freely, with *digits*, which may not. The style slots have high
  entropy, so "be strict where the target is sure" nearly solves the family.
* ``tally``: sums of three quantities. Here entropy says nothing: style is almost fixed in either model, so that a
  style token looks as certain as a digit, and yet one may be taken from the draft and the other may not.

The target and the draft of the embedded pair learn the same problems with opposite preferences among the
synonyms (``style="target"`` and ``style="draft"``), so that lossless verification rejects many tokens that
would do no harm.

A problem belongs to one split for ever: the split is read off a hash of its text, not off the seed, so no
training problem can reappear in the test split.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from diversed.tasks.contract import Example, Task, text_of

Family = Literal["shop", "tally"]
Split = Literal["train", "validation", "test"]
Style = Literal["target", "draft"]

FAMILIES: tuple[Family, ...] = ("shop", "tally")

LARGEST = 99  # every number in a problem or a solution stays at or below this

NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jana Kai Lena Mia Noah Olga Pia Quin Rosa Sam Tess Uma Vera Will Zoe"
).split()
THINGS = "apples books cards coins cups eggs keys lamps marbles nuts pears pens rings shells stamps toys".split()
PLACES = "basket box cellar crate drawer garage kitchen room shed shop tent van".split()


@dataclass(frozen=True)
class Problem:
    """One problem: ``prompt`` ends with "Answer:", ``solution`` starts with a space and ends with ``#### n``."""

    family: Family
    prompt: str
    solution: str
    answer: int


def problems(split: Split, n: int, *, seed: int = 0, family: Family = "shop", style: Style = "target") -> list[Problem]:
    """The first ``n`` problems of a split under ``seed``, without repeats."""
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} is unknown: use one of {', '.join(FAMILIES)}")
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    seen: dict[str, Problem] = {}
    stream = problem_stream(split, seed=seed, family=family, style=style)
    while len(seen) < n:
        problem = next(stream)
        seen.setdefault(problem.prompt, problem)
    return list(seen.values())


def problem_stream(split: Split, *, seed: int, family: Family, style: Style) -> Iterator[Problem]:
    """Endless problems of a split. The same seed gives the same prompts whatever the style."""
    draw = {"shop": _shop, "tally": _tally}[family]
    story, wording = random.Random(f"{family} {seed} story"), random.Random(f"{family} {seed} {style} wording")
    while True:
        prompt, steps, answer = draw(story)
        if split_of(prompt) == split:
            yield Problem(family, prompt, steps(_Pen(wording, style)), answer)


def split_of(prompt: str) -> Split:
    """A tenth of all problems is for the test, a tenth for validation, decided by the text alone."""
    bucket = hashlib.sha256(prompt.encode()).digest()[0] % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


_ANSWER = re.compile(r"####\s*(-?\d+)")


def final_answer(text: str) -> int | None:
    """The number after ``####``, or None where the solution never states one."""
    found = _ANSWER.search(text)
    return int(found.group(1)) if found else None


def score(problem: Problem, completion: str) -> float:
    """1 where the stated answer is the right one, else 0 (exact match, as for GSM8K)."""
    return float(final_answer(completion) == problem.answer)


def load(name: str, *, split: str, n: int | None, seed: int, data_dir: str | Path | None, chat: bool) -> Task:
    """``n`` problems drawn from ``seed`` (None: 4,000 for training, else 1,000), as text whatever ``chat`` says."""
    count = n if n is not None else 4000 if split == "train" else 1000
    drawn = problems(cast(Split, split), count, seed=seed, family=cast(Family, name))
    examples = [Example(p.prompt, {"answer": p.answer, "solution": p.solution}, p.solution) for p in drawn]
    return Task(name, split, examples, exact_match, exact_match, "exact match", max_new_tokens=96)


def exact_match(prompts: Any, completions: Sequence[Any], answer: Sequence[int], **columns: Any) -> list[float]:
    """1 where the answer stated after ``####`` is the right one, else 0."""
    return [float(final_answer(text_of(c)) == right) for c, right in zip(completions, answer, strict=True)]


class _Pen:
    """Chooses wording. Each slot lists synonyms in the target's order of preference; the draft's is the reverse."""

    # A style slot of the shop family: the target spreads its choice, the draft has a favourite.
    FREE: ClassVar[dict[Style, tuple[float, ...]]] = {
        "target": (0.52, 0.27, 0.14, 0.07),
        "draft": (0.88, 0.08, 0.03, 0.01),
    }
    FIXED = (0.95, 0.05)  # a style slot of the tally family: low entropy, yet just as harmless

    def __init__(self, rng: random.Random, style: Style) -> None:
        self.rng, self.style = rng, style

    def pick(self, *synonyms: str) -> str:
        weights = self.FREE[self.style] if len(synonyms) == 4 else self.FIXED
        order = synonyms if self.style == "target" else synonyms[::-1]
        return self.rng.choices(order, weights)[0]


Drawn = tuple[str, Callable[[_Pen], str], int]  # prompt, the solution in a pen's wording, answer


def _shop(rng: random.Random) -> Drawn:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    have = rng.randint(2, 60)
    kind = rng.choice(["one", "bags", "bags_less", "twice", "mixed"])
    if kind == "one":
        change, gain = _change(rng, have)
        story = f"{name} has {have} {thing} and {'gets' if gain else 'loses'} {change} more."
        story = story if gain else story.replace(" more.", ".")
        steps = [(have, "+" if gain else "-", change)]
    elif kind == "bags":
        count, each = rng.randint(2, 9), rng.randint(2, 9)
        have = rng.randint(2, LARGEST - count * each)
        story = f"{name} has {have} {thing} and buys {count} bags of {each} {thing}."
        steps = [(count, "*", each), (have, "+", count * each)]
    elif kind == "bags_less":
        count, each = rng.randint(2, 9), rng.randint(2, 9)
        gone = rng.randint(1, count * each - 1)
        story = f"{name} buys {count} bags of {each} {thing} and gives away {gone}."
        steps = [(count, "*", each), (count * each, "-", gone)]
    elif kind == "twice":
        change, gain = _change(rng, have)
        middle = have + change if gain else have - change
        other, more = _change(rng, middle)
        first, second = ("finds" if gain else "sells"), ("finds" if more else "sells")
        story = f"{name} has {have} {thing}, {first} {change} and then {second} {other}."
        steps = [(have, "+" if gain else "-", change), (middle, "+" if more else "-", other)]
    else:
        gone, each = rng.randint(1, have - 1), rng.randint(2, 9)
        left = rng.randint(1, 9)
        have = left + gone
        story = f"{name} has {have} {thing} and sells {gone}. Each of the rest is worth {each} coins."
        steps = [(have, "-", gone), (left, "*", each)]
    asks = {"mixed": "How many coins are they worth?"}
    prompt = f"Question: {story} {asks.get(kind, f'How many {thing} are there now?')}\nAnswer:"
    values = [{"+": a + b, "-": a - b, "*": a * b}[op] for a, op, b in steps]
    answer = values[-1]

    def solution(pen: _Pen) -> str:
        opener = pen.pick("First", "Start", "Well", "Okay")
        line = f" {opener}, {pen.pick('we', 'you', 'they', 'I')} {pen.pick('work', 'find', 'see', 'note')}"
        for i, ((a, op, b), value) in enumerate(zip(steps, values, strict=True)):
            if i:
                link = pen.pick("Then", "Next", "Now", "After")
                line += f" {link}, {pen.pick('we', 'you', 'they', 'I')} {pen.pick('get', 'take', 'have', 'know')}"
            line += f" {pen.pick('that', 'how', 'here', 'out')} {a} {op} {b} = {value}."
        end = pen.pick("So", "Thus", "Hence", "Finally")
        result = pen.pick("total", "answer", "result", "number")
        return f"{line} {end}, the {result} {pen.pick('is', 'comes to', 'must be', 'equals')} {answer}.\n#### {answer}"

    return prompt, solution, answer


def _change(rng: random.Random, have: int) -> tuple[int, bool]:
    """A gain or a loss that keeps the count within 1..LARGEST."""
    gain = have < 2 or (have < LARGEST and rng.random() < 0.5)
    return (rng.randint(1, LARGEST - have), True) if gain else (rng.randint(1, have - 1), False)


def _tally(rng: random.Random) -> Drawn:
    place = rng.choice(PLACES)
    things = rng.sample(THINGS, 3)
    while True:
        numbers = [rng.randint(2, 60) for _ in range(3)]
        if len(set(numbers)) == 3 and sum(numbers) <= LARGEST:
            break
    a, b, c = (f"{number} {thing}" for number, thing in zip(numbers, things, strict=True))
    prompt = f"Question: The {place} holds {a}, {b} and {c}. How many things does the {place} hold?\nAnswer:"
    answer = sum(numbers)

    def solution(pen: _Pen) -> str:
        x, y, z = numbers
        line = f" {pen.pick('Add', 'Sum')} {pen.pick('all', 'up')} {pen.pick('things', 'items')}:"
        line += f" {x} + {y} = {x + y} {pen.pick('and', 'plus')} {pen.pick('so', 'then')} {x + y} + {z} = {answer}."
        line += f" {pen.pick('Altogether', 'Overall')} {pen.pick('it', 'that')} {pen.pick('holds', 'has')} {answer}."
        return f"{line}\n#### {answer}"

    return prompt, solution, answer
