"""Commands that train: train (a head), distill (a draft)."""

from __future__ import annotations

import ast
import inspect
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TextColumn

from diversed.cli.options import (
    TASK_HELP,
    DataOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    check_dtype,
    console,
    has_chat_template,
    load_pair,
    progress_bar,
    this_process_gpu,
)

FIGURES = TextColumn("{task.fields[figures]}")  # of the last step, behind a progress bar
ResumeOption = Annotated[bool, typer.Option(help="Go on with the run in --output-dir, as if never interrupted.")]


def train(
    target: TargetOption = None,
    draft: DraftOption = None,
    task: Annotated[str, typer.Option(help=TASK_HELP)] = "shop",
    objective: Annotated[
        str,
        typer.Option(
            help="montecarlo (every token of a rollout is a label), counterfactual (finish rejected tokens both ways), "
            "reinforce++ (the paper's; at one --price), constrained (a floor under the reward)."
        ),
    ] = "montecarlo",
    output_dir: Annotated[Path, typer.Option(help="The run's folder: head, checkpoints, curves, log.")] = Path(
        "runs/train"
    ),
    reward: Annotated[
        str | None, typer.Option(help="Your own reward, f(prompts, completions, **columns): file.py:f or module:f.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Share of the target's reward that may be lost.")] = 0.01,
    price: Annotated[
        float | None, typer.Option(help="What one accepted token is worth in reward; found by itself if not given.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Batches of rollouts.")] = 40,
    prompts_per_step: Annotated[int, typer.Option(help="Prompts per batch of rollouts.")] = 64,
    samples_per_prompt: Annotated[int, typer.Option(help="Rollouts per prompt.")] = 1,
    num_speculative_tokens: Annotated[int, typer.Option("--num-speculative-tokens", "-N", help="Of the rollouts.")] = 5,
    temperature: Annotated[float, typer.Option(help="Of the rollouts; above 0.")] = 1.0,
    batch_size: Annotated[int, typer.Option(help="Sequences generated at a time.")] = 64,
    mlp_size: Annotated[int, typer.Option(help="Units of a hidden layer; 0: the linear head.")] = 0,
    features: Annotated[bool, typer.Option(help="Let the head see entropies, TV and the like as well.")] = False,
    hidden: Annotated[bool, typer.Option(help="Let the head see the hidden states.")] = True,
    validate_every: Annotated[int, typer.Option(help="Steps between validations.")] = 10,
    validation_n: Annotated[int, typer.Option(help="Validation prompts.")] = 200,
    patience: Annotated[int, typer.Option(help="Validations without a better head before it ends; 0: never.")] = 0,
    more: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any further setting of TrainSettings, NAME=VALUE: --set learning_rate=0.01."),
    ] = None,
    train_n: Annotated[int | None, typer.Option(help="Train on the first so many prompts only.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Stop in time with the best head so far: 90s, 30m, 2h. Everything counts: loading, the target's "
            "baseline on the validation prompts, steps, validations. The baseline, one step and one validation (every "
            "prompt at every dial setting) are the least a run takes; a smaller --validation-n makes that less."
        ),
    ] = None,
    resume: ResumeOption = False,
    trackers: Annotated[str | None, typer.Option(help="tensorboard, trackio, wandb, ... through accelerate.")] = None,
    data_dir: DataOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Decides prompts, their order and every draw.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Train a head for your pair and task. Without --target and --draft: the embedded pair.

    Each step draws rollouts with the engine, scores them with the task's reward and improves the head; every few steps
    the head is measured along its dial on validation prompts, and the best point is kept in OUTPUT_DIR/head.

      diversed train --task tally --budget 5m --output-dir runs/tally
      diversed eval runs/tally --n 500

      diversed train --target big/ --draft small/ --task my_task.py --objective montecarlo --features --no-hidden
    """
    began = time.perf_counter()
    from diversed.evaluation.show import write_json
    from diversed.tasks import load_task
    from diversed.training.run_folder import read_rows
    from diversed.training.settings import TrainSettings

    try:
        from diversed.training.trainer import train as run
    except ImportError as error:
        raise ValueError(f"training needs the extra 'train' ({error}): pip install 'diversed[train]'") from error

    settings = TrainSettings(
        objective=objective,  # type: ignore[arg-type]
        tolerance=tolerance,
        price=price,
        steps=steps,
        prompts_per_step=prompts_per_step,
        samples_per_prompt=samples_per_prompt,
        num_speculative_tokens=num_speculative_tokens,
        temperature=temperature,
        batch_size=batch_size,
        mlp_size=mlp_size,
        features=features,
        hidden=hidden,
        validate_every=validate_every,
        validation_n=validation_n,
        patience=patience,
        seed=seed,
        **further(more or []),
    )
    seconds = parse_duration(budget)
    task, reward = findable(task), None if reward is None else findable(reward)
    pair = load_pair(target, draft, dtype, device)
    known: dict[str, Any] = {"data_dir": data_dir, "seed": seed, "chat": has_chat_template(pair), "reward": reward}
    train_task = load_task(task, split="train", n=train_n, **known)
    validation = load_task(task, split="validation", **known)
    validation = replace(validation, examples=validation.examples[:validation_n])
    with progress_bar(FIGURES, transient=False) as bar:
        job = bar.add_task("training", total=steps, figures="")

        def show(step: int, row: dict[str, Any]) -> None:
            bar.update(job, completed=step, figures=step_figures(row))

        result = run(
            pair,
            train_task,
            validation,
            settings,
            output_dir,
            resume=resume,
            budget=left_of(seconds, began),
            trackers=trackers,
            source={"task": task, "reward": reward},
            progress=show,
        )
    best = result.best
    console.print(
        f"{result.steps} steps (ended by {result.stopped}); best head: {train_task.score_name} {best['score']:.3f} "
        f"against {best['target_score']:.3f} lossless, acceptance per position {best['position_acceptance']:.3f} "
        f"(validation, n = {best['n']})"
    )
    if best["reward"] < result.floor:
        console.print(
            f"no point of the dial met the tolerance: the best head's reward {best['reward']:.3f} is "
            f"{result.floor - best['reward']:.2g} below the {result.floor:.3f} that --tolerance {tolerance:g} asks "
            "for. Try more --steps, another --objective, or a larger --tolerance.",
            style="yellow",
            soft_wrap=True,
        )
    took = time.perf_counter() - began
    if seconds is not None and result.stopped == "budget" and took > 1.1 * seconds:
        console.print(
            f"the budget of {seconds:g} s became {took:.0f} s: the baseline, one step and one validation are the "
            f"least a run takes. Lower --validation-n ({validation_n}) or --prompts-per-step ({prompts_per_step}).",
            soft_wrap=True,
        )
    console.print(f"head: {result.folder / 'head'}   next: diversed eval {result.folder}")
    if json_file is not None:
        write_json(read_rows(result.folder / "validation.jsonl"), json_file)


def findable(name: str) -> str:
    """A file's name made whole, so that it is found from another folder as well; any other name as it is."""
    from diversed.tasks.own import is_file_task

    file, colon, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    known = bool(colon) or is_file_task(name)  # a file that is called like a task does not hide the task
    return str(Path(file).resolve()) + colon + function if known and Path(file).is_file() else name


