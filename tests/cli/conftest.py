"""What the command line's tests share."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from diversed.cli import main


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Run the command in this process, in an empty folder, and return what it prints to standard error; it must end
    with exit code 2. Starting Python anew for every slip would take longer than all else these tests do."""

    def run(*arguments: str) -> str:
        # What the command sets for its whole process, put back after the test.
        monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        monkeypatch.setattr(sys, "argv", ["diversed", *arguments])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run
