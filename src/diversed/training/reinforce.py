"""Objective ``reinforce++``: reward minus a fixed price per rejected draft token, by policy gradient.

    maximise   E[R(y)] - price * E[sum_t w_t TV_t]

The paper's recipe (Wang et al. 2026, section 4.2: sequence-level reward with an acceptance regulariser), with the sign
that raises acceptance, sampled rollouts, and several clipped epochs per batch. Another trade-off is another run.
"""

from __future__ import annotations

from diversed.engine import ModelPair
from diversed.tasks import Task
from diversed.training.policy_gradient import improve
from diversed.training.rollouts import Draws, Rollouts, roll_out
from diversed.training.settings import TrainSettings
from diversed.training.state import State
from diversed.verifiers import LearnedEnsemble


def collect(pair: ModelPair, task: Task, state: State, settings: TrainSettings, draws: Draws) -> Rollouts:
    """Roll out the head as it is."""
    return roll_out(pair, task, draws, state.head, LearnedEnsemble(state.head), settings.sampling, settings.discount)


def learn(state: State, batches: list[Rollouts], settings: TrainSettings, target_reward: float) -> dict[str, float]:
    """Improve the head on the newest batch."""
    price = default_price(settings, target_reward)
    figures = improve(state.head, state.optimiser, batches[-1], settings, state.value, price=price, seed=state.step)
    return figures | {"price": price}


def default_price(settings: TrainSettings, target_reward: float) -> float:
    """A rejected token is worth a tenth of the target's reward unless the settings say otherwise."""
    return settings.price if settings.price is not None else 0.1 * abs(target_reward)
