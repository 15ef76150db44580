"""Commands that measure: demo, bench, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from diversed.cli.options import (
    TASK_HELP,
    VERIFIER_HELP,
    DataOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    NumberOfTokensOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    coloured,
    console,
    has_chat_template,
    legend,
    load_pair,
    progress_bar,
)


def demo(
    output_dir: Annotated[Path, typer.Option(help="Where frontier.png and rows.json go.")] = Path("runs/demo"),
    task: Annotated[str, typer.Option(help="shop or tally, the embedded pair's two families of problems.")] = "shop",
    n: Annotated[int, typer.Option(help="Held-out problems for accuracy and acceptance.")] = 300,
    timing_n: Annotated[int, typer.Option(help="Problems answered one at a time for wall-clock speed.")] = 20,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """See it work, offline: the embedded pair under every verifier, side by side.

    Two small Llama models inside the package solve held-out word problems. The table shows what each verifier gains
    (accepted drafts, tokens per target pass, speed) and what it costs (accuracy).
    """
    from diversed.evaluation.sweep import Plan
    from diversed.folders import sole_writer

    pair, head = load_pair(None, None), f"learned:{task}"
    with sole_writer(output_dir):
        forget_demo(output_dir / "measurements.jsonl", pair.target_name)
    rows, _ = run_sweep(
        pair,
        task,
        Plan(demo_settings(task), batch_size=50, timing_n=timing_n, seed=seed),
        n=n,
        data_dir=None,
        output_dir=output_dir,
        json_file=json_file,
        title=f"Embedded pair, {task} problems, T = 1, N = 5",
    )
    show_sample(task, head, seed)
    alone, fast = rows[0], max((r for r in rows if r["verifier"] == head), key=lambda r: r["score"])
    speed = f" answers {fast['speedup']:.1f} times as fast as the target alone;" if timing_n else ":"
    console.print(
        f"\n{head} at quality {fast['quality']:g}{speed} score {fast['score']:.3f} against {alone['score']:.3f}."
    )


def demo_settings(task: str) -> tuple[Any, ...]:
    """What the demo of a family of problems compares."""
    from diversed.evaluation.settings import DRAFT_ONLY, TARGET_ONLY, Setting

    settings = [Setting(TARGET_ONLY, num_speculative_tokens=0), Setting(DRAFT_ONLY, num_speculative_tokens=0)]
    settings += [Setting(v) for v in ("lossless", "static:0.8", "static:0.5", "static:0.2")]
    settings += [Setting(f"learned:{task}", quality=q) for q in (0.9, 0.5, 0.1)]
    return tuple(settings)


def forget_demo(path: Path, target_name: str) -> None:
    """Remove what an earlier demo measured, of either family, so that this one measures anew; nobody else's."""
    from diversed.evaluation.sweep import read_measurements
    from diversed.tasks.word_problems import FAMILIES

    if not path.exists():
        return
    found = read_measurements(path)
    if found.config["target"] != target_name or found.plan.settings not in map(demo_settings, FAMILIES):
        raise ValueError(f"output_dir={str(path.parent)!r} holds other measurements: choose another folder")
    path.unlink()


def show_sample(task_name: str, head: str, seed: int) -> None:
    """One answer, its tokens coloured by where they came from."""
    from diversed.evaluation.settings import Setting
    from diversed.evaluation.sweep import answer
    from diversed.tasks import load_task

    pair = load_pair(None, None)
    task = load_task(task_name, n=1, seed=seed)
    out = answer(pair, task, Setting(head, quality=0.5), 0, 1, seed=seed, trace=True)
    assert out.trace is not None
    console.print(Text(f"\n{task.examples[0].prompt}", style="dim"), end="")
    console.print(coloured(pair, out.trace[0]))
    console.print(legend())


