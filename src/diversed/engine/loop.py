"""The draft-verify loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from diversed.engine.decoder import Decoder
from diversed.engine.output import Counts, FinishReason, TimeSplit
from diversed.engine.pair import ModelPair
from diversed.engine.sampling import Sampler
from diversed.engine.stopping import Stopping
from diversed.engine.tracing import Kept, Rule, SeenBlock, see
from diversed.verification import (
    Verified,
    mask_to_support,
    sample,
    verify_block,
    verify_block_greedy,
    verify_block_jointly,
    verify_block_tested,
)
from diversed.verifiers import Verifier
from diversed.verifiers.rivals import accepted_or_target

Bonus = Literal["target", "verifier"]


@dataclass(frozen=True)
class Settings:
    """What a call to :func:`generate` fixes for all its sequences."""

    verifier: Verifier
    num_speculative_tokens: int
    sampler: Sampler
    stopping: Stopping
    bonus: Bonus
    trace: bool


@dataclass
class Generating:
    """One sequence under way."""

    index: int
    ids: list[int]  # prompt and new tokens
    prompt_length: int
    max_new_tokens: int
    generator: torch.Generator
    counts: Counts
    finish_reason: FinishReason | None = None
    seen: list[Kept] = field(default_factory=list)

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - (len(self.ids) - self.prompt_length)


class Stopwatch:
    """Books wall time to the parts of a :class:`TimeSplit`. Waits for devices, or their time would land elsewhere."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.gpus = [d for d in set(devices) if d.type == "cuda"]
        self.split = TimeSplit()
        self.last = time.perf_counter()

    def book(self, part: str) -> None:
        for gpu in self.gpus:
            torch.cuda.synchronize(gpu)
        now = time.perf_counter()
        setattr(self.split, part, getattr(self.split, part) + now - self.last)
        self.last = now


@torch.inference_mode()
def decode_batch(
    pair: ModelPair,
    sequences: list[Generating],
    settings: Settings,
    report: Callable[[Generating, list[int]], None],
) -> TimeSplit:
    """Run sequences together until each has finished. Those that finish leave the batch."""
    n, sampler = settings.num_speculative_tokens, settings.sampler
    target = Decoder(pair.target, len(sequences), pair.vocab_size)
    speculates = n > 0 or settings.bonus == "verifier"
    draft = Decoder(pair.draft, len(sequences), pair.vocab_size) if speculates else None
    watch = Stopwatch([target.device] + ([draft.device] if draft else []))
    for decoder in filter(None, (target, draft)):
        decoder.prefill([s.ids[:-1] for s in sequences])
    watch.book("prefill")

    active = sequences
    while active:
        # A sequence that is about to end drafts less, so that its tokens do not depend on its neighbours.
        num_drafted = [min(n, s.remaining - 1) for s in active]
        u = torch.stack([torch.rand(2 * n + 1, generator=s.generator, dtype=torch.float64) for s in active])
        watch.book("rest")
        block = draft_block(draft, active, max(num_drafted), settings, u) if draft else None
        watch.book("draft")

        last = torch.tensor([[s.ids[-1]] for s in active], device=target.device)
        tokens = last if block is None else torch.cat([last, block.tokens.to(target.device)], 1)
        rows = torch.arange(tokens.shape[1], device=target.device).expand(len(active), -1)
        logits, target_hidden = target.feed(tokens, rows)
        watch.book("target")

        drafted_ids = tokens[:, 1:].tolist() if sampler.history else None
        p, support = sampler(logits, prefixes(active, drafted_ids, settings, target.device))
        check_finite(p, "target", pair.target_name)
        u = u.to(target.device)
        result, seen = verify(p, support, target_hidden, block, num_drafted, settings, u, pair.hidden_sizes[1])
        kept = [[t for t in row if t >= 0] for row in result.tokens.tolist()]
        accepted = result.num_accepted.tolist()
        watch.book("verification")

        for b, sequence in enumerate(active):
            new, reason = settings.stopping.cut(sequence.ids, sequence.prompt_length, kept[b])
            sequence.ids += new
            sequence.finish_reason = reason or ("length" if sequence.remaining <= 0 else None)
            ended_early = len(new) <= accepted[b]
            sequence.counts.add_block(
                drafted=len(new) if ended_early else num_drafted[b],
                accepted=min(accepted[b], len(new)),
                tokens=len(new),
            )
            if seen is not None:
                scored = num_drafted[b] + (settings.bonus == "verifier")
                sequence.seen.append(Kept(seen, b, len(new), accepted[b], num_drafted[b], scored))
            report(sequence, new)
        going = [b for b, s in enumerate(active) if s.finish_reason is None]
        if len(going) < len(active):
            for decoder in filter(None, (target, draft)):
                decoder.cache.keep_rows(torch.tensor(going, dtype=torch.long, device=decoder.device))
            active = [active[b] for b in going]
        # Every token but the last is cached from now on; what a model cached beyond that is rolled back.
        lengths = torch.tensor([len(s.ids) - 1 for s in active])
        target.lengths = lengths.to(target.device)
        if draft is not None:
            draft.lengths = torch.minimum(draft.lengths, lengths.to(draft.device))
        watch.book("rest")
    return watch.split


@dataclass
class DraftBlock:
    """What the draft proposes: K = n positions, or n + 1 where nu also decides the bonus token."""

    tokens: Tensor  #: [B, n]
    probs: Tensor  #: q, [B, K, V], the very distributions the tokens were drawn from
    hidden: Tensor  #: [B, K, H_draft]


