"""Bad input is refused with an error that names the argument; models that cannot work are refused when paired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MambaConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from diversed import LearnedEnsemble, Lossless, ModelPair, StaticEnsemble, generate
from diversed.engine.pair import check_same_tokenizer
from models import character_tokenizer, noisy, random_head, table, tiny

IDS = torch.tensor([[7, 8, 9]])
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    target = tiny(max_position_embeddings=32)
    return ModelPair(target, noisy(target), character_tokenizer())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", "5"),
        ("num_speculative_tokens", 2.0),
        ("num_speculative_tokens", None),
        ("num_speculative_tokens", True),
        ("max_new_tokens", 0),
        ("max_new_tokens", -3),
        ("max_new_tokens", 1.5),
        ("batch_size", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", "0.9"),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", "0.1"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("bonus", "draft"),
        ("verifier", "learned"),
        ("seed", [1, 2]),
        ("stop_strings", ["a", ""]),
        ("attention_mask", torch.ones(1, 4)),
    ],
)
def test_an_argument_out_of_range_is_named(pair: ModelPair, argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=argument):
        generate(pair, **({"input_ids": IDS, "max_new_tokens": 2} | {argument: value}))


@pytest.mark.parametrize("bad", [-0.01, 1.01, float("nan"), "0.5"])
def test_weight_and_quality_outside_their_range_are_named(bad: Any) -> None:
    with pytest.raises(ValueError, match="weight"):
        StaticEnsemble(bad)
    for verifier in (StaticEnsemble(0.5), Lossless(), random_head(32, 32)):
        with pytest.raises(ValueError, match="quality"):
            verifier.at(quality=bad)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"prompts": ""}, r"prompts\[0\] is empty"),
        ({"prompts": ["fine", ""]}, r"prompts\[1\] is empty"),
        ({"prompts": []}, "prompts holds no prompt"),
        ({"prompts": [7, 8]}, r"prompts\[0\] is a int"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"input_ids\[0\] is empty"),
        ({"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}, r"input_ids\[0\] is empty"),
        ({"input_ids": IDS[0]}, "input_ids has shape"),
        ({"input_ids": torch.tensor([[64]])}, r"input_ids\[0\] .* vocabulary"),
        ({"input_ids": torch.tensor([[-1]])}, r"input_ids\[0\] .* vocabulary"),
        ({"messages": []}, "messages is empty"),
        ({"messages": CHAT}, "messages needs a chat template"),
        ({}, "prompts, input_ids and messages"),
        ({"prompts": "a", "input_ids": IDS}, "prompts and input_ids"),
        ({"prompts": "a", "messages": CHAT}, "prompts and messages"),
        ({"input_ids": torch.full((1, 32), 7)}, r"input_ids\[0\] has 32 tokens.*context holds 32"),
        ({"prompts": ["a" * 40]}, r"prompts\[0\] has 40 tokens"),
    ],
)
def test_unusable_prompts_are_named(pair: ModelPair, prompts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(pair, **prompts)


def test_what_needs_a_tokenizer_says_so() -> None:
    target = tiny()
    pair = ModelPair(target, target)
    for argument, request in {
        "prompts": {"prompts": "a"},
        "messages": {"messages": CHAT},
        "stop_strings": {"input_ids": IDS, "stop_strings": "a"},
    }.items():
        with pytest.raises(ValueError, match=f"{argument} needs a tokenizer"):
            generate(pair, **request)


def test_a_streamer_takes_one_prompt(pair: ModelPair) -> None:
    with pytest.raises(ValueError, match="streamer"):
        generate(pair, input_ids=IDS.expand(2, -1), streamer=object())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2, "top_k": 5}])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_nan_logits_stop_with_the_model_named(role: str, settings: dict[str, Any], temperature: float) -> None:
    models = {"target": tiny(), "draft": tiny(seed=1)}
    with torch.no_grad():
        models[role].lm_head.weight[13] = torch.nan
    with pytest.raises(FloatingPointError, match=role):
        generate(ModelPair(**models), input_ids=IDS, temperature=temperature, max_new_tokens=8, seed=0, **settings)


def test_a_head_that_yields_nan_stops_as_well() -> None:
    verifier = random_head(32, 32, spread=float("nan"))
    with pytest.raises(FloatingPointError, match="LearnedEnsemble"):
        generate(ModelPair(tiny(), tiny(seed=1)), input_ids=IDS, verifier=verifier, max_new_tokens=8)


def test_forbidding_every_token_stops() -> None:
    with pytest.raises(FloatingPointError, match="forbade every token"):
        generate(
            ModelPair(tiny(), tiny(seed=1)),
            input_ids=IDS,
            logits_processor=[lambda ids, scores: torch.full_like(scores, -torch.inf)],
        )


def test_a_head_of_another_pair_is_refused_and_both_pairs_are_named(pair: ModelPair) -> None:
    made = {"target": "big/other", "draft": "small/other"}
    wrong_name, wrong_size = random_head(32, 32), random_head(16, 32)
    for verifier in (wrong_name, wrong_size):
        verifier.head.pair.update(made)
        with pytest.raises(ValueError, match="verifier") as error:
            generate(pair, input_ids=IDS, verifier=verifier.at(quality=0.3))
        for name in (*made.values(), pair.target_name, pair.draft_name):
            assert name in str(error.value)
    renamed = LearnedEnsemble(wrong_name.head, same_names=False)
    assert generate(pair, input_ids=IDS, verifier=renamed, max_new_tokens=2).stats.tokens > 0


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_recurrent_model_is_refused(role: str) -> None:
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    models = {"target": tiny(), "draft": tiny(), role: AutoModelForCausalLM.from_config(config)}
    with pytest.raises(ValueError, match=rf"{role}: Mamba.*cannot be rolled back"):
        ModelPair(**models)


def test_models_of_other_kinds_are_refused() -> None:
    llama = tiny()
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match=r"draft: T5.*encoder-decoder"):
        ModelPair(llama, T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match="target: LlamaModel has no output layer"):
        ModelPair(llama.model, llama)
    flash = table([[0.5, 0.5], [0.5, 0.5]])
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="draft: attention implementation 'flash_attention_2'"):
        ModelPair(llama, flash)


def other_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    if kind == "other ids":
        return character_tokenizer(order=reversed)
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = None  # the same vocabulary, but nothing is split
    return tokenizer


@pytest.mark.parametrize(("kind", "reason"), [("other ids", "id .* is"), ("other splits", "split the same text")])
def test_mismatched_tokenizers_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"draft='b'.*target='a'.*{reason}"):
        check_same_tokenizer(character_tokenizer(), other_tokenizer(kind), "a", "b")


def test_a_tokenizer_with_extra_tokens_is_the_same_tokenizer() -> None:
    extra = character_tokenizer()
    extra.add_tokens(["<extra>"])
    check_same_tokenizer(character_tokenizer(), extra, "a", "b")
    check_same_tokenizer(extra, character_tokenizer(), "a", "b")


def test_a_pair_loads_from_folders_and_names_the_one_that_does_not(pair: ModelPair, tmp_path: Path) -> None:
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        model.save_pretrained(tmp_path / role)
        pair.tokenizer.save_pretrained(tmp_path / role)
    loaded = ModelPair.from_pretrained(tmp_path / "target", tmp_path / "draft", dtype=torch.float32)
    request = {"prompts": ["hello", "x"], "seed": 0, "max_new_tokens": 10}
    assert generate(loaded, **request).token_ids == generate(pair, **request).token_ids
    assert loaded.target_name == str(tmp_path / "target")
    assert loaded.vocabulary_hash == pair.vocabulary_hash

    missing = tmp_path / "missing"
    with pytest.raises(ValueError, match=r"target=.*missing.*cannot be loaded"):
        ModelPair.from_pretrained(missing, tmp_path / "draft")
    with pytest.raises(ValueError, match=r"draft=.*missing.*cannot be loaded"):
        ModelPair.from_pretrained(tmp_path / "target", missing)
    character_tokenizer(order=reversed).save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match=r"draft=.*has another tokenizer"):
        ModelPair.from_pretrained(tmp_path / "target", tmp_path / "draft")
