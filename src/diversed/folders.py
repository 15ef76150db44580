"""Folders that runs write to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"  # the file in a folder that says whether somebody writes there


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Make a folder and hold it while this writes to it: a run that two go on with at once is spoilt for both.

    The lock goes with its process, however that ends.

    Raises:
        ValueError: another run holds it; it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / LOCK).acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"output_dir={str(folder)!r} is being written to by another run: wait for it or stop it, or choose another "
            "folder"
        ) from None
    except OSError as error:
        raise ValueError(f"output_dir={str(folder)!r} cannot be written ({error.strerror}): choose another") from error
    with held:
        yield


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """Where two records disagree, in words; empty where they do not."""
    keys = dict.fromkeys([*old, *new])
    return ", ".join(f"{k}: {old.get(k)!r} there, {new.get(k)!r} now" for k in keys if old.get(k) != new.get(k))
