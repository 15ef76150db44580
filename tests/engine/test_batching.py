"""A request's tokens do not depend on its company: alone or in a batch, early or late, in chunks or at once."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from diversed import GenerationOutput, Lossless, ModelPair, StaticEnsemble, Verifier, generate
from diversed.engine.decoder import Decoder
from models import noisy, pad_left, random_head, random_prompts, tiny

engine = importlib.import_module("diversed.engine.loop")

PROMPTS = random_prompts([7, 1, 40, 21, 3, 12])
SEEDS = [11, 5, 99, 5, 42, 0]
EVERYONE = range(len(PROMPTS))


def run(pair: ModelPair, which: Sequence[int], **settings: Any) -> GenerationOutput:
    request = {"num_speculative_tokens": 3, "max_new_tokens": 25, "temperature": 1.0, "trace": True} | settings
    return generate(pair, **pad_left([PROMPTS[i] for i in which]), seed=[SEEDS[i] for i in which], **request)


def assert_same(a: GenerationOutput, i: int, b: GenerationOutput, j: int) -> None:
    """Sequence i of one call is sequence j of another, to the last token, count and trace."""
    assert a.token_ids[i] == b.token_ids[j]
    assert a.finish_reasons[i] == b.finish_reasons[j]
    assert a.stats.per_sequence[i] == b.stats.per_sequence[j]
    if a.trace is None or b.trace is None:
        return
    ours, theirs = a.trace[i], b.trace[j]
    assert ours.origin == theirs.origin
    assert ours.token_ids.tolist() == a.token_ids[i]
    for name in (
        "token_ids",
        "weight",
        "target_prob",
        "draft_prob",
        "total_variation",
        "target_hidden",
        "draft_hidden",
    ):
        x, y = getattr(ours, name), getattr(theirs, name)
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4, equal_nan=True, msg=name)


CASES: list[tuple[str, Verifier, dict[str, Any]]] = [
    ("llama", random_head(32, 32), {}),
    ("llama", random_head(32, 32), {"bonus": "verifier"}),
    ("llama", StaticEnsemble(0.4), {"repetition_penalty": 1.3, "top_k": 20, "top_p": 0.9}),
    ("llama", Lossless(), {"temperature": 0.0}),
    ("gemma3", StaticEnsemble(0.6), {"temperature": 0.7}),
    ("gpt2", StaticEnsemble(0.9), {"min_p": 0.05}),
]


def pair_of(family: str, **changes: Any) -> ModelPair:
    target = tiny(family, scale=6.0, **changes)
    return ModelPair(target, noisy(target, 0.2))


@pytest.mark.parametrize(("family", "verifier", "settings"), CASES)
def test_alone_in_a_batch_reversed_or_in_chunks(family: str, verifier: Verifier, settings: dict[str, Any]) -> None:
    pair = pair_of(family)
    together = run(pair, EVERYONE, verifier=verifier, **settings)
    assert together.stats.acceptance_rate is not None
    assert 0.1 < together.stats.acceptance_rate < 0.95
    backwards = run(pair, EVERYONE[::-1], verifier=verifier, **settings)
    chunks = [run(pair, EVERYONE, verifier=verifier, batch_size=size, **settings) for size in (2, 4)]
    for i in EVERYONE:
        alone = run(pair, [i], verifier=verifier, **settings)
        assert_same(together, i, alone, 0)
        assert_same(backwards, len(PROMPTS) - 1 - i, alone, 0)
        for out in chunks:
            assert_same(out, i, alone, 0)


@pytest.mark.parametrize("bonus", ["target", "verifier"])
def test_rows_near_their_end_draft_less_and_change_nothing_for_the_others(bonus: str) -> None:
    """A short context ends rows at different lengths, so that a block holds rows with room for 0, 1, 2... drafts."""
    pair = pair_of("llama", max_position_embeddings=44, eos_token_id=None)
    settings = {"verifier": StaticEnsemble(0.5), "bonus": bonus, "max_new_tokens": 100, "num_speculative_tokens": 5}
    together = run(pair, EVERYONE, **settings)
    assert [len(ids) for ids in together.token_ids] == [44 - len(ids) for ids in PROMPTS]
    for i in EVERYONE:
        assert_same(together, i, run(pair, [i], **settings), 0)


def test_tokens_do_not_depend_on_the_trace() -> None:
    pair = pair_of("llama")
    with_trace, without = (run(pair, EVERYONE, verifier=random_head(32, 32), trace=t) for t in (True, False))
    assert without.trace is None
    assert with_trace.token_ids == without.token_ids


def test_sequences_end_at_different_times() -> None:
    """Else the tests above would never shrink a batch."""
    out = run(pair_of("llama"), EVERYONE, verifier=random_head(32, 32), eos_token_id=list(range(5, 9)))
    assert len(set(map(len, out.token_ids))) > 2
    for i in EVERYONE:
        alone = run(pair_of("llama"), [i], verifier=random_head(32, 32), eos_token_id=list(range(5, 9)))
        assert_same(out, i, alone, 0)


def test_one_seed_counts_up_over_the_prompts() -> None:
    pair = pair_of("llama")
    prompts = pad_left([PROMPTS[0]] * 3)
    counted = generate(pair, **prompts, seed=7, max_new_tokens=12).token_ids
    assert counted == generate(pair, **prompts, seed=[7, 8, 9], max_new_tokens=12).token_ids
    assert len(set(map(tuple, counted))) > 1
    same = generate(pair, **prompts, seed=[7, 7, 7], max_new_tokens=12).token_ids
    assert same == [counted[0]] * 3


def test_without_a_seed_torchs_own_decides() -> None:
    pair = pair_of("llama")

    def draw(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return generate(pair, **pad_left(PROMPTS), max_new_tokens=12).token_ids

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_waiting_sequences_take_the_rows_of_finished_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as anybody waits, no row stands empty; and each gets the tokens it would get alone."""
    pair = pair_of("llama", eos_token_id=None)
    limits = [3, 25, 8, 1, 12, 5]
    sizes: list[int] = []
    draft_block = engine.draft_block

    def recorded(draft: Decoder, active: list[Any], *args: Any) -> Any:
        sizes.append(len(active))
        return draft_block(draft, active, *args)

    monkeypatch.setattr(engine, "draft_block", recorded)
    settings: dict[str, Any] = {"verifier": StaticEnsemble(0.5), "ignore_eos": True}
    out = run(pair, EVERYONE, batch_size=2, max_new_tokens=limits, **settings)
    assert [len(ids) for ids in out.token_ids] == limits
    assert sizes == sorted(sizes, reverse=True)
    assert sizes.count(2) > sizes.count(1)
    for i in EVERYONE:
        assert_same(out, i, run(pair, [i], max_new_tokens=limits[i], **settings), 0)


