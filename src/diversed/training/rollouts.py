"""Sampled completions with all that training a head needs of them.

A head's gradient needs no second pass through a language model. With the weight w the only unknown,

    log nu(y) = log(w p(y) + (1 - w) q(y))        acceptance = 1 - w TV(p, q)

so a rollout keeps, for every token, the head's input, p(y), q(y) and TV(p, q). Rollouts are drawn from nu exactly
(``bonus="verifier"``), or log nu would not be the log-probability of what was drawn.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from diversed.engine import GenerationOutput, ModelPair, generate
from diversed.tasks import Example, Task, judge, request
from diversed.verifiers import EnsembleHead, Verifier


@dataclass(frozen=True)
class Sampling:
    """How rollouts are drawn; what a run fixes for all of them."""

    num_speculative_tokens: int = 5
    temperature: float = 1.0
    batch_size: int = 64


class OnDisk:
    """A dataclass of tensors, as a safetensors file."""

    def save(self, path: Path) -> None:
        save_file({name: value.contiguous() for name, value in vars(self).items()}, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**load_file(path))


@dataclass
class Rollouts(OnDisk):
    """S sequences with T tokens in all, one after the other. Everything on the CPU in float32."""

    inputs: Tensor  #: head inputs, [T, size]
    target_prob: Tensor  #: p of the token, [T]
    draft_prob: Tensor  #: q of the token, [T]
    total_variation: Tensor  #: TV(p, q) at the position, [T]
    weight: Tensor  #: w that the token was drawn under, [T]
    returns: Tensor  #: what the token and those after it earned, [T] (:func:`returns_of`)
    length: Tensor  #: tokens of each sequence, [S]
    prompt: Tensor  #: which prompt each sequence answers, [S]
    reward: Tensor  #: [S]

    @property
    def sequence(self) -> Tensor:
        """Which sequence each token belongs to, [T]."""
        return torch.repeat_interleave(torch.arange(len(self.length)), self.length)

    @property
    def mean_return(self) -> Tensor:
        """Of each sequence's tokens, [S]."""
        total = torch.zeros(len(self.length)).index_add_(0, self.sequence, self.returns)
        return total / self.length.clamp_min(1)

    @property
    def log_nu(self) -> Tensor:
        """Log-probability of each token under what it was drawn from, [T]."""
        return log_nu(self.weight, self.target_prob, self.draft_prob)

    @property
    def acceptance(self) -> float:
        """Mean of 1 - w TV over positions."""
        return float((1 - self.weight * self.total_variation).mean())

    @classmethod
    def join(cls, parts: Sequence[Rollouts]) -> Rollouts:
        return cls(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)})


def log_nu(weight: Tensor, target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """log(w p(y) + (1 - w) q(y)), elementwise; finite wherever the token could be drawn at all."""
    blend = torch.lerp(draft_prob, target_prob, weight)
    return blend.clamp_min(torch.finfo(blend.dtype).tiny).log()


def others_mean(reward: Tensor, prompt: Tensor) -> Tensor:
    """The mean reward of the other answers to the same prompt; 0 where there is none. [S]"""
    _, which = torch.unique(prompt, return_inverse=True)
    count = torch.bincount(which).float()
    total = torch.zeros(len(count)).index_add_(0, which, reward)
    others = count[which] - 1
    return torch.where(others > 0, (total[which] - reward) / others.clamp_min(1), 0.0)


def seed_of(*names: object) -> int:
    """A seed for a draw from what names it. torch's generator on the CPU looks at 32 bits of a seed only, so seeds that
    differ further up are the same; hashed ones differ throughout."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:4])


@dataclass
class Draws:
    """What one step samples: an example, a generator's seed and the number of its prompt for each sequence."""

    examples: list[Example]
    seeds: list[int]
    numbers: list[int]

    def share(self, rank: int, of: int) -> Draws:
        """The part of one of several processes, in consecutive runs, so that joining restores the order."""
        n = len(self.seeds)
        part = slice(rank * n // of, (rank + 1) * n // of)
        return Draws(self.examples[part], self.seeds[part], self.numbers[part])


def complete(
    pair: ModelPair, task: Task, draws: Draws, verifier: Verifier, sampling: Sampling, **kwargs: Any
) -> GenerationOutput:
    """Answers to a task's examples, one generator each."""
    return generate(
        pair,
        **request(task, draws.examples),
        verifier=verifier,
        num_speculative_tokens=sampling.num_speculative_tokens,
        temperature=sampling.temperature,
        batch_size=sampling.batch_size,
        seed=draws.seeds,
        **kwargs,
    )


def returns_of(
    task: Task,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[list[int]],
    reward: Tensor,
    discount: float,
) -> Tensor:
    """What each token and those after it earned, one sequence after the other, [T].

    Where the task's reward means something for unfinished text, every prefix is judged. A token's own earning is what
    it adds to the reward of the text before it, and its return is that plus ``discount`` times the next token's return.
    What was earned before a token is no doing of its, and what comes long after hardly: leaving both out takes away
    most of the noise. Elsewhere every token's return is the reward of its sequence.
    """
    if not task.partial_reward:
        return torch.cat([torch.full((len(ids),), r) for ids, r in zip(token_ids, reward.tolist(), strict=True)])
    prefixes = [(e, ids[:t]) for e, ids in zip(examples, token_ids, strict=True) for t in range(1, len(ids))]
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for _, ids in prefixes]
    earned = iter(judge(task.reward, [e for e, _ in prefixes], texts))
    returns: list[float] = []
    for ids, whole in zip(token_ids, reward.tolist(), strict=True):
        so_far = [0.0, *itertools.islice(earned, max(len(ids) - 1, 0)), whole]
        own = [after - before for before, after in itertools.pairwise(so_far)][: len(ids)]
        later = itertools.accumulate(reversed(own), lambda rest, gain: gain + discount * rest)
        returns += reversed(list(later))
    return torch.tensor(returns)


def roll_out(
    pair: ModelPair,
    task: Task,
    draws: Draws,
    head: EnsembleHead,
    verifier: Verifier,
    sampling: Sampling,
    discount: float = 1.0,
) -> Rollouts:
    """Sample one completion per draw under ``verifier`` and score it with the task's reward."""
    out = complete(pair, task, draws, verifier, sampling, bonus="verifier", trace=True)
    assert out.trace is not None
    traces = out.trace
    reward = torch.tensor(judge(task.reward, draws.examples, out.texts))
    return Rollouts(
        inputs=torch.cat([head.join_inputs(t.target_hidden, t.draft_hidden, t.features) for t in traces]),
        target_prob=torch.cat([t.target_prob for t in traces]),
        draft_prob=torch.cat([t.draft_prob for t in traces]),
        total_variation=torch.cat([t.total_variation for t in traces]),
        weight=torch.cat([t.weight for t in traces]),
        returns=returns_of(task, draws.examples, pair.tokenizer, out.token_ids, reward, discount),
        length=torch.tensor([len(t.token_ids) for t in traces]),
        prompt=torch.tensor(draws.numbers),
        reward=reward,
    )
