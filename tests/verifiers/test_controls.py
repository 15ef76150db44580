"""The training-free rules: strict on one side of their threshold, permissive on the other."""

from __future__ import annotations

import math

import pytest
import torch

from diversed.verification import total_variation
from diversed.verifiers import EntropyRule, FavouriteRule, FuzzyRule, OpeningRule, SetAcceptance


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


def test_the_opening_rule_is_strict_at_first_and_where_the_target_is_sure():
    p = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]])
    places = torch.tensor([[3, 4, 5]])
    assert OpeningRule(4).at_places(places).weight(p, p, p, p).tolist() == [[1.0, 0.0, 0.0]]
    assert OpeningRule(4, 0.5).at_places(places).weight(p, p, p, p).tolist() == [[1.0, 0.0, 1.0]]
    with pytest.raises(ValueError, match="places: "):
        OpeningRule(4).weight(p, p, p, p)
    with pytest.raises(ValueError, match="length="):
        OpeningRule(-1)
    with pytest.raises(ValueError, match="threshold="):
        OpeningRule(4, -1)


def test_the_distance_rule_is_strict_where_the_models_disagree():
    p = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    q = torch.tensor([[0.2, 0.8], [0.4, 0.6]])  # TV .7 and .1
    assert FuzzyRule("tv", 0.6).weight(p, q, p, q).tolist() == [1.0, 0.0]
    assert torch.equal(FuzzyRule("tv", 0.6)(p, q, p, q), torch.stack([p[0], q[1]]))


def test_the_favourite_rule_is_strict_where_the_target_dislikes_the_drafts_favourite():
    p = torch.tensor([[0.95, 0.05], [0.5, 0.5]])
    q = torch.tensor([[0.2, 0.8], [0.4, 0.6]])
    assert FavouriteRule(0.1).weight(p, q, p, q).tolist() == [1.0, 0.0]


def test_a_threshold_that_is_no_probability_is_refused():
    with pytest.raises(ValueError, match="threshold="):
        FavouriteRule(1.5)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
def test_a_set_acceptance_is_met_wherever_lossless_accepts_less(rate):
    p, q = torch.randn(2, 50, 20, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    nu = SetAcceptance(rate)(p, q, p, q)
    acceptance, lossless = 1 - total_variation(nu, q), 1 - total_variation(p, q)
    torch.testing.assert_close(acceptance, lossless.clamp_min(rate))
    assert torch.equal(SetAcceptance(rate).weight(p, p, p, p), torch.full((50,), float(rate < 1)))


def test_a_rate_that_is_none_is_refused():
    with pytest.raises(ValueError, match="rate="):
        SetAcceptance(1.2)
