"""From logits to the probabilities a request asks for."""

from __future__ import annotations

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

FORBIDDEN = -1e30  # processors forbid with -inf or with the smallest float of their dtype: both lie below this


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

        require(self.temperature >= 0, "temperature", "0 (greedy) or above")
        require(
            self.top_k is None or (isinstance(self.top_k, int) and self.top_k >= 0), "top_k", "a whole number; 0 is off"
        )
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", "above 0 and at most 1; 1 is off")
        require(self.min_p is None or 0 <= self.min_p <= 1, "min_p", "between 0 and 1; 0 is off")
        require(
            self.repetition_penalty is None or self.repetition_penalty > 0, "repetition_penalty", "above 0; 1 is off"
        )
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

    def __call__(self, logits: Tensor, prefixes: Sequence[Sequence[Tensor | None]] | None) -> tuple[Tensor, Tensor | None]:
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
        return row if ids is None else self.history(ids.unsqueeze(0), row)  # type: ignore[no-any-return]
