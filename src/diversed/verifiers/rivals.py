"""Relaxed verifiers from the literature, each from its formula, to hold learned ones against.

Lenience, the cascades, Cactus and fuzzy decoding are distributions ``nu`` and run through rejection sampling like any
verifier. Typical acceptance and the top-k relaxation accept or refuse a token outright and sample a refused one anew
from the target: no ``nu`` gives their acceptance, so they also have ``accepts``, which the engine asks instead. Calling
them gives the distribution that their output follows all the same.

At temperature 0 the distributions follow the one convention of this package (argmax ``nu`` of the temperature-1
softmaxes), and the two tests ask about the draft's argmax and fall back on the target's. The temperature-0 rule that
Leviathan et al. give for lenience, ``p(x) >= l max p``, is ``TopKRelaxation(k=vocabulary, ratio=l)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from diversed.verification import entropy, total_variation
from diversed.verifiers.ensemble import Ensemble, Verifier, check_fraction

Divergence = Literal["kl", "js", "tv"]


def check_number(name: str, value: float, low: float, high: float, hint: str) -> float:
    """``value`` as a float, or one clear error where it is no number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be {hint}")
    return float(value)


@dataclass(frozen=True)
class Lenience:
    """Accept with probability min(1, p(x) / (l q(x))): no token comes out more than 1/l times as often as in p.

    Y. Leviathan et al. 2023 (arXiv 2211.17192), appendix A.5: multiply q by l before comparing it with p. Read as: in
    both places where their algorithm compares, so a refused token is drawn from norm(max(p - l q, 0)). Then the output
    follows ``nu = min(q, p/l) + (1 - a) norm(max(p - l q, 0))`` with a = sum min(q, p/l), and rejection sampling
    against this ``nu`` is the same rule. ``lenience`` is l in (0, 1]; 1 is lossless.
    """

    lenience: float

    def __post_init__(self) -> None:
        check_number("lenience", self.lenience, 1e-6, 1.0, "above 0 and at most 1 (1 is lossless)")

    def __call__(
        self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor
    ) -> Tensor:
        if self.lenience == 1:
            return target_probs
        raised = target_probs / self.lenience
        accepted = torch.minimum(draft_probs, raised)
        excess = (raised - draft_probs).clamp_min(0.0)
        refused = (1 - accepted.sum(-1, keepdim=True)).clamp_min(0.0)
        return accepted + refused * excess / excess.sum(-1, keepdim=True)


