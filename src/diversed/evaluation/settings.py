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
    BlockVerification,
    Cactus,
    CascadeOpt,
    CascadeToken,
    EntropyRule,
    FavouriteRule,
    FuzzyRule,
    LearnedEnsemble,
    Lenience,
    Lossless,
    StaticEnsemble,
    TopKRelaxation,
    TypicalAcceptance,
    Verifier,
)

RULES: dict[str, tuple[Callable[..., Verifier], str]] = {
    "static": (lambda weight: StaticEnsemble(weight), "a weight on the target between 0 and 1, say static:0.7"),
    "entropy": (EntropyRule, "a threshold in nats, say entropy:0.7"),
    "favourite": (FavouriteRule, "a probability, say favourite:0.1"),
    "lenience": (Lenience, "a number above 0 and at most 1, say lenience:0.5"),
    "cascade-opt": (CascadeOpt, "alpha, say cascade-opt:0.2"),
    "cascade-token": (CascadeToken, "alpha, at most 1, say cascade-token:0.5"),
    "cactus": (Cactus, "delta, say cactus:0.1"),
    "fuzzy-kl": (functools.partial(FuzzyRule, "kl"), "a threshold in nats, say fuzzy-kl:0.5"),
    "fuzzy-js": (functools.partial(FuzzyRule, "js"), "a threshold in nats, say fuzzy-js:0.2"),
    "fuzzy-tv": (functools.partial(FuzzyRule, "tv"), "a threshold between 0 and 1, say fuzzy-tv:0.6"),
    "typical": (TypicalAcceptance, "epsilon, or epsilon,delta, say typical:0.3 or typical:0.3,0.6"),
    "topk": (
        lambda k, ratio=0.0: TopKRelaxation(int(k) if k == int(k) else k, ratio),
        "k, or k,ratio, say topk:3 or topk:3,0.2",
    ),
}
TARGET_ONLY, DRAFT_ONLY = "target-only", "draft-only"


@functools.lru_cache(maxsize=64)
def load_verifier(spec: str) -> Verifier:
    """A verifier from its name.

    ``lossless``; ``static:0.7`` (the weight on the target); the training-free rules ``entropy:0.7`` (strict below so
    many nats) and ``favourite:0.1`` (strict where p of the draft's favourite lies below); the rivals of ``RULES``, by
    their knobs; ``block`` or ``block:static:0.7`` (block verification of another verifier); ``learned`` or
    ``learned:tally`` (the embedded pair's heads); or the folder or Hub id of a trained head, or a training run's
    folder.
    """
    kind, _, argument = spec.partition(":")
    if spec == "lossless":
        return Lossless()
    if kind == "block":
        return BlockVerification(load_verifier(argument or "lossless"))
    if kind in RULES:
        rule, meaning = RULES[kind]
        try:
            return rule(*map(float, argument.split(",")))
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"verifier={spec!r}: write {kind}:X with {meaning} ({error})") from error
    if kind == "learned":
        from diversed.pairs import HEADS

        return LearnedEnsemble.from_pretrained(_head_folder(HEADS, argument or "shop", spec))
    if (Path(spec) / "config.json").is_file() and (Path(spec) / "head").is_dir():
        return load_verifier(str(Path(spec) / "head"))  # a training run's folder
    if not Path(spec).is_dir() and spec.count("/") != 1:
        raise ValueError(
            f"verifier={spec!r} is unknown: use lossless, block, {':X, '.join(RULES)}:X, learned (the embedded pair's "
            "head), or the folder or Hub id of a trained head or a training run"
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
