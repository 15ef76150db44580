"""How a pair's weights are kept for inference: equal embeddings once, and bf16 products in oneDNN's order.

A plain bf16 matrix product of a few rows reorders its weight on every call. Reordering once makes the pass over one
to eight tokens, all that speculative decoding ever does, about twice as fast (docs/speed.md).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class PackedLinear(nn.Module):
    """A linear layer for inference alone: the plain weight is gone, so that memory does not grow."""

    def __init__(self, linear: nn.Linear, packed: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Opaque to everything but the product below: no parameter, so that nobody casts, moves or saves it.
        self.packed = pack(linear.weight.detach()) if packed is None else packed

    def forward(self, inputs: Tensor) -> Tensor:
        return multiply(inputs, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)  # type: ignore[no-any-return]


def multiply(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")  # type: ignore[no-any-return]


@functools.cache
def packing_works() -> bool:
    """Whether this torch on this processor packs and multiplies as expected: the operators are not documented ones."""
    weight, inputs = torch.eye(32, dtype=torch.bfloat16), torch.arange(64.0, dtype=torch.bfloat16).view(1, 2, 32)
    try:
        return torch.equal(multiply(inputs, pack(weight), None), inputs)
    except (AttributeError, RuntimeError):
        return False


def multiplies_bf16(device: torch.device) -> bool:
    """Whether products in bf16 pay on this device. A processor without the instructions converts every operand."""
    if device.type == "cpu":
        supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # not a documented operator
        return supported is None or bool(supported())
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def pack_linears(*models: PreTrainedModel) -> None:
    """Replace the plain linear layers of bf16 models on the CPU, in place; a weight that several layers share is packed
    once. Leaves any other model as it is."""
    if not packing_works():
        return
    packed: dict[nn.Parameter, Tensor] = {}
    copied: set[nn.Parameter] = set()
    for model in models:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                plain = type(child) is nn.Linear  # a subclass may do more than multiply
                if plain and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
                    layer = PackedLinear(child, packed.get(child.weight)).train(child.training)
                    packed[child.weight] = layer.packed
                    setattr(module, name, layer)
        # What was not packed leaves the mapped file, which would stay in memory whole for a few norms' sake.
        for parameter in set(model.parameters()) - copied if packed else ():
            parameter.data = parameter.data.clone()
            copied.add(parameter)


def share_embeddings(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Let the draft use the target's input and output embeddings where its own hold the same numbers.

    Drafts cut out of their target are so made, and over large vocabularies these matrices are most of a small model.
    """
    for ours, theirs in (
        (target.get_input_embeddings(), draft.get_input_embeddings()),
        (target.get_output_embeddings(), draft.get_output_embeddings()),
    ):
        a, b = ours.weight, theirs.weight
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.device.type != "meta"
        if alike and torch.equal(a, b):
            theirs.weight = a