def bench(
    target: TargetOption = None,
    draft: DraftOption = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{TASK_HELP} Repeat for several, each in a folder of its name. Default: that of a training run among "
            "the verifiers, or shop."
        ),
    ] = None,
    verifier: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{VERIFIER_HELP} Also control:NAME (samples from nu, no verification). Repeat for several. Default: "
            "a spread."
        ),
    ] = None,
    rivals: Annotated[bool, typer.Option(help="Also every rival from the literature, each at a few knobs.")] = False,
    peers: Annotated[
        bool, typer.Option(help="Also generate() of transformers: target-only, assisted, assisted with a static blend.")
    ] = False,
    quality: Annotated[
        list[float] | None, typer.Option(help="Repeat for several: dial settings of the learned heads.")
    ] = None,
    num_speculative_tokens: Annotated[
        list[int] | None, typer.Option("--num-speculative-tokens", "-N", help="Repeat for several; default 3, 5, 7.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeat for several; default 1.0.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Repeat for several; default 0. The first also draws the word problems.")
    ] = None,
    reward: Annotated[str | None, typer.Option(help="Scores a task of your own rows: file.py:f or module:f.")] = None,
    n: Annotated[int, typer.Option(help="Prompts per setting.")] = 200,
    batch_size: Annotated[
        int, typer.Option(help="Prompts at a time for score and acceptance; 1: one pass serves speed too.")
    ] = 50,
    timing_n: Annotated[int, typer.Option(help="Prompts answered one at a time for wall-clock speed.")] = 20,
    trace_n: Annotated[
        int, typer.Option(help="Prompts answered with a trace, for bias and for diversed plan; once for all N.")
    ] = 50,
    output_dir: Annotated[Path, typer.Option(help="Measurements, rows and picture; the same folder goes on.")] = Path(
        "runs/bench"
    ),
    data_dir: DataOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    json_file: JsonOption = None,
) -> None:
    """Sweep verifiers, qualities, N and temperatures: the frontier of score against acceptance and speed.

    Target-only decoding always runs beside the others as the baseline. An interrupted run goes on where it stopped
    when it is started again with the same --output-dir, and verifiers can be added that way. Then: diversed report and
    diversed plan.

      diversed bench --verifier lossless --verifier static:0.5 --verifier learned --quality 0.3 --quality 0.7 -N 5

      diversed bench --task shop --task tally --rivals --peers --temperature 0 --temperature 1 --seed 0 --seed 1
    """
    from diversed.evaluation.settings import ASSISTED, PEER, RIVALS
    from diversed.evaluation.show import write_json
    from diversed.evaluation.sweep import Plan
    from diversed.tasks.word_problems import FAMILIES

    tasks = list(task or [])
    for spec in verifier or []:
        if not tasks and (Path(spec) / "config.json").is_file():
            target, draft, found, reward = of_the_run(Path(spec), target, draft, None, reward)
            tasks = [found]
    tasks = tasks or ["shop"]
    embedded = target is None and draft is None
    seeds = list(dict.fromkeys(seed or [0]))
    pair = load_pair(target, draft, dtype, device)
    rows: list[dict[str, Any]] = []
    for name in tasks:
        default = ["lossless", "static:0.8", "static:0.5", "static:0.2"]
        default += [f"learned:{name}"] if embedded and name in FAMILIES else []
        specs = [
            *(verifier or default),
            *(RIVALS if rivals else ()),
            *((PEER, ASSISTED, f"{ASSISTED}:0.5") if peers else ()),
        ]
        settings = settings_of(specs, quality, num_speculative_tokens or [3, 5, 7], temperature or [1.0])
        measured, _ = run_sweep(
            pair,
            name,
            Plan(settings, batch_size, timing_n, seeds[0], trace_n, tuple(seeds[1:])),
            n=n,
            reward=reward,
            data_dir=data_dir,
            output_dir=output_dir if len(tasks) == 1 else output_dir / Path(name).stem,
            json_file=None,
            title=f"{name}: {target or 'embedded pair'}",
        )
        rows += measured
    if json_file is not None:
        write_json(rows, json_file)


def settings_of(
    specs: list[str], qualities: list[float] | None, counts: list[int], temperatures: list[float]
) -> tuple[Any, ...]:
    """Every verifier at every quality (where it is learned), N and temperature, beside target-only and draft-only."""
    from diversed.evaluation.settings import DRAFT_ONLY, PEER, TARGET_ONLY, Setting, head_of

    for count in counts:
        if count < 1:
            raise ValueError(f"num_speculative_tokens={count} must be at least 1; target-only runs in any case")
    settings: list[Setting] = []
    for t in temperatures:
        settings += [Setting(spec, num_speculative_tokens=0, temperature=t) for spec in (TARGET_ONLY, DRAFT_ONLY)]
        for count in counts:
            for spec in specs:
                for q in [None] if head_of(spec) is None else (qualities or [0.1, 0.3, 0.5, 0.7, 0.9]):
                    setting = Setting(spec, q, count, t)
                    alone = setting.is_control or spec == PEER
                    settings.append(Setting(spec, q, 0, t) if alone else setting)
    return tuple(dict.fromkeys(settings))


