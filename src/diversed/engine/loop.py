"""The draft-verify loop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from diversed.engine.cache import PromptCache
from diversed.engine.decoder import Decoder
from diversed.engine.draft_length import DraftLength
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
MOST_PENDING = 8  # tokens that a draft step may take in along the way; a row further behind is prefilled first


@dataclass(frozen=True)
class Settings:
    """What a call to :func:`generate` fixes for all its sequences."""

    verifier: Verifier
    num_speculative_tokens: int
    length: DraftLength | None  #: chooses how many of them to draft; all of them where None
    sampler: Sampler
    stopping: Stopping
    bonus: Bonus
    trace: bool
    prompt_cache: PromptCache | None


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
    """Books time to the parts of a :class:`TimeSplit`.

    A GPU works behind the host's back: its time is taken by events on its own stream, read once a cycle when the host
    has waited for it anyway. With several GPUs the host waits at every part instead.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.gpus = [d for d in set(devices) if d.type == "cuda"]
        self.split = TimeSplit()
        self.lap = TimeSplit()
        self.marks: list[tuple[str, Any]] = []
        self.begin()

    def begin(self) -> None:
        """Start a cycle."""
        self.lap = TimeSplit()
        self.last = time.perf_counter()
        self.marks = [("", self._event())] if len(self.gpus) == 1 else []

    def book(self, part: str) -> None:
        if self.marks:
            self.marks.append((part, self._event()))
            return
        for gpu in self.gpus:
            torch.cuda.synchronize(gpu)
        now = time.perf_counter()
        setattr(self.lap, part, getattr(self.lap, part) + now - self.last)
        self.last = now

    def end(self) -> TimeSplit:
        """End the cycle; what it took."""
        if self.marks:
            torch.cuda.synchronize(self.gpus[0])
            for (_, start), (part, stop) in itertools.pairwise(self.marks):
                setattr(self.lap, part, getattr(self.lap, part) + start.elapsed_time(stop) / 1000)
            # Where the device waited for the host, no part shows it.
            self.lap.rest += max(0.0, time.perf_counter() - self.last - self.lap.total)
        lap = self.lap
        self.split += lap
        self.begin()
        return lap

    def _event(self) -> Any:
        with torch.cuda.device(self.gpus[0]):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        return event


@torch.inference_mode()
def decode(
    pair: ModelPair,
    sequences: list[Generating],
    batch_size: int,
    settings: Settings,
    report: Callable[[Generating, list[int]], None],
) -> TimeSplit:
    """Run sequences together, at most ``batch_size`` at a time. Those that finish make room for those that wait."""
    sampler, most = settings.sampler, settings.num_speculative_tokens
    active, waiting = sequences[:batch_size], sequences[batch_size:][::-1]
    longest = max(s.prompt_length + s.max_new_tokens for s in sequences)
    target = pair.decoder(pair.target, len(active), longest, {1, most + 1})
    speculates = most > 0 or settings.bonus == "verifier"
    draft = None
    if speculates and sampler.plain and settings.bonus == "target":  # compiled, the whole draft is one graph
        at_once = {1} if settings.length is not None else {1, most}
        draft = pair.decoder(pair.draft, len(active), longest, (), at_once)
    elif speculates:
        draft = pair.decoder(pair.draft, len(active), longest, {1, 2})
    watch = Stopwatch([target.device] + ([draft.device] if draft else []))
    names = (pair.target_name, pair.draft_name, type(settings.verifier).__name__)
    prompts = [s.ids[:-1] for s in active]
    target.prefill(prompts, settings.prompt_cache)
    if pair.compiled:
        if draft is not None:
            draft.prefill(prompts, settings.prompt_cache)
        watch.book("prefill")
        for decoder in filter(None, (target, draft)):
            decoder.warm_up(sampler.temperature)
        watch.book("compile")
    while active:
        n = most if settings.length is None else settings.length.choose(max(s.remaining for s in active) - 1)
        # A sequence that is about to end drafts less, so that its tokens do not depend on its neighbours.
        num_drafted = [min(n, s.remaining - 1) for s in active]
        drafts = draft is not None and (max(num_drafted) > 0 or settings.bonus == "verifier")
        if draft is not None and drafts:
            catch_up(draft, active, settings.prompt_cache)
        watch.book("prefill")
        u = torch.stack([torch.rand(2 * most + 1, generator=s.generator, dtype=torch.float64) for s in active])
        watch.book("rest")
        block = draft_block(draft, active, max(num_drafted), settings, u) if draft is not None and drafts else None
        watch.book("draft")

        last = torch.tensor([[s.ids[-1]] for s in active], device=target.device)
        tokens = last if block is None else torch.cat([last, block.tokens.to(target.device)], 1)
        rows = torch.arange(tokens.shape[1], device=target.device).expand(len(active), -1)
        logits, target_hidden = target.feed(tokens, rows)
        watch.book("target")

        drafted_ids = tokens[:, 1:].tolist() if sampler.history else None
        p, support = sampler(logits, prefixes(active, drafted_ids, settings, target.device))
        u = u.to(target.device)
        generated = [len(s.ids) - s.prompt_length for s in active]
        verdict, seen = verify(p, support, target_hidden, block, num_drafted, generated, settings, u, pair)
        accepted, kept = read(verdict, names)  # the host waits for the device here, and nowhere else
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
        # Every token but the last is cached from now on; what a model cached beyond that is rolled back.
        target.lengths = [len(s.ids) - 1 for s in active]
        if draft is not None:
            draft.lengths = [min(n, len(s.ids) - 1) for n, s in zip(draft.lengths, active, strict=True)]
        watch.book("rest")
        active = let_in(active, waiting, target, draft)
        watch.book("prefill")
        lap = watch.end()
        if settings.length is not None:
            examined = sum(min(a + 1, d) for a, d in zip(accepted, num_drafted, strict=True))
            block_seconds = lap.target + lap.verification + lap.rest
            settings.length.learn(max(num_drafted), sum(accepted), examined, lap.draft, block_seconds)
    return watch.split


