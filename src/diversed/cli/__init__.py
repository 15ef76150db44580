"""The command line: thin commands over the library."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any

import typer

from diversed.cli import deciding, measuring, talking, training
from diversed.cli.options import console, notes

app = typer.Typer(
    help="Relaxed speculative decoding with a learned ensemble verifier. Start with: diversed demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (
    measuring.demo,
    talking.generate,
    talking.chat,
    training.train,
    training.distill,
    measuring.bench,
    deciding.report,
    deciding.plan,
    deciding.calibrate,
):
    app.command()(command)
app.command("eval")(measuring.evaluate)


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


def show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """In place of Python's own form, which shows a line of source code."""
    notes.print(f"diversed: warning: {message}", style="yellow", markup=False, soft_wrap=True)


def main() -> None:
    """Run the command line; what a user can mend is one line on standard error and exit code 2."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.showwarning = show_warning
    try:
        from transformers.utils import logging

        logging.disable_progress_bar()
        app()
    except (ValueError, FloatingPointError) as error:
        notes.print(f"diversed: error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        notes.print(
            "interrupted; what bench, eval and calibrate have measured is kept and the same command goes on from it, "
            "train and distill go on with --resume added"
        )
        sys.exit(130)
