"""The report's pictures, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diversed.evaluation.compare import MIXING
from diversed.evaluation.prediction import costs_of, foretell
from diversed.evaluation.rows import at_one_n
from diversed.evaluation.settings import DRAFT_ONLY, TARGET_ONLY, Setting
from diversed.evaluation.show import family, style_of
from diversed.evaluation.sweep import Recorded, Row
from diversed.theory import static_line

SHOWN_BLOCK = 12  # the largest N that theory is drawn for
SHOWN_CURVES = 10  # more lines of speed-up against N cannot be told apart


def pictures_of(rows: Sequence[Row], recorded: Recorded) -> list[tuple[str, str]]:
    """(title, SVG) of every picture the rows allow; none where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    score = str(recorded.provenance.get("score", "score"))
    n, at_n = at_one_n(rows)
    acceptance, time = ("position_acceptance", "acceptance per position"), ("normalised_time", "normalised time")
    pictures = [
        (f"{score} against acceptance (N = {n})", scatter(at_n, *acceptance, "score", score)),
        (f"{score} against normalised time (N = {n})", scatter(at_n, *time, "score", score)),
        (f"Normalised time against acceptance (N = {n})", scatter(at_n, *acceptance, *time)),
        ("Acceptance against the static weight, with the line 1 − w·TV", acceptance_against_weight(rows)),
        ("Speed-up against N: theory (lines) over measurement (points)", speedup_against_n(rows, recorded)),
    ]
    return [(title, svg) for title, svg in pictures if svg is not None]


