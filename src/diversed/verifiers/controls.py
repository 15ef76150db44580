"""Training-free rules to hold learned verifiers against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diversed.verifiers.ensemble import Ensemble


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
