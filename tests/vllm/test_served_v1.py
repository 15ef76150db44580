"""Model runner V1, end to end: the embedded pair in a real engine."""

from __future__ import annotations

import json

import pytest
import torch
from common import FREE_CHOICE, N, counters, distributions, fit, make_llm, nu_after, verifier

from diversed import generate
from diversed.engine.prompts import pad
from diversed.tasks import load_task
from diversed.tasks.contract import judge
from diversed.vllm.phases import inside_after

SETTINGS = [
    None,
    {"verifier": "static:0.8"},
    {"verifier": "static:0.5"},
    {"verifier": "static:0.2"},
    {"verifier": "static:0"},
    {"head": "shop", "quality": 0.5},
    {"head": "shop", "quality": 0.95},
    {"head": "tally", "quality": 0.8},
]


@pytest.fixture(scope="module")
def llm():
    return make_llm()


@pytest.fixture(scope="module")
def prompts():
    return [e.prompt for e in load_task("shop", split="test", n=24, seed=3).examples]


def params(setting, **changes):
    from vllm import SamplingParams

    extra = None if setting is None else {"diversed": setting}
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 96} | changes, extra_args=extra)


def tokens(llm, prompts, settings, **changes):
    """Token ids per prompt; one setting for all, or one for each."""
    each = settings if isinstance(settings, list) else [settings] * len(prompts)
    out = llm.generate(prompts, [params(s, **changes) for s in each], use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in out]


def test_next_token_follows_nu_in_a_mixed_batch(llm, pair):
    each = 500
    settings = SETTINGS * each
    # Position 1 is the target's (no draft yet), position 2 the first drafted one.
    out = tokens(llm, [FREE_CHOICE] * len(settings), settings, max_tokens=2)
    prompt = pair.tokenizer.encode(FREE_CHOICE)
    for i, setting in enumerate(SETTINGS):
        mine = out[i :: len(SETTINGS)]
        first = max({row[0] for row in mine}, key=[row[0] for row in mine].count)
        second = [row[1] for row in mine if row[0] == first]
        assert len(second) > each / 2
        nu, _ = nu_after(pair, [*prompt, first], setting)
        p, _ = nu_after(pair, [*prompt, first], None)
        assert fit(second, nu) > 1e-4, setting
        if 0.5 * (nu - p).abs().sum() > 0.1:
            assert fit(second, p) < 1e-9, f"{setting}: the test would not see the difference"


@pytest.mark.parametrize("setting", [None, SETTINGS[2], SETTINGS[4], SETTINGS[6]], ids=str)
def test_acceptance_is_one_minus_w_tv(llm, pair, setting):
    n = 400
    before = counters(llm)
    out = tokens(llm, [FREE_CHOICE] * n, setting, max_tokens=2)
    after = counters(llm)
    drafts = after["num_drafts"] - before["num_drafts"]
    accepted = after["num_accepted_tokens_per_pos"][0] - before["num_accepted_tokens_per_pos"][0]
    assert drafts == n
    prompt = pair.tokenizer.encode(FREE_CHOICE)
    expected = 0.0
    for first in {row[0] for row in out}:
        nu, q = nu_after(pair, [*prompt, first], setting)
        expected += torch.minimum(nu, q).sum().item() * sum(row[0] == first for row in out) / n
    error = (expected * (1 - expected) / n) ** 0.5
    assert abs(accepted / drafts - expected) < 4 * error + 1e-6


@pytest.mark.parametrize("setting", SETTINGS[2:7:2] + SETTINGS[5:6], ids=str)
def test_greedy_tokens_equal_the_native_engine(llm, pair, prompts, setting):
    ours = tokens(llm, prompts, setting, temperature=0.0)
    # vLLM takes its first token from the target, before anything is drafted: start the native engine after it, so
    # that blocks begin at the same places.
    ids = [pair.tokenizer.encode(prompt) + row[:1] for prompt, row in zip(prompts, ours, strict=True)]
    padded, mask = pad(ids)
    native = generate(
        pair,
        input_ids=padded,
        attention_mask=mask,
        verifier=verifier(setting),
        num_speculative_tokens=N,
        max_new_tokens=95,
        temperature=0.0,
    )
    end = pair.tokenizer.eos_token_id
    compared = 0
    for mine, theirs in zip(ours, native.token_ids, strict=True):
        if mine[-1] == end:  # else the two engines cut their last blocks differently
            assert mine[1:] == theirs
            compared += 1
    assert compared > len(prompts) / 2


