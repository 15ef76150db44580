"""Inside and outside of reasoning, position by position."""

import torch

from diversed.vllm.phases import PhaseTracker, inside_after, strict_rows

OPEN, CLOSE = 7, 8


def test_the_last_marker_decides():
    assert not inside_after([1, 2], OPEN, CLOSE)
    assert inside_after([1, OPEN, 2], OPEN, CLOSE)
    assert not inside_after([OPEN, 2, CLOSE, 3], OPEN, CLOSE)


def test_a_position_is_judged_by_what_precedes_it():
    tokens = torch.tensor([[1, CLOSE, 2], [OPEN, 3, -1], [1, CLOSE, 2]])
    inside = torch.tensor([True, False, True])
    wanted = torch.tensor([1, -1, 0])
    strict = strict_rows(inside, tokens, wanted, OPEN, CLOSE)
    # The token that closes reasoning is still inside; the one that opens it is still outside.
    assert strict.tolist() == [[False, False, True], [False, True, True], [False, False, False]]


def test_tracker_follows_requests_through_their_steps():
    tracker = PhaseTracker(4, (OPEN, CLOSE), torch.device("cpu"))
    tracker.begin(2, [1, OPEN])
    tracker.begin(0, [1])
    assert tracker.at([0, 2]).tolist() == [False, True]
    tracker.advance([2, 0], torch.tensor([[5, CLOSE, -1], [OPEN, 6, 6]]))
    assert tracker.at([0, 2]).tolist() == [True, False]
