"""Measure decoding settings on the same prompts, interleaved, and resume where an interrupted run stopped."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from diversed.engine import GenerationOutput, ModelPair, generate
from diversed.evaluation.settings import TARGET_ONLY, Setting, fingerprint
from diversed.evaluation.statistics import mean_interval, ratio_interval
from diversed.tasks import Task, judge, request

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Each setting answers the task's prompts twice over: ``timing_n`` of them one at a time, for speed, and all of them
    in batches of ``batch_size``, for score and acceptance. With ``batch_size=1`` one pass serves both.
    """

    settings: tuple[Setting, ...]
    batch_size: int
    timing_n: int
    seed: int

    def passes(self, n: int) -> Iterator[tuple[Setting, int, int, bool]]:
        """(setting, first prompt, end, timed) in the order of measuring. Settings take turns on every chunk, in an
        order that rotates, so that a drift of the machine hits all alike."""
        chunks = [(i, i + 1, True) for i in range(min(self.timing_n, n) if self.batch_size > 1 else 0)]
        chunks += [(i, min(i + self.batch_size, n), self.batch_size == 1) for i in range(0, n, self.batch_size)]
        for turn, (start, end, timed) in enumerate(chunks):
            shift = turn % len(self.settings)
            for setting in self.settings[shift:] + self.settings[:shift]:
                yield setting, start, end, timed


@dataclass(frozen=True)
class Measurement:
    """One setting on one chunk of prompts; per-prompt lists."""

    setting: Setting
    start: int
    timed: bool  # one prompt at a time, for speed
    scores: list[float]
    drafted: list[int]
    accepted: list[int]
    rejected: list[int]
    target_calls: list[int]
    tokens: list[int]
    time: dict[str, float]  # seconds, the parts of TimeSplit
    head: str | None = None  # which parameters a learned verifier had (fingerprint)

    @property
    def key(self) -> tuple[Setting, int, bool]:
        return self.setting, self.start, self.timed

    @property
    def seconds(self) -> float:
        return sum(self.time.values())


def measure(
    pair: ModelPair, task: Task, setting: Setting, start: int, end: int, *, timed: bool, seed: int
) -> Measurement:
    """Run one setting on prompts start..end and score what it writes."""
    out = answer(pair, task, setting, start, end, seed=seed)
    counts = out.stats.per_sequence
    return Measurement(
        setting,
        start,
        timed,
        scores=judge(task.score, task.examples[start:end], out.texts, "score"),
        drafted=[sum(c.drafted) for c in counts],
        accepted=[sum(c.accepted) for c in counts],
        rejected=[c.rejected for c in counts],
        target_calls=[c.target_calls for c in counts],
        tokens=[c.tokens for c in counts],
        time=asdict(out.stats.time),
        head=fingerprint(setting.verifier),
    )


def answer(
    pair: ModelPair, task: Task, setting: Setting, start: int, end: int, *, seed: int, trace: bool = False
) -> GenerationOutput:
    """Generate for prompts start..end of a task. Prompt i draws from seed + i under every setting."""
    asked = request(task, task.examples[start:end])
    models, arguments = setting.prepare(pair)
    seeds = [seed + i for i in range(start, end)]
    return generate(models, **asked, **arguments, seed=seeds, trace=trace)


def sweep(
    pair: ModelPair,
    task: Task,
    plan: Plan,
    *,
    path: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Measurement]:
    """Measure every setting of the plan on every prompt of the task.

    With ``path``, each measurement is appended to that JSONL file at once and what the file already holds is not
    measured again; the first line records the run's configuration, and another configuration is refused.
    """
    header = {"config": configuration(pair, task, plan)}
    found = read_measurements(path, header) if path is not None else []
    # A head that was trained on since is another head, and measured anew.
    done = [m for m in found if m.setting not in plan.settings or m.head == fingerprint(m.setting.verifier)]
    known = {m.key for m in done}
    todo = [p for p in plan.passes(len(task.examples)) if (p[0], p[1], p[3]) not in known]
    total = len(todo) + len(done)
    progress(len(done), total)
    for setting in {p[0] for p in todo if p[3]}:  # the first call of anything is slow and says nothing
        answer(pair, task, setting, 0, 1, seed=plan.seed)
    for i, (setting, start, end, timed) in enumerate(todo):
        m = measure(pair, task, setting, start, end, timed=timed, seed=plan.seed)
        done.append(m)
        if path is not None:
            append_line(path, asdict(m))
        progress(total - len(todo) + i + 1, total)
    return done


