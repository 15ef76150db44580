"""The steps of a distillation run: training, measuring, checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from diversed.engine.packing import multiplies_bf16
from diversed.evaluation.statistics import Interval, ratio_interval
from diversed.training.distillation.loss import (
    Divergences,
    backward_in_chunks,
    chunk_size,
    divergences,
    head_of,
    hidden_states,
)
from diversed.training.distillation.settings import DistillSettings
from diversed.training.distillation.text import Lesson, batch_at, collate, in_batches
from diversed.training.run_folder import append_row, keep_rows_before, writing

LOG_EVERY = 20  # steps: reading a loss waits for the device
TV_WEIGHT = 2.0

Progress = Callable[[int, int, dict[str, Any]], None]


@dataclass(frozen=True)
class Acceptance:
    """Teacher-forced mean of 1 - TV(p, q) at temperature 1 over held-out completions drawn from the target."""

    mean: float
    ci: Interval  #: 95 %, sequences as clusters
    sequences: int
    tokens: int


class Run:
    """What the parts of one call share: models, settings, where to write, and the clock."""

    def __init__(
        self,
        target: PreTrainedModel,
        student: PreTrainedModel,
        settings: DistillSettings,
        out: Path,
        report: Progress,
        started: float,
        dtype: torch.dtype,
    ) -> None:
        self.target, self.student, self.settings, self.out, self.report = target, student, settings, out, report
        self.started, self.dtype, self.budget = started, dtype, settings.budget_seconds
        self.device: torch.device = student.get_input_embeddings().weight.device
        self.heads = head_of(target), head_of(student)
        vocab = max(m.get_output_embeddings().weight.shape[0] for m in (target, student))
        precision = settings.precision
        self.bf16 = precision == "bf16" or (precision == "auto" and multiplies_bf16(self.device))
        self.chunk = chunk_size(vocab, self.device)
        self.divergences: Divergences = torch.compile(divergences, dynamic=True) if settings.compile else divergences
        self.learned = {name: p for name, p in student.named_parameters() if p.requires_grad}
        self.tokens, self.training_seconds, self.measuring_seconds = 0, 0.0, 0.0

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


def train(
    run: Run, lessons: list[Lesson], measured: list[Lesson]
) -> tuple[int, Literal["steps", "budget"], Acceptance | None]:
    """All steps that are left and fit into the budget. Returns steps done, why it stopped, and the measure before."""
    settings = run.settings
    optimizer = make_optimizer(run)
    state = load_checkpoint(run, optimizer)
    step = state["step"]
    before = Acceptance(**state["before"] | {"ci": tuple(state["before"]["ci"])}) if state["before"] else None
    run.measuring_seconds = state["measuring_seconds"]
    if before is None and measured:
        before = measure(run, measured)
        log_held_out(run, 0, before)
    run.tokens, run.training_seconds = state["logged_tokens"], state["logged_seconds"]
    lengths = tuple(map(len, lessons))
    sums, since, tokens = torch.tensor(state["sums"], device=run.device), state["since"], state["tokens"]
    begun = state["share"] if run.budget is not None else 0.0
    began = time.perf_counter()
    mark = began - state["seconds"]  # since when the tokens not yet logged have been learned from
    deadline = math.inf
    if run.budget is not None:  # what follows the last step takes time as well: a measure, and writing the draft
        deadline = run.started + run.budget - 1.3 * run.measuring_seconds - min(5.0, 0.1 * run.budget)
    step_seconds = 0.0
    stopped: Literal["steps", "budget"] = "steps"
    share, saved = state["share"], step

    def save(now: float) -> None:
        place = {"step": step, "share": min(share, 1.0), "sums": sums.tolist(), "since": since, "tokens": tokens}
        place |= {"seconds": now - mark, "logged_tokens": run.tokens, "logged_seconds": run.training_seconds}
        place |= {"before": asdict(before) if before else None, "measuring_seconds": run.measuring_seconds}
        save_checkpoint(run, optimizer, place)

    with deferred_interrupt() as interrupted:
        while step < settings.steps:
            now = time.perf_counter()
            if now + step_seconds >= deadline:
                stopped = "budget"
                break
            # With a budget the schedule follows the clock wherever the clock is ahead of the steps.
            share = step / settings.steps
            if run.budget is not None:
                share = max(share, begun + (1 - begun) * (now - began) / max(deadline - began, 1e-9))
            rate = settings.learning_rate * min(1.0, (step + 1) / max(settings.warmup, 1)) * (0.02 + 0.98 * (1 - share))
            rows = batch_at(step, lengths, settings.batch_size, settings.seed)
            batch = collate([lessons[i] for i in rows], settings.prompt_weight, run.device)
            with run.autocast():
                with torch.no_grad():
                    taught = hidden_states(run.target, batch.ids)
                learned = hidden_states(run.student, batch.ids, float32=True)
            sums += backward_in_chunks(
                taught.flatten(0, 1)[batch.positions.to(taught.device)],
                learned.flatten(0, 1)[batch.positions],
                batch.weights,
                *run.heads,
                total_weight=batch.total_weight,
                tv_weight=TV_WEIGHT if share >= settings.tv_from else 0.0,
                chunk=run.chunk,
                autocast=run.autocast,
                measure=run.divergences,
            )
            torch.nn.utils.clip_grad_norm_(run.learned.values(), settings.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            step, since, tokens = step + 1, since + 1, tokens + batch.tokens
            if step % LOG_EVERY == 0 or step == settings.steps:
                kl, tv = (sums / since).tolist()
                if not math.isfinite(kl + tv):
                    raise FloatingPointError(
                        f"the loss at step {step} is {kl}: lower learning_rate={settings.learning_rate:g}"
                    )
                seconds = time.perf_counter() - mark
                run.tokens, run.training_seconds = run.tokens + tokens, run.training_seconds + seconds
                row = {"step": step, "kl": kl, "acceptance": 1 - tv, "learning_rate": rate, "tokens": tokens}
                log(run, row | {"tokens_per_second": round(tokens / seconds), "seconds": round(run.elapsed, 2)})
                run.report(step, settings.steps, {"phase": "training", **row, "tokens_per_second": tokens / seconds})
                sums, since, tokens, mark = torch.zeros_like(sums), 0, 0, time.perf_counter()
            if measured and step % settings.evaluate_every == 0 and step < settings.steps:
                paused = time.perf_counter()
                log_held_out(run, step, measure(run, measured))
                mark += time.perf_counter() - paused
            step_seconds = time.perf_counter() - now
            if step % settings.checkpoint_every == 0 or interrupted():
                paused = time.perf_counter()
                save(paused)
                saved = step
                mark += time.perf_counter() - paused
            if interrupted():
                raise KeyboardInterrupt
    now = time.perf_counter()
    if saved != step:
        save(now)
    run.tokens, run.training_seconds = run.tokens + tokens, run.training_seconds + now - mark
    return step, stopped, before


@torch.no_grad()
def measure(run: Run, lessons: list[Lesson]) -> Acceptance:
    """Mean 1 - TV(p, q) over the completions' tokens."""
    began = time.perf_counter()
    sums = torch.zeros(len(lessons), device=run.device)
    for part in in_batches(lessons, max(run.settings.batch_size, 32 if run.device.type == "cuda" else 4)):
        batch = collate([lesson for _, lesson in part], 0.0, run.device)
        with run.autocast():
            taught = hidden_states(run.target, batch.ids).flatten(0, 1)[batch.positions.to(run.target.device)]
            learned = hidden_states(run.student, batch.ids, float32=True).flatten(0, 1)[batch.positions]
            rows = torch.tensor([i for i, _ in part], device=run.device)[batch.rows]
            for start in range(0, len(rows), run.chunk):
                cut = slice(start, start + run.chunk)
                _, tv = divergences(run.heads[0](taught[cut]).to(run.device), run.heads[1](learned[cut]))
                sums.index_add_(0, rows[cut], 1.0 - tv)
    counts = [len(lesson.completion) for lesson in lessons]
    mean, ci = ratio_interval(sums.tolist(), counts)
    run.measuring_seconds = time.perf_counter() - began
    return Acceptance(mean, (max(0.0, ci[0]), min(1.0, ci[1])), len(lessons), sum(counts))


