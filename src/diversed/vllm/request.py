"""What one request asks for, and whether the operator's bounds allow it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from diversed.verifiers import EntropyRule, FavouriteRule, FuzzyRule, StaticEnsemble, scale_odds
from diversed.verifiers.ensemble import check_fraction
from diversed.vllm.bounds import PHASES, Bounds, Phase

KEYS = ("quality", "head", "verifier", "phase")
RULES: dict[str, Callable[[float], Any]] = {
    "entropy": EntropyRule,
    "fuzzy-tv": functools.partial(FuzzyRule, "tv"),
    "favourite": FavouriteRule,
}


@dataclass(frozen=True)
class Relaxation:
    """How one request is verified.

    ``kind`` is ``static``, ``head``, ``synthetic`` or one of :data:`RULES`; ``name`` the head's name, else empty;
    ``value`` the weight after the dial (static), the acceptance rate (synthetic) or the rule's threshold; ``quality``
    the dial, which turns heads alone and labels the rest in metrics.
    """

    kind: str
    name: str
    value: float
    quality: float
    phase: Phase

    @property
    def label(self) -> str:
        return f"head:{self.name}" if self.kind == "head" else self.kind

    @property
    def strictness(self) -> float:
        """What the minimum quality bounds: the dial of a head, the weight itself where it is static (on the dial any
        weight would pass), and nothing for the rest, which take every draft somewhere."""
        return {"head": self.quality, "static": self.value}.get(self.kind, 0.0)


def parse_relaxation(extra_args: Mapping[str, Any] | None, bounds: Bounds) -> Relaxation | None:
    """A request's relaxation, or None where it is to be lossless.

    Args:
        extra_args: ``SamplingParams.extra_args``. The settings are a mapping under ``diversed`` (or the same as JSON
            text, since vLLM's HTTP interface takes no nested objects), or flat: ``diversed_quality`` and so on.
        bounds: what the operator allows.

    Raises:
        ValueError: naming the argument, what is wrong and what is allowed.
    """
    given = _given(extra_args or {})
    for key in given:
        if key not in KEYS:
            raise ValueError(f"diversed: {key!r} is no setting; there are {', '.join(KEYS)}")
    phase = given.get("phase", bounds.phase)
    if phase not in PHASES:
        raise ValueError(f"diversed: phase={phase!r} is unknown: use {', '.join(PHASES)}")
    if bounds.phase not in ("everywhere", phase):
        raise ValueError(f"diversed: phase={phase!r} is refused: this server relaxes {bounds.phase} reasoning only")
    head, verifier = given.get("head"), given.get("verifier")
    if head is not None and verifier is not None:
        raise ValueError(f"diversed: head={head!r} and verifier={verifier!r} exclude each other: give one")
    spec = f"head:{head}" if head is not None else verifier if verifier is not None else _default(bounds)
    # A head or a static weight without a quality is meant as it is; the default is for requests that name neither.
    as_is = bounds.default_quality if head is None and verifier is None else 0.5
    try:
        quality = check_fraction("quality", given.get("quality", as_is))
    except ValueError as error:
        raise ValueError(f"diversed: {error}") from error
    relaxation = _relaxation(spec, quality, "quality" in given, cast(Phase, phase), bounds)
    if relaxation is None or not given:
        return relaxation
    floor = bounds.minimum_quality
    if relaxation.strictness < floor and relaxation.kind != "synthetic":
        what = {"head": f"quality={quality:g}", "static": f"the weight {relaxation.value:g} of {spec!r}"}
        raise ValueError(
            f"diversed: {what.get(relaxation.kind, spec)} is refused: this server's minimum quality is {floor:g}"
        )
    return relaxation


def _given(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    given = {key.removeprefix("diversed_"): v for key, v in extra_args.items() if key.startswith("diversed_")}
    nested = extra_args.get("diversed")
    if nested is None:
        return given
    if isinstance(nested, str):
        try:
            nested = json.loads(nested)
        except json.JSONDecodeError as error:
            raise ValueError(f'diversed={nested!r} is no JSON ({error}); write {{"quality": 0.5}}') from error
    if not isinstance(nested, Mapping):
        raise ValueError(f'diversed={nested!r} must be an object such as {{"quality": 0.5, "head": "gsm8k"}}')
    return {**given, **nested}


def _default(bounds: Bounds) -> str:
    return bounds.default_verifier or next((f"head:{name}" for name in bounds.heads), "static:0.5")


def _relaxation(spec: Any, quality: float, dialled: bool, phase: Phase, bounds: Bounds) -> Relaxation | None:
    if not isinstance(spec, str):
        raise ValueError(f"diversed: verifier={spec!r} must be text such as static:0.5")
    kind, _, argument = spec.partition(":")
    if kind == "lossless":
        return None
    if kind == "head":
        if argument not in bounds.heads:
            known = ", ".join(bounds.heads) or "none; the operator lists heads in DIVERSED_HEADS"
            raise ValueError(f"diversed: head={argument!r} is not served here; there are: {known}")
        return None if quality == 1 else Relaxation(kind, argument, 0.0, quality, phase)
    if kind not in ("static", "synthetic", *RULES):
        raise ValueError(
            f"diversed: verifier={spec!r} is unknown: use lossless, static:W, synthetic:R, "
            f"{', '.join(f'{rule}:X' for rule in RULES)}, or head"
        )
    try:
        value = float(argument)
        if kind in RULES:
            RULES[kind](value)
        else:
            check_fraction("weight" if kind == "static" else "rate", value)
    except ValueError as error:
        raise ValueError(f"diversed: verifier={spec!r}: write {kind}:X with a number ({error})") from error
    if kind == "static":
        weight = float(scale_odds(torch.tensor(StaticEnsemble(value).weight_on_target).double(), quality))
        return None if weight == 1 else Relaxation(kind, "", weight, quality, phase)
    if dialled:
        raise ValueError(f"diversed: quality: {kind} has no dial; leave quality out, or use static:W or a head")
    if kind == "synthetic" and not bounds.allow_synthetic:
        raise ValueError(
            "diversed: verifier='synthetic' is refused: it accepts drafts blindly, for sizing a server. "
            "The operator allows it with DIVERSED_ALLOW_SYNTHETIC=1"
        )
    return Relaxation(kind, "", value, 0.5, phase)
