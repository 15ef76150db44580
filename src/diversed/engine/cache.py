"""A KV cache whose rows grow and shrink independently."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

CHUNK = 64  # slots by which buffers grow, so that most steps allocate nothing


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of every layer in one buffer per layer, [B, heads, capacity, head size].

    A token at position s of its sequence lies in slot s of its row; ``lengths[b]`` slots of row b hold kept tokens.
    What lies beyond is left over from rejected drafts or padding: no query looks past its own slot, and the next
    tokens overwrite it. Rolling back is therefore nothing but a smaller length, exact for every row and for
    sliding-window layers too, whose window is a matter of the mask (:meth:`mask`) and not of storage.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.device = device
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.slots = torch.zeros(batch, 0, dtype=torch.long, device=device)
        self.extent = 0
        self.start: int | None = 0

    def place(self, width: int) -> Tensor:
        """Reserve ``width`` slots after each row's length for the next forward pass; returns them, [B, width]."""
        lengths = self.lengths.tolist()
        self.extent = max(lengths) + width
        # When all rows stand at the same length, a slice replaces the scatter.
        self.start = lengths[0] if lengths.count(lengths[0]) == len(lengths) else None
        self.slots = self.lengths.unsqueeze(1) + torch.arange(width, device=self.device)
        return self.slots

    def mask(self, window: int | None = None) -> Tensor:
        """Which slots each placed token may look at: boolean [B, 1, width, extent]; causal, within ``window``."""
        key = torch.arange(self.extent, device=self.device)
        query = self.slots.unsqueeze(-1)
        allowed = key <= query
        if window is not None:
            allowed &= key > query - window
        return allowed.unsqueeze(1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, width, head size] into the placed slots; returns all slots up to the extent."""
        return self._write(self.keys, layer_idx, key_states), self._write(self.values, layer_idx, value_states)

    def _write(self, buffers: dict[int, Tensor], layer: int, states: Tensor) -> Tensor:
        buffer = buffers.get(layer)
        if buffer is None or buffer.shape[2] < self.extent:
            batch, heads, _, size = states.shape
            capacity = -(-self.extent // CHUNK) * CHUNK + CHUNK
            # Zeros, not garbage: a masked slot still enters the product as 0 * value, and NaN * 0 is NaN.
            grown = states.new_zeros(batch, heads, capacity, size)
            if buffer is not None:
                grown[:, :, : buffer.shape[2]] = buffer
            buffer = buffers[layer] = grown
        if self.start is not None:
            buffer[:, :, self.start : self.extent] = states
        else:
            rows = torch.arange(states.shape[0], device=states.device).unsqueeze(1)
            buffer[rows, :, self.slots.to(states.device)] = states.transpose(1, 2)
        return buffer[:, :, : self.extent]

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row but these, [K] indices."""
        self.lengths = self.lengths[rows]
        for buffers in (self.keys, self.values):
            for layer, buffer in buffers.items():
                buffers[layer] = buffer[rows.to(buffer.device)]

    # What transformers may ask of a cache. Masks and positions are given explicitly, so nothing depends on these.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.extent - self.slots.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.extent, 0

    def __len__(self) -> int:
        return len(self.keys)
