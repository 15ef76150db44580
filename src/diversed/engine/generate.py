"""The draft-verify loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from diversed.engine.decoder import Decoder
from diversed.engine.output import Counts, FinishReason, GenerationOutput, Origin, Stats, TimeSplit, Trace
from diversed.engine.pair import ModelPair
from diversed.engine.prompts import Messages, encode_prompts
from diversed.engine.sampling import Sampler
from diversed.engine.stopping import Stopping
from diversed.verification import Verified, mask_to_support, sample, total_variation, verify_block, verify_block_greedy
from diversed.verifiers import Lossless, Verifier

Bonus = Literal["target", "verifier"]
Callback = Callable[[int, list[int]], None]


def generate(
    pair: ModelPair,
    prompts: str | Sequence[str] | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    messages: Messages | None = None,
    verifier: Verifier | None = None,
    num_speculative_tokens: int = 5,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    logits_processor: Sequence[object] = (),
    stop_strings: str | Sequence[str] | None = None,
    stopping_criteria: Sequence[object] = (),
    eos_token_id: int | Sequence[int] | None = None,
    ignore_eos: bool = False,
    seed: int | Sequence[int] | None = None,
    bonus: Bonus = "target",
    batch_size: int | None = None,
    streamer: Any = None,
    callback: Callback | None = None,
    trace: bool = False,
) -> GenerationOutput:
    """Generate with a draft model that proposes, a target that scores and a verifier that decides.

    Args:
        prompts, input_ids (with ``attention_mask`` [B, P]; padding on either side), messages: what to continue; give
            one of them. ``messages`` is one chat or a list of chats, put through the tokenizer's chat template.
        verifier: the verification distribution; lossless where None.
        num_speculative_tokens: N, drafted tokens per target pass. 0 decodes with the target alone.
        temperature: 0 is greedy: a drafted token stays while it equals the argmax of nu.
        top_k, top_p, min_p, repetition_penalty, logits_processor: as in transformers; they shape both models'
            distributions at every position, and what they forbid for the target is never emitted.
        stop_strings: a sequence ends with the token that completes one of them.
        stopping_criteria: further criteria of transformers, asked after every token.
        eos_token_id: ends a sequence; the target's generation config decides where None.
        seed: prompt i draws from a generator of its own, seeded ``seed + i`` (or ``seed[i]``), so that its tokens do
            not depend on what else is in the batch. Not reproducible where None.
        bonus: where the token after an entirely accepted block comes from: the target (the paper), or nu, which makes
            the output follow nu exactly for one more draft step a block.
        batch_size: at most this many sequences at a time; all where None.
        streamer: of transformers, for a single prompt.
        callback: called with a prompt's index and its new token ids after every block.
        trace: keep, for each token, its origin, w, p, q, TV and both hidden states.

    Raises:
        ValueError: an argument out of range, an empty or too long prompt, a head made for another pair.
        FloatingPointError: a model produced NaN.
    """
    if (
        isinstance(num_speculative_tokens, bool)
        or not isinstance(num_speculative_tokens, int)
        or num_speculative_tokens < 0
    ):
        raise ValueError(
            f"num_speculative_tokens={num_speculative_tokens!r} must be a whole number: at least 1, "
            "or 0 for the target alone"
        )
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    if bonus not in ("target", "verifier"):
        raise ValueError(f"bonus={bonus!r} must be 'target' or 'verifier'")
    verifier = Lossless() if verifier is None else verifier
    check_fits(verifier, pair)
    encoded = encode_prompts(pair, prompts, input_ids=input_ids, attention_mask=attention_mask, messages=messages)
    if streamer is not None and len(encoded) > 1:
        raise ValueError(f"streamer takes one prompt at a time and got {len(encoded)}: use callback= for a batch")
    settings = Settings(
        verifier=verifier,
        num_speculative_tokens=num_speculative_tokens,
        sampler=Sampler(temperature, top_k, top_p, min_p, repetition_penalty, logits_processor),
        stopping=Stopping.of(pair, eos_token_id, stop_strings, stopping_criteria, ignore_eos=ignore_eos),
        bonus=bonus,
        trace=trace,
    )
    seeds = spread_seed(seed, len(encoded))
    sequences = [
        Generating(
            index=i,
            ids=list(ids),
            prompt_length=len(ids),
            max_new_tokens=min(max_new_tokens, (pair.context or 1 << 62) - len(ids)),
            generator=torch.Generator().manual_seed(seeds[i]),
            counts=Counts.zero(num_speculative_tokens),
        )
        for i, ids in enumerate(encoded)
    ]
    if streamer is not None:
        streamer.put(torch.tensor([encoded[0]]))

    def report(sequence: Generating, new: list[int]) -> None:
        if streamer is not None:
            streamer.put(torch.tensor([new]))
        if callback is not None:
            callback(sequence.index, new)

    times = TimeSplit()
    step = batch_size or len(sequences)
    for start in range(0, len(sequences), step):
        times += decode_batch(pair, sequences[start : start + step], settings, report)
    if streamer is not None:
        streamer.end()
    stats = Stats.zero(num_speculative_tokens)
    for s in sequences:
        stats.add(s.counts)
    return GenerationOutput(
        token_ids=[s.new_ids for s in sequences],
        texts=[settings.stopping.text(s.new_ids) for s in sequences],
        finish_reasons=[s.finish_reason or "length" for s in sequences],
        stats=Stats(**vars(stats) | {"per_sequence": [s.counts for s in sequences], "time": times}),
        trace=[Trace.join(s.blocks) for s in sequences] if trace else None,
        prompt_ids=encoded,
    )


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
    blocks: list[Trace] = field(default_factory=list)

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - (len(self.ids) - self.prompt_length)


def check_fits(verifier: Verifier, pair: ModelPair) -> None:
    """Ask a verifier that was made for one pair whether this is it."""
    check = getattr(verifier, "check_fits", None)
    if check is not None:
        check(
            target=pair.target_name,
            draft=pair.draft_name,
            hidden_sizes=pair.hidden_sizes,
            vocabulary_hash=pair.vocabulary_hash,
        )


def spread_seed(seed: int | Sequence[int] | None, n: int) -> list[int]:
    if seed is None:
        return [int(s) for s in torch.randint(1 << 62, (n,))]
    if isinstance(seed, int):
        return [seed + i for i in range(n)]
    if len(seed) != n:
        raise ValueError(f"seed has {len(seed)} entries for {n} prompts: give one each, or a single number")
    return list(seed)


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
        result, seen = verify(p, support, target_hidden, block, num_drafted, settings, u.to(target.device))
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
            if settings.trace:
                assert seen is not None
                scored = num_drafted[b] + (settings.bonus == "verifier")
                hidden_size = pair.hidden_sizes[1]
                sequence.blocks.append(trace_block(seen, b, new, accepted[b], num_drafted[b], scored, hidden_size))
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


@dataclass
class Seen:
    """What verification saw in one step, for the trace: the target's n+1 positions and the draft's K."""

    p: Tensor
    q: Tensor | None
    weight: Tensor | None
    target_hidden: Tensor
    draft_hidden: Tensor | None


def verify(
    p: Tensor,
    support: Tensor | None,
    target_hidden: Tensor,
    block: DraftBlock | None,
    num_drafted: list[int],
    settings: Settings,
    u: Tensor,
) -> tuple[Verified, Seen | None]:
    """Decide over one drafted block: p [B, n+1, V] from the target against what the draft proposed."""
    batch, positions, _ = p.shape
    n, device = positions - 1, p.device
    count = torch.tensor(num_drafted, device=device)
    last = count.view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    q = draft_hidden = weight = None
    nu = p[:, :0]
    if block is not None and block.probs.shape[1]:
        q, draft_hidden = block.probs.to(device), block.hidden.to(device)
        check_finite(q, "draft", "the draft model")
        k = q.shape[1]
        seen = (p[:, :k], q, target_hidden[:, :k], draft_hidden)
        nu = settings.verifier(*seen)
        check_finite(nu, "verifier", type(settings.verifier).__name__)
        if support is not None:
            nu = mask_to_support(nu, p[:, :k], support[:, :k])
        if settings.trace and hasattr(settings.verifier, "weight"):
            weight = settings.verifier.weight(*seen)
    bonus_from = nu if settings.bonus == "verifier" and q is not None else p
    bonus_probs = bonus_from.gather(1, last).squeeze(1)
    tokens = torch.zeros(batch, 0, dtype=torch.long, device=device) if block is None else block.tokens.to(device)
    if settings.sampler.greedy:
        result = verify_block_greedy(tokens, nu[:, :n], bonus_probs, count)
    else:
        half = settings.num_speculative_tokens
        q_drawn = p[:, :0] if q is None else q[:, :n]
        result = verify_block(tokens, q_drawn, nu[:, :n], bonus_probs, u[:, half : half + n], u[:, -1], count)
    return result, Seen(p, q, weight, target_hidden, draft_hidden) if settings.trace else None


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