@pytest.mark.slow
@pytest.mark.parametrize("setting", [None, {"verifier": "static:0.5"}, {"head": "shop", "quality": 0.5}], ids=str)
def test_sampling_agrees_with_the_native_engine(llm, pair, setting):
    """T = 1 on 500 problems: acceptance at the first position of a block, and accuracy."""
    task = load_task("shop", split="test", n=500, seed=11)
    problems = [e.prompt for e in task.examples]
    before = counters(llm)
    ours = tokens(llm, problems, setting, max_tokens=24)  # shorter than any solution: no block is cut by its end
    after = counters(llm)
    drafts = after["num_drafts"] - before["num_drafts"]
    rate = (after["num_accepted_tokens_per_pos"][0] - before["num_accepted_tokens_per_pos"][0]) / drafts
    padded, mask = pad([pair.tokenizer.encode(text) + row[:1] for text, row in zip(problems, ours, strict=True)])
    common = {"verifier": verifier(setting), "num_speculative_tokens": N, "temperature": 1.0}
    native = generate(pair, input_ids=padded, attention_mask=mask, max_new_tokens=23, seed=0, **common)
    blocks = sum(c.drafted[0] for c in native.stats.per_sequence)
    native_rate = sum(c.accepted[0] for c in native.stats.per_sequence) / blocks
    error = (rate * (1 - rate) / drafts + native_rate * (1 - native_rate) / blocks) ** 0.5
    assert abs(rate - native_rate) < 4 * error, (rate, native_rate, error)

    texts = [pair.tokenizer.decode(row, skip_special_tokens=True) for row in tokens(llm, problems, setting)]
    mine = judge(task.score, task.examples, texts, "score")
    theirs = judge(
        task.score, task.examples, generate(pair, problems, max_new_tokens=96, seed=0, **common).texts, "score"
    )
    a, b = sum(mine) / 500, sum(theirs) / 500
    print(f"{setting}: first-position acceptance {rate:.3f} and {native_rate:.3f}, accuracy {a:.3f} and {b:.3f}")
    assert abs(a - b) < 4 * ((a * (1 - a) + b * (1 - b) + 0.01) / 500) ** 0.5


def test_quality_one_is_untouched_beside_relaxed_requests(llm, prompts):
    greedy = tokens(llm, prompts, None, temperature=0.0)
    assert tokens(llm, prompts, {"quality": 1}, temperature=0.0) == greedy
    mixed = [{"verifier": "static:0"} if i % 2 else ({"quality": 1.0} if i % 4 else None) for i in range(len(prompts))]
    out = tokens(llm, prompts, mixed, temperature=0.0)
    assert [out[i] for i in range(0, len(out), 2)] == [greedy[i] for i in range(0, len(out), 2)]
    assert [out[i] for i in range(1, len(out), 2)] != [greedy[i] for i in range(1, len(out), 2)]


def test_forbidden_stays_forbidden_at_quality_zero(llm, pair, prompts):
    from vllm import SamplingParams

    everything = {"verifier": "static:0"}
    free = [t for row in tokens(llm, prompts, everything) for t in row]
    common = sorted(set(free), key=free.count)[-12:]
    words = [w for w in (pair.tokenizer.decode([t]) for t in common) if w.strip().isalpha()]
    limited = params(everything, max_tokens=60, bad_words=words)
    expanded = SamplingParams(bad_words=words)
    expanded.update_from_tokenizer(llm.get_tokenizer())  # vLLM's own reading of the words as tokens
    banned = expanded.bad_words_token_ids
    assert sum(free.count(sequence[0]) for sequence in banned if len(sequence) == 1) > len(prompts)
    for o in llm.generate(prompts, limited, use_tqdm=False):
        ids = list(o.outputs[0].token_ids)
        for sequence in banned:
            assert all(ids[i : i + len(sequence)] != sequence for i in range(len(ids)))
    allowed = sorted(set(pair.tokenizer.encode(" 0123456789 + - * = .")))
    for row in tokens(llm, prompts, everything, allowed_token_ids=allowed, max_tokens=40):
        assert set(row) <= set(allowed)


def test_top_p_holds_at_quality_zero(llm, pair):
    """top_k as well, by the same mask; but this version of vLLM's runner V1 fails on a CPU whenever one is given."""
    prompt = pair.tokenizer.encode(FREE_CHOICE)
    out = tokens(llm, [FREE_CHOICE] * 200, {"verifier": "static:0"}, max_tokens=2, top_p=0.6)
    for first in {row[0] for row in out}:
        p, q, *_ = distributions(pair, [*prompt, first])
        order = p.argsort(descending=True)
        nucleus = order[: int((p[order].cumsum(0) < 0.6).sum()) + 1]
        assert q[nucleus].sum() < 0.9, "the draft must want out for this to be a test"
        assert {row[1] for row in out if row[0] == first} <= set(nucleus.tolist())


@pytest.mark.parametrize("phase", ["inside", "outside"])
def test_the_other_phase_stays_the_targets(llm, pair, prompts, phase):
    """Greedy at weight 0: the draft's favourite in the chosen phase, the target's in the other."""
    vocabulary = pair.tokenizer.get_vocab()
    start, end = vocabulary["Ġ="], vocabulary["."]
    relaxed = strict = 0
    for prompt, row in zip(
        prompts, tokens(llm, prompts, {"verifier": "static:0", "phase": phase}, temperature=0.0), strict=True
    ):
        ids = pair.tokenizer.encode(prompt)
        with torch.no_grad():
            logits = pair.target(torch.tensor([ids + row])).logits[0, len(ids) - 1 : -1]
            drafts = pair.draft(torch.tensor([ids + row])).logits[0, len(ids) - 1 : -1]
        inside = inside_after(ids, start, end)
        for token, p, q in zip(row, logits, drafts, strict=True):
            best, near = p.topk(2).values.tolist()
            if best - near > 1e-3:  # a tie may fall either way
                if inside == (phase == "inside"):
                    assert token in (p.argmax(), q.argmax())
                    relaxed += int(token != p.argmax())
                else:
                    assert token == p.argmax()
                    strict += int(p.argmax() != q.argmax())
            inside = token == start or (inside and token != end)
    assert strict > 3, "the draft must want something else where it may not have it"
    if phase == "outside":
        assert relaxed > 10


