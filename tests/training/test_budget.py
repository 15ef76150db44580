"""Budgets: a run stops in time with the best head so far, whatever it has learned its steps to cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diversed.training import montecarlo, trainer
from diversed.training.trainer import closing, train
from training.test_trainer import STEPS
from training.toy import rewards, toy_pair, toy_settings, toy_task


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The trainer's clock, moved by hand: how loaded a machine is decides nothing."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def takes(clock: SimpleNamespace, seconds: float):
    """A reward that takes so long for each text."""

    def slow(prompts, completions, **columns):
        clock.seconds += seconds * len(prompts)
        return rewards(prompts, completions)

    return slow


def test_a_budget_stops_in_time_with_the_best_head_so_far(tmp_path: Path, clock: SimpleNamespace) -> None:
    task, validation = (toy_task(s, n=8, reward=takes(clock, 0.02)) for s in ("train", "validation"))
    settings = toy_settings("reinforce++", **(STEPS | {"steps": 100_000}))
    result = train(toy_pair(), task, validation, settings, tmp_path / "run", budget=8.0)
    assert result.stopped == "budget"
    assert 20 < result.steps < 50  # 0.16 s each, and the same for a validation of every second one
    assert (tmp_path / "run" / "head" / "model.safetensors").exists()
    spent = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())["seconds"]
    assert spent < 8.0 - closing(8.0)


def test_a_fit_that_would_not_fit_into_the_budget_is_foreseen(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regressions learn from all batches: each fit takes longer than the one before."""
    learn, seen = montecarlo.learn, []

    def slow(state, batches, *args):
        seen.append(len(batches))
        clock.seconds += 0.5 * len(batches)
        return learn(state, batches, *args)

    monkeypatch.setattr(montecarlo, "learn", slow)
    settings = toy_settings("montecarlo", **(STEPS | {"steps": 10_000, "fit_every": 4, "validate_every": 4}))
    result = train(toy_pair(), toy_task(), toy_task("validation", n=8), settings, tmp_path / "run", budget=10.0)
    assert result.stopped == "budget"
    assert seen == [4, 8]  # 12 batches would take 6 seconds more
    assert result.steps == 11
    assert clock.seconds == 6.0


def test_a_validation_quicker_than_foreseen_leaves_time_for_more_steps(tmp_path: Path, clock: SimpleNamespace) -> None:
    calls = []

    def slow_at_first(prompts, completions, **columns):
        clock.seconds += 0 if calls else 2  # the baseline, from which a validation is foreseen to take ten seconds
        calls.append(1)
        return rewards(prompts, completions)

    def steady(prompts, completions, **columns):
        clock.seconds += 0.1
        return rewards(prompts, completions)

    settings = toy_settings("montecarlo", **(STEPS | {"steps": 10_000, "validate_every": 1000, "fit_every": 1000}))
    settings = replace(settings, qualities=(0.9, 0.7, 0.5, 0.3, 0.1))
    task, validation = toy_task(reward=steady), toy_task("validation", n=8, reward=slow_at_first)
    result = train(toy_pair(), task, validation, settings, tmp_path / "run", budget=8.0)
    assert result.stopped == "budget"
    assert result.best["step"] == 1
    assert result.steps > 1


def test_the_least_that_a_budget_leaves_is_one_step_and_one_validation(tmp_path: Path) -> None:
    settings = toy_settings("reinforce++", **(STEPS | {"steps": 100}))
    result = train(toy_pair(), toy_task(), toy_task("validation", n=8), settings, tmp_path / "run", budget=1e-3)
    assert (result.stopped, result.steps) == ("budget", 1)
    assert result.best["step"] == 1


def test_a_validation_that_would_not_fit_into_the_budget_is_foreseen(tmp_path: Path, clock: SimpleNamespace) -> None:
    task, validation = toy_task(reward=takes(clock, 0.01)), toy_task("validation", n=8, reward=takes(clock, 0.15))
    settings = toy_settings("reinforce++", **(STEPS | {"steps": 10_000, "validate_every": 5, "qualities": (0.5, 0.2)}))
    result = train(toy_pair(), task, validation, settings, tmp_path / "run", budget=10.0)
    assert result.stopped == "budget"
    assert result.best  # it stopped early enough to look at what it has
    assert 5.0 < clock.seconds < 10.0 - closing(10.0)
