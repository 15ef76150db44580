"""Make or improve a draft for a target by distillation on a task's prompts.

Lossless acceptance at a position is 1 - TV(p, q), so that is what the loss heads for: forward KL(p||q) first, which
has a gradient wherever the target has mass, then KL + 2 TV (DistillSpec, Zhou et al. 2024, arXiv 2310.08461, compares
the divergences). Learning from text that the target sampled puts the loss where acceptance will be counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from diversed.engine import ModelPair
from diversed.training.distillation.loss import check_head
from diversed.training.distillation.run import Acceptance, Progress, Run, log_held_out, measure, train
from diversed.training.distillation.settings import RESUMABLE, DistillSettings, check_settings
from diversed.training.distillation.student import add_lora, save_draft, student_of
from diversed.training.distillation.text import Lesson, Prompt, encode, given_sequences, sampled_sequences
from diversed.training.run_folder import fingerprint, open_run, read_rows, versions, write_text, writing

__all__ = ["Acceptance", "DistillSettings", "Distilled", "distill"]


@dataclass(frozen=True)
class Distilled:
    draft: PreTrainedModel  #: what lies in ``folder``
    folder: Path
    steps: int
    stopped: Literal["steps", "budget"]
    before: Acceptance | None  #: None without held-out prompts
    after: Acceptance | None
    tokens_per_second: float  #: of training steps, padding not counted
    seconds: float  #: of this call


def distill(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: DistillSettings,
    output_dir: str | Path,
    *,
    given: Sequence[str | None] | None = None,
    held_out_prompts: Sequence[Prompt] = (),
    resume: bool = False,
    progress: Progress | None = None,
) -> Distilled:
    """Train a draft to agree with the target and write it to ``output_dir/draft``.

    Runs on the devices the models are on. The target stays as it is, and so does the ``draft`` passed in: a copy
    learns.

    Args:
        draft: to start from; None makes a shallow student of ``settings.layers`` of the target, which shares the
            target's embeddings and output layer.
        tokenizer: of both.
        prompts: strings or chats.
        given: completions, one per prompt (None for a prompt without), where ``settings.text`` is given or mixed.
        held_out_prompts: for the measure before, during and after; none without.
        resume: go on with the run in ``output_dir`` from its last checkpoint, or start one where there is none.
        progress: called with step, number of steps and metrics; the metrics' ``phase`` is sampling, training or
            held-out (during sampling the two numbers count completions).

    Writes:
        ``config.json`` (what the run is), ``texts.jsonl`` and ``held-out.jsonl`` (sampled text), ``metrics.jsonl``,
        ``curve.png`` (with matplotlib), ``checkpoints/step-*`` (the last one), ``draft/`` and ``result.json``.

    Raises:
        ValueError: settings out of range, no prompts, a folder that holds another run or that
            another one is writing to, models that do not fit.
        FloatingPointError: the loss is no longer finite.
        KeyboardInterrupt: after Ctrl-C, once the step is done and a checkpoint is written.
    """
    started = time.perf_counter()
    check_settings(settings, given, len(prompts))
    report = progress or (lambda step, total, metrics: None)
    out = Path(output_dir)
    trained_flags = [(p, p.requires_grad) for p in target.parameters()]

    def restore() -> None:
        for parameter, flag in trained_flags:
            parameter.requires_grad_(flag)

    target.requires_grad_(False)
    with contextlib.ExitStack() as held:
        held.callback(restore)
        student = student_of(target, draft, settings.layers)
        pair = ModelPair(target, draft if draft is not None else target, tokenizer)
        check_head(target, "target")
        if draft is not None:
            check_head(draft, "draft")
        encoded = encode(pair, prompts, settings.max_prompt_tokens, "prompts")
        held_out = (
            encode(pair, held_out_prompts, settings.max_prompt_tokens, "held_out_prompts") if (held_out_prompts) else []
        )
        what = describe(pair, draft, settings, encoded, given, held_out)
        held.enter_context(open_run(out, {"run": what, "versions": versions()}, resume=resume))
        wrapped = add_lora(student, settings.lora_rank, settings.seed) if settings.lora_rank else None
        target.requires_grad_(False)
        run = Run(target, student, settings, out, report, started, (draft or target).dtype)

        sampling = time.perf_counter()

        def until(share: float) -> float | None:
            """When to stop. Training text also gets what held-out text left of its half, and a quarter at least."""
            if share == 0:
                return time.perf_counter()
            if run.budget is None:
                return None
            allowed = settings.sampling_share * run.budget
            return max(sampling + share * allowed, time.perf_counter() + min(share, 0.25) * allowed)

        def sample(which: Sequence[list[int] | None], file: str, copies: int, seed: int, share: float) -> list[Lesson]:
            return sampled_sequences(
                pair,
                which,
                out / file,
                samples_per_prompt=copies,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                stop_strings=settings.stop_strings,
                batch_size=settings.sampling_batch or (256 if run.device.type == "cuda" else 8),
                seed=seed,
                until=until(share),
                progress=lambda done, total: report(done, total, {"phase": "sampling", "file": file}),
            )

        # Once measured, the held-out text stays what it is, even if a budget cut it short.
        share = 0.0 if any((out / "checkpoints").glob("step-*")) else 0.5
        measured = sample(held_out, "held-out.jsonl", 1, settings.seed + 500_000_000, share) if held_out else []
        lessons: list[Lesson] = []
        unanswered = list(encoded)
        if settings.text != "target":
            assert given is not None
            lessons += given_sequences(pair, prompts, encoded, given, settings.max_new_tokens)
            unanswered = [None if text else ids for ids, text in zip(encoded, given, strict=True)]
        if settings.text != "given" and any(unanswered):
            lessons += sample(unanswered, "texts.jsonl", settings.samples_per_prompt, settings.seed, 1.0)
        lessons = [x for x in lessons if len(x) > 1]
        if not lessons:
            raise ValueError(
                "prompts came with no text to learn from: pass given= completions that are not empty, "
                "or a larger budget_seconds"
            )
        steps, stopped, before = train(run, lessons, measured)
        after = measure(run, measured) if measured else None
        if wrapped is not None:
            student = wrapped.merge_and_unload()
        with writing(out / "draft"):
            finished = save_draft(student, tokenizer, out / "draft", run.dtype)
        result = Distilled(
            finished,
            out / "draft",
            steps,
            stopped,
            before,
            after,
            round(run.tokens / max(run.training_seconds, 1e-9), 1),
            round(time.perf_counter() - started, 1),
        )
        rows = read_rows(out / "metrics.jsonl")
        if after is not None and not any(r["step"] == steps and "held_out_acceptance" in r for r in rows):
            log_held_out(run, steps, after)
        draw_curve(out)
        summary = {k: v for k, v in vars(result).items() if k not in ("draft", "folder", "before", "after")}
        summary |= {k: asdict(v) if v else None for k, v in (("before", before), ("after", after))}
        write_text(out / "result.json", json.dumps(summary, indent=1) + "\n")
        return result


def describe(
    pair: ModelPair,
    draft: PreTrainedModel | None,
    settings: DistillSettings,
    prompts: object,
    given: object,
    held_out: object,
) -> dict[str, Any]:
    """What makes a run this run and no other: settings, models and texts."""

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]

    what = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(settings).items() if k not in RESUMABLE}
    return what | {
        "target": pair.target_name,
        "target_weights": fingerprint(pair.target),
        "draft": None if draft is None else pair.draft_name,
        "draft_weights": None if draft is None else fingerprint(draft),
        "prompts": digest(prompts),
        "given": None if given is None else digest(list(given)),  # type: ignore[call-overload]
        "held_out_prompts": digest(held_out),
    }


def draw_curve(out: Path) -> bool:
    """``curve.png``: acceptance on training batches and on held-out text. False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_rows(out / "metrics.jsonl")
    batches = [r for r in rows if "acceptance" in r]
    held_out = [r for r in rows if "held_out_acceptance" in r]
    figure, axis = plt.subplots(figsize=(6, 4))
    axis.plot([r["step"] for r in batches], [r["acceptance"] for r in batches], lw=1, alpha=0.6, label="training text")
    if held_out:
        means = [r["held_out_acceptance"] for r in held_out]
        low = [m - r["held_out_ci"][0] for m, r in zip(means, held_out, strict=True)]
        high = [r["held_out_ci"][1] - m for m, r in zip(means, held_out, strict=True)]
        label = f"held-out text (n = {held_out[-1]['n']}, 95 %)"
        axis.errorbar([r["step"] for r in held_out], means, (low, high), fmt="o-", ms=4, capsize=2, label=label)
    axis.set_xlabel("step")
    axis.set_ylabel("1 − TV(p, q) at temperature 1")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "curve.png", dpi=130)
    plt.close(figure)
    return True
