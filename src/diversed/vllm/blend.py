"""From the logits of both models to the logits of nu: what the adapters hand to vLLM's rejection sampler.

With log nu in the place of the target's logits, vLLM's own kernels accept with probability min(1, nu/q) and recover
from norm(max(nu - q, 0)); nothing of the sampler is replaced. Pure tensor functions; the mathematics is
:mod:`diversed.verification` and :mod:`diversed.verifiers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diversed.verification import FORBIDDEN, mask_to_support, verification_distribution
from diversed.verifiers import LearnedEnsemble
from diversed.verifiers.ensemble import log_odds
from diversed.vllm.request import RULES, Relaxation

MAX_ELEMENTS = 2**27  # of one [rows, V] temporary: memory that vLLM's profiling run does not see

Agree = Callable[[Tensor], Tensor]  # makes tensor-parallel ranks share one weight


class Rows(NamedTuple):
    """Drafted positions, R of them, those of one request side by side."""

    target_logits: Tensor  #: [R, V] float32, after the request's processors and temperature
    draft_probs: Tensor | None  #: q [R, V] float32; None where the proposer has none (one-hot q)
    draft_tokens: Tensor  #: [R]; below 0 where vLLM put a placeholder
    target_hidden: Tensor | None  #: [R, H_target], only where a head is asked for
    draft_hidden: Tensor | None  #: [R, H_draft]


@dataclass(frozen=True)
class Group:
    """The rows that one verifier serves, and what it needs per row."""

    kind: str
    name: str  #: the head
    threshold: float  #: of a rule
    index: list[int]  #: which rows
    values: list[float]  #: per row: weight (static), rate (synthetic), log-odds of quality (head)


def group_rows(relaxations: Sequence[Relaxation | None], counts: Sequence[int]) -> list[Group]:
    """Sort drafted rows by verifier.

    Args:
        relaxations: per request of the batch; None stays lossless, and its rows are in no group.
        counts: how many drafted rows each request has.
    """
    groups: dict[tuple[str, str, float], Group] = {}
    start = 0
    for relaxation, count in zip(relaxations, counts, strict=True):
        if relaxation is not None and count:
            threshold = relaxation.value if relaxation.kind in RULES else 0.0
            key = (relaxation.kind, relaxation.name, threshold)
            group = groups.setdefault(key, Group(*key, [], []))
            value = log_odds(relaxation.quality) if relaxation.kind == "head" else relaxation.value
            group.index.extend(range(start, start + count))
            group.values.extend([value] * count)
        start += count
    return list(groups.values())


def relaxed_logits(
    rows: Rows,
    groups: Sequence[Group],
    heads: Mapping[str, LearnedEnsemble],
    strict: Tensor | None = None,
    agree: Agree = lambda weight: weight,
) -> tuple[Tensor, Tensor]:
    """Logits whose softmax is nu, and the ensemble weights.

    Args:
        rows: every drafted row of the batch.
        groups: from :func:`group_rows`.
        heads: name -> learned verifier, on the rows' device.
        strict: boolean [R], rows that stay the target's whatever their group says (the other phase).
        agree: applied to the weights of heads and rules, see :data:`Agree`.

    Returns:
        logits [R, V] in a new tensor. Rows of no group, of weight 1, behind a placeholder, or marked strict are the
        target's to the last bit. Weights [R], 1 there.
    """
    device = rows.target_logits.device
    logits = rows.target_logits.clone()
    weights = torch.ones(len(logits), device=device)
    kept = rows.draft_tokens < 0 if strict is None else strict | (rows.draft_tokens < 0)
    step = max(1, MAX_ELEMENTS // logits.shape[1])
    for group in groups:
        index, values = to_device(group.index, device), to_device(group.values, device)
        for at in range(0, len(index), step):
            i = index[at : at + step]
            part = Rows(*(None if x is None else x.index_select(0, i) for x in rows))  # type: ignore[arg-type]
            nu, weight = _nu(part, group, values[at : at + step].float(), heads, agree)
            weight = torch.where(kept[i], 1.0, weight)
            new = torch.where((weight == 1).unsqueeze(1), part.target_logits, nu.log())
            logits.index_copy_(0, i, new)
            weights.index_copy_(0, i, weight)
    return logits, weights


def _nu(
    rows: Rows, group: Group, values: Tensor, heads: Mapping[str, LearnedEnsemble], agree: Agree
) -> tuple[Tensor, Tensor]:
    """Verification distributions [R, V] and weights [R] of one group's rows."""
    support = rows.target_logits > FORBIDDEN
    p = rows.target_logits.softmax(-1)
    q = rows.draft_probs
    if q is None:
        q = torch.zeros_like(p).scatter_(1, rows.draft_tokens.clamp_min(0).long().unsqueeze(1), 1.0)
    if group.kind == "synthetic":
        # Mass 1 - r on the allowed token that the draft likes least: nothing else has nu > q, so that r + (1 - r) q(y)
        # of the drafts are accepted. Where the target forbids drafts, fewer are.
        least = q.masked_fill(~support, torch.inf).argmin(1, keepdim=True)
        nu = (values.unsqueeze(1) * q).scatter_add_(1, least, 1 - values.unsqueeze(1))
        return mask_to_support(nu, p, support), torch.zeros_like(values)
    if group.kind == "static":
        weight = values
    elif group.kind == "head":
        assert rows.target_hidden is not None
        assert rows.draft_hidden is not None
        odds = heads[group.name].log_odds(p, q, rows.target_hidden, rows.draft_hidden)
        weight = agree(torch.sigmoid(odds + values))
    else:
        # Rules look at the probabilities alone.
        weight = agree(RULES[group.kind](group.threshold).weight(p, q, p, q))
    return mask_to_support(verification_distribution(p, q, weight), p, support), weight


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Python numbers as a tensor on the device. Pinned memory makes the copy asynchronous: no synchronisation."""
    tensor = torch.tensor(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
