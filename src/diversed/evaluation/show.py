"""Rows of a sweep as a table and as a picture."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from diversed.evaluation.compare import Statement
from diversed.evaluation.settings import CONTROL, PEER
from diversed.evaluation.sweep import Row


def number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    """.953±.013: half the width of the 95 % interval, where a single prompt does not leave it infinite."""
    if value is None or interval is None or not math.isfinite(interval[1] - interval[0]):
        return number(value, ".3f")
    half = (interval[1] - interval[0]) / 2
    return re.sub(r"\b0\.", ".", f"{value:.3f}±{half:.3f}")


def frontier_table(rows: Sequence[Row], title: str, score_name: str) -> Table:
    """The rows for a terminal of 80 columns; N and T only where they differ between rows."""
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    several_n = len({r["num_speculative_tokens"] for r in rows if r["acceptance_rate"] is not None}) > 1
    several_t = len({r["temperature"] for r in rows}) > 1
    table.add_column("verifier", overflow="fold")
    for wanted, name in ((several_n, "N"), (several_t, "T")):
        if wanted:
            table.add_column(name, justify="right", no_wrap=True)
    for name in (score_name, "acceptance", "block\neff.", "tokens\n/call", "tokens\n/s", "speed-\nup"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        cells = [r["verifier"] if r["quality"] is None else f"{r['verifier']} q={r['quality']:g}"]
        cells += [str(r["num_speculative_tokens"])] if several_n else []
        cells += [f"{r['temperature']:g}"] if several_t else []
        cells += [
            with_interval(r["score"], r["score_ci"]),
            with_interval(r["acceptance_rate"], r["acceptance_ci"]),
            number(r["block_efficiency"]),
            number(r["tokens_per_target_call"]),
            number(r["tokens_per_second"], ".0f"),
            number(r["speedup"]) + ("×" if r["speedup"] else ""),
        ]
        table.add_row(*cells, style="bold" if r["quality"] is not None else None)
    table.caption = (
        f"n = {rows[0]['n']} prompts, seed {rows[0]['seed']}, ± 95 %; q is the quality dial; "
        "speed-up over target-only, one prompt at a time"
    )
    return table


def statement_table(found: Sequence[Statement], n: int) -> Table:
    """What a setting costs against the target, and gains over a static weight of equal acceptance, prompt by prompt."""
    table = Table(
        title=f"Compared prompt by prompt (n = {n}, 95 % intervals)",
        title_justify="left",
        caption="acceptance: per examined position; over static: at equal acceptance, between two static weights",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("verifier", overflow="fold")
    for name in ("acceptance", "score", "over target", "over static"):
        table.add_column(name, justify="right", no_wrap=True)
    for f in found:
        cells = [with_interval(f.acceptance, f.acceptance_ci), with_interval(f.score, f.score_ci)]
        for value, ci in ((f.over_target, f.over_target_ci), (f.over_static, f.over_static_ci)):
            cells.append("–" if value is None else f"{value:+.3f}"[0] + with_interval(abs(value), ci))
        table.add_row(f.setting.label, *cells, style="bold" if f.setting.quality is not None else None)
    return table


def write_json(rows: Sequence[Row], path: Path) -> None:
    """All rows as one JSON array, or one clear error. What is not finite, which JSON has no word for, is null."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(list(rows)), indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"json={str(path)!r} cannot be written ({error.strerror}): choose another place") from error


def finite(value: Any) -> Any:
    """The same nested lists and tables with None for every number that is infinite or none."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def family(row: Row) -> str:
    """Which curve of the picture a row belongs to: a head along the dial, or a rule along its knob."""
    name = str(row["verifier"])
    if row["quality"] is not None or name.startswith(PEER):
        return name
    wrapped = [prefix for prefix in (CONTROL, "block:") if name.startswith(prefix)]
    return "".join(wrapped) + name.removeprefix("".join(wrapped)).partition(":")[0]


def style_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each curve."""
    import matplotlib.pyplot as plt

    colours, markers = plt.get_cmap("tab20").colors, "osD^vP*X<>"
    return {n: {"color": colours[i % 20], "marker": markers[i % len(markers)]} for i, n in enumerate(names)}


def frontier_picture(rows: Sequence[Row], path: Path, title: str, score_name: str) -> bool:
    """Score against acceptance and against speed-up, a curve per verifier. False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(family(r) for r in rows))
    measured = [("acceptance_rate", "acceptance rate")]
    if any(r["speedup"] for r in rows):
        measured.append(("speedup", "wall-clock speed-up over target-only"))
    figure, axes = plt.subplots(1, len(measured), figsize=(5.2 * len(measured), 4), squeeze=False, sharey=True)
    styles = style_of(names)
    for axis, (key, label) in zip(axes[0], measured, strict=True):
        for name in names:
            points = sorted(
                (r[key], r["score"], r["score_ci"]) for r in rows if family(r) == name and r[key] is not None
            )
            if not points:
                continue
            x = [p[0] for p in points]
            y = [p[1] for p in points]
            low = [max(0.0, p[1] - p[2][0]) for p in points]
            high = [max(0.0, p[2][1] - p[1]) for p in points]
            style = styles[name] | {"ls": "-" if len(points) > 1 else ""}
            axis.errorbar(x, y, (low, high), capsize=2, ms=4, lw=1.3, label=name, **style)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"{score_name} (95 % interval)")
    axes[0][-1].legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ValueError(f"picture {str(path)!r} cannot be written ({error.strerror}): choose another place") from error
    finally:
        plt.close(figure)
    return True
