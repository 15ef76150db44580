"""Sums in the worker, families for Prometheus."""

import pytest
import torch

from diversed.vllm import metrics


def test_sums_reach_the_reader(tmp_path):
    tallies = [metrics.Tally(torch.device("cpu"), tmp_path / f"{i}.sums") for i in range(2)]
    for tally in tallies:
        tally.add(torch.tensor([5, 5, 9]), torch.tensor([0.5, 0.7, 0.9]), torch.tensor([5, 9]), torch.tensor([1, 0]))
    sums = metrics.read_sums(str(tmp_path))
    assert sums[5].tolist() == pytest.approx([4, 2, 2.4, 2])
    assert sums[9].tolist() == pytest.approx([2, 0, 1.8, 2])
    assert sums.sum() == pytest.approx(4 + 2 + 2.4 + 2 + 2 + 1.8 + 2)


def test_families(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client", reason="comes with vLLM")
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    metrics.Tally(torch.device("cpu"), tmp_path / "0.sums").add(
        torch.tensor([3, 3]), torch.tensor([0.2, 0.4]), torch.tensor([3]), torch.tensor([2])
    )
    requests = metrics.Requests()
    requests.count("head:shop")
    requests.count(None)
    found = {(s.name, *s.labels.values()): s.value for f in metrics.families(requests) for s in f.samples}
    assert found["diversed_requests_total", "head:shop"] == 1
    assert found["diversed_refused_requests_total",] == 1
    assert found["diversed_draft_tokens_total", "0.3"] == 2
    assert found["diversed_accepted_tokens_total", "0.3"] == 2
    assert found["diversed_mean_weight", "0.3"] == pytest.approx(0.3)


def test_qualities_fall_into_tenths():
    assert [metrics.bucket(q) for q in (0, 0.05, 0.5, 0.99, 1)] == [0, 0, 5, 9, 9]
    assert metrics.label(3) == "0.3"
