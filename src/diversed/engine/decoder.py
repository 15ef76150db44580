"""One language model with its KV cache: feed tokens, read logits and hidden states at the positions that matter."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from diversed.engine.attention import grouped_attention
from diversed.engine.cache import SlotCache, visible
from diversed.engine.compiled import CompiledStep, capacity_for

PREFILL_CHUNK = 1024  # prompt tokens per forward pass: bounds the memory of masks and activations


class Decoder:
    """A causal LM over a batch of sequences. ``lengths`` (one per row) says how much of each is cached.

    Args:
        step: the model's compiled pass, for one sequence; with it ``capacity``, the most slots a row may need, and
            ``widths``, how many tokens its graphs take.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        vocab_size: int,
        step: CompiledStep | None = None,
        capacity: int | None = None,
        widths: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.device = model.get_input_embeddings().weight.device
        self.cache = SlotCache(batch, self.device, None if capacity is None else capacity_for(capacity))
        self.step, self.widths = step, widths
        self._config = model.config.get_text_config(decoder=True)
        self._cache_keyword = cache_keyword(model)
        self._embeddings = model.get_input_embeddings().weight.shape[0]
        self._context = context_length(model)

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @lengths.setter
    def lengths(self, value: list[int]) -> None:
        """Smaller lengths roll back, larger ones keep what :meth:`feed` just wrote."""
        self.cache.lengths = value

    @torch.inference_mode()
    def prefill(self, sequences: list[list[int]]) -> None:
        """Cache what the cache lacks of each sequence. No logits. A prompt given several times is read once."""
        firsts = [sequences.index(ids) for ids in sequences]
        different = sorted(set(firsts))
        if len(different) < len(sequences) and not any(self.lengths):
            fresh = Decoder(self.model, len(different), self.vocab_size)
            fresh.prefill([sequences[i] for i in different])
            fresh.cache.keep_rows([different.index(i) for i in firsts])
            self.cache = fresh.cache
            return
        nothing = torch.zeros(len(sequences), 0, dtype=torch.long, device=self.device)
        while pending := self._pending(sequences):
            width = max(map(len, pending))
            tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in pending], device=self.device)
            self.feed(tokens, nothing)
            self.lengths = [n + len(ids) for n, ids in zip(self.lengths, pending, strict=True)]

    def _pending(self, sequences: list[list[int]]) -> list[list[int]]:
        pending = [ids[n : n + PREFILL_CHUNK] for ids, n in zip(sequences, self.lengths, strict=True)]
        return pending if any(pending) else []

    @torch.inference_mode()
    def admit(self, rows: list[int], sequences: list[list[int]]) -> None:
        """Give ``rows`` to new sequences: these are cached from the start, whatever the rows held before."""
        fresh = Decoder(self.model, len(rows), self.vocab_size)
        fresh.prefill(sequences)
        self.cache.replace_rows(rows, fresh.cache)

    @torch.inference_mode()
    def feed(self, tokens: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Run tokens [B, T], right-padded, behind each row's cached ones. Leaves ``lengths`` alone.

        Args:
            at: [B, K], which of the T positions to read.

        Returns:
            logits [B, K, V] in float32 and hidden states [B, K, H], those that enter the output layer.
        """
        # A token the draft has no embedding for (a special token of the target alone) is fed as its last one.
        tokens = tokens.clamp(max=self._embeddings - 1)
        width = next((w for w in self.widths if w >= tokens.shape[1]), None)
        if self.step is not None and width is not None and self.cache.keys:
            logits, hidden = self._feed_compiled(self.step, tokens, at, width)
        else:
            logits, hidden = self._feed_eagerly(tokens, at)
        return align_vocabulary(logits, self.vocab_size), hidden

    def _feed_eagerly(self, tokens: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.cache.place(tokens.shape[1])
        seen: list[Tensor] = []

        def select(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = args[0]
            rows = at.to(hidden.device).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
            seen.append(hidden.gather(1, rows))
            return (seen[0], *args[1:])

        hook = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            with grouped_attention(self._config):
                logits = self.model(
                    input_ids=tokens,
                    position_ids=self._positions(slots),
                    attention_mask=attention_masks(self.model, slots, self.cache.extent),
                    use_cache=True,
                    **{self._cache_keyword: self.cache},
                ).logits
        finally:
            hook.remove()
        return logits.float(), seen[0]

    def _feed_compiled(self, step: CompiledStep, tokens: Tensor, at: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Filled up to ``width`` tokens: what the filling writes lies beyond every kept length."""
        slots = self.cache.place(width)
        tokens = torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
        layers = range(len(self.cache.keys))
        keys, values = ([kind[i] for i in layers] for kind in (self.cache.keys, self.cache.values))
        logits, hidden = step(tokens, self._positions(slots), slots, keys, values)
        return logits[:, at[0]], hidden[:, at[0]]

    def warm_up(self) -> None:
        """Compile now what is not compiled yet. Overwrites no kept token."""
        if self.step is None or not self.cache.keys:
            return
        for width in self.widths:
            if (width, self.cache.capacity) not in self.step.graphs:
                tokens = torch.zeros(1, width, dtype=torch.long, device=self.device)
                self.feed(tokens, torch.zeros(1, 1, dtype=torch.long, device=self.device))

    def _positions(self, slots: Tensor) -> Tensor:
        # Padding can stand beyond the context of a model with learned positions: any legal position will do there.
        return slots if self._context is None else slots.clamp(max=self._context - 1)


def attention_masks(model: PreTrainedModel, slots: Tensor, extent: int) -> Tensor | dict[str, Tensor]:
    """The explicit mask of tokens in ``slots`` over ``extent`` slots, one per kind of layer where a model mixes kinds.

    0 where a token may look and the dtype's smallest number elsewhere. SDPA takes booleans as well, but would turn
    them into this once per layer.
    """
    config = model.config.get_text_config(decoder=True)

    def additive(window: int | None) -> Tensor:
        hidden = ~visible(slots, extent, window)
        return torch.zeros_like(hidden, dtype=model.dtype).masked_fill_(hidden, torch.finfo(model.dtype).min)

    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds:
        uses_window = window is not None and getattr(config, "use_sliding_window", True)
        return additive(window if uses_window else None)
    windows = {"full_attention": None, "sliding_attention": window}
    masks = {kind: additive(windows[kind]) for kind in sorted(kinds)}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def align_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Cut padding rows off, or give tokens the model does not know no mass: [..., any] -> [..., size]."""
    if logits.shape[-1] >= size:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)


def context_length(model: PreTrainedModel) -> int | None:
    """The most positions a model takes, or None where its config does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def cache_keyword(model: PreTrainedModel) -> str:
    """transformers 5.24 renamed the argument ``past_key_values`` to ``cache``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def check_supported(model: PreTrainedModel, role: str) -> None:
    """Raise ValueError where the cache of ``model`` cannot be rolled back or masked the way this engine does."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{role}: {name} is an encoder-decoder; use a causal (decoder-only) language model")
    unknown = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if unknown or getattr(model, "_is_stateful", False):
        kinds = ", ".join(sorted(unknown)) or "a recurrent state"
        raise ValueError(
            f"{role}: {name} has layers ({kinds}) whose cache cannot be rolled back after a rejected draft; "
            "use a model with full or sliding-window attention only"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"{role}: attention implementation {config._attn_implementation!r} takes no explicit mask; "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{role}: {name} has no output layer; load it with AutoModelForCausalLM")
