"""Runs: resumed bit for bit, stopped in time, refused with reason, intact whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from safetensors import SafetensorError
from safetensors.torch import load_file

from diversed import LearnedEnsemble, generate
from diversed.folders import sole_writer
from diversed.training import run_folder
from diversed.training.rollouts import Rollouts
from diversed.training.run_folder import commit, read_rows
from diversed.training.settings import OBJECTIVES, TrainSettings
from diversed.training.trainer import draws, train
from diversed.verifiers import EnsembleHead
from training.toy import rewards, toy_pair, toy_settings, toy_task

STEPS = {"steps": 6, "prompts_per_step": 8, "validate_every": 2, "validation_n": 8, "fit_every": 2}


def run(folder: Path, objective: str = "reinforce++", reward=rewards, resume: bool = False, progress=None, **changes):
    settings = toy_settings(objective, **(STEPS | changes))
    return train(
        toy_pair(),
        toy_task(reward=reward),
        toy_task("validation", n=8),
        settings,
        folder,
        resume=resume,
        progress=progress or (lambda step, row: None),
    )


def numbers(folder: Path) -> tuple[list[dict], list[dict], dict[str, torch.Tensor]]:
    """What a run came to, wall time left out."""
    timed = ("seconds", "rollout_seconds", "tokens_per_second")
    steps = [{k: v for k, v in row.items() if k not in timed} for row in read_rows(folder / "metrics.jsonl")]
    weights = load_file(folder / "checkpoint" / "head.safetensors") | {
        f"best {k}": v for k, v in load_file(folder / "head" / "model.safetensors").items()
    }
    return steps, read_rows(folder / "validation.jsonl"), weights


def assert_same(a: Path, b: Path) -> None:
    (steps_a, checks_a, weights_a), (steps_b, checks_b, weights_b) = numbers(a), numbers(b)
    assert steps_a == steps_b
    assert checks_a == checks_b
    assert all(torch.equal(weights_a[k], weights_b[k]) for k in weights_a)


KILLED = """
    import os, signal, sys
    import torch
    torch.set_num_threads(1)
    from pathlib import Path
    from training.test_trainer import run
    from diversed.training import trainer

    where, at = sys.argv[3], int(sys.argv[4])
    if where == "after a step":
        def progress(step, row):
            if step == at:
                os.kill(os.getpid(), signal.SIGKILL)
    else:  # with the step's rollouts on disk and nothing learned from them
        progress = None
        keep = trainer.keep_batch
        def keep_and_die(path, batch):
            keep(path, batch)
            if path.stem == f"{at:05d}":
                os.kill(os.getpid(), signal.SIGKILL)
        trainer.keep_batch = keep_and_die
    run(Path(sys.argv[1]), sys.argv[2], progress=progress)
