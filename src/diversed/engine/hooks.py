"""Running inside transformers: a callable for ``model.generate(custom_generate=...)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SuppressTokensAtBeginLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from diversed.engine.generate import generate
from diversed.engine.loop import Bonus
from diversed.engine.pair import ModelPair
from diversed.verifiers import Verifier

# Processors that measure a row with its padding, which the engine takes away.
COUNT_PADDING = (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    ExponentialDecayLengthPenalty,
    SuppressTokensAtBeginLogitsProcessor,
)
WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
# Would have to follow the temperature, as those do.
LATE = ("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "TopHLogitsWarper")


def custom_generate(
    draft: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    verifier: Verifier | None = None,
    num_speculative_tokens: int = 5,
    bonus: Bonus = "target",
    stop_strings: str | Sequence[str] | None = None,
    streamer: Any = None,
) -> Callable[..., Any]:
    """Bind a draft and a verifier for ``target.generate(**inputs, custom_generate=custom_generate(draft, ...))``.

    The rest of the request (temperature, top-k, penalties, stopping criteria, lengths) is read from the arguments of
    ``generate`` as usual; ``torch.manual_seed`` makes it reproducible. transformers passes neither
    ``assistant_model`` nor ``tokenizer`` nor ``streamer`` on to a callable, so they are bound here, and with the
    tokenizer the stop strings.
    """

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[object] = (),
        stopping_criteria: Sequence[object] = (),
        generation_config: GenerationConfig | None = None,
        **model_kwargs: Any,
    ) -> Any:
        config = generation_config if generation_config is not None else model.generation_config
        assert config is not None
        if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
            raise ValueError("custom_generate: speculative decoding takes num_beams=1 and num_return_sequences=1")
        attention_mask = model_kwargs.get("attention_mask")
        padded = attention_mask is not None and not bool(attention_mask.all())
        if padded and any(isinstance(p, COUNT_PADDING) for p in logits_processor):
            raise ValueError(
                "custom_generate: min_length, min_new_tokens, forced_eos_token_id, begin_suppress_tokens and "
                "exponential_decay_length_penalty take prompts of one length, without padding"
            )
        sampled = bool(config.do_sample)
        if sampled:
            check_warpers(config, logits_processor)
        out = generate(
            ModelPair(model, draft, tokenizer),
            input_ids=input_ids,
            attention_mask=attention_mask,
            verifier=verifier,
            num_speculative_tokens=num_speculative_tokens,
            max_new_tokens=int(config.max_length or 20) - input_ids.shape[1],
            temperature=(1.0 if config.temperature is None else config.temperature) if sampled else 0.0,
            top_k=config.top_k if sampled else None,
            top_p=config.top_p if sampled else None,
            min_p=config.min_p if sampled else None,
            # transformers has already built these; its warpers are the four settings above.
            logits_processor=[p for p in logits_processor if not isinstance(p, tuple(WARPERS))],
            stop_strings=stop_strings,
            stopping_criteria=[c for c in stopping_criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)],
            eos_token_id=config.eos_token_id,
            ignore_eos=config.eos_token_id is None,
            seed=int(torch.randint(1 << 62, ())),
            bonus=bonus,
            streamer=streamer,
        )
        pad = config.pad_token_id if config.pad_token_id is not None else [*_as_list(config.eos_token_id), 0][0]
        width = max(map(len, out.token_ids))
        new = torch.tensor([ids + [pad] * (width - len(ids)) for ids in out.token_ids], device=input_ids.device)
        sequences = torch.cat([input_ids, new], 1)
        return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences

    return decode


def check_warpers(config: GenerationConfig, logits_processor: Sequence[object]) -> None:
    """Raise ValueError where the engine would sample from another distribution than ``generate`` was asked for."""
    for p in logits_processor:
        if type(p).__name__ in LATE:
            raise ValueError(f"custom_generate: {type(p).__name__} is not supported: use top_k, top_p or min_p")
        for kind, name in WARPERS.items():
            if isinstance(p, kind) and getattr(p, name) != getattr(config, name):
                raise ValueError(
                    f"custom_generate: logits_processor holds a {kind.__name__} of its own: give {name}= to generate"
                )


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
