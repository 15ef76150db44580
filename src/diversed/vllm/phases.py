"""Where in its reasoning each request is, kept on the device: no synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diversed.vllm.blend import to_device
from diversed.vllm.bounds import Bounds


def find_markers(bounds: Bounds, tokenizer: Any) -> tuple[int, int] | None:
    """Ids of the two tokens around reasoning; None where they are none of the tokenizer's.

    Raises:
        ValueError: where the operator's phase needs them.
    """
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    start, end = vocabulary.get(bounds.think_start), vocabulary.get(bounds.think_end)
    if start is not None and end is not None:
        return start, end
    if bounds.phase != "everywhere":
        raise ValueError(
            f"phase={bounds.phase!r} needs {bounds.think_start!r} and {bounds.think_end!r} to be one token each of "
            "this model: set DIVERSED_THINK_START and DIVERSED_THINK_END"
        )
    return None


def inside_after(tokens: Sequence[int], start: int, end: int) -> bool:
    """Whether reasoning is open after these tokens: the last of the two markers decides."""
    for token in reversed(tokens):
        if token in (start, end):
            return token == start
    return False


def inside_before(inside: Tensor, tokens: Tensor, start: int, end: int) -> Tensor:
    """State before each token of a row, and after the last: [B] and [B, K] -> [B, K+1]. Negative ids are padding."""
    states = [inside]
    for column in tokens.unbind(1):
        states.append(torch.where(column == start, True, torch.where(column == end, False, states[-1])))
    return torch.stack(states, 1)


def strict_rows(inside: Tensor, tokens: Tensor, wanted: Tensor, start: int, end: int) -> Tensor:
    """Positions that must stay the target's because the request relaxes the other phase only.

    Args:
        inside: [B], whether reasoning is open before the block.
        tokens: drafted block [B, N]; padding is negative.
        wanted: [B]: 1 relaxes inside reasoning only, -1 outside only, 0 everywhere.

    Returns:
        boolean [B, N]. A position is judged by the tokens before it, never by its own.
    """
    before = inside_before(inside, tokens, start, end)[:, :-1]
    wanted = wanted.unsqueeze(1)
    return ((wanted == 1) & ~before) | ((wanted == -1) & before)


class PhaseTracker:
    """Whether each running request's reasoning is open, in slots of one device tensor."""

    def __init__(self, capacity: int, markers: tuple[int, int], device: torch.device) -> None:
        self.inside = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.markers, self.device = markers, device

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """A request enters a slot with these tokens so far (the prompt, which may open reasoning itself)."""
        self.inside[slot] = inside_after(tokens, *self.markers)

    def at(self, slots: Sequence[int]) -> Tensor:
        """State of the requests in these slots, [B]."""
        return self.inside[to_device(slots, self.device)]

    def advance(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Take in the tokens [B, K] that a step added to these slots; negative ids are padding."""
        index = to_device(slots, self.device)
        self.inside[index] = inside_before(self.inside[index], tokens, *self.markers)[:, -1]
