"""Training-free rules to hold learned verifiers against."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from diversed.verification import entropy, total_variation
from diversed.verifiers.ensemble import Ensemble, check_fraction


@dataclass(frozen=True)
class EntropyRule(Ensemble):
    """Strict where the target is sure: w = 1 where its entropy lies below ``threshold`` nats, else 0."""

    threshold: float

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold!r} must be a number of nats, 0 or above")

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        return (entropy(target_probs) < self.threshold).to(target_probs.dtype)


@dataclass(frozen=True)
class OpeningRule(Ensemble):
    """Strict in the first ``length`` generated tokens, then where the target's entropy lies below ``threshold`` nats.

    A text that goes astray early stays astray; one that was kept on course has earned something already.
    """

    length: float
    threshold: float = 0.0
    #: Generated tokens before each position, which the engine knows.
    places: Tensor | None = field(default=None, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.length >= 0 and self.length == int(self.length)):
            raise ValueError(f"length={self.length!r} must be a whole number of tokens, 0 or more")
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold!r} must be a number of nats, 0 or above")

    def at_places(self, places: Tensor) -> OpeningRule:
        return replace(self, places=places)

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        if self.places is None:
            raise ValueError("places: this rule asks how far the text has come; call at_places first")
        strict = self.places < self.length
        if self.threshold:
            strict = strict | (entropy(target_probs) < self.threshold)
        return strict.to(target_probs.dtype)


@dataclass(frozen=True)
class FavouriteRule(Ensemble):
    """Strict where the target thinks little of the draft's favourite: w = 1 where p(argmax q) < ``threshold``."""

    threshold: float

    def __post_init__(self) -> None:
        check_fraction("threshold", self.threshold)

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        favourite = draft_probs.argmax(-1, keepdim=True)
        return (target_probs.gather(-1, favourite).squeeze(-1) < self.threshold).to(target_probs.dtype)


@dataclass(frozen=True)
class SetAcceptance(Ensemble):
    """Accept at a set rate whatever the models: w = (1 - rate) / TV(p, q), at most 1, so that 1 - w TV = ``rate``.

    For sizing what acceptance would be worth before anything is trained, also with random weights. Positions that
    lossless verification accepts more often keep doing so. The text follows neither model in particular.
    """

    rate: float

    def __post_init__(self) -> None:
        check_fraction("rate", self.rate)

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        distance = total_variation(target_probs, draft_probs)
        return ((1 - self.rate) / distance.clamp_min(torch.finfo(distance.dtype).tiny)).clamp(max=1)
