"""How many drafted tokens stay is what the formulas say, for a model whose predictions depend on the whole prefix."""

from __future__ import annotations

import pytest
import torch

from diversed import ModelPair, StaticEnsemble, generate
from models import VERIFIERS, enumerate_exactly, four_token_pair, goodness_of_fit

PROMPT = [1, 2, 0]
REJECT = 1e-5


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return four_token_pair()


@pytest.mark.parametrize("num_speculative_tokens", [1, 4])
@pytest.mark.parametrize("name", VERIFIERS)
def test_a_reached_position_accepts_with_probability_one_minus_w_tv(
    pair: ModelPair, name: str, num_speculative_tokens: int
) -> None:
    """Each decision minus 1 - w TV is a martingale difference, so that their sum stays within a few deviations."""
    out = generate(
        pair,
        input_ids=torch.tensor([PROMPT]).expand(800, -1),
        verifier=VERIFIERS[name],
        num_speculative_tokens=num_speculative_tokens,
        max_new_tokens=12,
        seed=0,
        trace=True,
    )
    assert out.trace is not None
    accepted = torch.tensor([origin == "accepted" for t in out.trace for origin in t.origin])
    decided = torch.tensor([origin != "bonus" for t in out.trace for origin in t.origin])
    weight, tv = (torch.cat([getattr(t, name) for t in out.trace])[decided] for name in ("weight", "total_variation"))
    expected = 1 - weight * tv
    excess = accepted[decided].float() - expected
    variance = expected * (1 - expected)
    assert decided.sum() > 4000
    assert expected.std() > 0.02
    assert abs(excess.sum()) < 4 * variance.sum().sqrt()
    for part in (expected > expected.median(), expected <= expected.median()):  # likely and unlikely ones alike
        assert abs(excess[part].sum()) < 4 * variance[part].sum().sqrt()
    assert sum(out.stats.accepted) == accepted.sum()


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 5])
@pytest.mark.parametrize("name", VERIFIERS)
def test_the_accepted_length_follows_the_step_dependent_formula(
    pair: ModelPair, name: str, num_speculative_tokens: int
) -> None:
    """P(L >= k) = sum over x1..xk of the product of min(q_i(x_i), nu_i(x_i)), each conditioned on its own prefix."""
    n, samples = num_speculative_tokens, 4000
    first_blocks: dict[int, int] = {}
    generate(
        pair,
        input_ids=torch.tensor([PROMPT]).expand(samples, -1),
        verifier=VERIFIERS[name],
        num_speculative_tokens=n,
        max_new_tokens=n + 1,
        seed=0,
        callback=lambda index, new: first_blocks.setdefault(index, len(new) - 1),
    )
    exact = enumerate_exactly(pair, PROMPT, n, VERIFIERS[name])
    kept = torch.minimum(exact.of_tokens("q"), exact.of_tokens("nu")).cumprod(1).sum(0)
    at_least = kept / 4.0 ** torch.arange(n - 1, -1, -1)  # each k-prefix was summed once per continuation
    survival = torch.cat([torch.ones(1), at_least, torch.zeros(1)])
    lengths = torch.tensor(list(first_blocks.values()))
    assert goodness_of_fit(torch.bincount(lengths, minlength=n + 1), survival[:-1] - survival[1:]) > REJECT
    deviation = lengths.double().std() / samples**0.5
    assert abs(lengths.double().mean() - at_least.sum()) < 4 * deviation


def test_the_formula_of_one_constant_rate_would_not_do(pair: ModelPair) -> None:
    """Else the test above could not tell the exact formula from the usual (1 - a^(N+1)) / (1 - a) - 1."""
    exact = enumerate_exactly(pair, PROMPT, 5, StaticEnsemble(0.7))
    kept = torch.minimum(exact.of_tokens("q"), exact.of_tokens("nu")).cumprod(1).sum(0) / 4.0 ** torch.arange(4, -1, -1)
    rate = kept[0]
    assert abs(kept.sum() - sum(rate**k for k in range(1, 6))) > 0.1


@pytest.mark.parametrize("verifier", [StaticEnsemble(0.0), StaticEnsemble(0.6).at(quality=0), VERIFIERS["learned"]])
def test_quality_zero_takes_every_draft(pair: ModelPair, verifier: StaticEnsemble) -> None:
    out = generate(
        pair,
        input_ids=torch.tensor([PROMPT]).expand(300, -1),
        verifier=verifier.at(quality=0),
        num_speculative_tokens=3,
        max_new_tokens=16,
        seed=0,
    )
    assert out.stats.acceptance_rate == 1.0
    assert out.stats.block_efficiency == 4.0


def test_quality_one_is_lossless_draw_for_draw(pair: ModelPair) -> None:
    """The same seeds give the same tokens, accepted and recovered at the same places."""
    request = {"input_ids": torch.tensor([PROMPT]).expand(200, -1), "max_new_tokens": 16, "seed": 0, "trace": True}
    lossless = generate(pair, verifier=VERIFIERS["lossless"], **request)
    for name in ("static-0.3", "learned"):
        out = generate(pair, verifier=VERIFIERS[name].at(quality=1), **request)
        assert out.token_ids == lossless.token_ids
        assert out.stats.per_sequence == lossless.stats.per_sequence
        assert [t.origin for t in out.trace] == [t.origin for t in lossless.trace]
