"""From labels of d(s) to a head: what ``counterfactual`` and ``montecarlo`` share.

d(s) is what the target's judgement is worth at a state: the expected reward when the next token comes from the
target's residual minus that when it comes from the draft's. Expected reward and acceptance are both linear in every
single w, so at a price the best weight is 1 where d(s) exceeds it and 0 elsewhere. The head is given the soft form

    log-odds of w = (d(s) - price) / tau

so that turning the dial, which adds to the log-odds, moves the price: one regression serves every quality.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor, nn

from diversed.training.rollouts import OnDisk
from diversed.training.settings import TrainSettings
from diversed.verifiers import EnsembleHead
from diversed.verifiers.learned import NUM_FEATURES

DECAYS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0)  # ridge penalties to choose from, per label
# What a closed-form feature costs beside a hidden unit. Most of what few labels can tell lies in these eight, and one
# penalty for all, chosen for a thousand hidden units that say little each, shrinks the eight away as well.
FEATURE_DECAY = 0.01
FOLDS = 5
PART = 4096  # rows


@dataclass
class Labels(OnDisk):
    """M labelled states."""

    inputs: Tensor  #: head inputs, [M, size]
    value: Tensor  #: an unbiased, noisy d(s), [M]
    mass: Tensor  #: how much a label counts: states matter in proportion to their TV, [M]
    group: Tensor  #: labels of one rollout share noise and are held out together, [M]

    @classmethod
    def none(cls, head: EnsembleHead) -> Self:
        empty = torch.zeros(0)
        return cls(torch.zeros(0, head.mean.numel()), empty, empty, torch.zeros(0, dtype=torch.long))

    @classmethod
    def join(cls, parts: Sequence[Labels]) -> Labels:
        """All labels; groups of different parts stay apart."""
        offset = 0
        groups = []
        for part in parts:
            groups.append(part.group + offset)
            offset += int(part.group.max()) + 1 if len(part.group) else 0
        rest = {f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls) if f.name != "group"}
        return cls(group=torch.cat(groups), **rest)


@dataclass
class Sums:
    """All that ridge regression needs of its rows: X'MX, X'My and the total mass, with an intercept as last column.

    Sums of disjoint rows add up, so leaving a fold out is a subtraction and not another pass over the rows.
    """

    gram: Tensor  #: [size + 1, size + 1], float64
    moment: Tensor  #: [size + 1]
    mass: Tensor  #: []

    @classmethod
    def of(cls, x: Tensor, y: Tensor, mass: Tensor) -> Sums:
        """x: [M, size] standardised; y, mass: [M]."""
        size = x.shape[1] + 1
        gram = torch.zeros(size, size, dtype=torch.float64)
        moment = torch.zeros(size, dtype=torch.float64)
        # Products of a part in float32, which takes half the time, and their sum in float64, which stays exact.
        for start in range(0, len(x), PART):
            at = slice(start, start + PART)
            rows = torch.cat([x[at].float(), torch.ones(len(x[at]), 1)], 1)
            weighted = rows * mass[at].float().unsqueeze(1)
            gram += weighted.T @ rows
            moment += weighted.T @ y[at].float()
        return cls(gram, moment, mass.double().sum())

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.gram + other.gram, self.moment + other.moment, self.mass + other.mass)

    def __sub__(self, other: Sums) -> Sums:
        return Sums(self.gram - other.gram, self.moment - other.moment, self.mass - other.mass)

    def solve(self, decay: float, features: int = 0) -> Tensor:
        """Coefficients [size + 1]; the penalty is ``decay`` times the mass, a hundredth of it on the last ``features``
        inputs, and none on the intercept."""
        penalty = torch.full_like(self.moment, decay)
        penalty[len(penalty) - 1 - features :] *= FEATURE_DECAY
        penalty[-1] = 0
        solution: Tensor = torch.linalg.solve(self.gram + torch.diag(penalty * self.mass), self.moment)
        return solution


def predict_ridge(x: Tensor, coefficients: Tensor) -> Tensor:
    """[M, size] float64 and [size + 1] or [size + 1, K] to [M] or [M, K]."""
    return x @ coefficients[:-1] + coefficients[-1]


def weighted_error(prediction: Tensor, y: Tensor, mass: Tensor) -> float:
    return float((mass * (prediction - y).square()).sum() / mass.sum())


def fit_linear(x: Tensor, labels: Labels, features: int) -> tuple[Tensor, dict[str, float]]:
    """Coefficients [size + 1] at the penalty that predicts held-out rollouts best; the last ``features`` inputs are
    closed-form ones."""
    y, mass = labels.value.double(), labels.mass.double()
    folds = [(labels.group % FOLDS == k).nonzero().squeeze(1) for k in range(FOLDS)]
    folds = [rows for rows in folds if len(rows)]
    parts = [Sums.of(x[rows], y[rows], mass[rows]) for rows in folds]
    whole = functools.reduce(Sums.__add__, parts)
    errors = torch.zeros(len(DECAYS))
    for rows, part in zip(folds, parts, strict=True):
        if len(parts) == 1:
            break
        coefficients = torch.stack([(whole - part).solve(d, features) for d in DECAYS], 1)
        predicted = predict_ridge(x[rows].double(), coefficients)
        errors += (mass[rows].unsqueeze(1) * (predicted - y[rows].unsqueeze(1)).square()).sum(0).float()
    errors /= float(mass.sum())
    best = int(errors.argmin())
    variance = weighted_error((mass * y).sum() / mass.sum(), y, mass)
    explained = 1 - float(errors[best]) / variance if variance else 0.0
    return whole.solve(DECAYS[best], features), {"decay": DECAYS[best], "explained": explained}


def fit_mlp(head: EnsembleHead, x: Tensor, labels: Labels, settings: TrainSettings) -> dict[str, float]:
    """AdamW on the squared error until held-out rollouts (every fifth) stop improving; the head then gives d itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        for layer in (*head.body.children(), head.out):
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    held = labels.group % FOLDS == 0
    y, mass = labels.value, labels.mass / labels.mass.mean()
    centre = float((mass * y).sum() / mass.sum())
    spread = float((mass * (y - centre).square()).sum().div(mass.sum()).sqrt()) or 1.0
    goal = (y - centre) / spread
    with torch.no_grad():
        head.out.bias.zero_()
    optimiser = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(settings.seed)
    used = (~held).nonzero().squeeze(1)

    def predict(rows: Tensor) -> Tensor:
        return head.out(head.body(rows)).squeeze(-1)  # type: ignore[no-any-return]

    best, best_state, since = float("inf"), {k: v.clone() for k, v in head.state_dict().items()}, 0
    for _ in range(200):
        for part in used[torch.randperm(len(used), generator=generator)].split(256):  # type: ignore[no-untyped-call]
            loss = (mass[part] * (predict(x[part]) - goal[part]).square()).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            error = weighted_error(predict(x[held]), goal[held], mass[held]) if held.any() else float(loss.detach())
        if error < best - 1e-5:
            best, best_state, since = error, {k: v.clone() for k, v in head.state_dict().items()}, 0
        else:
            since += 1
            if since >= 10:
                break
    head.load_state_dict(best_state)
    with torch.no_grad():  # back to units of reward
        head.out.weight.mul_(spread)
        head.out.bias.mul_(spread).add_(centre)
    return {"explained": 1 - best}


