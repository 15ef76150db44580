"""Tiny models whose exact next-token distributions are known or can be enumerated."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import chisquare
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from diversed import EnsembleHead, LearnedEnsemble, Lossless, ModelPair, StaticEnsemble, Verifier
from diversed.engine.prompts import pad

EOS = 5  # of every tiny model; never drawn where the vocabulary is smaller
WINDOW = 16  # of the tiny models with sliding-window attention
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "mistral")


def config(family: str, vocab_size: int = 64, **changes: Any) -> PreTrainedConfig:
    """A two-layer config of a real architecture; Gemma-3 mixes a sliding with a full layer."""
    ids = {"vocab_size": vocab_size, "eos_token_id": EOS, "pad_token_id": 0, "bos_token_id": 1}
    ids |= {"tie_word_embeddings": False}  # tied and random, a model would repeat its last token for ever
    if family == "gpt2":
        return GPT2Config(n_embd=32, n_layer=2, n_head=4, **({"n_positions": 256} | ids | changes))
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    }
    if family == "llama":
        return LlamaConfig(**(shape | ids | changes))
    if family == "qwen3":
        return Qwen3Config(**(shape | ids | changes))
    if family == "mistral":
        return MistralConfig(**(shape | {"sliding_window": WINDOW} | ids | changes))
    kinds = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    return Gemma3TextConfig(**(shape | kinds | ids | changes))


def tiny(
    family: str = "llama", seed: int = 0, scale: float = 8.0, attention: str = "sdpa", **changes: Any
) -> PreTrainedModel:
    """A random model whose matrices are scaled up, so that its predictions are neither flat nor degenerate."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(family, **changes), attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model


def noisy(model: PreTrainedModel, noise: float = 0.05, seed: int = 0) -> PreTrainedModel:
    """A draft for ``model``: the same weights plus noise of that share of their deviation."""
    generator = torch.Generator().manual_seed(seed)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return draft


def four_token_pair() -> ModelPair:
    """Two Llamas over four tokens, far enough apart and with enough memory that any fault in sampling shows."""
    small = {"vocab_size": 4, "eos_token_id": None, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny(seed=5, scale=16.0, hidden_size=16, intermediate_size=16, **small)
    draft = tiny(seed=105, scale=21.0, hidden_size=8, intermediate_size=16, num_hidden_layers=1, **small)
    return ModelPair(target, draft)


def random_head(target_size: int, draft_size: int, spread: float = 0.5, seed: int = 4) -> LearnedEnsemble:
    """A learned verifier whose weights vary from position to position."""
    head = EnsembleHead(target_size, draft_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.out.weight.copy_(spread * torch.randn(head.out.weight.shape, generator=generator))
    return LearnedEnsemble(head)


VERIFIERS: dict[str, Verifier] = {  # for four_token_pair
    "lossless": Lossless(),
    "static-0.7": StaticEnsemble(0.7),
    "static-0.3": StaticEnsemble(0.3),
    "static-0.3-at-0.65": StaticEnsemble(0.3).at(quality=0.65),
    "learned": random_head(16, 8),
}


def table(probs: Tensor | Sequence[Sequence[float]]) -> LlamaForCausalLM:
    """A model whose next-token probabilities are ``probs[last token]``, exactly: a Llama without layers."""
    probs = torch.as_tensor(probs, dtype=torch.float32)
    size = probs.shape[0]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=size,
            num_hidden_layers=0,
            num_attention_heads=1,
            rms_norm_eps=0.0,
            eos_token_id=None,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(probs.log().clamp_min(-1e4).T / size**0.5)  # the norm scales a one-hot by sqrt(size)
    return model.eval()


def random_prompts(lengths: Sequence[int], vocab_size: int = 64, seed: int = 3) -> list[list[int]]:
    """Random token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(EOS + 1, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def pad_left(prompts: Sequence[list[int]]) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` of prompts of several lengths."""
    return dict(zip(("input_ids", "attention_mask"), pad(prompts), strict=True))


def greedy_reference(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, **kwargs: Any
) -> list[list[int]]:
    """What ``target.generate`` gives for each prompt alone, new tokens only."""
    rows = []
    for ids in prompts:
        row = torch.tensor([ids])
        out = target.generate(
            row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=max_new_tokens, **kwargs
        )
        rows.append(out[0, len(ids) :].tolist())
    return rows


@dataclass
class Enumeration:
    """Every sequence of L tokens after a prompt, with the distributions that bare forward passes give for it."""

    sequences: Tensor  #: [V**L, L]
    p: Tensor  #: [V**L, L, V], in float64, of the position given the tokens before it
    q: Tensor
    nu: Tensor

    def probability(self, which: str = "nu") -> Tensor:
        """Of each sequence: the product over its positions."""
        return self.of_tokens(which).prod(1)

    def of_tokens(self, which: str) -> Tensor:
        """Of each token given those before it, [V**L, L]."""
        return getattr(self, which).gather(-1, self.sequences.unsqueeze(-1)).squeeze(-1)

    def index(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Which of :attr:`sequences` each of these is."""
        size, length = self.p.shape[-1], self.sequences.shape[1]
        return (torch.tensor(tokens) * size ** torch.arange(length - 1, -1, -1)).sum(-1)


@torch.no_grad()
def enumerate_exactly(
    pair: ModelPair, prompt: Sequence[int], length: int, verifier: Verifier, temperature: float = 1.0
) -> Enumeration:
    """All continuations of ``prompt``, scored without cache, padding or blocks."""
    sequences = torch.tensor(list(itertools.product(range(pair.vocab_size), repeat=length)))
    ids = torch.cat([torch.tensor([list(prompt)]).expand(len(sequences), -1), sequences], 1)
    probs, hidden = [], []
    for model in (pair.target, pair.draft):
        states = model.model(input_ids=ids).last_hidden_state[:, len(prompt) - 1 : -1]
        hidden.append(states)
        probs.append((model.lm_head(states) / temperature).softmax(-1))
    nu = verifier(*probs, *hidden)
    return Enumeration(sequences, *(x.double() for x in (*probs, nu)))


def goodness_of_fit(counts: Tensor, probabilities: Tensor) -> float:
    """The p-value of a chi-square test, cells that expect under five samples pooled; 0 if the impossible was seen."""
    if counts[probabilities == 0].sum() > 0:
        return 0.0
    order = probabilities.argsort()
    expected = probabilities[order].double() / probabilities.double().sum() * counts.sum()
    observed = counts[order].double()
    cells: list[tuple[float, float]] = []
    waiting = (0.0, 0.0)
    for o, e in zip(observed.tolist(), expected.tolist(), strict=True):
        waiting = (waiting[0] + o, waiting[1] + e)
        if waiting[1] >= 5:
            cells.append(waiting)
            waiting = (0.0, 0.0)
    if waiting[1] > 0 or waiting[0] > 0:
        cells[-1] = (cells[-1][0] + waiting[0], cells[-1][1] + waiting[1])
    assert len(cells) > 1, "too few samples to test anything"
    return float(chisquare(*zip(*cells, strict=True)).pvalue)


def character_tokenizer(size: int = 64, order: Callable[[str], Iterable[str]] = iter) -> PreTrainedTokenizerFast:
    """One token per character; ids 0 to 5 are special and decode to nothing."""
    special = ["<pad>", "<s>", "<a>", "<b>", "<unk>", "</s>"]
    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?"
    vocabulary = {token: i for i, token in enumerate([*special, *order(characters[: size - len(special)])])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<a>", "<b>"],
        clean_up_tokenization_spaces=False,
    )
