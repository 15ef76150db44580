"""What a rollout keeps gives the same log-probabilities, acceptance and gradients as a full pass in float64."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diversed import EnsembleHead, LearnedEnsemble, ModelPair
from diversed.tasks import Example, Task
from diversed.training.rollouts import Draws, Rollouts, Sampling, log_nu, returns_of, roll_out
from models import character_tokenizer, noisy, tiny

PROMPTS = ["hello", "a b", "x"]


def length_reward(prompts, completions, **columns):
    return [len(text) / 100 for text in completions]


def toy() -> tuple[ModelPair, Task]:
    target = tiny(scale=6.0, eos_token_id=None)
    pair = ModelPair(target, noisy(target, 0.5), character_tokenizer())
    return pair, Task("toy", "train", [Example(p, {}) for p in PROMPTS], length_reward, length_reward, "length", 15)


@pytest.mark.parametrize("shape", [{}, {"mlp_size": 5}, {"features": True}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_nu_acceptance_and_gradients_equal_a_full_float64_pass(shape: dict, temperature: float) -> None:
    pair, task = toy()
    head = EnsembleHead(*pair.hidden_sizes, **shape)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    draws = Draws(task.examples, [1, 2, 3], [0, 1, 2])
    sampling = Sampling(num_speculative_tokens=3, temperature=temperature, batch_size=2)
    rollouts = roll_out(pair, task, draws, head, LearnedEnsemble(head), sampling)

    def of_the_rollouts() -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.sigmoid(head(rollouts.inputs))
        return (
            log_nu(weight, rollouts.target_prob, rollouts.draft_prob),
            1 - weight * rollouts.total_variation,
        )

    # The same texts once more, all at once and in float64, with nothing from the engine but the token ids.
    out_ids = regenerated(pair, task, head, draws, sampling)
    exact_head = copy.deepcopy(head).double()
    target, draft = copy.deepcopy(pair.target).double(), copy.deepcopy(pair.draft).double()
    exact_log, exact_acceptance = [], []
    for prompt, new in out_ids:
        ids = torch.tensor([prompt + new])
        hidden = [m.model(ids).last_hidden_state[0, len(prompt) - 1 : -1].detach() for m in (target, draft)]
        p, q = ((m.lm_head(h) / temperature).softmax(-1).detach() for m, h in zip((target, draft), hidden, strict=True))
        parts = [*hidden]
        if head.features:
            from diversed.verifiers.learned import closed_form_features

            parts.append(closed_form_features(p, q))
        weight = torch.sigmoid(exact_head(torch.cat(parts, -1)))
        nu = weight.unsqueeze(-1) * p + (1 - weight.unsqueeze(-1)) * q
        exact_log.append(nu.gather(-1, torch.tensor(new).unsqueeze(-1)).squeeze(-1).log())
        exact_acceptance.append(torch.minimum(q, nu).sum(-1))
    ours = of_the_rollouts()
    theirs = torch.cat(exact_log), torch.cat(exact_acceptance)
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-3, atol=1e-3)
        got = torch.autograd.grad(mine.sum(), list(head.parameters()), retain_graph=True)
        expected = torch.autograd.grad(exact.sum(), list(exact_head.parameters()), retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=5e-3, atol=5e-3 * float(b.abs().max()))
    torch.testing.assert_close(rollouts.log_nu, ours[0].detach(), rtol=1e-4, atol=1e-4)
    assert rollouts.acceptance == pytest.approx(float(theirs[1].detach().mean()), abs=1e-4)


def regenerated(pair: ModelPair, task: Task, head: EnsembleHead, draws: Draws, sampling: Sampling):
    """Prompt and completion ids of the same draws."""
    from diversed.training.rollouts import complete

    out = complete(pair, task, draws, LearnedEnsemble(head), sampling, bonus="verifier")
    return list(zip(out.prompt_ids, out.token_ids, strict=True))


def test_rollouts_survive_disk_and_joining(tmp_path: Path) -> None:
    pair, task = toy()
    head = EnsembleHead(*pair.hidden_sizes)
    parts = []
    for i in range(3):
        draws = Draws(task.examples[i : i + 1], [i + 1], [i])
        parts.append(roll_out(pair, task, draws, head, LearnedEnsemble(head), Sampling(batch_size=1)))
        parts[-1].save(tmp_path / f"{i}.safetensors")
    together = roll_out(pair, task, Draws(task.examples, [1, 2, 3], [0, 1, 2]), head, LearnedEnsemble(head), Sampling())
    joined = Rollouts.join([Rollouts.load(tmp_path / f"{i}.safetensors") for i in range(3)])
    for name, value in vars(joined).items():
        torch.testing.assert_close(value, getattr(together, name), rtol=1e-4, atol=1e-4, msg=name)
    assert joined.sequence.tolist() == [i for i, n in enumerate(joined.length.tolist()) for _ in range(n)]


def letters(prompts, completions, weights, **columns):
    """A reward of unfinished text: the sum of its letters' weights."""
    return [float(sum(w[c] for c in text)) for text, w in zip(completions, weights, strict=True)]


@given(
    texts=st.lists(st.text("abc", max_size=9), min_size=1, max_size=4),
    weights=st.fixed_dictionaries({c: st.floats(-1, 1, width=16) for c in "abc"}),
    discount=st.floats(0, 1),
)
def test_a_return_is_what_a_token_and_later_ones_earned(
    texts: list[str], weights: dict[str, float], discount: float
) -> None:
    tokenizer = character_tokenizer()
    token_ids = [tokenizer.convert_tokens_to_ids(list(text)) for text in texts]
    examples = [Example("", {"weights": weights})] * len(texts)
    reward = torch.tensor(letters(None, texts, [weights] * len(texts)))
    for partial in (True, False):
        task = Task("toy", "train", examples, letters, letters, "sum", 9, partial_reward=partial)
        got = returns_of(task, examples, tokenizer, token_ids, reward, discount)
        expected = [
            sum(discount**k * weights[c] for k, c in enumerate(text[t:])) if partial else float(reward[i])
            for i, text in enumerate(texts)
            for t in range(len(text))
        ]
        torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_shares_of_several_processes_make_up_the_whole() -> None:
    examples = [Example(str(i), {}) for i in range(7)]
    whole = Draws(examples, list(range(7)), list(range(7)))
    for count in (1, 2, 3, 7, 8):
        shares = [whole.share(rank, count) for rank in range(count)]
        assert [e for s in shares for e in s.examples] == examples
        assert [x for s in shares for x in s.seeds] == whole.seeds
