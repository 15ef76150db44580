"""What benches found: tables, pictures, and statements where intervals separate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diversed.evaluation.compare import (
    MIXING,
    Measured,
    by_setting,
    gain_at_equal_acceptance,
    mixing_requests,
    mixture_in_time,
    paired_difference,
    score_at_acceptance,
)
from diversed.evaluation.pages import Block
from diversed.evaluation.pictures import pictures_of
from diversed.evaluation.rows import at_one_n, setting_of, summarise
from diversed.evaluation.settings import DRAFT_ONLY, TARGET_ONLY, Setting, is_block
from diversed.evaluation.show import family, number
from diversed.evaluation.sweep import PARTS, Recorded, Row, read_measurements

FEWEST = 6  # prompts: fewer say nothing, and where all differ alike their interval would have no width


@dataclass(frozen=True)
class Bench:
    """One measurements file and its rows."""

    path: Path
    recorded: Recorded
    rows: list[Row]

    @property
    def name(self) -> str:
        c = self.recorded.config
        return f"{c['task']}: {Path(c['target']).name} with {Path(c['draft']).name}"


def load_benches(folders: Sequence[Path]) -> list[Bench]:
    """Every measurements file in the folders and below, with rows recomputed from it.

    Raises:
        ValueError: a folder without any, or a file that is empty, cut up, or holds two runs.
    """
    benches: list[Bench] = []
    for folder in folders:
        paths = [folder] if folder.is_file() else sorted(folder.rglob("measurements.jsonl"))
        if not paths:
            raise ValueError(f"folder: {str(folder)!r} holds no measurements.jsonl: give a folder of diversed bench")
        for path in paths:
            recorded = read_measurements(path)
            benches.append(
                Bench(path, recorded, summarise(recorded.measurements, recorded.plan.settings, recorded.provenance))
            )
    return benches


def report_blocks(benches: Sequence[Bench]) -> list[Block]:
    """The whole report."""
    blocks = [
        Block("title", "Relaxed speculative decoding: measured frontiers"),
        Block(
            "text",
            "Intervals are 95 %, over prompts. Acceptance is per examined position. Bias is the mean TV(nu, p) over "
            "positions of texts that follow nu. Speed-up is over target-only decoding in the same engine, one prompt "
            "at a time, all settings taking turns on each prompt: a median over prompts and its interval. Predicted "
            "÷ measured: theory on recorded texts and measured costs, against the clock.",
        ),
    ]
    for bench in benches:
        blocks += bench_blocks(bench)
    blocks += paper_blocks(benches) + transfer_blocks(benches)
    return blocks


def bench_blocks(bench: Bench) -> list[Block]:
    p, rows = bench.recorded.provenance, bench.rows
    blocks = [
        Block("heading", bench.name),
        Block(
            "text",
            f"Split {p['split']}, {p['n']} prompts, {p['max_new_tokens']} new tokens at most; seed {p['seed']}; "
            f"{p['dtype']} on {p.get('device')}, {p.get('threads')} threads; diversed {p.get('diversed')}, "
            f"torch {p.get('torch')}, transformers {p.get('transformers')}. Measurements: {bench.path.name}.",
        ),
    ]
    absent = bench.recorded.missing()
    if absent:
        names = ", ".join(f"{label(s)} ({count})" for s, count in absent.items())
        blocks.append(
            Block(
                "text",
                f"Unfinished: {sum(absent.values())} passes of {len(absent)} settings are missing: {names}. Run the "
                "same bench again with the same folder to go on; until then the figures below rest on what is there.",
            )
        )
    if not rows:
        return [*blocks, Block("text", "Nothing was scored yet.")]
    blocks.append(Block("table", header=TABLE_HEADER, rows=[table_cells(r) for r in rows]))
    blocks += prediction_blocks(rows) + ranking_blocks(bench) + statement_blocks(bench)
    blocks += [Block("picture", svg, header=(title,)) for title, svg in pictures_of(rows, bench.recorded)]
    return blocks


def prediction_blocks(rows: Sequence[Row]) -> list[Block]:
    """How well speed-ups were foretold, over all rows that have both."""
    ratios = [r["predicted_over_measured"] for r in rows if r["predicted_over_measured"] is not None]
    if not ratios:
        return []
    close = sum(0.9 <= r <= 1.1 for r in ratios)
    text = (
        f"Predicted ÷ measured speed-up over {len(ratios)} rows: median {statistics.median(ratios):.2f}, from "
        f"{min(ratios):.2f} to {max(ratios):.2f}; {close} of them within 10 %."
    )
    return [Block("text", text)]


def label(setting: Setting) -> str:
    count = f", N {setting.num_speculative_tokens}" if setting.num_speculative_tokens else ""
    return f"{setting.label}{count}, T {setting.temperature:g}"


TABLE_HEADER = (
    "verifier", "quality", "N", "T", "score", "acceptance", "bias", "block efficiency", "tokens/s", "normalised time",
    "speed-up", "predicted ÷ measured", " / ".join(PARTS),
)  # fmt: skip


def plus_minus(value: float | None, interval: Sequence[float] | None, form: str = ".3f") -> str:
    """The value and half the width of its interval."""
    if value is None:
        return "–"
    half = 0.0 if interval is None else (interval[1] - interval[0]) / 2
    return f"{value:{form}} ± {half:{form}}" if interval is not None and math.isfinite(half) else f"{value:{form}}"


def table_cells(row: Row) -> list[str]:
    split = row["time_split"]
    shares = "–"
    if split is not None:
        total = sum(split.values())
        shares = " / ".join(f"{100 * seconds / total:.0f}" for seconds in split.values()) + " %"
    speed = plus_minus(row["speedup"], row["speedup_ci"], ".2f")
    return [
        row["verifier"],
        "–" if row["quality"] is None else f"{row['quality']:g}",
        str(row["num_speculative_tokens"]) if row["num_speculative_tokens"] else "–",
        f"{row['temperature']:g}",
        plus_minus(row["score"], row["score_ci"]),
        plus_minus(row["position_acceptance"], row["position_acceptance_ci"]),
        plus_minus(row["bias"], row["bias_ci"]),
        number(row["block_efficiency"]),
        number(row["tokens_per_second"], ".0f"),
        number(row["normalised_time"], ".3f"),
        speed,
        number(row["predicted_over_measured"]),
        shares,
    ]


LEVELS = (0.75, 0.8, 0.85, 0.9, 0.95)  # of acceptance


def compared(bench: Bench) -> tuple[int, dict[Setting, Measured]]:
    """The N at which settings are compared, and what was measured at it: only prompts that every setting met."""
    n, rows = at_one_n(bench.rows)
    prompts = range(min((r["n"] for r in rows), default=0))
    measured = by_setting(bench.recorded.measurements, kind=bench.recorded.plan.judged, prompts=prompts)
    return n, {s: m for s, m in measured.items() if s.num_speculative_tokens in (0, n)}


def ranking_blocks(bench: Bench) -> list[Block]:
    """The score of every curve at fixed acceptances, the best first."""
    n, measured = compared(bench)
    score = bench.recorded.provenance.get("score", "score")
    blocks: list[Block] = []
    for t in sorted({s.temperature for s in measured}):
        curves = curves_at(measured, n, t)
        found = {name: [score_at_acceptance(curve, level) for level in LEVELS] for name, curve in curves.items()}
        found = {name: values for name, values in found.items() if any(values)}
        if not found:
            continue
        reach = {name: max(i for i, v in enumerate(values) if v) for name, values in found.items()}
        last = {name: values[reach[name]] or (0.0, (0.0, 0.0)) for name, values in found.items()}
        order = sorted(found, key=lambda name: (-reach[name], -last[name][0]))
        rows = [[name, *(plus_minus(*v) if v else "–" for v in found[name])] for name in order]
        header = ("verifier", *(f"acceptance {level:g}" for level in LEVELS))
        blocks.append(Block("table", f"T {t:g}, N {n}", header, rows))
    if not blocks:
        return []
    text = (
        f"{score} at equal acceptance, interpolated between a family's settings and its lossless end; – where no "
        "setting accepts as much. The farthest-reaching first, then the best. "
        f"With {MIXING}, some are verified lossless and the others left to the draft alone."
    )
    return [Block("heading", f"{bench.name}: ranking at equal acceptance"), Block("text", text), *blocks]


def statement_blocks(bench: Bench) -> list[Block]:
    """Sentences for every comparison whose interval excludes 0, and how many were made."""
    found, made = statements_of(bench)
    blocks = [
        Block("heading", f"{bench.name}: what intervals separate"),
        Block(
            "text",
            f"{made} paired comparisons were made, each at 95 %; {len(found)} separate and are listed. Of comparisons "
            "without any difference about one in twenty would be listed too.",
        ),
    ]
    return blocks + [Block("item", sentence) for sentence in found]


def statements_of(bench: Bench) -> tuple[list[str], int]:
    """The sentences, and the number of comparisons behind them, at one N (the others are in the table)."""
    n, measured = compared(bench)
    score = bench.recorded.provenance.get("score", "score")
    times = {setting_of(r): r["normalised_time"] for r in bench.rows if r["normalised_time"] is not None}
    sentences: list[str] = []
    made = 0
    for setting, ours in measured.items():
        target = measured.get(Setting(TARGET_ONLY, None, 0, setting.temperature))
        if len(ours.scores) < FEWEST:
            continue
        if target is not None and setting != target.setting:
            made += 1
            gain, (low, high) = paired_difference(ours.scores, target.scores)
            if low > 0 or high < 0:
                change = f"{gain:+.3f} {score} over target-only (95 %: {low:+.3f} to {high:+.3f})"
                sentences.append(f"{label(setting)}: {change}")
        mixed = mixture_in_time(measured, times, times.get(setting, 0.0), setting.temperature)
        if mixed is not None and setting.speculates and setting.verifier != "lossless":
            made += 1
            gain, (low, high) = paired_difference(ours.scores, mixed.scores)
            if low > 0 or high < 0:
                sentences.append(
                    f"{label(setting)}: {gain:+.3f} {score} over {MIXING} ({mixed.strict.verifier} and draft-only) at "
                    f"equal time {times[setting]:.3f} (95 %: {low:+.3f} to {high:+.3f})"
                )
        if setting.quality is None or is_block(setting.verifier):
            continue
        for name, curve in curves_at(measured, n, setting.temperature).items():
            against = gain_at_equal_acceptance(ours, curve) if name != family_of(setting) else None
            if against is None:
                continue
            made += 1
            gain, (low, high) = against
            if low > 0 or high < 0:
                sentences.append(
                    f"{label(setting)}: {gain:+.3f} {score} over {name} at equal acceptance {ours.acceptance:.3f} "
                    f"(95 %: {low:+.3f} to {high:+.3f})"
                )
    return sentences, made


def curves_at(measured: dict[Setting, Measured], n: int, temperature: float) -> dict[str, list[Measured]]:
    """Each family of verifiers with its lossless end, at one N and temperature, and mixing requests. Block
    verification is left out, as it accepts blocks and not positions."""
    here = {
        s: m
        for s, m in measured.items()
        if (s.num_speculative_tokens, s.temperature) == (n, temperature)
        and s.speculates
        and m.acceptance is not None
        and not is_block(s.verifier)
    }
    ends = [m for s, m in here.items() if s.verifier == "lossless"]
    names = dict.fromkeys(family_of(s) for s in here if s.verifier != "lossless")
    curves = {name: ends + [m for s, m in here.items() if family_of(s) == name] for name in names}
    mixed = mixing_requests(ends, measured.get(Setting(DRAFT_ONLY, None, 0, temperature)))
    return curves | ({MIXING: mixed} if mixed else {})


def family_of(setting: Setting) -> str:
    return family({"verifier": setting.verifier, "quality": setting.quality})


def chosen(bench: Bench, temperature: float) -> Row | None:
    """The fastest learned setting (by speed-up, else by acceptance) whose loss against target-only is not told apart
    from 0; where there is none, the one with the best score."""
    recorded = bench.recorded
    measured = by_setting(recorded.measurements, kind=recorded.plan.judged)
    target = measured.get(Setting(TARGET_ONLY, None, 0, temperature))
    learned = [r for r in bench.rows if r["quality"] is not None and r["temperature"] == temperature]
    learned = [r for r in learned if is_head(r)]

    def keeps(row: Row) -> bool:
        ours = measured[setting_of(row)]
        if target is None or len(ours.scores) != len(target.scores):
            return False
        return paired_difference(ours.scores, target.scores)[1][1] >= 0

    good = [r for r in learned if keeps(r)]
    if good:
        return max(good, key=lambda r: (r["speedup"] or 0.0, r["position_acceptance"]))
    return max(learned, key=lambda r: r["score"], default=None)


def is_head(row: Row) -> bool:
    """Whether it is a learned head that accepts positions."""
    return row["trained_on"] is not None and row["acceptance_rate"] is not None and not is_block(row["verifier"])


def arrow(row: Row | None) -> str:
    """The paper's form: acceptance → score."""
    if row is None or row["acceptance_rate"] is None:
        return "–"
    return f"{100 * row['acceptance_rate']:.2f} % → {row['score']:.3f}"


