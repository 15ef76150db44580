"""What a sweep compares: decoding settings and their names."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diversed.engine import ModelPair
from diversed.verifiers import (
    DistanceRule,
    EntropyRule,
    FavouriteRule,
    LearnedEnsemble,
    Lossless,
    SetAcceptance,
    StaticEnsemble,
    Verifier,
)

RULES: dict[str, tuple[Callable[[float], Verifier], str]] = {
    "entropy": (EntropyRule, "a threshold in nats, say entropy:0.7"),
    "tv": (DistanceRule, "a threshold between 0 and 1, say tv:0.6"),
    "favourite": (FavouriteRule, "a probability, say favourite:0.1"),
    "acceptance": (SetAcceptance, "a rate, say acceptance:0.7"),
}
TARGET_ONLY, DRAFT_ONLY = "target-only", "draft-only"


@functools.lru_cache(maxsize=64)
def load_verifier(spec: str) -> Verifier:
    """A verifier from its name.

    ``lossless``; ``static:0.7`` (the weight on the target); the training-free rules ``entropy:0.7`` (strict below so
    many nats), ``tv:0.6`` (strict above that TV) and ``favourite:0.1`` (strict where p of the draft's favourite lies
    below); ``acceptance:0.7`` (that rate, whatever the models: to size the gain); ``learned`` or ``learned:tally``
    (the embedded pair's heads); or the folder or Hub id of a trained head, or a training run's folder.
    """
    kind, _, argument = spec.partition(":")
    if spec == "lossless":
        return Lossless()
    if kind == "static":
        try:
            return StaticEnsemble(float(argument))
        except ValueError as error:
            raise ValueError(f"verifier={spec!r}: write static:W with a weight W in [0, 1], say static:0.7") from error
    if kind in RULES and argument:
        rule, meaning = RULES[kind]
        try:
            return rule(float(argument))
        except ValueError as error:
            raise ValueError(f"verifier={spec!r}: write {kind}:X with {meaning} ({error})") from error
    if kind == "learned":
        from diversed.pairs import HEADS

        return LearnedEnsemble.from_pretrained(_head_folder(HEADS, argument or "shop", spec))
    if (Path(spec) / "config.json").is_file() and (Path(spec) / "head").is_dir():
        return load_verifier(str(Path(spec) / "head"))  # a training run's folder
    if not Path(spec).is_dir() and spec.count("/") != 1:
        raise ValueError(
            f"verifier={spec!r} is unknown: use lossless, static:W, entropy:H, learned (the embedded pair's head), or "
            "the folder or Hub id of a trained head or a training run"
        )
    try:
        return LearnedEnsemble.from_pretrained(spec)
    except Exception as error:  # huggingface_hub and safetensors raise a dozen kinds
        raise ValueError(
            f"verifier={spec!r} holds no head ({str(error).splitlines()[0]}): needs config.json and model.safetensors"
        ) from error


@functools.cache
def fingerprint(spec: str) -> str | None:
    """Which head a name stands for right now: a hash of its parameters. None for verifiers without any."""
    verifier = None if spec in (TARGET_ONLY, DRAFT_ONLY) else load_verifier(spec)
    if not isinstance(verifier, LearnedEnsemble):
        return None
    state = verifier.head.state_dict()
    content = b"".join(state[name].contiguous().numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(content).hexdigest()[:12]


def _head_folder(heads: Path, task: str, spec: str) -> Path:
    known = sorted(p.name for p in heads.iterdir() if p.is_dir())
    if task not in known:
        raise ValueError(f"verifier={spec!r}: the embedded pair has heads for {', '.join(known)}")
    return heads / task


@dataclass(frozen=True)
class Setting:
    """One row of a sweep. ``verifier`` is a name for :func:`load_verifier`, or target-only or draft-only."""

    verifier: str
    quality: float | None = None
    num_speculative_tokens: int = 5
    temperature: float = 1.0

    @property
    def speculates(self) -> bool:
        return self.verifier not in (TARGET_ONLY, DRAFT_ONLY)

    @property
    def weight(self) -> float | None:
        """The one ensemble weight of this row, where there is one."""
        if self.verifier.startswith("static:"):
            verifier = load_verifier(self.verifier)
            assert isinstance(verifier, StaticEnsemble)
            return verifier.weight_on_target
        return {TARGET_ONLY: 1.0, "lossless": 1.0, DRAFT_ONLY: 0.0}.get(self.verifier)

    @property
    def label(self) -> str:
        return self.verifier if self.quality is None else f"{self.verifier} @ {self.quality:g}"

    def prepare(self, pair: ModelPair) -> tuple[ModelPair, dict[str, Any]]:
        """The pair and the arguments of ``generate`` that realise the setting."""
        common = {"temperature": self.temperature}
        if self.verifier == TARGET_ONLY:
            return pair, common | {"num_speculative_tokens": 0}
        if self.verifier == DRAFT_ONLY:
            alone = replace(pair, target=pair.draft, target_name=pair.draft_name)
            return alone, common | {"num_speculative_tokens": 0}
        verifier = load_verifier(self.verifier)
        if self.quality is not None:
            if not isinstance(verifier, StaticEnsemble | LearnedEnsemble):
                raise ValueError(f"quality: {self.verifier} has no dial; choose static:W or a learned head")
            verifier = verifier.at(quality=self.quality)
        return pair, common | {"verifier": verifier, "num_speculative_tokens": self.num_speculative_tokens}
