"""Options that commands share, and what they stand for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

console = Console()
notes = Console(stderr=True)

ORIGIN_STYLES = {"accepted": "green", "recovered": "red", "bonus": "cyan"}

TargetOption = Annotated[
    str | None, typer.Option(help="Target: folder, Hub id or GGUF file. The embedded pair if not given.")
]
DraftOption = Annotated[str | None, typer.Option(help="Draft of the same family. Give both or neither.")]
# Written out, since the names themselves (evaluation.settings.RULES) come with torch, too slow for --help.
VERIFIER_HELP = (
    "lossless; static:W (weight W on the target); learned (the embedded head); the folder of a head or of a training "
    "run, or a head's Hub id; a rule without training (entropy:H, opening:K, opening:K,H, favourite:X, acceptance:R); "
    "block, block:NAME (block verification, of another verifier); or a rival (lenience:L, cascade-opt:A, "
    "cascade-token:A, cactus:D, fuzzy-kl:X, fuzzy-js:X, fuzzy-tv:X, typical:E, topk:K,R)."
)
VerifierOption = Annotated[str, typer.Option(help=VERIFIER_HELP)]
QualityOption = Annotated[
    float | None,
    typer.Option(help="The dial, 0 to 1: 0.5 is the verifier as it is, 1 exactly the target, 0 takes every draft."),
]
MinQualityOption = Annotated[
    float | None, typer.Option(help="Instead of --quality: the task's score a calibrated head is to keep.")
]
MaxTimeOption = Annotated[
    float | None, typer.Option(help="Instead of --quality: time per token over the target's, of a calibrated head.")
]


def tokens_or_auto(given: str | int) -> Any:
    try:
        return int(given)  # a default comes as a number
    except ValueError:
        return given  # what is neither a number nor auto, the engine refuses


NumberOfTokensOption = Annotated[
    int, typer.Option("--num-speculative-tokens", "-N", help="Drafted tokens per target pass.")
]
TokensOption = Annotated[
    Any,
    typer.Option(
        "--num-speculative-tokens",
        "-N",
        parser=tokens_or_auto,
        metavar="N|auto",
        help="Drafted tokens per target pass; 0: the target alone; auto: what pays best, found out along the way.",
    ),
]
TemperatureOption = Annotated[float, typer.Option(help="Sampling temperature of both models; 0 is greedy.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16, for both models.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="As transformers' device_map: cuda:0, auto, cpu, ...; the GPU if there is one.")
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the forward passes of single sequences: a wait of seconds to minutes, then faster."
    ),
]
SeedOption = Annotated[int, typer.Option(help="Makes the run reproducible; each prompt draws from a seed of its own.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file, as JSON rows.")]
DataOption = Annotated[
    Path | None, typer.Option(help="Folder with the tasks' data; default $DIVERSED_DATA, else the Hub.")
]
TASK_HELP = "shop, tally (embedded), gsm8k, mbpp, humaneval, cnndm, xsum, wmt, or your own: rows.jsonl or my_task.py."


def load_pair(
    target: str | None, draft: str | None, dtype: str = "auto", device: str | None = None, **how: bool
) -> Any:
    """The pair of --target and --draft, or the embedded one; on this process's GPU where none is named."""
    import torch

    from diversed.engine import ModelPair

    check_dtype(dtype)
    device = device or this_process_gpu()
    if (target is None) != (draft is None):
        missing, given = ("draft", target) if draft is None else ("target", draft)
        raise ValueError(
            f"{missing} is missing: with {given!r} give both --target and --draft, or neither for the embedded pair"
        )
    if target is None or draft is None:
        how["packed"] = how.get("packed", True) and device is None  # packed weights stay on the CPU
        pair = ModelPair.embedded(dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype), **how)
        for model in (pair.target, pair.draft) if device else ():
            model.to(device)
        return pair
    with notes.status(f"loading {target} and {draft}"):
        return ModelPair.from_pretrained(target, draft, dtype=dtype, device_map=device, **how)


def this_process_gpu() -> str | None:
    """The GPU of this process where there is one; accelerate's launcher numbers processes by LOCAL_RANK."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else None


def pick_verifier(
    spec: str, quality: float | None, min_quality: float | None = None, max_normalised_time: float | None = None
) -> Any:
    """A verifier by its name, at a setting of the dial, or at the one that a calibrated head's wish asks for."""
    from diversed.evaluation.settings import at_quality, load_verifier
    from diversed.verifiers import LearnedEnsemble
    from diversed.verifiers.ensemble import check_fraction

    if quality is not None:
        check_fraction("quality", quality)
    if min_quality is not None or max_normalised_time is not None:
        learned = load_verifier(spec)
        if not isinstance(learned, LearnedEnsemble):
            raise ValueError(f"min_quality, max_normalised_time: {spec} has no calibration; choose a calibrated head")
        return learned.at(quality=quality, min_quality=min_quality, max_normalised_time=max_normalised_time)
    verifier = load_verifier(spec)
    return verifier if quality is None else at_quality(verifier, quality, spec)


def check_dtype(dtype: str) -> str:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype!r} is unknown: use auto, float32, bfloat16 or float16")
    return dtype


def has_chat_template(pair: Any) -> bool:
    return bool(getattr(pair.tokenizer, "chat_template", None))


def progress_bar(*more: TextColumn, transient: bool = True) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *more,
        console=notes,
        transient=transient,
    )


def coloured(pair: Any, trace: Any) -> Text:
    """The tokens of a trace in the colour of their origin."""
    text = Text()
    for token, origin in zip(trace.token_ids.tolist(), trace.origin, strict=True):
        text.append(pair.tokenizer.decode([token], skip_special_tokens=True), style=ORIGIN_STYLES[origin])
    return text


def legend() -> Text:
    """What the colours of :func:`coloured` mean, in a line."""
    text = Text("tokens: ")
    for origin, style in ORIGIN_STYLES.items():
        text.append(f"{origin} ", style=style)
    return text
