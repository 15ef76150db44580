"""Whole sequences follow the verification distribution, as enumerated by bare forward passes; and faults are seen.

The models are tiny Llamas over four tokens, so that cache, positions and masks of real attention layers take part.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diversed import Lossless, ModelPair, StaticEnsemble, Verifier, generate, verification
from diversed.engine.decoder import Decoder
from diversed.engine.draft_length import DraftLength
from models import VERIFIERS, enumerate_exactly, four_token_pair, goodness_of_fit, table

engine = importlib.import_module("diversed.engine.loop")

PROMPT = [1, 2, 0]
REJECT = 1e-5  # p-value below which the distributions differ


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return four_token_pair()


def p_value(
    pair: ModelPair,
    verifier: Verifier,
    num_speculative_tokens: int | str,
    samples: int,
    *,
    length: int = 4,
    batch_size: int | None = None,
    bonus: str = "verifier",
    temperature: float = 1.0,
    seed: int = 0,
) -> float:
    """Of the first ``length`` tokens of many generations against the exact nu-process."""
    out = generate(
        pair,
        input_ids=torch.tensor([PROMPT]).expand(samples, -1),
        verifier=verifier,
        num_speculative_tokens=num_speculative_tokens,
        max_new_tokens=max(length, 5 + 1),  # room for a whole block
        temperature=temperature,
        batch_size=batch_size,
        bonus=bonus,
        seed=seed,
    )
    exact = enumerate_exactly(pair, PROMPT, length, verifier, temperature)
    drawn = exact.index([ids[:length] for ids in out.token_ids])
    return goodness_of_fit(torch.bincount(drawn, minlength=len(exact.sequences)), exact.probability())


def test_the_pair_tells_verifiers_apart(pair: ModelPair) -> None:
    """Target and draft differ enough that following one cannot be mistaken for following another."""
    exact = {name: enumerate_exactly(pair, PROMPT, 4, v) for name, v in VERIFIERS.items()}
    tv = (exact["lossless"].p - exact["lossless"].q).abs().sum(-1) / 2
    assert 0.2 < tv.mean() < 0.7
    assert tv.std() > 0.05
    names = list(VERIFIERS)
    for i, a in enumerate(names):
        for b in names[:i]:
            counts = (8000 * exact[a].probability()).round().long()
            assert goodness_of_fit(counts, exact[b].probability()) < REJECT, (a, b)


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("name", VERIFIERS)
def test_sequences_follow_nu(pair: ModelPair, name: str, num_speculative_tokens: int) -> None:
    assert p_value(pair, VERIFIERS[name], num_speculative_tokens, 6000) > REJECT


@pytest.mark.parametrize(("batch_size", "samples"), [(1, 100), (7, 490)])
@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("name", VERIFIERS)
def test_sequences_follow_nu_in_small_batches(
    pair: ModelPair, name: str, num_speculative_tokens: int, batch_size: int, samples: int
) -> None:
    p = p_value(pair, VERIFIERS[name], num_speculative_tokens, samples, length=3, batch_size=batch_size, seed=50_000)
    assert p > REJECT


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "samples"), [(None, 50_000), (7, 2800), (1, 800)])
@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("name", VERIFIERS)
def test_sequences_follow_nu_over_many_samples(
    pair: ModelPair, name: str, num_speculative_tokens: int, batch_size: int | None, samples: int
) -> None:
    p = p_value(pair, VERIFIERS[name], num_speculative_tokens, samples, batch_size=batch_size, seed=100_000)
    assert p > REJECT


@pytest.mark.parametrize("plan", [[0, 3, 1, 2], [2, 0, 0, 5], [1, 4, 0, 1]])
@pytest.mark.parametrize("name", VERIFIERS)
def test_sequences_follow_nu_when_draft_lengths_change(
    pair: ModelPair, name: str, plan: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = itertools.cycle(plan)
    monkeypatch.setattr(DraftLength, "choose", lambda self, room: min(next(lengths), room))
    assert p_value(pair, VERIFIERS[name], "auto", 6000) > REJECT


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 2, 3, 5])
def test_lossless_follows_the_target_with_the_bonus_from_it(pair: ModelPair, num_speculative_tokens: int) -> None:
    assert p_value(pair, Lossless(), num_speculative_tokens, 6000, bonus="target") > REJECT


def test_without_drafting_the_verifiers_bonus_samples_nu_directly(pair: ModelPair) -> None:
    """N = 0 with bonus="verifier" is sampling from nu one token at a time: a control without any verification."""
    assert p_value(pair, StaticEnsemble(0.3), 0, 6000) > REJECT


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("name", ["lossless", "static-0.3", "learned"])
def test_both_models_are_taken_at_the_requests_temperature(pair: ModelPair, name: str, temperature: float) -> None:
    assert p_value(pair, VERIFIERS[name], 2, 6000, temperature=temperature) > REJECT


def test_the_bonus_from_the_target_is_what_separates_the_output_from_nu(pair: ModelPair) -> None:
    """With N = 1 every second token of a permissive verifier comes from the target, and the test can tell."""
    assert p_value(pair, StaticEnsemble(0.3), 1, 6000, bonus="target") < REJECT


@pytest.mark.parametrize("name", ["lossless", "static-0.3"])
def test_table_models_follow_nu(name: str) -> None:
    """Markov chains with entries from 0 to 1, among them tokens that only one of the two models ever draws."""
    target = table([[0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0.4], [0, 0, 0, 1], [0.25, 0.25, 0.25, 0.25]])
    draft = table([[0.2, 0.2, 0.3, 0.3], [0.4, 0.3, 0.2, 0.1], [0.5, 0, 0.5, 0], [1, 0, 0, 0]])
    assert p_value(ModelPair(target, draft), VERIFIERS[name], 3, 6000) > REJECT


def recovered_from_nu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual without max(., 0)."""
    monkeypatch.setattr(verification, "residual_distribution", lambda nu, q: nu)