def panels(
    keys: Sequence[Any], name: Callable[[Any], str], draw: Callable[[Any, Any], bool], x: str, y: str
) -> str | None:
    """One panel for each key, sharing their axes; None where no panel drew anything."""
    import matplotlib.pyplot as plt

    if not keys:
        return None
    figure, axes = plt.subplots(1, len(keys), figsize=(4.8 * len(keys) + 1.6, 4.2), squeeze=False, sharey=True)
    drawn = [draw(axis, key) for axis, key in zip(axes[0], keys, strict=True)]
    for axis, key in zip(axes[0], keys, strict=True):
        axis.set_title(name(key), fontsize=10)
        axis.set_xlabel(x)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(y)
    handles = {label: h for axis in axes[0] for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)
    figure.tight_layout()
    text = io.StringIO()
    # Without date and with fixed ids, the same rows give the same file.
    with plt.rc_context({"svg.hashsalt": "diversed", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :] if any(drawn) else None


def scatter(rows: Sequence[Row], x: str, x_label: str, y: str, y_label: str) -> str | None:
    """A curve for each family of verifiers, a panel for each temperature."""
    names = list(dict.fromkeys(map(family, rows)))
    styles = style_of(names)

    def draw(axis: Any, temperature: float) -> bool:
        found = False
        here = [r for r in rows if r["temperature"] == temperature and r[x] is not None and r[y] is not None]
        for name in names:
            points = sorted((r[x], r[y], ends_of(r, y)) for r in here if family(r) == name)
            if points:
                bars = np.array([[v - low, high - v] for _, v, (low, high) in points]).T.clip(min=0)
                style = styles[name] | {"ls": "-" if len(points) > 1 else "", "label": name}
                xs, ys = [p[0] for p in points], [p[1] for p in points]
                axis.errorbar(xs, ys, bars, ms=4, lw=1, capsize=2, elinewidth=0.7, **style)
                found = True
        mixed = mixture([r for r in rows if r["temperature"] == temperature], x, y)
        if mixed:
            axis.plot(*zip(*mixed, strict=True), ":", color="#555", lw=1, label=MIXING)
        return found

    return panels(temperatures(rows), lambda t: f"T = {t:g}", draw, x_label, y_label)


def mixture(rows: Sequence[Row], x: str, y: str) -> list[tuple[float, float]]:
    """The ends of the line of mixing requests: some are left to the draft alone, the others verified lossless (over
    acceptance, of which the draft has 1), or by the faster of that and the target alone (over time)."""
    by_acceptance = x == "position_acceptance"
    draft = next((r for r in rows if r["verifier"] == DRAFT_ONLY), None)
    known = [r for r in rows if r["verifier"] in ("lossless", TARGET_ONLY) and None not in (r[x], r[y])]
    strict = min(known, key=lambda r: r[x], default=None)
    if strict is None or draft is None:
        return []
    ends = [(strict[x], strict[y]), (1.0 if by_acceptance else draft[x], draft[y])]
    return [] if None in ends[1] else ends


def ends_of(row: Row, name: str) -> tuple[float, float]:
    interval = row.get(f"{name}_ci")
    return (row[name], row[name]) if interval is None else (interval[0], interval[1])


def temperatures(rows: Sequence[Row]) -> list[float]:
    return sorted({r["temperature"] for r in rows})


def acceptance_against_weight(rows: Sequence[Row]) -> str | None:
    """Static weights and lossless verification at each temperature above 0, and theory at the TV that lossless texts
    show. Other weights write other texts, whose TV differs: how far points leave the line says by how much."""
    static = [
        r for r in rows if r["weight"] is not None and r["position_acceptance"] is not None and r["quality"] is None
    ]

    def draw(axis: Any, temperature: float) -> bool:
        here = [r for r in static if r["temperature"] == temperature]
        for n in sorted({r["num_speculative_tokens"] for r in here}):
            points = sorted((r["weight"], r["position_acceptance"]) for r in here if r["num_speculative_tokens"] == n)
            axis.plot(*zip(*points, strict=True), "o", ms=4, label=f"measured, N = {n}")
        tv = [r["total_variation"] for r in here if r["verifier"] == "lossless" and r["total_variation"] is not None]
        if tv:
            w = np.linspace(0, 1, 2)
            axis.plot(w, static_line(tv[0], w)[0], "k-", lw=1, label="1 − w·TV on the target's texts")
        own = sorted(
            (r["weight"], 1 - r["weight"] * r["total_variation"]) for r in here if r["total_variation"] is not None
        )
        if own:
            axis.plot(*zip(*own, strict=True), "k+", ms=7, label="1 − w·TV on its own texts")
        return bool(here)

    keys = [t for t in temperatures(static) if t > 0]
    return panels(keys, lambda t: f"T = {t:g}", draw, "weight on the target", "acceptance per position")


def speedup_against_n(rows: Sequence[Row], recorded: Recorded) -> str | None:
    """A line of theory and measured points for each verifier and quality that has both; lossless, static and learned
    ones first, and no more than can be told apart."""
    timed = [r for r in rows if r["predicted_speedup"] is not None and r["speedup"] is not None]
    ours = [r for r in timed if r["weight"] is not None or r["quality"] is not None]
    names = list(dict.fromkeys(label(r) for r in [*ours, *timed]))[:SHOWN_CURVES]
    styles = style_of(names)

    def draw(axis: Any, temperature: float) -> bool:
        for name in names:
            mine = [r for r in timed if label(r) == name and r["temperature"] == temperature]
            if not mine:
                continue
            base = Setting(mine[0]["verifier"], mine[0]["quality"], 1, temperature)
            costs = costs_of(recorded.measurements, base)
            foretold = {n: foretell(recorded.measurements, base.at_n(n), costs) for n in range(1, SHOWN_BLOCK + 1)}
            theory = [(n, f.speedup) for n, f in foretold.items() if f is not None]
            style = styles[name]
            axis.plot(*zip(*theory, strict=True), "-", lw=1, color=style["color"])
            points = sorted((r["num_speculative_tokens"], r["speedup"], ends_of(r, "speedup")) for r in mine)
            bars = np.array([[v - low, high - v] for _, v, (low, high) in points]).T.clip(min=0)
            axis.errorbar(
                [p[0] for p in points], [p[1] for p in points], bars, ls="", ms=5, capsize=2, label=name, **style
            )
        axis.axhline(1.0, color="#888", lw=0.8, ls=":")
        return bool(timed)

    return panels(temperatures(timed), lambda t: f"T = {t:g}", draw, "N", "speed-up over target-only")


def label(row: Row) -> str:
    return str(row["verifier"]) if row["quality"] is None else f"{row['verifier']} @ {row['quality']:g}"
