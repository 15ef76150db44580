"""What a sweep compares: decoding settings and their names."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diversed.engine import ModelPair
from diversed.engine.generate import check_fits
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
    OpeningRule,
    SetAcceptance,
    StaticEnsemble,
    TopKRelaxation,
    TypicalAcceptance,
    Verifier,
)
from diversed.verifiers.ensemble import check_fraction
from diversed.verifiers.learned import head_folder

RULES: dict[str, tuple[Callable[..., Verifier], str]] = {
    "static": (lambda weight: StaticEnsemble(weight), "a weight on the target between 0 and 1, say static:0.7"),
    "entropy": (EntropyRule, "a threshold in nats, say entropy:0.7"),
    "opening": (OpeningRule, "a number of tokens, or that and nats, say opening:16 or opening:16,2.5"),
    "favourite": (FavouriteRule, "a probability, say favourite:0.1"),
    "acceptance": (SetAcceptance, "a rate, say acceptance:0.7"),
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
# A few knobs each from cautious to permissive, for a first look at where their curves lie.
RIVALS = (
    "block",
    *("lenience:0.5", "lenience:0.2", "lenience:0.05"),
    *("cascade-opt:-0.7", "cascade-opt:0", "cascade-opt:0.5"),
    *("cascade-token:0.2", "cascade-token:0.6", "cascade-token:0.9"),
    *("cactus:0.05", "cactus:0.5", "cactus:5"),
    *("fuzzy-kl:0.5", "fuzzy-kl:4", "fuzzy-js:0.2", "fuzzy-js:0.6", "fuzzy-tv:0.4", "fuzzy-tv:0.8"),
    *("typical:0.3", "typical:0.09", "typical:0.01", "topk:2,0.3", "topk:5,0.1"),
    *("entropy:0.3", "entropy:0.7", "entropy:1.5"),
    *("control:static:0.5",),
)
TARGET_ONLY, DRAFT_ONLY = "target-only", "draft-only"
CONTROL = "control:"  # before a verifier's name: sample from its nu, one token at a time, with nothing to verify
PEER, ASSISTED = "transformers", "transformers:assisted"  # generate() of transformers, as it is; ASSISTED:W blends


def is_block(spec: str) -> bool:
    """Whether a verifier's verdicts fall on whole blocks: its acceptance is then not one of positions."""
    return spec.partition(":")[0] == "block"


@functools.lru_cache(maxsize=64)
def load_verifier(spec: str) -> Verifier:
    """A verifier from its name.

    ``lossless``; ``static:0.7`` (the weight on the target); the training-free rules ``entropy:0.7`` (strict below so
    many nats), ``opening:16`` or ``opening:16,0.7`` (strict in so many tokens at first, and below so many nats) and
    ``favourite:0.1`` (strict where p of the draft's favourite lies below); the rivals of ``RULES``, by
    their knobs; ``block`` or ``block:static:0.7`` (block verification of another verifier); ``acceptance:0.7`` (that
    rate, whatever the models: to size the gain); ``learned`` or ``learned:tally`` (the embedded pair's heads); or the
    folder or Hub id of a trained head, or a training run's folder.
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
    if not Path(spec).is_dir() and spec.count("/") != 1:
        raise ValueError(
            f"verifier={spec!r} is unknown: use lossless, block, {':X, '.join(RULES)}:X, learned (the embedded pair's "
            "head), or the folder or Hub id of a trained head or a training run"
        )
    folder = head_folder(spec, "verifier")
    try:
        return LearnedEnsemble.from_pretrained(folder)
    except Exception as error:  # huggingface_hub and safetensors raise a dozen kinds
        raise ValueError(
            f"verifier={spec!r} holds no head ({str(error).splitlines()[0]}): needs config.json and model.safetensors"
        ) from error


def at_quality(verifier: Verifier, quality: float, spec: str) -> Verifier:
    """A verifier with its dial turned; ``spec`` is its name."""
    inner = verifier.verifier if isinstance(verifier, BlockVerification) else verifier
    if not isinstance(inner, StaticEnsemble | LearnedEnsemble):
        raise ValueError(f"quality: {spec} has no dial; choose static:W or a learned head")
    turned: Verifier = verifier.at(quality=quality)  # type: ignore[attr-defined]
    return turned


def head_of(spec: str) -> LearnedEnsemble | None:
    """The learned verifier behind a setting's name, where there is one."""
    if spec in (TARGET_ONLY, DRAFT_ONLY) or spec.partition(":")[0] == PEER:
        return None
    verifier = load_verifier(spec.removeprefix(CONTROL))
    inner = verifier.verifier if isinstance(verifier, BlockVerification) else verifier
    return inner if isinstance(inner, LearnedEnsemble) else None


