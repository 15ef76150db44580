"""What public reports found wrong with other speculative decoders, each as a test of the whole kind."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from diversed import Lossless, ModelPair, StaticEnsemble, generate
from diversed.verification import residual_distribution, verify_block
from models import (
    VERIFIERS,
    character_tokenizer,
    enumerate_exactly,
    four_token_pair,
    goodness_of_fit,
    greedy_reference,
    noisy,
    pad_left,
    random_prompts,
    table,
    tiny,
)

engine = importlib.import_module("diversed.engine.loop")

REJECT = 1e-5
TARGET = [[0.6, 0.4, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]]
DRAFT = [[0.2, 0.2, 0.3, 0.3], [0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7], [0.4, 0.2, 0.2, 0.2]]


class Recorder:
    """The arguments of every call of verify_block."""

    names = ("tokens", "q", "nu", "bonus", "u_accept", "u_next", "num_drafted")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Tensor]] = []
        monkeypatch.setattr(engine, "verify_block", self)

    def __call__(self, *args: Tensor) -> Any:
        self.calls.append(dict(zip(self.names, args, strict=True)))
        return verify_block(*args)


def first_token_fit(pair: ModelPair, probabilities: list[float], **settings: Any) -> float:
    """Of the first tokens of 4,000 blocks that follow token 0."""
    out = generate(
        pair,
        input_ids=torch.zeros(4000, 1, dtype=torch.long),
        max_new_tokens=4,
        num_speculative_tokens=3,
        seed=0,
        **settings,
    )
    counts = torch.bincount(torch.tensor([ids[0] for ids in out.token_ids]), minlength=len(probabilities))
    return goodness_of_fit(counts, torch.tensor(probabilities))


def test_a_deterministic_draft_does_not_bias_the_output() -> None:
    """transformers 32867: drafting argmax and checking with another q turned [.6, .4] into [.75, .25]."""
    one_hot = table(torch.eye(4)[[0, 1, 0, 3]])
    assert first_token_fit(ModelPair(table(TARGET), one_hot), TARGET[0]) > REJECT


def test_a_draft_that_takes_its_argmax_but_claims_to_have_sampled_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers 32867, planted."""
    monkeypatch.setattr(engine, "sample", lambda probs, u: probs.argmax(-1))
    draft = table([[0.5, 0.3, 0.1, 0.1], *DRAFT[1:]])
    assert first_token_fit(ModelPair(table(TARGET), draft), TARGET[0]) < REJECT


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.55}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 0.5, "top_k": 3}, [16 / 29, 9 / 29, 4 / 29, 0]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ],
)
def test_q_is_truncated_as_the_draw_was(
    request_: dict[str, Any], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 47932: q came back raw although the draft had sampled after top-k."""
    recorder = Recorder(monkeypatch)
    pair = ModelPair(table(TARGET), table([DRAFT[1]] * 4))
    generate(
        pair,
        input_ids=torch.zeros(200, 1, dtype=torch.long),
        max_new_tokens=4,
        num_speculative_tokens=3,
        seed=0,
        **request_,
    )
    for call in recorder.calls:
        torch.testing.assert_close(call["q"], torch.tensor(expected).expand_as(call["q"]), rtol=1e-4, atol=1e-6)
        assert (call["q"].gather(-1, call["tokens"].unsqueeze(-1)) > 0).all()
    assert set(recorder.calls[0]["tokens"].unique().tolist()) == {i for i, x in enumerate(expected) if x}


def test_truncation_leaves_the_output_exact() -> None:
    """transformers 47932: and so the distribution is the truncated target's."""
    truncated = [0.0, 0.0, 3 / 7, 4 / 7]
    pair = ModelPair(table([TARGET[1], *TARGET[1:]]), table([[0.3, 0.1, 0.2, 0.4], *DRAFT[1:]]))
    assert first_token_fit(pair, truncated, top_k=2) > REJECT


def test_processors_and_temperature_reach_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 28166, 28508, 40976: the draft proposed as if the request had asked for nothing."""

    class NotTwo(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.index_fill(-1, torch.tensor([2]), -torch.inf)

    recorder = Recorder(monkeypatch)
    generate(
        ModelPair(table(TARGET), table(DRAFT)),
        input_ids=torch.tensor([[0], [1], [3]]),
        max_new_tokens=10,
        num_speculative_tokens=3,
        temperature=0.5,
        logits_processor=[NotTwo()],
        seed=0,
    )
    by_last = (2 * torch.tensor(DRAFT).log()).index_fill(-1, torch.tensor([2]), -torch.inf).softmax(-1)
    last = torch.tensor([0, 1, 3])
    torch.testing.assert_close(recorder.calls[0]["q"][:, 0], by_last[last])
    for call in recorder.calls:
        torch.testing.assert_close(call["q"][:, 1:], by_last[call["tokens"][:, :-1]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_speculative_tokens", [1, 4, 20])
def test_lengths_and_ends_inside_a_block_are_met_exactly(num_speculative_tokens: int, temperature: float) -> None:
    """transformers 47912, 48981: a draft that is always accepted overshoots neither."""
    target = tiny(eos_token_id=None)
    pair = ModelPair(target, target)
    settings = {"num_speculative_tokens": num_speculative_tokens, "temperature": temperature, "seed": 0}
    prompts = pad_left(random_prompts([4, 9]))
    full = generate(pair, **prompts, max_new_tokens=24, **settings).token_ids
    for limit in range(1, 24):
        out = generate(pair, **prompts, max_new_tokens=limit, **settings)
        assert [len(ids) for ids in out.token_ids] == [limit] * 2
    for token in full[0][:12]:
        out = generate(pair, **prompts, max_new_tokens=24, eos_token_id=token, **settings)
        for ids, complete in zip(out.token_ids, full, strict=True):
            assert ids == (complete[: complete.index(token) + 1] if token in complete else complete)
        assert out.stats.acceptance_rate == 1.0  # what was drafted behind the end does not count as rejected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_strings_inside_a_block_end_the_text(temperature: float) -> None:
    """transformers 48039: found wherever they end, and nothing behind them is returned."""
    target = tiny(eos_token_id=None)
    pair = ModelPair(target, target, character_tokenizer())
    settings = {"num_speculative_tokens": 6, "temperature": temperature, "seed": 0, "max_new_tokens": 24}
    prompts = pad_left(random_prompts([4]))
    (text,) = generate(pair, **prompts, **settings).texts
    for start in range(len(text) - 2):
        stop = text[start : start + 3]
        out = generate(pair, **prompts, **settings, stop_strings=[stop])
        assert out.texts == [text[: text.index(stop) + 3]]
        assert len(pair.tokenizer.decode(out.token_ids[0], skip_special_tokens=True)) == len(out.texts[0])


def test_ragged_acceptance_in_a_left_padded_batch() -> None:
    """transformers 32165: rows accept different numbers and finish at different times."""
    target = tiny("mistral")
    pair = ModelPair(target, noisy(target, 0.1))
    prompts = random_prompts([5, 17, 2, 30, 11, 8, 23, 3], seed=8)
    ends = [5, *range(6, 10)]
    out = generate(pair, **pad_left(prompts), temperature=0, max_new_tokens=40, eos_token_id=ends)
    assert out.token_ids == greedy_reference(target, prompts, 40, eos_token_id=ends)
    assert len({c.target_calls for c in out.stats.per_sequence}) > 3


def grown(model: Any, rows: int) -> Any:
    """The same model with more rows in its embeddings and output layer, which score high and must not be drawn."""
    model.resize_token_embeddings(rows, mean_resizing=False)
    return model


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(64, 80), (80, 64), (72, 80)])
def test_vocabularies_padded_to_different_sizes(target_rows: int, draft_rows: int) -> None:
    """transformers 45307, vLLM 7252: Qwen pads 151,936 and 152,064 rows around one tokenizer."""
    target, draft = tiny("qwen3"), noisy(tiny("qwen3"), 0.1)
    prompts = random_prompts([5, 9])
    expected = greedy_reference(target, prompts, 20)
    with torch.no_grad():
        for model, rows in ((target, target_rows), (draft, draft_rows)):
            grown(model, rows)
            model.lm_head.weight[64:] = 3 * model.lm_head.weight[:1]
    pair = ModelPair(target, draft, character_tokenizer(64))
    assert pair.vocab_size == 64
    out = generate(pair, **pad_left(prompts), temperature=0, max_new_tokens=20)
    assert out.token_ids == expected
    for verifier in VERIFIERS["lossless"], StaticEnsemble(0.3), StaticEnsemble(0.0):
        out = generate(pair, **pad_left(prompts * 20), verifier=verifier, max_new_tokens=20, seed=0, trace=True)
        assert max(max(ids) for ids in out.token_ids) < 64


def test_tokens_that_only_the_target_knows_are_drawn_and_fed_to_the_draft() -> None:
    """transformers 45307, vLLM 7252: without a tokenizer to say where the padding starts, the target decides."""
    target = table([[0.1, 0.1, 0.3, 0.5], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0], [0.3, 0.3, 0.2, 0.2]])
    draft = table([[0.5, 0.5], [0.9, 0.1]])
    pair = ModelPair(target, draft)
    assert first_token_fit(pair, [0.1, 0.1, 0.3, 0.5]) > REJECT
    out = generate(pair, input_ids=torch.tensor([[3]]).expand(2000, -1), max_new_tokens=2, seed=0)
    assert {ids[0] for ids in out.token_ids} == {0, 1, 2, 3}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device; here there is only the CPU")
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("bonus", ["target", "verifier"])
def test_target_and_draft_on_different_devices(devices: tuple[str, str], bonus: str) -> None:
    """transformers 35099."""
    target = tiny()
    draft = noisy(target)
    prompts = random_prompts([5, 9, 2])
    expected = greedy_reference(target, prompts, 20)
    pair = ModelPair(target.to(devices[0]), draft.to(devices[1]))
    settings: dict[str, Any] = {"bonus": bonus, "max_new_tokens": 20, "seed": 0, "trace": True}
    assert generate(pair, **pad_left(prompts), temperature=0, **settings).token_ids == expected
    out = generate(pair, **pad_left(prompts), verifier=StaticEnsemble(0.5), repetition_penalty=1.1, **settings)
    assert out.stats.tokens > 3


@pytest.mark.parametrize("verifier", [Lossless(), StaticEnsemble(0.4)])
def test_penalties_biases_and_min_p_apply_at_every_drafted_position(
    verifier: StaticEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 18902, 42744: p of every position in a block is what the processors make of that very prefix."""
    processors = [RepetitionPenaltyLogitsProcessor(1.5), SequenceBiasLogitsProcessor({(9,): 3.0, (11, 12): -4.0})]
    target = tiny(scale=5.0, eos_token_id=None)
    pair = ModelPair(target, noisy(target, 0.3))
    prompts = random_prompts([6, 11])
    out = generate(
        pair,
        **pad_left(prompts),
        verifier=verifier,
        repetition_penalty=1.5,
        logits_processor=processors[1:],
        min_p=0.05,
        num_speculative_tokens=4,
        max_new_tokens=25,
        seed=0,
        trace=True,
    )
    assert out.trace is not None
    everything = LogitsProcessorList([*processors, MinPLogitsWarper(0.05)])
    for prompt, new, trace in zip(prompts, out.token_ids, out.trace, strict=True):
        ids = torch.tensor([prompt + new])
        for model, seen in ((pair.target, trace.target_prob), (pair.draft, trace.draft_prob)):
            with torch.no_grad():
                logits = model(ids).logits[0]
            for i, token in enumerate(new):
                at = len(prompt) + i
                p = everything(ids[:, :at], logits[at - 1 : at].clone()).softmax(-1)[0, token]
                if not seen[i].isnan():
                    torch.testing.assert_close(seen[i], p, rtol=1e-3, atol=1e-5)
    assert {o for t in out.trace for o in t.origin} == {"accepted", "recovered", "bonus"}


@pytest.mark.parametrize("num_speculative_tokens", [1, 5])
def test_penalised_greedy_output_equals_that_of_the_target(num_speculative_tokens: int) -> None:
    """vLLM 18902, 42744."""
    target = tiny()
    pair = ModelPair(target, noisy(target))
    prompts = random_prompts([6, 11, 2])
    bias = {(9,): 3.0, (11, 12): -4.0}
    out = generate(
        pair,
        **pad_left(prompts),
        temperature=0,
        repetition_penalty=1.5,
        logits_processor=[SequenceBiasLogitsProcessor(bias)],
        num_speculative_tokens=num_speculative_tokens,
        max_new_tokens=25,
    )
    biased = LogitsProcessorList([SequenceBiasLogitsProcessor(bias)])
    expected = greedy_reference(target, prompts, 25, repetition_penalty=1.5, logits_processor=biased)
    assert out.token_ids == expected
    assert expected != greedy_reference(target, prompts, 25)


@pytest.mark.parametrize("bonus", ["target", "verifier"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_decoding_stays_constrained(temperature: float, bonus: str) -> None:
    """vLLM 9423: even where every draft is taken (test_support.py has more kinds)."""

    class OneMore(LogitsProcessor):
        """After token i only i + 1 to i + 3."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            step = (torch.arange(64) - input_ids[:, -1:]) % 64
            return scores.masked_fill((step < 1) | (step > 3), -torch.inf)

    pair = ModelPair(tiny(eos_token_id=None), tiny(seed=1))
    for quality in (0.0, 0.3, 1.0):
        out = generate(
            pair,
            **pad_left(random_prompts([6, 11, 2])),
            verifier=StaticEnsemble(0.5).at(quality=quality),
            temperature=temperature,
            bonus=bonus,
            logits_processor=[OneMore()],
            max_new_tokens=30,
            seed=0,
        )
        for prompt, new in zip(out.prompt_ids, out.token_ids, strict=True):
            ids = torch.tensor(prompt[-1:] + new)
            assert set(((ids[1:] - ids[:-1]) % 64).tolist()) <= {1, 2, 3}


def test_pooled_figures_are_the_sums_of_the_single_ones() -> None:
    """vLLM 42508: also where sequences end inside a block, whose tail counts for neither."""
    target = tiny(scale=5.0)
    pair = ModelPair(target, noisy(target, 0.1))
    out = generate(pair, **pad_left(random_prompts([6, 11, 2, 5] * 4)), eos_token_id=list(range(5, 12)), seed=0)
    total, single = out.stats, out.stats.per_sequence
    for name in ("target_calls", "tokens"):
        assert getattr(total, name) == sum(getattr(c, name) for c in single)
    for name in ("drafted", "accepted"):
        assert getattr(total, name) == [sum(column) for column in zip(*(getattr(c, name) for c in single), strict=True)]
    ended_inside = [c for c in single if c.tokens < c.target_calls + sum(c.accepted)]
    assert ended_inside
    assert total.tokens == total.target_calls + sum(total.accepted) - len(ended_inside)
    assert total.acceptance_rate == sum(total.accepted) / sum(total.drafted)


def test_a_uniform_draw_of_exactly_zero_accepts_no_token_of_zero_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 35771: through the engine, with every draw 0."""
    monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.zeros(*size, dtype=torch.float64))
    target = table([[0.0, 0.0, 0.5, 0.5]] * 4)
    pair = ModelPair(target, table([[0.5, 0.3, 0.1, 0.1]] * 4))
    out = generate(pair, input_ids=torch.tensor([[0], [3]]), max_new_tokens=6, seed=0)
    assert out.token_ids == [[2] * 6] * 2
    assert out.stats.acceptance_rate == 0.0


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 3, 8])
def test_lossless_greedy_output_does_not_depend_on_the_drafter(num_speculative_tokens: int) -> None:
    """llama.cpp 27975: a good, a bad, a degenerate and a perfect drafter."""
    target = tiny("gemma3")
    prompts = random_prompts([6, 25, 2])
    expected = greedy_reference(target, prompts, 30)
    drafters = [target, noisy(target), tiny("gpt2", seed=1), tiny(seed=2), table(torch.eye(64).roll(1, 1))]
    rates = []
    for draft in drafters:
        out = generate(
            ModelPair(target, draft),
            **pad_left(prompts),
            temperature=0,
            max_new_tokens=30,
            num_speculative_tokens=num_speculative_tokens,
        )
        assert out.token_ids == expected
        rates.append(out.stats.acceptance_rate)
    if num_speculative_tokens:
        assert rates[0] == 1.0
        assert min(rates) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_q_that_verifies_is_the_q_that_drew_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpec 31: drawing in bf16 and verifying in float32 are two different distributions."""
    recorder = Recorder(monkeypatch)
    drew: list[Tensor] = []
    sample = engine.sample

    def recorded(probs: Tensor, u: Tensor) -> Tensor:
        drew.append(probs)
        return sample(probs, u)

    monkeypatch.setattr(engine, "sample", recorded)
    target = tiny(scale=5.0, eos_token_id=None)
    pair = ModelPair(target.to(dtype), noisy(target, 0.1).to(dtype))
    out = generate(
        pair,
        **pad_left(random_prompts([6, 11, 2])),
        verifier=StaticEnsemble(0.5),
        top_k=20,
        max_new_tokens=15,
        seed=0,
        trace=True,
    )
    assert out.stats.tokens == 45
    verified = [row for call in recorder.calls for row in call["q"].unbind(1)]
    assert len(verified) == len(drew) > 10
    for q, probs in zip(verified, drew, strict=True):
        assert q.dtype == torch.float32
        assert torch.equal(q, probs)
    assert all(call[name].dtype == torch.float32 for call in recorder.calls for name in ("nu", "bonus"))


def test_half_precision_models_leave_the_sampling_exact() -> None:
    """DeepSpec 31: the output follows the distributions these models give, rounded weights and all."""
    target, draft = table(TARGET).to(torch.bfloat16), table(DRAFT).to(torch.bfloat16)
    with torch.no_grad():
        p = target(torch.tensor([[0]])).logits[0, 0].float().softmax(-1)
    assert first_token_fit(ModelPair(target, draft), p.tolist()) > REJECT


@pytest.mark.parametrize("num_speculative_tokens", [1, 3])
def test_the_bonus_token_comes_from_the_row_of_the_last_accepted_token(
    num_speculative_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE 47: whatever the block's length, also where rows draft less than their neighbours."""
    recorder = Recorder(monkeypatch)
    pair = ModelPair(table(TARGET), table(DRAFT))
    settings = {"num_speculative_tokens": num_speculative_tokens, "verifier": StaticEnsemble(0.3), "seed": 0}
    generate(pair, input_ids=torch.zeros(50, 1, dtype=torch.long), max_new_tokens=9, **settings)
    ragged = 0
    for call in recorder.calls:
        for b, n in enumerate(call["num_drafted"].tolist()):
            last = int(call["tokens"][b, n - 1]) if n else None
            if last is not None:
                torch.testing.assert_close(call["bonus"][b], torch.tensor(TARGET[last]))
        ragged += len(set(call["num_drafted"].tolist())) > 1
    assert ragged or num_speculative_tokens == 1


