"""Commands that turn measurements into decisions: report, plan, calibrate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from diversed.cli.measuring import kept_beside, of_the_run, run_sweep
from diversed.cli.options import (
    DataOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    NumberOfTokensOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    console,
    load_pair,
)

DIAL = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of diversed bench or eval, searched below too.")],
    output_dir: Annotated[
        Path,
        typer.Option(
            help="Where report.html, report.md and pictures/ go; relative to the current folder, not to the benches'."
        ),
    ] = Path("runs/report"),
    json_file: JsonOption = None,
) -> None:
    """Tables, pictures and statements of one bench or several: as Markdown and as one self-contained HTML page.

    Everything is recomputed from the measurements. Statements appear only where 95 % intervals separate; a bench that
    was interrupted is reported as far as it went, with what is missing. The benches' folders stay as they are: the
    report goes to --output-dir.

      diversed report runs/shop runs/tally --output-dir runs/report
    """
    from diversed.evaluation.pages import write_report
    from diversed.evaluation.report import load_benches, report_blocks
    from diversed.evaluation.show import write_json

    benches = load_benches(folders)
    markdown, page = write_report(report_blocks(benches), output_dir)
    if json_file is not None:
        write_json([row for bench in benches for row in bench.rows], json_file)
    console.print(f"report: {page}   Markdown: {markdown}   pictures: {output_dir / 'pictures'}", soft_wrap=True)


def plan(
    trace: Annotated[
        Path, typer.Option(help="A folder of diversed bench with traced and timed passes, or of a calibrated head.")
    ],
    latency_ms: Annotated[float | None, typer.Option(help="At most so many milliseconds a token.")] = None,
    min_quality: Annotated[float | None, typer.Option(help="At least this score of the task.")] = None,
    speedup: Annotated[float | None, typer.Option(help="At least so many times as fast as the target alone.")] = None,
    temperature: TemperatureOption = 1.0,
    json_file: JsonOption = None,
) -> None:
    """Which verifier, quality and N to use, from recorded texts and measured costs; or not to speculate at all.

    Every N up to 16 is considered, measured or not. With a wish no setting meets, the nearest point is named.

      diversed plan --trace runs/shop --min-quality 0.95

      diversed plan --trace runs/shop --speedup 2
    """
    from diversed.evaluation.planner import (
        Wish,
        advice,
        best_per_verifier,
        calibrated,
        candidates,
        choose,
        describe,
        doubt,
        mixing,
    )
    from diversed.evaluation.show import number, with_interval, write_json
    from diversed.evaluation.sweep import read_measurements
    from diversed.verifiers.calibration import load_calibration

    wish = Wish(latency_ms, min_quality, speedup)
    calibration = load_calibration(trace) if trace.is_dir() else None
    recorded = None
    if calibration is not None:
        measured_at = calibration.conditions["temperature"]
        if temperature != measured_at:
            raise ValueError(
                f"temperature={temperature:g}: the head in {str(trace)!r} was calibrated at {measured_at:g}: ask for "
                f"that, or run diversed calibrate --temperature {temperature:g}"
            )
        points = calibrated(str(trace), calibration)
    else:
        recorded = read_measurements(measurements_in(trace))
        points = candidates(recorded, temperature)
    chosen = choose(points, wish)
    table = Table(title="The best N of each, foretold", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("verifier", overflow="fold")
    for name in ("N", "score", "tokens/call", "ms/token", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for p in sorted(best_per_verifier(points), key=lambda p: p.speedup):
        table.add_row(
            p.setting.label,
            str(p.setting.num_speculative_tokens or "–"),
            with_interval(p.score, p.score_ci),
            number(p.block_efficiency),
            number(1000 * p.seconds_per_token),
            number(p.speedup) + "×",
            style="bold" if p.setting.at_n(0) == chosen.setting.at_n(0) else None,
        )
    console.print(table)
    console.print(describe(chosen), soft_wrap=True, markup=False)
    mixed = mixing(chosen, recorded) if recorded is not None else ""
    for note in filter(None, (doubt(chosen, wish), advice(chosen, points), mixed)):
        console.print(note, soft_wrap=True, markup=False)
    if json_file is not None:
        write_json([asdict(p) | {"chosen": p is chosen} for p in points], json_file)


def measurements_in(folder: Path) -> Path:
    """The one measurements file in a folder or below."""
    found = [folder] if folder.is_file() else sorted(folder.rglob("measurements.jsonl"))
    if len(found) > 1:
        names = ", ".join(str(path.parent) for path in found)
        raise ValueError(f"trace={str(folder)!r} holds several benches: choose one of {names}")
    return found[0] if found else folder / "measurements.jsonl"


def calibrate(
    head: Annotated[Path, typer.Argument(help="A head's folder, or a training run's.")],
    target: TargetOption = None,
    draft: DraftOption = None,
    task: Annotated[str | None, typer.Option(help="Another task than the head's own.")] = None,
    reward: Annotated[str | None, typer.Option(help="Scores a task of your own rows: file.py:f or module:f.")] = None,
    split: Annotated[str, typer.Option(help="test, or validation.")] = "validation",
    quality: Annotated[list[float] | None, typer.Option(help="Repeat for the dial settings to measure.")] = None,
    num_speculative_tokens: NumberOfTokensOption = 5,
    temperature: TemperatureOption = 1.0,
    n: Annotated[int, typer.Option(help="Prompts per setting.")] = 200,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time for score and acceptance.")] = 50,
    timing_n: Annotated[int, typer.Option(help="Prompts answered one at a time for wall-clock speed.")] = 20,
    output_dir: Annotated[Path | None, typer.Option(help="Measurements; default: a folder inside the head's.")] = None,
    data_dir: DataOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure a head along the dial and write calibration.json beside it: what each quality costs and gains here.

    After that LearnedEnsemble.from_pretrained(head).at(min_quality=0.66), or .at(max_normalised_time=0.5), finds the
    dial.

      diversed calibrate runs/gsm8k --target big/ --draft small/
    """
    from diversed.evaluation.calibrate import calibration_of
    from diversed.evaluation.settings import TARGET_ONLY, Setting, load_verifier
    from diversed.evaluation.sweep import Plan
    from diversed.verifiers.learned import head_folder

    qualities = tuple(dict.fromkeys(quality or DIAL))
    if timing_n < 1:
        raise ValueError(f"timing_n={timing_n} leaves the speed unmeasured: time at least one prompt")
    if len(qualities) < 2:
        raise ValueError(f"quality: a calibration needs two settings of the dial or more, and got {len(qualities)}")
    target, draft, task, reward = of_the_run(head, target, draft, task, reward)
    folder = head_folder(head, "head")
    settings = [Setting(TARGET_ONLY, None, 0, temperature)]
    settings += [Setting(str(folder), q, num_speculative_tokens, temperature) for q in qualities]
    rows, _ = run_sweep(
        load_pair(target, draft, dtype, device),
        task,
        Plan(tuple(dict.fromkeys(settings)), batch_size, timing_n, seed),
        n=n,
        split=split,
        reward=reward,
        data_dir=data_dir,
        output_dir=output_dir
        or kept_beside(head)
        / f"calibration-{Path(task).name}-{split}-T{temperature:g}-N{num_speculative_tokens}-seed{seed}",
        json_file=json_file,
        title=f"{task}, {split} split: {head}",
    )
    console.print(f"calibration: {calibration_of(rows).save(folder)}")
    load_verifier.cache_clear()  # what was loaded to be measured knows nothing of it
