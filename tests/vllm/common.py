"""What the tests with an engine share: the embedded pair served by vLLM, and nu enumerated without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from diversed import LearnedEnsemble, ModelPair, StaticEnsemble
from diversed.pairs import DRAFT, HEADS, TARGET

N = 5
# After these words the shop family chooses freely among synonyms: TV(p, q) is large there.
FREE_CHOICE = "Question: Ada has 2 nuts.\nAnswer: First"


def make_llm(**changes: Any) -> Any:
    """The embedded pair in vLLM, float32, draft probabilities on. One engine at a time."""
    vllm = pytest.importorskip("vllm.entrypoints.llm", reason="needs vLLM: make test-vllm")
    speculation = {
        "method": "draft_model",
        "model": str(DRAFT),
        "num_speculative_tokens": N,
        "draft_sample_method": "probabilistic",
    } | changes.pop("speculation", {})
    settings = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 128, "max_model_len": 256, "seed": 0}
    return vllm.LLM(str(TARGET), disable_log_stats=False, speculative_config=speculation, **settings | changes)


def verifier(setting: dict[str, Any] | None) -> Any:
    """The native engine's verifier for a request's setting."""
    if setting is None:
        return StaticEnsemble(1.0)
    if "head" in setting:
        return LearnedEnsemble.from_pretrained(HEADS / setting["head"]).at(quality=setting.get("quality", 0.5))
    return StaticEnsemble(float(setting["verifier"].partition(":")[2]))


@torch.inference_mode()
def distributions(pair: ModelPair, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p [V], q [V] and both hidden states at the position after ``ids``, from transformers, at temperature 1."""
    found = []
    for model in (pair.target, pair.draft):
        hidden = model.model(torch.tensor([list(ids)])).last_hidden_state[0, -1]
        found.append((model.lm_head(hidden).float().softmax(-1), hidden))
    (p, target_hidden), (q, draft_hidden) = found
    return p, q, target_hidden, draft_hidden


def nu_after(pair: ModelPair, ids: Sequence[int], setting: dict[str, Any] | None) -> tuple[Tensor, Tensor]:
    """nu [V] and q [V] at the position after ``ids``."""
    p, q, *hidden = distributions(pair, ids)
    return verifier(setting)(p[None], q[None], *(h[None] for h in hidden))[0], q


def fit(samples: Sequence[int], expected: Tensor) -> float:
    """p-value of a chi-square test of samples against a distribution; rare tokens are pooled."""
    counts = np.bincount(samples, minlength=len(expected)).astype(float)
    wanted = expected.double().numpy() / expected.double().sum().item() * len(samples)
    common = wanted >= 5
    observed = np.append(counts[common], counts[~common].sum())
    model = np.append(wanted[common], wanted[~common].sum())
    if model[-1] < 1e-9:
        return 0.0 if observed[-1] else float(chisquare(observed[:-1], model[:-1]).pvalue)
    return float(chisquare(observed, model).pvalue)


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's own speculative counters."""
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            found[metric.name.partition("spec_decode_")[2]] = getattr(metric, "value", getattr(metric, "values", None))
    return found
