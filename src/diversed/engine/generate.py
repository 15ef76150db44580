"""The public surface of generation: arguments in, tokens and statistics out. The loop itself is in loop.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from diversed.engine.cache import PromptCache
from diversed.engine.draft_length import MOST
from diversed.engine.loop import Bonus, Generating, Settings, decode
from diversed.engine.output import Counts, GenerationOutput, Stats
from diversed.engine.pair import ModelPair
from diversed.engine.prompts import Messages, encode_prompts
from diversed.engine.sampling import Sampler
from diversed.engine.stopping import Stopping
from diversed.engine.tracing import join
from diversed.verifiers import Lossless, Verifier

Callback = Callable[[int, list[int]], None]


def generate(
    pair: ModelPair,
    prompts: str | Sequence[str] | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    messages: Messages | None = None,
    verifier: Verifier | None = None,
    num_speculative_tokens: int | Literal["auto"] = 5,
    max_new_tokens: int | Sequence[int] = 256,
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
    prompt_cache: PromptCache | None = None,
) -> GenerationOutput:
    """Generate with a draft model that proposes, a target that scores and a verifier that decides.

    Args:
        prompts, input_ids (with ``attention_mask`` [B, P]; padding on either side), messages: what to continue; give
            one of them. ``messages`` is one chat or a list of chats, put through the tokenizer's chat template.
        verifier: the verification distribution; lossless where None.
        num_speculative_tokens: N, drafted tokens per target pass. 0 decodes with the target alone; "auto" chooses
            before every block what has paid best so far with this verifier, 0 where drafting does not pay. Since that
            depends on the clock, a seed does not fix the tokens then.
        max_new_tokens: at most so many new tokens, for all prompts or one number each.
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
        batch_size: at most this many sequences at a time, the others join as these finish; all where None.
        streamer: of transformers, for a single prompt.
        callback: called with a prompt's index and its new token ids after every block.
        trace: keep, for each token, its origin, w, p, q, TV and both hidden states.
        prompt_cache: give the same one to several calls on the same prompts, and only the first reads them; of more
            than ``batch_size`` prompts, those that start.

    Raises:
        ValueError: an argument out of range, an empty or too long prompt, a head made for another pair.
        FloatingPointError: a model produced NaN.
    """
    auto = num_speculative_tokens == "auto"
    if not auto and (
        isinstance(num_speculative_tokens, bool)
        or not isinstance(num_speculative_tokens, int)
        or num_speculative_tokens < 0
    ):
        raise ValueError(
            f"num_speculative_tokens={num_speculative_tokens!r} must be a whole number: at least 1, "
            'or 0 for the target alone, or "auto"'
        )
    limits = list(max_new_tokens) if isinstance(max_new_tokens, Sequence) else [max_new_tokens]
    for name, value in (*(("max_new_tokens", limit) for limit in limits), ("batch_size", batch_size)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    if bonus not in ("target", "verifier"):
        raise ValueError(f"bonus={bonus!r} must be 'target' or 'verifier'")
    verifier = Lossless() if verifier is None else verifier
    if not callable(verifier):
        raise ValueError(
            f"verifier={verifier!r} is no verifier: give one of diversed's, say StaticEnsemble(0.5), or a callable of "
            "yours (names such as 'learned' belong to the command line)"
        )
    check_fits(verifier, pair)
    length = pair.draft_length(verifier, temperature) if auto else None  # known by the caller's own object
    if hasattr(verifier, "to"):  # a learned one has parameters
        verifier = verifier.to(pair.verification_device)
    encoded = encode_prompts(pair, prompts, input_ids=input_ids, attention_mask=attention_mask, messages=messages)
    if streamer is not None and len(encoded) > 1:
        raise ValueError(f"streamer takes one prompt at a time and got {len(encoded)}: use callback= for a batch")
    most = MOST if auto else int(num_speculative_tokens)
    settings = Settings(
        verifier=verifier,
        num_speculative_tokens=most,
        length=length,
        sampler=Sampler(temperature, top_k, top_p, min_p, repetition_penalty, logits_processor),
        stopping=Stopping.of(pair, eos_token_id, stop_strings, stopping_criteria, ignore_eos=ignore_eos),
        bonus=bonus,
        trace=trace,
        prompt_cache=prompt_cache,
    )
    seeds = spread_seed(seed, len(encoded))
    if len(limits) not in (1, len(encoded)):
        raise ValueError(f"max_new_tokens has {len(limits)} entries for {len(encoded)} prompts: give one each, or one")
    limits = limits * len(encoded) if len(limits) == 1 else limits
    sequences = [
        Generating(
            index=i,
            ids=list(ids),
            prompt_length=len(ids),
            max_new_tokens=min(limits[i], (pair.context or 1 << 62) - len(ids)),
            generator=torch.Generator().manual_seed(seeds[i]),
            counts=Counts.zero(most),
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

    times = decode(pair, sequences, batch_size or len(sequences), settings, report)
    if streamer is not None:
        streamer.end()
    stats = Stats.zero(most)
    for s in sequences:
        stats.add(s.counts)
    return GenerationOutput(
        token_ids=[s.new_ids for s in sequences],
        texts=[settings.stopping.text(s.new_ids) for s in sequences],
        finish_reasons=[s.finish_reason or "length" for s in sequences],
        stats=Stats(**vars(stats) | {"per_sequence": [s.counts for s in sequences], "time": times}),
        trace=[join(s.new_ids, s.seen) for s in sequences] if trace else None,
        prompt_ids=encoded,
    )


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
