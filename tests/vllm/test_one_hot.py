"""A proposer without probabilities: n-gram look-up. q has all its mass on the drafted token."""

from __future__ import annotations

import pytest
from common import counters

from diversed.pairs import TARGET

# What follows the last word has been said twice; the model is not so sure that it comes a third time.
PROMPT = "Question: Ada has 12 nuts and 7 nuts. Ada has 12 nuts and 7 nuts. Ada has 12"


@pytest.fixture(scope="module")
def llm():
    vllm = pytest.importorskip("vllm.entrypoints.llm", reason="needs vLLM: make test-vllm")
    import os

    from vllm.plugins import load_general_plugins

    load_general_plugins()  # this process knows the heads, as in the other tests
    heads = os.environ.pop("DIVERSED_HEADS")  # a head needs a draft model; workers would refuse to start
    try:
        return vllm.LLM(
            str(TARGET), dtype="float32", enforce_eager=True, max_num_seqs=128, max_model_len=256, seed=0,
            disable_log_stats=False, speculative_config={"method": "ngram", "num_speculative_tokens": 3,
                                                         "prompt_lookup_max": 3, "prompt_lookup_min": 2},
        )  # fmt: skip
    finally:
        os.environ["DIVERSED_HEADS"] = heads


def run(llm, setting, n, **changes):
    from vllm import SamplingParams

    extra = None if setting is None else {"diversed": setting}
    asked = SamplingParams(**{"temperature": 1.0, "max_tokens": 24} | changes, extra_args=extra)
    before = counters(llm)
    out = [list(o.outputs[0].token_ids) for o in llm.generate([PROMPT] * n, asked, use_tqdm=False)]
    after = counters(llm)
    return out, *(after[k] - before[k] for k in ("num_accepted_tokens", "num_draft_tokens"))


def test_acceptance_grows_as_the_weight_falls(llm):
    rates = []
    for setting in (None, {"verifier": "static:0.5"}, {"verifier": "static:0"}):
        _, accepted, drafted = run(llm, setting, 40)
        assert drafted > 100
        rates.append(accepted / drafted)
    lossless, half, none = rates
    assert lossless + 0.1 < half < 1
    assert none == 1


def test_greedy_takes_the_look_up_at_weight_zero(llm):
    out, accepted, drafts = run(llm, {"verifier": "static:0"}, 2, temperature=0.0, max_tokens=16)
    assert accepted == drafts > 0
    assert out[0] == out[1]


def test_a_neighbour_at_the_end_of_its_context_leaves_the_others_text_alone(llm):
    """vLLM then proposes nothing for the whole batch and puts token 0 in the drafts' place."""
    from vllm import SamplingParams

    relaxed = SamplingParams(temperature=1.0, max_tokens=96, extra_args={"diversed": {"verifier": "static:0"}})
    to_the_end = SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=True)
    long = PROMPT + " nuts and 7 nuts. Ada has 12" * 20
    tokenizer = llm.get_tokenizer()
    long = tokenizer.decode(tokenizer.encode(long)[:246])
    out = llm.generate([long, *[PROMPT] * 20], [to_the_end, *[relaxed] * 20], use_tqdm=False)
    assert len(tokenizer.encode(long)) + len(out[0].outputs[0].token_ids) == 256
    assert not [t for o in out[1:] for t in o.outputs[0].token_ids if t == 0]


def test_what_needs_the_drafts_probabilities_is_refused(llm):
    with pytest.raises(ValueError, match="draft_sample_method"):
        run(llm, {"verifier": "fuzzy-tv:0.5"}, 1)
    with pytest.raises(ValueError, match="no draft model"):
        run(llm, {"head": "shop"}, 1)
