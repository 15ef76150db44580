"""What fixes a distillation run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DistillSettings:
    """What fixes a run. Two runs of equal settings on equal models and prompts give equal drafts (on a CPU)."""

    layers: tuple[int, ...] | None = None  #: of the target, for a shallow student; the first and last two where None
    lora_rank: int = 0  #: 0 trains all parameters that are not the target's own; above, LoRA, merged at the end
    #: Completions: sampled from the target; the given ones; or the given one where a prompt has one, else sampled.
    text: Literal["target", "given", "mixed"] = "target"
    samples_per_prompt: int = 1
    max_new_tokens: int = 128
    stop_strings: tuple[str, ...] = ()  #: end a sampled text, as they will end answers in use
    temperature: float = 1.0  #: of the sampled text; the divergences are those at temperature 1
    max_prompt_tokens: int = 512  #: longer prompts are left out
    prompt_weight: float = 0.3  #: of a prompt's position in the loss; a completion's has 1
    steps: int = 1000
    batch_size: int = 8  #: sequences
    learning_rate: float = 1e-3  #: 1e-3 suits a shallow student, 1e-5 to 1e-4 a draft that is good already
    warmup: int = 20  #: steps; linear decay to 2 % follows
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    tv_from: float = 0.5  #: share of the run after which the loss is KL + 2 TV instead of KL
    #: Of the forward passes; auto: bf16 where the device multiplies in it. Learned parameters are float32.
    precision: Literal["auto", "bf16", "float32"] = "auto"
    compile: bool = False  #: torch.compile the divergences; pays on a GPU, in runs of more than some minutes
    seed: int = 0
    # What follows may differ when a run is resumed.
    budget_seconds: float | None = None  #: wall clock of the call, sampling and measuring included
    sampling_share: float = 0.25  #: of the budget that sampling may take
    sampling_batch: int | None = None  #: sequences sampled at a time; 256 on a GPU, 8 on a CPU where None
    evaluate_every: int = 200  #: steps
    checkpoint_every: int = 200  #: steps


RESUMABLE = ("budget_seconds", "sampling_share", "sampling_batch", "evaluate_every", "checkpoint_every")


def check_settings(settings: DistillSettings, given: Sequence[str | None] | None, prompts: int) -> None:
    def require(ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise ValueError(f"{name}={getattr(settings, name)!r} must be {rule}")

    def number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    whole = ("samples_per_prompt", "max_new_tokens", "max_prompt_tokens", "steps", "batch_size")
    for name in (*whole, "evaluate_every", "checkpoint_every"):
        value = getattr(settings, name)
        require(isinstance(value, int) and not isinstance(value, bool) and value >= 1, name, "a whole number above 0")
    for name in ("lora_rank", "warmup"):
        value = getattr(settings, name)
        require(
            isinstance(value, int) and not isinstance(value, bool) and value >= 0, name, "a whole number, 0 or more"
        )
    for name in ("temperature", "prompt_weight", "weight_decay"):
        require(number(getattr(settings, name)) and getattr(settings, name) >= 0, name, "a number, 0 or above")
    for name in ("learning_rate", "max_grad_norm"):
        require(number(getattr(settings, name)) and getattr(settings, name) > 0, name, "a number above 0")
    for name in ("tv_from", "sampling_share"):
        require(number(getattr(settings, name)) and 0 <= getattr(settings, name) <= 1, name, "between 0 and 1")
    require(settings.text in ("target", "given", "mixed"), "text", "'target', 'given' or 'mixed'")
    require(settings.precision in ("auto", "bf16", "float32"), "precision", "'auto', 'bf16' or 'float32'")
    budget, batch = settings.budget_seconds, settings.sampling_batch
    require(budget is None or (number(budget) and budget > 0), "budget_seconds", "a number above 0, or None for none")
    require(batch is None or (isinstance(batch, int) and batch >= 1), "sampling_batch", "a whole number above 0")
    if prompts == 0:
        raise ValueError("prompts holds no prompt: give at least one")
    if settings.text != "target":
        if given is None:
            raise ValueError(f"text={settings.text!r} needs completions: pass given=, one per prompt")
        if len(given) != prompts:
            raise ValueError(
                f"given has {len(given)} completions for {prompts} prompts: give one each (None where none)"
            )