def q_at_another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify against a q that is not the one that drew."""

    def verify_block(tokens: Tensor, q: Tensor, *rest: Tensor) -> verification.Verified:
        return verification.verify_block(tokens, (q.log() / 1.5).softmax(-1), *rest)

    monkeypatch.setattr(engine, "verify_block", verify_block)


def bonus_from_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution of the last drafted token instead of the one after it."""

    def verify_block(tokens: Tensor, q: Tensor, nu: Tensor, bonus: Tensor, *rest: Tensor) -> verification.Verified:
        return verification.verify_block(tokens, q, nu, nu[:, -1] if nu.shape[1] else bonus, *rest)

    monkeypatch.setattr(engine, "verify_block", verify_block)


def same_draws_for_drafting_and_accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify_block(
        tokens: Tensor, q: Tensor, nu: Tensor, bonus: Tensor, u_accept: Tensor, *rest: Tensor
    ) -> verification.Verified:
        cdf = q.double().cumsum(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return verification.verify_block(tokens, q, nu, bonus, cdf - 1e-9, *rest)

    monkeypatch.setattr(engine, "verify_block", verify_block)


def misplaced(monkeypatch: pytest.MonkeyPatch, model: str, error: int) -> None:
    """The cache of one model rolled back to one token too many or too few."""

    class OffByOne(Decoder):
        def feed(self, tokens: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            wrong = error if at.shape[1] and self.model.config.name_or_path == model else 0
            self.lengths = [n + wrong for n in self.lengths]
            try:
                return super().feed(tokens, at)
            finally:
                self.lengths = [n - wrong for n in self.lengths]

    monkeypatch.setattr("diversed.engine.pair.Decoder", OffByOne)


def one_slot_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that reaches one slot beyond the token's own: what a rejected draft left there is seen."""

    def visible(slots: Tensor, extent: int, window: int | None = None) -> Tensor:
        return (torch.arange(extent) <= slots.unsqueeze(-1) + 1).unsqueeze(1)

    monkeypatch.setattr("diversed.engine.decoder.visible", visible)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "recovered token from nu": (recovered_from_nu, "lossless"),
    "recovered token from nu, relaxed": (recovered_from_nu, "static-0.7"),
    "q of another temperature": (q_at_another_temperature, "lossless"),
    "bonus from the row before": (bonus_from_the_row_before, "lossless"),
    "one uniform draw used twice": (same_draws_for_drafting_and_accepting, "lossless"),
    "target's cache one too short": (lambda m: misplaced(m, "target", -1), "lossless"),
    "target's cache one too long": (lambda m: misplaced(m, "target", 1), "lossless"),
    "rejected tokens stay visible": (one_slot_too_far, "lossless"),
    "draft's cache one too short": (lambda m: misplaced(m, "draft", -1), "static-0.3"),
    "draft's cache one too long": (lambda m: misplaced(m, "draft", 1), "static-0.3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(pair: ModelPair, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test that passes above rejects each of these: same verifier, same N, same seeds."""
    plant, name = FAULTS[fault]
    pair.target.config.name_or_path, pair.draft.config.name_or_path = "target", "draft"
    plant(monkeypatch)
    assert p_value(pair, VERIFIERS[name], 2, 6000) < REJECT