def test_penalties_shape_nu(llm, pair):
    """A heavy repetition penalty changes the target alone, and nu with it."""
    text = "Question: First, we they you I work find see note.\nAnswer: First"
    prompt = pair.tokenizer.encode(text)
    out = tokens(llm, [text] * 500, {"verifier": "static:0.5"}, max_tokens=2, repetition_penalty=5.0)
    first = max({row[0] for row in out}, key=[row[0] for row in out].count)
    second = [row[1] for row in out if row[0] == first]
    p, q, *_ = distributions(pair, [*prompt, first])
    with torch.no_grad():
        logits = pair.target(torch.tensor([[*prompt, first]])).logits[0, -1].float()
    seen = torch.tensor(sorted({*prompt, first}))
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 5.0, logits[seen] * 5.0)
    assert fit(second, 0.5 * logits.softmax(-1) + 0.5 * q) > 1e-4
    assert fit(second, 0.5 * p + 0.5 * q) < 1e-9


def test_structured_output_holds_at_quality_zero(llm, prompts):
    from vllm.sampling_params import StructuredOutputsParams

    from vllm import SamplingParams

    shape = StructuredOutputsParams(regex=r" [0-9]{1,3} (plus|minus) [0-9]{1,3}")
    out = llm.generate(
        prompts,
        SamplingParams(
            temperature=1.0, max_tokens=30, structured_outputs=shape, extra_args={"diversed": {"verifier": "static:0"}}
        ),
        use_tqdm=False,
    )
    import re

    for o in out:
        assert re.fullmatch(r" [0-9]{1,3} (plus|minus) [0-9]{1,3}", o.outputs[0].text), o.outputs[0].text


def test_logprobs_stay_the_targets(llm, pair):
    prompt = pair.tokenizer.encode(FREE_CHOICE)
    out = llm.generate([FREE_CHOICE] * 4, params({"verifier": "static:0"}, max_tokens=8, logprobs=0), use_tqdm=False)
    for o in out:
        ids = list(o.outputs[0].token_ids)
        with torch.inference_mode():
            logits = pair.target(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        reported = torch.tensor([step[t].logprob for step, t in zip(o.outputs[0].logprobs, ids, strict=True)])
        assert torch.allclose(reported, expected, atol=2e-3)


def test_synthetic_accepts_at_its_rate(llm):
    before = counters(llm)
    tokens(llm, [FREE_CHOICE] * 400, {"verifier": "synthetic:0.7"}, max_tokens=2)
    after = counters(llm)
    accepted = after["num_accepted_tokens_per_pos"][0] - before["num_accepted_tokens_per_pos"][0]
    assert abs(accepted / 400 - 0.7) < 4 * (0.21 / 400) ** 0.5


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"diversed": {"quality": 2}}, "quality=2 must be a number between 0 and 1"),
        ({"diversed": {"head": "poems"}}, "there are: shop, tally"),
        ({"diversed": {"verifier": "static:0.5", "head": "shop"}}, "exclude each other"),
        ({"diversed": json.dumps({"temperature": 1})}, "'temperature' is no setting"),
        ({"diversed_phase": "sometimes", "diversed_quality": 0.5}, "phase='sometimes' is unknown"),
    ],
)
def test_a_bad_setting_is_refused_with_a_reason(llm, extra, says):
    from vllm import SamplingParams

    with pytest.raises(ValueError, match=says):
        llm.generate(["Question:"], SamplingParams(extra_args=extra), use_tqdm=False)


def test_metrics_add_up(llm, prompts):
    import os

    from diversed.vllm.metrics import read_sums
    from diversed.vllm.plugin import REQUESTS

    before, served, vllm_before = read_sums(os.environ["DIVERSED_METRICS_DIR"]), REQUESTS.served.copy(), counters(llm)
    tokens(llm, prompts, {"verifier": "static:0.25"})
    gained = read_sums(os.environ["DIVERSED_METRICS_DIR"]) - before
    vllm_gained = {k: counters(llm)[k] - vllm_before[k] for k in ("num_drafts", "num_draft_tokens")}
    assert REQUESTS.served["static"] - served["static"] == len(prompts)
    assert gained[2, 0] == vllm_gained["num_draft_tokens"]
    assert gained[2, 3] == vllm_gained["num_drafts"]
    assert gained[2, 2] == pytest.approx(0.25 * gained[2, 0])
    assert 0.5 < gained[2, 1] / gained[2, 0] < 1