"""


@pytest.mark.parametrize("where", ["after a step", "inside a step"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_killed_in_the_middle_resumes_to_the_same_bits(objective: str, where: str, tmp_path: Path) -> None:
    run(tmp_path / "whole", objective)
    script = textwrap.dedent(KILLED)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "killed"), objective, where, "3"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(read_rows(tmp_path / "killed" / "metrics.jsonl")) == 3
    run(tmp_path / "killed", objective, resume=True)
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_a_finished_run_resumes_to_itself(tmp_path: Path) -> None:
    run(tmp_path / "a")
    before = numbers(tmp_path / "a")[2]
    result = run(tmp_path / "a", resume=True)
    assert result.steps == 6
    after = numbers(tmp_path / "a")[2]
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("objective", ["counterfactual", "reinforce++"])
def test_a_head_with_a_hidden_layer_resumes_to_the_same_bits(objective: str, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(step, row):
        if step == 3:
            raise StopError

    run(tmp_path / "whole", objective, mlp_size=4)
    with pytest.raises(StopError):
        run(tmp_path / "cut", objective, mlp_size=4, progress=stop)
    run(tmp_path / "cut", objective, mlp_size=4, resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(("objective", "mlp_size"), [("reinforce++", 0), ("reinforce++", 4), ("montecarlo", 4)])
def test_the_seed_decides_everything(objective: str, mlp_size: int, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(1)  # what else draws in the process changes nothing
        run(tmp_path / name, objective, seed=seed, mlp_size=mlp_size)
    assert_same(tmp_path / "a", tmp_path / "b")
    assert numbers(tmp_path / "a")[0] != numbers(tmp_path / "c")[0]


def test_the_folder_holds_what_is_needed_to_judge_and_use_the_head(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "counterfactual")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["run"]["objective"] == "counterfactual"
    assert config["run"]["seed"] == 0
    assert {"diversed", "torch", "transformers", "commit"} <= config["versions"].keys()
    assert (tmp_path / "run" / "curves.png").stat().st_size > 1000
    card = (tmp_path / "run" / "head" / "README.md").read_text()
    for word in ("counterfactual", "toy", "acceptance per position", "lossless, score"):
        assert word in card
    verifier = LearnedEnsemble.from_pretrained(tmp_path / "run" / "head")
    assert verifier.head.task == "toy"
    assert generate(toy_pair(), ["s"], verifier=verifier, max_new_tokens=4, seed=0).stats.tokens == 4
    assert result.best in read_rows(tmp_path / "run" / "validation.jsonl")


def test_quality_one_half_of_the_saved_head_is_the_point_that_validation_chose(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "counterfactual", steps=2, qualities=(0.9, 0.5, 0.02), tolerance=0.9)
    state = load_file(tmp_path / "run" / "checkpoint" / "head.safetensors")
    quality = result.best["quality"]
    assert quality == 0.02  # with this tolerance, the most permissive
    assert result.best["reward"] >= result.floor
    moved = float(result.head.out.bias - state["out.bias"])
    assert moved == pytest.approx(float(torch.logit(torch.tensor(quality))), abs=1e-5)


def test_every_epoch_visits_every_prompt_once_in_a_new_order(tmp_path: Path) -> None:
    class Stub:
        settings = TrainSettings(prompts_per_step=8, samples_per_prompt=2)
        train = toy_task(n=32)

    rows = [[e.columns["row"] for e in draws(Stub(), step).examples] for step in range(8)]
    assert all(row[::2] == row[1::2] for row in rows)
    first, second = ([i for row in half for i in row[::2]] for half in (rows[:4], rows[4:]))
    assert sorted(first) == sorted(second) == list(range(32))
    assert first != second
    seeds = [s for step in range(8) for s in draws(Stub(), step).seeds]
    assert len({s % (1 << 32) for s in seeds}) == len(seeds)  # torch's generator looks at 32 bits


def test_other_data_is_another_run(tmp_path: Path) -> None:
    run(tmp_path / "run", steps=1)
    settings = toy_settings("reinforce++", **(STEPS | {"steps": 1}))
    pair, task, validation = toy_pair(), toy_task(), toy_task("validation", n=8)
    with pytest.raises(ValueError, match=r"another run .*validation: '8 examples"):
        train(pair, task, toy_task("validation", n=7), settings, tmp_path / "run", resume=True)
    first = task.examples[0]
    corrected = [replace(first, columns=dict(first.columns) | {"answer": "another"}), *task.examples[1:]]
    with pytest.raises(ValueError, match=r"another run .*train: "):
        train(pair, replace(task, examples=corrected), validation, settings, tmp_path / "run", resume=True)

    def other_reward(prompts, completions, **columns):
        return rewards(prompts, completions)

    with pytest.raises(ValueError, match=r"another run .*reward: 'rewards' there, 'other_reward' now"):
        train(pair, replace(task, reward=other_reward), validation, settings, tmp_path / "run", resume=True)
    for change in ({"stop_strings": ("y",)}, {"partial_reward": True}, {"score": other_reward}):
        with pytest.raises(ValueError, match=f"another run .*{next(iter(change))}: "):
            train(pair, replace(task, **change), validation, settings, tmp_path / "run", resume=True)
    with torch.no_grad():
        next(pair.draft.parameters()).add_(0.5)  # improved since, under the same name
    with pytest.raises(ValueError, match=r"another run \(draft_weights: "):
        train(pair, task, validation, settings, tmp_path / "run", resume=True)


@pytest.mark.parametrize(("split", "row"), [("train", 30), ("validation", 7)])
def test_a_prompt_that_the_engine_would_refuse_ends_no_run_midway(split: str, row: int, tmp_path: Path) -> None:
    pair = toy_pair()
    tasks = {s: toy_task(s, n=n) for s, n in (("train", 32), ("validation", 8))}
    tasks[split].examples[row] = replace(tasks[split].examples[row], prompt="s" * pair.context)
    with pytest.raises(ValueError, match=rf"task='toy', {split} split, row {row}: .*context holds"):
        train(pair, tasks["train"], tasks["validation"], toy_settings("reinforce++", **STEPS), tmp_path / "run")
    assert not (tmp_path / "run" / "batches").exists()


def test_the_commit_is_this_projects_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed inside somebody's repository, it does not take their commit for its own."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / "installed.py").touch()
    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / "installed.py"))
    assert commit() is None
    subprocess.run(["git", "-C", str(tmp_path), "add", "installed.py"], check=True)
    head = subprocess.check_output(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], text=True)
    assert commit() == head.strip()


def test_a_target_that_earns_nothing_is_refused(tmp_path: Path) -> None:
    def nothing(prompts, completions, **columns):
        return [0.0] * len(prompts)

    task = toy_task("validation", n=8, reward=nothing)
    with pytest.raises(ValueError, match="reward: the target earns 0"):
        train(toy_pair(), toy_task(reward=nothing), task, toy_settings("constrained", **STEPS), tmp_path / "run")


def test_a_tracker_gets_the_settings_and_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = toy_settings("reinforce++", **(STEPS | {"steps": 3}))
    train(toy_pair(), toy_task(), toy_task("validation", n=8), settings, tmp_path / "run", trackers="tensorboard")
    (events,) = (tmp_path / "run" / "diversed").glob("events*")
    log = EventAccumulator(str(events)).Reload()
    assert [e.step for e in log.Scalars("reward")] == [1, 2, 3]
    assert log.Scalars("price")[0].value == pytest.approx(read_rows(tmp_path / "run" / "metrics.jsonl")[0]["price"])


def test_patience_ends_a_run_that_no_longer_improves(tmp_path: Path) -> None:
    result = run(tmp_path / "run", steps=50, patience=2, learning_rate=1e-9)
    assert result.stopped == "patience"
    assert result.steps <= 8


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", steps=1)
    with pytest.raises(ValueError, match="add --resume"):
        run(tmp_path / "run", steps=1)
    with pytest.raises(ValueError, match=r"another run .*seed: 0 there, 5 now"):
        run(tmp_path / "run", steps=1, seed=5, resume=True)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="not empty and holds no run"):
        run(tmp_path / "papers")
    assert [f.name for f in (tmp_path / "papers").iterdir()] == ["thesis.tex"]


def test_a_folder_that_another_run_writes_to_is_refused_and_left_alone(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "run"), pytest.raises(ValueError, match="being written to by another run"):
        run(tmp_path / "run", steps=1)
    run(tmp_path / "run", steps=1)  # what the other left, its lock, is in nobody's way
    before = numbers(tmp_path / "run")[0]
    with sole_writer(tmp_path / "run"), pytest.raises(ValueError, match="being written to by another run"):
        run(tmp_path / "run", steps=1, resume=True)
    assert numbers(tmp_path / "run")[0] == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="cannot be written"):
        run(tmp_path / "run")


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match=r"output_dir.*cannot be written"):
        run(tmp_path / "run")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda n: [0.5] * (n + 1), "17|9"),
        (lambda n: [float("nan")] * n, "nan|NaN"),
        (lambda n: ["good"] * n, "good|number"),
        (lambda n: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_bad_reward_is_one_clear_error_and_the_run_can_go_on(fault, message: str, tmp_path: Path) -> None:
    calls = {"n": 0}

    def broken(prompts, completions, **columns):
        calls["n"] += 1
        return fault(len(completions)) if calls["n"] == 5 else rewards(prompts, completions)

    broken.__name__ = rewards.__name__  # the same function, to be mended
    with pytest.raises(ValueError, match=f"(?s)rewards.*({message})"):
        run(tmp_path / "run", reward=broken)
    assert 0 < len(read_rows(tmp_path / "run" / "metrics.jsonl")) < 6
    run(tmp_path / "run", resume=True)
    run(tmp_path / "whole")
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_full_disk_is_one_clear_error_and_the_run_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, path: Path) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as disk:
        disk.setattr(Rollouts, "save", full)
        with pytest.raises(ValueError, match=r"output_dir: cannot write .*No space left .*go on with --resume"):
            run(tmp_path / "run")
    run(tmp_path / "run", resume=True)
    run(tmp_path / "whole")
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("file", ["config.json", "target.json", "head", "curves.png"])
def test_a_disk_that_is_full_at_any_file_leaves_a_run_that_can_go_on(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    write = Path.write_text

    def full_at(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name.startswith(file):
            path.touch()
            full()
        return write(path, *args, **kwargs)

    with monkeypatch.context() as disk:
        if file == "head":
            disk.setattr(EnsembleHead, "save_pretrained", full)
        elif file == "curves.png":
            disk.setattr(Figure, "savefig", full)
        else:
            disk.setattr(Path, "write_text", full_at)
        with pytest.raises(ValueError, match=rf"output_dir: cannot write .*{file}.*No space left .*--resume"):
            run(tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.json.new"))
    run(tmp_path / "run", resume=True)
    run(tmp_path / "whole")
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    def stop(step, row):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", "counterfactual", progress=stop)
    (tmp_path / "run" / "batches" / "00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"00001\.safetensors"):
        run(tmp_path / "run", "counterfactual", resume=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("objective", "ppo"),
        ("baseline", "critic"),
        ("steps", 0),
        ("prompts_per_step", 1.5),
        ("temperature", 0.0),  # greedy rollouts explore nothing
        ("tau", 0.0),
        ("initial_weight", 1.0),
        ("warm_share", 2.0),
        ("qualities", ()),
        ("qualities", (0.5, 1.0)),
        ("price", float("nan")),
        ("tolerance", -0.1),
        ("qualities", 0.5),
        ("normalise", "false"),
        ("warm_share", "half"),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        TrainSettings(**{name: value})


def test_several_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    run(tmp_path / "one", steps=3)
    script = tmp_path / "two.py"
    script.write_text(
        "import sys, torch\ntorch.set_num_threads(1)\nfrom pathlib import Path\n"
        "from training.test_trainer import run\nrun(Path(sys.argv[1]), steps=3)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    done = subprocess.run(
        [
            *launch,
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            "0",
            str(script),
            str(tmp_path / "two"),
        ],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (_, _, a), (_, _, b) = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
