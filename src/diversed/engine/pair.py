"""A target and a draft model that speak the same vocabulary."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from diversed.engine.compiled import CompiledModel
from diversed.engine.decoder import Decoder, check_supported, context_length, forward_of
from diversed.engine.draft_length import DraftLength
from diversed.engine.packing import multiplies_bf16, pack_linears, share_embeddings
from diversed.verifiers import Verifier
from diversed.verifiers.learned import vocabulary_hash

# Two tokenizers that agree on every token may still split text differently: they must agree on this as well.
PROBE = "Dr. Müller's café sold 1,234 loaves at 3.50 € — naïve? if x == 10: return [0.5, -2]\n\tEND 東京"


@dataclass
class ModelPair:
    """Target, draft and their tokenizer. The two models may be of different families, dtypes and devices.

    Args:
        target, draft: causal language models of transformers with full or sliding-window attention.
        tokenizer: theirs; may be None where prompts come as ``input_ids``.
        compiled: decode single sequences with torch.compile: the first ones of a new length bracket wait for the
            compiler (seconds to a minute or two; ``stats.time.compile``), the others save what starting hundreds of
            small operations costs. Batches are decoded as without it.
        target_name, draft_name: what heads and results call them; taken from the models' configs where empty.

    Raises:
        ValueError: a model whose cache cannot be rolled back, or vocabularies that do not fit.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    target_name: str = ""
    draft_name: str = ""
    compiled: bool = False

    def __post_init__(self) -> None:
        check_supported(self.target, "target")
        check_supported(self.draft, "draft")
        self.target.eval()
        self.draft.eval()
        self.target_name = self.target_name or self.target.config._name_or_path or type(self.target).__name__
        self.draft_name = self.draft_name or self.draft.config._name_or_path or type(self.draft).__name__
        rows = self.target.get_output_embeddings().out_features
        self._compiled: dict[int, CompiledModel] = {}
        self._draft_lengths: dict[Any, DraftLength] = {}
        # Sizes are often padded for speed; rows beyond the tokenizer were never trained. Added tokens may leave a gap.
        tokenizer = self.tokenizer
        known = rows if tokenizer is None else max(len(tokenizer), max(tokenizer.added_tokens_decoder, default=-1) + 1)
        self.vocab_size = min(rows, known)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path,
        *,
        dtype: torch.dtype | str = "auto",
        device_map: Any = None,
        draft_device_map: Any = None,
        packed: bool = True,
        compiled: bool = False,
        **kwargs: Any,
    ) -> ModelPair:
        """Load both models and check that they share a tokenizer.

        Args:
            target, draft: Hub ids or folders, or GGUF files (``folder/model.gguf`` or ``user/repo/model.gguf``,
                dequantised on loading; needs the extra ``gguf``).
            dtype: of both models; verification always runs in float32.
            device_map: as in transformers (needs accelerate); ``draft_device_map`` where the draft goes elsewhere.
            packed: for inference alone. Embeddings that are equal in both models are kept once; in bf16 on a CPU the
                weights of linear layers are kept in oneDNN's order: the same numbers, a pass over a few tokens up to
                twice as fast. False for models that are to be trained or saved.
            compiled: see the class; its graphs pack weights by themselves.
            kwargs: passed on to ``AutoModelForCausalLM.from_pretrained`` for both.
        """
        tokenizer = load_tokenizer(target, "target")
        check_same_tokenizer(tokenizer, load_tokenizer(draft, "draft"), str(target), str(draft))
        draft_map = device_map if draft_device_map is None else draft_device_map
        pair = cls(
            load_model(target, "target", dtype=dtype, device_map=device_map, **kwargs),
            load_model(draft, "draft", dtype=dtype, device_map=draft_map, **kwargs),
            tokenizer,
            target_name=str(target),
            draft_name=str(draft),
            compiled=compiled,
        )
        if packed:
            share_embeddings(pair.target, pair.draft)
            if not compiled:
                pack_linears(pair.draft, pair.target)  # the draft has left its file when the target needs room
        return pair

    @classmethod
    def embedded(cls, *, dtype: torch.dtype = torch.float32, **how: bool) -> ModelPair:
        """The pair inside the package: two small Llama models that solve word problems. No download. ``packed`` and
        ``compiled`` as for :meth:`from_pretrained`."""
        from diversed.pairs import DRAFT, TARGET

        pair = cls.from_pretrained(TARGET, DRAFT, dtype=dtype, **how)
        pair.target_name, pair.draft_name = "diversed/embedded-target", "diversed/embedded-draft"
        return pair

    @property
    def context(self) -> int | None:
        """Tokens that both models can hold, or None where neither config says."""
        known = [c for c in (context_length(self.target), context_length(self.draft)) if c is not None]
        return min(known, default=None)

    @property
    def hidden_sizes(self) -> tuple[int, int]:
        """Sizes of the hidden states that enter the two output layers: what a head sees."""
        return self.target.get_output_embeddings().in_features, self.draft.get_output_embeddings().in_features

    @property
    def verification_device(self) -> torch.device:
        """Where the target's logits come out."""
        return next(self.target.get_output_embeddings().parameters(), torch.empty(0)).device  # packed ones: the CPU

    def decoder(
        self, model: PreTrainedModel, batch: int, longest: int, widths: Collection[int], drafts: Collection[int] = ()
    ) -> Decoder:
        """One of the two models over a batch whose sequences end with ``longest`` tokens; where it is compiled, with
        graphs for so many tokens at a time."""
        if not self.compiled or batch > 1:
            return Decoder(model, batch, self.vocab_size)
        if id(model) not in self._compiled:
            self._compiled[id(model)] = CompiledModel(model, forward_of(model, self.vocab_size))
        compiled, slots = self._compiled[id(model)], longest + max(*widths, *drafts, 2)
        return Decoder(model, 1, self.vocab_size, compiled, slots, sorted(widths), sorted(drafts))

    def draft_length(self, verifier: Verifier, temperature: float) -> DraftLength:
        """What earlier calls with this verifier have learned about how much to draft."""
        # A head by itself and its quality, for a calibrated one holds tables that cannot be looked up.
        known = (getattr(verifier, "head", verifier), getattr(verifier, "quality", None), temperature)
        try:
            return self._draft_lengths.setdefault(known, DraftLength())
        except TypeError:  # a verifier of somebody else's that has no hash
            return DraftLength()

    @property
    def vocabulary_hash(self) -> str | None:
        """SHA-256 over the sorted vocabulary, 16 hex digits; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return vocabulary_hash(self.tokenizer.get_vocab())

    def describe(self) -> dict[str, str]:
        """What a head's config records of its pair."""
        return {"target": self.target_name, "draft": self.draft_name, "vocabulary_hash": self.vocabulary_hash or ""}


