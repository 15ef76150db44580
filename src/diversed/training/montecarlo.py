"""Objective ``montecarlo``: read d(s) off whole rollouts, every token a label.

For a token y drawn from nu, E[(p(y) - q(y)) / nu(y) * R | s] = TV * d(s): whichever model favours the token gets the
credit for how the sequence ended. A label is far noisier than a counterfactual one, and a rollout yields one for each
of its tokens instead of one for two completions; where rewards are graded and every token matters a little (ROUGE),
that is the better bargain. Rollouts come from a weight kept away from 0 and 1, where both models' tokens are drawn
often enough, and the reward is compared with what was to be expected at the state.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from diversed.engine import ModelPair
from diversed.tasks import Task
from diversed.training.counterfactual import policy
from diversed.training.regression import FOLDS, Labels, Sums, fit, predict_ridge
from diversed.training.rollouts import Draws, Rollouts, others_mean, roll_out
from diversed.training.settings import TrainSettings
from diversed.training.state import State
from diversed.verifiers import LearnedEnsemble
from diversed.verifiers.ensemble import Ensemble

LOW, HIGH = 0.25, 0.8  # bounds of the weight that rollouts are drawn under
VALUE_DECAY = 0.03


@dataclass(frozen=True)
class Softened(Ensemble):
    """A learned verifier whose weight is squeezed into [LOW, HIGH]."""

    inner: LearnedEnsemble | None

    def to(self, device: torch.device) -> Softened:
        return Softened(None if self.inner is None else self.inner.to(device))

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        if self.inner is None:
            return torch.full_like(target_probs[..., 0], HIGH)
        return LOW + (HIGH - LOW) * self.inner.weight(target_probs, draft_probs, target_hidden, draft_hidden)


def collect(pair: ModelPair, task: Task, state: State, settings: TrainSettings, draws: Draws) -> Rollouts:
    """Roll out the softened policy."""
    chosen = policy(state, settings)
    inner = chosen if isinstance(chosen, LearnedEnsemble) else None
    return roll_out(pair, task, draws, state.head, Softened(inner), settings.sampling, settings.discount)


def learn(state: State, batches: list[Rollouts], settings: TrainSettings, target_reward: float) -> dict[str, float]:
    """Refit the head on every token so far."""
    return fit(state.head, labels_of(Rollouts.join(batches)), settings)


def labels_of(rollouts: Rollouts) -> Labels:
    """One label of d per token with a TV worth speaking of.

    The least-squares problem sum (y - TV d)^2 / TV equals the regression of y / TV with mass TV; the variance of y
    grows about like TV, which makes these the right weights.
    """
    sequence, p, q = rollouts.sequence, rollouts.target_prob, rollouts.draft_prob
    tv = rollouts.total_variation
    nu = torch.lerp(q, p, rollouts.weight)
    advantage = rollouts.returns - expected_returns(rollouts)
    keep = tv > 0.02
    value = ((p - q) / nu.clamp_min(1e-12) * advantage)[keep] / tv[keep]
    return Labels(
        inputs=rollouts.inputs[keep],
        value=value,
        mass=tv[keep],
        group=sequence[keep],
    )


def expected_returns(rollouts: Rollouts) -> Tensor:
    """V(s) for every token, [T], without a look at what its own sequence earned.

    The mean return of the other answers to the same prompt, where there are any, plus a ridge regression of what is
    left on the head's input and the place in the text (towards its end little is left to earn); each fifth of the
    prompts is predicted from the others.
    """
    sequence = rollouts.sequence
    baseline = others_mean(rollouts.mean_return, rollouts.prompt)[sequence]
    place = torch.cat([torch.arange(n) for n in rollouts.length.tolist()]).unsqueeze(1)
    x = torch.cat([rollouts.inputs, place, place.square(), place**3], 1)
    x = (x - x.mean(0)) / x.std(0, correction=0).clamp_min(1e-4)
    y = (rollouts.returns - baseline).double()
    fold = rollouts.prompt[sequence] % FOLDS
    folds = [(fold == k).nonzero().squeeze(1) for k in range(FOLDS)]
    parts = [Sums.of(x[rows], y[rows], torch.ones(len(rows))) for rows in folds]
    whole = functools.reduce(Sums.__add__, parts)
    result = torch.empty(len(y), dtype=torch.float64)
    for rows, part in zip(folds, parts, strict=True):
        others = whole - part
        if not others.mass:  # a single prompt
            result[rows] = y.mean()
        elif len(rows):
            result[rows] = predict_ridge(x[rows].double(), others.solve(VALUE_DECAY))
    return result.float() + baseline