def test_a_prompt_given_several_times_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = ModelPair(tiny("gemma3"), noisy(tiny("gemma3")), target_name="t", draft_name="d")
    company = [2, 3, 2, 2, 3, 0]
    read: list[int] = []
    feed = Decoder.feed

    def watched(self: Decoder, tokens: torch.Tensor, at: torch.Tensor) -> Any:
        if at.shape[1] == 0 and self.model is pair.target:
            read.append(len(tokens))
        return feed(self, tokens, at)

    monkeypatch.setattr(Decoder, "feed", watched)
    together = run(pair, company, verifier=StaticEnsemble(0.5))
    assert read == [3]
    for i, which in enumerate(company):
        assert_same(together, i, run(pair, [which], verifier=StaticEnsemble(0.5)), 0)


def test_threads_may_share_a_pair() -> None:
    """Each call's numbers are its own, and the models are left as they were."""
    target = tiny(eos_token_id=None)
    pair = ModelPair(target, noisy(target, 0.1))
    before = target.config._attn_implementation
    prompts = [torch.tensor([[i + 6, i + 7, i + 8]]) for i in range(4)]

    def answer(prompt: Tensor) -> list[list[int]]:
        other = ModelPair(pair.target, pair.draft)  # as transformers' custom_generate makes one for every call
        return generate(other, input_ids=prompt, temperature=0.0, max_new_tokens=30, num_speculative_tokens=3).token_ids

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(answer, prompts)) == alone
    assert target.config._attn_implementation == before