def split_gguf(source: str | Path) -> tuple[str, dict[str, str]]:
    """``folder/model.gguf`` to (folder, {"gguf_file": "model.gguf"}); anything else to (source, {}). ``~`` is home."""
    text = os.path.expanduser(source)
    if text.endswith(".gguf"):
        folder, _, file = text.rpartition("/")
        return folder or ".", {"gguf_file": file}
    return text, {}


def is_path(source: str) -> bool:
    """Whether a name can only be that of a folder: Hub ids have the form ``user/repo``."""
    return source.startswith((os.sep, ".", "~")) or source.endswith(os.sep) or source.count(os.sep) > 1


def load_tokenizer(source: str | Path, role: str) -> PreTrainedTokenizerBase:
    folder, gguf = split_gguf(source)
    with clear_load_error(source, role):
        return AutoTokenizer.from_pretrained(folder, **gguf)


def load_model(source: str | Path, role: str, **kwargs: Any) -> PreTrainedModel:
    folder, gguf = split_gguf(source)
    if gguf and kwargs.get("dtype") == "auto":
        kwargs["dtype"] = torch.float32  # what dequantising gives; "auto" has no answer here
    with clear_load_error(source, role):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **gguf, **kwargs)
    if model.dtype == torch.bfloat16 and not multiplies_bf16(model.device):
        warnings.warn(
            f"{role} {source}: dtype=bfloat16 is slow here, as this processor has no instructions for it: "
            "dtype=float32 is up to ten times faster, for twice the memory",
            stacklevel=3,
        )
    return model


@contextlib.contextmanager
def clear_load_error(source: str | Path, role: str) -> Iterator[None]:
    """Turn the long errors of a failed download or a missing folder into one that names the argument."""
    what_to_give = "Give a folder with a transformers model, a GGUF file, or a Hub id that this machine can reach."
    folder, _ = split_gguf(source)
    if is_path(folder) and not Path(folder).exists():
        raise ValueError(
            f"{role}={str(source)!r} cannot be loaded: the folder {folder!r} does not exist. {what_to_give}"
        )
    try:
        yield
    except (OSError, ImportError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{role}={str(source)!r} cannot be loaded ({reason}). {what_to_give}") from error


def check_same_tokenizer(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_name: str, draft_name: str
) -> None:
    """Raise ValueError unless both map text to the same ids. Either may know extra tokens the other lacks."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    by_id = {i: token for token, i in theirs.items()}
    reason = None
    for token, i in ours.items():
        if theirs.get(token, i) != i or by_id.get(i, token) != token:
            reason = f"id {i} is {token!r} for the target and {by_id.get(i)!r} for the draft"
            break
    if reason is None:
        a, b = (t.encode(PROBE, add_special_tokens=False) for t in (target, draft))
        if a != b:
            reason = "they split the same text differently"
    if reason is not None:
        raise ValueError(
            f"draft={draft_name!r} has another tokenizer than target={target_name!r}: {reason}. "
            "Choose a draft of the target's own family."
        )
