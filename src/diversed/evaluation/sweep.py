"""Measure decoding settings on the same prompts, interleaved, and resume where an interrupted run stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from diversed.engine import GenerationOutput, ModelPair, PromptCache, Trace, generate
from diversed.evaluation.peers import generate_by_transformers
from diversed.evaluation.settings import CONTROL, Setting, fingerprint, head_of
from diversed.folders import differences
from diversed.tasks import Task, judge, request
from diversed.tasks.contract import check_prompts, digest, name_of
from diversed.theory import expected_blocks

Row = dict[str, Any]
Kind = Literal["timed", "scored", "traced"]
PARTS = ("prefill", "draft", "target", "verification", "rest")  # of the time; compiling happens once and is none
WEIGHTS = (".safetensors", ".bin", ".gguf")
LONGEST_BLOCK = 16  # traces foretell the number of target passes for every N up to this


def judged_kind(batch_size: int) -> Kind:
    """The passes that score and acceptance are taken from: one by one, the timed ones serve for these too."""
    return "timed" if batch_size == 1 else "scored"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Each setting answers the task's prompts up to three times over: ``timing_n`` of them one at a time, for speed; all
    of them in batches of ``batch_size``, for score and acceptance, once per seed; and ``trace_n`` of them with a trace,
    for bias and for the number of target passes at other N. With ``batch_size=1`` one pass serves speed and score.
    """

    settings: tuple[Setting, ...]
    batch_size: int
    timing_n: int
    seed: int
    trace_n: int = 0
    further_seeds: tuple[int, ...] = ()

    @property
    def judged(self) -> Kind:
        return judged_kind(self.batch_size)

    @property
    def traced_settings(self) -> tuple[Setting, ...]:
        """One setting for each verifier, quality and temperature: what a trace tells does not depend on N."""
        longest: dict[Setting, Setting] = {}
        for s in self.settings:
            same = s.at_n(0)
            if s.speculates and s.num_speculative_tokens >= longest.get(same, same).num_speculative_tokens:
                longest[same] = s
        return tuple(longest.values())

    def passes(self, n: int) -> Iterator[tuple[Setting, int, int, Kind, int]]:
        """(setting, first prompt, end, kind, seed) in the order of measuring. Settings take turns on every chunk, in an
        order that rotates, so that a drift of the machine hits all alike."""
        size, one_by_one = self.batch_size, min(self.timing_n, n) if self.batch_size > 1 else 0
        traced = min(self.trace_n, n)
        chunks: list[tuple[int, int, Kind, int]] = [(i, i + 1, "timed", self.seed) for i in range(one_by_one)]
        chunks += [(i, min(i + size, traced), "traced", self.seed) for i in range(0, traced, size)]
        for seed in (self.seed, *self.further_seeds):
            chunks += [(i, min(i + size, n), self.judged, seed) for i in range(0, n, size)]
        for turn, (start, end, kind, seed) in enumerate(chunks):
            settings = self.traced_settings if kind == "traced" else self.settings
            shift = turn % len(settings) if settings else 0
            for setting in settings[shift:] + settings[:shift]:
                yield setting, start, end, kind, seed


@dataclass(frozen=True)
class Measurement:
    """One setting on one chunk of prompts; per-prompt lists."""

    setting: Setting
    start: int
    kind: Kind
    seed: int
    scores: list[float]
    drafted: list[int]
    accepted: list[int]
    rejected: list[int]
    target_calls: list[int]
    tokens: list[int]
    time: dict[str, float]  # seconds, as TimeSplit has them
    trace: dict[str, list[Any]] | None = None  # of a traced pass, see trace_sums
    head: str | None = None  # which parameters a learned verifier had (fingerprint)
    trained_on: str | None = None  # the task of a learned verifier

    @property
    def key(self) -> tuple[Setting, int, Kind, int]:
        return self.setting, self.start, self.kind, self.seed

    @property
    def seconds(self) -> float:
        return sum(self.time[part] for part in PARTS)


def by_prompt(measurements: Sequence[Measurement], name: str) -> dict[int, list[float]]:
    """A per-prompt list of measurements as {prompt: a value per seed}, in the order of prompts."""
    found: dict[int, list[float]] = {}
    for m in sorted(measurements, key=lambda m: m.start):
        for i, value in enumerate(getattr(m, name), m.start):
            found.setdefault(i, []).append(value)
    return found


