"""What distillation minimises: forward KL and total variation between target and draft, a few positions at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

Head = Callable[[Tensor], Tensor]
Divergences = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

LOGITS_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # of one float32 matrix of logits; autograd holds about eight


def divergences(target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Forward KL(p||q) in nats and TV(p, q) at temperature 1: two [..., V] to two [...], in float32.

    Vocabularies may be padded to different sizes. Tokens that only one model has an entry for are never agreed on:
    they count in full towards TV, and not at all towards KL, where they would be infinite.
    """
    log_p = target_logits.float().log_softmax(-1)
    log_q = draft_logits.float().log_softmax(-1)
    common = min(log_p.shape[-1], log_q.shape[-1])
    log_p, log_q = log_p[..., :common], log_q[..., :common]
    p, q = log_p.exp(), log_q.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    return kl, 1.0 - torch.minimum(p, q).sum(-1)


def chunk_size(vocab_size: int, device: torch.device) -> int:
    """How many positions of logits to hold at once."""
    budget = LOGITS_BYTES.get(device.type, LOGITS_BYTES["cpu"])
    if device.type == "cuda":
        budget = min(budget, torch.cuda.mem_get_info(device)[0] // 16)
    return max(16, budget // (4 * vocab_size))


def backward_in_chunks(
    target_hidden: Tensor,
    draft_hidden: Tensor,
    weights: Tensor,
    target_head: Head,
    draft_head: Head,
    *,
    total_weight: float,
    tv_weight: float,
    chunk: int,
    autocast: Callable[[], torch.autocast],
    measure: Divergences = divergences,
) -> Tensor:
    """Gradients of the weighted mean of KL + ``tv_weight`` TV, without the logits of all positions in memory at once.

    Each chunk goes through both output layers and back to the draft's hidden states; one backward pass through the
    draft's layers follows. The gradients are those of the undivided loss.

    Args:
        target_hidden, draft_hidden: [P, H_target] and [P, H_draft], of the positions that count.
        weights: [P]; ``total_weight`` is their sum, known to the caller without asking the device.
        target_head, draft_head: hidden states to logits.
        chunk: positions at a time.

    Returns:
        [2], the weighted means of KL and TV, on the draft's device and not waited for.
    """
    device = draft_hidden.device
    gradients: list[Tensor] = []
    sums = torch.zeros(2, device=device)
    for start in range(0, len(weights), chunk):
        part = slice(start, start + chunk)
        hidden = draft_hidden[part].detach().requires_grad_()
        with autocast():
            with torch.no_grad():
                target_logits = target_head(target_hidden[part]).to(device)
            kl, tv = measure(target_logits, draft_head(hidden))
        w = weights[part] / total_weight
        loss = (w * (kl + tv_weight * tv if tv_weight else kl)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        gradients.append(hidden.grad)
        sums += torch.stack([(w * kl.detach()).sum(), (w * tv.detach()).sum()])
    draft_hidden.backward(torch.cat(gradients))  # type: ignore[no-untyped-call]
    return sums


def head_of(model: PreTrainedModel) -> Head:
    """From the last hidden states to logits, Gemma's soft cap included."""
    layer = model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = layer(hidden.to(layer.weight.dtype))
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return head


def hidden_states(model: PreTrainedModel, ids: Tensor, *, float32: bool = False) -> Tensor:
    """Last hidden states [B, T, H] of right-padded ids [B, T].

    Under causal attention no token looks at the padding to its right, so there is no padding mask: without one the
    fast attention kernels run. ``float32`` keeps the residual stream in float32 behind embeddings of another dtype.
    """
    embeddings = model.get_input_embeddings()
    device = embeddings.weight.device
    ids = ids.to(device, non_blocking=True)
    # A token this model has no embedding for (a special token of the other one) is fed as its last one.
    embedded = embeddings(ids.clamp(max=embeddings.weight.shape[0] - 1))
    if float32:
        embedded = embedded.float()
    positions = torch.arange(ids.shape[1], device=device).expand(len(ids), -1)
    states: Tensor = model.base_model(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state
    return states


@torch.no_grad()
def check_head(model: PreTrainedModel, role: str) -> None:
    """Raise ValueError where logits are more than an output layer on the last hidden states."""
    ids = torch.arange(4, device=model.get_input_embeddings().weight.device).unsqueeze(0)
    ours = head_of(model)(hidden_states(model, ids)).float()
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    if not torch.allclose(ours, theirs.to(ours.device), rtol=0.05, atol=0.05 * float(theirs.abs().max())):
        raise ValueError(
            f"{role}: {type(model).__name__} scales or changes its logits behind the output layer, which "
            "distillation does not reproduce: use a model whose logits are lm_head(last hidden state)"
        )
