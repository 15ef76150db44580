"""Each objective finds the weights that are known to be best, and its gradients have the right sign."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diversed import EnsembleHead, LearnedEnsemble, ModelPair
from diversed.tasks import Example, Task
from diversed.training import constrained, counterfactual, montecarlo
from diversed.training.policy_gradient import StateValue, advantages, improve, loss_of, surrogate
from diversed.training.regression import Labels, fit_linear, predict_ridge
from diversed.training.rollouts import Draws, Rollouts
from diversed.training.settings import OBJECTIVES, TrainSettings
from diversed.training.state import State
from diversed.training.trainer import train
from diversed.verifiers.learned import NUM_FEATURES
from models import character_tokenizer, table
from training.toy import FRAGILE, SAFE, rewards, states, toy_pair, toy_settings, toy_task


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_permissive_where_safe_and_strict_where_fragile(objective: str, seed: int, tmp_path: Path) -> None:
    pair = toy_pair()
    result = train(
        pair, toy_task(), toy_task("validation"), toy_settings(objective, seed=seed, tolerance=0.02), tmp_path / "run"
    )
    weight = {c: float(torch.sigmoid(result.head(x))) for c, x in states(pair, result.head).items()}
    assert all(weight[c] < 0.25 for c in SAFE), weight
    assert all(weight[c] > 0.75 for c in FRAGILE), weight
    assert result.best["score"] > 0.9
    assert result.best["position_acceptance"] > 0.75  # lossless: 0.54 after s and a or b, 1 after x and y


def test_an_mlp_head_and_a_head_of_features_alone_find_them_too(tmp_path: Path) -> None:
    pair = toy_pair()
    for i, shape in enumerate(({"mlp_size": 8}, {"features": True, "hidden": False})):
        settings = toy_settings("counterfactual", **shape)
        result = train(pair, toy_task(), toy_task("validation"), settings, tmp_path / str(i))
        weight = {c: float(torch.sigmoid(result.head(x))) for c, x in states(pair, result.head).items()}
        assert all(weight[c] < 0.3 for c in SAFE), weight
        assert all(weight[c] > 0.7 for c in FRAGILE), weight


def hits(prompts, completions, **columns):
    """A reward that grows as the text does: a quarter for every x."""
    return [text.count("x") / 4 for text in completions]


@pytest.mark.parametrize("objective", ["montecarlo", "reinforce++", "constrained"])
def test_credit_for_what_a_token_earned_leads_to_the_same_weights(objective: str, tmp_path: Path) -> None:
    pair = toy_pair()
    task, validation = (replace(toy_task(s, reward=hits), partial_reward=True) for s in ("train", "validation"))
    result = train(pair, task, validation, toy_settings(objective, tolerance=0.02, discount=0.5), tmp_path / "run")
    weight = {c: float(torch.sigmoid(result.head(x))) for c, x in states(pair, result.head).items()}
    assert all(weight[c] < 0.25 for c in SAFE), weight
    assert all(weight[c] > 0.75 for c in FRAGILE), weight


def test_credit_for_what_a_token_earned_makes_labels_less_noisy() -> None:
    pair, noise = toy_pair(), {}
    for partial, discount in ((False, 1.0), (True, 1.0), (True, 0.5)):
        task = replace(toy_task(reward=hits), partial_reward=partial)
        settings = toy_settings("montecarlo", discount=discount)
        draws = Draws(task.examples, list(range(32)), list(range(32)))
        state = State.new(EnsembleHead(*pair.hidden_sizes), settings)
        labels = montecarlo.labels_of(montecarlo.collect(pair, task, state, settings, draws))
        noise[partial, discount] = float(labels.value.std())
    assert noise[True, 0.5] < 0.9 * noise[True, 1.0] < 0.9 * noise[False, 1.0], noise


# Bandits: one state, one token, known optimum.


def bandit(p: list[float], q: list[float], reward: list[float], weight: float, n: int, seed: int) -> Rollouts:
    """n one-token sequences from the blend of p and q, rewarded by their token."""
    p_, q_, r = (torch.tensor(x) for x in (p, q, reward))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(weight * p_ + (1 - weight) * q_, n, replacement=True, generator=generator)
    tv = float((p_ - q_).abs().sum() / 2)
    return Rollouts(
        inputs=torch.zeros(n, 2),
        target_prob=p_[tokens],
        draft_prob=q_[tokens],
        total_variation=torch.full((n,), tv),
        weight=torch.full((n,), weight),
        length=torch.ones(n, dtype=torch.long),
        prompt=torch.arange(n),
        reward=r[tokens],
        returns=r[tokens],
    )


def play(
    reward: list[float],
    price: float,
    *,
    steps: int = 50,
    baseline: str = "batch",
    start: float = 0.5,
    normalise: bool = False,
) -> float:
    """The weight after so many steps on fresh rollouts."""
    head = EnsembleHead(1, 1, initial_weight=start)
    settings = TrainSettings(
        objective="reinforce++",
        baseline=baseline,
        steps=steps,
        learning_rate=0.1,
        minibatches=1,
        normalise=normalise,
    )
    state = State.new(head, settings)
    weight = start
    for step in range(steps):
        rollouts = bandit([0.9, 0.1], [0.3, 0.7], reward, weight, 256, step)
        improve(head, state.optimiser, rollouts, settings, state.value, price=price, seed=step)
        with torch.no_grad():
            weight = float(torch.sigmoid(head(torch.zeros(1, 2))))
    return weight


def test_the_regulariser_alone_raises_acceptance() -> None:
    rollouts = bandit([0.9, 0.1], [0.3, 0.7], [0.0, 0.0], 0.5, 64, 0)
    weight = torch.full((64,), 0.5, requires_grad=True)
    tokens = torch.arange(64)
    loss = loss_of(weight, rollouts, tokens, torch.zeros(64), price=1.0, clip=0.2, sequences=64)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert (gradient > 0).all()  # descending it lowers w, and acceptance is 1 - w TV
    torch.testing.assert_close(gradient, torch.full((64,), 0.6 / 64))
    assert play([0.0, 0.0], price=0.5) < 0.05


@pytest.mark.parametrize("baseline", ["batch", "state"])
def test_reward_alone_makes_the_weight_strict_where_strictness_pays(baseline: str) -> None:
    assert play([1.0, 0.0], price=0.0, baseline=baseline) > 0.95
    assert play([0.0, 1.0], price=0.0, baseline=baseline) < 0.05  # and permissive where the draft knows better


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_price_decides_which_of_the_two_wins(normalise: bool, scale: float) -> None:
    # d = E[reward | target's residual] - E[reward | draft's residual] = scale here, so strict iff price < scale.
    assert play([scale, 0.0], price=0.6 * scale, steps=80, normalise=normalise) > 0.9
    assert play([scale, 0.0], price=1.4 * scale, steps=80, normalise=normalise) < 0.1


def test_the_multiplier_rises_while_the_floor_is_violated_and_falls_while_it_is_not() -> None:
    settings = TrainSettings(objective="constrained", tolerance=0.1, minibatches=1, epochs=1)
    for reward, rises in ((0.2, True), (1.0, False)):
        state = State.new(EnsembleHead(1, 1), settings)
        seen = []
        for step in range(4):
            rollouts = bandit([0.9, 0.1], [0.3, 0.7], [reward, reward], 0.5, 32, step)
            seen.append(constrained.learn(state, [rollouts], settings, 1.0)["multiplier"])
        assert seen == sorted(seen, reverse=not rises)
        assert seen[0] != seen[-1]


def test_the_constrained_optimum_of_a_bandit_lies_on_the_floor() -> None:
    # reward(w) = w * 0.9 + (1 - w) * 0.3: a floor of 0.75 is met from w = 0.75 on.
    settings = TrainSettings(
        objective="constrained",
        tolerance=0.0,
        steps=300,
        learning_rate=0.03,
        baseline="batch",
        minibatches=1,
        dual_rate=0.5,
    )
    head = EnsembleHead(1, 1, initial_weight=0.5)
    state, weight, seen = State.new(head, settings), 0.5, []
    for step in range(settings.steps):
        rollouts = bandit([0.9, 0.1], [0.3, 0.7], [1.0, 0.0], weight, 512, step)
        constrained.learn(state, [rollouts], settings, 0.75)
        with torch.no_grad():
            weight = float(torch.sigmoid(head(torch.zeros(1, 2))))
        seen.append(weight)
    assert sum(seen[-100:]) / 100 == pytest.approx(0.75, abs=0.08)


def test_the_surrogate_stops_rewarding_ratios_beyond_the_clip() -> None:
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5])
    up = surrogate(ratio.log(), torch.ones(5), 0.2)
    down = surrogate(ratio.log(), -torch.ones(5), 0.2)
    torch.testing.assert_close(up, torch.tensor([0.5, 0.9, 1.0, 1.1, 1.2]))
    torch.testing.assert_close(down, -torch.tensor([0.8, 0.9, 1.0, 1.1, 1.5]))


def test_baselines_leave_the_sequence_itself_out() -> None:
    rollouts = bandit([0.9, 0.1], [0.3, 0.7], [1.0, 0.0], 0.5, 6, 0)
    rollouts.reward = rollouts.returns = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    rollouts.prompt = torch.tensor([0, 0, 1, 1, 2, 2])
    value = StateValue.empty(2)
    batch, _ = advantages(rollouts, TrainSettings(baseline="batch"), value, rollouts.inputs)
    torch.testing.assert_close(batch, rollouts.reward - (3.0 - rollouts.reward) / 5)
    by_prompt, _ = advantages(rollouts, TrainSettings(baseline="prompt", samples_per_prompt=2), value, rollouts.inputs)
    torch.testing.assert_close(by_prompt, torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0]))


def test_the_state_value_predicts_from_earlier_batches() -> None:
    value = StateValue.empty(1)
    assert value.predict(torch.ones(1, 1)) is None
    x = torch.linspace(-1, 1, 200).unsqueeze(1)
    value.learn(x, 0.5 + 0.3 * x.squeeze(1))
    predicted = value.predict(torch.tensor([[0.0], [1.0]]))
    torch.testing.assert_close(predicted, torch.tensor([0.5, 0.8]), atol=0.02, rtol=0)


# Labels are unbiased.


def exact_advantage(n_digits: int = 4) -> dict[str, float]:
    """d of the toy task: a digit's share of the reward where the residuals are x and y, and nothing for style."""
    return {"s": 0.0, "a": 1 / n_digits, "b": 1 / n_digits}