def fit(head: EnsembleHead, labels: Labels, settings: TrainSettings) -> dict[str, float]:
    """Regress d on the labels and write (d - price) / tau into the head.

    Without a price in the settings it lies half a deviation above the mean of the predicted d: the middle of the dial.
    Which point of the dial is worth keeping is for validation to say.
    """
    if not len(labels.value):
        raise ValueError(
            "draft: it agrees with the target on every token of every rollout so far, so there is nothing to learn; "
            "use another draft, or no head at all"
        )
    head.fit_normalisation(labels.inputs)
    x = (labels.inputs - head.mean) / head.scale
    with torch.no_grad():
        if settings.mlp_size:
            with torch.enable_grad():
                figures = fit_mlp(head, x, labels, settings)
            advantage = head.out(head.body(x)).squeeze(-1)
        else:
            coefficients, figures = fit_linear(x, labels, NUM_FEATURES * head.features if head.hidden else 0)
            head.out.weight.copy_(coefficients[:-1].float().unsqueeze(0))
            head.out.bias.fill_(float(coefficients[-1]))
            advantage = predict_ridge(x.double(), coefficients).float()
        share = labels.mass / labels.mass.sum()
        mean = float((share * advantage).sum())
        deviation = max(float((share * (advantage - mean).square()).sum().sqrt()), 1e-6)
        tau = settings.tau * deviation
        price = mean + 0.5 * deviation if settings.price is None else settings.price
        head.out.weight.div_(tau)
        head.out.bias.sub_(price).div_(tau)
    return figures | {
        "labels": float(len(labels.value)),
        "mean_label": float((share * labels.value).sum()),
        "price": price,
        "tau": tau,
    }
