"""The logits handed to vLLM, against the verifiers of the native engine."""

import pytest
import torch
from torch.nn.functional import one_hot

from diversed.verification import mask_to_support, total_variation, verification_distribution
from diversed.verifiers import EnsembleHead, EntropyRule, LearnedEnsemble
from diversed.vllm import blend
from diversed.vllm.blend import Rows, group_rows, relaxed_logits
from diversed.vllm.request import Relaxation

V, HIDDEN = 50, (6, 4)


def relaxation(kind, value=0.0, quality=0.5, name=""):
    return Relaxation(kind, name, value, quality, "everywhere")


@pytest.fixture
def heads():
    torch.manual_seed(0)
    head = EnsembleHead(*HIDDEN, features=True)
    torch.nn.init.normal_(head.out.weight, std=0.5)
    return {"a": LearnedEnsemble(head.eval().requires_grad_(False))}


@pytest.fixture
def rows():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(12, V, generator=g) * 3
    logits[:, :5] = -torch.inf
    q = torch.softmax(torch.randn(12, V, generator=g) * 3, -1)
    tokens = torch.multinomial(q, 1, generator=g).squeeze(1)
    return Rows(logits, q, tokens, torch.randn(12, HIDDEN[0], generator=g), torch.randn(12, HIDDEN[1], generator=g))


def expected(rows, weight):
    p = rows.target_logits.softmax(-1)
    return mask_to_support(verification_distribution(p, rows.draft_probs, weight), p, rows.target_logits > -1e30)


BATCH = [None, relaxation("static", 0.3), relaxation("head", quality=0.8, name="a"), relaxation("static", 0.0)]
COUNTS = [3, 4, 3, 2]


def test_each_request_of_a_mixed_batch_gets_its_own_nu(rows, heads):
    logits, weights = relaxed_logits(rows, group_rows(BATCH, COUNTS), heads)
    learned = heads["a"].at(quality=0.8).weight(rows.target_logits.softmax(-1), *rows[1:2], *rows[3:])
    wanted = torch.cat([torch.ones(3), torch.full((4,), 0.3), learned[7:10], torch.zeros(2)])
    assert torch.allclose(weights, wanted, atol=1e-6)
    assert torch.allclose(logits[3:].softmax(-1), expected(rows, wanted)[3:], atol=1e-6)
    assert torch.equal(logits[:3], rows.target_logits[:3])


def test_nothing_forbidden_gets_mass(rows, heads):
    logits, _ = relaxed_logits(rows, group_rows(BATCH, COUNTS), heads)
    assert torch.all(logits.softmax(-1)[:, :5] == 0)
    assert torch.allclose(logits.softmax(-1).sum(-1), torch.ones(12))


def test_weight_one_placeholders_and_strict_rows_keep_the_targets_bits(rows, heads):
    tokens = rows.draft_tokens.clone()
    tokens[4] = -1
    strict = torch.zeros(12, dtype=torch.bool)
    strict[5] = True
    batch = [relaxation("static", 1.0), *BATCH[1:]]
    logits, weights = relaxed_logits(rows._replace(draft_tokens=tokens), group_rows(batch, COUNTS), heads, strict)
    kept = [0, 1, 2, 4, 5]
    assert torch.equal(logits[kept], rows.target_logits[kept])
    assert torch.all(weights[kept] == 1)
    assert not torch.equal(logits[3], rows.target_logits[3])


def test_rows_in_parts_are_the_same(rows, heads, monkeypatch):
    whole, _ = relaxed_logits(rows, group_rows(BATCH, COUNTS), heads)
    monkeypatch.setattr(blend, "MAX_ELEMENTS", 2 * V)
    parts, _ = relaxed_logits(rows, group_rows(BATCH, COUNTS), heads)
    assert torch.equal(whole, parts)


def test_one_hot_drafts(rows):
    batch = [relaxation("static", 0.25)]
    logits, _ = relaxed_logits(rows._replace(draft_probs=None), group_rows(batch, [12]), {})
    q = one_hot(rows.draft_tokens, V).float()
    wanted = expected(rows._replace(draft_probs=q), torch.full((12,), 0.25))
    assert torch.allclose(logits.softmax(-1), wanted, atol=1e-6)


def test_rules_look_at_the_probabilities(rows):
    _logits, weights = relaxed_logits(rows, group_rows([relaxation("entropy", 1.5)], [12]), {})
    p = rows.target_logits.softmax(-1)
    assert torch.equal(weights, EntropyRule(1.5).weight(p, rows.draft_probs, p, p))
    assert 0 < weights.sum() < 12


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_synthetic_accepts_at_its_rate_whatever_the_models_say(rows, rate):
    allowed = rows._replace(target_logits=rows.target_logits.clamp_min(-20))
    logits, _ = relaxed_logits(allowed, group_rows([relaxation("synthetic", rate)], [12]), {})
    nu = logits.softmax(-1)
    acceptance = 1 - total_variation(nu, rows.draft_probs)
    assert torch.allclose(acceptance, torch.full((12,), rate), atol=2e-3)


def test_ranks_that_differ_in_the_last_bit_agree_after_sharing(rows, heads):
    """Hidden states that differ by rounding give other weights; what ``agree`` returns is what is used."""
    groups = group_rows([relaxation("head", name="a")], [12])
    near = rows._replace(target_hidden=rows.target_hidden * (1 + 2e-6))
    shared = []

    def first_rank(weight):
        shared.append(weight.clone())
        return weight

    ours, w = relaxed_logits(rows, groups, heads, agree=first_rank)
    _alone, w_alone = relaxed_logits(near, groups, heads)
    theirs, w_shared = relaxed_logits(near, groups, heads, agree=lambda weight: shared[0])
    assert not torch.equal(w_alone, w)
    assert torch.equal(w_shared, w)
    assert torch.equal(theirs, ours)
