"""Properties of the pure functions, on random and on awkward distributions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diversed.verification import (
    acceptance_probability,
    mask_to_support,
    residual_distribution,
    sample,
    total_variation,
    verification_distribution,
    verify_block,
    verify_block_greedy,
)

SIZE = 6
ALMOST_ONE = 1 - 2**-53
fractions = st.floats(0, 1, allow_subnormal=False)


@st.composite
def distributions(draw: st.DrawFn) -> Tensor:
    """Probabilities over SIZE tokens, often with zeros and ties, over many orders of magnitude."""
    mass = draw(st.lists(st.sampled_from([0.0, 0.0, 1e-12, 1e-4, 1.0, 1.0, 3.0, 1e3]), min_size=SIZE, max_size=SIZE))
    mass[draw(st.integers(0, SIZE - 1))] += 1.0
    return torch.tensor(mass).double().div(sum(mass)).float()


def random_block(batch: int, n: int, size: int = SIZE, seed: int = 0) -> dict[str, Tensor]:
    """Arguments of verify_block, the drafted tokens drawn from ``draft_probs``."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, n, size, generator=generator).mul(1.5).softmax(-1)
    return {
        "draft_tokens": sample(q, torch.rand(batch, n, generator=generator)),
        "draft_probs": q,
        "nu": torch.randn(batch, n, size, generator=generator).mul(1.5).softmax(-1),
        "bonus_probs": torch.randn(batch, size, generator=generator).softmax(-1),
        "u_accept": torch.rand(batch, n, generator=generator, dtype=torch.float64),
        "u_next": torch.rand(batch, generator=generator, dtype=torch.float64),
    }


