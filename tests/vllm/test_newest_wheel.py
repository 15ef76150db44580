"""Names and signatures in the newest vLLM on the index, read from its wheel: drift is seen before users see it.

Of the wheel's half gigabyte only the few sources that the plug-in relies on are fetched. Where the index cannot be
reached, or answers no partial requests, the test is skipped.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

from diversed.vllm.contract import COMMON, V1, V2, differences, version_difference


class RemoteFile(io.RawIOBase):
    """A file behind HTTP that is read by ranges."""

    def __init__(self, url: str) -> None:
        self.url, self.at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as answer:
            self.size = int(answer.headers["Content-Length"])
        self.fetched = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence] + offset
        return self.at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self.size - self.at)
        if wanted <= 0:
            return 0
        headers = {"Range": f"bytes={self.at}-{self.at + wanted - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self.url, headers=headers), timeout=60) as answer:
            if answer.status != 206:
                raise urllib.error.URLError("the index answers no partial requests")
            data = answer.read(wanted)
        buffer[: len(data)] = data
        self.at += len(data)
        self.fetched += len(data)
        return len(data)


@pytest.fixture(scope="module")
def newest(tmp_path_factory):
    """Version of the newest vLLM, and a reader of its sources."""
    report = Path(tmp_path_factory.mktemp("index")) / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    try:
        subprocess.run([*command, "--report", str(report), "vllm"], check=True, capture_output=True, timeout=300)
        found = json.loads(report.read_text())["install"][0]
        remote = RemoteFile(found["download_info"]["url"])
        wheel = zipfile.ZipFile(io.BufferedReader(remote, 2**16))
    except (subprocess.SubprocessError, OSError, KeyError, ValueError) as error:
        pytest.skip(f"the newest vLLM wheel cannot be read here ({type(error).__name__}: {error})")
    names = set(wheel.namelist())

    def read(module: str) -> str | None:
        path = module.replace(".", "/")
        name = next((n for n in (f"{path}.py", f"{path}/__init__.py") if n in names), None)
        return None if name is None else wheel.read(name).decode()

    return found["metadata"]["version"], read


def test_the_newest_vllm_fits(newest):
    version, read = newest
    assert version_difference(version) == []
    assert differences(COMMON + V1 + V2, read) == [], f"vLLM {version} has moved"


def test_the_reader_sees_drift(newest):
    """The same check over sources with one name changed must fail, or it checks nothing."""
    _, read = newest

    def changed(module: str) -> str | None:
        text = read(module)
        return None if text is None else text.replace("def rejection_sample(", "def rejection_sampling(")

    assert len(differences(V1 + V2, changed)) == 2  # the definitions of both runners
