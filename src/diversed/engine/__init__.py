"""The draft-verify loop on transformers models."""

from diversed.engine.cache import PromptCache
from diversed.engine.generate import generate
from diversed.engine.output import GenerationOutput, Stats, Trace
from diversed.engine.pair import ModelPair

__all__ = ["GenerationOutput", "ModelPair", "PromptCache", "Stats", "Trace", "generate"]