@pytest.mark.parametrize("objective", ["counterfactual", "montecarlo"])
def test_labels_average_to_the_known_advantage(objective: str) -> None:
    pair, settings = toy_pair(), toy_settings(objective)
    module = {"counterfactual": counterfactual, "montecarlo": montecarlo}[objective]
    state = State.new(EnsembleHead(*pair.hidden_sizes), settings)
    n = {"counterfactual": 128, "montecarlo": 1500}[objective]
    task = toy_task(n=n)
    draws = Draws(task.examples, [10_000 * i for i in range(n)], list(range(n)))
    batch = module.collect(pair, task, state, settings, draws)
    labels = batch if isinstance(batch, Labels) else montecarlo.labels_of(batch)
    for c, x in states(pair, state.head).items():
        mine = (labels.inputs - x).abs().amax(1) < 1e-3
        if c in "xy":
            assert not mine.any()  # both models agree there: nothing to label
            continue
        value = float((labels.mass * labels.value)[mine].sum() / labels.mass[mine].sum())
        assert value == pytest.approx(exact_advantage()[c], abs=0.03)


def test_a_branchs_first_token_does_not_decide_the_next(tmp_path: Path) -> None:
    """Where the reward is a coin toss after the residual's token, that token earns nothing by itself."""
    size = 12
    p, q = torch.full((2, size, size), 1e-9)
    p[:, 6], p[:, 7], q[:, 8], q[:, 9] = 0.5, 0.5, 0.5, 0.5  # a or b for the target, c or d for the draft, always
    pair = ModelPair(table(p / p.sum(1, keepdim=True)), table(q / q.sum(1, keepdim=True)), character_tokenizer(size))

    def second_is_first_choice(prompts, completions, **columns):
        return [float(text[1] in "ac") for text in completions]

    task = Task("toss", "train", [Example("a", {})] * 400, second_is_first_choice, second_is_first_choice, "toss", 2)
    settings = toy_settings("counterfactual", labels_per_rollout=1)
    state = State.new(EnsembleHead(*pair.hidden_sizes), settings)
    labels = counterfactual.collect(pair, task, state, settings, Draws(task.examples, list(range(400)), [0] * 400))
    first = labels.inputs[:, 0] == labels.inputs[0, 0]
    assert len(labels.value) == 400
    assert first.any()
    assert float(labels.value.mean()) == pytest.approx(0.0, abs=0.12)


