"""The interface of a verifier, the lossless and the static one, and the dial."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from diversed.verification import verification_distribution


class Verifier(Protocol):
    """A verification rule that can be written as a distribution nu.

    ``nu`` at a position may depend on the prefix alone (through both models' probabilities and the hidden states
    that predict the position), never on the drafted token: that keeps rejection sampling exact for ``nu``.

    What else the engine asks for, where a verifier has it: ``weight`` for traces, ``at_places`` (the same for positions
    that so many generated tokens come before, [...]), ``check_fits`` and ``to`` of learned ones, ``joint`` (decide over
    blocks as a whole) and ``accepts`` (no rejection sampling but a test; rivals.py).
    """

    def __call__(
        self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor
    ) -> Tensor:
        """Probabilities [..., V] and hidden states [..., H_target], [..., H_draft] to ``nu`` [..., V]."""
        ...


def check_fraction(name: str, value: float) -> float:
    """``value`` as a float, or one clear error where it is no number in [0, 1]."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} must be a number between 0 and 1")
    return float(value)


def scale_odds(weight: Tensor, quality: float) -> Tensor:
    """The dial: ``w_d = d w / (d w + (1 - d)(1 - w))``, elementwise.

    ``quality`` d = 1/2 changes nothing, 1 is lossless (all weights 1), 0 takes every draft (all weights 0); the
    two ends hold for every w, also where the formula alone would read 0/0.
    """
    d = check_fraction("quality", quality)
    if d in (0.0, 1.0):
        return torch.full_like(weight, d)
    return d * weight / (d * weight + (1 - d) * (1 - weight))


def log_odds(fraction: float) -> float:
    """ln(d / (1 - d)), infinite at the ends."""
    if fraction in (0.0, 1.0):
        return math.inf if fraction else -math.inf
    return math.log(fraction / (1 - fraction))


class Ensemble:
    """A verifier whose nu is the blend w p + (1 - w) q; what makes one differ from another is :meth:`weight`."""

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        """The ensemble weight on the target, [...]; arguments as for :class:`Verifier`."""
        raise NotImplementedError

    def __call__(
        self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor
    ) -> Tensor:
        weight = self.weight(target_probs, draft_probs, target_hidden, draft_hidden)
        return verification_distribution(target_probs, draft_probs, weight)


@dataclass(frozen=True)
class Lossless:
    """Ordinary speculative decoding: nu = p. The output follows the target exactly."""

    def __call__(
        self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor
    ) -> Tensor:
        return target_probs

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        return torch.ones_like(target_probs[..., 0])

    def at(self, *, quality: float) -> Lossless:
        """Lossless at any quality: it has no dial to turn."""
        check_fraction("quality", quality)
        return self


@dataclass(frozen=True)
class StaticEnsemble(Ensemble):
    """One ensemble weight everywhere: nu = w p + (1 - w) q, after the dial."""

    weight_on_target: float
    quality: float = 0.5

    def __post_init__(self) -> None:
        check_fraction("weight", self.weight_on_target)
        check_fraction("quality", self.quality)

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        return scale_odds(torch.full_like(target_probs[..., 0], self.weight_on_target), self.quality)

    def at(self, *, quality: float) -> StaticEnsemble:
        """The same weight with its odds scaled by ``quality``; 0.5 is the weight itself."""
        return replace(self, quality=check_fraction("quality", quality))
