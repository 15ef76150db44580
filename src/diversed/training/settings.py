"""What a training run is told: one flat record, the same in Python, on the command line and in a run's config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from diversed.training.rollouts import Sampling

ObjectiveName = Literal["counterfactual", "montecarlo", "reinforce++", "constrained"]
OBJECTIVES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)
Baseline = Literal["batch", "prompt", "state"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a run. Rewards, prices and tolerances are in units of the task's reward.

    A *price* is what one accepted draft token is worth in reward; at a price, the best weight is 1 where the target's
    judgement is worth more than that and 0 elsewhere (docs/method.md).
    """

    objective: ObjectiveName = "montecarlo"
    seed: int = 0

    # rollouts
    steps: int = 40
    prompts_per_step: int = 64
    samples_per_prompt: int = 1
    num_speculative_tokens: int = 5
    temperature: float = 1.0
    batch_size: int = 64
    discount: float = 0.9  # of what later tokens earn, where a task's reward speaks of unfinished text; 1 elsewhere

    # the head
    mlp_size: int = 0
    features: bool = False
    hidden: bool = True
    initial_weight: float = 0.9

    # what is asked of it
    tolerance: float = 0.01  # share of the target's reward that may be lost
    price: float | None = None  # None: reinforce++ and constrained start at 10 % of the target's reward, others regress

    # counterfactual and montecarlo
    labels_per_rollout: int = 6
    tau: float = 0.2  # softness of the weight, in deviations of the predicted advantage
    #: Of the steps, rolled out before the head takes over: by the lossless verifier (softened by montecarlo).
    warm_share: float = 0.5
    fit_every: int = 10

    # reinforce++ and constrained
    baseline: Baseline = "state"
    normalise: bool = False
    clip: float = 0.2
    epochs: int = 2
    minibatches: int = 4
    learning_rate: float = 0.02
    warmup_share: float = 0.05
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    dual_rate: float = 3.0  # constrained: how fast the multiplier answers a violated floor

    # validation
    validate_every: int = 10
    validation_n: int = 200
    qualities: tuple[float, ...] = (0.9, 0.7, 0.5, 0.3, 0.1)
    patience: int = 0  # validations without a better head before the run ends; 0: never

    def __post_init__(self) -> None:
        def number(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
            plain = isinstance(value, int | float) and not isinstance(value, bool)
            return plain and math.isfinite(value) and low <= value <= high  # type: ignore[arg-type, operator]

        def require(name: str, ok: Callable[[Any], bool], rule: str) -> None:
            if not ok(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r} must be {rule}")

        require("objective", lambda x: x in OBJECTIVES, f"one of {', '.join(OBJECTIVES)}")
        require("baseline", lambda x: x in BASELINES, f"one of {', '.join(BASELINES)}")
        counts = ("steps", "prompts_per_step", "samples_per_prompt", "num_speculative_tokens", "batch_size")
        for name in (
            *counts,
            "labels_per_rollout",
            "fit_every",
            "epochs",
            "minibatches",
            "validate_every",
            "validation_n",
        ):
            require(name, lambda x: isinstance(x, int) and number(x, 1), "a whole number, 1 or more")
        for name in ("mlp_size", "patience"):
            require(name, lambda x: isinstance(x, int) and number(x, 0), "a whole number, 0 or more")
        for name in ("temperature", "tau", "clip", "learning_rate", "max_grad_norm"):
            require(name, lambda x: number(x) and x > 0, "a number above 0")
        for name in ("tolerance", "weight_decay", "dual_rate"):
            require(name, lambda x: number(x, 0), "a number, 0 or above")
        for name in ("warm_share", "warmup_share", "discount"):
            require(name, lambda x: number(x, 0, 1), "between 0 and 1")
        for name in ("features", "hidden", "normalise"):
            require(name, lambda x: isinstance(x, bool), "true or false")
        require("initial_weight", lambda x: number(x, 0, 1) and 0 < x < 1, "strictly between 0 and 1")
        require("price", lambda x: x is None or number(x), "a number, or none to find it")
        require(
            "qualities",
            lambda x: isinstance(x, tuple) and bool(x) and all(number(q) and 0 < q < 1 for q in x),
            "one or more numbers strictly between 0 and 1",
        )
        require("hidden", lambda x: x or self.features, "true where features is false, or the head sees nothing")
        if self.objective == "constrained":
            require("price", lambda x: x is None or x > 0, "above 0: the constrained objective starts from it")
        if self.baseline == "prompt":
            require("samples_per_prompt", lambda x: x > 1, "2 or more for baseline='prompt': it compares answers")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.num_speculative_tokens, self.temperature, self.batch_size)

    def floor(self, target_reward: float) -> float:
        """The reward that the tolerance asks for."""
        return target_reward - self.tolerance * abs(target_reward)


SETTING_NAMES = tuple(f.name for f in fields(TrainSettings))
