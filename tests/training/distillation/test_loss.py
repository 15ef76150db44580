"""The divergences and their gradients, whole or a few positions at a time."""

import pytest
import torch
from torch import Tensor

from diversed.training.distillation.loss import backward_in_chunks, divergences, head_of, hidden_states
from diversed.training.distillation.text import Lesson, collate
from models import random_prompts
from training.distillation.made import target


def exact(target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    p, q = target_logits.double().softmax(-1), draft_logits.double().softmax(-1)
    return (p * (p.log() - q.log())).sum(-1), 0.5 * (p - q).abs().sum(-1)


def test_divergences_and_gradients_equal_a_plain_float64_formula():
    torch.manual_seed(0)
    logits, theirs = 3 * torch.randn(5, 7, 90), (3 * torch.randn(5, 7, 90)).requires_grad_()
    plain = theirs.detach().double().requires_grad_()
    for which in (0, 1):
        ours, reference = divergences(logits, theirs)[which], exact(logits, plain)[which]
        torch.testing.assert_close(ours.double(), reference, rtol=1e-5, atol=1e-6)
        (gradient,) = torch.autograd.grad(ours.sum(), theirs)
        (expected,) = torch.autograd.grad(reference.sum(), plain)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)


def test_vocabularies_of_different_sizes():
    torch.manual_seed(0)
    wide, narrow = torch.randn(3, 20), torch.randn(3, 12)
    p, q = wide.softmax(-1), torch.nn.functional.pad(narrow.softmax(-1), (0, 8))
    expected = 0.5 * (p - q).abs().sum(-1)
    for kl, tv in (divergences(wide, narrow), divergences(narrow, wide)):
        torch.testing.assert_close(tv, expected)
        assert kl.isfinite().all()


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("tv_weight", [0.0, 2.0])
def test_chunks_give_the_gradients_of_the_undivided_loss(chunk: int, tv_weight: float):
    teacher, student = target(), target(seed=1, num_hidden_layers=1)
    lessons = [Lesson(p[:3], p[3:]) for p in random_prompts([9, 5, 14])]
    batch = collate(lessons, 0.3, torch.device("cpu"))
    with torch.no_grad():
        taught = hidden_states(teacher, batch.ids).flatten(0, 1)[batch.positions]

    def no_autocast() -> torch.autocast:
        return torch.autocast("cpu", enabled=False)

    sums = backward_in_chunks(
        taught,
        hidden_states(student, batch.ids).flatten(0, 1)[batch.positions],
        batch.weights,
        head_of(teacher),
        head_of(student),
        total_weight=batch.total_weight,
        tv_weight=tv_weight,
        chunk=chunk,
        autocast=no_autocast,
    )
    ours = [p.grad.clone() for p in student.parameters()]
    student.zero_grad()
    # Sequence by sequence, without padding, straight from the models' own logits.
    loss, kls = torch.zeros((), dtype=torch.double), 0.0
    for lesson in lessons:
        ids = torch.tensor([lesson.prompt + lesson.completion])
        kl, tv = exact(teacher(ids).logits[0, :-1].detach(), student(ids).logits[0, :-1])
        weights = torch.tensor([0.3] * (len(lesson.prompt) - 1) + [1.0] * len(lesson.completion))
        loss = loss + (weights * (kl + tv_weight * tv)).sum() / batch.total_weight
        kls += float((weights * kl.detach()).sum()) / batch.total_weight
    loss.backward()
    assert sums[0].item() == pytest.approx(kls, rel=1e-4)
    for a, p in zip(ours, student.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=2e-3, atol=2e-5 * float(p.grad.abs().max()) + 1e-9)