def evaluate(
    run: Annotated[Path, typer.Argument(help="A training run's folder, or a head's.")],
    target: TargetOption = None,
    draft: DraftOption = None,
    task: Annotated[str | None, typer.Option(help="Another task than the head's own.")] = None,
    reward: Annotated[str | None, typer.Option(help="Scores a task of your own rows: file.py:f or module:f.")] = None,
    split: Annotated[str, typer.Option(help="test, or validation.")] = "test",
    quality: Annotated[list[float] | None, typer.Option(help="Repeat for several dial settings.")] = None,
    verifier: Annotated[list[str] | None, typer.Option(help="Further verifiers beside the standard ones.")] = None,
    num_speculative_tokens: NumberOfTokensOption = 5,
    temperature: TemperatureOption = 1.0,
    n: Annotated[
        int | None, typer.Option(help="The first so many prompts; default: all (the word problems: 1,000).")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.")] = 50,
    timing_n: Annotated[int, typer.Option(help="Prompts answered one at a time for wall-clock speed.")] = 0,
    output_dir: Annotated[Path | None, typer.Option(help="Default: a folder inside the run's.")] = None,
    data_dir: DataOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure a trained head on the test split: does it keep the target's score, and does it beat a static weight?

    Runs the head at several qualities beside target-only decoding, lossless verification and the static curve, all on
    the same prompts, and compares them prompt by prompt. Pair and task are those of the run.

      diversed eval runs/train --n 1000 --timing-n 20
    """
    from diversed.evaluation.compare import by_setting, statements
    from diversed.evaluation.settings import TARGET_ONLY, Setting, head_of
    from diversed.evaluation.show import statement_table, write_json
    from diversed.evaluation.sweep import Plan

    target, draft, task, reward = of_the_run(run, target, draft, task, reward)
    head = str(run)
    baseline = Setting(TARGET_ONLY, None, 0, temperature)
    statics = [f"static:{w:g}" for w in (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.0)]
    curve = [Setting(v, None, num_speculative_tokens, temperature) for v in ("lossless", *statics)]
    settings = [baseline, *curve]
    for spec in (head, *(verifier or [])):
        for q in [None] if head_of(spec) is None else (quality or [0.9, 0.7, 0.5, 0.3, 0.1]):
            settings.append(Setting(spec, q, num_speculative_tokens, temperature))
    folder = output_dir or kept_beside(run) / f"eval-{Path(task).name}-{split}-T{temperature:g}-seed{seed}"
    plan = Plan(tuple(dict.fromkeys(settings)), batch_size, timing_n, seed)
    rows, measurements = run_sweep(
        load_pair(target, draft, dtype, device),
        task,
        plan,
        n=n,
        split=split,
        reward=reward,
        data_dir=data_dir,
        output_dir=folder,
        json_file=json_file,
        title=f"{task}, {split} split: {run}",
    )
    measured = by_setting(measurements, kind=plan.judged)
    measured = {s: m for s, m in measured.items() if s in plan.settings}
    found = statements(measured, baseline, curve)
    console.print(statement_table(found, len(measured[baseline].scores)))
    write_json([vars(f) | {"setting": vars(f.setting)} for f in found], folder / "statements.json")
    console.print(f"rows: {folder / 'rows.json'}   comparisons: {folder / 'statements.json'}   n = {rows[0]['n']}")


def kept_beside(run: Path) -> Path:
    """Where measurements of a run or a head go: not into a run's head/, which training replaces as a whole."""
    return run.parent if run.name == "head" and (run.parent / "validation.jsonl").is_file() else run


def of_the_run(
    run: Path, target: str | None, draft: str | None, task: str | None, reward: str | None
) -> tuple[str | None, str | None, str, str | None]:
    """Pair, task and reward of a training run or a head, as far as they are not given; the embedded pair needs none."""
    import json

    path = run / "config.json"
    if not path.is_file():
        raise ValueError(f"run={str(run)!r} has no config.json: give the folder of a training run or of a head")
    config = json.loads(path.read_text(encoding="utf-8"))
    source = config.get("source", {})
    config = config.get("run", config)
    made = config.get("pair") or {}
    if target is None and draft is None and not str(made.get("target", "")).startswith("diversed/embedded"):
        target, draft = made.get("target"), made.get("draft")
    if task is None:
        task, reward = source.get("task") or config.get("task"), reward or source.get("reward")
    if not task:
        raise ValueError("task: the head's folder does not say what it was trained on; give --task")
    return target, draft, str(task), reward


def run_sweep(
    pair: Any,
    task_name: str,
    plan: Any,
    *,
    n: int | None,
    data_dir: Path | None,
    output_dir: Path,
    json_file: Path | None,
    title: str,
    split: str = "test",
    reward: str | None = None,
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Measure, print the table, write rows and picture; the same folder goes on. Returns rows and measurements."""
    from diversed.evaluation.rows import summarise
    from diversed.evaluation.show import frontier_picture, frontier_table, write_json
    from diversed.evaluation.sweep import read_measurements, sweep
    from diversed.folders import sole_writer
    from diversed.tasks import load_task

    if plan.batch_size < 1:
        raise ValueError(f"batch_size={plan.batch_size} must be at least 1")
    task = load_task(
        task_name, split=split, n=n, data_dir=data_dir, seed=plan.seed, chat=has_chat_template(pair), reward=reward
    )
    for setting in plan.settings:
        setting.prepare(pair)  # what is wrong with a setting should show before the first measurement
    with sole_writer(output_dir):
        path = output_dir / "measurements.jsonl"
        with progress_bar() as bar:
            job = bar.add_task("measuring", total=None)
            measured = sweep(
                pair, task, plan, path=path, progress=lambda done, total: bar.update(job, completed=done, total=total)
            )
        rows = summarise(measured, plan.settings, read_measurements(path).provenance)
        for file in filter(None, (output_dir / "rows.json", json_file)):
            write_json(rows, file)
        console.print(frontier_table(rows, title, task.score_name))
        picture = output_dir / "frontier.png"
        if frontier_picture(rows, picture, title, task.score_name):
            console.print(f"picture: {picture}   rows: {output_dir / 'rows.json'}")
        else:
            console.print(f"rows: {output_dir / 'rows.json'} (for the picture: pip install 'diversed\\[eval]')")
        return rows, measured
