"""Folders that runs write to have one writer at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from diversed.folders import sole_writer

HOLD = """
import sys, time
from pathlib import Path
from diversed.folders import sole_writer

with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_is_gone_however_that_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match="is being written to by another run"), sole_writer(folder):
                pass
        finally:
            other.kill()
    with sole_writer(folder):
        pass


def test_an_error_gives_the_folder_back(tmp_path: Path) -> None:
    with pytest.raises(KeyError), sole_writer(tmp_path):
        raise KeyError
    with sole_writer(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"), sole_writer(tmp_path / "file" / "run"):
        pass
