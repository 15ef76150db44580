"""Verifiers from the literature: hand-computed cases, their defining properties, and their neutral knobs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diversed import Lossless, ModelPair, StaticEnsemble, Verifier, generate
from diversed.verification import (
    Verified,
    residual_distribution,
    sample,
    total_variation,
    verify_block,
    verify_block_jointly,
)
from diversed.verifiers import (
    BlockVerification,
    Cactus,
    CascadeOpt,
    CascadeToken,
    FuzzyRule,
    Lenience,
    TopKRelaxation,
    TypicalAcceptance,
)
from models import enumerate_exactly, four_token_pair, goodness_of_fit

SIZE = 5
NEUTRAL: dict[str, Verifier] = {
    "lenience": Lenience(1.0),
    "cascade-opt": CascadeOpt(-math.inf),
    "cascade-token": CascadeToken(-0.001),
    "cactus": Cactus(0.0),
    "fuzzy-kl": FuzzyRule("kl", 0.0),
    "fuzzy-js": FuzzyRule("js", 0.0),
    "fuzzy-tv": FuzzyRule("tv", 0.0),
    "typical": TypicalAcceptance(1.0, math.inf),
    "top-k": TopKRelaxation(0),
    "block": BlockVerification(Lossless()),
}
RELAXED: dict[str, Verifier] = {
    "lenience": Lenience(0.4),
    "cascade-opt": CascadeOpt(0.2),
    "cascade-token": CascadeToken(0.6),
    "cactus": Cactus(0.2),
    "fuzzy-kl": FuzzyRule("kl", 0.5),
    "fuzzy-js": FuzzyRule("js", 0.1),
    "fuzzy-tv": FuzzyRule("tv", 0.4),
    "typical": TypicalAcceptance(0.3),
    "top-k": TopKRelaxation(2, 0.1),
    "block": BlockVerification(Lossless()),
    "block of a blend": BlockVerification(StaticEnsemble(0.5)),
}


@st.composite
def distributions(draw: st.DrawFn) -> Tensor:
    mass = draw(st.lists(st.sampled_from([0.0, 0.0, 1e-6, 0.1, 1.0, 3.0]), min_size=SIZE, max_size=SIZE))
    mass[draw(st.integers(0, SIZE - 1))] += 1.0
    exact = torch.tensor(mass, dtype=torch.float64)
    return exact / exact.sum()


def nu_of(verifier: Verifier, p: Tensor, q: Tensor) -> Tensor:
    return verifier(p, q, p[..., :1], q[..., :1])


def close(ours: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=ours.dtype), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", RELAXED)
@given(distributions(), distributions())
def test_every_rival_gives_a_distribution(name: str, p: Tensor, q: Tensor) -> None:
    nu = nu_of(RELAXED[name], p, q)
    assert (nu >= 0).all()
    assert nu.sum() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", RELAXED)
def test_rounding_of_nearly_certain_tokens_does_no_harm(name: str) -> None:
    """Softmaxes in float32, as of a low temperature: sums that miss 1, probabilities of 1 and of 1e-30."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3000, 40, generator=generator) * torch.tensor([3.0, 30.0, 60.0]).repeat(1000).view(-1, 1)
    p, q = logits.softmax(-1)
    sharper = (1.2 * logits[0]).softmax(-1)  # knows fewer tokens, and agrees on the best one
    for a, b in ((p, q), (p, p), (p, sharper), (sharper, p)):
        nu = nu_of(RELAXED[name], a, b)
        assert torch.isfinite(nu).all()
        torch.testing.assert_close(nu.sum(-1), torch.ones(3000), atol=1e-5, rtol=0)
        assert (nu >= 0).all()


@pytest.mark.parametrize("name", NEUTRAL)
@given(distributions(), distributions())
def test_at_the_neutral_knob_the_output_is_the_targets(name: str, p: Tensor, q: Tensor) -> None:
    torch.testing.assert_close(nu_of(NEUTRAL[name], p, q), p, atol=1e-6, rtol=0)


