"""Verifiers: maps (target_probs, draft_probs, target_hidden, draft_hidden) to a verification distribution."""

from diversed.verifiers.controls import EntropyRule
from diversed.verifiers.ensemble import Lossless, StaticEnsemble, Verifier, scale_odds
from diversed.verifiers.learned import EnsembleHead, LearnedEnsemble

__all__ = ["EnsembleHead", "EntropyRule", "LearnedEnsemble", "Lossless", "StaticEnsemble", "Verifier", "scale_odds"]
