"""Rejection sampling of drafted tokens against a verification distribution: pure tensor functions, no models.

Everything here is batched. ``B`` sequences each carry up to ``N`` drafted tokens over a vocabulary of ``V``;
sequence ``b`` uses the first ``num_drafted[b]`` of them and the rest is padding that no result depends on.

Notation (docs/method.md): ``p`` target probabilities, ``q`` draft probabilities, ``w`` the ensemble weight on the
target, ``nu = w p + (1 - w) q`` the verification distribution (Wang et al. 2026, arXiv 2604.07622, eq. 4; the
static blend is older: Fu et al. 2025, arXiv 2502.01662). Rejection sampling is Leviathan et al. 2023
(arXiv 2211.17192), algorithm 1, with ``nu`` in the place of ``p``.

Randomness enters only through arguments named ``u``, uniform draws on [0, 1). Who makes them decides what a
sequence's tokens depend on; the engine draws them from one generator per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Logits below are forbidden: processors write -inf or the smallest float of their dtype, penalties never come near.
FORBIDDEN = -1e30


def verification_distribution(target_probs: Tensor, draft_probs: Tensor, weight: Tensor) -> Tensor:
    """The blend ``nu = w p + (1 - w) q``.

    Args:
        target_probs, draft_probs: ``p`` and ``q``, [..., V], each summing to 1.
        weight: ``w`` in [0, 1], [...].

    Returns:
        ``nu``, [..., V]; to the last bit ``p`` where ``w`` is 1 and ``q`` where it is 0, since lerp is exact there.
    """
    return torch.lerp(draft_probs, target_probs, weight.unsqueeze(-1))


def mask_to_support(nu: Tensor, target_probs: Tensor, support: Tensor) -> Tensor:
    """``nu`` without the tokens the request forbids, renormalised.

    A blend accepts any drafted token with probability at least ``1 - w``, also one that the target's processors
    (a grammar, banned words, top-k) rule out. Rows that lose no mass come back unchanged to the last bit; a row that
    loses all of it falls back to ``p``. ``support`` is boolean [..., V].
    """
    allowed = nu.masked_fill(~support, 0.0)
    total = allowed.sum(-1, keepdim=True)
    renormalised = torch.where(total > 0, allowed / total.clamp_min(torch.finfo(nu.dtype).tiny), target_probs)
    untouched = (allowed == nu).all(-1, keepdim=True)
    return torch.where(untouched, nu, renormalised)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """TV(p, q) = half the L1 distance, [..., V] -> [...]."""
    return 0.5 * (p - q).abs().sum(-1)


def entropy(p: Tensor) -> Tensor:
    """H(p) in nats, [..., V] -> [...]."""
    result: Tensor = -torch.special.xlogy(p, p).sum(-1)
    return result


def acceptance_probability(nu: Tensor, draft_probs: Tensor, token: Tensor) -> Tensor:
    """min(1, nu(x) / q(x)) for drafted tokens ``x``; [..., V] and [...] -> [...]. Zero where nu(x) is zero."""
    nu_x = nu.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    q_x = draft_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return torch.where(q_x > 0, nu_x / q_x.clamp_min(torch.finfo(q_x.dtype).tiny), nu_x.sign()).clamp(max=1.0)


def residual_distribution(nu: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(nu - q, 0)), [..., V]: what a rejected token is replaced from.

    Where nu = q nothing can be rejected except by rounding; the residual is then zero and nu itself is returned.
    """
    excess = (nu - draft_probs).clamp_min(0.0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total.clamp_min(torch.finfo(nu.dtype).tiny), nu)


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling: the token of each row of ``probs`` [..., V] at the uniform draw ``u`` [...].

    Rows need not be normalised, but must have some mass. A token of probability zero is never returned, whatever
    ``u`` in [0, 1). Sums run in float64, since a float32 sum over 100,000 tokens is off by more than a small
    probability.
    """
    cdf = probs.double().cumsum(-1)
    total = cdf[..., -1:].contiguous()
    at = torch.searchsorted(cdf, u.double().unsqueeze(-1) * total, right=True)
    last = torch.searchsorted(cdf, total)  # u * total may round up to total: stay on the last token with mass
    return torch.minimum(at, last).squeeze(-1)


class Verified(NamedTuple):
    """The outcome of one block: per sequence, the drafted tokens that stay and the one token that follows them."""

    num_accepted: Tensor  #: [B], how many leading drafted tokens stay
    next_token: Tensor  #: [B], recovered after a rejection, bonus where all stay
    tokens: Tensor  #: [B, N+1]: the accepted tokens, then ``next_token``; what follows is padding (-1)


def verify_block(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    nu: Tensor,
    bonus_probs: Tensor,
    u_accept: Tensor,
    u_next: Tensor,
    num_drafted: Tensor | None = None,
) -> Verified:
    """Accept a prefix of the drafted block so that its tokens follow ``nu``, and draw the token after it.

    Args:
        draft_tokens: [B, N], drawn from ``draft_probs``. Must be the very distribution that drew them: after
            temperature and truncation, in the same precision.
        draft_probs: ``q`` [B, N, V].
        nu: verification distributions [B, N, V], each a function of its prefix alone.
        bonus_probs: [B, V], the distribution of the token that follows an entirely accepted block: the target's
            row ``num_drafted[b]`` (or that row of nu, for exactness in nu).
        u_accept: uniform draws [B, N]. A token stays where ``u q(x) < nu(x)``, strictly, so that a draw of
            exactly 0 cannot accept a token of zero probability.
        u_next: uniform draws [B] for the recovered or bonus token.
        num_drafted: [B], drafted tokens per sequence; all N where None.
    """
    batch, n = draft_tokens.shape
    if n == 0:
        token = sample(bonus_probs, u_next)
        return Verified(torch.zeros_like(token), token, token.unsqueeze(1))
    index = draft_tokens.clamp(0, nu.shape[-1] - 1).unsqueeze(-1)  # padding may hold any id
    nu_x = nu.gather(-1, index).squeeze(-1)
    q_x = draft_probs.gather(-1, index).squeeze(-1)
    # In float64: a draw just below 1 would round to 1 in float32 and reject a token of nu(x) = q(x).
    stays = u_accept.double() * q_x.double() < nu_x.double()
    num_accepted, drafted = _leading(stays, num_drafted)

    # Only the first rejected row needs its residual.
    row = num_accepted.clamp(max=n - 1).view(batch, 1, 1).expand(batch, 1, nu.shape[-1])
    residual = residual_distribution(nu.gather(1, row).squeeze(1), draft_probs.gather(1, row).squeeze(1))
    all_stay = (num_accepted == drafted).unsqueeze(-1)
    next_token = sample(torch.where(all_stay, bonus_probs.to(residual.dtype), residual), u_next)
    return Verified(num_accepted, next_token, _join(draft_tokens, num_accepted, next_token))


def verify_block_greedy(
    draft_tokens: Tensor, nu: Tensor, bonus_probs: Tensor, num_drafted: Tensor | None = None
) -> Verified:
    """Temperature 0: drafted tokens stay as long as they equal argmax nu; argmax nu replaces the first that differs.

    ``nu`` blends the temperature-1 softmaxes (the convention of transformers). Shapes as in :func:`verify_block`.
    """
    if draft_tokens.shape[1] == 0:
        token = bonus_probs.argmax(-1)
        return Verified(torch.zeros_like(token), token, token.unsqueeze(1))
    best = nu.argmax(-1)
    num_accepted, drafted = _leading(best == draft_tokens, num_drafted)
    recovered = best.gather(1, num_accepted.clamp(max=best.shape[1] - 1).unsqueeze(1)).squeeze(1)
    next_token = torch.where(num_accepted == drafted, bonus_probs.argmax(-1), recovered)
    return Verified(num_accepted, next_token, _join(draft_tokens, num_accepted, next_token))


def verify_block_jointly(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    nu: Tensor,
    bonus_probs: Tensor,
    u_accept: Tensor,
    u_next: Tensor,
    num_drafted: Tensor | None = None,
) -> Verified:
    """:func:`verify_block` with one decision over the block: tokens follow ``nu`` too, and on average more stay.

    Block verification, Z. Sun et al. 2025 (arXiv 2403.10444), algorithm 2, with ``nu`` for their target. With
    ``g_i = min(1, g_{i-1} nu_i(x_i) / q_i(x_i))``, ``g_0 = 1`` and the excess ``E_i = sum_x max(g_i nu_{i+1}(x) -
    q_{i+1}(x), 0)``, the block of the first i tokens passes with probability ``E_i / (E_i + 1 - g_i)``, the whole of it
    with ``g_n``; the longest that passes stays. What follows i tokens is drawn from norm(max(g_i nu_{i+1} - q_{i+1},
    0)). Arguments and shapes as in :func:`verify_block`.
    """
    batch, n = draft_tokens.shape
    if n == 0:
        return verify_block(draft_tokens, draft_probs, nu, bonus_probs, u_accept, u_next, num_drafted)
    nu, q = nu.double(), draft_probs.double()
    index = draft_tokens.clamp(0, nu.shape[-1] - 1).unsqueeze(-1)
    ratio = (nu.gather(-1, index) / q.gather(-1, index)).squeeze(-1)
    joint = [torch.ones_like(ratio[:, 0])]
    for i in range(n):
        joint.append((joint[-1] * ratio[:, i]).clamp(max=1.0))
    g = torch.stack(joint, 1)  # [B, n+1]
    excess = (g[:, :n].unsqueeze(-1) * nu - q).clamp_min(0.0)  # [B, n, V], of the token after 0 .. n-1 others
    mass = excess.sum(-1)[:, 1:]
    below = mass + 1 - g[:, 1:n]
    passes = torch.where(below > 0, mass / below, 0.0)  # 0/0 where nu = q: a longer block passes for certain
    if num_drafted is None:
        num_drafted = torch.full((batch,), n, device=nu.device)
    length = torch.arange(1, n + 1, device=nu.device)
    whole = length == num_drafted.unsqueeze(1)
    passes = torch.where(whole, g[:, 1:], torch.nn.functional.pad(passes, (0, 1)))
    stays = (u_accept.double() < passes) & (length <= num_drafted.unsqueeze(1))
    num_accepted = (stays * length).amax(1)

    row = num_accepted.clamp(max=n - 1).view(batch, 1, 1).expand(batch, 1, nu.shape[-1])
    left = excess.gather(1, row).squeeze(1)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, nu.gather(1, row).squeeze(1))
    all_stay = (num_accepted == num_drafted).unsqueeze(-1)
    next_token = sample(torch.where(all_stay, bonus_probs.to(left.dtype), left), u_next)
    return Verified(num_accepted, next_token, _join(draft_tokens, num_accepted, next_token))


def verify_block_tested(
    draft_tokens: Tensor,
    accepts: Tensor,
    target_probs: Tensor,
    bonus_probs: Tensor,
    u_next: Tensor,
    num_drafted: Tensor | None = None,
) -> Verified:
    """An acceptance test: drafted tokens stay as long as they pass; the target decides anew where one does not.

    Args:
        draft_tokens: [B, N].
        accepts: boolean [B, N, V], the tokens that pass.
        target_probs: ``p`` [B, N, V]: what a refused token is replaced from.
        bonus_probs: [B, V], as in :func:`verify_block`.
        u_next: uniform draws [B] for the recovered or bonus token.
        num_drafted: [B], drafted tokens per sequence; all N where None.
    """
    batch, n, size = target_probs.shape
    index = draft_tokens.clamp(0, size - 1).unsqueeze(-1)
    num_accepted, drafted = _leading(accepts.gather(-1, index).squeeze(-1), num_drafted)
    row = num_accepted.clamp(max=n - 1).view(batch, 1, 1).expand(batch, 1, size)
    all_stay = (num_accepted == drafted).unsqueeze(-1)
    next_token = sample(torch.where(all_stay, bonus_probs, target_probs.gather(1, row).squeeze(1)), u_next)
    return Verified(num_accepted, next_token, _join(draft_tokens, num_accepted, next_token))


def _leading(stays: Tensor, num_drafted: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many leading tokens stay among the drafted ones, and how many were drafted; both [B]."""
    batch, n = stays.shape
    if num_drafted is None:
        num_drafted = torch.full((batch,), n, device=stays.device)
    real = torch.arange(n, device=stays.device) < num_drafted.unsqueeze(1)
    return (stays & real).long().cumprod(1).sum(1), num_drafted


def _join(draft_tokens: Tensor, num_accepted: Tensor, next_token: Tensor) -> Tensor:
    """[B, N+1]: accepted tokens, then the next token, then -1."""
    slot = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    count = num_accepted.unsqueeze(1)
    padded = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    return torch.where(slot < count, padded, torch.where(slot == count, next_token.unsqueeze(1), -1))
