"""How many tokens to draft next, from what drafting has gained and cost so far: ``num_speculative_tokens="auto"``."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST = 8  # drafted tokens per block at the most
FIRST = 4  # what the first block drafts, when nothing is known
MEMORY = 0.98  # weight of a drafted token's outcome after one more outcome: about the last 50 count
SMOOTHING = 0.2  # weight of the newest time
SHARED = 0.05  # the same for the times of other draft lengths
PATIENCE = 16  # blocks of the target alone before drafting is tried again; doubles while it does not pay
MOST_PATIENCE = 256


@dataclass
class DraftLength:
    """Running estimates for one verifier on one pair, and the choice that follows from them.

    With an acceptance rate a at every position, a block of n drafted tokens yields 1 + a + ... + a^n tokens for the
    time of n draft steps and one pass of the target over n + 1. The choice is the n with the most tokens a second,
    0 included. It depends on earlier blocks alone, so that every drafted token is verified: at every position the
    distribution is nu or, where no draft lies, the target's. Lossless, or with the bonus token from nu, that is what it
    is at any fixed n; else the share of the target's positions goes with the choice, as it goes with a fixed n.
    """

    accepted: float = 2.0  # as if 3 drafted tokens had been seen and 2 had stayed
    examined: float = 3.0
    draft_seconds: float | None = None  # per drafted token
    block_seconds: dict[int, float] = field(default_factory=dict)  # the rest of a block that drafted n, by n
    alone: int = 0  # blocks since the last drafted token
    patience: int = PATIENCE

    @property
    def acceptance(self) -> float:
        return self.accepted / self.examined

    def choose(self, room: int) -> int:
        """Drafted tokens for the next block, at most ``room``."""
        if room <= 0 or 0 not in self.block_seconds:
            return 0  # the first block of all shows what the target alone costs
        if self.draft_seconds is None:
            return min(FIRST, room)
        best = max(range(min(MOST, room) + 1), key=self.tokens_per_second)
        if best:
            self.alone, self.patience = 0, PATIENCE
            return best
        self.alone += 1
        if self.alone <= self.patience:
            return 0
        self.alone, self.patience = 0, min(2 * self.patience, MOST_PATIENCE)
        return min(2, room)

    def tokens_per_second(self, n: int) -> float:
        """What a block of n drafted tokens is expected to yield."""
        assert self.draft_seconds is not None
        tokens = sum(self.acceptance**k for k in range(n + 1))
        return tokens / (n * self.draft_seconds + self.seconds(n))

    def seconds(self, n: int) -> float:
        """Time of a block but for its draft steps: seen, or on the line through the nearest numbers that were."""
        seen = sorted(self.block_seconds)
        if n in self.block_seconds or len(seen) == 1:
            return self.block_seconds[n if n in self.block_seconds else seen[0]]
        above = next((m for m in seen if m > n), seen[-1])
        below = seen[seen.index(above) - 1]
        slope = (self.block_seconds[above] - self.block_seconds[below]) / (above - below)
        return self.block_seconds[below] + max(slope, 0.0) * (n - below)

    def learn(self, n: int, accepted: int, examined: int, draft_seconds: float, block_seconds: float) -> None:
        """Take in a block: n drafted tokens a row, and over all rows how many were examined and accepted."""
        fade = MEMORY**examined
        self.accepted, self.examined = fade * self.accepted + accepted, fade * self.examined + examined
        if n:
            known = draft_seconds / n if self.draft_seconds is None else self.draft_seconds
            self.draft_seconds = known + SMOOTHING * (draft_seconds / n - known)
        known = self.block_seconds.setdefault(n, block_seconds)
        off = block_seconds / known - 1
        # Contexts grow and batches shrink: some of what one number shows of that holds for the others as well.
        self.block_seconds = {
            m: t * (1 + (SMOOTHING if m == n else SHARED) * off) for m, t in self.block_seconds.items()
        }