def test_lenience_by_hand() -> None:
    """l = 1/2: p/l = (.2, .6, 1.2) against q = (.5, .4, .1): accepted (.2, .4, .1), of the refused .3 the share
    (0, .2, 1.1)/1.3."""
    nu = nu_of(Lenience(0.5), torch.tensor([0.1, 0.3, 0.6]), torch.tensor([0.5, 0.4, 0.1]))
    close(nu, [0.2, 0.4 + 0.3 * 0.2 / 1.3, 0.1 + 0.3 * 1.1 / 1.3])


@given(distributions(), distributions(), st.floats(0.05, 1))
def test_lenience_accepts_min_1_p_over_lq_and_nothing_comes_out_above_p_over_l(p: Tensor, q: Tensor, l: float) -> None:  # noqa: E741
    nu = nu_of(Lenience(l), p, q)
    torch.testing.assert_close(torch.minimum(q, nu), torch.minimum(q, p / l), atol=1e-6, rtol=0)
    assert (nu <= p / l + 1e-9).all()
    if torch.minimum(q, nu).sum() < 1 - 1e-6:
        torch.testing.assert_close(residual_distribution(nu, q), residual_distribution(p, l * q), atol=1e-5, rtol=0)


def test_cascade_opt_by_hand() -> None:
    """TV = .4. Row 1: max q = .5 < max p - .1 * .4 = .56 defers; row 2, with the models exchanged, does not."""
    a, b = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    nu = nu_of(CascadeOpt(0.1), torch.stack([a, b]), torch.stack([b, a]))
    assert torch.equal(nu, torch.stack([a, a]))
    assert CascadeOpt(0.3).weight(a, b, a, b) == 0  # .5 against .6 - .12


@given(distributions(), distributions())
def test_cascade_opt_goes_from_target_to_draft(p: Tensor, q: Tensor) -> None:
    torch.testing.assert_close(nu_of(CascadeOpt(-1.01), p, q), p, atol=1e-9, rtol=0)
    torch.testing.assert_close(nu_of(CascadeOpt(1.01), p, q), q, atol=1e-9, rtol=0)


def test_cascade_token_by_hand() -> None:
    """A = {p >= .3}: tokens 0 and 1; q(A) = .5, the other half of q is replaced by p."""
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.1, 0.4, 0.5])
    close(nu_of(CascadeToken(0.5), p, q), [0.1 + 0.3, 0.4 + 0.15, 0.05])


def cactus_by_definition(p: Tensor, q: Tensor, delta: float) -> Tensor:
    """Drafted token by drafted token: the accepted part of x, and what replaces the refused part."""
    nu = torch.zeros_like(p)
    for x in range(len(p)):
        h = p * 0
        h[x] = min(1.0, float(p[x] + (2 * delta * p[x] * (1 - p[x])).sqrt()))
        rest = torch.arange(len(p)) != x
        if p[x] < 1:
            h[rest] = p[rest] * (1 - h[x]) / (1 - p[x])
        stays = min(1.0, float(h[x] / q[x])) if q[x] > 0 else 0.0
        nu[x] += q[x] * stays
        if q[x] > 0 and stays < 1:
            nu += q[x] * (1 - stays) * residual_distribution(h, q)
    return nu


def test_cactus_by_hand() -> None:
    """delta = .08, p(0) = .2: h = .2 + sqrt(.16 * .16) = .36. Token 1: h = .8 + .16. Token 0 is refused .24 of the
    time, and only token 1 can replace it."""
    nu = nu_of(Cactus(0.08), torch.tensor([0.2, 0.8]), torch.tensor([0.6, 0.4]))
    close(nu, [0.36, 0.64])


@given(distributions(), distributions(), st.floats(0, 3))
def test_cactus_equals_its_definition_token_by_token(p: Tensor, q: Tensor, delta: float) -> None:
    torch.testing.assert_close(nu_of(Cactus(delta), p, q), cactus_by_definition(p, q, delta), atol=1e-6, rtol=0)