def configuration(pair: ModelPair, task: Task, plan: Plan) -> Row:
    """What must agree for two runs to be one: the pair, the task, batches and seed. Settings may be added."""
    return {
        "target": pair.target_name,
        "draft": pair.draft_name,
        "task": task.name,
        "split": task.split,
        "n": len(task.examples),
        "max_new_tokens": task.max_new_tokens,
        "batch_size": plan.batch_size,
        "timing_n": plan.timing_n,
        "seed": plan.seed,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
    }


def append_line(path: Path, row: Row) -> None:
    """Add one JSON line. A full disk is one clear error; the lines before stay whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise ValueError(
            f"output_dir: cannot write {str(path)!r} ({error.strerror}). Free some space or choose another "
            "folder; what was measured so far is kept there and the same command goes on from it"
        ) from error


def read_measurements(path: Path, header: Row) -> list[Measurement]:
    """The measurements a file holds. A line cut off by a crash is dropped; a new file gets its header."""
    if not path.exists() or not path.stat().st_size:
        append_line(path, header)
        return []
    text = path.read_text(encoding="utf-8")
    whole, _, cut = text.rpartition("\n")
    if cut:
        path.write_text(whole + "\n" if whole else "", encoding="utf-8")
    lines = [json.loads(line) for line in whole.splitlines()]
    if not lines:
        append_line(path, header)
        return []
    if lines[0] != header:
        old, new = lines[0].get("config", {}), header["config"]
        differs = ", ".join(f"{k}: {old.get(k)} there, {new[k]} now" for k in new if old.get(k) != new[k])
        raise ValueError(f"output_dir: {str(path)!r} belongs to another run ({differs}); choose another folder")
    return [Measurement(**(row | {"setting": Setting(**row["setting"])})) for row in lines[1:]]


def summarise(measurements: Sequence[Measurement], pair: ModelPair, task: Task, plan: Plan) -> list[Row]:
    """One row per setting, with the keys every command's JSON shares; what does not apply is None.

    ``normalised_time`` is the median time per token over prompts, one at a time, over that of target-only decoding
    at the same temperature in the same run; ``speedup`` its inverse.
    """
    rows = []
    per_token: dict[Setting, float] = {}
    for setting in plan.settings:
        times = [m.seconds / sum(m.tokens) for m in measurements if m.setting == setting and m.timed]
        if times:
            per_token[setting] = statistics.median(times)
    for setting in plan.settings:
        quality = [m for m in measurements if m.setting == setting and m.timed == (plan.batch_size == 1)]
        if not quality:
            continue
        scores, drafted, accepted, rejected, calls, tokens = (
            [x for m in quality for x in getattr(m, name)]
            for name in ("scores", "drafted", "accepted", "rejected", "target_calls", "tokens")
        )
        score, score_ci = mean_interval(scores)
        rate, rate_ci = ratio_interval(accepted, drafted) if sum(drafted) else (None, None)
        examined = [a + r for a, r in zip(accepted, rejected, strict=True)]
        at_position, at_position_ci = ratio_interval(accepted, examined) if sum(examined) else (None, None)
        baseline = per_token.get(Setting(TARGET_ONLY, None, 0, setting.temperature))
        mine = per_token.get(setting)
        normalised = mine / baseline if mine and baseline else None
        rows.append(
            {
                "verifier": setting.verifier,
                "weight": setting.weight,
                "quality": setting.quality,
                "num_speculative_tokens": setting.num_speculative_tokens,
                "temperature": setting.temperature,
                "task": task.name,
                "n": len(scores),
                "score": score,
                "score_ci": score_ci,
                "acceptance_rate": rate,
                "acceptance_ci": rate_ci,
                "position_acceptance": at_position,
                "position_acceptance_ci": at_position_ci,
                "block_efficiency": 1 + sum(accepted) / sum(calls) if setting.speculates else None,
                "tokens_per_target_call": sum(tokens) / sum(calls) if setting.verifier != "draft-only" else None,
                "tokens_per_second": 1 / mine if mine else None,
                "normalised_time": normalised,
                "speedup": 1 / normalised if normalised else None,
                "seed": plan.seed,
                "provenance": provenance(pair, task, plan),
            }
        )
    return rows


def provenance(pair: ModelPair, task: Task, plan: Plan) -> Row:
    """Where the numbers come from."""
    from diversed import __version__

    return configuration(pair, task, plan) | {
        "score": task.score_name,
        "diversed": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": str(pair.target.device),
        "threads": torch.get_num_threads(),
    }
