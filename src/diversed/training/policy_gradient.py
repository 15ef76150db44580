"""What ``reinforce++`` and ``constrained`` share: the clipped surrogate and its baselines.

The expected reward's gradient is E[sum_t grad log nu(y_t) A_t] (Williams 1992). Several steps are taken per batch of
rollouts with the importance ratio nu / nu_old, clipped as in PPO (Schulman et al. 2017, eq. 7) and REINFORCE++
(Hu 2025, arXiv 2501.03262). The acceptance regulariser needs no sampling: given w, the expected number of rejections
of a sequence is sum_t w_t TV_t, and its gradient is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diversed.training.regression import Sums, predict_ridge
from diversed.training.rollouts import Rollouts, log_nu, others_mean
from diversed.training.settings import TrainSettings
from diversed.verifiers import EnsembleHead


def surrogate(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """min(r A, clip(r, 1 - clip, 1 + clip) A) per token, [T]; r = exp(log_ratio)."""
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def loss_of(
    weight: Tensor, rollouts: Rollouts, tokens: Tensor, advantage: Tensor, *, price: float, clip: float, sequences: int
) -> Tensor:
    """-(reward - price x expected rejections), a mean over ``sequences``.

    Args:
        weight: w under the head as it is now, [K], of the rollouts' tokens ``tokens`` [K].
        advantage: [K].
        price: reward given up per rejected draft token. Lowering w lowers the rejections: the sign by which the
            regulariser raises acceptance.
    """
    new = log_nu(weight, rollouts.target_prob[tokens], rollouts.draft_prob[tokens])
    gain = surrogate(new - rollouts.log_nu[tokens], advantage, clip).sum()
    rejections = (weight * rollouts.total_variation[tokens]).sum()
    return -(gain - price * rejections) / sequences


@dataclass
class StateValue:
    """V(s): ridge regression of the return on the head's input, from earlier batches only.

    Monte-Carlo returns, never bootstrapped: a bootstrapped critic cannot see a wrong digit (its own next value is as
    blind). Earlier batches only, so that a sequence's own reward does not leak into its baseline; older ones fade.
    """

    sums: Sums

    KEEP = 0.7  # what a batch adds to the ones before counts so much less a batch later
    DECAY = 0.01

    @classmethod
    def empty(cls, size: int) -> StateValue:
        return cls(Sums.of(torch.zeros(0, size), torch.zeros(0), torch.zeros(0)))

    def predict(self, inputs: Tensor) -> Tensor | None:
        """V at standardised inputs [T, size] -> [T]; None before the first batch."""
        if self.sums.mass == 0:
            return None
        return predict_ridge(inputs.double(), self.sums.solve(self.DECAY)).float()

    def learn(self, inputs: Tensor, returns: Tensor) -> None:
        new, keep = Sums.of(inputs, returns, torch.ones(len(returns))), self.KEEP
        self.sums = Sums(keep * self.sums.gram, keep * self.sums.moment, keep * self.sums.mass) + new


def advantages(
    rollouts: Rollouts, settings: TrainSettings, value: StateValue, standardised: Tensor
) -> tuple[Tensor, float]:
    """Return minus baseline for every token, [T], and the unit it is in: 1, or its deviation where it is normalised.

    ``batch`` subtracts the mean return of the other sequences of the batch, ``prompt`` that of the other answers to
    the same prompt (leave one out: unbiased), ``state`` what the return was predicted to be before the token came.
    """
    mean, count = rollouts.mean_return, len(rollouts.reward)
    if settings.baseline == "prompt":
        baseline = others_mean(mean, rollouts.prompt)
    else:
        baseline = (mean.sum() - mean) / max(count - 1, 1)
    result = rollouts.returns - baseline[rollouts.sequence]
    if settings.baseline == "state":
        predicted = value.predict(standardised)
        if predicted is not None:
            result = rollouts.returns - predicted
    if not settings.normalise:
        return result, 1.0
    unit = float(result.std().clamp_min(1e-6))
    return (result - result.mean()) / unit, unit


def improve(
    head: EnsembleHead,
    optimiser: torch.optim.Optimizer,
    rollouts: Rollouts,
    settings: TrainSettings,
    value: StateValue,
    *,
    price: float,
    seed: int,
) -> dict[str, float]:
    """Several epochs of clipped steps on one batch of rollouts; the baseline then learns from the batch."""
    standardised = (rollouts.inputs - head.mean) / head.scale
    advantage, unit = advantages(rollouts, settings, value, standardised)
    generator = torch.Generator().manual_seed(seed)
    sequence = rollouts.sequence
    norms, ratios = [], []
    for _ in range(settings.epochs):
        for part in torch.randperm(len(rollouts.reward), generator=generator).chunk(settings.minibatches):
            tokens = torch.isin(sequence, part).nonzero().squeeze(1)
            weight = torch.sigmoid(head(rollouts.inputs[tokens]))
            # The price in the same unit, or what is traded would change with the spread of a batch.
            loss = loss_of(
                weight, rollouts, tokens, advantage[tokens], price=price / unit, clip=settings.clip, sequences=len(part)
            )
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norms.append(float(torch.nn.utils.clip_grad_norm_(head.parameters(), settings.max_grad_norm)))
            optimiser.step()
            ratios.append(float((weight.detach() - rollouts.weight[tokens]).abs().mean()))
    value.learn(standardised, rollouts.returns)
    return {
        "gradient_norm": sum(norms) / len(norms),
        "weight_change": ratios[-1],
        "advantage_deviation": float(advantage.std()) * unit,
    }
