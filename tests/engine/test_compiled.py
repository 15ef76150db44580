"""A compiled pair decodes what an ordinary one does."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from diversed import ModelPair, StaticEnsemble, generate
from diversed.engine.compiled import SMALLEST, capacity_for
from models import noisy, random_prompts, tiny

pytestmark = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


def pairs(family: str, **changes: Any) -> list[ModelPair]:
    target = tiny(family, **changes)
    draft = noisy(target, 0.2)
    return [ModelPair(target, draft, compiled=compiled) for compiled in (False, True)]


def check(family: str, **settings: Any) -> None:
    plain, compiled = pairs(family)
    request = {"verifier": StaticEnsemble(0.6), "num_speculative_tokens": 3, "max_new_tokens": 30, "seed": 1} | settings
    for prompt in random_prompts([9, 1, 30]):
        ids = torch.tensor([prompt])
        expected = generate(plain, input_ids=ids, **request)
        found = generate(compiled, input_ids=ids, **request)
        assert found.token_ids == expected.token_ids
        assert found.stats.per_sequence == expected.stats.per_sequence


def test_it_decodes_the_same_tokens_and_compiles_once() -> None:
    plain, compiled = pairs("llama", num_hidden_layers=1)
    ids = torch.tensor(random_prompts([20]))
    expected, first, second = (
        generate(p, input_ids=ids, num_speculative_tokens=2, max_new_tokens=16, seed=0)
        for p in (plain, compiled, compiled)
    )
    assert first.token_ids == second.token_ids == expected.token_ids
    assert first.stats.time.compile > 10 * second.stats.time.compile
    assert first.stats.time.total < first.stats.time.compile  # the total leaves it out
    # Somebody else's forward pass through the same model is not disturbed.
    with torch.inference_mode():
        assert compiled.target(ids).logits.shape == (1, 20, compiled.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_other_architectures(family: str) -> None:
    check(family, temperature=0.8)


@pytest.mark.slow
def test_trace_bonus_from_nu_and_greedy() -> None:
    check("llama", trace=True, bonus="verifier")
    check("llama", temperature=0.0)


@pytest.mark.slow
def test_draft_lengths_that_change_and_penalties() -> None:
    plain, compiled = pairs("llama")
    ids = torch.tensor(random_prompts([20]))
    request = {"input_ids": ids, "temperature": 0.0, "max_new_tokens": 60}
    expected = generate(plain, num_speculative_tokens=3, **request)
    found = generate(compiled, num_speculative_tokens="auto", **request)
    assert found.token_ids == expected.token_ids
    # Penalties look at the tokens so far: no graph drafts several tokens then.
    request |= {"repetition_penalty": 1.3, "num_speculative_tokens": 2}
    assert generate(compiled, **request).token_ids == generate(plain, **request).token_ids


def test_a_failed_compilation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(function: Any) -> Any:
        tried.append(function)

        def graph(*args: Any) -> Any:
            raise RuntimeError("no compiler today")

        return graph

    _, compiled = pairs("llama", num_hidden_layers=1)
    monkeypatch.setattr("diversed.engine.compiled.unguarded", fails)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no compiler today"):
            generate(compiled, input_ids=torch.tensor(random_prompts([5])), max_new_tokens=4)
    assert len(tried) == 2  # the second call found no graph of the first


def test_batches_are_decoded_as_without_it() -> None:
    plain, compiled = pairs("llama")
    ids = torch.tensor(random_prompts([8, 8]))
    expected, found = (generate(p, input_ids=ids, max_new_tokens=10, seed=3) for p in (plain, compiled))
    assert expected.token_ids == found.token_ids
    assert found.stats.time.compile < 0.01


@pytest.mark.parametrize(("length", "slots"), [(1, SMALLEST), (256, 256), (257, 512), (1000, 1024)])
def test_buffers_come_in_powers_of_two(length: int, slots: int) -> None:
    assert capacity_for(length) == slots
