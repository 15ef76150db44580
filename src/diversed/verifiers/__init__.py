"""Verifiers: maps (target_probs, draft_probs, target_hidden, draft_hidden) to a verification distribution."""

from diversed.verifiers.controls import EntropyRule, FavouriteRule, OpeningRule, SetAcceptance
from diversed.verifiers.ensemble import Lossless, StaticEnsemble, Verifier, scale_odds
from diversed.verifiers.learned import EnsembleHead, LearnedEnsemble
from diversed.verifiers.rivals import (
    AcceptanceTest,
    BlockVerification,
    Cactus,
    CascadeOpt,
    CascadeToken,
    FuzzyRule,
    Lenience,
    TopKRelaxation,
    TypicalAcceptance,
)

__all__ = [
    "AcceptanceTest",
    "BlockVerification",
    "Cactus",
    "CascadeOpt",
    "CascadeToken",
    "EnsembleHead",
    "EntropyRule",
    "FavouriteRule",
    "FuzzyRule",
    "LearnedEnsemble",
    "Lenience",
    "Lossless",
    "OpeningRule",
    "SetAcceptance",
    "StaticEnsemble",
    "TopKRelaxation",
    "TypicalAcceptance",
    "Verifier",
    "scale_odds",
]
