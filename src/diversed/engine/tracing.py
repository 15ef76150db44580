"""From what verification saw to the traces of sequences.

A block of the whole batch is reduced on the models' device and brought over once; sequences then keep references to
their rows of it, and the trace of a sequence is put together at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diversed.engine.output import Origin, Trace
from diversed.verification import total_variation
from diversed.verifiers.learned import NUM_FEATURES, closed_form_features


@dataclass
class SeenBlock:
    """What verification saw in one step, on the CPU; NaN where the draft proposed nothing."""

    target_prob: Tensor  #: [B, n + 1]
    draft_prob: Tensor
    weight: Tensor
    total_variation: Tensor
    acceptance: Tensor
    keep: Tensor
    bias: Tensor
    features: Tensor  #: [B, n + 1, 8]
    target_hidden: Tensor  #: [B, n + 1, H_target]
    draft_hidden: Tensor  #: [B, n + 1, H_draft]


def see(
    p: Tensor,
    q: Tensor | None,
    weight: Tensor | None,
    target_hidden: Tensor,
    draft_hidden: Tensor | None,
    tokens: Tensor,
    draft_hidden_size: int,
    rule: Rule | None,
) -> SeenBlock:
    """Reduce one step: p [B, n+1, V] against q [B, K, V], K <= n+1, and the tokens [B, n+1] that came of it."""
    known = 0 if q is None else q.shape[1]
    pick = tokens.clamp_min(0).unsqueeze(-1)
    acceptance, keep, bias = (None, None, None) if rule is None else rule.measure(tokens[:, :known])

    def whole(values: Tensor | None, *size: int) -> Tensor:
        out = torch.full((*tokens.shape, *size), torch.nan, device=p.device)
        if values is not None:
            out[:, :known] = values
        return out.cpu()

    scored = None if q is None else p[:, :known]
    return SeenBlock(
        target_prob=p.gather(-1, pick).squeeze(-1).cpu(),
        draft_prob=whole(None if q is None else q.gather(-1, pick[:, :known]).squeeze(-1)),
        weight=whole(weight),
        total_variation=whole(None if q is None or scored is None else total_variation(scored, q)),
        acceptance=whole(acceptance),
        keep=whole(keep),
        bias=whole(bias),
        features=whole(None if q is None or scored is None else closed_form_features(scored, q), NUM_FEATURES),
        target_hidden=target_hidden.float().cpu(),
        draft_hidden=whole(draft_hidden, draft_hidden_size),
    )


@dataclass
class Rule:
    """How a step was decided: p, q and nu, all [B, K, V], and what else the verdict depended on."""

    p: Tensor
    q: Tensor
    nu: Tensor
    accepts: Tensor | None  #: boolean [B, K, V] of an acceptance test
    greedy: bool
    joint: bool

    def measure(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Acceptance, keep probability of the tokens [B, K] that came out (see :class:`Trace`), and bias; [B, K]."""
        p, q, nu = self.p, self.q, self.nu
        if self.greedy:
            p, q, nu = (torch.zeros_like(x).scatter_(-1, x.argmax(-1, keepdim=True), 1.0) for x in (p, q, nu))
        bias = total_variation(nu, p)
        if self.joint and not self.greedy:
            return None, None, bias
        accepted = torch.minimum(q, nu) if self.accepts is None or self.greedy else q.masked_fill(~self.accepts, 0.0)
        pick = tokens.clamp_min(0).unsqueeze(-1)
        out = nu.gather(-1, pick).clamp_min(torch.finfo(nu.dtype).tiny)
        return accepted.sum(-1), (accepted.gather(-1, pick) / out).squeeze(-1).clamp(max=1.0), bias


@dataclass
class Kept:
    """A sequence's part of a block: ``count`` tokens of row ``row``, of which the draft proposed for ``scored``."""

    block: SeenBlock
    row: int
    count: int
    accepted: int
    drafted: int
    scored: int


def join(token_ids: list[int], pieces: list[Kept]) -> Trace:
    """The trace of a sequence from its parts, in order."""
    origin: list[Origin] = []
    for piece in pieces:
        origin += ["accepted"] * min(piece.accepted, piece.count)
        if piece.count > piece.accepted:
            origin.append("recovered" if piece.accepted < piece.drafted else "bonus")
    # Beyond a row's own drafts a block holds padding.
    known = torch.cat([torch.arange(piece.count) < piece.scored for piece in pieces])

    def gathered(name: str, of_the_draft: bool = True) -> Tensor:
        rows = torch.cat([getattr(piece.block, name)[piece.row, : piece.count] for piece in pieces])
        return rows.masked_fill(~known.view(-1, *[1] * (rows.ndim - 1)), torch.nan) if of_the_draft else rows

    return Trace(
        token_ids=torch.tensor(token_ids),
        origin=origin,
        weight=gathered("weight"),
        target_prob=gathered("target_prob", of_the_draft=False),
        draft_prob=gathered("draft_prob"),
        total_variation=gathered("total_variation"),
        acceptance=gathered("acceptance"),
        keep=gathered("keep"),
        bias=gathered("bias"),
        features=gathered("features"),
        target_hidden=gathered("target_hidden", of_the_draft=False),
        draft_hidden=gathered("draft_hidden"),
    )
