"""Drafts by distillation: made of a target's own layers, or improved on a task's prompts."""

from diversed.training.distillation.distill import Acceptance, Distilled, DistillSettings, distill

__all__ = ["Acceptance", "DistillSettings", "Distilled", "distill"]
