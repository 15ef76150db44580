"""transformers' own generation in the same tables: the same tokens where both are deterministic."""

from __future__ import annotations

import pytest

from diversed.engine import ModelPair
from diversed.evaluation.settings import ASSISTED, PEER, TARGET_ONLY, Setting
from diversed.evaluation.sweep import answer, measure
from diversed.tasks import load_task


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.embedded()


@pytest.fixture(scope="module")
def task():
    return load_task("shop", n=3)


@pytest.mark.parametrize(
    ("peer", "ours"),
    [
        (PEER, Setting(TARGET_ONLY, None, 0, 0.0)),
        (ASSISTED, Setting("lossless", None, 4, 0.0)),
        (f"{ASSISTED}:0.5", Setting("static:0.5", None, 4, 0.0)),
    ],
)
def test_at_temperature_0_a_peer_writes_what_the_engine_writes(pair, task, peer: str, ours: Setting) -> None:
    theirs = answer(pair, task, Setting(peer, None, ours.num_speculative_tokens, 0.0), 0, 3, seed=0)
    mine = answer(pair, task, ours, 0, 3, seed=0)
    assert theirs.token_ids == mine.token_ids
    assert theirs.texts == mine.texts
    assert theirs.finish_reasons == mine.finish_reasons
    assert [c.tokens for c in theirs.stats.per_sequence] == [c.tokens for c in mine.stats.per_sequence]
    if peer == PEER:
        assert theirs.stats.tokens_per_target_call == 1.0
    else:
        assert theirs.stats.tokens_per_target_call > 1.5


def test_a_peer_samples_reproducibly_and_is_measured_like_the_others(pair, task) -> None:
    setting = Setting(ASSISTED, None, 3, 1.0)
    first, second = (measure(pair, task, setting, 0, 2, kind="scored", seed=s) for s in (1, 1))
    other = measure(pair, task, setting, 0, 2, kind="scored", seed=2)
    assert first.tokens == second.tokens
    assert first.scores == second.scores
    assert first.tokens != other.tokens
    assert first.drafted == [0, 0]
    assert first.seconds > 0
    assert setting.weight == 1.0
    assert Setting(f"{ASSISTED}:0.3").weight == 0.3


@pytest.mark.parametrize("name", ["transformers:beam", f"{ASSISTED}:x", f"{ASSISTED}:2"])
def test_an_unknown_peer_is_one_clear_error(pair, task, name: str) -> None:
    with pytest.raises(ValueError, match=f"verifier='{name}'"):
        answer(pair, task, Setting(name, None, 3, 1.0), 0, 1, seed=0)