@functools.cache
def fingerprint(spec: str) -> str | None:
    """Which head a name stands for right now: a hash of its parameters. None for verifiers without any."""
    head = head_of(spec)
    if head is None:
        return None
    state = head.head.state_dict()
    content = b"".join(state[name].contiguous().numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(content).hexdigest()[:12]


def _head_folder(heads: Path, task: str, spec: str) -> Path:
    known = sorted(p.name for p in heads.iterdir() if p.is_dir())
    if task not in known:
        raise ValueError(f"verifier={spec!r}: the embedded pair has heads for {', '.join(known)}")
    return heads / task


@dataclass(frozen=True)
class Setting:
    """One row of a sweep.

    ``verifier`` is a name for :func:`load_verifier`; or target-only or draft-only; or ``control:NAME``, which samples
    from the nu of NAME one token at a time; or a peer: ``transformers`` (target-only ``generate``),
    ``transformers:assisted`` (its assisted generation) and ``transformers:assisted:0.7`` (with that
    ``assistant_ensemble_weight``).
    """

    verifier: str
    quality: float | None = None
    num_speculative_tokens: int = 5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.quality is not None:
            check_fraction("quality", self.quality)

    @property
    def speculates(self) -> bool:
        """Whether our engine drafts and verifies."""
        return self.verifier not in (TARGET_ONLY, DRAFT_ONLY) and not self.is_peer and not self.is_control

    @property
    def is_control(self) -> bool:
        return self.verifier.startswith(CONTROL)

    @property
    def is_peer(self) -> bool:
        return self.verifier.partition(":")[0] == PEER

    @property
    def assistant_weight(self) -> float | None:
        """A peer's ``assistant_ensemble_weight``."""
        weight = self.verifier.removeprefix(ASSISTED).removeprefix(":") if self.is_peer else ""
        if not weight or self.verifier == PEER:
            return None
        try:
            return check_fraction("weight", float(weight))
        except ValueError as error:
            raise ValueError(f"verifier={self.verifier!r}: write {PEER}, {ASSISTED} or {ASSISTED}:0.7") from error

    @property
    def weight(self) -> float | None:
        """The one ensemble weight of this row, where there is one."""
        if self.verifier.startswith("static:"):
            verifier = load_verifier(self.verifier)
            assert isinstance(verifier, StaticEnsemble)
            return verifier.weight_on_target
        if self.is_peer:
            return 1.0 if self.assistant_weight is None else self.assistant_weight
        return {TARGET_ONLY: 1.0, "lossless": 1.0, DRAFT_ONLY: 0.0}.get(self.verifier)

    def at_n(self, num_speculative_tokens: int) -> Setting:
        """The same verifier, quality and temperature at another N."""
        return replace(self, num_speculative_tokens=num_speculative_tokens)

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
        if self.is_peer:
            if not self.verifier.startswith(ASSISTED) and self.verifier != PEER:
                raise ValueError(f"verifier={self.verifier!r}: write {PEER}, {ASSISTED} or {ASSISTED}:0.7")
            _ = self.assistant_weight  # raises where it is none
            return pair, common | {"num_speculative_tokens": self.num_speculative_tokens}
        verifier = load_verifier(self.verifier.removeprefix(CONTROL))
        if self.quality is not None:
            verifier = at_quality(verifier, self.quality, self.verifier)
        check_fits(verifier, pair)
        if self.is_control:
            return pair, common | {"verifier": verifier, "num_speculative_tokens": 0, "bonus": "verifier"}
        return pair, common | {"verifier": verifier, "num_speculative_tokens": self.num_speculative_tokens}
