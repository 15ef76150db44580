"""Every training objective on the embedded pair: train heads, measure them on untouched problems, print the table.

    python benchmarks/heads.py train OUT      # start it as often as there are cores to spare: jobs are shared
    python benchmarks/heads.py table OUT      # docs/results.md, "Objectives"; also OUT/rows.json

A head's settings are chosen on 400 validation problems (highest acceptance within 0.5 % of the target's accuracy), its
figures come from 2,000 test problems that nothing was chosen on, compared with target-only decoding and with the static
curve problem by problem. T = 1, N = 5; bf16 where the processor multiplies in it. A job takes two to
eight minutes on one core.
"""

from __future__ import annotations

import fcntl
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diversed.engine import ModelPair
from diversed.engine.packing import multiplies_bf16
from diversed.evaluation.compare import Measured, Scores, at_acceptance, by_setting, paired_difference
from diversed.evaluation.settings import Setting
from diversed.evaluation.show import write_json
from diversed.evaluation.statistics import Interval, mean_interval
from diversed.evaluation.sweep import Plan, read_measurements, sweep
from diversed.tasks import Task, load_task
from diversed.training.run_folder import read_rows
from diversed.training.settings import TrainSettings
from diversed.training.trainer import train

FAMILIES = ("shop", "tally")
SEEDS = (0, 1, 2)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "montecarlo": {"steps": 24, "fit_every": 6, "validate_every": 12},
    "counterfactual": {"steps": 6, "fit_every": 3, "validate_every": 3},
    "reinforce++": {"steps": 40, "validate_every": 20},
    "constrained": {"steps": 50, "validate_every": 25},
}
COMMON: dict[str, Any] = {"batch_size": 128, "validation_n": 400, "qualities": (0.8, 0.5, 0.2), "tolerance": 0.005}
TARGET = Setting("target-only", None, 0)
RIVALS = [Setting("lossless"), *(Setting(f"static:{w}") for w in ("0.8", "0.5", "0.2", "0.1", "0"))]
CONTROLS = [Setting("entropy:0.7")]
PLAN = {"batch_size": 250, "timing_n": 0, "seed": 77}

Job = tuple[str, str, int, int]  # family, objective (or "rivals"), units of the head's hidden layer, seed


def jobs() -> list[Job]:
    heads = [(f, o, mlp, s) for mlp in (0, 32) for s in SEEDS for o in OBJECTIVES for f in FAMILIES]
    return [(f, "rivals", 0, 0) for f in FAMILIES] + heads


def name_of(job: Job) -> str:
    return "-".join(map(str, job))


def test_problems(family: str) -> Task:
    return load_task(family, split="test", n=2000, seed=77)


def run(job: Job, out: Path, pair: ModelPair) -> None:
    family, objective, mlp, seed = job
    folder = out / name_of(job)
    if objective == "rivals":
        settings = [TARGET, *RIVALS, *CONTROLS]
    else:
        chosen = TrainSettings(objective=objective, mlp_size=mlp, seed=seed, **COMMON, **OBJECTIVES[objective])  # type: ignore[arg-type]
        training = load_task(family, split="train", seed=1000 + seed)
        validation = load_task(family, split="validation", n=chosen.validation_n, seed=5)
        train(pair, training, validation, chosen, folder, resume=True)
        settings = [Setting(str(folder / "head"), 0.5)]
    plan = Plan(tuple(settings), **PLAN)
    sweep(pair, test_problems(family), plan, path=out / f"{name_of(job)}.jsonl")
    (out / f"{name_of(job)}.done").touch()


def work(out: Path) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    pair = ModelPair.embedded(dtype=torch.bfloat16 if multiplies_bf16(torch.device("cpu")) else torch.float32)
    for job in jobs():
        with (out / f"{name_of(job)}.lock").open("w") as lock:  # goes with its process
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if (out / f"{name_of(job)}.done").exists():
                continue
            began = time.perf_counter()
            run(job, out, pair)
            print(f"{name_of(job)}: {time.perf_counter() - began:.0f} s", flush=True)


