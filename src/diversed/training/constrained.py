"""Objective ``constrained``: accept as much as possible while the reward stays above a floor.

    minimise   E[sum_t w_t TV_t]   subject to   E[R(y)] >= (1 - tolerance) * target-only reward

The Lagrangian is that of ``reinforce++`` with price = 1 / multiplier; the multiplier follows the violated constraint by
dual ascent in its logarithm (a price is positive and its scale unknown). The user's knob is the tolerance.
"""

from __future__ import annotations

import math

from diversed.training.policy_gradient import improve
from diversed.training.reinforce import collect, default_price
from diversed.training.rollouts import Rollouts
from diversed.training.settings import TrainSettings
from diversed.training.state import State

__all__ = ["collect", "learn"]

AVERAGE = 0.5  # how much of the running mean of rewards stays at each step
RANGE = 1e3  # the price stays within this factor of where it began


def learn(state: State, batches: list[Rollouts], settings: TrainSettings, target_reward: float) -> dict[str, float]:
    """One dual step on the running reward, then improve the head at the price that results."""
    reward = float(batches[-1].reward.mean())
    first = default_price(settings, target_reward)
    if state.reward_average is None:
        state.reward_average, state.log_multiplier = reward, -math.log(first)
    state.reward_average = AVERAGE * state.reward_average + (1 - AVERAGE) * reward
    floor = settings.floor(target_reward)
    violation = (floor - state.reward_average) / (abs(target_reward) or 1.0)
    bound = math.log(RANGE)
    moved = state.log_multiplier + math.log(first) + settings.dual_rate * violation
    state.log_multiplier = min(max(moved, -bound), bound) - math.log(first)
    price = math.exp(-state.log_multiplier)
    figures = improve(state.head, state.optimiser, batches[-1], settings, state.value, price=price, seed=state.step)
    return figures | {"price": price, "multiplier": 1 / price, "floor": floor, "violation": violation}
