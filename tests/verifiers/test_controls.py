"""The entropy rule: strict below its threshold, permissive above."""

from __future__ import annotations

import math

import pytest
import torch

from diversed.verifiers import EntropyRule


def test_weight_is_one_below_the_threshold_and_zero_above():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.9, 0.1, 0.0]])
    q = torch.full_like(p, 1 / 3)
    rule = EntropyRule(0.5)
    assert math.log(2) > 0.5 > -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert rule.weight(p, q, p, q).tolist() == [0.0, 1.0, 1.0]
    assert torch.equal(rule(p, q, p, q), torch.stack([q[0], p[1], p[2]]))


@pytest.mark.parametrize("threshold", [-0.1, math.nan])
def test_a_threshold_below_zero_is_refused(threshold):
    with pytest.raises(ValueError, match="threshold="):
        EntropyRule(threshold)
