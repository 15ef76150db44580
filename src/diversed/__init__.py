"""Relaxed speculative decoding with a learned ensemble verifier."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diversed.engine import GenerationOutput, ModelPair, PromptCache, generate
    from diversed.engine.hooks import custom_generate
    from diversed.verifiers import EnsembleHead, LearnedEnsemble, Lossless, StaticEnsemble, Verifier

__version__ = "0.1.0"

__all__ = [
    "EnsembleHead",
    "GenerationOutput",
    "LearnedEnsemble",
    "Lossless",
    "ModelPair",
    "PromptCache",
    "StaticEnsemble",
    "Verifier",
    "custom_generate",
    "generate",
]


def __getattr__(name: str) -> Any:
    """Names are loaded when asked for: inside vLLM the verifiers must come without the engine and its transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home in ("diversed.verifiers", "diversed.engine", "diversed.engine.hooks"):
        module = import_module(home)
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
