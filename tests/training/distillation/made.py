"""What the tests of distillation share: a target whose layers matter, prompts and a short run."""

import json
from pathlib import Path
from typing import Any

from diversed.training.distillation import DistillSettings, distill
from models import character_tokenizer, tiny

PROMPTS = ["abc", "dead beef", "The 3 foxes", "xyz zy", "9 times 7", "Hello", "no no no", "ab ab ab"]
HELD_OUT = ["fox", "12 34", "beef", "the end"]
QUICK = DistillSettings(
    layers=(0,), max_new_tokens=12, steps=10, batch_size=4, warmup=2, precision="float32", checkpoint_every=5
)


def target(**changes: Any) -> Any:
    """A target whose layers matter, of four layers and with an untied output layer."""
    return tiny(scale=5.0, **({"num_hidden_layers": 4} | changes))


def run(out: Path, settings: DistillSettings = QUICK, **kwargs: Any) -> Any:
    arguments = {"held_out_prompts": HELD_OUT} | kwargs
    model = arguments.pop("target", None)
    return distill(
        target() if model is None else model,
        arguments.pop("draft", None),
        character_tokenizer(),
        arguments.pop("prompts", PROMPTS),
        settings,
        out,
        **arguments,
    )


def metrics(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]
