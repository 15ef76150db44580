"""The command line: thin commands over the library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

app = typer.Typer(
    help="Relaxed speculative decoding with a learned ensemble verifier. Start with: diversed demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()
notes = Console(stderr=True)

ORIGIN_STYLES = {"accepted": "green", "recovered": "red", "bonus": "cyan"}

TargetOption = Annotated[
    str | None, typer.Option(help="Target: folder, Hub id or GGUF file. The embedded pair if not given.")
]
DraftOption = Annotated[str | None, typer.Option(help="Draft of the same family. Give both or neither.")]
VerifierOption = Annotated[
    str,
    typer.Option(
        help="lossless, static:W (weight W on the target), learned (the embedded head), or a head's folder or Hub id."
    ),
]
QualityOption = Annotated[
    float | None,
    typer.Option(help="The dial, 0 to 1: 0.5 is the verifier as it is, 1 exactly the target, 0 takes every draft."),
]
TokensOption = Annotated[
    int, typer.Option("--num-speculative-tokens", "-N", help="Drafted tokens per target pass; 0: the target alone.")
]
TemperatureOption = Annotated[float, typer.Option(help="Sampling temperature of both models; 0 is greedy.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16, for both models.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="As transformers' device_map: cuda:0, auto, ... (needs accelerate).")
]
SeedOption = Annotated[int, typer.Option(help="Makes the run reproducible: prompt i draws from seed + i.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file, as JSON rows.")]
DataOption = Annotated[Path | None, typer.Option(help="Folder with task data (cnndm/...); default $DIVERSED_DATA.")]


def load_pair(target: str | None, draft: str | None, dtype: str = "auto", device: str | None = None) -> Any:
    """The pair of --target and --draft, or the embedded one."""
    import torch

    from diversed.engine import ModelPair

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype!r} is unknown: use auto, float32, bfloat16 or float16")
    if (target is None) != (draft is None):
        missing, given = ("draft", target) if draft is None else ("target", draft)
        raise ValueError(
            f"{missing} is missing: with {given!r} give both --target and --draft, or neither for the embedded pair"
        )
    if target is None or draft is None:
        return ModelPair.embedded(dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype))
    with notes.status(f"loading {target} and {draft}"):
        return ModelPair.from_pretrained(target, draft, dtype=dtype, device_map=device)


def pick_verifier(spec: str, quality: float | None) -> Any:
    from diversed.evaluation.settings import Setting, load_verifier

    if quality is None:
        return load_verifier(spec)
    return Setting(spec, quality).prepare(None)[1]["verifier"]  # type: ignore[arg-type]


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=notes,
        transient=True,
    )


@app.command()
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
    from diversed.evaluation.settings import DRAFT_ONLY, TARGET_ONLY, Setting
    from diversed.evaluation.sweep import Plan

    head = f"learned:{task}"
    settings = [Setting(TARGET_ONLY, num_speculative_tokens=0), Setting(DRAFT_ONLY, num_speculative_tokens=0)]
    settings += [Setting(v) for v in ("lossless", "static:0.8", "static:0.5", "static:0.2")]
    settings += [Setting(head, quality=q) for q in (0.9, 0.5, 0.1)]
    rows = run_sweep(
        load_pair(None, None),
        task,
        Plan(tuple(settings), batch_size=50, timing_n=timing_n, seed=seed),
        n=n,
        data_dir=None,
        output_dir=output_dir,
        json_file=json_file,
        resume=False,
        title=f"Embedded pair, {task} problems, T = 1, N = 5",
    )
    show_sample(task, head, seed)
    alone, fast = rows[0], max((r for r in rows if r["verifier"] == head), key=lambda r: r["score"])
    console.print(
        f"\n{head} at quality {fast['quality']:g} answers {fast['speedup']:.1f} times as fast as the target alone; "
        f"score {fast['score']:.3f} against {alone['score']:.3f}."
    )


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
    legend = Text("tokens: ")
    for origin, style in ORIGIN_STYLES.items():
        legend.append(f"{origin} ", style=style)
    console.print(legend)


def coloured(pair: Any, trace: Any) -> Text:
    """The tokens of a trace in the colour of their origin."""
    text = Text()
    for token, origin in zip(trace.token_ids.tolist(), trace.origin, strict=True):
        text.append(pair.tokenizer.decode([token], skip_special_tokens=True), style=ORIGIN_STYLES[origin])
    return text


@app.command()
def bench(
    target: TargetOption = None,
    draft: DraftOption = None,
    task: Annotated[str, typer.Option(help="shop, tally (embedded) or cnndm (needs --data-dir).")] = "shop",
    verifier: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeat for several: lossless, static:W, learned, a head's folder. Default: a spread of all."
        ),
    ] = None,
    quality: Annotated[
        list[float] | None, typer.Option(help="Repeat for several: dial settings of the learned heads.")
    ] = None,
    num_speculative_tokens: Annotated[
        list[int] | None, typer.Option("--num-speculative-tokens", "-N", help="Repeat for several; default 3, 5, 7.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeat for several; default 1.0.")] = None,
    n: Annotated[int, typer.Option(help="Prompts per setting.")] = 200,
    batch_size: Annotated[
        int, typer.Option(help="Prompts at a time for score and acceptance; 1: one pass serves speed too.")
    ] = 50,
    timing_n: Annotated[int, typer.Option(help="Prompts answered one at a time for wall-clock speed.")] = 20,
    output_dir: Annotated[Path, typer.Option(help="Measurements, rows and picture; the same folder goes on.")] = Path(
        "runs/bench"
    ),
    data_dir: DataOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Sweep verifiers, qualities, N and temperatures on one task: the frontier of score against acceptance and speed.

    Target-only decoding always runs beside the others as the baseline. An interrupted run goes on where it stopped
    when it is started again with the same --output-dir.

      diversed bench --verifier lossless --verifier static:0.5 --verifier learned --quality 0.3 --quality 0.7 -N 5
    """
    from diversed.evaluation.settings import DRAFT_ONLY, TARGET_ONLY, Setting, load_verifier
    from diversed.evaluation.sweep import Plan
    from diversed.tasks.word_problems import FAMILIES
    from diversed.verifiers import LearnedEnsemble

    embedded = target is None and draft is None
    default = ["lossless", "static:0.8", "static:0.5", "static:0.2"] + (
        [f"learned:{task}"] if embedded and task in FAMILIES else []
    )
    settings: list[Setting] = []
    for t in temperature or [1.0]:
        settings += [Setting(TARGET_ONLY, num_speculative_tokens=0, temperature=t)]
        settings += [Setting(DRAFT_ONLY, num_speculative_tokens=0, temperature=t)]
        for count in num_speculative_tokens or [3, 5, 7]:
            if count < 1:
                raise ValueError(f"num_speculative_tokens={count} must be at least 1; target-only runs in any case")
            for spec in verifier or default:
                learned = isinstance(load_verifier(spec), LearnedEnsemble)
                for q in (quality or [0.1, 0.3, 0.5, 0.7, 0.9]) if learned else [None]:
                    settings.append(Setting(spec, q, count, t))
    run_sweep(
        load_pair(target, draft, dtype, device),
        task,
        Plan(tuple(dict.fromkeys(settings)), batch_size, timing_n, seed),
        n=n,
        data_dir=data_dir,
        output_dir=output_dir,
        json_file=json_file,
        resume=True,
        title=f"{task}: {target or 'embedded pair'}",
    )


