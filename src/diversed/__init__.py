"""Relaxed speculative decoding with a learned ensemble verifier."""

from diversed.engine import GenerationOutput, ModelPair, generate
from diversed.engine.hooks import custom_generate
from diversed.verifiers import EnsembleHead, LearnedEnsemble, Lossless, StaticEnsemble, Verifier

__version__ = "0.1.0"

__all__ = [
    "EnsembleHead",
    "GenerationOutput",
    "LearnedEnsemble",
    "Lossless",
    "ModelPair",
    "StaticEnsemble",
    "Verifier",
    "custom_generate",
    "generate",
]