def test_long_drafts_do_not_change_the_output() -> None:
    """TensorRT-LLM 11300: N = 20 must be as exact as N = 1, at both temperatures."""
    target = tiny("gemma3")
    prompts = random_prompts([6, 25, 2])
    out = generate(
        ModelPair(target, noisy(target)),
        **pad_left(prompts),
        temperature=0,
        max_new_tokens=50,
        num_speculative_tokens=20,
    )
    assert out.token_ids == greedy_reference(target, prompts, 50)
    pair = four_token_pair()
    prompt = [1, 2, 0]
    for name in ("lossless", "static-0.3"):
        exact = enumerate_exactly(pair, prompt, 4, VERIFIERS[name])
        out = generate(
            pair,
            input_ids=torch.tensor([prompt]).expand(1500, -1),
            verifier=VERIFIERS[name],
            bonus="verifier",
            num_speculative_tokens=20,
            max_new_tokens=21,
            seed=0,
        )
        drawn = exact.index([ids[:4] for ids in out.token_ids])
        assert goodness_of_fit(torch.bincount(drawn, minlength=256), exact.probability()) > REJECT


@pytest.mark.parametrize("verifier", [Lossless(), StaticEnsemble(0.5), StaticEnsemble(0.5).at(quality=0)])
def test_equal_models_accept_everything_and_divide_by_nothing(verifier: StaticEnsemble) -> None:
    """transformers 5.15: the lossless path divided by the zero residual of p = q."""
    target = tiny(scale=5.0, eos_token_id=None)
    out = generate(
        ModelPair(target, target),
        **pad_left(random_prompts([6, 11, 2, 4])),
        verifier=verifier,
        max_new_tokens=40,
        seed=0,
        trace=True,
    )
    assert out.stats.tokens == 160
    assert out.stats.acceptance_rate is not None
    assert out.stats.acceptance_rate > 0.99  # prefill and decoding may round differently
    p = torch.tensor([0.5, 0.5, 0.0])
    assert torch.equal(residual_distribution(p, p), p)