@dataclass(frozen=True)
class CascadeOpt(Ensemble):
    """Defer to the target where max q < max p - alpha TV(p, q); elsewhere take the draft.

    H. Narasimhan et al. 2025, *Faster Cascades via Speculative Decoding* (arXiv 2405.19261), the deferral rule [OPT].
    |max p - max q| is at most TV, so ``alpha`` works between -1 and 1: below -1 it always defers (lossless), from 1 on
    it never does.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, -math.inf, math.inf, "a number; below -1 is lossless, 1 takes every draft")

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        margin = target_probs.amax(-1) - draft_probs.amax(-1)
        return (margin > self.alpha * total_variation(target_probs, draft_probs)).to(target_probs.dtype)


@dataclass(frozen=True)
class CascadeToken:
    """Take the draft's mass on tokens near the target's best, the target's distribution for the rest.

    H. Narasimhan et al. 2025 (arXiv 2405.19261), the token-specific rule [Token-v3]: ``A = {x: p(x) >= (1 - alpha)
    max p}``, ``nu = q 1_A + (1 - q(A)) p``. ``alpha`` at most 1, where every token is in A; below 0 none is (lossless).
    """

    alpha: float

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, -math.inf, 1.0, "a number of at most 1; below 0 is lossless")

    def __call__(
        self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor
    ) -> Tensor:
        good = target_probs >= (1 - self.alpha) * target_probs.amax(-1, keepdim=True)
        return accepted_or_target(good, target_probs, draft_probs)


def accepted_or_target(accepts: Tensor, target_probs: Tensor, draft_probs: Tensor, *, greedy: bool = False) -> Tensor:
    """``q 1_A + (1 - q(A)) p``: tokens of q that lie in A, and a draw from p in place of the others; [..., V].

    ``greedy``: q where A holds its argmax, else p: the argmax is the draft's where it passes, else the target's.
    """
    if greedy:
        return torch.where(accepts.gather(-1, draft_probs.argmax(-1, keepdim=True)), draft_probs, target_probs)
    accepted = draft_probs.masked_fill(~accepts, 0.0)
    refused = (1 - accepted.sum(-1, keepdim=True)).clamp_min(0.0)
    return accepted + refused * target_probs


@dataclass(frozen=True)
class Cactus:
    """Raise the drafted token x to h(x) = min(1, p + sqrt(2 delta p (1 - p))), and lower all others in proportion.

    Y. Hao and L. Mou 2026, *Cactus* (constrained acceptance speculative sampling, arXiv 2604.04987): x stays with
    probability min(1, h(x) / q(x)); a refused x is replaced from norm(max(h - q, 0)) with h(y) = p(y) (1 - h(x)) / (1 -
    p(x)) for y other than x, so the replacement depends on the refused token. A token that can be refused is never a
    replacement (q(x) > h(x) >= p(x)), hence averaging over x leaves rejection sampling against one ``nu``; that ``nu``
    is computed here, in O(V log V) by sorting. ``delta`` bounds the divergence from p; 0 is lossless. The published
    form looks at the drafted token only and is cheaper than this one.
    """

    delta: float

    def __post_init__(self) -> None:
        check_number("delta", self.delta, 0.0, 1e6, "a number of 0 (lossless) or above")

    def __call__(
        self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor
    ) -> Tensor:
        if self.delta == 0:
            return target_probs
        p, q = target_probs.double(), draft_probs.double()
        raised = (p + (2 * self.delta * p * (1 - p).clamp_min(0)).sqrt()).clamp(max=1.0)
        refused = (q - raised).clamp_min(0.0)  # how often x is drafted and refused
        scale = (1 - raised) / (1 - p).clamp_min(1e-300)  # s_x: what a refused x leaves of every other p(y)
        # Z(s) = sum_y max(s p(y) - q(y), 0), by sorting tokens by the s from which on they count.
        starts, order = (q / p.clamp_min(1e-300)).sort(-1)
        count = torch.searchsorted(starts, scale)
        total = scale * _before(p.gather(-1, order), count) - _before(q.gather(-1, order), count)
        # Z is at least what x is refused (both sides lack the same mass), but for rounding, where p(x) is nearly 1.
        share = refused / torch.maximum(total, refused).clamp_min(1e-300)
        # nu(y) gains sum_x share_x max(s_x p(y) - q(y), 0): the x with s_x above the start of y.
        scale, order = scale.sort(-1)
        share = share.gather(-1, order)
        first = torch.searchsorted(scale, q / p.clamp_min(1e-300), right=True)
        slope = (share * scale).sum(-1, keepdim=True) - _before(share * scale, first)
        offset = share.sum(-1, keepdim=True) - _before(share, first)
        recovered = (slope * p - offset * q).clamp_min(0.0)
        return (torch.minimum(q, raised) + recovered).to(target_probs.dtype)


def _before(values: Tensor, count: Tensor) -> Tensor:
    """Sums of the first ``count`` of ``values``, both [..., V]."""
    sums = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
    return sums.gather(-1, count)


@dataclass(frozen=True)
class FuzzyRule(Ensemble):
    """Take the draft where Div(p, q) <= threshold; ordinary rejection sampling against p elsewhere.

    M. Holsman et al. 2025, *Fuzzy Speculative Decoding*. ``divergence``: ``kl`` is KL(p || q) in nats, ``js`` the
    Jensen-Shannon divergence in nats (at most ln 2), ``tv`` total variation. A threshold of 0 is lossless.
    """

    divergence: Divergence
    threshold: float

    def __post_init__(self) -> None:
        if self.divergence not in get_args(Divergence):
            raise ValueError(f"divergence={self.divergence!r} is unknown: use {', '.join(get_args(Divergence))}")
        check_number("threshold", self.threshold, 0.0, math.inf, "a number of 0 (lossless) or above")

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        p, q = target_probs, draft_probs
        if self.divergence == "tv":
            distance = total_variation(p, q)
        elif self.divergence == "kl":
            distance = kullback_leibler(p, q)
        else:
            middle = (p + q) / 2
            distance = (kullback_leibler(p, middle) + kullback_leibler(q, middle)) / 2
        return (distance > self.threshold).to(p.dtype)


def kullback_leibler(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats, [..., V] -> [...]; infinite where q lacks a token of p."""
    distance: Tensor = (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)
    return distance


