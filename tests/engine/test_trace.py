"""The trace holds what bare forward passes give, and its statistics add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diversed import ModelPair, Verifier, generate
from diversed.theory import expected_blocks
from diversed.verifiers import BlockVerification, TopKRelaxation
from diversed.verifiers.learned import closed_form_features
from models import noisy, pad_left, random_head, random_prompts, tiny

PROMPTS = random_prompts([7, 1, 20])
VERIFIER = random_head(32, 16)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """Hidden sizes differ, so that target and draft cannot be mistaken for one another."""
    target = tiny(scale=6.0, eos_token_id=None)
    return ModelPair(target, tiny(scale=6.0, hidden_size=16, eos_token_id=None))


def run(pair: ModelPair, **settings: Any) -> Any:
    return generate(
        pair, **pad_left(PROMPTS), **({"verifier": VERIFIER, "max_new_tokens": 15, "seed": 0, "trace": True} | settings)
    )


@pytest.mark.parametrize("bonus", ["target", "verifier"])
@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.8])
def test_every_value_equals_that_of_a_bare_forward_pass(
    pair: ModelPair, temperature: float, num_speculative_tokens: int, bonus: str
) -> None:
    out = run(pair, temperature=temperature, num_speculative_tokens=num_speculative_tokens, bonus=bonus)
    for prompt, new, trace in zip(PROMPTS, out.token_ids, out.trace, strict=True):
        ids = torch.tensor([prompt + new])
        probs, hidden = [], []
        with torch.no_grad():
            for model in (pair.target, pair.draft):
                hidden.append(model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1])
                probs.append((model.lm_head(hidden[-1]) / (temperature or 1)).softmax(-1))
        p, q = probs
        expected = {
            "token_ids": torch.tensor(new),
            "target_prob": p.gather(-1, torch.tensor(new).unsqueeze(-1)).squeeze(-1),
            "target_hidden": hidden[0],
        }
        of_the_draft = {
            "draft_prob": q.gather(-1, torch.tensor(new).unsqueeze(-1)).squeeze(-1),
            "draft_hidden": hidden[1],
            "total_variation": (p - q).abs().sum(-1) / 2,
            "features": closed_form_features(p, q),
            "weight": VERIFIER.weight(p, q, *hidden),
        }
        nu = VERIFIER(p, q, *hidden)
        if temperature == 0:  # the verdict is about argmaxes
            p, q, nu = (torch.nn.functional.one_hot(x.argmax(-1), x.shape[-1]).float() for x in (p, q, nu))
        kept = torch.minimum(q, nu)
        of_the_draft |= {
            "acceptance": kept.sum(-1),
            "keep": (kept / nu).gather(-1, torch.tensor(new).unsqueeze(-1)).squeeze(-1).nan_to_num(0.0),
            "bias": (nu - p).abs().sum(-1) / 2,
        }
        unknown = torch.tensor([o == "bonus" and bonus == "target" for o in trace.origin])
        for name, values in of_the_draft.items():
            expected[name] = values.masked_fill(unknown.view(-1, *[1] * (values.ndim - 1)), torch.nan)
        for name, values in expected.items():
            torch.testing.assert_close(getattr(trace, name), values, rtol=1e-3, atol=1e-4, equal_nan=True, msg=name)


@pytest.mark.parametrize("bonus", ["target", "verifier"])
def test_origins_and_counts_agree(pair: ModelPair, bonus: str) -> None:
    blocks: list[tuple[int, int]] = []
    out = run(pair, num_speculative_tokens=3, callback=lambda i, new: blocks.append((i, len(new))), bonus=bonus)
    for i, (trace, counts) in enumerate(zip(out.trace, out.stats.per_sequence, strict=True)):
        assert trace.origin.count("accepted") == sum(counts.accepted)
        assert len(trace.origin) - trace.origin.count("accepted") == counts.target_calls  # no early end here
        assert len(trace.origin) == counts.tokens == 15
        assert trace.origin.count("recovered") == counts.rejected
        assert counts.target_calls == sum(index == i for index, _ in blocks)
        start = 0
        for size in (n for index, n in blocks if index == i):
            assert set(trace.origin[start : start + size - 1]) <= {"accepted"}
            last, room = trace.origin[start + size - 1], min(3, 15 - start - 1)
            assert last == ("bonus" if size - 1 == room else "recovered")
            start += size
    assert {o for t in out.trace for o in t.origin} == {"accepted", "recovered", "bonus"}


def test_the_weight_of_a_rule_without_one_is_nan(pair: ModelPair) -> None:
    out = run(pair, verifier=lambda p, q, target_hidden, draft_hidden: (p + q) / 2)
    assert all(trace.weight.isnan().all() for trace in out.trace)


def test_figures_of_single_sequences_add_up_to_the_pooled_ones() -> None:
    target = tiny()
    pair = ModelPair(target, noisy(target))
    out = generate(pair, **pad_left(PROMPTS), num_speculative_tokens=4, max_new_tokens=30, temperature=0, trace=True)
    stats, single = out.stats, out.stats.per_sequence
    assert stats.drafted == [sum(column) for column in zip(*(c.drafted for c in single), strict=True)]
    assert stats.accepted == [sum(column) for column in zip(*(c.accepted for c in single), strict=True)]
    assert stats.target_calls == sum(c.target_calls for c in single)
    assert stats.tokens == sum(c.tokens for c in single) == sum(map(len, out.token_ids))
    assert stats.acceptance_rate == sum(stats.accepted) / sum(stats.drafted)
    assert stats.block_efficiency == 1 + sum(stats.accepted) / stats.target_calls
    assert stats.accepted_per_position == [a / d for a, d in zip(stats.accepted, stats.drafted, strict=True)]
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
    assert stats.tokens_per_target_call == stats.tokens / stats.target_calls
    assert stats.rejected == sum(c.rejected for c in single) > 0


@pytest.mark.parametrize("num_speculative_tokens", [2, 5])
def test_position_acceptance_estimates_one_minus_w_tv(pair: ModelPair, num_speculative_tokens: int) -> None:
    prompts = {"input_ids": torch.tensor([[9, 8, 7]] * 600), "num_speculative_tokens": num_speculative_tokens}
    out = generate(pair, **prompts, verifier=VERIFIER, max_new_tokens=12, seed=0, trace=True, bonus="verifier")
    # Positions that were examined: all but the bonus ones.
    expected = [
        1 - w * tv
        for t in out.trace
        for o, w, tv in zip(t.origin, t.weight.tolist(), t.total_variation.tolist(), strict=True)
        if o != "bonus"
    ]
    assert out.stats.position_acceptance == pytest.approx(sum(expected) / len(expected), abs=0.02)
    assert out.stats.position_acceptance > out.stats.acceptance_rate


@pytest.mark.parametrize("verifier", [VERIFIER, TopKRelaxation(20)], ids=["learned", "top-k"])
def test_expected_blocks_of_recorded_texts_are_the_engines_for_every_n(pair: ModelPair, verifier: Verifier) -> None:
    """Texts recorded at one N foretell the target passes at others."""
    common = {"input_ids": torch.tensor([[9, 8, 7]] * 500), "verifier": verifier, "max_new_tokens": 16}
    recorded = generate(pair, **common, num_speculative_tokens=4, seed=0, trace=True, bonus="verifier")
    for n in (1, 3, 6):
        foretold = [expected_blocks(t.keep.tolist(), n) for t in recorded.trace]
        out = generate(pair, **common, num_speculative_tokens=n, seed=1000, bonus="verifier")
        measured = [c.target_calls for c in out.stats.per_sequence]
        error = (np.var(foretold) / 500 + np.var(measured) / 500) ** 0.5
        assert abs(np.mean(foretold) - np.mean(measured)) < 4 * error
        assert error < 0.15


def test_acceptance_of_a_test_is_the_mass_it_accepts_and_a_joint_verdict_has_none(pair: ModelPair) -> None:
    common = {"num_speculative_tokens": 3, "bonus": "verifier"}
    tested = run(pair, verifier=TopKRelaxation(20), **common).trace[0]
    alone = run(pair, verifier=TopKRelaxation(0), **common).trace[0]
    assert (alone.acceptance == 0).all()
    assert ((tested.acceptance >= 0) & (tested.acceptance <= 1 + 1e-6)).all()
    assert tested.acceptance.max() > 0.1
    joint = run(pair, verifier=BlockVerification(VERIFIER), **common).trace[0]
    assert joint.keep.isnan().all()
    assert not joint.bias.isnan().any()


def test_target_only_decoding_has_no_acceptance_and_one_token_a_call(pair: ModelPair) -> None:
    stats = run(pair, num_speculative_tokens=0, trace=False).stats
    assert stats.acceptance_rate is None
    assert stats.accepted_per_position == []
    assert stats.block_efficiency == stats.tokens_per_target_call == 1.0