@given(distributions(), distributions(), st.floats(0, 3))
def test_rejection_sampling_against_nu_accepts_what_cactus_accepts(p: Tensor, q: Tensor, delta: float) -> None:
    nu = nu_of(Cactus(delta), p, q)
    h = (p + (2 * delta * p * (1 - p)).sqrt()).clamp(max=1)
    torch.testing.assert_close(torch.minimum(q, nu), torch.minimum(q, h), atol=1e-6, rtol=0)


def test_fuzzy_divergences_by_hand() -> None:
    p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    kl = 0.5 * math.log(3)
    js = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    for divergence, value in (("kl", kl), ("js", js), ("tv", 0.5)):
        assert torch.equal(nu_of(FuzzyRule(divergence, value + 1e-3), p, q), q)
        assert torch.equal(nu_of(FuzzyRule(divergence, value - 1e-3), p, q), p)


def test_fuzzy_kl_is_strict_where_the_draft_lacks_a_token() -> None:
    assert FuzzyRule("kl", 1e9).weight(*torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]]), *torch.zeros(2, 1, 1)) == 1


def test_typical_acceptance_by_hand() -> None:
    """H = ln 4 for four equal tokens: the bar is min(.3, .6/4) = .15 < 1/4. H = 0: the bar is .3."""
    p = torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0], [0.7, 0.29, 0.01, 0.0]])
    accepts = TypicalAcceptance(0.3, 0.6).accepts(p, p)
    # Row 3: H = .655, .6 e^-H = .312, capped at .3: .29 is below.
    assert accepts.tolist() == [[True] * 4, [True, False, False, False], [True, False, False, False]]
    assert TypicalAcceptance(0.09).accepts(p, p)[2].tolist() == [True, True, False, False]  # delta = .3: the bar is .09


