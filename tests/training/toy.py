"""A pair and a task whose best weights are known: a two-token alphabet of style and one of digits.

The models are tables: what comes next depends on the last token alone.

    after ``s``       ``a`` or ``b``: style, harmless; the models prefer opposite ones
    after ``a`` ``b``  ``x`` or ``y``: a digit; ``x`` is right, the target knows, the draft does not
    after ``x`` ``y``  ``s``: certain in both

The reward of a text is the share of its digits that are ``x``. So style may be taken from the draft (w = 0) and digits
must come from the target (w = 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from diversed import ModelPair
from diversed.tasks import Example, Task
from diversed.training.settings import TrainSettings
from models import character_tokenizer, table

LENGTH = 12  # four rounds of style, digit, s
SAFE, FRAGILE = "s", "ab"


def rewards(prompts, completions, **columns):
    digits = [[c for c in text if c in "xy"] for text in completions]
    return [sum(c == "x" for c in d) / max(len(d), 1) for d in digits]


def toy_pair() -> ModelPair:
    tokenizer = character_tokenizer()
    size = len(tokenizer)
    ids = {c: tokenizer.convert_tokens_to_ids(c) for c in "sabxy"}
    p, q = torch.full((2, size, size), 1e-9)
    for model, favourite, right in ((p, "a", 0.97), (q, "b", 0.4)):
        model[ids["s"], ids[favourite]] = 0.9
        model[ids["s"], ids["a" if favourite == "b" else "b"]] = 0.1
        for style in "ab":
            model[ids[style], ids["x"]], model[ids[style], ids["y"]] = right, 1 - right
        for other in range(size):
            if other not in (ids["s"], ids["a"], ids["b"]):
                model[other, ids["s"]] = 1.0
    return ModelPair(table(p / p.sum(1, keepdim=True)), table(q / q.sum(1, keepdim=True)), tokenizer)


def toy_task(split: str = "train", n: int = 32, reward=rewards) -> Task:
    return Task("toy", split, [Example("s", {"row": i}) for i in range(n)], rewards, reward, "share of x", LENGTH)


def toy_settings(objective: str, **changes) -> TrainSettings:
    fast = {
        "counterfactual": {"steps": 6},
        "montecarlo": {"steps": 10},
        "reinforce++": {"steps": 30},
        "constrained": {"steps": 40},
    }
    base = {"prompts_per_step": 32, "validate_every": 100, "validation_n": 32, "fit_every": 3, "qualities": (0.5,)}
    return TrainSettings(objective=objective, **(base | fast[objective] | changes))


def states(pair: ModelPair, head) -> dict[str, Tensor]:
    """The inputs of a head after each character."""
    tokenizer = pair.tokenizer
    found = {}
    for c in "sabxy":
        ids = torch.tensor([[tokenizer.convert_tokens_to_ids(c)]])
        with torch.no_grad():
            hidden = [m.model(ids).last_hidden_state[:, -1] for m in (pair.target, pair.draft)]
            probs = [m.lm_head(h).softmax(-1) for m, h in zip((pair.target, pair.draft), hidden, strict=True)]
        found[c] = head.inputs(*probs, *hidden)
    return found
