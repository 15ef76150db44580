"""What a request forbids is never emitted, whatever the verifier would accept."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from diversed import GenerationOutput, Lossless, ModelPair, StaticEnsemble, Verifier, generate
from models import noisy, pad_left, random_head, random_prompts, table, tiny

engine = importlib.import_module("diversed.engine.loop")

PROMPTS = random_prompts([5, 1, 12, 8, 8, 3])
VERIFIERS = [Lossless(), StaticEnsemble(0.3), StaticEnsemble(0.0), StaticEnsemble(0.9).at(quality=0)]


class Alternate(LogitsProcessor):
    """A grammar: after an even token comes an odd one below 32, after an odd token an even one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = torch.arange(scores.shape[-1])
        after_even = (ids % 2 == 1) & (ids < 32)
        allowed = torch.where(input_ids[:, -1:] % 2 == 0, after_even, ids % 2 == 0)
        return scores.masked_fill(~allowed, -torch.inf)


@dataclass
class Case:
    request: dict[str, Any]
    processors: Sequence[LogitsProcessor]  # the same for one row, in the order of transformers


BAD_WORDS = NoBadWordsLogitsProcessor([[20], [30], [9, 10], *([i] for i in range(40, 60))], eos_token_id=None)
CASES = {
    "bad words": Case({"logits_processor": [BAD_WORDS]}, [BAD_WORDS]),
    "grammar": Case({"logits_processor": [Alternate()]}, [Alternate()]),
    "no repeated bigrams": Case(
        {"logits_processor": [NoRepeatNGramLogitsProcessor(2)]}, [NoRepeatNGramLogitsProcessor(2)]
    ),
    "top-k": Case({"top_k": 3}, [TopKLogitsWarper(3)]),
    "top-p": Case({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
    "min-p": Case({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "grammar, bad words and top-k": Case(
        {"logits_processor": [Alternate(), BAD_WORDS], "top_k": 4, "min_p": 0.01},
        [Alternate(), BAD_WORDS, TopKLogitsWarper(4), MinPLogitsWarper(0.01)],
    ),
}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """A draft that often proposes what the target's top-k would not."""
    target = tiny(scale=5.0, eos_token_id=None)
    return ModelPair(target, noisy(target, 0.4))


def forbidden(pair: ModelPair, out: GenerationOutput, case: Case, temperature: float) -> int:
    """How many emitted tokens the target's processed logits rule out, from bare forward passes."""
    processors = LogitsProcessorList([*case.processors])
    if temperature not in (0, 1):
        warpers = [p for p in case.processors if isinstance(p, TopKLogitsWarper | TopPLogitsWarper | MinPLogitsWarper)]
        rest = [p for p in case.processors if p not in warpers]
        processors = LogitsProcessorList([*rest, TemperatureLogitsWarper(temperature), *warpers])
    count = 0
    for prompt, new in zip(PROMPTS, out.token_ids, strict=True):
        ids = torch.tensor([prompt + new])
        with torch.no_grad():
            logits = pair.target(ids).logits[0]
        for i, token in enumerate(new, len(prompt)):
            count += int(processors(ids[:, :i], logits[i - 1 : i].clone())[0, token] < -1e30)
    return count


def run(pair: ModelPair, case: Case, verifier: Verifier, temperature: float, bonus: str) -> GenerationOutput:
    return generate(
        pair,
        **pad_left(PROMPTS),
        verifier=verifier,
        temperature=temperature,
        bonus=bonus,
        num_speculative_tokens=3,
        max_new_tokens=20,
        seed=1,
        **case.request,
    )


@pytest.mark.parametrize("bonus", ["target", "verifier"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", CASES)
def test_nothing_forbidden_is_emitted(
    pair: ModelPair, name: str, verifier: Verifier, temperature: float, bonus: str
) -> None:
    out = run(pair, CASES[name], verifier, temperature, bonus)
    assert out.stats.tokens == 120
    assert forbidden(pair, out, CASES[name], temperature) == 0


@pytest.mark.parametrize("name", ["top-k", "top-p", "grammar, bad words and top-k"])
def test_nothing_forbidden_is_emitted_at_another_temperature_and_by_a_learned_verifier(
    pair: ModelPair, name: str
) -> None:
    head = random_head(32, 32)
    for verifier in (head, head.at(quality=0)):
        assert forbidden(pair, run(pair, CASES[name], verifier, 0.7, "target"), CASES[name], 0.7) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p", "grammar, bad words and top-k"])
def test_without_the_mask_forbidden_tokens_would_be_emitted(
    pair: ModelPair, name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the draft never proposed any and the test above showed nothing. (At T = 0 argmax q must differ.)"""
    monkeypatch.setattr(engine, "mask_to_support", lambda nu, p, support: nu)
    out = run(pair, CASES[name], StaticEnsemble(0.0), temperature, "target")
    assert forbidden(pair, out, CASES[name], temperature) > 0


@pytest.mark.parametrize("name", ["grammar", "no repeated bigrams"])
def test_processors_that_miss_drafted_positions_would_be_seen(
    pair: ModelPair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole block processed as if it stood at its first position."""
    prefixes = engine.prefixes

    def first_only(*args: Any, **kwargs: Any) -> list[list[Tensor]]:
        return [[row[0]] * len(row) for row in prefixes(*args, **kwargs)]

    monkeypatch.setattr(engine, "prefixes", first_only)
    out = run(pair, CASES[name], Lossless(), 0.0, "target")
    assert forbidden(pair, out, CASES[name], 0.0) > 0


def test_a_grammar_that_ends_may_allow_nothing_after_the_end(pair: ModelPair) -> None:
    """Drafted tokens behind an end-of-sequence token are no candidates: what a processor says there is no error."""
    end = 11

    class Ends(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            ended = (input_ids == end).any(-1, keepdim=True)
            return scores.masked_fill(ended, -torch.inf)

    for temperature in (0.0, 1.0):
        settings = {"eos_token_id": end, "temperature": temperature, "max_new_tokens": 40, "seed": 0}
        prompts = pad_left([[t for t in ids if t != end] for ids in PROMPTS])
        free = generate(pair, **prompts, **settings)
        constrained = generate(pair, **prompts, **settings, logits_processor=[Ends()])
        assert "stop" in free.finish_reasons
        assert constrained.token_ids == free.token_ids


@pytest.mark.parametrize("verifier", [Lossless(), StaticEnsemble(0.2)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_the_draft_does_not_have_may_be_all_that_is_allowed(verifier: Verifier, temperature: float) -> None:
    """The draft then proposes something else and is refused; the request is answered as the target would."""

    class Only(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            allowed = [5] if input_ids.shape[1] % 2 else [4, 5]
            return scores.masked_fill(~torch.isin(torch.arange(scores.shape[1]), torch.tensor(allowed)), -torch.inf)

    pair = ModelPair(table(torch.full((6, 6), 1 / 6)), table(torch.full((4, 4), 1 / 4)))
    settings = {"temperature": temperature, "max_new_tokens": 6, "seed": 0, "logits_processor": [Only()]}
    out = generate(pair, input_ids=torch.tensor([[1], [2]]), verifier=verifier, num_speculative_tokens=3, **settings)
    assert out.stats.tokens == 12
    assert all(token in (4, 5) for ids in out.token_ids for token in ids)
    assert all(ids[0] == ids[2] == ids[4] == 5 for ids in out.token_ids)