def task_of(bench: Bench) -> str:
    """The task, and its split where that is not the test's."""
    c = bench.recorded.config
    return str(c["task"]) if c.get("split", "test") == "test" else f"{c['task']} ({c['split']})"


def paper_blocks(benches: Sequence[Bench]) -> list[Block]:
    """SD against DIVERSED per task, in the form of the paper's tables. A fine-tuned draft is a row of its own."""
    rows = []
    for bench in benches:
        for t in sorted({r["temperature"] for r in bench.rows}):
            best = chosen(bench, t)
            alone = next((r for r in bench.rows if r["verifier"] == TARGET_ONLY and r["temperature"] == t), None)
            counts = {r["num_speculative_tokens"] for r in bench.rows if r["verifier"] == "lossless"}
            n = best["num_speculative_tokens"] if best else max(counts, default=0)
            lossless = [
                r
                for r in bench.rows
                if (r["verifier"], r["num_speculative_tokens"], r["temperature"]) == ("lossless", n, t)
            ]
            if not lossless and best is None:
                continue
            c = bench.recorded.config
            rows.append(
                [task_of(bench), f"{t:g}", str(n), Path(c["draft"]).name,
                 number(alone["score"] if alone else None, ".3f"),
                 arrow(lossless[0] if lossless else None), arrow(best),
                 "–" if best is None else f"{best['verifier']} @ {best['quality']:g}"]
            )  # fmt: skip
    if not rows:
        return []
    text = (
        "Acceptance rate → score. The learned setting is the fastest whose loss against target-only its interval does "
        "not tell apart from 0, or else the one with the best score. A fine-tuned draft has rows of its own."
    )
    header = ("task", "T", "N", "draft", "target-only", "speculative decoding", "DIVERSED", "setting")
    return [Block("heading", "In the paper's form"), Block("text", text), Block("table", header=header, rows=rows)]


