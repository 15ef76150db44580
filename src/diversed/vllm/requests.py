"""Where requests arrive: read the setting, refuse what the bounds or the server's way of drafting do not allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diversed.vllm.bounds import Bounds
from diversed.vllm.metrics import Requests
from diversed.vllm.phases import find_markers
from diversed.vllm.request import Relaxation, parse_relaxation


def check_request(params: Any, bounds: Bounds, speculation: Any, tokenizer: Any) -> Relaxation | None:
    """A request's relaxation, or None for lossless.

    Args:
        params: vLLM's SamplingParams.
        speculation: the server's speculative configuration, or None.
        tokenizer: the served tokenizer, or None.

    Raises:
        ValueError: the setting is malformed, out of bounds, or cannot work on this server.
    """
    relaxation = parse_relaxation(params.extra_args, bounds)
    asked = any(key == "diversed" or key.startswith("diversed_") for key in params.extra_args or {})
    if relaxation is None or not asked:
        return relaxation if speculation is not None else None
    if speculation is None:
        raise ValueError(
            "diversed: this server does not speculate, so there is nothing to relax. Leave the setting out, or start "
            "the server with --speculative-config"
        )
    if faults := unsupported(speculation):
        raise ValueError(f"diversed: this server cannot relax: {'; '.join(faults)}")
    if relaxation.kind == "synthetic" and params.temperature == 0:
        raise ValueError("diversed: verifier='synthetic' accepts at random: use it with a temperature above 0")
    if relaxation.kind == "head" and speculation.method != "draft_model":
        raise ValueError(
            f"diversed: head={relaxation.name!r} looks at a draft model's hidden states, and this server has no draft "
            f"model (method={speculation.method!r}): use static:W"
        )
    if relaxation.kind in ("fuzzy-tv", "favourite") and speculation.draft_sample_method != "probabilistic":
        raise ValueError(
            f"diversed: verifier={relaxation.kind!r} compares the models' probabilities, and this server's draft has "
            'none: start it with "draft_sample_method": "probabilistic", or use static:W'
        )
    if relaxation.phase != "everywhere" and find_markers(bounds, tokenizer) is None:
        raise ValueError(
            f"diversed: phase={relaxation.phase!r} is refused: this model has no tokens {bounds.think_start!r} and "
            f"{bounds.think_end!r}"
        )
    return relaxation


def unsupported(speculation: Any) -> list[str]:
    """Ways of speculating under which relaxing would be wrong."""
    found = []
    if speculation.rejection_sample_method not in ("standard", "block"):
        found.append(
            f"rejection_sample_method={speculation.rejection_sample_method!r} decides by itself: use 'standard'"
        )
    if getattr(speculation, "enable_adaptive_verification", False):
        found.append("adaptive verification hides each request's rows from the plug-in: turn it off")
    if getattr(speculation, "use_heterogeneous_vocab", False):
        found.append("the draft's vocabulary is not the target's: use a draft of the target's family")
    return found


def wrap_verify(original: Callable[..., None], bounds: Bounds, counts: Requests) -> Callable[..., None]:
    """``SamplingParams.verify`` that also checks the setting; vLLM answers the error with a 400."""
    from vllm.exceptions import VLLMValidationError

    class RefusedSettingError(VLLMValidationError, ValueError):  # type: ignore[misc]
        """A request's setting that the server does not allow."""

    def verify(self: Any, model_config: Any, speculative_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, model_config, speculative_config, *args, **kwargs)
        tokenizer = kwargs.get("tokenizer", args[1] if len(args) > 1 else None)
        try:
            relaxation = check_request(self, bounds, speculative_config, tokenizer)
        except ValueError as error:
            counts.count(None)
            raise RefusedSettingError(str(error)) from None
        counts.count("lossless" if relaxation is None else relaxation.label)

    return verify
