"""Training-free rules to hold learned verifiers against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diversed.verifiers.ensemble import Ensemble, check_fraction


@dataclass(frozen=True)
class EntropyRule(Ensemble):
    """Strict where the target is sure: w = 1 where its entropy lies below ``threshold`` nats, else 0."""

    threshold: float

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold!r} must be a number of nats, 0 or above")

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        entropy: Tensor = -torch.special.xlogy(target_probs, target_probs).sum(-1)
        strict: Tensor = entropy < self.threshold
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