def further(pairs: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` for settings that have no option of their own."""
    from diversed.training.settings import SETTING_NAMES

    known = sorted(set(SETTING_NAMES) - inspect.signature(train).parameters.keys())
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in known:
            raise ValueError(f"--set {pair!r}: write NAME=VALUE with a name of {', '.join(known)}")
        try:
            found[name] = ast.literal_eval({"true": "True", "false": "False"}.get(value.lower(), value))
        except (ValueError, SyntaxError):
            found[name] = value
        if name == "qualities" and isinstance(found[name], float):
            found[name] = (found[name],)
    return found


def parse_duration(text: str | None) -> float | None:
    """``90s``, ``30m``, ``1.5h`` or a number of seconds, in seconds."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(found.group(1)) * {"": 1, "s": 1, "m": 60, "h": 3600}[found.group(2)] if found else 0.0
    if seconds <= 0:
        raise ValueError(f"budget={text!r} is no length of time: write 90s, 30m or 2h")
    return seconds


def left_of(budget: float | None, began: float) -> float | None:
    """What is left of a budget that began at that time."""
    return None if budget is None else max(1e-3, budget - (time.perf_counter() - began))


def step_figures(row: dict[str, Any]) -> str:
    """The figures of a step worth watching, in a line."""
    names = {
        "reward": "reward {:.3f}",
        "acceptance": "acc {:.3f}",
        "weight": "w {:.2f}",
        "multiplier": "mult {:.3g}",
        "mean_label_in_batch": "label {:.3f}",
        "explained": "R2 {:.2f}",
        "tokens_per_second": "{:.0f} tok/s",
    }
    parts = [form.format(row[name]) for name, form in names.items() if row.get(name) is not None]
    if row.get("best"):
        parts.append(f"best {row['best']['score']:.3f}@{row['best']['position_acceptance']:.3f}")
    return "  ".join(parts)


def distill(
    target: TargetOption = None,
    draft: Annotated[str | None, typer.Option(help="A draft to improve; without one, a shallow student.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Of the target, for the student: 0,1,28,29. Default: first and last two.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help=f"Repeat for several. {TASK_HELP}")] = None,
    text: Annotated[
        str, typer.Option(help="What is learned from: target (sampled from it), given (references), mixed.")
    ] = "target",
    output_dir: Annotated[Path, typer.Option(help="The draft goes to OUTPUT_DIR/draft.")] = Path("runs/distill"),
    lora_rank: Annotated[int, typer.Option(help="LoRA of this rank (needs peft), merged at the end; 0: full.")] = 0,
    samples_per_prompt: Annotated[int, typer.Option(help="Texts sampled from the target per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="Of the sampled text.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    learning_rate: Annotated[
        float, typer.Option(help="1e-3 suits a shallow student; 1e-5 to 1e-4 a draft that is good already.")
    ] = 1e-3,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 512,
    prompt_weight: Annotated[
        float, typer.Option(help="Of a prompt's token in the loss, where a completion's has 1; 0 saves much time.")
    ] = 0.3,
    tv_from: Annotated[
        float, typer.Option(help="Share of the run after which the loss is KL + 2 TV; 0 for a good draft.")
    ] = 0.5,
    train_n: Annotated[int | None, typer.Option(help="The first so many prompts of each task only.")] = None,
    held_out_n: Annotated[int, typer.Option(help="Validation prompts of each task for the measure; 0: none.")] = 50,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Stop in time with the draft so far: 90s, 30m, 2h. Everything counts: loading, sampling, measuring."
        ),
    ] = None,
    resume: ResumeOption = False,
    data_dir: DataOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Decides the text, its order and every draw.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Make a draft for a target, or improve one on your tasks.

    Without --draft the student is made of a few of the target's own layers and shares its embeddings: what users of
    a model without a small sibling need. It learns to predict what the target predicts (forward KL, then KL + 2 TV), on
    text that the target wrote. The measure is the mean of 1 - TV(p, q) on held-out text: the acceptance that lossless
    verification would have.

      diversed distill --target big/ --task cnndm --task xsum --layers 0,1,28,29 --budget 1h --output-dir runs/draft
      diversed bench --target big/ --draft runs/draft/draft --task cnndm
    """
    began = time.perf_counter()
    from diversed.evaluation.show import write_json
    from diversed.pairs import TARGET
    from diversed.tasks import load_task
    from diversed.training.distillation import DistillSettings
    from diversed.training.distillation import distill as run

    if target is None:
        if draft is not None:
            raise ValueError(
                "target is missing: with --draft give --target as well, or neither for a student of the embedded target"
            )
        target = str(TARGET)
    settings = DistillSettings(
        layers=parse_layers(layers),
        lora_rank=lora_rank,
        text=text,  # type: ignore[arg-type]
        samples_per_prompt=samples_per_prompt,
        temperature=temperature,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        max_prompt_tokens=max_prompt_tokens,
        prompt_weight=prompt_weight,
        tv_from=tv_from,
        seed=seed,
    )
    seconds = parse_duration(budget)
    pair = load_pair(target, draft, dtype, device, packed=False) if draft else load_alone(target, dtype, device)
    prompts: list[Any] = []
    held_out: list[Any] = []
    references: list[str | None] = []
    longest = 0
    stops: dict[tuple[str, ...], str] = {}
    for name in task or ["shop"]:
        known: dict[str, Any] = {"data_dir": data_dir, "seed": seed, "chat": has_chat_template(pair), "judged": False}
        chosen = load_task(name, split="train", n=train_n, **known)
        prompts += [e.prompt for e in chosen.examples]
        references += [e.completion for e in chosen.examples]
        longest = max(longest, chosen.max_new_tokens)
        stops.setdefault(chosen.stop_strings, name)
        if held_out_n:
            held = load_task(name, split="validation", **known).examples
            held_out += [e.prompt for e in held[:held_out_n]]
    if len(stops) > 1:
        raise ValueError(
            f"task: the answers of {' and '.join(stops.values())} end at different stop strings; distil on one after "
            "the other, the second time with --draft"
        )
    settings = replace(settings, max_new_tokens=longest, stop_strings=next(iter(stops)))
    with progress_bar(FIGURES, transient=False) as bar:
        job = bar.add_task("distilling", total=steps, figures="")

        def show(step: int, total: int, row: dict[str, Any]) -> None:
            bar.update(job, description=str(row.get("phase", "training")), completed=step, total=total,
                       figures=distill_figures(row))  # fmt: skip

        result = run(
            pair.target,
            None if draft is None else pair.draft,
            pair.tokenizer,
            prompts,
            replace(settings, budget_seconds=left_of(seconds, began)),
            output_dir,
            given=references if text != "target" else None,
            held_out_prompts=held_out,
            resume=resume,
            progress=show,
        )
    if result.before and result.after:
        console.print(
            f"acceptance per position, lossless (mean 1 - TV, {result.after.sequences} held-out texts): "
            f"{result.before.mean:.3f} before, {result.after.mean:.3f} after"
        )
    console.print(
        f"{result.steps} steps (ended by {result.stopped}) in {result.seconds:.0f} s, "
        f"{result.tokens_per_second:.0f} tokens/s; draft: {result.folder}"
    )
    if json_file is not None:
        write_json([json.loads((output_dir / "result.json").read_text(encoding="utf-8"))], json_file)


def load_alone(target: str, dtype: str, device: str | None) -> Any:
    """A target as its own draft, in memory once: what a shallow student is made of."""
    from diversed.engine import ModelPair
    from diversed.engine.pair import load_model, load_tokenizer

    kind = check_dtype(dtype)
    model = load_model(target, "target", dtype=kind, device_map=device or this_process_gpu())
    return ModelPair(model, model, load_tokenizer(target, "target"), target_name=target, draft_name=target)


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"layers={text!r} must be numbers with commas between, say 0,1,28,29") from error


def distill_figures(row: dict[str, Any]) -> str:
    names = {"kl": "KL {:.3f}", "acceptance": "1-TV {:.3f}", "held_out_acceptance": "1-TV {:.3f}"}
    return "  ".join(form.format(row[name]) for name, form in names.items() if isinstance(row.get(name), float))
