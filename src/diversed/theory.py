"""What acceptance, bias and speed follow from the distributions: closed forms and exact recursions, no models.

Notation as in :mod:`diversed.verification`: ``p`` target, ``q`` draft, ``nu`` verification distribution, ``N`` drafted
tokens per block. A *keep probability* ``b`` belongs to one position of a text: how likely it is that the token there is
an accepted draft, given that it is what came out. For rejection sampling ``b = min(1, q(x) / nu(x))``. Along a text
that follows ``nu`` the keeps of different positions are independent given the text, and the text does not depend on N
(with the bonus token from ``nu``); so one recorded text gives the exact number of blocks for every N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from diversed.verification import total_variation

Floats = NDArray[np.float64]
Number = TypeVar("Number", float, Floats)


def acceptance(nu: Tensor, draft_probs: Tensor) -> Tensor:
    """Probability that a drafted token stays, sum_x min(q, nu) = 1 - TV(q, nu); [..., V] -> [...]."""
    return (1 - total_variation(draft_probs, nu)).clamp(0.0, 1.0)


def bias(nu: Tensor, target_probs: Tensor) -> Tensor:
    """How far the output strays from the target at a position, TV(nu, p); [..., V] -> [...]."""
    return total_variation(nu, target_probs)


def static_line(total_variation: ArrayLike, weight: ArrayLike) -> tuple[Floats, Floats]:
    """Acceptance ``1 - w TV`` and bias ``(1 - w) TV`` of a blend: the Pareto line acceptance = 1 - TV + bias.

    No verification distribution accepts more at the same bias, since TV(q, nu) + TV(nu, p) >= TV(q, p).
    """
    tv, w = np.asarray(total_variation, dtype=float), np.asarray(weight, dtype=float)
    return 1 - w * tv, (1 - w) * tv


def expected_accepted_constant(alpha: float, num_speculative_tokens: int) -> float:
    """E[L] with one acceptance ``alpha`` everywhere: (1 - alpha^(N+1)) / (1 - alpha) - 1 (Leviathan et al., eq. 1)."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha!r} must be a number between 0 and 1")
    return float(sum(alpha**k for k in range(1, num_speculative_tokens + 1)))


def expected_accepted(keep: Sequence[float], num_speculative_tokens: int) -> Floats:
    """Accepted drafts of a block that starts at each position of one text, given the text; [T] -> [T].

    ``sum_{k=1..N} prod_{i<k} b_{s+i}``; drafts beyond the text's end do not count. Its mean over texts that follow
    ``nu`` is E[L] = sum_k sum_{x1..xk} prod min(q_i, nu_i), whatever the keeps depend on.
    """
    b = np.asarray(keep, dtype=float)
    padded = np.concatenate([b, np.zeros(num_speculative_tokens)])
    running, total = np.ones(len(b)), np.zeros(len(b))
    for k in range(num_speculative_tokens):
        running = running * padded[k : k + len(b)]
        total += running
    return total


def expected_blocks(keep: Sequence[float], num_speculative_tokens: int) -> float:
    """Expected target passes for one text of T tokens with keep probabilities ``keep`` [T], exactly.

    A block starts at the first token. From a start, the block goes on while drafts are kept, at most N; the token after
    them, recovered or bonus, ends it, and the next block starts behind that token. As in the engine, a block whose last
    token would be beyond the text drafts only up to the last but one.
    """
    b, n = np.asarray(keep, dtype=float), num_speculative_tokens
    starts = np.zeros(len(b) + n + 2)
    starts[0] = 1.0
    for s in range(len(b)):
        reach = starts[s]
        for i in range(s, min(s + n, len(b))):
            starts[i + 1] += reach * (1 - b[i])  # rejected at i: the recovered token stands there
            reach *= b[i]
        if s + n < len(b):
            starts[s + n + 1] += reach
    return float(starts[: len(b)].sum())


@dataclass(frozen=True)
class Costs:
    """What decoding costs in units of one target-only step, measured one prompt at a time."""

    draft_step: float  #: c, one forward pass of the draft and the draw of its token
    verification: float  #: v at no drafted token: a pass of the target and the verdict
    per_token: float  #: what each drafted token adds to v
    overhead: float  #: h, whatever else a block takes
    prefill: float = 0.0  #: both models' prompt, per prompt
    target_prefill: float = 0.0  #: the target's alone

    def block(self, num_speculative_tokens: int) -> float:
        """N c + v + h."""
        n = num_speculative_tokens
        return n * self.draft_step + self.verification + n * self.per_token + self.overhead


def speedup(block_efficiency: float, num_speculative_tokens: int, costs: Costs) -> float:
    """tau / (N c + v + h): tokens per block over the time of a block, prompts left out."""
    return block_efficiency / costs.block(num_speculative_tokens)


def speedup_with_prompt(tokens: Number, blocks: Number, num_speculative_tokens: int, costs: Costs) -> Number:
    """Speed-up over target-only decoding of answers of ``tokens`` tokens in ``blocks`` blocks, with their prompt."""
    return (costs.target_prefill + tokens) / (costs.prefill + blocks * costs.block(num_speculative_tokens))


def best_num_speculative_tokens(alpha: float, costs: Costs, most: int = 64) -> tuple[int, float]:
    """The fastest N up to ``most`` at one acceptance ``alpha`` everywhere, and its speed-up; (0, 1.0) where none is
    faster than the target alone: do not speculate."""
    speeds = [speedup(1 + expected_accepted_constant(alpha, n), n, costs) for n in range(1, most + 1)]
    best = int(np.argmax(speeds))
    return (best + 1, speeds[best]) if speeds[best] > 1 else (0, 1.0)
