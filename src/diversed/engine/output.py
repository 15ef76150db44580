"""What a generation returns: tokens, statistics and, on request, a trace."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from torch import Tensor

FinishReason = Literal["stop", "length"]
Origin = Literal["accepted", "recovered", "bonus"]


@dataclass
class TimeSplit:
    """Wall time in seconds. ``rest`` is whatever no other part claims: bookkeeping, callbacks.
    ``compile`` is what a compiled pair waits for once (``total`` leaves it out)."""

    prefill: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    verification: float = 0.0
    rest: float = 0.0
    compile: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self))) - self.compile

    def __add__(self, other: TimeSplit) -> TimeSplit:
        return TimeSplit(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass
class Counts:
    """What happened to drafted tokens, by their position in the block.

    A block that ends its sequence counts only up to the token that ends it: drafted tokens behind an accepted
    end-of-sequence token or stop string were never candidates. So counts of single sequences add up to the pooled
    ones exactly.
    """

    drafted: list[int]  #: blocks in which position i was drafted
    accepted: list[int]  #: blocks in which position i was accepted
    rejected: int = 0  #: blocks cut short by a rejection
    target_calls: int = 0  #: forward passes of the target, prompt excluded
    tokens: int = 0  #: tokens returned

    @classmethod
    def zero(cls, num_speculative_tokens: int) -> Counts:
        return cls([0] * num_speculative_tokens, [0] * num_speculative_tokens)

    def add_block(self, drafted: int, accepted: int, tokens: int) -> None:
        for i in range(drafted):
            self.drafted[i] += 1
        for i in range(accepted):
            self.accepted[i] += 1
        self.rejected += accepted < drafted
        self.target_calls += 1
        self.tokens += tokens

    def add(self, other: Counts) -> None:
        self.drafted = [a + b for a, b in zip(self.drafted, other.drafted, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]
        self.rejected += other.rejected
        self.target_calls += other.target_calls
        self.tokens += other.tokens

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def position_acceptance(self) -> float | None:
        """Accepted over *examined* tokens: drafts behind a block's first rejection are never looked at. Estimates the
        mean of 1 - TV(q, nu) over positions, whatever N is; None where nothing was drafted."""
        examined = sum(self.accepted) + self.rejected
        return sum(self.accepted) / examined if examined else None

    @property
    def accepted_per_position(self) -> list[float]:
        """Share of the blocks that drafted position i in which it was accepted."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def block_efficiency(self) -> float | None:
        """Mean acceptance length, the recovered or bonus token included: 1 + accepted per block."""
        return 1 + sum(self.accepted) / self.target_calls if self.target_calls else None

    @property
    def tokens_per_target_call(self) -> float | None:
        """Tokens returned over target passes; below the block efficiency where sequences end inside a block."""
        return self.tokens / self.target_calls if self.target_calls else None


@dataclass
class Stats(Counts):
    """Counts pooled over all sequences, the single ones, and the time they took together."""

    per_sequence: list[Counts] = field(default_factory=list)
    time: TimeSplit = field(default_factory=TimeSplit)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.time.total if self.time.total else 0.0


@dataclass
class Trace:
    """How each token of one sequence came about; L tokens. NaN where a value does not exist.

    ``weight`` is NaN for verifiers that are no blend, ``acceptance`` and ``keep`` where a block is verified jointly. At
    temperature 0 these two and ``bias`` speak of the argmaxes, so they are 0 or 1.

    At a bonus token only the target's side exists, unless
    ``bonus="verifier"``. All of it belongs to the position, so a recovered token carries the w and TV that rejected
    the drafted one.
    """

    token_ids: Tensor  #: [L]
    origin: list[Origin]
    weight: Tensor  #: w, [L]
    target_prob: Tensor  #: p of the token, [L]
    draft_prob: Tensor  #: q of the token, [L]
    total_variation: Tensor  #: TV(p, q) at the position, [L]
    acceptance: (
        Tensor  #: probability that a drafted token stays at the position, [L]; 1 - TV(q, nu) unless it is a test
    )
    keep: Tensor  #: probability that this token was an accepted draft, given that it came out, [L]; see theory.py
    bias: Tensor  #: TV(nu, p) at the position, [L]
    features: Tensor  #: closed-form features of p and q (verifiers.learned), [L, 8]
    target_hidden: Tensor  #: [L, H_target]
    draft_hidden: Tensor  #: [L, H_draft]


@dataclass
class GenerationOutput:
    """New tokens only, a list per prompt.

    ``texts`` leaves special tokens out and ends with the stop string, if one was met. ``finish_reasons`` is "stop"
    for an end-of-sequence token, stop string or stopping criterion and "length" for ``max_new_tokens`` or the
    context's end.
    """

    token_ids: list[list[int]]
    texts: list[str]
    finish_reasons: list[FinishReason]
    stats: Stats
    trace: list[Trace] | None = None
    prompt_ids: list[list[int]] = field(default_factory=list)
