"""The README's examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "####" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", blocks("sh"))
def test_shell_blocks_run(script, tmp_path):
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env={"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for file in ("bench/frontier.png", "report/report.html"):
        assert (tmp_path / "runs" / file).is_file()