class AcceptanceTest:
    """Accept a drafted token iff it lies in a set A that the prefix decides; draw a refused one anew from p."""

    def accepts(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """A as a boolean [..., V]."""
        raise NotImplementedError

    def __call__(
        self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor
    ) -> Tensor:
        """What the output follows at temperature above 0: q 1_A + (1 - q(A)) p."""
        return accepted_or_target(self.accepts(target_probs, draft_probs), target_probs, draft_probs)


@dataclass(frozen=True)
class TypicalAcceptance(AcceptanceTest):
    """Accept where p(x) > min(epsilon, delta e^-H(p)): the surer the target, the higher the bar.

    T. Cai et al. 2024, *Medusa* (arXiv 2401.10774), section 2.3.1. They recommend ``delta = sqrt(epsilon)``, taken
    where it is None. Medusa refuses a token by ending the block and decoding the next one from the target; here that
    next one is drawn from p in its place. ``epsilon=1, delta=inf`` accepts nothing (lossless, without any gain).
    """

    epsilon: float
    delta: float | None = None

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, 0.0, 1.0, "a probability between 0 and 1")
        if self.delta is not None:
            check_number("delta", self.delta, 0.0, math.inf, "a number of 0 or above")

    def accepts(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        delta = math.sqrt(self.epsilon) if self.delta is None else self.delta
        sureness = torch.exp(-entropy(target_probs)).unsqueeze(-1)
        return target_probs > (delta * sureness).clamp(max=self.epsilon)


@dataclass(frozen=True)
class TopKRelaxation(AcceptanceTest):
    """Accept where x is among the target's k best and p(x) >= ratio max p.

    After the relaxed acceptance of TensorRT-LLM: candidates among the k best within a margin of the best one, there for
    greedy decoding. Here the margin is a ratio of probabilities, and the rule is read at any temperature, with a draw
    from p in place of a refused token. ``k=1`` is lossless at temperature 0; ``k=0`` accepts
    nothing and is lossless at any.
    """

    k: int
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 0:
            raise ValueError(f"k={self.k!r} must be a whole number of 0 or above")
        check_fraction("ratio", self.ratio)

    def accepts(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        k = min(self.k, target_probs.shape[-1])
        best, tokens = target_probs.topk(max(k, 1), -1)
        among = torch.zeros_like(target_probs, dtype=torch.bool).scatter_(-1, tokens[..., :k], True)
        return among & (target_probs >= self.ratio * best[..., :1])


@dataclass(frozen=True)
class BlockVerification:
    """Decide over a block as a whole rather than token by token; the output follows the same ``nu``.

    Z. Sun et al. 2025, *Block Verification Accelerates Speculative Decoding* (arXiv 2403.10444), algorithm 2, with the
    ``nu`` of any other verifier for the target; over the lossless one it is the strongest lossless rule known for
    single drafts. The engine sees ``joint`` and calls :func:`diversed.verification.verify_block_jointly`. At
    temperature 0 nothing is left to decide jointly.
    """

    verifier: Verifier
    joint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if hasattr(self.verifier, "accepts"):
            raise ValueError(f"verifier={self.verifier!r} accepts tokens outright and cannot be verified by the block")

    def __call__(
        self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor
    ) -> Tensor:
        return self.verifier(target_probs, draft_probs, target_hidden, draft_hidden)

    def at(self, **dial: Any) -> BlockVerification:
        """The same with the dial of the verifier inside turned."""
        turned: Verifier = self.verifier.at(**dial)  # type: ignore[attr-defined]
        return replace(self, verifier=turned)

    def to(self, device: torch.device) -> BlockVerification:
        """The same with the parameters of the verifier inside, if any, on ``device``."""
        return replace(self, verifier=self.verifier.to(device)) if hasattr(self.verifier, "to") else self

    def at_places(self, places: Tensor) -> BlockVerification:
        """The same with the verifier inside at these places."""
        return replace(self, verifier=self.verifier.at_places(places)) if hasattr(self.verifier, "at_places") else self

    def check_fits(self, **pair: Any) -> None:
        """Ask the verifier inside whether it fits the pair."""
        if hasattr(self.verifier, "check_fits"):
            self.verifier.check_fits(**pair)
