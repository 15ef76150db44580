"""Commands that write text: generate, chat."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from diversed.cli.options import (
    CompileOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    MaxTimeOption,
    MinQualityOption,
    QualityOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
    VerifierOption,
    coloured,
    console,
    legend,
    load_pair,
    notes,
    pick_verifier,
)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; or use --file, or pipe it in.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    verifier: VerifierOption = "lossless",
    quality: QualityOption = None,
    min_quality: MinQualityOption = None,
    max_normalised_time: MaxTimeOption = None,
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
    compiled: CompileOption = False,
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
    chosen = pick_verifier(verifier, quality, min_quality, max_normalised_time)
    pair = load_pair(target, draft, dtype, device, compiled=compiled)
    if min_quality is not None or max_normalised_time is not None:
        quality = chosen.quality
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
        notes.print(legend())
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


def read_quality(text: str) -> float:
    from diversed.verifiers.ensemble import check_fraction

    try:
        return check_fraction("quality", float(text))
    except ValueError as error:
        raise ValueError(f"quality={text!r} must be a number between 0 and 1: /quality 0.7") from error


def generation_row(
    pair: Any, out: Any, verifier: str, quality: float | None, n: int | str, temperature: float, seed: int, prompt: str
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
        "position_acceptance": stats.position_acceptance,
        "position_acceptance_ci": None,
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
    compiled: CompileOption = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Talk to a pair. /quality 0.7 turns the dial, /reset forgets, /quit (or end of input) leaves.

    The embedded pair knows word problems only: "Ada has 12 nuts and buys 3 bags of 7
    nuts. How many nuts are there now?"
    """
    from diversed.engine import generate as run
    from diversed.evaluation.show import write_json

    chosen = pick_verifier(verifier, quality)
    pair = load_pair(target, draft, dtype, device, compiled=compiled)
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
                quality = read_quality(line.removeprefix("/quality").strip())
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
