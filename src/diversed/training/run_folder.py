"""A run's folder: its configuration, its log and its pictures.

config.json         settings, pair, task, versions, commit; what a resumed run must agree with
metrics.jsonl       one line per step
validation.jsonl    one line per validation and quality
checkpoint/         the state to resume from
batches/            rollouts or labels, as far as they are still needed
head/               the best head so far, with its card: what --verifier takes
curves.png
.lock               held by whoever writes here
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from diversed.folders import LOCK, differences, sole_writer

Row = dict[str, Any]


@contextlib.contextmanager
def open_run(folder: Path, config: Row, *, resume: bool) -> Iterator[None]:
    """Make the folder, or check that it holds this very run, and hold it meanwhile.

    Raises:
        ValueError: the folder holds another run, or this one and ``resume`` was not asked for; it holds something else,
            and is left as it is; another run is writing to it; it cannot be written.
    """
    if folder.is_dir() and not (folder / LOCK).exists():
        check_run(folder, config, resume)  # before anything is written
    with sole_writer(folder):
        check_run(folder, config, resume)
        path = folder / "config.json"
        if not path.exists():
            write_text(path, json.dumps(config, indent=1) + "\n")
        yield


def check_run(folder: Path, config: Row, resume: bool) -> None:
    path = folder / "config.json"
    try:
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differs = differences(found.get("run", {}), json.loads(json.dumps(config["run"])))
            if differs:
                raise ValueError(
                    f"output_dir={str(folder)!r} holds another run ({differs}): choose another folder, or the same "
                    "settings to go on with that one"
                )
            if not resume:
                raise ValueError(
                    f"output_dir={str(folder)!r} holds this run already: add --resume to go on with it, or choose "
                    "another folder"
                )
        elif any(file.name != LOCK for file in folder.iterdir()):
            raise ValueError(f"output_dir={str(folder)!r} is not empty and holds no run: choose another folder")
    except json.JSONDecodeError as error:
        raise ValueError(f"output_dir: {str(path)!r} is damaged ({error}): choose another folder") from error
    except OSError as error:
        raise ValueError(f"output_dir={str(folder)!r} cannot be read ({error.strerror}): choose another") from error


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, and nothing beside it."""
    fresh = path.with_name(path.name + ".new")
    with writing(path):
        try:
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk and the like as one clear error."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: from torch.save
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(
            f"output_dir: cannot write {str(path)!r} ({reason}). The last checkpoint is whole: make room and "
            "go on with --resume"
        ) from error


def append_row(path: Path, row: Row) -> None:
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file; a last line cut off by a crash is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.split("\n") if line]


def write_rows(path: Path, rows: list[Row]) -> None:
    """A JSONL file anew, whole or not at all."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def keep_rows_before(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint that a resumed run starts from."""
    if path.exists():
        write_rows(path, [row for row in read_rows(path) if row["step"] <= step])


def versions() -> Row:
    """What the numbers were made with."""
    from diversed import __version__

    return {
        "diversed": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
    }


def commit() -> str | None:
    """The commit of the source tree, where this is run from one: not that of a project it is installed in."""
    file = Path(__file__)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=file.parent, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None


def fingerprint(model: torch.nn.Module, *, linear: bool = True) -> str:
    """A hash of a few values of every parameter: whether this is the model a run began with, whatever its name.

    Args:
        linear: with the weights of linear layers. Packing for inference (engine/packing.py) puts them out of reach, on
            some processors.
    """
    found = hashlib.sha256()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            told = parameter.device.type != "meta"  # offloaded ones are elsewhere
            if told and (linear or not isinstance(module, torch.nn.Linear) or name != "weight"):
                found.update(json.dumps([parameter.numel(), parameter.flatten()[:16].tolist()]).encode())
    return found.hexdigest()[:16]


def draw_curves(folder: Path, title: str) -> bool:
    """Reward, acceptance, weight and the validation frontier over steps. False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, checks = read_rows(folder / "metrics.jsonl"), read_rows(folder / "validation.jsonl")
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4))
    for axis, key, label in zip(
        axes,
        ("reward", "acceptance", "weight"),
        ("reward of rollouts", "acceptance 1 - w TV", "mean weight"),
        strict=False,
    ):
        points = [(r["step"], r[key]) for r in steps if r.get(key) is not None]
        axis.plot(*zip(*points, strict=True), lw=1) if points else None
        axis.set(xlabel="step", title=label)
        axis.grid(alpha=0.3)
    for quality in sorted({r["quality"] for r in checks if r["quality"] is not None}, reverse=True):
        points = [(r["position_acceptance"], r["score"]) for r in checks if r["quality"] == quality]
        axes[3].plot(*zip(*points, strict=True), "o-", ms=3, lw=0.6, label=f"quality {quality:g}")
    for row in checks[:1]:
        axes[3].axhline(row["target_score"], ls="--", lw=1, color="gray", label="target-only")
    axes[3].set(xlabel="acceptance per position", title="validation score")
    axes[3].grid(alpha=0.3)
    axes[3].legend(fontsize=7)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    with writing(folder / "curves.png"):
        figure.savefig(folder / "curves.png", dpi=110)
    plt.close(figure)
    return True
