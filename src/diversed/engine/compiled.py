"""A forward pass as one compiled graph of fixed shapes: for a single sequence, where the time goes into calls.

A pass of a small model over one to six tokens is hundreds of tiny operations, and starting them takes longer than what
they do. torch.compile makes a few kernels of them; on a CPU it also folds the weights into the order that oneDNN
multiplies fastest. Shapes must not change from call to call: buffers have their final size from the start, and a pass
over fewer tokens than the graph takes is filled up.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from transformers import Cache, PreTrainedModel

from diversed.engine.attention import grouped_attention

SMALLEST = 256  # slots; buffers come in powers of two, so that few sizes are ever compiled


def capacity_for(length: int) -> int:
    """The buffer size for sequences of up to so many tokens."""
    return max(SMALLEST, 1 << (length - 1).bit_length())


class Buffers(Cache):  # type: ignore[misc]
    """What :class:`~diversed.engine.cache.SlotCache` holds, as a graph sees it: all slots at once."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], slots: Tensor) -> None:
        super().__init__(layers=[])
        self.keys, self.values, self.slots = keys, values, slots

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        key, value = self.keys[layer_idx], self.values[layer_idx]
        key[:, :, self.slots[0]] = key_states
        value[:, :, self.slots[0]] = value_states
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.keys[0].shape[2], 0

    def __len__(self) -> int:
        return len(self.keys)


class CompiledStep:
    """(tokens [1, T], positions, slots, keys, values) to logits [1, T, V] in float32 and the hidden states [1, T, H]
    that enter the output layer.

    Args:
        masks: gives a model's attention masks for slots and an extent.
        cache_keyword: what the model's ``forward`` calls its cache.
    """

    def __init__(self, model: PreTrainedModel, masks: Callable[..., Any], cache_keyword: str) -> None:
        layer = model.get_output_embeddings()
        self.config = model.config.get_text_config(decoder=True)
        self.on_cpu = layer.weight.device.type == "cpu"
        self.graphs: dict[tuple[int, int], Callable[..., tuple[Tensor, Tensor]]] = {}  # by tokens and slots
        self.running = False
        entering: list[Tensor] = []
        layer.register_forward_pre_hook(lambda _, args: entering.append(args[0]) if self.running else None)

        def step(
            tokens: Tensor, positions: Tensor, slots: Tensor, keys: list[Tensor], values: list[Tensor]
        ) -> tuple[Tensor, Tensor]:
            logits = model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks(model, slots, keys[0].shape[2]),
                use_cache=True,
                **{cache_keyword: Buffers(keys, values, slots)},
            ).logits
            return logits.float(), entering.pop()

        self.step = step

    def __call__(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        shape = (tokens.shape[1], keys[0].shape[2])
        if shape in self.graphs:
            return self.graphs[shape](tokens, positions, slots, keys, values)
        self.graphs[shape] = unguarded(self.step)
        self.running = True  # the compiler follows the hook now; a graph does what it saw
        try:
            # Freezing takes weights for constants and lays them out anew. Its switch counts while a graph is made.
            freezing = torch._inductor.config.patch(freezing=True) if self.on_cpu else contextlib.nullcontext()
            with freezing, grouped_attention(self.config):
                return self.graphs[shape](tokens, positions, slots, keys, values)
        finally:
            self.running = False


def unguarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled for the shapes of its first call, which all later ones must have.

    Checking anew on every call that nothing of a model has changed takes longer than a small model's pass. Compiled
    code hangs on the code object: a copy keeps the graphs of different shapes apart.
    """
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    return torch.compile(copy, dynamic=False, options={"guard_filter_fn": lambda guards: [False] * len(guards)})
