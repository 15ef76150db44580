"""Strings, chats and tensors to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diversed.engine.pair import ModelPair

Chat = Sequence[Mapping[str, Any]]
Messages = Chat | Sequence[Chat]


def encode_prompts(
    pair: ModelPair,
    prompts: str | Sequence[str] | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    messages: Messages | None = None,
) -> list[list[int]]:
    """Token ids of each prompt, unpadded. Exactly one kind of prompt must be given."""
    given = [
        name for name, v in (("prompts", prompts), ("input_ids", input_ids), ("messages", messages)) if v is not None
    ]
    if len(given) != 1:
        raise ValueError(f"give exactly one of prompts, input_ids and messages (got {' and '.join(given) or 'none'})")
    if input_ids is not None:
        encoded = unpad(input_ids, attention_mask)
    elif messages is not None:
        encoded = [apply_template(pair, chat) for chat in as_chats(messages)]
    else:
        encoded = tokenise(pair, [prompts] if isinstance(prompts, str) else list(prompts or []))
    if not encoded:
        raise ValueError(f"{given[0]} holds no prompt: give at least one")
    for i, ids in enumerate(encoded):
        if not ids:
            raise ValueError(f"{given[0]}[{i}] is empty: it has no tokens to continue")
        if max(ids) >= pair.vocab_size or min(ids) < 0:
            raise ValueError(f"{given[0]}[{i}] has token ids outside the pair's vocabulary of {pair.vocab_size}")
        if pair.context is not None and len(ids) >= pair.context:
            raise ValueError(
                f"{given[0]}[{i}] has {len(ids)} tokens, the pair's context holds {pair.context} and needs room for an "
                "answer: shorten the prompt"
            )
    return encoded


def tokenise(pair: ModelPair, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, however many they are."""
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"prompts[{i}] is a {type(text).__name__}, not a string; token ids go into input_ids=")
        if not text:
            raise ValueError(f"prompts[{i}] is empty: give at least one character")
    return [list(tokenizer_of(pair, "prompts")(text, verbose=False)["input_ids"]) for text in texts]


def tokenizer_of(pair: ModelPair, argument: str) -> Any:
    if pair.tokenizer is None:
        raise ValueError(
            f"{argument} needs a tokenizer and this pair has none: pass input_ids= or ModelPair(..., tokenizer)"
        )
    return pair.tokenizer


def pad(sequences: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Sequences of several lengths as one left-padded [batch, tokens] tensor, and its attention mask."""
    width = max(map(len, sequences))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in sequences])
    return padded, torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in sequences])


def unpad(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Rows of a padded [B, P] tensor without their padding, whichever side it is on."""
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}: it must be [batch, tokens]")
    if attention_mask is None:
        return [list(map(int, row)) for row in input_ids.tolist()]
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}")
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids, attention_mask, strict=True)]


def as_chats(messages: Messages) -> list[Chat]:
    """One chat or many to many."""
    if not messages:
        raise ValueError("messages is empty: give at least one message")
    if isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def apply_template(pair: ModelPair, chat: Chat) -> list[int]:
    tokenizer = tokenizer_of(pair, "messages")
    if not tokenizer.chat_template:
        raise ValueError("messages needs a chat template and this pair's tokenizer has none: use prompts= instead")
    encoded = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])
