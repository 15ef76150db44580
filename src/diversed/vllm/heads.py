"""Load the heads that a server's bounds name, and refuse those that do not fit the pair it serves."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diversed.verifiers import LearnedEnsemble


def load_heads(
    sources: Mapping[str, str],
    *,
    target: str,
    draft: str,
    hidden_sizes: tuple[int, int],
    vocabulary_hash: str | None,
    same_names: bool,
    device: torch.device,
) -> dict[str, LearnedEnsemble]:
    """Heads by name, on ``device``.

    Args:
        sources: name -> folder or Hub id.
        target, draft: names of the served models, compared with those in the head unless ``same_names`` is False.
        hidden_sizes: of the last hidden states of target and draft.
        vocabulary_hash: of the served tokenizer; None skips the comparison.

    Raises:
        ValueError: a head that cannot be loaded, or was made for another pair; the head is named.
    """
    heads = {}
    for name, source in sources.items():
        try:
            verifier = LearnedEnsemble.from_pretrained(source, same_names=same_names)
        except Exception as error:  # huggingface_hub and safetensors raise a dozen kinds
            raise ValueError(
                f"heads: {name}={source!r} cannot be loaded ({str(error).splitlines()[0]}). Give a folder or Hub id "
                "that holds a head's config.json and model.safetensors"
            ) from error
        try:
            verifier.check_fits(target=target, draft=draft, hidden_sizes=hidden_sizes, vocabulary_hash=vocabulary_hash)
        except ValueError as error:
            hint = " On a server that is DIVERSED_SAME_NAMES=0" if "names" in str(error) else ""
            raise ValueError(f"heads: {name}={source!r} does not fit: {error}{hint}") from error
        heads[name] = verifier.to(device)
    return heads
