"""Heads must fit the pair that a server serves."""

import pytest
import torch

from diversed.pairs import HEADS
from diversed.vllm.heads import load_heads

FITS = {
    "target": "diversed/embedded-target",
    "draft": "diversed/embedded-draft",
    "hidden_sizes": (384, 128),
    "vocabulary_hash": "250787bc6ab2c417",
    "same_names": True,
    "device": torch.device("cpu"),
}


def test_several_heads():
    heads = load_heads({"a": str(HEADS / "shop"), "b": str(HEADS / "tally")}, **FITS)
    assert list(heads) == ["a", "b"]
    assert not torch.equal(heads["a"].head.out.weight, heads["b"].head.out.weight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_sizes": (384, 256)}, r"hidden sizes \(384, 128\) against \(384, 256\)"),
        ({"vocabulary_hash": "0" * 16}, "vocabularies"),
        ({"target": "some/other-model"}, "DIVERSED_SAME_NAMES=0"),
    ],
)
def test_a_head_of_another_pair_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        load_heads({"shop": str(HEADS / "shop")}, **FITS | change)


def test_names_may_be_waived():
    assert load_heads({"a": str(HEADS / "shop")}, **FITS | {"target": "renamed", "same_names": False})


def test_a_missing_head_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"heads: lost=.* cannot be loaded"):
        load_heads({"lost": str(tmp_path)}, **FITS)
