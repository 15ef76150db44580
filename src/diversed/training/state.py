"""Everything a run must remember to go on exactly where it stopped, and its checkpoint on disk."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from diversed.training.policy_gradient import StateValue
from diversed.training.regression import Sums
from diversed.training.run_folder import writing
from diversed.training.settings import TrainSettings
from diversed.verifiers import EnsembleHead

PLAIN = ("step", "reward_average", "log_multiplier", "seconds", "best", "since_best", "early_stop")


@dataclass
class State:
    """The head under training and all that changes with it. ``step`` counts finished steps."""

    head: EnsembleHead
    optimiser: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    value: StateValue
    step: int = 0
    reward_average: float | None = None
    log_multiplier: float = 0.0
    seconds: float = 0.0  #: spent training, validation and earlier parts of a resumed run included
    best: dict[str, Any] = field(default_factory=dict)  #: the validation row of the best head so far
    since_best: int = 0
    early_stop: bool = False

    @classmethod
    def new(cls, head: EnsembleHead, settings: TrainSettings) -> State:
        optimiser = torch.optim.AdamW(
            head.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.95)
        )
        warmup = max(1, round(settings.warmup_share * settings.steps))

        def rate(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            through = (step - warmup) / max(1, settings.steps - warmup)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, through)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
        return cls(head, optimiser, schedule, StateValue.empty(head.mean.numel()))

    def save(self, folder: Path) -> None:
        """Write ``folder`` anew; at every moment either the old or the new checkpoint is whole."""
        fresh = folder.with_suffix(".new")
        value = {"value": vars(self.value.sums)}
        plain = {name: getattr(self, name) for name in PLAIN}
        with writing(folder):
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            save_file(self.head.state_dict(), fresh / "head.safetensors")
            torch.save({"optimiser": self.optimiser.state_dict(), "schedule": self.schedule.state_dict(), **value},
                       fresh / "optimiser.pt")  # fmt: skip
            (fresh / "state.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")
            replace_folder(fresh, folder)

    def load(self, folder: Path) -> None:
        """Take over a checkpoint; the one before it where a crash fell between two renames."""
        if not folder.exists():
            folder = folder.with_suffix(".old")
        self.head.load_state_dict(load_file(folder / "head.safetensors"))
        tensors = torch.load(folder / "optimiser.pt", weights_only=True)
        self.optimiser.load_state_dict(tensors["optimiser"])
        self.schedule.load_state_dict(tensors["schedule"])
        self.value = StateValue(Sums(**tensors["value"]))
        for name, value in json.loads((folder / "state.json").read_text(encoding="utf-8")).items():
            setattr(self, name, value)


def replace_folder(fresh: Path, folder: Path) -> None:
    """Put ``fresh`` in the place of ``folder``. A crash in between leaves the old one whole under ``.old``."""
    old = folder.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def has_checkpoint(folder: Path) -> bool:
    return folder.exists() or folder.with_suffix(".old").exists()