def make_optimizer(run: Run) -> torch.optim.AdamW:
    matrices = [p for p in run.learned.values() if p.ndim >= 2]
    vectors = [p for p in run.learned.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": run.settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=run.settings.learning_rate, fused=True)


def save_checkpoint(run: Run, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Learned parameters, optimiser and place in the run. Batches and rates follow from seed and step alone.

    A folder gets its name only once it is whole, and older ones go only then: a kill leaves a good one behind.
    """
    folder = run.out / "checkpoints"
    fresh = folder / "writing"
    final = folder / f"step-{state['step']:07d}"
    older = [f for f in folder.glob("step-*") if f != final]
    with writing(final):
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        save_file({name: p.detach().contiguous() for name, p in run.learned.items()}, fresh / "layers.safetensors")
        torch.save(optimizer.state_dict(), fresh / "optimizer.pt")
        (fresh / "state.json").write_text(json.dumps(state), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(fresh, final)
    for f in older:
        shutil.rmtree(f, ignore_errors=True)


def load_checkpoint(run: Run, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put the last checkpoint into student and optimiser, and drop metrics from after it."""
    folders = sorted((run.out / "checkpoints").glob("step-*"))
    if not folders:
        (run.out / "metrics.jsonl").unlink(missing_ok=True)
        fresh: dict[str, Any] = {"step": 0, "share": 0.0, "sums": [0.0, 0.0], "since": 0, "tokens": 0, "seconds": 0.0}
        return fresh | {"logged_tokens": 0, "logged_seconds": 0.0, "before": None, "measuring_seconds": 0.0}
    with torch.no_grad():
        for name, value in load_file(folders[-1] / "layers.safetensors", device=str(run.device)).items():
            run.learned[name].copy_(value)
    optimizer.load_state_dict(torch.load(folders[-1] / "optimizer.pt", map_location=run.device, weights_only=True))
    state: dict[str, Any] = json.loads((folders[-1] / "state.json").read_text(encoding="utf-8"))
    keep_rows_before(run.out / "metrics.jsonl", state["step"])
    return state


def log(run: Run, row: dict[str, Any]) -> None:
    append_row(run.out / "metrics.jsonl", row)


def log_held_out(run: Run, step: int, acceptance: Acceptance) -> None:
    row = {"step": step, "held_out_acceptance": acceptance.mean, "held_out_ci": acceptance.ci}
    row |= {"n": acceptance.sequences, "held_out_tokens": acceptance.tokens, "seconds": round(run.elapsed, 2)}
    log(run, row)
    run.report(step, run.settings.steps, {"phase": "held-out", **row})


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C only be noticed, so that a step ends before its checkpoint; a second one acts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = False

    def notice(signum: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, notice)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
