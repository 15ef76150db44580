"""Training-free rules to hold learned verifiers against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diversed.verification import verification_distribution


@dataclass(frozen=True)
class EntropyRule:
    """Strict where the target is sure: w = 1 where its entropy lies below ``threshold`` nats, else 0."""

    threshold: float

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold!r} must be a number of nats, 0 or above")

    def __call__(
        self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor
    ) -> Tensor:
        weight = self.weight(target_probs, draft_probs, target_hidden, draft_hidden)
        return verification_distribution(target_probs, draft_probs, weight)

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        entropy = -torch.special.xlogy(target_probs, target_probs).sum(-1)
        return (entropy < self.threshold).to(target_probs.dtype)
