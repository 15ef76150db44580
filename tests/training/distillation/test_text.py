"""What a draft learns from: sampled and given completions, in batches."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from diversed import ModelPair
from diversed.training.distillation import distill
from diversed.training.distillation.text import Lesson, batch_at, encode, sampled_sequences
from models import character_tokenizer, random_prompts
from training.distillation.made import QUICK, target


def test_an_epoch_visits_every_sequence_once():
    lengths = tuple(torch.randint(5, 60, (101,)).tolist())
    epoch = [batch_at(step, lengths, 4, seed=3) for step in range(26)]
    assert sorted(i for batch in epoch for i in batch) == list(range(101))
    assert sorted(i for step in range(26, 52) for i in batch_at(step, lengths, 4, seed=3)) == list(range(101))
    assert batch_at(26, lengths, 4, seed=3) != epoch[0]


def test_sampled_text_does_not_depend_on_batches_or_interruptions(tmp_path: Path):
    pair = ModelPair(target(), target(), character_tokenizer())
    prompts: list[list[int] | None] = [*random_prompts([3, 8, 5]), None]

    def sample(name: str, batch: int, **kwargs: Any) -> list[Lesson]:
        settings = {"samples_per_prompt": 3, "max_new_tokens": 8, "temperature": 1.0, "seed": 4} | kwargs
        return sampled_sequences(pair, prompts, tmp_path / name, batch_size=batch, **settings)

    whole = sample("whole", 9)
    assert len({tuple(x.completion) for x in whole if x.prompt == prompts[0]}) > 1  # several samples, not copies
    assert sample("cut", 2, until=0.0) == []
    late = sample("late", 9, until=time.perf_counter() + 0.2, max_new_tokens=5000)  # cut where it stands
    assert late
    assert all(0 < len(started.completion) < 5000 for started in late)
    sample("cut", 2)
    lines = (tmp_path / "cut").read_text().splitlines(keepends=True)
    (tmp_path / "cut").write_text("".join(lines[:4]) + lines[4][:10])  # killed while writing
    assert sample("cut", 2) == whole
    before = (tmp_path / "whole").read_text()
    assert sample("whole", 9) == whole
    assert (tmp_path / "whole").read_text() == before


def test_given_text_ends_as_the_chat_template_ends_it(tmp_path: Path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<a>' if m['role'] == 'user' else '<b>' }}{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<b>{% endif %}"
    )
    settings = dataclasses.replace(QUICK, text="given", steps=1)
    seen: list[dict[str, Any]] = []
    prompts = [[{"role": "user", "content": "hi"}], "hi", "unanswered"]
    out = distill(
        target(),
        None,
        tokenizer,
        prompts,
        settings,
        tmp_path,
        given=["yes", "yes", None],
        progress=lambda step, total, row: seen.append(row),
    )
    assert out.before is None
    assert out.after is None
    # <a> h i </s> <b> + y e s </s>, and h i + y e s </s>
    assert seen[-1]["tokens"] == 9 + 6
    assert not (tmp_path / "texts.jsonl").exists()


def test_prompts_beyond_the_context_are_left_out_like_other_long_ones():
    pair = ModelPair(target(), target(), character_tokenizer())
    assert pair.context is not None
    encoded = encode(pair, ["ab", "a" * (pair.context + 5)], 100, "prompts")
    assert encoded[0] is not None
    assert encoded[1] is None
