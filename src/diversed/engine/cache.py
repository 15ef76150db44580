"""A KV cache whose rows grow and shrink independently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

CHUNK = 64  # slots by which buffers grow, so that most steps allocate nothing
ALIGNED = 8  # masks as wide as a multiple of this take the fast attention kernels of CUDA


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of every layer in one buffer per layer, [B, heads, capacity, head size].

    A token at position s of its sequence lies in slot s of its row; ``lengths[b]`` slots of row b hold kept tokens.
    What lies beyond is left over from rejected drafts, padding or a former tenant: no query looks past its own slot,
    and the next tokens overwrite it. Rolling back is therefore nothing but a smaller length, exact for every row and
    for sliding-window layers too, whose window is a matter of the mask and not of storage.

    Lengths live on the host, which knows them without asking a device.
    """

    def __init__(self, batch: int, device: torch.device, capacity: int | None = None) -> None:
        super().__init__(layers=[])
        self.device = device
        self.capacity = capacity  # slots of the buffers, for good; they grow on demand where None
        self.lengths = [0] * batch
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.slots = torch.zeros(batch, 0, dtype=torch.long, device=device)
        self.extent = 0
        self.start: int | None = 0

    def place(self, width: int) -> Tensor:
        """Reserve ``width`` slots after each row's length for the next forward pass; returns them, [B, width]."""
        end = max(self.lengths) + width
        self.extent = self.capacity or -(-end // ALIGNED) * ALIGNED
        # When all rows stand at the same length, a slice replaces the scatter.
        self.start = self.lengths[0] if len(set(self.lengths)) == 1 else None
        self.slots = (torch.tensor(self.lengths).unsqueeze(1) + torch.arange(width)).to(self.device)
        return self.slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, width, head size] into the placed slots; returns all slots up to the extent."""
        return self._write(self.keys, layer_idx, key_states), self._write(self.values, layer_idx, value_states)

    def _write(self, buffers: dict[int, Tensor], layer: int, states: Tensor) -> Tensor:
        buffer = buffers.get(layer)
        if buffer is None or buffer.shape[2] < self.extent:
            capacity = self.capacity or -(-self.extent // CHUNK) * CHUNK + CHUNK
            buffer = buffers[layer] = grown(buffer, states, capacity)
        if self.start is not None:
            buffer[:, :, self.start : self.start + states.shape[2]] = states
        else:
            rows = torch.arange(states.shape[0], device=states.device).unsqueeze(1)
            buffer[rows, :, self.slots.to(states.device)] = states.transpose(1, 2)
        return buffer[:, :, : self.extent]

    def buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values, layer by layer."""
        layers = range(len(self.keys))
        return [self.keys[i] for i in layers], [self.values[i] for i in layers]

    def keep_rows(self, rows: list[int]) -> None:
        """These rows, in this order, and no others; a row named twice becomes two."""
        self.lengths = [self.lengths[row] for row in rows]
        for buffers in (self.keys, self.values):
            for layer, buffer in buffers.items():
                buffers[layer] = buffer[torch.tensor(rows, dtype=torch.long, device=buffer.device)]

    def replace_rows(self, rows: list[int], other: SlotCache, theirs: list[int] | None = None) -> None:
        """Let the rows of ``other`` move in where ``rows`` are: all of them, or those that ``theirs`` names."""
        longest = max(other.lengths)
        for ours, others in ((self.keys, other.keys), (self.values, other.values)):
            for layer, states in others.items():
                buffer = ours.get(layer)
                if buffer is None or buffer.shape[2] < longest:
                    capacity = self.capacity or states.shape[2]
                    buffer = ours[layer] = grown(buffer, states, capacity, len(self.lengths))
                new = states if theirs is None else states[theirs]
                buffer[torch.tensor(rows, device=buffer.device), :, :longest] = new[:, :, :longest]
        lengths = other.lengths if theirs is None else [other.lengths[row] for row in theirs]
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length

    # What transformers may ask of a cache. Masks and positions are given explicitly, so nothing depends on these.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.extent - self.slots.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.extent, 0

    def __len__(self) -> int:
        return len(self.keys)


class PromptCache:
    """What the models made of the prompts of the last call, for the next call on the same prompts.

    Give one to every call of :func:`generate` in a sweep over verifiers, and each batch of prompts is read once instead
    of once a setting. It holds one batch of prompts for each model, on that model's device.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[PreTrainedModel, list[list[int]], SlotCache]] = {}

    def read(
        self, model: PreTrainedModel, sequences: list[list[int]], read: Callable[[list[list[int]]], SlotCache]
    ) -> SlotCache:
        """The cache of ``sequences``, row by row, not to be changed; made by ``read`` where it is not kept."""
        _, known, cache = self._kept.get(id(model), (model, [], None))
        if cache is None or known != sequences:
            cache = read(sequences)
            self._kept[id(model)] = model, sequences, cache
        return cache


def visible(slots: Tensor, extent: int, window: int | None = None) -> Tensor:
    """Which of ``extent`` slots the tokens in ``slots`` [B, T] may look at: boolean [B, 1, T, extent]; causal, within
    ``window``."""
    key = torch.arange(extent, device=slots.device)
    query = slots.unsqueeze(-1)
    allowed = key <= query
    if window is not None:
        allowed &= key > query - window
    return allowed.unsqueeze(1)


def grown(buffer: Tensor | None, like: Tensor, capacity: int, batch: int | None = None) -> Tensor:
    """A buffer of so many slots that holds what ``buffer`` held; for rows like those of ``like`` [B, heads, any, size].

    Zeros, not garbage: a masked slot still enters the product as 0 * value, and NaN * 0 is NaN.
    """
    rows, heads, _, size = like.shape if buffer is None else buffer.shape
    out = like.new_zeros(rows if batch is None else batch, heads, capacity, size)
    if buffer is not None:
        out[:, :, : buffer.shape[2]] = buffer
    return out
