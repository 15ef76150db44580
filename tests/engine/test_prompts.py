"""Strings, chats and tensors come to the same token ids, and texts come back without special tokens."""

from __future__ import annotations

import pytest
import torch

from diversed import ModelPair, generate
from models import EOS, character_tokenizer, noisy, pad_left, tiny

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    target = tiny()
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return ModelPair(target, noisy(target), tokenizer)


def test_strings_and_token_ids_are_the_same_request(pair: ModelPair) -> None:
    texts = ["hello", "a", "what is 1 2 3"]
    request = {"seed": 3, "max_new_tokens": 12}
    encoded = [pair.tokenizer(text)["input_ids"] for text in texts]
    out = generate(pair, texts, **request)
    assert out.prompt_ids == encoded
    assert out.token_ids == generate(pair, **pad_left(encoded), **request).token_ids
    assert generate(pair, "hello", **request).token_ids == out.token_ids[:1]


def test_padding_is_ignored_on_either_side(pair: ModelPair) -> None:
    """Whatever ids the padding has."""
    rows = [[7, 8, 9], [10]]
    right = {
        "input_ids": torch.tensor([[7, 8, 9], [10, 33, 34]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    }
    expected = generate(pair, **pad_left(rows), seed=0, max_new_tokens=12)
    assert generate(pair, **right, seed=0, max_new_tokens=12).token_ids == expected.token_ids
    assert expected.prompt_ids == rows


def test_chats_go_through_the_template(pair: ModelPair) -> None:
    chats = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
    ]
    request = {"seed": 0, "max_new_tokens": 8}
    out = generate(pair, messages=chats, **request)
    assert out.token_ids == generate(pair, ["u:hi;a:", "s:x;u:y;a:"], **request).token_ids
    assert generate(pair, messages=chats[0], **request).token_ids == out.token_ids[:1]


def test_texts_are_the_new_tokens_without_special_ones(pair: ModelPair) -> None:
    out = generate(pair, ["hello"] * 20, seed=0, max_new_tokens=30)
    for ids, text in zip(out.token_ids, out.texts, strict=True):
        assert text == "".join(pair.tokenizer.convert_ids_to_tokens([i for i in ids if i > EOS]))
    assert any(ids[-1] == EOS for ids in out.token_ids)