def let_in(
    active: list[Generating], waiting: list[Generating], target: Decoder, draft: Decoder | None
) -> list[Generating]:
    """Give the rows of finished sequences to those that wait, the next one last; close up rows nobody waits for."""
    free = [b for b, s in enumerate(active) if s.finish_reason is not None]
    rows = free[: len(waiting)]
    if rows:
        new = [waiting.pop() for _ in rows]
        target.admit(rows, [s.ids[:-1] for s in new])
        for row, sequence in zip(rows, new, strict=True):
            active[row] = sequence
            if draft is not None:
                draft.lengths[row] = 0
    if len(rows) < len(free):
        going = [b for b, s in enumerate(active) if s.finish_reason is None]
        for decoder in filter(None, (target, draft)):
            decoder.cache.keep_rows(going)
        active = [active[b] for b in going]
    return active


def catch_up(draft: Decoder, active: list[Generating], prompts: PromptCache | None) -> None:
    """Prefill rows that the draft has never seen, or not for a while."""
    missing = [len(s.ids) - n for n, s in zip(draft.lengths, active, strict=True)]
    most = 2 if draft.drafts else MOST_PENDING
    behind = [b for b, n in enumerate(draft.lengths) if n == 0 or missing[b] > most]
    if len(behind) == len(active):
        fresh = all(len(s.ids) == s.prompt_length for s in active)  # prompts alone are worth keeping
        draft.prefill([s.ids[:-1] for s in active], prompts if fresh else None)
    elif behind:
        draft.admit(behind, [active[b].ids[:-1] for b in behind])


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
    pending = [s.ids[length:] for s, length in zip(active, draft.lengths, strict=True)]
    if draft.drafts and draft.cache.keys:
        return DraftBlock(*draft.draft(pending[0], u[:, :n], sampler.temperature))
    counts = [len(ids) for ids in pending]
    width = max(counts)
    feed = torch.tensor([ids + [0] * (width - len(ids)) for ids in pending], device=device)
    at = torch.tensor(counts, device=device).unsqueeze(1) - 1
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    hidden: list[Tensor] = []
    for i in range(n + (settings.bonus == "verifier")):
        logits, states = draft.feed(feed, at)
        draft.lengths = [length + count for length, count in zip(draft.lengths, counts, strict=True)]
        so_far = torch.stack(tokens, 1).tolist() if tokens and sampler.history else [[]] * len(active)
        q, allowed = sampler(logits, prefixes(active, so_far, settings, device, last_only=True))
        if allowed is not None:
            # Where the request allows only tokens that the draft does not have, it proposes what it would otherwise:
            # the target's support rejects that.
            q = torch.where(allowed.any(-1, keepdim=True), q, logits.softmax(-1))
        probs.append(q[:, 0])
        hidden.append(states[:, 0])
        if i < n:
            tokens.append(q[:, 0].argmax(-1) if sampler.greedy else sample(q[:, 0], u[:, i]))
            feed, counts, at = tokens[-1].unsqueeze(1), [1] * len(active), torch.zeros_like(at)
    if not probs:  # nothing to draft in this block
        empty = torch.zeros(len(active), 0, device=device)
        return DraftBlock(empty.long(), empty.unsqueeze(-1), empty.unsqueeze(-1))
    block = torch.stack(tokens, 1) if tokens else torch.zeros(len(active), 0, dtype=torch.long, device=device)
    return DraftBlock(block, torch.stack(probs, 1), torch.stack(hidden, 1))