def measure(
    pair: ModelPair,
    task: Task,
    setting: Setting,
    start: int,
    end: int,
    *,
    kind: Kind,
    seed: int,
    prompt_cache: PromptCache | None = None,
) -> Measurement:
    """Run one setting on prompts start..end and score what it writes."""
    # A trace needs q at every position, and texts that follow nu: the bonus token from nu gives both.
    trace: dict[str, Any] = {"trace": True, "bonus": "verifier"} if kind == "traced" else {}
    # Where time is taken, everything is done anew.
    out = answer(
        pair, task, setting, start, end, seed=seed, prompt_cache=None if kind == "timed" else prompt_cache, **trace
    )
    counts = out.stats.per_sequence
    head = head_of(setting.verifier)
    return Measurement(
        setting,
        start,
        kind,
        seed,
        scores=judge(task.score, task.examples[start:end], out.texts, "score"),
        drafted=[sum(c.drafted) for c in counts],
        accepted=[sum(c.accepted) for c in counts],
        rejected=[c.rejected for c in counts],
        target_calls=[c.target_calls for c in counts],
        tokens=[c.tokens for c in counts],
        time=asdict(out.stats.time),
        trace=None if out.trace is None else trace_sums(out.trace),
        head=fingerprint(setting.verifier),
        trained_on=None if head is None else head.head.task,
    )


def trace_sums(traces: Sequence[Trace]) -> dict[str, list[Any]]:
    """Per prompt: the sums of TV(p, q), acceptance and bias over its positions, and the expected number of target
    passes for N = 1, 2, ... (None where a verdict falls on whole blocks, which positions do not tell)."""

    def total(values: torch.Tensor) -> float | None:
        found = float(values.double().sum())
        return None if math.isnan(found) else round(found, 6)

    blocks: list[list[float] | None] = []
    for t in traces:
        keep = t.keep.tolist()
        joint = any(map(math.isnan, keep))
        every_n = range(1, LONGEST_BLOCK + 1)
        blocks.append(None if joint else [round(expected_blocks(keep, n), 4) for n in every_n])
    return {
        "positions": [len(t.token_ids) for t in traces],
        "total_variation": [total(t.total_variation) for t in traces],
        "acceptance": [total(t.acceptance) for t in traces],
        "bias": [total(t.bias) for t in traces],
        "blocks": blocks,
    }


def answer(
    pair: ModelPair, task: Task, setting: Setting, start: int, end: int, *, seed: int, **options: Any
) -> GenerationOutput:
    """Generate for prompts start..end of a task; ``options`` are further arguments of ``generate``. Prompt i draws from
    ``seed * 2**20 + i`` under every setting."""
    asked = request(task, task.examples[start:end])
    models, arguments = setting.prepare(pair)
    seeds = [(seed << 20) + i for i in range(start, end)]
    if setting.is_peer:
        return generate_by_transformers(models, asked, setting, seeds)
    return generate(models, **asked, **(arguments | options), seed=seeds)


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
    check_prompts(pair, task)
    found = continue_file(path, header_of(pair, task, plan), plan) if path is not None else []
    # A head that was trained on since is another head, and measured anew.
    done = [m for m in found if m.setting not in plan.settings or m.head == fingerprint(m.setting.verifier)]
    known = {m.key for m in done}
    todo = [p for p in plan.passes(len(task.examples)) if (p[0], p[1], p[3], p[4]) not in known]
    total = len(todo) + len(done)
    progress(len(done), total)
    for setting in {p[0] for p in todo if p[3] == "timed"}:  # the first call of anything is slow and says nothing
        answer(pair, task, setting, 0, 1, seed=plan.seed)
    prompt_cache = PromptCache()  # settings take turns on the same prompts
    for i, (setting, start, end, kind, seed) in enumerate(todo):
        m = measure(pair, task, setting, start, end, kind=kind, seed=seed, prompt_cache=prompt_cache)
        done.append(m)
        if path is not None:
            append_line(path, asdict(m))
        progress(total - len(todo) + i + 1, total)
    return done


def configuration(pair: ModelPair, task: Task, plan: Plan) -> Row:
    """What must agree for two runs to be one: the pair, the task, batches, seed; where speed is measured, the machine's
    part in it. Settings and seeds may be added."""
    weights = {f"{role}_weights": weights_in(Path(getattr(pair, f"{role}_name"))) for role in ("target", "draft")}
    machine = {"device": str(pair.target.device), "threads": torch.get_num_threads()}
    return {
        "target": pair.target_name,
        "draft": pair.draft_name,
        "task": task.name,
        "split": task.split,
        "n": len(task.examples),
        "examples": digest(task.examples),
        "score": task.score_name,
        "score_function": name_of(task.score),
        "max_new_tokens": task.max_new_tokens,
        "stop_strings": list(task.stop_strings),
        "batch_size": plan.batch_size,
        "timing_n": plan.timing_n,
        "trace_n": plan.trace_n,
        "seed": plan.seed,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "draft_dtype": str(pair.draft.dtype).removeprefix("torch."),
        **{name: found for name, found in weights.items() if found},
        **(machine if plan.timing_n or plan.judged == "timed" else {}),
    }


