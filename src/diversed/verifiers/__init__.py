"""Verifiers: maps (target_probs, draft_probs, target_hidden, draft_hidden) to a verification distribution."""

from diversed.verifiers.controls import DistanceRule, EntropyRule, FavouriteRule, SetAcceptance
from diversed.verifiers.ensemble import Lossless, StaticEnsemble, Verifier, scale_odds
from diversed.verifiers.learned import EnsembleHead, LearnedEnsemble

__all__ = [
    "DistanceRule",
    "EnsembleHead",
    "EntropyRule",
    "FavouriteRule",
    "LearnedEnsemble",
    "Lossless",
    "SetAcceptance",
    "StaticEnsemble",
    "Verifier",
    "scale_odds",
]