def draft_block(draft: Decoder, active: list[Generating], n: int, settings: Settings, u: Tensor) -> DraftBlock:
    """Propose ``n`` tokens a row, each from the draft's own distribution after the request's processors."""
    sampler, device = settings.sampler, draft.device
    u = u.to(device)
    # One or two tokens a row: the draft has not seen its own last proposal when all of them were accepted.
    pending = [s.ids[length:] for s, length in zip(active, draft.lengths.tolist(), strict=True)]
    width = max(map(len, pending))
    feed = torch.tensor([ids + [0] * (width - len(ids)) for ids in pending], device=device)
    counts = torch.tensor([len(ids) for ids in pending], device=device)
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    hidden: list[Tensor] = []
    for i in range(n + (settings.bonus == "verifier")):
        logits, states = draft.feed(feed, (counts - 1).unsqueeze(1))
        draft.lengths = draft.lengths + counts
        so_far = torch.stack(tokens, 1).tolist() if tokens and sampler.history else [[]] * len(active)
        q, _ = sampler(logits, prefixes(active, so_far, settings, device, last_only=True))
        probs.append(q[:, 0])
        hidden.append(states[:, 0])
        if i < n:
            tokens.append(q[:, 0].argmax(-1) if sampler.greedy else sample(q[:, 0], u[:, i]))
            feed, counts = tokens[-1].unsqueeze(1), torch.ones_like(counts)
    if not probs:  # nothing to draft in this block
        empty = torch.zeros(len(active), 0, device=device)
        return DraftBlock(empty.long(), empty.unsqueeze(-1), empty.unsqueeze(-1))
    block = torch.stack(tokens, 1) if tokens else torch.zeros(len(active), 0, dtype=torch.long, device=device)
    return DraftBlock(block, torch.stack(probs, 1), torch.stack(hidden, 1))


def verify(
    p: Tensor,
    support: Tensor | None,
    target_hidden: Tensor,
    block: DraftBlock | None,
    num_drafted: list[int],
    settings: Settings,
    u: Tensor,
    draft_hidden_size: int,
) -> tuple[Verified, SeenBlock | None]:
    """Decide over one drafted block: p [B, n+1, V] from the target against what the draft proposed."""
    batch, positions, _ = p.shape
    n, device = positions - 1, p.device
    count = torch.tensor(num_drafted, device=device)
    last = count.view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    q = draft_hidden = weight = accepts = None
    nu = p[:, :0]
    if block is not None and block.probs.shape[1]:
        q, draft_hidden = block.probs.to(device), block.hidden.to(device)
        check_finite(q, "draft", "the draft model")
        k = q.shape[1]
        known = (p[:, :k], q, target_hidden[:, :k], draft_hidden)
        nu = settings.verifier(*known)
        check_finite(nu, "verifier", type(settings.verifier).__name__)
        if support is not None:
            nu = mask_to_support(nu, p[:, :k], support[:, :k])
        if hasattr(settings.verifier, "accepts"):  # no rejection sampling: a test that drafted tokens pass or fail
            accepts = settings.verifier.accepts(p[:, :k], q)
            accepts = accepts if support is None else accepts & support[:, :k]
            nu = accepted_or_target(accepts, p[:, :k], q, greedy=settings.sampler.greedy)
        if settings.trace and hasattr(settings.verifier, "weight"):
            weight = settings.verifier.weight(*known)
    bonus_from = nu if settings.bonus == "verifier" and q is not None else p
    bonus_probs = bonus_from.gather(1, last).squeeze(1)
    tokens = torch.zeros(batch, 0, dtype=torch.long, device=device) if block is None else block.tokens.to(device)
    if settings.sampler.greedy:
        result = verify_block_greedy(tokens, nu[:, :n], bonus_probs, count)
    elif accepts is not None and n > 0:
        result = verify_block_tested(tokens, accepts[:, :n], p[:, :n], bonus_probs, u[:, -1], count)
    else:
        half = settings.num_speculative_tokens
        q_drawn = p[:, :0] if q is None else q[:, :n]
        decide = verify_block_jointly if getattr(settings.verifier, "joint", False) else verify_block
        result = decide(tokens, q_drawn, nu[:, :n], bonus_probs, u[:, half : half + n], u[:, -1], count)
    if not settings.trace:
        return result, None
    joint = getattr(settings.verifier, "joint", False)
    rule = None if q is None else Rule(p[:, : q.shape[1]], q, nu, accepts, settings.sampler.greedy, joint)
    return result, see(p, q, weight, target_hidden, draft_hidden, result.tokens, draft_hidden_size, rule)


def check_finite(probs: Tensor, role: str, name: str) -> None:
    """NaN anywhere in a row of logits makes the whole softmax NaN, so one entry a row tells."""
    if not bool(torch.isfinite(probs[..., 0]).all()):
        raise FloatingPointError(
            f"{role}: {name} produced NaN (or forbade every token). Check the weights, try another dtype "
            "(float16 overflows in some models) and look at the logits processors."
        )


def prefixes(
    active: list[Generating],
    drafted: list[list[int]] | None,
    settings: Settings,
    device: torch.device,
    last_only: bool = False,
) -> list[list[Tensor | None]] | None:
    """Token ids before each position of the block, for processors that look back; None where nobody asks.

    None also at positions behind a drafted end-of-sequence token: they are never reached, and a grammar that has
    ended may have nothing to say there.
    """
    if drafted is None:
        return None
    return [
        [
            None if settings.stopping.eos & set(tokens[:k]) else torch.tensor(s.ids + tokens[:k], device=device)
            for k in ([len(tokens)] if last_only else range(len(tokens) + 1))
        ]
        for s, tokens in zip(active, drafted, strict=True)
    ]