def transfer_blocks(benches: Sequence[Bench]) -> list[Block]:
    """Heads on tasks they were not trained on: train task by test task, at one quality."""
    found = [(r, task_of(b), Path(b.recorded.config["draft"]).name) for b in benches for r in b.rows]
    learned = [(r, task, draft) for r, task, draft in found if r["quality"] is not None and is_head(r)]
    heads = dict.fromkeys((r["trained_on"], r["verifier"], draft) for r, _, draft in learned)
    alike = [train for train, _, _ in heads]
    names = {h: h[0] if alike.count(h[0]) == 1 else f"{h[0]} ({h[1]}, {h[2]})" for h in heads}
    trained = list(dict.fromkeys(train for train, _, _ in heads))
    tested = list(dict.fromkeys(task for _, task, _ in learned))
    if len(trained) < 2 and len(tested) < 2:
        return []
    blocks = [
        Block("heading", "Transfer"),
        Block("text", "Acceptance rate → score of heads (rows: the task they were trained on) on tasks (columns)."),
    ]
    key = [(r["temperature"], r["num_speculative_tokens"], r["quality"]) for r, _, _ in learned]
    for t, n, quality in sorted(set(key)):
        here = [x for x, k in zip(learned, key, strict=True) if k == (t, n, quality)]
        cells = {((r["trained_on"], r["verifier"], draft), task): arrow(r) for r, task, draft in here}
        if len({head[0] for head, _ in cells}) < 2 and len({task for _, task in cells}) < 2:
            continue
        rows = [[name, *(cells.get((head, task), "–") for task in tested)] for head, name in names.items()]
        blocks.append(Block("table", f"T {t:g}, N {n}, quality {quality:g}", ("trained on", *tested), rows))
    return blocks if len(blocks) > 2 else []
