"""At temperature 0 and lossless, the output is target-only greedy decoding, token for token."""

from __future__ import annotations

import pytest
import torch

from diversed import GenerationOutput, Lossless, ModelPair, StaticEnsemble, generate
from diversed.engine.cache import visible
from diversed.verifiers import BlockVerification, OpeningRule
from models import EOS, FAMILIES, WINDOW, character_tokenizer, greedy_reference, noisy, pad_left, random_prompts, tiny

LENGTHS = [7, 3, 40, 21, 1]
NEW = 45  # well past the sliding window


def pair_of(family: str, attention: str = "sdpa", **changes: object) -> ModelPair:
    target = tiny(family, attention=attention, **changes)
    return ModelPair(target, noisy(target))


def both_paths_ran(out: GenerationOutput) -> bool:
    rate = out.stats.acceptance_rate
    return rate is not None and 0.1 < rate < 0.95


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_and_single_prompts_equal_the_target(family: str, attention: str) -> None:
    pair = pair_of(family, attention)
    prompts = random_prompts(LENGTHS)
    expected = greedy_reference(pair.target, prompts, NEW)
    assert max(map(len, expected)) > 2 * WINDOW
    settings = {"temperature": 0, "max_new_tokens": NEW, "num_speculative_tokens": 4}
    batch = generate(pair, **pad_left(prompts), **settings)
    assert batch.token_ids == expected
    assert both_paths_ran(batch)
    for ids, reference in zip(prompts, expected, strict=True):
        assert generate(pair, input_ids=torch.tensor([ids]), **settings).token_ids == [reference]


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_ignoring_the_sliding_window_would_be_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(family)
    prompts = random_prompts(LENGTHS)
    monkeypatch.setattr("diversed.engine.decoder.visible", lambda slots, extent, window=None: visible(slots, extent))
    out = generate(pair, **pad_left(prompts), temperature=0, max_new_tokens=NEW)
    assert out.token_ids != greedy_reference(pair.target, prompts, NEW)


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("bonus", ["target", "verifier"])
@pytest.mark.parametrize("verifier", [Lossless(), StaticEnsemble(1.0), StaticEnsemble(0.3).at(quality=1)])
def test_any_block_length_bonus_and_lossless_verifier_equal_the_target(
    verifier: StaticEnsemble, bonus: str, num_speculative_tokens: int
) -> None:
    pair = pair_of("llama")
    prompts = random_prompts(LENGTHS)
    out = generate(
        pair,
        **pad_left(prompts),
        verifier=verifier,
        bonus=bonus,
        temperature=0,
        max_new_tokens=20,
        num_speculative_tokens=num_speculative_tokens,
    )
    assert out.token_ids == greedy_reference(pair.target, prompts, 20)


