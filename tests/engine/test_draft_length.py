"""The choice of how much to draft: against simulated costs and acceptance, and in a real loop."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from diversed import Lossless, ModelPair, StaticEnsemble, generate
from diversed.engine.draft_length import MOST, PATIENCE, DraftLength
from diversed.verifiers.calibration import Calibration
from models import noisy, random_head, random_prompts, tiny


def seconds_per_token(
    acceptance: float,
    draft: float,
    slope: float,
    seed: int,
    *,
    fixed: int | None = None,
    learned: DraftLength | None = None,
) -> float:
    """400 tokens of blocks that take (1 + slope n) + draft n target steps, give or take 5 %."""
    draw = random.Random(seed)
    length = learned or DraftLength()
    spent, tokens = 0.0, 0
    while tokens < 400:
        n = length.choose(10**6) if fixed is None else fixed
        accepted = 0
        while accepted < n and draw.random() < acceptance:
            accepted += 1
        drafting = n * draft * draw.gauss(1, 0.05)
        rest = (1 + slope * n) * draw.gauss(1, 0.05)
        spent, tokens = spent + drafting + rest, tokens + accepted + 1
        if fixed is None:
            length.learn(n, accepted, min(accepted + 1, n), drafting, rest)
    return spent / tokens


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(("draft", "slope"), [(0.05, 0.01), (0.25, 0.03), (0.4, 0.05), (0.8, 0.1)])
@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 0.95])
def test_it_comes_close_to_the_best_fixed_number(acceptance: float, draft: float, slope: float) -> None:
    best = min(
        mean([seconds_per_token(acceptance, draft, slope, s, fixed=n) for s in range(10)]) for n in range(MOST + 1)
    )
    learned = DraftLength()
    seconds_per_token(acceptance, draft, slope, 100, learned=learned)
    warm = mean([seconds_per_token(acceptance, draft, slope, 200 + s, learned=learned) for s in range(20)])
    assert warm < 1.05 * best
    if acceptance == 0:
        assert warm < 1.03  # target steps per token: next to nothing lost on a hopeless draft


def test_drafting_stops_where_it_does_not_pay_is_tried_again_and_comes_back() -> None:
    length = DraftLength()

    def run(acceptance: float, blocks: int) -> list[int]:
        chosen = []
        for _ in range(blocks):
            n = length.choose(100)
            accepted = round(acceptance * n)
            length.learn(n, accepted, min(accepted + 1, n), 0.2 * n, 1.0)
            chosen.append(n)
        return chosen

    hopeless = run(0.0, 100)
    assert hopeless[0] == 0  # the target alone, to see its cost
    assert sum(n > 0 for n in hopeless[20:]) in (1, 2, 3)  # a few tries, ever rarer
    good = run(1.0, 600)
    assert good[-1] == MOST
    assert run(0.0, 100)[-PATIENCE // 2 :].count(0) >= PATIENCE // 2 - 1


@pytest.mark.parametrize("room", [0, 1, 3])
def test_no_more_than_there_is_room_for(room: int) -> None:
    length = DraftLength(accepted=99, examined=100, draft_seconds=0.01, block_seconds={0: 1.0})
    assert length.choose(room) == room


def test_times_of_unseen_numbers_lie_on_the_line_through_the_seen() -> None:
    length = DraftLength(block_seconds={0: 1.0, 4: 1.4})
    assert [length.seconds(n) for n in (0, 1, 4, 6)] == pytest.approx([1.0, 1.1, 1.4, 1.6])
    assert DraftLength(block_seconds={0: 2.0}).seconds(5) == 2.0


def test_in_the_loop_it_learns_per_verifier_and_keeps_what_it_learned() -> None:
    target = tiny("llama")
    pair = ModelPair(target, noisy(target, 0.05))
    ids = torch.tensor(random_prompts([9]))
    settings = {"input_ids": ids, "num_speculative_tokens": "auto", "max_new_tokens": 40, "ignore_eos": True}
    for verifier in (Lossless(), StaticEnsemble(0.2)):
        out = generate(pair, verifier=verifier, seed=0, **settings)
        assert len(out.token_ids[0]) == 40
        known = pair.draft_length(verifier, 1.0)
        assert known.draft_seconds is not None
        assert known.draft_seconds > 0
        assert sum(out.stats.drafted) > 0
        assert len(out.stats.drafted) == MOST
    assert pair.draft_length(Lossless(), 1.0) is pair.draft_length(Lossless(), 1.0)
    assert pair.draft_length(Lossless(), 1.0) is not pair.draft_length(StaticEnsemble(0.2), 1.0)
    assert pair.draft_length(Lossless(), 1.0) is not pair.draft_length(Lossless(), 0.5)


def test_verifiers_that_cannot_be_looked_up_work_as_well() -> None:
    class Unhashable(Lossless):
        __hash__ = None  # type: ignore[assignment]

    target = tiny("llama")
    pair = ModelPair(target, noisy(target, 0.05))
    out = generate(pair, input_ids=torch.tensor([[1, 2, 3]]), verifier=Unhashable(), num_speculative_tokens="auto",
                   max_new_tokens=9, ignore_eos=True)  # fmt: skip
    assert len(out.token_ids[0]) == 9
    # A calibrated head holds tables; what was learned belongs to the head and its quality.
    head = random_head(32, 32)
    calibration = Calibration.__new__(Calibration)
    calibrated = replace(head, calibration=calibration)
    assert pair.draft_length(calibrated, 1.0) is pair.draft_length(head, 1.0)
    assert pair.draft_length(head.at(quality=0.7), 1.0) is not pair.draft_length(head, 1.0)


def test_greedy_output_does_not_depend_on_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the draft has to catch up on many tokens it has not seen."""
    target = tiny("llama")
    pair = ModelPair(target, noisy(target, 0.1))
    ids = torch.tensor(random_prompts([5]))
    alone = generate(pair, input_ids=ids, num_speculative_tokens=0, temperature=0, max_new_tokens=60, ignore_eos=True)
    plan = iter([0] * 20 + [3, 0, 1] + [0] * 12 + [5] * 60)
    monkeypatch.setattr(DraftLength, "choose", lambda self, room: min(next(plan), room))
    auto = generate(
        pair, input_ids=ids, num_speculative_tokens="auto", temperature=0, max_new_tokens=60, ignore_eos=True
    )
    assert auto.token_ids == alone.token_ids
    assert auto.stats.acceptance_rate > 0.3  # else the draft's cache was wrong after it caught up
