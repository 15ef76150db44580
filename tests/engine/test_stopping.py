"""Where a sequence ends at T = 1, where blocks hold what would have come after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diversed import GenerationOutput, ModelPair, StaticEnsemble, generate
from diversed.engine.stopping import Stopping
from models import EOS, character_tokenizer, noisy, pad_left, random_prompts, tiny

PROMPTS = random_prompts([7, 1, 20, 5])


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    target = tiny(scale=5.0, eos_token_id=None)
    return ModelPair(target, noisy(target, 0.1), character_tokenizer())


def run(pair: ModelPair, **settings: Any) -> GenerationOutput:
    request = {"verifier": StaticEnsemble(0.6), "num_speculative_tokens": 5, "max_new_tokens": 30, "ignore_eos": True}
    return generate(pair, **pad_left(PROMPTS), seed=2, **(request | settings))


def assert_cut(out: GenerationOutput, free: GenerationOutput, ends: list[int | None]) -> None:
    """Each sequence is the unconstrained one up to and with its end."""
    for ids, reason, full, end in zip(out.token_ids, out.finish_reasons, free.token_ids, ends, strict=True):
        assert ids == (full if end is None else full[: end + 1])
        assert reason == ("length" if end is None else "stop")
    assert out.stats.tokens == sum(map(len, out.token_ids))


def first(ids: list[int], wanted: set[int]) -> int | None:
    return next((i for i, token in enumerate(ids) if token in wanted), None)


def test_one_of_several_end_tokens_ends_a_sequence_wherever_it_falls(pair: ModelPair) -> None:
    free = run(pair)
    inside = 0
    for token in range(0, 64, 3):
        wanted = {token, (token + 31) % 64}
        out = run(pair, eos_token_id=sorted(wanted), ignore_eos=False)
        assert_cut(out, free, [first(ids, wanted) for ids in free.token_ids])
        inside += out.stats.tokens < out.stats.target_calls + sum(out.stats.accepted)
        assert all(d >= a for d, a in zip(out.stats.drafted, out.stats.accepted, strict=True))
    assert inside > 5  # the end fell on an accepted token, not only on the last of a block


def test_ignore_eos_runs_to_the_length(pair: ModelPair) -> None:
    out = run(pair, eos_token_id=list(range(64)))
    assert out.finish_reasons == ["length"] * 4
    assert [len(ids) for ids in out.token_ids] == [30] * 4


@pytest.mark.parametrize("source", ["generation_config", "config", "tokenizer"])
def test_the_end_token_comes_from_the_target_or_else_from_the_tokenizer(source: str) -> None:
    target = tiny(scale=5.0, eos_token_id=None)
    tokenizer = character_tokenizer()
    end = 40
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end if source == "tokenizer" else 41)
    if source == "generation_config":
        target.generation_config.eos_token_id = [end]
        target.config.eos_token_id = 42
    if source == "config":
        target.config.eos_token_id = end
    pair = ModelPair(target, noisy(target, 0.1), tokenizer)
    out = generate(pair, **pad_left(PROMPTS * 4), seed=2, max_new_tokens=60)
    stopped = [ids for ids, reason in zip(out.token_ids, out.finish_reasons, strict=True) if reason == "stop"]
    assert stopped
    assert all(ids.index(end) == len(ids) - 1 for ids in stopped)


def test_stop_strings_end_the_text_and_nothing_follows(pair: ModelPair) -> None:
    free = run(pair)
    inside = 0
    for full in free.texts:
        for start in range(0, len(full) - 3, 4):
            stop = full[start : start + 2]
            out = run(pair, stop_strings=stop)
            for text, complete, ids, unstopped in zip(
                out.texts, free.texts, out.token_ids, free.token_ids, strict=True
            ):
                end = complete.find(stop)
                assert text == (complete if end < 0 else complete[: end + 2])
                assert ids == unstopped[: len(ids)]
                if end >= 0:
                    assert pair.tokenizer.decode(ids[:-1], skip_special_tokens=True) == text[:-1]
            inside += out.stats.tokens < out.stats.target_calls + sum(out.stats.accepted)
    assert inside > 3


def test_a_stop_string_may_end_inside_a_token() -> None:
    """The token stays, the text ends with the string."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["xyz"])
    target = tiny(vocab_size=65)
    stopping = Stopping.of(ModelPair(target, target, tokenizer), stop_strings=["y", "bx"])
    b, whole = tokenizer.convert_tokens_to_ids(["b", "xyz"])
    assert stopping.cut([7], 1, [8, whole, 9]) == ([8, whole], "stop")
    assert stopping.text([8, whole]) == tokenizer.decode([8]) + "xy"
    assert stopping.cut([7, b], 1, [whole, 9]) == ([whole], "stop")
    assert stopping.text([b, whole]) == "bx"


def test_a_stop_string_inside_the_prompt_does_not_count(pair: ModelPair) -> None:
    out = generate(pair, "stop stop", stop_strings="stop", max_new_tokens=10, seed=0, ignore_eos=True)
    assert len(out.token_ids[0]) == 10


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 6])
def test_the_length_limit_is_met_exactly(pair: ModelPair, num_speculative_tokens: int, limit: int) -> None:
    """Also inside a block; and it only cuts."""
    settings = {"verifier": StaticEnsemble(0.0), "num_speculative_tokens": num_speculative_tokens}
    out = run(pair, max_new_tokens=limit, **settings)
    assert [len(ids) for ids in out.token_ids] == [limit] * 4
    assert out.finish_reasons == ["length"] * 4
    assert sum(out.stats.accepted) == sum(out.stats.drafted)


def test_criteria_are_asked_after_every_token(pair: ModelPair) -> None:
    """With prompt and new tokens, unpadded, as transformers would hand them over."""
    seen: list[tuple[int, ...]] = []

    def at_most_25(input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Tensor:
        seen.append(tuple(input_ids[0].tolist()))
        return torch.tensor([input_ids.shape[1] >= 25])

    free = run(pair)
    out = run(pair, stopping_criteria=[at_most_25])
    assert_cut(out, free, [24 - len(prompt) for prompt in PROMPTS])
    expected = {
        (*prompt, *ids[:i]) for prompt, ids in zip(PROMPTS, out.token_ids, strict=True) for i in range(1, len(ids) + 1)
    }
    assert set(seen) == expected
    assert len(seen) == len(expected)


def test_callback_and_streamer_receive_every_token_once_and_in_order(pair: ModelPair) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.received: list[list[int]] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.received.append(value[0].tolist())

        def end(self) -> None:
            self.ended = True

    streamer = Streamer()
    blocks: list[list[int]] = []
    out = generate(
        pair,
        input_ids=torch.tensor([PROMPTS[0]]),
        seed=0,
        max_new_tokens=20,
        eos_token_id=EOS,
        streamer=streamer,
        callback=lambda index, new: blocks.append(new),
    )
    assert streamer.received == [PROMPTS[0], *blocks]
    assert [token for block in blocks for token in block] == out.token_ids[0]
    assert streamer.ended


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_special_token_may_be_a_stop_string(pair: ModelPair, ignore_eos: bool) -> None:
    """It decodes to nothing, so that it would never be found in the text."""
    stopping = Stopping.of(pair, stop_strings=["<a>", "xy"], ignore_eos=ignore_eos)
    a, x, y = pair.tokenizer.convert_tokens_to_ids(["<a>", "x", "y"])
    assert stopping.cut([7], 1, [x, a, x]) == ([x, a], "stop")
    assert stopping.cut([7], 1, [x, y, x]) == ([x, y], "stop")
    assert stopping.text([x, a]) == "x"
