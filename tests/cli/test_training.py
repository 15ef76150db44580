"""train, eval and distill from the command line: from nothing to a head that bench finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from diversed.cli import app
from diversed.cli.measuring import kept_beside
from diversed.cli.training import findable, further, parse_duration, parse_layers
from diversed.evaluation.settings import fingerprint, load_verifier
from diversed.training.trainer import Result

TASK = """
def rows(split):
    for i in range(12):
        yield {"prompt": f"{split} Question {i}: Ada has {i} nuts.\\nAnswer:", "length": 20 + i}


def reward(prompts, completions, length, **columns):
    return [min(1.0, len(text) / n) for text, n in zip(completions, length, strict=True)]


MAX_NEW_TOKENS = 12
"""


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_train_then_eval_then_bench(tmp_path: Path) -> None:
    run = tmp_path / "run"
    quick = ["--steps", "2", "--prompts-per-step", "6", "--validation-n", "8", "--set", "fit_every=1"]
    said = invoke("train", "--task", "tally", *quick, "--output-dir", str(run), "--json", str(tmp_path / "v.json"))
    assert "diversed eval" in said
    assert {r["quality"] for r in json.loads((tmp_path / "v.json").read_text())} == {0.9, 0.7, 0.5, 0.3, 0.1}
    card = (run / "head" / "README.md").read_text()
    assert "montecarlo" in card

    said = invoke("eval", str(run), "--n", "6", "--quality", "0.5", "--verifier", "entropy:0.7", "--batch-size", "6")
    assert "over static" in said
    folder = run / "eval-tally-test-T1-seed0"
    rows = json.loads((folder / "rows.json").read_text())
    assert [r["verifier"] for r in rows][:2] == ["target-only", "lossless"]
    assert rows[-2]["verifier"] == str(run)
    assert rows[-2]["task"] == "tally"
    assert rows[-2]["position_acceptance"] > rows[1]["position_acceptance"]
    assert len(json.loads((folder / "statements.json").read_text())) == len(rows) - 1

    out = tmp_path / "bench.json"
    invoke(
        "bench", "--verifier", str(run), "--num-speculative-tokens", "5", "--json", str(out), "--n", "4",
        "--timing-n", "1", "--output-dir", str(tmp_path / "bench"),
    )  # fmt: skip
    rows = json.loads(out.read_text())
    assert rows[0]["verifier"] == "target-only"
    assert sorted(r["quality"] for r in rows if r["verifier"] == str(run)) == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert {r["task"] for r in rows} == {"tally"}  # the run's own


def result_of(reward: float, folder: Path) -> Result:
    best = {"score": reward, "reward": reward, "target_score": 0.8, "position_acceptance": 0.7, "n": 8}
    return Result(None, best, 1, "budget", 0.76, folder)


@pytest.mark.parametrize(("reward", "missed"), [(0.7, True), (0.76, False)])
def test_a_tolerance_that_nothing_met_is_said(
    reward: float, missed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("diversed.training.trainer.train", lambda *args, **kwargs: result_of(reward, tmp_path))
    said = invoke("train", "--tolerance", "0.05", "--output-dir", str(tmp_path))
    assert ("no point of the dial met the tolerance" in said) == missed
    assert ("reward 0.700 is 0.06 below the 0.760 that --tolerance 0.05 asks for" in said) == missed


def test_a_budget_counts_from_the_start_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {}

    def stand_in(*args: Any, budget: float, **kwargs: Any) -> Result:
        given["budget"] = budget
        return result_of(0.8, tmp_path)

    monkeypatch.setattr("diversed.training.trainer.train", stand_in)
    invoke("train", "--budget", "1h", "--output-dir", str(tmp_path))
    assert 3000 < given["budget"] < 3600
    said = invoke("train", "--budget", "0.01", "--output-dir", str(tmp_path))
    assert "the budget of 0.01 s became" in said
    assert "one step and one validation are the least a run takes" in said


def test_a_task_of_ones_own_from_a_python_file_and_from_json_lines(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    quick = ["--steps", "1", "--prompts-per-step", "4", "--validation-n", "4", "--objective", "montecarlo"]
    invoke("train", "--task", str(tmp_path / "my_task.py"), *quick, "--output-dir", str(tmp_path / "a"))
    rows = [{"prompt": f"Question {i}: how many?\nAnswer:", "length": 30} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    reward = f"{tmp_path / 'my_task.py'}:reward"
    invoke(
        "train", "--task", str(tmp_path / "rows.jsonl"), "--reward", reward, *quick, "--output-dir", str(tmp_path / "b")
    )
    assert (tmp_path / "b" / "head" / "model.safetensors").exists()
    for run in ("a", "b"):  # eval finds task and reward again
        invoke("eval", str(tmp_path / run), "--n", "2", "--quality", "0.5", "--batch-size", "2")


def test_a_head_that_was_trained_on_is_measured_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    quick = ["--steps", "2", "--prompts-per-step", "6", "--validation-n", "6"]
    invoke("train", "--task", "tally", *quick, "--output-dir", str(run))
    ask = ["eval", str(run), "--n", "6", "--quality", "0.5", "--batch-size", "6", "--json", str(tmp_path / "rows.json")]
    invoke(*ask)
    before = json.loads((tmp_path / "rows.json").read_text())[-1]
    weights = load_file(run / "head" / "model.safetensors")
    weights["out.bias"] += 1000.0  # lossless
    save_file(weights, run / "head" / "model.safetensors")
    load_verifier.cache_clear()
    fingerprint.cache_clear()
    invoke(*ask)
    after = json.loads((tmp_path / "rows.json").read_text())
    assert after[-1]["position_acceptance"] == after[1]["position_acceptance"] < before["position_acceptance"]


def test_distill_makes_a_draft_that_bench_takes(tmp_path: Path) -> None:
    said = invoke(
        "distill", "--layers", "0,6", "--train-n", "6", "--held-out-n", "3", "--steps", "3", "--batch-size", "2",
        "--output-dir", str(tmp_path / "d"), "--json", str(tmp_path / "d.json"),
    )  # fmt: skip
    assert "before" in said
    (row,) = json.loads((tmp_path / "d.json").read_text())
    assert row["steps"] == 3
    assert row["after"]["sequences"] == 3
    config = json.loads((tmp_path / "d" / "draft" / "config.json").read_text())
    assert config["num_hidden_layers"] == 2


def test_distill_takes_rows_of_ones_own_without_a_reward(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Question: Ada has {i} nuts.\nAnswer:"}) + "\n" for i in range(20)))
    invoke(
        "distill", "--task", str(rows), "--held-out-n", "0", "--steps", "1", "--batch-size", "1", "--train-n", "2",
        "--output-dir", str(tmp_path / "d"),
    )  # fmt: skip
    config = json.loads((tmp_path / "d" / "draft" / "config.json").read_text())
    assert config["num_hidden_layers"] == 4  # a student of the first and last two layers


def test_measurements_of_a_runs_head_stay_out_of_what_training_replaces(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "head").mkdir(parents=True)
    assert kept_beside(run / "head") == run / "head"  # a head by itself
    (run / "validation.jsonl").touch()
    assert kept_beside(run / "head") == kept_beside(run) == run


def test_a_file_that_is_called_like_a_task_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("shop", "rows.jsonl", "rewards.py"):
        (tmp_path / name).touch()
    assert findable("shop") == "shop"
    assert findable("rows.jsonl") == str(tmp_path / "rows.jsonl")
    assert findable("rewards.py:f") == str(tmp_path / "rewards.py") + ":f"
    assert findable("no.jsonl") == "no.jsonl"
    assert findable("package.module:f") == "package.module:f"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("45", 45), (" 2 m ", 120), (None, None)]
)
def test_durations(text: str | None, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_further_settings_and_layers() -> None:
    assert further(["learning_rate=0.01", "baseline=batch", "qualities=(0.5, 0.2)"]) == {
        "learning_rate": 0.01,
        "baseline": "batch",
        "qualities": (0.5, 0.2),
    }
    assert parse_layers("0,1,28") == (0, 1, 28)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--task", "humaneval", "--output-dir", "run"], "humaneval"),
        (["train", "--objective", "ppo"], "objective='ppo'"),
        (["train", "--temperature", "0"], "temperature=0"),
        (["train", "--budget", "soon"], "budget='soon'"),
        (["train", "--set", "rate=3"], "--set 'rate=3'"),
        (["train", "--set", "steps=3"], "--set 'steps=3'"),  # has an option
        (["train", "--set", "normalise=7"], "normalise=7"),
        (["train", "--task", "no.jsonl"], "no.jsonl"),
        (["train", "--reward", "no_such_file.py:f"], "no_such_file.py"),
        (["train", "--no-hidden"], "hidden=False must be true where features is false"),
        (["eval", "nowhere"], "run='nowhere'"),
        (["distill", "--layers", "0,x"], "layers='0,x'"),
        (["distill", "--layers", "0,99", "--train-n", "2"], "layers"),
        (["distill", "--draft", "somewhere"], "target is missing"),
        (["distill", "--text", "found"], "text"),
    ],
)
def test_bad_input_is_one_line_that_names_the_argument(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    said = refused(*arguments)
    *_, error = said.strip().splitlines()  # a progress bar may stand before it
    assert error.startswith("diversed: error: ")
    assert message in error
    assert "Traceback" not in said