def test_right_padding_and_several_chunks_of_prefill_equal_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diversed.engine.decoder.PREFILL_CHUNK", 8)
    pair = pair_of("gemma3")
    prompts = random_prompts(LENGTHS)
    padded = pad_left([ids[::-1] for ids in prompts])
    out = generate(pair, **{k: v.flip(1) for k, v in padded.items()}, temperature=0, max_new_tokens=20)
    assert out.token_ids == greedy_reference(pair.target, prompts, 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_as_end_of_sequence_stops_exactly_there(family: str) -> None:
    """Whichever token ends the sequence, wherever in a block it falls: nothing is lost and nothing follows."""
    pair = pair_of(family, eos_token_id=None)
    prompt = random_prompts([9])
    (full,) = greedy_reference(pair.target, prompt, 25)
    inside_a_block = 0
    for token in sorted(set(full)):
        out = generate(
            pair, **pad_left(prompt), temperature=0, max_new_tokens=25, num_speculative_tokens=4, eos_token_id=token
        )
        expected = full[: full.index(token) + 1]
        assert out.token_ids == [expected]
        assert out.token_ids == greedy_reference(pair.target, prompt, 25, eos_token_id=token)
        assert out.finish_reasons == ["stop"]
        inside_a_block += out.stats.tokens < out.stats.target_calls + sum(out.stats.accepted)
    assert inside_a_block > 0


@pytest.mark.parametrize(("family", "seed"), [("llama", 5), ("gpt2", 0)])
def test_every_stop_string_ends_the_sequence_with_the_token_that_completes_it(family: str, seed: int) -> None:
    """Strings of one, two and three tokens at every place of the output."""
    target = tiny(family, eos_token_id=None)
    tokenizer = character_tokenizer()
    pair = ModelPair(target, noisy(target), tokenizer)
    prompt = random_prompts([9], seed=seed)
    (full,) = greedy_reference(target, prompt, 16)
    assert min(full) > EOS  # special tokens have no characters
    text = tokenizer.decode(full)
    inside_a_block = 0
    for start in range(len(text) - 3):
        stop = text[start : start + 1 + start % 3]
        out = generate(
            pair,
            **pad_left(prompt),
            temperature=0,
            max_new_tokens=16,
            num_speculative_tokens=4,
            stop_strings=[stop, "~~~"],
        )
        assert out.texts == [text[: text.index(stop) + len(stop)]]
        assert out.token_ids == [full[: len(out.texts[0])]]
        assert out.token_ids == greedy_reference(target, prompt, 16, stop_strings=[stop], tokenizer=tokenizer)
        assert out.finish_reasons == ["stop"]
        inside_a_block += out.stats.tokens < out.stats.target_calls + sum(out.stats.accepted)
    assert inside_a_block > 0


def test_a_ragged_batch_in_which_sequences_end_at_different_times_equals_the_target() -> None:
    pair = pair_of("llama")
    prompts = random_prompts([5, 17, 2, 30, 11, 8, 23, 3])
    ends = [EOS, 38]
    expected = greedy_reference(pair.target, prompts, 40, eos_token_id=ends)
    out = generate(pair, **pad_left(prompts), temperature=0, max_new_tokens=40, eos_token_id=ends)
    assert out.token_ids == expected
    assert len(set(map(len, expected))) > 4
    assert both_paths_ran(out)


def test_the_contexts_end_ends_the_sequence() -> None:
    """Rows of different lengths reach it at different times; the last positions are still right."""
    pair = pair_of("gpt2", n_positions=48, eos_token_id=None)
    prompts = random_prompts([30, 44, 47, 12])
    out = generate(pair, **pad_left(prompts), temperature=0, max_new_tokens=100, num_speculative_tokens=6)
    assert [len(ids) for ids in out.token_ids] == [18, 4, 1, 36]
    assert out.finish_reasons == ["length"] * 4
    for ids, prompt in zip(out.token_ids, prompts, strict=True):
        assert [ids] == greedy_reference(pair.target, [prompt], 48 - len(prompt))


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 5])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_verifier_knows_how_far_each_text_has_come(num_speculative_tokens: int, wrapped: bool) -> None:
    """A strict opening of 9 tokens: the target's text, gone on with by the draft."""
    pair = pair_of("llama")
    prompts = random_prompts(LENGTHS)
    opening = [ids[:9] for ids in greedy_reference(pair.target, prompts, NEW)]
    rest = greedy_reference(pair.draft, [p + o for p, o in zip(prompts, opening, strict=True)], NEW - 9)
    expected = [o if len(o) < 9 or EOS in o else o + r for o, r in zip(opening, rest, strict=True)]
    assert expected != greedy_reference(pair.target, prompts, NEW)
    rule = OpeningRule(9)
    out = generate(
        pair,
        **pad_left(prompts),
        verifier=BlockVerification(rule) if wrapped else rule,
        bonus="verifier",
        temperature=0,
        max_new_tokens=NEW,
        num_speculative_tokens=num_speculative_tokens,
    )
    assert out.token_ids == expected
