"""Rows of public data sets, from the Hub through ``datasets`` or from a folder that holds the same columns."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Part = tuple[str, int, int | None]  # a file below the folder, first row, end


@dataclass(frozen=True)
class Source:
    """Where a task's rows are, by split."""

    task: str
    hub: tuple[str, str | None]  #: data set and configuration
    hub_splits: Mapping[str, str]  #: our split -> the Hub's, in its slicing syntax
    files: Mapping[str, tuple[Part, ...]]  #: our split -> files below the folder
    text: Callable[[Row], str]  #: what tells two rows apart
    split_of: Callable[[Row], str] | None = None  #: for a file that holds several splits
    key_characters: int | None = None  #: compare the first characters alone: some rows are excerpts of others


def load_rows(source: Source, split: str, n: int | None, data_dir: str | Path | None, skip: int = 0) -> list[Row]:
    """The first ``n`` rows of a split after ``skip`` ones; None: all of them.

    A row whose text is also in the test split is dropped from validation and train, one of validation from train.

    Raises:
        ValueError: no such split, file or data set; fewer than ``n`` rows.
    """
    if split not in source.hub_splits and split not in source.files:
        offered = [s for s in source.hub_splits if s in _EARLIER]
        raise ValueError(
            f"split={split!r}: task {source.task} has only {', '.join(offered)}; "
            "to train or to tune, use a task that has all three (gsm8k, mbpp, cnndm, xsum, wmt)"
        )
    earlier = [s for s in _EARLIER.get(split, ()) if s in source.hub_splits]
    seen = {_key(source, row) for s in earlier for row in _stored(source, s, data_dir)}

    fresh = (row for row in _stored(source, split, data_dir) if _key(source, row) not in seen)
    rows = list(itertools.islice(fresh, skip, None if n is None else skip + n))
    if n is not None and len(rows) < n:
        raise ValueError(f"n={n} is more than the {len(rows)} rows of {source.task}'s split {split}: ask for fewer")
    if not rows:
        raise ValueError(f"split={split!r} of task {source.task} is empty: check the data")
    return rows


# What a row is compared with before it may be in a split. Test gives way to nothing.
_EARLIER: dict[str, tuple[str, ...]] = {"test": (), "validation": ("test",), "train": ("test", "validation")}


def _key(source: Source, row: Row) -> bytes:
    text = " ".join(source.text(row).split())[: source.key_characters]
    return hashlib.sha256(text.encode()).digest()[:16]


def bucket(text: str, of: int) -> int:
    """A number in [0, of) that depends on the text alone: what decides a split, on every machine and for ever."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % of


def _stored(source: Source, split: str, data_dir: str | Path | None) -> Iterator[Row]:
    folder = data_dir or os.environ.get("DIVERSED_DATA")
    if not folder:
        yield from _hub(source, split)
        return
    for name, start, end in source.files[split]:
        path = Path(folder, name)
        if not path.is_file():
            raise ValueError(f"data_dir={str(folder)!r} has no {name}: check the folder and the split")
        rows = (row for _, row in read_jsonl(path))
        split_of = source.split_of
        if split_of is not None:
            rows = (row for row in rows if split_of(row) == split)
        yield from itertools.islice(rows, start, end)


def _hub(source: Source, split: str) -> Iterator[Row]:
    name, configuration = source.hub
    instead = "or give --data-dir (or set DIVERSED_DATA) to a folder that holds " + source.files[split][0][0]
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"task={source.task} reads {name} from the Hub, which needs the extra 'train': "
            f"pip install 'diversed[train]', {instead}"
        ) from error
    try:
        loaded = datasets.load_dataset(name, configuration, split=source.hub_splits[split])
    except Exception as error:  # a dozen kinds: no connection, no such data set, a full disk
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"task={source.task}: cannot load {name} from the Hub ({type(error).__name__}: {reason}). "
            f"Check the connection, {instead}"
        ) from error
    yield from loaded


def read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """(line number, object) of a JSON lines file, gzipped where its name ends in ``.gz``. Blank lines are skipped.

    Raises:
        ValueError: a line that is no JSON object, with its number; a file that cannot be read.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{path}, line {number} is no JSON ({error.msg}): write one object a line"
                    ) from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number} is no JSON object: write one object a line")
                yield number, row
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON lines in UTF-8 ({error}): check the file") from error
