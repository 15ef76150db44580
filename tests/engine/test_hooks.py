"""Inside ``model.generate(custom_generate=...)`` a request means what it means in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    StopStringCriteria,
    TextStreamer,
    TopKLogitsWarper,
)

from diversed import ModelPair, StaticEnsemble, custom_generate, generate
from models import EOS, FAMILIES, character_tokenizer, noisy, pad_left, random_prompts, tiny

PROMPTS = random_prompts([7, 3, 30, 21, 1])


def both(target: PreTrainedModel, inputs: dict[str, Tensor], **settings: Any) -> tuple[Any, Any]:
    """What ``target.generate`` returns with and without a draft."""
    request = {"do_sample": False, "max_new_tokens": 30} | settings
    drafted = custom_generate(noisy(target), num_speculative_tokens=4)
    return target.generate(**inputs, **request, custom_generate=drafted), target.generate(**inputs, **request)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_plain_generate_in_a_left_padded_batch(family: str) -> None:
    """Rows that end early come back padded in the same way."""
    target = tiny(family)
    ours, theirs = both(target, pad_left(PROMPTS), eos_token_id=[EOS, *range(6, 10)])
    assert torch.equal(ours, theirs)
    ours, theirs = both(target, pad_left(PROMPTS[2:3]))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": None, "max_length": 20},
        {"min_new_tokens": 25, "eos_token_id": list(range(6, 40))},
        {"min_length": 30, "eos_token_id": list(range(6, 40))},
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[38], [47, 47]]},
        {"eos_token_id": [40, 9], "pad_token_id": None},
        {"suppress_tokens": list(range(30, 50))},
        {"forced_eos_token_id": 9},
    ],
)
def test_greedy_requests_mean_what_they_mean_in_transformers(settings: dict[str, Any]) -> None:
    target = tiny()
    if "pad_token_id" in settings:
        target.generation_config.pad_token_id = None
    inputs = pad_left(random_prompts([9, 9]))
    ours, theirs = both(target, inputs, **settings)
    assert torch.equal(ours, theirs)


def test_what_measures_a_row_is_refused_where_padding_would_count() -> None:
    for settings in (
        {"min_new_tokens": 5},
        {"forced_eos_token_id": 5},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"begin_suppress_tokens": [7]},
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            both(tiny(), pad_left(PROMPTS), **settings)


def test_sampling_is_the_same_request_and_reproducible() -> None:
    """Temperature, top-k and top-p arrive; torch's seed decides."""
    target = tiny(scale=5.0)
    draft = noisy(target, 0.2)
    drafted = custom_generate(draft, verifier=StaticEnsemble(0.4), num_speculative_tokens=3, bonus="verifier")
    request = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "max_new_tokens": 20}

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return target.generate(**pad_left(PROMPTS), **request, custom_generate=drafted)

    first = draw(0)
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))
    torch.manual_seed(0)
    direct = generate(
        ModelPair(target, draft),
        **pad_left(PROMPTS),
        verifier=StaticEnsemble(0.4),
        num_speculative_tokens=3,
        bonus="verifier",
        seed=int(torch.randint(1 << 62, ())),
        **{name: request[name] for name in ("temperature", "top_k", "top_p", "max_new_tokens")},
    )
    for row, ids in zip(first.tolist(), direct.token_ids, strict=True):
        assert row[30 : 30 + len(ids)] == ids
        assert set(row[30 + len(ids) :]) <= {0}


def test_stop_strings_end_the_sequence() -> None:
    """Bound, since transformers does not pass its tokenizer on; or as a criterion, which is read as usual."""
    target = tiny(eos_token_id=None)
    tokenizer = character_tokenizer()
    inputs = pad_left(random_prompts([9], seed=5))
    request = {"do_sample": False, "max_new_tokens": 16}
    text = tokenizer.decode(target.generate(**inputs, **request)[0, 9:])
    for start in range(0, 12, 3):
        stop = text[start : start + 3]
        expected = target.generate(**inputs, **request, stop_strings=stop, tokenizer=tokenizer)
        bound = custom_generate(noisy(target), tokenizer=tokenizer, stop_strings=stop)
        assert torch.equal(target.generate(**inputs, **request, custom_generate=bound), expected)
        criterion = StopStringCriteria(tokenizer, [stop])
        read = target.generate(
            **inputs, **request, stopping_criteria=[criterion], custom_generate=custom_generate(noisy(target))
        )
        assert torch.equal(read, expected)
        assert expected.shape[1] < 25


def test_a_streamer_prints_the_new_text(capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny(eos_token_id=None)
    tokenizer = character_tokenizer()
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    drafted = custom_generate(noisy(target), streamer=streamer)
    out = target.generate(**pad_left(random_prompts([9])), do_sample=False, max_new_tokens=16, custom_generate=drafted)
    assert capsys.readouterr().out == tokenizer.decode(out[0, 9:], skip_special_tokens=True) + "\n"


def test_a_dictionary_is_returned_on_request_and_beams_are_refused() -> None:
    target = tiny()
    ours, theirs = both(target, pad_left(PROMPTS), return_dict_in_generate=True)
    assert torch.equal(ours.sequences, theirs.sequences)
    with pytest.raises(ValueError, match="num_beams"):
        both(target, pad_left(PROMPTS), num_beams=2)
    with pytest.raises(ValueError, match="num_return_sequences"):
        both(target, pad_left(PROMPTS), do_sample=True, num_return_sequences=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"typical_p": 0.5}, "TypicalLogitsWarper is not supported"),
        ({"epsilon_cutoff": 0.01}, "EpsilonLogitsWarper is not supported"),
        ({"logits_processor": LogitsProcessorList([TopKLogitsWarper(5)])}, "holds a TopKLogitsWarper of its own"),
    ],
)
def test_warpers_the_engine_would_drop_or_misplace_are_refused(settings: dict[str, Any], message: str) -> None:
    inputs = pad_left(random_prompts([9]))
    with pytest.raises(ValueError, match=message):
        both(tiny(), inputs, do_sample=True, top_k=50, **settings)