def test_a_branch_at_the_end_of_the_context_is_judged_as_it_is() -> None:
    pair, settings = toy_pair(), toy_settings("counterfactual")
    for model in (pair.target, pair.draft):
        model.config.max_position_embeddings = 9
    task = toy_task(n=64)
    draws = Draws(task.examples, list(range(64)), list(range(64)))
    state = State.new(EnsembleHead(*pair.hidden_sizes), settings)
    labels = counterfactual.collect(pair, task, state, settings, draws)
    assert len(labels.value) > 64


def test_states_count_in_proportion_to_their_tv() -> None:
    pair, settings = toy_pair(), toy_settings("counterfactual", labels_per_rollout=30)
    task = toy_task(n=200)
    draws = Draws(task.examples, list(range(200)), list(range(200)))
    state = State.new(EnsembleHead(*pair.hidden_sizes), settings)
    labels = counterfactual.collect(pair, task, state, settings, draws)
    style, digit = 0.8, 0.57  # TV after s, and after a or b; a rollout meets each four times
    after_s = (labels.inputs - states(pair, state.head)["s"]).abs().amax(1) < 1e-3
    assert float(labels.mass.sum()) / 200 == pytest.approx(4 * (style + digit), rel=1e-3)
    assert float(labels.mass[after_s].sum() / labels.mass.sum()) == pytest.approx(style / (style + digit), abs=0.02)