def measured(out: Path, job: Job) -> dict[Setting, Measured]:
    return by_setting(read_measurements(out / f"{name_of(job)}.jsonl").measurements, kind="scored")


def plus_minus(value: float, interval: Interval | None, form: str = ".4f") -> str:
    half = "" if interval is None else f" ± {(interval[1] - interval[0]) / 2:.4f}"
    return f"{value:{form}}{half}"


def row(job: Job, scores: Scores, m: Measured, target: Scores, curve: list[Measured], **more: Any) -> dict[str, Any]:
    assert m.acceptance is not None
    score, score_ci = mean_interval(scores.tolist())
    over, over_ci = paired_difference(scores, target)
    static = at_acceptance(curve, m.acceptance) if job[1] != "rivals" or m.setting in CONTROLS else None
    gain, gain_ci = (None, None) if static is None else paired_difference(scores, static)
    return {
        "task": job[0], "objective": job[1], "verifier": m.setting.verifier, "mlp_size": job[2], "seed": job[3],
        "n": len(scores), "score": score, "score_ci": score_ci, "position_acceptance": m.acceptance,
        "position_acceptance_ci": m.acceptance_ci, "over_target": over, "over_target_ci": over_ci,
        "over_static": gain, "over_static_ci": gain_ci, **more,
    }  # fmt: skip


def table(out: Path) -> None:
    rows: list[dict[str, Any]] = []
    for family in FAMILIES:
        first = (family, "rivals", 0, 0)
        rivals = measured(out, first)
        target, curve = rivals[TARGET].scores, [rivals[s] for s in RIVALS]
        print(f"\n`{family}`: target-only {plus_minus(*mean_interval(target.tolist()))} (n = {len(target)})\n")
        print("| verifier | head | seed | accuracy | acceptance per position | over target | over static "
              "| training | ÷ rollouts |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |")  # fmt: skip
        for setting in (*RIVALS, *CONTROLS):
            rows.append(row(first, rivals[setting].scores, rivals[setting], target, curve))
            print_row(setting.verifier, "–", "–", rows[-1])
        for mlp in (0, 32):
            for objective in OBJECTIVES:
                found = []
                for seed in SEEDS:
                    job = (family, objective, mlp, seed)
                    if not (out / f"{name_of(job)}.done").exists():
                        continue
                    (m,) = measured(out, job).values()
                    steps = read_rows(out / name_of(job) / "metrics.jsonl")
                    seconds, rollouts = (sum(s[k] for s in steps) for k in ("seconds", "rollout_seconds"))
                    rows.append(row(job, m.scores, m, target, curve, seconds=seconds, over_rollouts=seconds / rollouts))
                    print_row(objective, f"MLP {mlp}" if mlp else "linear", str(seed), rows[-1])
                    found.append(m)
                if len(found) > 1:
                    mean = Measured(found[0].setting, np.mean([m.scores for m in found], axis=0),
                                    float(np.mean([m.acceptance for m in found])), None)  # fmt: skip
                    rows.append(row((family, objective, mlp, -1), mean.scores, mean, target, curve))
                    print_row(f"**{objective}**", f"MLP {mlp}" if mlp else "linear", f"mean of {len(found)}", rows[-1])
    write_json(rows, out / "rows.json")


def print_row(verifier: str, head: str, seed: str, r: dict[str, Any]) -> None:
    gain = "–" if r["over_static"] is None else plus_minus(r["over_static"], r["over_static_ci"], "+.3f")
    seconds = f"{r['seconds']:.0f} s | {r['over_rollouts']:.2f}" if "seconds" in r else "– | –"
    print(f"| {verifier} | {head} | {seed} | {plus_minus(r['score'], r['score_ci'])} "
          f"| {plus_minus(r['position_acceptance'], r['position_acceptance_ci'])} "
          f"| {plus_minus(r['over_target'], r['over_target_ci'], '+.4f')} | {gain} | {seconds} |")  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("train", "table"):
        sys.exit(__doc__)
    {"train": work, "table": table}[sys.argv[1]](Path(sys.argv[2]))
