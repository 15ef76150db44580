"""Where a sequence ends: end-of-sequence tokens, stop strings and further criteria, also inside a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from diversed.engine.output import FinishReason
from diversed.engine.pair import ModelPair


@dataclass(frozen=True)
class Stopping:
    eos: frozenset[int]
    strings: tuple[str, ...]
    criteria: tuple[Any, ...]
    tokenizer: PreTrainedTokenizerBase | None

    @classmethod
    def of(
        cls,
        pair: ModelPair,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        criteria: Sequence[object] = (),
        *,
        ignore_eos: bool = False,
    ) -> Stopping:
        """``eos_token_id`` falls back to the target's generation config, then its config, then the tokenizer."""
        if eos_token_id is None:
            for source in (pair.target.generation_config, pair.target.config, pair.tokenizer):
                eos_token_id = getattr(source, "eos_token_id", None)
                if eos_token_id is not None:
                    break
        eos = () if eos_token_id is None or ignore_eos else eos_token_id
        strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ())
        if strings and pair.tokenizer is None:
            raise ValueError("stop_strings needs a tokenizer and this pair has none")
        if "" in strings:
            raise ValueError("stop_strings holds an empty string, which would end every sequence at once: remove it")
        ends = {eos} if isinstance(eos, int) else set(eos)
        # Text is decoded without special tokens: one that is asked for as a string ends a sequence as a token.
        if strings and pair.tokenizer is not None:
            special = set(pair.tokenizer.all_special_tokens).intersection(strings)
            ends |= {pair.tokenizer.convert_tokens_to_ids(s) for s in special}
            strings = tuple(s for s in strings if s not in special)
        return cls(frozenset(ends), strings, tuple(criteria), pair.tokenizer)

    def cut(self, ids: list[int], prompt_length: int, new: list[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens of ``new`` up to the one that ends the sequence, that one included, and whether it ended."""
        for i, token in enumerate(new):
            if token in self.eos:
                return new[: i + 1], "stop"
            if self.strings and self._has_stop_string((ids[prompt_length:] + new[: i + 1]), len(new)):
                return new[: i + 1], "stop"
            if self.criteria and self._criteria_met(ids + new[: i + 1]):
                return new[: i + 1], "stop"
        return new, None

    def text(self, ids: list[int]) -> str:
        """Decoded without special tokens, up to the end of the first stop string."""
        if self.tokenizer is None:
            return ""
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        ends = [text.find(s) + len(s) for s in self.strings if s in text]
        return text[: min(ends)] if ends else text

    def _has_stop_string(self, ids: list[int], block: int) -> bool:
        # A token is at least a quarter of a character (a byte of UTF-8), so this tail holds any string that just ended.
        tail = 4 * max(map(len, self.strings)) + block
        assert self.tokenizer is not None
        text = self.tokenizer.decode(ids[-tail:], skip_special_tokens=True)
        return any(s in text for s in self.strings)

    def _criteria_met(self, ids: list[int]) -> bool:
        row = torch.tensor([ids])
        return any(bool(torch.as_tensor(criterion(row, None)).any()) for criterion in self.criteria)