def test_few_noisy_labels_show_what_the_features_tell() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4000, 300 + NUM_FEATURES, generator=generator)
    noisy = inputs[:, -1] + 20 * torch.randn(4000, generator=generator)
    labels = Labels(inputs, noisy, torch.ones(4000), torch.arange(4000) // 40)
    fresh = torch.randn(4000, 300 + NUM_FEATURES, generator=generator).double()

    def agreement(features: int) -> float:
        predicted = predict_ridge(fresh, fit_linear(inputs, labels, features)[0])
        return float(torch.corrcoef(torch.stack([predicted, fresh[:, -1]]))[0, 1])

    assert agreement(NUM_FEATURES) > 0.6
    assert agreement(NUM_FEATURES) > 2 * agreement(0)


def test_rewards_see_the_whole_answer_of_a_branch() -> None:
    seen: list[str] = []

    def spy(prompts, completions, **columns):
        seen.extend(completions)
        return rewards(prompts, completions)

    pair, settings = toy_pair(), toy_settings("counterfactual")
    task = toy_task(n=8, reward=spy)
    draws = Draws(task.examples, [10_000 * i for i in range(8)], list(range(8)))
    counterfactual.collect(pair, task, State.new(EnsembleHead(*pair.hidden_sizes), settings), settings, draws)
    assert seen
    for text in seen:  # style, digit, s, four times over
        assert len(text) == 12
        assert all(c in kind for c, kind in zip(text, ["ab", "xy", "s"] * 4, strict=True)), text


def test_the_softened_policy_keeps_both_models_in_play() -> None:
    head = EnsembleHead(1, 1)
    with torch.no_grad():
        head.out.bias.fill_(50.0)
    p = torch.rand(5, 3).softmax(-1)
    hidden = torch.zeros(5, 1)
    strict = montecarlo.Softened(LearnedEnsemble(head)).weight(p, p, hidden, hidden)
    torch.testing.assert_close(strict, torch.full((5,), montecarlo.HIGH))
    with torch.no_grad():
        head.out.bias.fill_(-50.0)
    torch.testing.assert_close(
        montecarlo.Softened(LearnedEnsemble(head)).weight(p, p, hidden, hidden), torch.full((5,), montecarlo.LOW)
    )