def weights_in(place: Path) -> str | None:
    """Which weights lie in a folder or file right now, as a draft may be trained further in place: a hash of samples of
    the files. None where there are none, as for a Hub id."""
    content = hashlib.sha256()
    files = [place] if place.is_file() else [f for f in sorted(place.glob("*")) if f.suffix in WEIGHTS]
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            for start in range(0, size, max(4096, size // 256)):
                file.seek(start)
                content.update(file.read(256))
    return content.hexdigest()[:12] if files else None


def header_of(pair: ModelPair, task: Task, plan: Plan) -> Row:
    """The first line of a file: the configuration, and where the numbers come from."""
    from diversed import __version__

    config = configuration(pair, task, plan)
    versions = {
        "diversed": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": str(pair.target.device),
        "threads": torch.get_num_threads(),
    }
    return {"config": config, "provenance": config | versions}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk is one clear error."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"output_dir: cannot write {str(path)!r} ({error.strerror}). Free some space or choose another "
            "folder; what was measured so far is kept there and the same command goes on from it"
        ) from error


def append_line(path: Path, row: Row) -> None:
    """Add one JSON line; the lines before stay whole whatever happens."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def keep_first(path: Path, size: int) -> None:
    """Cut a file's end off, which takes no room: written anew, it could lose more on a full disk."""
    if path.exists() and path.stat().st_size > size:
        with writing(path):
            os.truncate(path, size)


@dataclass
class Recorded:
    """What a measurements file holds."""

    config: Row
    provenance: Row
    measurements: list[Measurement]
    plan: Plan  #: every setting and seed that was ever asked for

    def missing(self) -> dict[Setting, int]:
        """How many passes were planned and are not there, by setting."""
        known = {m.key for m in self.measurements}
        absent = dict.fromkeys(self.plan.settings, 0)
        for setting, start, _, kind, seed in self.plan.passes(self.config["n"]):
            absent[setting] += (setting, start, kind, seed) not in known
        return {setting: count for setting, count in absent.items() if count}


def continue_file(path: Path, header: Row, plan: Plan) -> list[Measurement]:
    """The measurements of a file to be gone on with, after noting in it what is planned now.

    A last line that was cut off is dropped, where this is the run it belongs to; a new file gets its header.
    """
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    if not whole:
        keep_first(path, 0)
        append_line(path, header)
    there = read_measurements(path)
    if there.config != header["config"]:
        differs = differences(there.config, header["config"])
        raise ValueError(f"output_dir: {str(path)!r} belongs to another run ({differs}); choose another folder")
    if whole:
        keep_first(path, len(whole) + 1)
    settings = [s for s in plan.settings if s not in there.plan.settings]
    seeds = [s for s in plan.further_seeds if s not in there.plan.further_seeds]
    if settings or seeds:
        append_line(path, {"planned": [asdict(s) for s in settings], "further_seeds": seeds})
    return there.measurements


def head_name(m: Measurement) -> str:
    """The head behind a setting, whether it verifies positions or blocks or is sampled from."""
    return m.setting.verifier.removeprefix(CONTROL).removeprefix("block:")


def read_measurements(path: Path) -> Recorded:
    """What a file holds; a last line that was cut off is left out, and so is what a head gave before it was changed.

    Raises:
        ValueError: no such file, an empty one, one that is no bench's, or one that holds several runs.
    """
    if not path.is_file():
        raise ValueError(f"folder: {str(path)!r} does not exist: give a folder that diversed bench wrote")
    lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    if not lines:
        raise ValueError(f"folder: {str(path)!r} is empty: nothing was measured yet; run diversed bench on it first")
    found: list[Measurement] = []
    header: Row = {}
    settings: list[Setting] = []
    seeds: list[int] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if "planned" in row:
                settings += [Setting(**s) for s in row["planned"]]
                seeds += row["further_seeds"]
            elif "config" not in row:
                found.append(Measurement(**(row | {"setting": Setting(**row["setting"])})))
            elif not header:
                header = row
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise ValueError(
                f"folder: line {number} of {str(path)!r} is no measurement ({type(error).__name__}: {error}); it was "
                "written by something else, or by another version: measure into a new folder"
            ) from error
        if "config" in row and row["config"] != header["config"]:
            old, new = header["config"], row["config"]
            differs = ", ".join(f"{k}: {old.get(k)} and {new.get(k)}" for k in new if old.get(k) != new.get(k))
            raise ValueError(
                f"folder: {str(path)!r} holds results of two runs ({differs}): keep each run in its own folder"
            )
    latest = {head_name(m): m.head for m in found}  # a head that was trained on since is another head
    found = list({m.key: m for m in found if m.head == latest[head_name(m)]}.values())
    if not header:
        raise ValueError(f"folder: {str(path)!r} does not begin with a run's configuration: measure into a new folder")
    config: Row = header["config"]
    plan = Plan(
        tuple(settings), config.get("batch_size", 1), config.get("timing_n", 0), config.get("seed", 0),
        config.get("trace_n", 0), tuple(seeds),
    )  # fmt: skip
    return Recorded(config, header.get("provenance") or config, found, plan)
