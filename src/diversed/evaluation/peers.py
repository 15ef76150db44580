"""Generation by transformers itself, as users have it today, for the same tables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diversed.engine.output import Counts, FinishReason, GenerationOutput, Stats, TimeSplit
from diversed.engine.pair import ModelPair
from diversed.engine.prompts import encode_prompts
from diversed.engine.stopping import Stopping
from diversed.evaluation.settings import PEER, Setting


@torch.inference_mode()
def generate_by_transformers(
    pair: ModelPair, asked: Mapping[str, Any], setting: Setting, seeds: Sequence[int]
) -> GenerationOutput:
    """``target.generate`` of transformers on each prompt, one at a time (assisted generation knows no batches).

    ``transformers`` decodes with the target alone, ``transformers:assisted`` with the draft as ``assistant_model`` and
    ``num_assistant_tokens`` = N; all else is left as transformers has it, also that it stops drafting early where the
    draft is unsure. Its time is not split, and accepted drafts are not counted: transformers reports neither.

    Args:
        pair: the models.
        asked: prompts or messages, max_new_tokens and stop_strings, as for :func:`diversed.generate`.
        setting: which peer, N and temperature.
        seeds: one for each prompt, given to ``torch.manual_seed``.
    """
    encoded = encode_prompts(pair, asked.get("prompts"), messages=asked.get("messages"))
    stopping = Stopping.of(pair, stop_strings=asked.get("stop_strings"))
    arguments = arguments_of(pair, asked, setting)
    calls = [0]
    counting = pair.target.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    token_ids: list[list[int]] = []
    reasons: list[FinishReason] = []
    counts: list[Counts] = []
    seconds = 0.0
    try:
        for ids, seed in zip(encoded, seeds, strict=True):
            torch.manual_seed(seed)
            calls[0] = 0
            began = time.perf_counter()
            row = torch.tensor([ids], device=pair.target.device)
            out = pair.target.generate(row, attention_mask=torch.ones_like(row), **arguments)
            whole = out[0].tolist()
            seconds += time.perf_counter() - began
            # A block of assisted generation may run on behind a stop string.
            new, reason = stopping.cut(ids, len(ids), whole[len(ids) :])
            token_ids.append(new)
            reasons.append(reason or "length")
            counts.append(Counts([], [], target_calls=calls[0], tokens=len(new)))
    finally:
        counting.remove()
    pooled = Stats.zero(0)
    for c in counts:
        pooled.add(c)
    return GenerationOutput(
        token_ids=token_ids,
        texts=[stopping.text(ids) for ids in token_ids],
        finish_reasons=reasons,
        stats=Stats(**vars(pooled) | {"per_sequence": counts, "time": TimeSplit(rest=seconds)}),
        prompt_ids=encoded,
    )


def arguments_of(pair: ModelPair, asked: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """What ``generate`` of transformers is asked for. Its default of top_k=50 would be another distribution."""
    sampled = setting.temperature > 0
    arguments: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": asked["max_new_tokens"]}
    if sampled:
        arguments |= {"temperature": setting.temperature, "top_k": 0, "top_p": 1.0}
    if asked.get("stop_strings"):
        arguments |= {"stop_strings": asked["stop_strings"], "tokenizer": pair.tokenizer}
    if pair.target.generation_config is not None and pair.target.generation_config.pad_token_id is None:
        eos = sorted(Stopping.of(pair).eos)
        arguments |= {"pad_token_id": eos[0]} if eos else {}
    if setting.verifier != PEER:
        weight = setting.assistant_weight
        arguments |= {"assistant_model": pair.draft}
        arguments |= {} if weight is None else {"assistant_ensemble_weight": weight}
        config = pair.draft.generation_config
        if config is not None:
            config.num_assistant_tokens = setting.num_speculative_tokens
    return arguments
