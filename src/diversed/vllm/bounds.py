"""What the operator of a server allows: read from the environment, or from a TOML file that it names.

``DIVERSED_CONFIG=server.toml`` holds the keys below; a variable ``DIVERSED_<KEY>`` (``DIVERSED_MINIMUM_QUALITY=0.3``)
overrides its key. Worker processes inherit the environment, so all ranks read the same.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch

from diversed.verifiers.ensemble import check_fraction, scale_odds

Phase = Literal["everywhere", "inside", "outside"]
PHASES = ("everywhere", "inside", "outside")


@dataclass(frozen=True)
class Bounds:
    """The operator's settings.

    Args:
        default_quality: of requests that say nothing; 1 serves them lossless, on vLLM's own path.
        minimum_quality: requests below are refused; 1 allows no relaxation at all.
        default_verifier: of requests that say nothing or give a quality alone: ``head:NAME`` or ``static:W``. Empty:
            the first head, or ``static:0.5`` where there is none.
        heads: name -> folder or Hub id of the heads that requests may name.
        same_names: whether a head must have been made for models of the names served here (folders and Hub ids are
            compared by their last part). Sizes and vocabulary must fit in any case.
        phase: where relaxation is allowed: ``everywhere``, or only ``inside`` or ``outside`` of reasoning.
        think_start, think_end: the tokens around reasoning, one token each.
        allow_synthetic: whether requests may use ``synthetic:R``, whose text is worthless.
        strict: refuse to start, rather than serve lossless, where this vLLM does not fit.
    """

    default_quality: float = 1.0
    minimum_quality: float = 0.0
    default_verifier: str = ""
    heads: Mapping[str, str] = field(default_factory=dict)
    same_names: bool = True
    phase: Phase = "everywhere"
    think_start: str = "<think>"
    think_end: str = "</think>"
    allow_synthetic: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        check_fraction("default_quality", self.default_quality)
        check_fraction("minimum_quality", self.minimum_quality)
        if self.phase not in PHASES:
            raise ValueError(f"phase={self.phase!r} is unknown: use {', '.join(PHASES)}")
        if self.default_quality < self.minimum_quality:
            raise ValueError(
                f"default_quality={self.default_quality:g} lies below minimum_quality={self.minimum_quality:g}: "
                "requests that say nothing would be refused. Raise one or lower the other"
            )
        self._check_default_verifier()

    def _check_default_verifier(self) -> None:
        kind, _, argument = self.default_verifier.partition(":")
        given = f"default_verifier={self.default_verifier!r}"
        if kind == "static":
            weight = float(scale_odds(torch.tensor(number_of(given, argument)).double(), self.default_quality))
            if weight < self.minimum_quality:
                raise ValueError(
                    f"{given}: at default_quality={self.default_quality:g} its weight is {weight:g}, below "
                    f"minimum_quality={self.minimum_quality:g}. Raise the weight, or lower the minimum"
                )
        elif self.default_verifier and not (kind == "head" and argument in self.heads):
            known = ", ".join(f"head:{name}" for name in self.heads) or "no head: heads is empty"
            raise ValueError(f"{given} is unknown: use static:W with a weight between 0 and 1, or {known}")


OTHERS = ("DIVERSED_CONFIG", "DIVERSED_METRICS_DIR", "DIVERSED_DATA")  # in the environment, and no bounds


def read_bounds(environment: Mapping[str, str] = os.environ) -> Bounds:
    """The bounds that the environment describes.

    Raises:
        ValueError: a file that cannot be read, an unknown key, or a value of the wrong kind; the key is named.
    """
    values: dict[str, Any] = {}
    known = [f.name for f in dataclasses.fields(Bounds)]
    names = [f"DIVERSED_{key.upper()}" for key in known]
    for name in environment:  # a bound that is misspelt would not bind
        if name.startswith("DIVERSED_") and name not in (*names, *OTHERS):
            raise ValueError(f"{name} is no setting; there are {', '.join(names)} and DIVERSED_CONFIG")
    source = environment.get("DIVERSED_CONFIG")
    if source:
        try:
            values = tomllib.loads(Path(source).read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"DIVERSED_CONFIG={source!r} cannot be read ({error}). Give a TOML file") from error
        for key in values:
            if key not in known:
                raise ValueError(f"{source}: {key!r} is no setting; there are {', '.join(known)}")
    readers = {"heads": heads_of, "same_names": truth_of, "allow_synthetic": truth_of, "strict": truth_of}
    readers |= {"default_quality": number_of, "minimum_quality": number_of}
    for key in known:
        read = cast(Callable[[str, Any], Any], readers.get(key, text_of))
        if (given := environment.get(f"DIVERSED_{key.upper()}")) is not None:
            values[key] = read(f"DIVERSED_{key.upper()}", given)
        elif key in values:
            values[key] = read(f"{source}: {key}", values[key])
    return Bounds(**values)


def number_of(name: str, value: Any) -> float:
    try:
        return check_fraction(name, float(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} must be a number between 0 and 1") from error


def truth_of(name: str, value: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError(f"{name}={value!r} must be 1 or 0")
    return words[str(value).lower()]


def text_of(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} must be text")
    return value


def heads_of(name: str, value: Any) -> dict[str, str]:
    """``shop=heads/shop,tally=user/tally-head`` or a TOML table to name -> source."""
    if isinstance(value, dict):
        pairs = [(k, v) for k, v in value.items()]
    else:
        pairs = [(k.strip(), v.strip()) for k, _, v in (part.partition("=") for part in str(value).split(",") if part)]
    for key, source in pairs:
        if not key or not isinstance(source, str) or not source:
            raise ValueError(f"{name}={value!r}: write NAME=FOLDER[,NAME=FOLDER], a folder or Hub id for each head")
    return dict(pairs)