def run_sweep(
    pair: Any,
    task_name: str,
    plan: Any,
    *,
    n: int,
    data_dir: Path | None,
    output_dir: Path,
    json_file: Path | None,
    resume: bool,
    title: str,
) -> list[dict[str, Any]]:
    """Measure, then print the table and write rows and picture."""
    from diversed.evaluation.show import frontier_picture, frontier_table, write_json
    from diversed.evaluation.sweep import summarise, sweep
    from diversed.tasks import load_task

    if plan.batch_size < 1:
        raise ValueError(f"batch_size={plan.batch_size} must be at least 1")
    task = load_task(task_name, n=n, data_dir=data_dir, seed=plan.seed)
    for setting in plan.settings:
        setting.prepare(pair)  # what is wrong with a setting should show before the first measurement
    path = output_dir / "measurements.jsonl"
    if not resume and path.exists():
        path.unlink()
    with progress_bar() as bar:
        job = bar.add_task("measuring", total=None)
        measured = sweep(
            pair, task, plan, path=path, progress=lambda done, total: bar.update(job, completed=done, total=total)
        )
    rows = summarise(measured, pair, task, plan)
    for file in filter(None, (output_dir / "rows.json", json_file)):
        write_json(rows, file)
    console.print(frontier_table(rows, title, task.score_name))
    picture = output_dir / "frontier.png"
    if frontier_picture(rows, picture, title, task.score_name):
        console.print(f"picture: {picture}   rows: {output_dir / 'rows.json'}")
    else:
        console.print(f"rows: {output_dir / 'rows.json'} (for the picture: pip install 'diversed\\[eval]')")
    return rows


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; or use --file, or pipe it in.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    verifier: VerifierOption = "lossless",
    quality: QualityOption = None,
    num_speculative_tokens: TokensOption = 5,
    max_new_tokens: Annotated[int, typer.Option(help="At most this many new tokens.")] = 256,
    temperature: TemperatureOption = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this much mass.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens of at least this share of the top one's mass.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages repeats.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeat for several.")] = None,
    chat_template: Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")] = False,
    origins: Annotated[bool, typer.Option(help="Colour tokens by origin instead of streaming.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Continue one prompt; the text streams to standard output, figures go to standard error.

    diversed generate "Question: Ada has 12 nuts and buys 3 bags of 7 nuts. How many nuts are there now?
    Answer:" --verifier learned --quality 0.5

    diversed generate --target big/ --draft small/ --verifier static:0.5 --file prompt.txt --chat
    """
    from diversed.engine import generate as run
    from diversed.evaluation.show import write_json

    text = read_prompt(prompt, file)
    pair = load_pair(target, draft, dtype, device)
    chosen = pick_verifier(verifier, quality)
    kind: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat_template else {"prompts": [text]}
    printer = TokenPrinter(pair.tokenizer)
    out = run(
        pair,
        **kind,
        verifier=chosen,
        num_speculative_tokens=num_speculative_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop_strings=stop or None,
        seed=seed,
        trace=origins,
        callback=None if origins or stop else lambda _, new: printer.add(new),
    )
    if origins:
        assert out.trace is not None
        console.print(coloured(pair, out.trace[0]))
    else:
        printer.finish(out.texts[0])
    notes.print(figures(out), style="dim")
    if json_file is not None:
        write_json(
            [generation_row(pair, out, verifier, quality, num_speculative_tokens, temperature, seed, text)], json_file
        )


def read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("prompt and --file are both given: choose one")
    if prompt is None and file is None and sys.stdin.isatty():
        raise ValueError("prompt is missing: give it as the argument, with --file, or pipe it in")
    try:
        text = prompt if prompt is not None else file.read_text("utf-8") if file is not None else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file={str(file)!r} cannot be read as UTF-8 text ({error}): check the path") from error
    if not text.strip():
        raise ValueError("prompt is empty: give at least one character")
    return text if prompt is not None else text.rstrip("\n")


class TokenPrinter:
    """Writes text as its tokens arrive, holding back characters whose bytes are not all there."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.ids, self.shown = tokenizer, list[int](), 0

    def add(self, new: list[int]) -> None:
        self.ids += new
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.show(text)

    def show(self, text: str) -> None:
        sys.stdout.write(text[self.shown :])
        sys.stdout.flush()
        self.shown = max(self.shown, len(text))

    def finish(self, text: str) -> None:
        self.show(text)
        sys.stdout.write("\n")


def figures(out: Any) -> str:
    """One line of statistics."""
    stats = out.stats
    parts = [f"{stats.tokens} tokens, {out.finish_reasons[0]}"]
    if stats.acceptance_rate is not None:
        parts += [
            f"acceptance {stats.acceptance_rate:.2f}",
            f"{stats.tokens_per_target_call:.2f} tokens per target call",
        ]
    t = stats.time
    parts += [f"{stats.tokens_per_second:.0f} tokens/s"]
    parts += [f"ms: prefill {t.prefill * 1e3:.0f}, draft {t.draft * 1e3:.0f}, target {t.target * 1e3:.0f}, "
              f"verification {t.verification * 1e3:.0f}, rest {t.rest * 1e3:.0f}"]  # fmt: skip
    return "; ".join(parts)


def generation_row(
    pair: Any, out: Any, verifier: str, quality: float | None, n: int, temperature: float, seed: int, prompt: str
) -> dict[str, Any]:
    from diversed.evaluation.settings import Setting

    stats = out.stats
    return {
        "verifier": verifier,
        "weight": Setting(verifier).weight,
        "quality": quality,
        "num_speculative_tokens": n,
        "temperature": temperature,
        "task": None,
        "n": 1,
        "score": None,
        "score_ci": None,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_ci": None,
        "block_efficiency": stats.block_efficiency,
        "tokens_per_target_call": stats.tokens_per_target_call,
        "tokens_per_second": stats.tokens_per_second,
        "normalised_time": None,
        "speedup": None,
        "seed": seed,
        "provenance": {"target": pair.target_name, "draft": pair.draft_name},
        "prompt": prompt,
        "text": out.texts[0],
        "finish_reason": out.finish_reasons[0],
    }


@app.command()
def chat(
    target: TargetOption = None,
    draft: DraftOption = None,
    verifier: VerifierOption = "lossless",
    quality: QualityOption = None,
    num_speculative_tokens: TokensOption = 5,
    max_new_tokens: Annotated[int, typer.Option(help="At most this many new tokens an answer.")] = 512,
    temperature: TemperatureOption = 1.0,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Talk to a pair. /quality 0.7 turns the dial, /reset forgets, /quit (or end of input) leaves.

    The embedded pair knows word problems only: "Ada has 12 nuts and sells 5. How many nuts are there now?"
    """
    from diversed.engine import generate as run
    from diversed.evaluation.show import write_json

    pair = load_pair(target, draft, dtype, device)
    chosen = pick_verifier(verifier, quality)
    start: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    history, rows = list(start), list[dict[str, Any]]()
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            notes.print("[bold]> [/bold]", end="")
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            break
        line = line.strip()
        if not line:
            continue
        if line == "/reset":
            history = list(start)
            continue
        try:
            if line.startswith("/quality"):
                quality = float(line.removeprefix("/quality").strip())
                chosen = pick_verifier(verifier, quality)
                continue
            printer = TokenPrinter(pair.tokenizer)
            out = run(
                pair,
                messages=[*history, {"role": "user", "content": line}],
                verifier=chosen,
                num_speculative_tokens=num_speculative_tokens,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed + len(rows),
                callback=lambda _, new, printer=printer: printer.add(new),  # type: ignore[misc]
            )
        except ValueError as error:  # a slip of the keyboard should not end the conversation
            notes.print(f"error: {error}", style="red", markup=False)
            if not interactive:
                raise
            continue
        printer.finish(out.texts[0])
        notes.print(figures(out), style="dim")
        history += [{"role": "user", "content": line}, {"role": "assistant", "content": out.texts[0].strip()}]
        rows.append(
            generation_row(pair, out, verifier, quality, num_speculative_tokens, temperature, seed + len(rows), line)
        )
    if json_file is not None:
        write_json(rows, json_file)


def version(show: bool) -> None:
    if show:
        from diversed import __version__

        console.print(__version__)
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Set up what all commands share."""


def main() -> None:
    """Run the command line; what a user can mend is one line on standard error and exit code 2."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from transformers.utils import logging

        logging.disable_progress_bar()
        app()
    except (ValueError, FloatingPointError) as error:
        notes.print(f"diversed: error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        notes.print("interrupted; what was measured so far is kept, the same command goes on from it")
        sys.exit(130)


if __name__ == "__main__":
    main()
