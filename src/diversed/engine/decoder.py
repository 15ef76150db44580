"""One language model with its KV cache: feed tokens, read logits and hidden states at the positions that matter."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from diversed.engine.attention import NAME as GROUPED
from diversed.engine.attention import grouped_attention
from diversed.engine.cache import PromptCache, SlotCache, visible
from diversed.engine.compiled import CompiledModel, capacity_for

PREFILL_CHUNK = 1024  # prompt tokens per forward pass: bounds the memory of masks and activations
_locks: weakref.WeakKeyDictionary[PreTrainedModel, threading.Lock] = weakref.WeakKeyDictionary()


def lock_of(model: PreTrainedModel) -> threading.Lock:
    """One lock a model, whichever pairs it belongs to."""
    return _locks.setdefault(model, threading.Lock())


class Decoder:
    """A causal LM over a batch of sequences. ``lengths`` (one per row) says how much of each is cached.

    Args:
        compiled: the model's compiled passes, for one sequence; with it ``capacity``, the most slots a row may need,
            ``widths``, how many tokens a graph takes, and ``drafts``, how many it proposes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        vocab_size: int,
        compiled: CompiledModel | None = None,
        capacity: int | None = None,
        widths: Sequence[int] = (),
        drafts: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.device = model.get_input_embeddings().weight.device
        self.cache = SlotCache(batch, self.device, None if capacity is None else capacity_for(capacity))
        self.compiled, self.widths, self.drafts = compiled, widths, drafts
        self.forward = forward_of(model, vocab_size)
        self._config = model.config.get_text_config(decoder=True)

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @lengths.setter
    def lengths(self, value: list[int]) -> None:
        """Smaller lengths roll back, larger ones keep what :meth:`feed` just wrote."""
        self.cache.lengths = value

    @torch.inference_mode()
    def prefill(self, sequences: list[list[int]], kept: PromptCache | None = None) -> None:
        """Cache what the cache lacks of each sequence. No logits. A prompt given several times is read once, and none
        at all where ``kept`` has them."""
        different = [list(ids) for ids in dict.fromkeys(map(tuple, sequences))]
        if not any(self.lengths) and (kept is not None or len(different) < len(sequences)):
            known = self._read(different) if kept is None else kept.read(self.model, different, self._read)
            self.cache.replace_rows(list(range(len(sequences))), known, [different.index(ids) for ids in sequences])
            return
        nothing = torch.zeros(len(sequences), 0, dtype=torch.long, device=self.device)
        while pending := self._pending(sequences):
            width = max(map(len, pending))
            tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in pending], device=self.device)
            self.feed(tokens, nothing)
            self.lengths = [n + len(ids) for n, ids in zip(self.lengths, pending, strict=True)]

    def _read(self, sequences: list[list[int]]) -> SlotCache:
        fresh = Decoder(self.model, len(sequences), self.vocab_size)
        fresh.prefill(sequences)
        return fresh.cache

    def _pending(self, sequences: list[list[int]]) -> list[list[int]]:
        pending = [ids[n : n + PREFILL_CHUNK] for ids, n in zip(sequences, self.lengths, strict=True)]
        return pending if any(pending) else []

    @torch.inference_mode()
    def admit(self, rows: list[int], sequences: list[list[int]]) -> None:
        """Give ``rows`` to new sequences: these are cached from the start, whatever the rows held before."""
        self.cache.replace_rows(rows, self._read(sequences))

    @torch.inference_mode()
    def feed(self, tokens: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Run tokens [B, T], right-padded, behind each row's cached ones. Leaves ``lengths`` alone.

        Args:
            at: [B, K], which of the T positions to read.

        Returns:
            logits [B, K, V] in float32 and hidden states [B, K, H], those that enter the output layer.
        """
        width = next((w for w in self.widths if w >= tokens.shape[1]), None)
        if self.compiled is not None and width is not None and self.cache.keys:
            return self._feed_compiled(self.compiled, tokens, at, width)
        return self._feed_eagerly(tokens, at)

    def _feed_eagerly(self, tokens: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.cache.place(tokens.shape[1])
        seen: list[Tensor] = []

        def select(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = args[0]
            rows = at.to(hidden.device).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
            seen.append(hidden.gather(1, rows))
            return (seen[0], *args[1:])

        # Both change the model for everybody: calls from several threads wait for one another here.
        with lock_of(self.model), grouped_attention(self._config):
            hook = self.model.get_output_embeddings().register_forward_pre_hook(select)
            try:
                logits = self.forward(tokens, slots, self.cache, self.cache.extent)
            finally:
                hook.remove()
        return logits, seen[0]

    def _feed_compiled(self, compiled: CompiledModel, tokens: Tensor, at: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Filled up to ``width`` tokens: what the filling writes lies beyond every kept length."""
        slots = self.cache.place(width)
        tokens = torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
        logits, hidden = compiled.step(tokens, slots, *self.cache.buffers())
        return logits[:, at[0]], hidden[:, at[0]]

    @torch.inference_mode()
    def draft(self, pending: list[int], u: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Compiled: propose as many tokens as there are draws ``u`` [1, n] behind the one or two ``pending`` ones.

        Returns:
            tokens [1, n], the probabilities they were drawn from [1, n, V], hidden states [1, n, H].
        """
        assert self.compiled is not None
        warmth = torch.tensor(temperature, device=self.device) if temperature else None
        parts, n = [], u.shape[1]
        while n:
            at_once = max(size for size in self.drafts if size <= n)
            ids = torch.tensor([[pending[0], pending[-1]]], device=self.device)
            count, start = (torch.tensor([x], device=self.device) for x in (len(pending), self.lengths[0]))
            parts.append(self.compiled.draft(ids, count, start, u[:, :at_once], warmth, *self.cache.buffers()))
            self.lengths = [self.lengths[0] + len(pending) + at_once - 1]
            n, u = n - at_once, u[:, at_once:]
            pending = parts[-1][0][0, -1:].tolist() if n else []
        if len(parts) == 1:
            return parts[0]
        tokens, probs, hidden = (torch.cat(kind, 1) for kind in zip(*parts, strict=True))
        return tokens, probs, hidden

    def warm_up(self, temperature: float) -> None:
        """Compile now what is not compiled yet. Overwrites no kept token."""
        if self.compiled is None or not self.cache.keys:
            return
        before, slots = self.lengths, self.cache.capacity
        for width in self.widths:
            if ("step", width, slots) not in self.compiled.graphs:
                tokens = torch.zeros(1, width, dtype=torch.long, device=self.device)
                self.feed(tokens, torch.zeros(1, 1, dtype=torch.long, device=self.device))
        for n in self.drafts:
            if ("draft", n, slots, not temperature) not in self.compiled.graphs:
                self.draft([0], torch.zeros(1, n, dtype=torch.float64, device=self.device), temperature)
                self.lengths = before


def forward_of(model: PreTrainedModel, vocab_size: int) -> Callable[[Tensor, Tensor, Cache, int], Tensor]:
    """(tokens [B, T], slots [B, T], cache, extent) to logits [B, T, V] in float32; the cache shows ``extent`` slots."""
    embeddings = model.get_input_embeddings().weight.shape[0]
    context, keyword = context_length(model), cache_keyword(model)

    def forward(tokens: Tensor, slots: Tensor, cache: Cache, extent: int) -> Tensor:
        logits = model(
            # A token the draft has no embedding for (a special token of the target alone) is fed as its last one.
            input_ids=tokens.clamp(max=embeddings - 1),
            # Padding can stand beyond the context of a model with learned positions: any legal position will do there.
            position_ids=slots if context is None else slots.clamp(max=context - 1),
            attention_mask=attention_masks(model, slots, extent),
            use_cache=True,
            **{keyword: cache},
        ).logits
        return align_vocabulary(logits.float(), vocab_size)

    return forward


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
    if config._attn_implementation not in ("sdpa", "eager", GROUPED):  # GROUPED: while another thread feeds it
        raise ValueError(
            f"{role}: attention implementation {config._attn_implementation!r} takes no explicit mask; "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{role}: {name} has no output layer; load it with AutoModelForCausalLM")
