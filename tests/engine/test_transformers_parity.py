"""The static ensemble agrees with the one transformers ships as ``assistant_ensemble_weight``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.generation.utils import _speculative_sampling

from diversed import ModelPair, StaticEnsemble, generate
from diversed.verification import residual_distribution, verify_block
from models import FAMILIES, noisy, random_prompts, tiny

SIZE = 12


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9, None])
def test_the_same_draws_give_the_same_decisions(weight: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted counts and the distribution of the next token, over random blocks; None is the lossless rule."""
    generator = torch.Generator().manual_seed(0)
    verifier = StaticEnsemble(1.0 if weight is None else weight)
    counts = []
    for _ in range(300):
        n = int(torch.randint(1, 6, (), generator=generator))
        draft_logits, target_logits = torch.randn(2, 1, n + 1, SIZE, generator=generator).mul(2)
        q, p = draft_logits[:, :n].softmax(-1), target_logits.softmax(-1)
        tokens = torch.multinomial(q[0], 1, generator=generator).T
        u = torch.rand(1, n, generator=generator)
        drawn_from: list[Tensor] = []

        def multinomial(probs: Tensor, num_samples: int, seen: list[Tensor] = drawn_from) -> Tensor:
            seen.append(probs[0])
            return probs.argmax(-1, keepdim=True)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand_like", lambda _, u=u: u[0])
            patch.setattr(torch, "multinomial", multinomial)
            _, theirs = _speculative_sampling(
                torch.cat([torch.zeros(1, 3).long(), tokens], 1), draft_logits[:, :n], n, target_logits, weight
            )
        nu = verifier(p[:, :n], q, p[:, :n, :1], q[..., :1])
        ours = int(verify_block(tokens, q, nu, p[:, n], u, torch.rand(1)).num_accepted)
        assert ours == int(theirs)
        following = p[0, n] if ours == n else residual_distribution(nu[0, ours], q[0, ours])
        torch.testing.assert_close(following, drawn_from[0], atol=1e-5, rtol=0)
        counts.append((ours, n))
    assert any(a == n for a, n in counts)
    assert any(0 < a < n for a, n in counts)


@pytest.mark.parametrize("weight", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_assisted_generation(family: str, weight: float) -> None:
    target = tiny(family, pad_token_id=None)  # or transformers' draft masks every generated token of that id
    draft = noisy(target, 0.2)
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    pair = ModelPair(target, draft)
    differs = 0
    for prompt in random_prompts([6, 11, 18]):
        ids = torch.tensor([prompt])
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 30}
        theirs = target.generate(ids, assistant_model=draft, assistant_ensemble_weight=weight, **settings)
        ours = generate(
            pair,
            input_ids=ids,
            verifier=StaticEnsemble(weight),
            temperature=0,
            max_new_tokens=30,
            num_speculative_tokens=4,
        )
        assert ours.token_ids[0] == theirs[0, len(prompt) :].tolist()
        differs += ours.token_ids[0] != target.generate(ids, **settings)[0, len(prompt) :].tolist()
    if weight < 0.5:
        assert differs > 0  # else it would have been the target's output all along
