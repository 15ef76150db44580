"""A self-test of seconds: vLLM's own rejection samplers, wrapped, on random distributions of a small vocabulary.

What they emit is compared with nu as computed here. No model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from diversed.verification import FORBIDDEN, total_variation, verification_distribution
from diversed.verifiers import LearnedEnsemble
from diversed.vllm import v1, v2
from diversed.vllm.bounds import Bounds
from diversed.vllm.metrics import Tally
from diversed.vllm.request import Relaxation
from diversed.vllm.served import Served

VOCABULARY = 32


@dataclass(frozen=True)
class Finding:
    """One setting's outcome over ``n`` independent drafted tokens."""

    setting: str
    n: int
    acceptance: float
    expected: float  #: 1 - w TV(p, q)
    distance: float  #: TV of the emitted tokens and nu

    @property
    def ok(self) -> bool:
        """Within five standard errors; the TV of n samples and their own distribution is near sqrt(V / (2 pi n))."""
        error = (max(self.expected * (1 - self.expected), 1e-4) / self.n) ** 0.5
        near = abs(self.acceptance - self.expected) < 5 * error
        return bool(near and self.distance < (VOCABULARY / self.n) ** 0.5)


@dataclass(frozen=True)
class Case:
    """n requests that share one position: logits, q and hidden states [1, ...], and drafted tokens [n]."""

    n: int
    target_logits: Tensor
    draft_logits: Tensor
    hidden: tuple[Tensor, Tensor]
    tokens: Tensor
    device: torch.device


def make_case(n: int, device: torch.device, hidden_sizes: tuple[int, int], seed: int) -> Case:
    g = torch.Generator().manual_seed(seed)
    target, draft = (torch.randn(1, VOCABULARY, generator=g) * 2 for _ in range(2))
    target[:, :4] = -torch.inf  # forbidden by the request, liked by the draft
    tokens = torch.multinomial(draft.softmax(-1)[0], n, replacement=True, generator=g)
    hidden = (torch.randn(1, hidden_sizes[0], generator=g), torch.randn(1, hidden_sizes[1], generator=g))
    return Case(n, target.to(device), draft.to(device), (hidden[0].to(device), hidden[1].to(device)),
                tokens.to(device), device)  # fmt: skip


def expected_nu(case: Case, relaxation: Relaxation | None, heads: dict[str, LearnedEnsemble]) -> Tensor:
    """nu [V], from the verifiers alone."""
    p, q = case.target_logits.softmax(-1), case.draft_logits.softmax(-1)
    if relaxation is None:
        return p[0]
    if relaxation.kind == "head":
        weight = heads[relaxation.name].at(quality=relaxation.quality).weight(p, q, *case.hidden)
    else:
        weight = torch.full((1,), relaxation.value, device=case.device)
    nu = verification_distribution(p, q, weight)[0] * (case.target_logits[0] > FORBIDDEN)
    return nu / nu.sum()


Run = Callable[[Case, Served, list[Relaxation | None]], tuple[Tensor, Tensor]]  # tokens emitted, accepted: both [n]


def check(
    run: Run, relaxations: list[Relaxation | None], heads: dict[str, LearnedEnsemble], *, n: int, device: torch.device,
    seed: int = 0,
) -> list[Finding]:  # fmt: skip
    """Emit ``n`` tokens for each setting, all settings in one mixed batch, and compare with nu.

    Args:
        run: :func:`run_v1` or :func:`run_v2`.
        relaxations: the settings; None is lossless.
    """
    sizes = next(((h.head.target_hidden_size, h.head.draft_hidden_size) for h in heads.values()), (1, 1))
    case = make_case(n * len(relaxations), device, sizes, seed)
    served = Served(Bounds(), heads, device, Tally(device, None), lambda weight: weight, False)
    batch = [relaxation for _ in range(n) for relaxation in relaxations]
    emitted, accepted = run(case, served, batch)
    findings = []
    for i, relaxation in enumerate(relaxations):
        nu = expected_nu(case, relaxation, heads)
        mine = emitted[i :: len(relaxations)]
        seen = torch.bincount(mine, minlength=VOCABULARY).to(nu.dtype) / n
        expected = torch.minimum(nu, case.draft_logits.softmax(-1)[0]).sum().item()
        name = "lossless" if relaxation is None else f"{relaxation.label} {relaxation.quality:g}/{relaxation.value:g}"
        findings.append(Finding(name, n, accepted[i :: len(relaxations)].double().mean().item(), expected,
                                total_variation(seen, nu).item()))  # fmt: skip
    return findings


def run_v1(case: Case, served: Served, relaxations: list[Relaxation | None]) -> tuple[Tensor, Tensor]:
    """One drafted token per request through runner V1's ``rejection_sample``."""
    import vllm.v1.sample.rejection_sampler as sampler
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    n, device = case.n, case.device
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(n, device=device),
                               generators={})  # fmt: skip
    step = v1.Step(
        served,
        [str(i) for i in range(n)],
        relaxations,
        case.hidden[0].expand(n, -1),
        case.hidden[1].expand(n, -1),
        None,
    )
    token = v1.STEP.set(step)
    try:
        out = _wrapped(sampler.rejection_sample, v1.wrap_rejection_sample)(
            case.tokens.int(), [1] * n, 1, torch.arange(1, n + 1, device=device, dtype=torch.int32),
            case.draft_logits.softmax(-1).expand(n, -1).contiguous(), case.target_logits.expand(n, -1).contiguous(),
            torch.zeros(n, 1, device=device, dtype=torch.int32), metadata,
        )  # fmt: skip
    finally:
        v1.STEP.reset(token)
    return out[:, 0].long(), out[:, 1] >= 0


def run_v2(case: Case, served: Served, relaxations: list[Relaxation | None]) -> tuple[Tensor, Tensor]:
    """One drafted token per request through runner V2's ``rejection_sample``. Needs Triton."""
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler as sampler

    n, device = case.n, case.device
    request = torch.arange(n, device=device, dtype=torch.int32)
    # Two rows a request: the drafted position and the bonus; a draft token stands beside the row after its own.
    tokens = torch.stack([torch.zeros_like(case.tokens), case.tokens], 1).flatten()
    step = v2.Step(
        served,
        [str(i) for i in range(n)],
        relaxations,
        list(range(0, 2 * n + 1, 2)),
        case.hidden[0].expand(2 * n, -1),
        case.hidden[1].expand(n, 1, -1),
        None,
    )
    token = v2.STEP.set(step)
    try:
        sampled, num_sampled = _wrapped(sampler.rejection_sample, v2.wrap_rejection_sample)(
            case.target_logits.repeat(2 * n, 1),
            case.draft_logits.repeat(n, 1).unsqueeze(1).contiguous(),
            tokens,
            torch.arange(0, 2 * n + 1, 2, device=device, dtype=torch.int32),
            torch.arange(2 * n, device=device),
            request,
            request.repeat_interleave(2),
            torch.tensor([0, 1], device=device, dtype=torch.int32).repeat(n),
            torch.ones(n, device=device),
            torch.arange(n, device=device) + 12345,
            1,
        )
    finally:
        v2.STEP.reset(token)
    return sampled[:, 0].long(), num_sampled == 2


def _wrapped(function: Any, wrap: Callable[[Any], Any]) -> Any:
    """The function as the plug-in wraps it, once."""
    from diversed.vllm.plugin import MARK

    return function if hasattr(function, MARK) else wrap(function)
