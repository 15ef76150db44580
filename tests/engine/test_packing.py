"""Packed linear layers: the same numbers to the last bit, only where they help, nothing else touched."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from diversed import ModelPair, generate
from diversed.engine import packing
from diversed.engine import pair as pair_module
from diversed.engine.packing import PackedLinear, multiplies_bf16, pack_linears, packing_works, share_embeddings
from diversed.engine.pair import load_model
from models import random_prompts, tiny

needs_packing = pytest.mark.skipif(not packing_works(), reason="this torch or processor has no packed bf16 products")


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 48), (1, 6, 48), (8, 6, 48), (3, 0, 48)])
def test_a_packed_layer_gives_the_same_numbers(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias).bfloat16()
    inputs = torch.randn(shape).bfloat16()
    packed = PackedLinear(layer)
    torch.testing.assert_close(packed(inputs), layer(inputs), rtol=2e-2, atol=2e-2)
    assert packed(inputs).shape == (*shape[:-1], 80)
    assert not list(packed.buffers())  # nothing that .to() would move


@needs_packing
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_packed_model_decodes_as_the_plain_one(family: str) -> None:
    plain, packed = (tiny(family).bfloat16() for _ in range(2))
    pack_linears(packed)
    assert sum(isinstance(m, PackedLinear) for m in packed.modules()) == 15  # 7 in each of two layers, and the output
    ids = torch.tensor(random_prompts([30, 30]))
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids).logits, plain(ids).logits, rtol=2e-2, atol=2e-2)
    settings = {"input_ids": ids, "max_new_tokens": 20, "temperature": 0.0}
    pairs = [ModelPair(m, m, target_name="m", draft_name="m") for m in (plain, packed)]
    assert pairs[0].hidden_sizes == pairs[1].hidden_sizes
    assert pairs[0].vocab_size == pairs[1].vocab_size
    first, second = (generate(pair, **settings) for pair in pairs)
    assert first.token_ids == second.token_ids


def test_other_dtypes_and_other_layers_stay_as_they_are() -> None:
    class Special(nn.Linear):
        pass

    model = tiny("llama")
    pack_linears(model)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())
    model.bfloat16()
    model.model.layers[0].mlp.up_proj.__class__ = Special
    pack_linears(model)
    assert isinstance(model.model.layers[0].mlp.up_proj, Special)


def test_where_packing_fails_models_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "packing_works", lambda: False)
    model = tiny("llama").bfloat16()
    pack_linears(model)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


@needs_packing
def test_pairs_that_are_loaded_are_packed_and_pairs_that_are_given_are_not(tmp_path: Path) -> None:
    assert isinstance(ModelPair.embedded(dtype=torch.bfloat16).target.lm_head, PackedLinear)
    assert isinstance(ModelPair.embedded().target.lm_head, nn.Linear)
    model = tiny("llama").bfloat16()
    assert isinstance(ModelPair(model, model).target.lm_head, nn.Linear)


def test_equal_embeddings_are_kept_once_and_others_apart() -> None:
    target, draft = tiny("llama"), tiny("llama", num_hidden_layers=1)
    draft.load_state_dict(target.state_dict(), strict=False)
    draft.lm_head.weight.data[0, 0] += 1
    ids = torch.tensor(random_prompts([12]))
    with torch.inference_mode():
        before = draft(ids).logits
    share_embeddings(target, draft)
    assert draft.model.embed_tokens.weight is target.model.embed_tokens.weight
    assert draft.lm_head.weight is not target.lm_head.weight
    with torch.inference_mode():
        assert torch.equal(draft(ids).logits, before)


@needs_packing
def test_a_weight_that_layers_share_is_packed_once() -> None:
    target, draft = (tiny("llama").bfloat16() for _ in range(2))
    draft.lm_head.weight = target.lm_head.weight
    pack_linears(target, draft)
    assert draft.lm_head.packed is target.lm_head.packed
    assert draft.model.layers[0].mlp.up_proj.packed is not target.model.layers[0].mlp.up_proj.packed


@pytest.mark.parametrize("supported", [True, False])
def test_bf16_on_a_processor_without_it_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    tiny("llama").bfloat16().save_pretrained(tmp_path)
    monkeypatch.setattr(pair_module, "multiplies_bf16", lambda device: supported)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(tmp_path, "draft", dtype="auto")
        load_model(tmp_path, "draft", dtype=torch.float32)
    said = [str(w.message) for w in caught if "bfloat16" in str(w.message)]
    assert len(said) == (not supported)
    assert all("dtype=float32" in text and str(tmp_path) in text for text in said)


def test_every_device_says_whether_it_multiplies_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiplies_bf16(torch.device("cpu")) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert multiplies_bf16(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert not multiplies_bf16(torch.device("cuda"))