def test_top_k_relaxation_by_hand() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    q = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert TopKRelaxation(3, 0.5).accepts(p, q).tolist() == [True, True, False, False]
    assert TopKRelaxation(2, 0.01).accepts(p, q).tolist() == [True, True, False, False]
    assert TopKRelaxation(9, 0.1).accepts(p, q).tolist() == [True] * 4
    close(nu_of(TopKRelaxation(3, 0.5), p, q), [0.1 + 0.35, 0.2 + 0.21, 0.105, 0.035])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Lenience(0.0), "lenience"),
        (lambda: Lenience(1.1), "lenience"),
        (lambda: CascadeOpt(math.nan), "alpha"),
        (lambda: CascadeToken(1.5), "alpha"),
        (lambda: Cactus(-1.0), "delta"),
        (lambda: FuzzyRule("js", -0.1), "threshold"),
        (lambda: FuzzyRule("chi", 0.1), "divergence"),  # type: ignore[arg-type]
        (lambda: TypicalAcceptance(2.0), "epsilon"),
        (lambda: TypicalAcceptance(0.5, -1.0), "delta"),
        (lambda: TopKRelaxation(-1), "k"),
        (lambda: TopKRelaxation(2, 1.5), "ratio"),
        (lambda: BlockVerification(TypicalAcceptance(0.3)), "verifier"),
    ],
)
def test_a_knob_out_of_range_is_one_clear_error(make, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        make()


# --- block verification ---


def test_block_verification_by_hand() -> None:
    """The paper's own example: p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 11/9 stay, 10/9 token by token."""
    draws = 200_000
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([1 / 3, 2 / 3]).double(), torch.tensor([2 / 3, 1 / 3]).double()
    rows = q.expand(draws, 2, 2)
    tokens = sample(rows, torch.rand(draws, 2, generator=generator, dtype=torch.float64))
    u = torch.rand(draws, 3, generator=generator, dtype=torch.float64)
    block = (tokens, rows, p.expand(draws, 2, 2), p.expand(draws, 2), u[:, :2], u[:, 2])
    assert verify_block_jointly(*block).num_accepted.double().mean() == pytest.approx(11 / 9, abs=0.01)
    assert verify_block(*block).num_accepted.double().mean() == pytest.approx(10 / 9, abs=0.01)


@given(st.integers(0, 5_000), st.integers(1, 4))
def test_one_drafted_token_leaves_nothing_to_decide_jointly(seed: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, nu, bonus = torch.randn(3, 8, 1, vocabulary + 1, generator=generator).double().softmax(-1)
    u = torch.rand(8, 3, generator=generator, dtype=torch.float64)
    block = (sample(q, u[:, :1]), q, nu, bonus[:, 0], u[:, 1:2], u[:, 2])
    assert verify_block_jointly(*block).tokens.tolist() == verify_block(*block).tokens.tolist()


@given(st.integers(0, 5_000), st.sampled_from([0.0, torch.nan, torch.inf]), st.sampled_from([-1, 0, 99]))
def test_padding_changes_no_block_verified_jointly(seed: int, junk: float, token: int) -> None:
    n, drafted = 3, torch.tensor([0, 1, 2, 3])
    generator = torch.Generator().manual_seed(seed)
    q, nu = torch.randn(2, 4, n, 4, generator=generator).double().softmax(-1)
    bonus = torch.randn(4, 4, generator=generator).double().softmax(-1)
    u = torch.rand(4, 2 * n + 1, generator=generator, dtype=torch.float64)
    tokens, u_accept, u_next = sample(q, u[:, :n]), u[:, n:-1], u[:, -1]
    padding = torch.arange(n) >= drafted.unsqueeze(1)
    wide = padding.unsqueeze(-1)
    together = verify_block_jointly(
        tokens.masked_fill(padding, token), q.masked_fill(wide, junk), nu.masked_fill(wide, junk), bonus,
        u_accept.masked_fill(padding, 0.0), u_next, drafted,
    )  # fmt: skip
    for b, k in enumerate(drafted.tolist()):
        alone = verify_block_jointly(
            tokens[b : b + 1, :k], q[b : b + 1, :k], nu[b : b + 1, :k], bonus[b : b + 1], u_accept[b : b + 1, :k],
            u_next[b : b + 1],
        )  # fmt: skip
        assert together.tokens[b].tolist() == alone.tokens[0].tolist() + [-1] * (n - k)


# --- through the engine ---

PROMPT = [1, 2, 0]


def generated(pair: ModelPair, verifier: Verifier, n: int, samples: int, bonus: str = "verifier"):
    return generate(
        pair,
        input_ids=torch.tensor([PROMPT]).expand(samples, -1),
        verifier=verifier,
        num_speculative_tokens=n,
        max_new_tokens=max(4, n + 1),
        bonus=bonus,
        ignore_eos=True,
        seed=11,
    )


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return four_token_pair()


@pytest.mark.parametrize("name", RELAXED)
def test_sequences_follow_the_rivals_distribution(pair: ModelPair, name: str) -> None:
    """Chi-square against enumeration; for block verification of the lossless verifier that is exactly the target's."""
    exact = enumerate_exactly(pair, PROMPT, 4, RELAXED[name])
    out = generated(pair, RELAXED[name], 3, 4000)
    counts = torch.bincount(exact.index([ids[:4] for ids in out.token_ids]), minlength=len(exact.sequences))
    assert goodness_of_fit(counts, exact.probability()) > 1e-5


def test_a_block_that_accepts_too_much_is_seen(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square above can fail."""
    import diversed.engine.loop as engine

    def faulty(tokens: Tensor, q: Tensor, nu: Tensor, bonus: Tensor, u_accept: Tensor, *rest: Tensor) -> Verified:
        return verify_block_jointly(tokens, q, nu, bonus, 0.6 * u_accept, *rest)

    monkeypatch.setattr(engine, "verify_block_jointly", faulty)
    exact = enumerate_exactly(pair, PROMPT, 4, Lossless())
    out = generated(pair, BlockVerification(Lossless()), 3, 4000)
    counts = torch.bincount(exact.index([ids[:4] for ids in out.token_ids]), minlength=len(exact.sequences))
    assert goodness_of_fit(counts, exact.probability()) < 1e-5


@pytest.mark.parametrize("inner", [Lossless(), StaticEnsemble(0.6)])
def test_block_verification_accepts_more_than_token_by_token(pair: ModelPair, inner: Verifier) -> None:
    joint = generated(pair, BlockVerification(inner), 4, 2000).stats.block_efficiency
    single = generated(pair, inner, 4, 2000).stats.block_efficiency
    assert joint > single + 0.02


@pytest.mark.parametrize("name", NEUTRAL)
def test_at_the_neutral_knob_the_engine_follows_the_target(pair: ModelPair, name: str) -> None:
    exact = enumerate_exactly(pair, PROMPT, 4, Lossless())
    out = generated(pair, NEUTRAL[name], 2, 2000, bonus="target")
    counts = torch.bincount(exact.index([ids[:4] for ids in out.token_ids]), minlength=len(exact.sequences))
    assert goodness_of_fit(counts, exact.probability()) > 1e-5


@pytest.mark.parametrize("name", [*NEUTRAL, "top-1"])
def test_at_temperature_0_the_neutral_knob_gives_the_targets_greedy_tokens(pair: ModelPair, name: str) -> None:
    verifier = TopKRelaxation(1) if name == "top-1" else NEUTRAL[name]
    ids = torch.tensor([[1, 2, 0], [3, 3, 1], [0, 1, 2]])
    common = {"input_ids": ids, "temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    alone = generate(pair, num_speculative_tokens=0, **common)
    ours = generate(pair, verifier=verifier, num_speculative_tokens=3, **common)
    assert ours.token_ids == alone.token_ids
    if name == "top-1":
        assert ours.stats.acceptance_rate > 0


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_an_acceptance_test_never_lets_a_forbidden_token_through(pair: ModelPair, temperature: float) -> None:
    """With top_k = 1 the target allows one token a position, whatever the draft proposes and the test accepts."""
    ids = torch.tensor([[1, 2, 0], [3, 3, 1], [0, 1, 2]])
    common = {"input_ids": ids, "temperature": temperature, "top_k": 1, "max_new_tokens": 20, "ignore_eos": True}
    alone = generate(pair, num_speculative_tokens=0, **common)
    ours = generate(pair, verifier=TopKRelaxation(4), num_speculative_tokens=3, **common)
    assert ours.token_ids == alone.token_ids
    assert ours.stats.acceptance_rate < 1


def test_total_variation_of_acceptance_tests_is_honest() -> None:
    """What an acceptance test accepts, q(A), lies at or below 1 - TV(q, nu), the most its output would allow."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 200, SIZE, generator=generator).mul(2).softmax(-1)
    test = TopKRelaxation(2, 0.3)
    accepted = (q * test.accepts(p, q)).sum(-1)
    possible = 1 - total_variation(q, nu_of(test, p, q))
    assert (accepted <= possible + 1e-6).all()
    assert (accepted < possible - 0.05).any()


@pytest.mark.parametrize("verifier", [TopKRelaxation(3), TypicalAcceptance(0.05)], ids=["top-k", "typical"])
def test_what_a_trace_says_of_an_acceptance_test_holds_with_truncation(pair: ModelPair, verifier: Verifier) -> None:
    """With top_k = 2 some drafted tokens lie outside what the target allows: never accepted, and so counted."""
    ids = torch.tensor([PROMPT]).expand(400, -1)
    common = {"input_ids": ids, "top_k": 2, "max_new_tokens": 8, "ignore_eos": True, "seed": 5}
    out = generate(pair, verifier=verifier, num_speculative_tokens=3, bonus="verifier", trace=True, **common)
    assert all((t.target_prob > 0).all() for t in out.trace)
    examined = [(o == "accepted", float(a)) for t in out.trace for o, a in zip(t.origin, t.acceptance, strict=True)
                if o != "bonus"]  # fmt: skip
    observed, expected = (sum(x) / len(examined) for x in zip(*examined, strict=True))
    assert observed == pytest.approx(expected, abs=0.04)
    assert expected < 0.95
