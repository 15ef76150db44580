"""Closed forms against enumeration and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diversed import LearnedEnsemble, Lossless, ModelPair, StaticEnsemble, generate
from diversed.theory import (
    Costs,
    acceptance,
    best_num_speculative_tokens,
    bias,
    expected_accepted,
    expected_accepted_constant,
    expected_blocks,
    speedup,
    speedup_with_prompt,
    static_line,
)
from diversed.verification import total_variation, verification_distribution
from models import enumerate_exactly, four_token_pair, random_head

fractions = st.floats(0, 1, allow_subnormal=False)


@st.composite
def distributions(draw: st.DrawFn) -> Tensor:
    mass = draw(st.lists(st.sampled_from([0.0, 1e-6, 0.1, 1.0, 3.0]), min_size=5, max_size=5))
    mass[draw(st.integers(0, 4))] += 1.0
    exact = torch.tensor(mass, dtype=torch.float64)
    return exact / exact.sum()


def test_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.2, 0.3, 0.5])
    nu = torch.tensor([0.35, 0.4, 0.25])
    assert acceptance(nu, q).item() == pytest.approx(0.75)
    assert bias(nu, p).item() == pytest.approx(0.25)
    assert expected_accepted_constant(0.5, 3) == 0.875
    assert expected_accepted_constant(1.0, 4) == 4
    assert expected_accepted([0.5, 0.2, 1.0], 2).tolist() == pytest.approx([0.6, 0.4, 1.0])
    costs = Costs(draft_step=0.1, verification=1.1, per_token=0.02, overhead=0.05)
    assert costs.block(5) == pytest.approx(1.75)
    assert speedup(3.5, 5, costs) == pytest.approx(2.0)
    # Without prompts, speed-up per answer is speed-up per block.
    assert speedup_with_prompt(35, 10, 5, costs) == pytest.approx(2.0)
    with_prompt = Costs(0.1, 1.1, 0.02, 0.05, prefill=3.0, target_prefill=2.0)
    assert speedup_with_prompt(35, 10, 5, with_prompt) == pytest.approx(37 / 20.5)
    # N = 1, 2, 3: 1.5 / 1.27 = 1.18, 1.75 / 1.39 = 1.26, 1.875 / 1.51 = 1.24.
    n, speed = best_num_speculative_tokens(0.5, costs)
    assert (n, speed) == (2, pytest.approx(1.75 / 1.39))
    assert best_num_speculative_tokens(1.0, costs, most=9)[0] == 9
    assert best_num_speculative_tokens(0.1, costs) == (0, 1.0)
    with pytest.raises(ValueError, match="alpha"):
        expected_accepted_constant(1.5, 3)


@given(distributions(), distributions(), fractions)
def test_a_blend_lies_on_the_static_line_and_nothing_lies_above_it(p: Tensor, q: Tensor, w: float) -> None:
    nu = verification_distribution(p, q, torch.tensor(w, dtype=torch.float64))
    tv = float(total_variation(p, q))
    on_line = static_line(tv, w)
    assert float(acceptance(nu, q)) == pytest.approx(float(on_line[0]), abs=1e-9)
    assert float(bias(nu, p)) == pytest.approx(float(on_line[1]), abs=1e-9)
    other = (p + q.roll(1, -1)) / 2  # any other distribution
    assert float(acceptance(other, q)) <= 1 - tv + float(bias(other, p)) + 1e-9


@given(st.lists(fractions, min_size=1, max_size=7), st.integers(1, 5))
def test_expected_blocks_equals_enumeration(keep: list[float], n: int) -> None:
    """Every pattern of kept and refused drafts, played through block by block."""
    total = 0.0
    for pattern in itertools.product([True, False], repeat=len(keep)):
        probability = float(np.prod([b if kept else 1 - b for b, kept in zip(keep, pattern, strict=True)]))
        at = blocks = 0
        while at < len(keep):
            blocks += 1
            accepted = 0
            while accepted < n and at < len(keep) and pattern[at]:
                accepted, at = accepted + 1, at + 1
            at += 1  # recovered or bonus
        total += probability * blocks
    assert expected_blocks(keep, n) == pytest.approx(total, abs=1e-9)


@given(fractions, st.integers(1, 6))
def test_with_a_constant_rate_the_recursion_is_the_closed_form(alpha: float, n: int) -> None:
    inside = expected_accepted([alpha] * (n + 20), n)[:20]
    np.testing.assert_allclose(inside, expected_accepted_constant(alpha, n), atol=1e-9)
    long = 4000
    assert long / expected_blocks([alpha] * long, n) == pytest.approx(
        1 + expected_accepted_constant(alpha, n), rel=5e-3
    )


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return four_token_pair()


VERIFIERS = {"lossless": Lossless(), "static": StaticEnsemble(0.4), "learned": random_head(16, 8)}


def exact_expected_accepted(pair: ModelPair, prompt: list[int], n: int, verifier: LearnedEnsemble) -> float:
    """sum_k sum_{x1..xk} prod min(q_i(x_i), nu_i(x_i)), by enumerating every block."""
    exact = enumerate_exactly(pair, prompt, n, verifier)
    kept = torch.minimum(exact.of_tokens("q"), exact.of_tokens("nu"))
    size = exact.q.shape[-1]
    total = 0.0
    for k in range(1, n + 1):  # prefixes of length k, each once
        first = torch.arange(0, len(kept), size ** (n - k))
        total += float(kept[first, :k].prod(1).sum())
    return total


@pytest.mark.parametrize("name", VERIFIERS)
def test_expected_accepted_equals_enumeration_when_everything_depends_on_everything(pair: ModelPair, name: str) -> None:
    """The recursion on texts, weighted by their probability under nu, is the sum over all blocks."""
    prompt, n = [1, 2, 0], 4
    exact = enumerate_exactly(pair, prompt, n, VERIFIERS[name])
    nu = exact.of_tokens("nu")
    keep = (exact.of_tokens("q") / nu.clamp_min(1e-300)).clamp(max=1.0)
    along = np.array([expected_accepted(b, n)[0] for b in keep.tolist()])
    mean = float((torch.tensor(along) * exact.probability()).sum())
    assert mean == pytest.approx(exact_expected_accepted(pair, prompt, n, VERIFIERS[name]), abs=1e-6)


@pytest.mark.parametrize("name", VERIFIERS)
def test_expected_accepted_equals_what_the_engine_does(pair: ModelPair, name: str) -> None:
    """The first block of 4,000 generations."""
    prompt, n, samples = [1, 2, 0], 4, 4000
    out = generate(
        pair,
        input_ids=torch.tensor([prompt]).expand(samples, -1),
        verifier=VERIFIERS[name],
        num_speculative_tokens=n,
        max_new_tokens=n + 1,
        ignore_eos=True,
        seed=0,
        callback=(first := {}).setdefault,
    )
    accepted = np.array([len(first[i]) - 1 for i in range(samples)])
    assert len(out.token_ids) == samples
    expected = exact_expected_accepted(pair, prompt, n, VERIFIERS[name])
    assert abs(accepted.mean() - expected) < 4 * accepted.std() / samples**0.5
