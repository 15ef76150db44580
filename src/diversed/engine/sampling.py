"""From logits to the probabilities a request asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from diversed.verification import FORBIDDEN


@dataclass
class Sampler:
    """The request's processors, in the order of transformers: penalties and the caller's own, then temperature,
    top-k, top-p, min-p. Both models' logits go through the very same ones at every position.

    At temperature 0 the probabilities are those of temperature 1, truncated all the same: they are compared by
    argmax, and what top-k or top-p cut off stays forbidden.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logits_processor: Sequence[object] = ()
    history: LogitsProcessorList = field(init=False)  # look at the tokens so far: applied row by row
    warpers: LogitsProcessorList = field(init=False)  # look at the logits alone: applied to all rows at once

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {rule}")

        def number(value: float | None) -> bool:
            return isinstance(value, int | float) and math.isfinite(value)

        t, k, top_p, min_p, penalty = self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        require(number(t) and t >= 0, "temperature", "a number: 0 (greedy) or above")
        require(k is None or (isinstance(k, int) and k >= 0), "top_k", "a whole number; 0 is off")
        require(top_p is None or (number(top_p) and 0 < top_p <= 1), "top_p", "above 0 and at most 1; 1 is off")
        require(min_p is None or (number(min_p) and 0 <= min_p <= 1), "min_p", "between 0 and 1; 0 is off")
        require(penalty is None or (number(penalty) and penalty > 0), "repetition_penalty", "above 0; 1 is off")
        self.history = LogitsProcessorList()
        if self.repetition_penalty not in (None, 1.0):
            self.history.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        self.history.extend(self.logits_processor)
        self.warpers = LogitsProcessorList()
        if self.temperature not in (0.0, 1.0):
            self.warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            self.warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            self.warpers.append(TopPLogitsWarper(float(self.top_p)))
        if self.min_p:
            self.warpers.append(MinPLogitsWarper(self.min_p))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """Whether there is nothing but a temperature."""
        return not self.history and all(isinstance(w, TemperatureLogitsWarper) for w in self.warpers)

    def __call__(
        self, logits: Tensor, prefixes: Sequence[Sequence[Tensor | None]] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Probabilities [B, K, V] and what they allow (boolean, or None where nothing can be forbidden).

        Args:
            logits: [B, K, V] float32.
            prefixes: for row b and position k, the unpadded token ids before that position; None where the
                processors of :attr:`history` are not to be asked. Needed only when there are any.
        """
        if self.history:
            assert prefixes is not None
            logits = torch.stack(
                [
                    torch.cat([self._process(ids, row[k : k + 1].clone()) for k, ids in enumerate(places)])
                    for row, places in zip(logits, prefixes, strict=True)
                ]
            )
        if self.warpers:
            flat = logits.reshape(-1, logits.shape[-1])
            logits = self.warpers(None, flat).view_as(logits)
        support = logits > FORBIDDEN if self.history or self.warpers else None
        return torch.softmax(logits, -1), support

    def _process(self, ids: Tensor | None, row: Tensor) -> Tensor:
        return row if ids is None else self.history(ids.unsqueeze(0), row)
