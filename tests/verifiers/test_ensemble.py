"""The dial, the lossless and the static verifier."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diversed import Lossless, StaticEnsemble
from diversed.verifiers import scale_odds

inner = st.floats(0.01, 0.99)
weights = torch.tensor([0.0, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-6, 1.0], dtype=torch.float64)


def positions(batch: int = 3, size: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some p, q and hidden states."""
    generator = torch.Generator().manual_seed(batch)
    p, q = torch.randn(2, batch, 2, size, generator=generator).mul(2).softmax(-1)
    return p, q, torch.randn(batch, 2, 5, generator=generator), torch.randn(batch, 2, 3, generator=generator)


def test_quality_one_half_changes_nothing() -> None:
    torch.testing.assert_close(scale_odds(weights, 0.5), weights, atol=1e-15, rtol=0)


@pytest.mark.parametrize("end", [0, 0.0, 1, 1.0])
def test_the_ends_hold_for_every_weight(end: float) -> None:
    """Also where the formula alone would read 0/0: weight 0 at quality 1, weight 1 at quality 0."""
    assert torch.equal(scale_odds(weights, end), torch.full_like(weights, end))


@given(inner, inner)
def test_the_dial_is_monotone(low: float, high: float) -> None:
    low, high = sorted((low, high))
    assert (scale_odds(weights, low) <= scale_odds(weights, high) + 1e-12).all()
    if high - low > 1e-3:
        inside = (weights > 0) & (weights < 1)
        assert (scale_odds(weights, low) < scale_odds(weights, high))[inside].all()


@given(inner, inner)
def test_turning_the_dial_twice_adds_log_odds(a: float, b: float) -> None:
    together = a * b / (a * b + (1 - a) * (1 - b))
    torch.testing.assert_close(scale_odds(scale_odds(weights, a), b), scale_odds(weights, together), atol=1e-9, rtol=0)


@given(inner, inner)
def test_on_a_weight_of_one_half_the_dial_is_the_static_weight(w: float, d: float) -> None:
    """And in general weight and quality are interchangeable."""
    half = torch.tensor(0.5, dtype=torch.float64)
    torch.testing.assert_close(scale_odds(half, d), torch.tensor(d, dtype=torch.float64))
    swapped = scale_odds(torch.tensor(d, dtype=torch.float64), w)
    torch.testing.assert_close(scale_odds(torch.tensor(w, dtype=torch.float64), d), swapped)


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), float("inf"), "0.5", None, True])
def test_what_is_no_fraction_is_refused_by_name(bad: object) -> None:
    with pytest.raises(ValueError, match="quality"):
        scale_odds(weights, bad)
    with pytest.raises(ValueError, match="quality"):
        StaticEnsemble(0.5).at(quality=bad)
    with pytest.raises(ValueError, match="quality"):
        Lossless().at(quality=bad)
    with pytest.raises(ValueError, match="weight"):
        StaticEnsemble(bad)


def test_lossless_is_the_target_at_any_quality() -> None:
    p, *rest = positions()
    for verifier in (Lossless(), Lossless().at(quality=0), StaticEnsemble(1.0), StaticEnsemble(0.2).at(quality=1)):
        assert torch.equal(verifier(p, *rest), p)
        assert torch.equal(verifier.weight(p, *rest), torch.ones(3, 2))


def test_quality_zero_is_the_draft() -> None:
    p, q, *rest = positions()
    for verifier in (StaticEnsemble(0.0), StaticEnsemble(0.7).at(quality=0)):
        assert torch.equal(verifier(p, q, *rest), q)


def test_static_blends_with_its_weight() -> None:
    p, q, *rest = positions()
    torch.testing.assert_close(StaticEnsemble(0.7)(p, q, *rest), 0.7 * p + 0.3 * q)
    # odds 7:3, scaled by 1:4, are 7:12
    dialled = StaticEnsemble(0.7).at(quality=0.2)
    torch.testing.assert_close(dialled(p, q, *rest), 7 / 19 * p + 12 / 19 * q)
    torch.testing.assert_close(dialled.weight(p, q, *rest), torch.full((3, 2), 7 / 19))


def test_at_replaces_the_quality_and_leaves_the_original_alone() -> None:
    verifier = StaticEnsemble(0.7)
    assert verifier.at(quality=0.1).at(quality=0.9) == StaticEnsemble(0.7, quality=0.9)
    assert verifier == StaticEnsemble(0.7)
