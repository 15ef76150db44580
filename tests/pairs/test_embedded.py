"""The pair inside the package: its shape, its size, and what it can do."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from diversed import LearnedEnsemble, ModelPair, StaticEnsemble, generate
from diversed.pairs import DRAFT, EMBEDDED, HEADS, TARGET
from diversed.tasks import judge, load_task


@pytest.fixture(scope="module")
def pair():
    return ModelPair.embedded()


def test_it_opens_in_the_auto_classes():
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    draft = AutoModelForCausalLM.from_pretrained(DRAFT)
    assert target.dtype == draft.dtype == torch.float16
    assert type(target).__name__ == type(draft).__name__ == "LlamaForCausalLM"
    assert target.config.head_dim == draft.config.head_dim == 64
    assert 12e6 <= target.num_parameters() <= 16e6
    assert 0.3e6 <= draft.num_parameters() <= 0.6e6
    assert tokenizer.decode(tokenizer("4 + 38 = 42")["input_ids"], skip_special_tokens=True) == "4 + 38 = 42"


def test_it_stays_under_32_megabytes():
    assert sum(f.stat().st_size for f in EMBEDDED.rglob("*") if f.is_file()) < 32e6


def test_its_names_and_vocabulary_are_in_its_heads(pair):
    for folder in HEADS.iterdir():
        verifier = LearnedEnsemble.from_pretrained(folder)
        assert verifier.head.pair == pair.describe()
        assert verifier.head.task == folder.name
        assert verifier.head.training_settings
        assert verifier.head.figures


def test_a_chat_template_asks_in_its_own_words(pair):
    chat = [{"role": "user", "content": "Ada has 3 nuts."}]
    text = pair.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "Question: Ada has 3 nuts.\nAnswer:"


@pytest.mark.parametrize("family", ["shop", "tally"])
def test_the_target_calculates_and_the_draft_guesses(pair, family):
    """Bounds far outside the intervals of docs: they catch broken weights, not a bad day."""
    task = load_task(family, n=120, seed=11)
    prompts = [e.prompt for e in task.examples]

    def accuracy(verifier, n):
        out = generate(pair, prompts, verifier=verifier, num_speculative_tokens=n, max_new_tokens=96, seed=0)
        return sum(judge(task.score, task.examples, out.texts)) / len(prompts), out.stats

    target, _ = accuracy(None, 0)
    lossless, stats = accuracy(None, 5)
    static, _ = accuracy(StaticEnsemble(0.2), 5)
    learned, relaxed = accuracy(LearnedEnsemble.from_pretrained(HEADS / family), 5)
    assert target > 0.85
    assert lossless > 0.85
    assert static < 0.8
    assert learned > static + 0.15
    assert relaxed.acceptance_rate > stats.acceptance_rate + 0.2
