"""From what verification saw to the trace of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diversed.engine.output import Origin, Trace
from diversed.verification import total_variation


@dataclass
class Seen:
    """What verification saw in one step, for the trace: the target's n+1 positions and the draft's K."""

    p: Tensor
    q: Tensor | None
    weight: Tensor | None
    target_hidden: Tensor
    draft_hidden: Tensor | None


def trace_block(
    seen: Seen, b: int, tokens: list[int], accepted: int, drafted: int, scored: int, draft_hidden_size: int
) -> Trace:
    """The trace of one row's new tokens; ``scored`` positions of the block are the draft's as well."""
    count = len(tokens)
    known = min(count, scored)
    origin: list[Origin] = ["accepted"] * min(accepted, count)
    if count > accepted:
        origin.append("recovered" if accepted < drafted else "bonus")
    ids = torch.tensor(tokens, device=seen.p.device)
    pick = ids.unsqueeze(-1)

    def extend(values: Tensor | None, *size: int) -> Tensor:
        out = torch.full((count, *size), torch.nan, device=seen.p.device)
        if values is not None and known:
            out[:known] = values[:known].to(out.dtype)
        return out

    q = None if seen.q is None else seen.q[b]
    return Trace(
        token_ids=ids.cpu(),
        origin=origin,
        weight=extend(None if seen.weight is None else seen.weight[b]).cpu(),
        target_prob=seen.p[b, :count].gather(-1, pick).squeeze(-1).cpu(),
        draft_prob=extend(None if q is None else q[:known].gather(-1, pick[:known]).squeeze(-1)).cpu(),
        total_variation=extend(None if q is None else total_variation(seen.p[b, :known], q[:known])).cpu(),
        target_hidden=seen.target_hidden[b, :count].float().cpu(),
        draft_hidden=extend(None if seen.draft_hidden is None else seen.draft_hidden[b], draft_hidden_size).cpu(),
    )
