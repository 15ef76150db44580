"""Start-up: what is checked before anything is wrapped, and how it fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from diversed.vllm import __main__ as command
from diversed.vllm import contract, plugin
from diversed.vllm.bounds import Bounds


def doctor(**environment):
    command = [sys.executable, "-m", "diversed.vllm", "doctor"]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def vllm():
    return pytest.importorskip("vllm.sampling_params", reason="needs vLLM: make test-vllm")


def test_without_vllm_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    (fault,) = plugin.find_faults()
    assert "pip install 'diversed[vllm]'" in fault


def test_nothing_is_wrong_with_this_vllm(vllm):
    assert plugin.find_faults() == []


@pytest.mark.parametrize("strict", [False, True])
def test_drift_is_one_loud_line_or_the_end(vllm, monkeypatch, caplog, strict):
    moved = contract.Need("vllm.sampling_params", "SamplingParams.verify", ("self", "somebody_elses_argument"), True)
    monkeypatch.setattr(contract, "COMMON", (*contract.COMMON, moved))
    monkeypatch.setenv("DIVERSED_STRICT", str(int(strict)))
    monkeypatch.setattr(plugin, "install", lambda bounds: pytest.fail("wrapped all the same"))
    monkeypatch.setattr(plugin.logger, "propagate", True)
    with caplog.at_level("ERROR", logger="vllm.diversed"):
        plugin.logger.addHandler(caplog.handler)
        try:
            if strict:
                with pytest.raises(SystemExit, match="somebody_elses_argument"):
                    plugin.register()
            else:
                plugin.register()
        finally:
            plugin.logger.removeHandler(caplog.handler)
    lines = {r.getMessage() for r in caplog.records}
    assert len(lines) == 1
    assert ("refusing to start" if strict else "NOT ACTIVE") in lines.pop()


def test_old_versions_are_refused(vllm, monkeypatch):
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.20.1")
    assert "install vllm>=0.32" in plugin.find_faults()[0]


def test_another_plug_ins_wrapper_is_named(vllm, monkeypatch):
    original = vllm.SamplingParams.verify

    def theirs(self, *args):
        return original(self, *args)

    monkeypatch.setattr(vllm.SamplingParams, "verify", theirs)
    (fault,) = plugin.find_faults()
    assert "SamplingParams.verify is wrapped by" in fault
    assert "test_plugin.py" in fault


def test_unsuitable_settings_of_vllm_are_faults():
    from types import SimpleNamespace

    plain = SimpleNamespace(rejection_sample_method="standard", method="draft_model")
    assert plugin.unsupported(SimpleNamespace(speculative_config=plain, parallel_config=None)) == []
    lossy = SimpleNamespace(rejection_sample_method="synthetic", enable_adaptive_verification=True)
    found = plugin.unsupported(SimpleNamespace(speculative_config=lossy, parallel_config=None))
    assert len(found) == 2


def test_a_mistake_in_the_bounds_ends_the_start(monkeypatch):
    monkeypatch.setenv("DIVERSED_MINIMUM_QUALITY", "5")
    with pytest.raises(SystemExit, match="DIVERSED_MINIMUM_QUALITY='5'"):
        plugin.register()


def test_doctor_tells_and_tests(vllm):
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "runner V1: fits" in done.stdout
    assert "head shop: hidden sizes 384 and 128" in done.stdout
    assert "BAD" not in done.stdout
    assert done.stdout.count("ok ") >= 5


def test_doctor_counts_a_runner_that_does_not_fit(vllm, monkeypatch, capsys):
    """The other runner may do, so start-up is silent; who asks wants to know."""
    moved = contract.Need("vllm.sampling_params", "SamplingParams.verify", ("self", "somebody_elses_argument"))
    monkeypatch.setattr(contract, "V2", (*contract.V2, moved))
    monkeypatch.setattr(command, "self_test", lambda heads: True)
    assert plugin.find_faults() == []
    assert command.doctor() == 1
    assert "NOT ACTIVE: with runner V2: " in capsys.readouterr().out


def test_doctor_names_a_missing_head(vllm):
    done = doctor(DIVERSED_HEADS="lost=no/such/folder/here")
    assert done.returncode == 1
    assert "head lost: no/such/folder/here cannot be loaded" in done.stdout


def test_strict_is_off_by_default():
    assert not Bounds().strict
