"""Scaled dot-product attention for a few queries over a long cache, without a copy of the cache.

Where several query heads share a key-value head, transformers repeats keys and values for every one of them as soon as
there is a mask and more than one query, that is in every verification pass. Folding the heads that share one into the
rows of one product gives the same numbers and reads the cache once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "diversed_grouped"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query [B, heads, T, size], key and value [B, key-value heads, S, size],
    additive mask [B, 1, T, S] -> [B, T, heads, size]. Models that ask for more than a mask get what they would have
    got from transformers, be it a refusal."""
    if any(kwargs.get(extra) is not None for extra in ("softcap", "position_bias", "s_aux")):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    batch, heads, width, _ = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, heads // groups, groups * width, -1)
        if width > 1:  # a mask of one row fits every row
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, heads, width, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)


@contextlib.contextmanager
def grouped_attention(config: PretrainedConfig) -> Iterator[None]:
    """Let a model that runs on SDPA use :func:`attend` meanwhile; leave one with eager attention as it is."""
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
