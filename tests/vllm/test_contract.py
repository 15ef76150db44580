"""The check that keeps the plug-in from being half active."""

import pytest

from diversed.vllm.contract import COMMON, V1, V2, Need, differences, version_difference

SOURCE = """
import os

class Batch:
    rows: list

    def __init__(self):
        self.extra = 1

if os.environ:
    def verify(a, b, c=None):
        pass

class Runner:
    def sample(self, logits, *, more=None):
        pass
"""
NEEDS = (Need("m", "Batch", ("rows", "extra")), Need("m", "verify", ("a", "b")), Need("m", "Runner.sample", ("self",)))


def test_what_fits_has_no_differences():
    assert differences(NEEDS, {"m": SOURCE}.get) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rows: list", "lines: list", "m.Batch has no rows"),
        ("def verify(a, b, c=None)", "def verify(b, a)", r"m.verify takes \(b, a\) and not \(a, b, ...\)"),
        ("def sample", "def draw", "m.Runner.sample is missing"),
        ("class Runner", "class Walker", "m.Runner.sample is missing"),
    ],
)
def test_drift_is_named(old, new, says):
    (found,) = differences(NEEDS, {"m": SOURCE.replace(old, new)}.get)
    assert __import__("re").search(says, found)


def test_a_missing_module_is_drift_too():
    assert differences(NEEDS[:1], {}.get) == ["m.Batch is missing"]


def test_versions():
    assert version_difference("0.33.0rc1+cpu") == []
    assert version_difference("1.0") == []
    assert "older than 0.32" in version_difference("0.31.2")[0]


def test_the_installed_vllm_fits():
    pytest.importorskip("vllm.sampling_params", reason="needs vLLM: make test-vllm")
    from diversed.vllm.contract import read_installed

    assert differences(COMMON + V1 + V2, read_installed) == []