class Verdict(NamedTuple):
    """What a block came to, and whether the numbers it rests on were numbers; all on the target's device."""

    result: Verified
    finite: Tensor  #: [3], for target, draft and verifier


def verify(
    p: Tensor,
    support: Tensor | None,
    target_hidden: Tensor,
    block: DraftBlock | None,
    num_drafted: list[int],
    generated: list[int],
    settings: Settings,
    u: Tensor,
    pair: ModelPair,
) -> tuple[Verdict, SeenBlock | None]:
    """Decide over one drafted block: p [B, n+1, V] from the target against what the draft proposed."""
    batch, positions, _ = p.shape
    n, device = positions - 1, p.device
    count = torch.tensor(num_drafted, device=device)
    last = count.view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    q = draft_hidden = weight = accepts = None
    joint = getattr(settings.verifier, "joint", False)
    nu = given = p[:, :0]
    if block is not None and block.probs.shape[1]:
        q, draft_hidden = block.probs.to(device), block.hidden.to(device)
        k = q.shape[1]
        known = (p[:, :k], q, target_hidden[:, :k], draft_hidden)
        verifier = settings.verifier
        if hasattr(verifier, "at_places"):
            places = torch.tensor(generated, device=device).unsqueeze(1) + torch.arange(k, device=device)
            verifier = verifier.at_places(places)
        nu = given = verifier(*known)
        if support is not None:
            nu = mask_to_support(nu, p[:, :k], support[:, :k])
        if hasattr(verifier, "accepts"):  # no rejection sampling: a test that drafted tokens pass or fail
            accepts = verifier.accepts(p[:, :k], q)
            accepts = accepts if support is None else accepts & support[:, :k]
            nu = accepted_or_target(accepts, p[:, :k], q, greedy=settings.sampler.greedy)
        if settings.trace and hasattr(verifier, "weight"):
            weight = verifier.weight(*known)
    finite = torch.stack([all_finite(probs) for probs in (p, p if q is None else q, given)])
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
        decide = verify_block_jointly if joint else verify_block
        result = decide(tokens, q_drawn, nu[:, :n], bonus_probs, u[:, half : half + n], u[:, -1], count)
    verdict = Verdict(result, finite)
    if not settings.trace:
        return verdict, None
    rule = None if q is None else Rule(p[:, : q.shape[1]], q, nu, accepts, settings.sampler.greedy, joint)
    return verdict, see(p, q, weight, target_hidden, draft_hidden, result.tokens, pair.hidden_sizes[1], rule)


def all_finite(probs: Tensor) -> Tensor:
    """NaN anywhere in a row of logits makes the whole softmax NaN, so one entry a row tells."""
    return torch.isfinite(probs[..., 0]).all()


def read(verdict: Verdict, names: tuple[str, str, str]) -> tuple[list[int], list[list[int]]]:
    """Bring a verdict over in one transfer: accepted drafts and kept tokens, row by row."""
    result = verdict.result
    flat = torch.cat([verdict.finite.long(), result.num_accepted, result.tokens.flatten()]).tolist()
    batch = len(result.num_accepted)
    for role, name, finite in zip(("target", "draft", "verifier"), names, flat, strict=False):
        if not finite:
            raise FloatingPointError(
                f"{role}: {name} produced NaN (or forbade every token). Check the weights, try another dtype "
                "(float16 overflows in some models) and look at the logits processors."
            )
    accepted, tokens = flat[3 : 3 + batch], flat[3 + batch :]
    width = result.tokens.shape[1]
    return accepted, [tokens[b * width : b * width + accepted[b] + 1] for b in range(batch)]


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
