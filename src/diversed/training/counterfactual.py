"""Objective ``counterfactual``: finish the sequence both ways and compare.

At a state that may reject, the sequence can go on with a token of the target's residual, norm(max(p - q, 0)), or of the
draft's, norm(max(q - p, 0)). Both branches are finished under the current policy; the difference of their rewards is
one unbiased label of d(s) (regression.py). States are picked along rollouts in proportion to TV, which is how often
they reject under lossless verification. The first rollouts are lossless, later ones follow the head, so that it meets
the states that its own relaxed tokens lead to.
"""

from __future__ import annotations

import random
from collections import Counter

import torch
from torch import Tensor

from diversed.engine import ModelPair, generate
from diversed.engine.decoder import Decoder
from diversed.engine.prompts import pad
from diversed.engine.stopping import Stopping
from diversed.tasks import Task, judge
from diversed.training.regression import Labels, fit
from diversed.training.rollouts import Draws, complete, seed_of
from diversed.training.settings import TrainSettings
from diversed.training.state import State
from diversed.verification import residual_distribution, sample
from diversed.verifiers import LearnedEnsemble, Lossless, Verifier

FORWARD_TOKENS = 1 << 14  # prefix tokens per bare forward pass


def policy(state: State, settings: TrainSettings) -> Verifier:
    warm = state.step < settings.warm_share * settings.steps
    return Lossless() if warm else LearnedEnsemble(state.head)


def collect(pair: ModelPair, task: Task, state: State, settings: TrainSettings, draws: Draws) -> Labels:
    """Roll out, pick states, finish both branches."""
    verifier, sampling = policy(state, settings), settings.sampling
    out = complete(pair, task, draws, verifier, sampling, bonus="verifier", trace=True)
    assert out.trace is not None
    chosen: list[tuple[int, int]] = []  # (sequence, position)
    mass: list[float] = []
    for b, trace in enumerate(out.trace):
        tv = trace.total_variation.nan_to_num(0.0).tolist()
        reachable = [t for t, x in enumerate(tv) if x > 1e-3]
        if reachable:
            rng, total = random.Random(draws.seeds[b]), sum(tv[t] for t in reachable)
            picks = Counter(rng.choices(reachable, [tv[t] for t in reachable], k=settings.labels_per_rollout))
            for t in sorted(picks):  # a state picked twice is labelled once and counts twice
                chosen.append((b, t))
                mass.append(picks[t] * total / settings.labels_per_rollout)
    if not chosen:
        return Labels.none(state.head)
    prefixes = [out.prompt_ids[b] + out.token_ids[b][:t] for b, t in chosen]
    seeds = [seed_of(draws.seeds[b], t) for b, t in chosen]
    # Not the numbers that the branches go on with: a token that decides its own successor would bias the labels.
    apart = [torch.Generator().manual_seed(seed_of(s, "residual")) for s in seeds]
    u = torch.stack([torch.rand(2, generator=generator, dtype=torch.float64) for generator in apart])
    target_token, draft_token = residual_tokens(pair, prefixes, settings.temperature, u)
    answers = finish(
        pair,
        task,
        verifier,
        settings,
        prefixes=prefixes + prefixes,
        tokens=target_token + draft_token,
        starts=[len(out.prompt_ids[b]) for b, _ in chosen] * 2,
        seeds=seeds * 2,
    )
    rewards = torch.tensor(judge(task.reward, [draws.examples[b] for b, _ in chosen] * 2, answers))
    head = state.head
    traces = out.trace
    rows = [
        head.join_inputs(traces[b].target_hidden[t], traces[b].draft_hidden[t], traces[b].features[t])
        for b, t in chosen
    ]
    m = len(chosen)
    return Labels(
        inputs=torch.stack(rows),
        value=rewards[:m] - rewards[m:],
        mass=torch.tensor(mass),
        group=torch.tensor([b for b, _ in chosen]),
    )


def learn(state: State, batches: list[Labels], settings: TrainSettings, target_reward: float) -> dict[str, float]:
    """Refit the head on all labels so far."""
    return fit(state.head, Labels.join(batches), settings)


@torch.inference_mode()
def residual_tokens(
    pair: ModelPair, prefixes: list[list[int]], temperature: float, u: Tensor
) -> tuple[list[int], list[int]]:
    """For each prefix a token of the target's and one of the draft's residual, at uniform draws u [M, 2]."""
    order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))
    found: dict[int, tuple[int, int]] = {}
    per_pass = max(1, FORWARD_TOKENS // max(map(len, prefixes)))
    for start in range(0, len(order), per_pass):
        part = order[start : start + per_pass]
        probs = []
        for model in (pair.target, pair.draft):
            decoder = Decoder(model, len(part), pair.vocab_size)
            decoder.prefill([prefixes[i][:-1] for i in part])
            last = torch.tensor([[prefixes[i][-1]] for i in part], device=decoder.device)
            logits, _ = decoder.feed(last, torch.zeros_like(last))
            probs.append(torch.softmax(logits[:, 0] / temperature, -1).to(pair.target.device))
        p, q = probs
        draws = u[part].to(p.device)
        ours = sample(residual_distribution(p, q), draws[:, 0]).tolist()
        theirs = sample(residual_distribution(q, p), draws[:, 1]).tolist()
        found |= dict(zip(part, zip(ours, theirs, strict=True), strict=True))
    return [found[i][0] for i in range(len(prefixes))], [found[i][1] for i in range(len(prefixes))]


def finish(
    pair: ModelPair,
    task: Task,
    verifier: Verifier,
    settings: TrainSettings,
    *,
    prefixes: list[list[int]],
    tokens: list[int],
    starts: list[int],
    seeds: list[int],
) -> list[str]:
    """Go on from each prefix and its next token to the end; the whole answers as text, from ``starts`` on."""
    stopping = Stopping.of(pair, stop_strings=task.stop_strings or None)
    whole = [[*prefix, token] for prefix, token in zip(prefixes, tokens, strict=True)]
    context = pair.context or 1 << 62
    room = [
        min(task.max_new_tokens - (len(ids) - start), context - len(ids))
        for ids, start in zip(whole, starts, strict=True)
    ]
    going = [
        i for i, ids in enumerate(whole) if room[i] > 0 and stopping.cut(ids[:-1], starts[i], [ids[-1]])[1] is None
    ]
    # Those with most to write first, so that a batch ends together.
    going.sort(key=lambda i: -room[i])
    if going:
        input_ids, attention_mask = pad([whole[i] for i in going])
        out = generate(
            pair,
            input_ids=input_ids,
            attention_mask=attention_mask,
            verifier=verifier,
            num_speculative_tokens=settings.num_speculative_tokens,
            temperature=settings.temperature,
            batch_size=2 * settings.batch_size,
            max_new_tokens=[room[i] for i in going],
            stop_strings=task.stop_strings or None,
            seed=[seeds[i] for i in going],
        )
        for i, new in zip(going, out.token_ids, strict=True):
            whole[i] = whole[i] + new
    return [stopping.text(ids[start:]) for ids, start in zip(whole, starts, strict=True)]