@given(distributions(), distributions(), fractions)
def test_the_blend_is_a_distribution_between_both(p: Tensor, q: Tensor, w: float) -> None:
    nu = verification_distribution(p, q, torch.tensor(w))
    torch.testing.assert_close(nu.sum(), torch.tensor(1.0))
    assert (nu >= torch.minimum(p, q) * (1 - 1e-6)).all()
    assert (nu <= torch.maximum(p, q) * (1 + 1e-6)).all()
    torch.testing.assert_close(nu.double(), w * p.double() + (1 - w) * q.double(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("size", [1, 7, 32, 1000])
def test_the_blend_is_p_at_weight_1_and_q_at_weight_0_to_the_last_bit(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    p, q = torch.randn(2, 5, 3, size, generator=generator).mul(4).softmax(-1)
    assert torch.equal(verification_distribution(p, q, torch.ones(5, 3)), p)
    assert torch.equal(verification_distribution(p, q, torch.zeros(5, 3)), q)


@given(distributions(), distributions(), fractions)
def test_acceptance_is_one_minus_w_times_tv(p: Tensor, q: Tensor, w: float) -> None:
    """Sum of min(q, nu) = 1 - TV(q, nu) = 1 - w TV(q, p), and the same from the acceptance of each token."""
    p, q = p.double(), q.double()
    nu = verification_distribution(p, q, torch.tensor(w, dtype=torch.float64))
    expected = 1 - w * total_variation(p, q)
    torch.testing.assert_close(torch.minimum(q, nu).sum(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(1 - total_variation(q, nu), expected, atol=1e-6, rtol=0)
    by_token = acceptance_probability(nu.expand(SIZE, -1), q.expand(SIZE, -1), torch.arange(SIZE))
    torch.testing.assert_close((q * by_token).sum(), expected, atol=1e-6, rtol=0)


@given(distributions(), distributions())
def test_acceptance_probability_is_zero_where_nu_is_and_never_above_one(nu: Tensor, q: Tensor) -> None:
    by_token = acceptance_probability(nu.expand(SIZE, -1), q.expand(SIZE, -1), torch.arange(SIZE))
    assert (by_token[nu == 0] == 0).all()
    assert (by_token[nu >= q] == (nu[nu >= q] > 0).float()).all()
    assert ((by_token >= 0) & (by_token <= 1)).all()


@given(distributions(), distributions(), st.floats(0.05, 1))
def test_the_residual_of_the_blend_is_that_of_the_target(p: Tensor, q: Tensor, w: float) -> None:
    p, q = p.double(), q.double()
    nu = verification_distribution(p, q, torch.tensor(w, dtype=torch.float64))
    ours = residual_distribution(nu, q)
    torch.testing.assert_close(ours.sum(), torch.tensor(1.0, dtype=torch.float64))
    if total_variation(p, q) > 1e-6:
        torch.testing.assert_close(ours, residual_distribution(p, q), atol=1e-6, rtol=0)


@given(distributions())
def test_the_residual_of_equal_distributions_is_the_distribution(p: Tensor) -> None:
    """p = q leaves nothing to divide by."""
    assert torch.equal(residual_distribution(p, p), p)


@given(distributions(), distributions())
def test_accepted_and_recovered_tokens_together_follow_nu(nu: Tensor, q: Tensor) -> None:
    """min(q, nu) + (1 - acceptance) residual = nu, exactly: what rejection sampling rests on."""
    nu, q = nu.double(), q.double()
    accepted = torch.minimum(q, nu)
    together = accepted + (1 - accepted.sum()) * residual_distribution(nu, q)
    torch.testing.assert_close(together, nu, atol=2e-7, rtol=0)


@given(distributions(), distributions(), fractions, st.lists(st.booleans(), min_size=SIZE, max_size=SIZE))
def test_masking_leaves_a_distribution_inside_the_support(p: Tensor, q: Tensor, w: float, allow: list[bool]) -> None:
    support = torch.tensor(allow)
    support[int(p.argmax())] = True
    p = torch.where(support, p, 0.0)
    p = p / p.sum()
    nu = verification_distribution(p, q, torch.tensor(w))
    masked = mask_to_support(nu, p, support)
    assert (masked[~support] == 0).all()
    torch.testing.assert_close(masked.sum(), torch.tensor(1.0))
    if nu[support].sum() > 0:
        torch.testing.assert_close(masked[support], nu[support] / nu[support].sum())
    else:
        assert torch.equal(masked, p)


@given(distributions(), distributions(), fractions)
def test_masking_changes_no_bit_where_nothing_is_forbidden(p: Tensor, q: Tensor, w: float) -> None:
    nu = verification_distribution(p, q, torch.tensor(w))
    assert torch.equal(mask_to_support(nu, p, nu > 0), nu)
    assert torch.equal(mask_to_support(nu, p, torch.ones(SIZE, dtype=torch.bool)), nu)


@given(distributions(), st.one_of(st.sampled_from([0.0, 5e-324, 2**-149, 0.5, ALMOST_ONE]), st.floats(0, ALMOST_ONE)))
def test_sampling_never_returns_a_token_of_probability_zero(probs: Tensor, u: float) -> None:
    assert probs[int(sample(probs, torch.tensor(u, dtype=torch.float64)))] > 0


def test_sampling_inverts_the_cumulative_distribution() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    u = torch.tensor([0.0, 0.249, 0.25, 0.5, 0.749, 0.75, ALMOST_ONE], dtype=torch.float64)
    expected = [1, 1, 3, 3, 3, 4, 4]
    assert sample(probs.expand(7, -1), u).tolist() == expected
    assert sample(8 * probs.expand(7, -1), u).tolist() == expected  # rows need not be normalised


def test_sampling_is_exact_over_a_large_vocabulary() -> None:
    """A float32 sum over 100,000 tokens would move the boundary of the last token by more than its probability."""
    probs = torch.full((100_000,), 1e-5)
    probs[-1] = 2e-6
    total = probs.double().sum()
    before_last = (total - probs[-1].double()) / total
    u = torch.stack([before_last - 1e-9, before_last + 1e-9])
    assert sample(probs.expand(2, -1), u).tolist() == [99_998, 99_999]


def test_a_draw_of_zero_does_not_accept_a_token_of_zero_probability() -> None:
    result = verify_block(
        torch.tensor([[0]]),
        torch.tensor([[[0.5, 0.5]]]),
        torch.tensor([[[0.0, 1.0]]]),
        torch.tensor([[0.5, 0.5]]),
        torch.zeros(1, 1, dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
    )
    assert result.num_accepted.tolist() == [0]
    assert result.tokens.tolist() == [[1, -1]]


@given(distributions(), st.integers(0, SIZE - 1))
def test_nu_equal_to_q_accepts_every_draw(q: Tensor, token: int) -> None:
    """Down to the largest uniform draw below 1."""
    if q[token] == 0:
        return
    u = torch.tensor([[0.0], [0.5], [ALMOST_ONE]], dtype=torch.float64)
    rows = q.expand(3, 1, -1)
    result = verify_block(torch.full((3, 1), token), rows, rows, rows[:, 0], u, u[:, 0])
    assert result.num_accepted.tolist() == [1, 1, 1]


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_a_block_is_the_sequence_of_its_single_decisions(seed: int, n: int) -> None:
    """Row by row and token by token, as one would write algorithm 1 by hand."""
    block = random_block(4, n, seed=seed)
    result = verify_block(**block)
    for b in range(4):
        kept: list[int] = []
        following = block["bonus_probs"][b]
        for i in range(n):
            token = int(block["draft_tokens"][b, i])
            nu, q = block["nu"][b, i], block["draft_probs"][b, i]
            if float(block["u_accept"][b, i]) >= float(nu[token]) / float(q[token]):
                following = (nu - q).clamp(min=0)
                break
            kept.append(token)
        assert int(result.num_accepted[b]) == len(kept)
        following_token = int(sample(following, block["u_next"][b]))
        assert int(result.next_token[b]) == following_token
        assert result.tokens[b].tolist() == [*kept, following_token] + [-1] * (n - len(kept))


@pytest.mark.parametrize("greedy", [False, True])
@given(
    seed=st.integers(0, 10_000),
    junk=st.sampled_from([0.0, 1.0, torch.nan, torch.inf]),
    token=st.sampled_from([-1, 0, 99]),
)
def test_padding_changes_nothing(greedy: bool, seed: int, junk: float, token: int) -> None:
    """Rows that drafted less come out as if they were alone, whatever their padding holds."""
    n, drafted = 4, torch.tensor([0, 1, 2, 3, 4])
    block = random_block(5, n, seed=seed)
    padding = torch.arange(n) >= drafted.unsqueeze(1)
    padded = dict(block, draft_tokens=block["draft_tokens"].masked_fill(padding, token))
    for name in ("draft_probs", "nu", "u_accept"):
        mask = padding.view(5, n, *[1] * (block[name].ndim - 2))
        padded[name] = block[name].masked_fill(mask, junk)
    arguments = ("draft_tokens", "nu", "bonus_probs") if greedy else tuple(block)
    verify = verify_block_greedy if greedy else verify_block
    together = verify(**{name: padded[name] for name in arguments}, num_drafted=drafted)
    for b, k in enumerate(drafted.tolist()):
        row = {name: block[name][b : b + 1] for name in arguments}
        for name in ("draft_tokens", "draft_probs", "nu", "u_accept"):
            if name in row:
                row[name] = row[name][:, :k]
        alone = verify(**row)
        assert int(together.num_accepted[b]) == int(alone.num_accepted[0])
        assert together.tokens[b].tolist() == alone.tokens[0].tolist() + [-1] * (n - k)
        assert int(together.next_token[b]) == int(alone.next_token[0])


@given(st.integers(0, 10_000))
def test_a_token_does_not_depend_on_later_draws(seed: int) -> None:
    """The accepted count is decided from the left: what follows the first rejection is irrelevant."""
    block = random_block(8, 4, seed=seed)
    result = verify_block(**block)
    changed = dict(block, u_accept=block["u_accept"].clone(), nu=block["nu"].clone())
    for b, accepted in enumerate(result.num_accepted.tolist()):
        changed["u_accept"][b, accepted + 1 :] = 0.0
        changed["nu"][b, accepted + 1 :] = 1 / SIZE
    assert torch.equal(verify_block(**changed).tokens, result.tokens)


def test_one_position_follows_nu_over_many_draws() -> None:
    """Through verify_block itself: 200,000 blocks of one token, and the frequencies of the first token are nu."""
    draws = 200_000
    generator = torch.Generator().manual_seed(1)
    q = torch.tensor([0.5, 0.3, 0.2, 0.0])
    nu = torch.tensor([0.1, 0.4, 0.2, 0.3])
    rows = q.expand(draws, 1, -1)
    result = verify_block(
        sample(rows, torch.rand(draws, 1, generator=generator)),
        rows,
        nu.expand(draws, 1, -1),
        q.expand(draws, -1),
        torch.rand(draws, 1, generator=generator, dtype=torch.float64),
        torch.rand(draws, generator=generator, dtype=torch.float64),
    )
    frequencies = torch.bincount(result.tokens[:, 0], minlength=4) / draws
    deviation = (frequencies - nu) / (nu * (1 - nu) / draws).sqrt()
    assert deviation.abs().max() < 4


@given(st.integers(0, 10_000), st.integers(0, 4))
def test_greedy_keeps_the_leading_tokens_that_equal_argmax_nu(seed: int, n: int) -> None:
    block = random_block(6, max(n, 1), seed=seed)
    tokens, nu, bonus = block["draft_tokens"][:, :n], block["nu"][:, :n], block["bonus_probs"]
    best = nu.argmax(-1)
    tokens = torch.where(torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.7, best, tokens)
    result = verify_block_greedy(tokens, nu, bonus)
    for b in range(6):
        expected: list[int] = []
        for i in range(n):
            expected.append(int(best[b, i]))
            if int(tokens[b, i]) != int(best[b, i]):
                break
        else:
            expected.append(int(bonus[b].argmax()))
        assert [t for t in result.tokens[b].tolist() if t >= 0] == expected
        assert int(result.num_accepted[b]) == len(expected) - 1


def test_an_empty_block_yields_the_bonus_token() -> None:
    bonus = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    nothing = torch.zeros(2, 0)
    u = torch.tensor([0.3, 0.9], dtype=torch.float64)
    for result in (
        verify_block(nothing.long(), torch.zeros(2, 0, 2), torch.zeros(2, 0, 2), bonus, nothing, u),
        verify_block_greedy(nothing.long(), torch.zeros(2, 0, 2), bonus),
    ):
        assert result.tokens.tolist() == [[1], [0]]
        assert result.num_accepted.tolist() == [0, 0]
