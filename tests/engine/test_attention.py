"""Attention with the heads that share keys folded together equals attention with the keys repeated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from diversed.engine import attention
from diversed.engine.attention import NAME, attend, grouped_attention
from models import tiny


@pytest.mark.parametrize("width", [1, 2, 6])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (6, 1), (9, 3)])
def test_it_equals_sdpa_with_repeated_keys(heads: int, shared: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, width, heads, 8, generator=generator).transpose(1, 2)
    key, value = (torch.randn(3, shared, 24, 8, generator=generator) for _ in range(2))
    allowed = torch.rand(3, 1, width, 24, generator=generator) > 0.4
    allowed[..., 0] = True
    mask = torch.zeros(allowed.shape).masked_fill_(~allowed, torch.finfo(torch.float32).min)
    module = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
    ours, _ = attend(module, query, key, value, mask, scaling=0.3)  # type: ignore[arg-type]
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)  # type: ignore[arg-type]
    assert ours.shape == (3, width, heads, 8)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("extra", ["softcap", "position_bias", "s_aux"])
def test_what_asks_for_more_than_a_mask_is_left_to_transformers(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        attention, "sdpa_attention_forward", lambda *args, **kwargs: asked.append(kwargs) or (None, None)
    )
    states = torch.zeros(1, 2, 1, 4)
    attend(torch.nn.Identity(), states, states, states, torch.zeros(1, 1, 1, 1), **{extra: 30.0})
    assert asked[0][extra] == 30.0


def test_a_model_is_left_as_it_was_found_also_after_an_error() -> None:
    config = tiny("llama").config
    with grouped_attention(config):
        assert config._attn_implementation == NAME
    with pytest.raises(ZeroDivisionError), grouped_attention(config):
        1 / 0  # noqa: B018
    assert config._attn_implementation == "sdpa"
    config._attn_implementation = "eager"
    with grouped_attention(config):
        assert config._attn_implementation == "eager"
