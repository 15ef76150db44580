"""A cache that was rolled back equals one that was computed afresh."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from diversed import ModelPair, PromptCache, StaticEnsemble, generate
from diversed.engine.cache import SlotCache, visible
from diversed.engine.decoder import Decoder
from diversed.engine.loop import Generating
from models import FAMILIES, noisy, pad_left, random_prompts, tiny

engine = importlib.import_module("diversed.engine.loop")

PROMPTS = random_prompts([7, 1, 40, 21, 3])


def assert_as_fresh(decoder: Decoder, active: list[Generating]) -> None:
    """Kept keys and values, and the logits and hidden states that follow from them, equal those of a new prefill."""
    kept = decoder.lengths
    fresh = Decoder(decoder.model, len(active), decoder.vocab_size)
    fresh.prefill([s.ids[:n] for s, n in zip(active, kept, strict=True)])
    assert fresh.lengths == kept
    for ours, theirs in ((decoder.cache.keys, fresh.cache.keys), (decoder.cache.values, fresh.cache.values)):
        for layer, expected in theirs.items():
            for b, n in enumerate(kept):
                torch.testing.assert_close(ours[layer][b, :, :n], expected[b, :, :n], rtol=1e-4, atol=1e-4)
    following = torch.tensor([[s.ids[n]] for s, n in zip(active, kept, strict=True)])
    first = torch.zeros(len(active), 1, dtype=torch.long)
    for ours, expected in zip(decoder.feed(following, first), fresh.feed(following, first), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def run_checked(pair: ModelPair, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[set[int]]:
    """Generate and check both caches before every block; returns how far rows advanced in each block."""
    decoders: list[Decoder] = []
    advanced: list[set[int]] = []

    class Recorded(Decoder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            decoders.append(self)

    draft_block = engine.draft_block
    before: dict[int, int] = {}

    def checked(draft: Decoder, active: list[Generating], *args: Any) -> Any:
        for decoder in decoders:
            assert_as_fresh(decoder, active)
        advanced.append({len(s.ids) - before.get(s.index, len(s.ids)) for s in active})
        before.update({s.index: len(s.ids) for s in active})
        return draft_block(draft, active, *args)

    monkeypatch.setattr("diversed.engine.pair.Decoder", Recorded)
    monkeypatch.setattr(engine, "draft_block", checked)
    generate(pair, **pad_left(PROMPTS), num_speculative_tokens=4, max_new_tokens=30, seed=0, **settings)
    assert len(decoders) == 2
    return advanced


@pytest.mark.parametrize("bonus", ["target", "verifier"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rolled_back_caches_equal_fresh_ones(family: str, bonus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every block of a ragged batch with rejections, in which sequences also end and leave."""
    target = tiny(family)
    pair = ModelPair(target, noisy(target, 0.2))
    advanced = run_checked(pair, monkeypatch, bonus=bonus, verifier=StaticEnsemble(0.9))
    assert len(advanced) > 6
    assert any(len(steps) > 1 for steps in advanced)  # in one block, rows kept different numbers of tokens


def test_a_cache_whose_rows_are_mixed_up_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a sequence leaves the batch, the others must keep their own rows."""
    keep_rows = SlotCache.keep_rows

    def first_rows(cache: SlotCache, rows: list[int]) -> None:
        lengths = [cache.lengths[row] for row in rows]
        keep_rows(cache, list(range(len(rows))))
        cache.lengths = lengths

    monkeypatch.setattr(SlotCache, "keep_rows", first_rows)
    target = tiny("llama", max_position_embeddings=48)  # the longest prompt ends first
    with pytest.raises(AssertionError):
        run_checked(ModelPair(target, noisy(target)), monkeypatch)


def test_buffers_grow_without_losing_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths, token by token, past several growths."""
    monkeypatch.setattr("diversed.engine.cache.CHUNK", 8)
    model = tiny("llama")
    ids = random_prompts([70, 60])
    decoder = Decoder(model, 2, 64)
    decoder.prefill([ids[0][:15], ids[1][:5]])
    first = torch.zeros(2, 1, dtype=torch.long)
    for i in range(50):
        logits, _ = decoder.feed(torch.tensor([[ids[0][15 + i]], [ids[1][5 + i]]]), first)
        decoder.lengths = [n + 1 for n in decoder.lengths]
    assert decoder.cache.keys[0].shape[2] < 90  # it grew on demand
    with torch.no_grad():
        for b, n in enumerate((65, 55)):
            expected = model(torch.tensor([ids[b][:n]])).logits[0, -1]
            torch.testing.assert_close(logits[b, 0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_the_mask_is_causal_and_within_the_window(window: int | None) -> None:
    cache = SlotCache(3, torch.device("cpu"))
    cache.lengths = [0, 5, 2]
    slots = cache.place(4)
    assert slots.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [2, 3, 4, 5]]
    mask = visible(slots, cache.extent, window)
    assert mask.shape == (3, 1, 4, 16)  # 9 slots, aligned
    for b in range(3):
        for t in range(4):
            place = slots[b, t]
            seen = [s for s in range(16) if s <= place and (window is None or place - s < window)]
            assert mask[b, 0, t].nonzero().flatten().tolist() == seen


@pytest.mark.parametrize("batch_size", [None, 2])
def test_kept_prompts_are_read_once_and_change_no_token(batch_size: int | None) -> None:
    """Over a sweep: what each call writes into its cache must not show in the next one."""
    target = tiny("llama")
    pair = ModelPair(target, noisy(target))
    asked: dict[str, Any] = {**pad_left([PROMPTS[2], *PROMPTS]), "max_new_tokens": 20, "batch_size": batch_size}
    widths: list[int] = []
    target.register_forward_pre_hook(
        lambda _, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )

    def sweep(prompt_cache: PromptCache | None) -> list[list[list[int]]]:
        settings = [{"num_speculative_tokens": 0}, {"verifier": StaticEnsemble(0.9)}, {"verifier": StaticEnsemble(0.1)}]
        return [generate(pair, **asked, **s, seed=3, prompt_cache=prompt_cache).token_ids for s in settings]

    expected = sweep(None)
    read_each_time = sum(w > 6 for w in widths)
    widths.clear()
    assert sweep(PromptCache()) == expected
    assert sum(w > 6 for w in widths) < read_each_time


def test_kept_prompts_are_those_of_the_last_call() -> None:
    target = tiny("llama")
    pair, kept = ModelPair(target, noisy(target)), PromptCache()
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[1:]):
        asked: dict[str, Any] = {**pad_left(prompts), "max_new_tokens": 20, "seed": 0}
        assert generate(pair, **asked, prompt_cache=kept).token_ids == generate(pair, **asked).token_ids
