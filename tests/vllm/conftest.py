"""Engines are started once for a module. Where vLLM is absent, the tests that need it are skipped.

The plug-in reads the operator's settings once a process, so that one set of them holds for all tests here.
"""

import os

import pytest

from diversed.pairs import HEADS

os.environ.update(
    DIVERSED_HEADS=f"shop={HEADS / 'shop'},tally={HEADS / 'tally'}",
    DIVERSED_SAME_NAMES="0",  # the embedded pair is served under the names of its folders
    DIVERSED_ALLOW_SYNTHETIC="1",
    DIVERSED_THINK_START="Ġ=",  # stand-ins for <think> and </think>: every sum of a solution is a phase
    DIVERSED_THINK_END=".",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)


@pytest.fixture(scope="session")
def pair():
    from diversed import ModelPair

    return ModelPair.embedded()
