"""Costs come back as they were put in, and predictions equal the clock where the clock follows the model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made import CONFIG, DRAFT, EACH, PASS, PROVENANCE, REST, SETTINGS, STEP, TOKENS, VERDICT, made_bench

from diversed.engine import ModelPair
from diversed.evaluation.planner import Wish, advice, best_per_verifier, candidates, choose, describe, doubt, mixing
from diversed.evaluation.prediction import costs_of, foretell, target_step
from diversed.evaluation.rows import summarise
from diversed.evaluation.settings import DRAFT_ONLY, TARGET_ONLY, Setting
from diversed.evaluation.sweep import Plan, Recorded, header_of, sweep
from diversed.tasks import load_task
from diversed.theory import expected_blocks

HEAD = Setting("head", 0.5, 5)


@pytest.fixture(scope="module")
def measurements():
    return made_bench()


@pytest.fixture(scope="module")
def recorded(measurements):
    return Recorded(CONFIG, PROVENANCE, measurements, Plan((), 8, 4, 0))


def test_costs_are_those_the_bench_was_made_with(measurements) -> None:
    assert target_step(measurements, 1.0) == pytest.approx(STEP)
    assert target_step(measurements, 0.5) is None
    costs = costs_of(measurements, HEAD)
    assert costs.draft_step == pytest.approx(DRAFT / STEP)
    assert costs.verification == pytest.approx((PASS + VERDICT) / STEP)
    assert costs.per_token == pytest.approx(EACH / STEP)
    assert costs.overhead == pytest.approx(REST / STEP)
    assert costs_of(measurements, Setting("nowhere")) is None


def test_the_speed_at_an_n_that_was_never_run(measurements) -> None:
    found = foretell(measurements, HEAD.at_n(9))
    blocks = expected_blocks([0.8] * TOKENS, 9)
    seconds = blocks * (PASS + VERDICT + REST + 9 * (DRAFT + EACH)) / TOKENS
    assert found.speedup == pytest.approx(STEP / seconds)
    assert found.seconds_per_token == pytest.approx(seconds)
    assert found.block_efficiency == pytest.approx(TOKENS / blocks)
    assert found.score == pytest.approx(7 / 8)
    assert foretell(measurements, HEAD.at_n(17)) is None  # beyond what traces foretell


def test_every_row_is_foretold(measurements) -> None:
    rows = summarise(measurements, SETTINGS, PROVENANCE)
    assert len(rows) == len(SETTINGS)
    for row in rows:
        assert row["predicted_over_measured"] == pytest.approx(1.0)
        assert row["speedup_ci"] == pytest.approx((row["speedup"], row["speedup"]))
        assert row["bias"] == pytest.approx(SETTINGS[Setting(*[row[k] for k in KEYS])][0] - 0.4)
    assert rows[-1]["trained_on"] == "tally"


KEYS = ("verifier", "quality", "num_speculative_tokens", "temperature")


def test_a_plans_scores_are_those_of_the_rows_and_speak_of_prompts(measurements) -> None:
    """A prompt asked under nine seeds is one prompt, and an N between two measured ones takes its score from one."""
    seeded = [replace(m, seed=seed) for m in measurements for seed in range(1 if m.kind != "scored" else 9)]
    row = next(r for r in summarise(seeded, SETTINGS, PROVENANCE) if Setting(*[r[k] for k in KEYS]) == HEAD)
    assert foretell(seeded, HEAD).score_ci == pytest.approx(row["score_ci"])
    assert candidates(Recorded(CONFIG, PROVENANCE, seeded, Plan((), 8, 4, 0)), 1.0)[0].score_ci == pytest.approx(
        candidates(Recorded(CONFIG, PROVENANCE, measurements, Plan((), 8, 4, 0)), 1.0)[0].score_ci
    )
    assert foretell(measurements, HEAD.at_n(4)).score_ci == foretell(measurements, HEAD.at_n(3)).score_ci


def test_a_stalled_prompt_moves_no_time_per_token(measurements) -> None:
    first = next(m for m in measurements if m.kind == "timed" and m.setting.verifier == TARGET_ONLY)
    stalled = [replace(m, time=m.time | {"target": 9.0}) if m is first else m for m in measurements]
    for point in candidates(Recorded(CONFIG, PROVENANCE, stalled, Plan((), 8, 4, 0)), 1.0):
        assert point.seconds_per_token * point.speedup == pytest.approx(STEP)


def test_a_score_that_may_not_be_had_is_said(recorded) -> None:
    point = choose(candidates(recorded, 1.0), Wish(min_quality=0.8))
    assert "not certain: its interval reaches down to 0." in doubt(point, Wish(min_quality=0.8))
    assert doubt(point, Wish(min_quality=point.score_ci[0])) == ""
    assert doubt(point, Wish(speedup=2.0)) == ""


def test_the_fastest_that_keeps_a_score_and_the_best_at_a_speed(recorded) -> None:
    points = candidates(recorded, 1.0)
    kept = choose(points, Wish(min_quality=0.8))
    assert kept.setting.verifier == "head"
    assert kept.speedup == max(p.speedup for p in points if p.score >= 0.8)
    fast = choose(points, Wish(speedup=2.5))
    assert fast.speedup >= 2.5
    slow = choose(points, Wish(latency_ms=1000.0))
    assert slow.score_ci[1] >= max(p.score for p in points)
    both = choose(points, Wish(latency_ms=1000 * kept.seconds_per_token * 1.001, min_quality=0.8))
    assert both == kept
    assert "score 0.875" in describe(kept)
    assert advice(kept, points) == ""


def test_the_best_n_is_the_best_of_all(recorded) -> None:
    points = candidates(recorded, 1.0)
    for best in best_per_verifier(points):
        same = [p.speedup for p in points if p.setting.at_n(0) == best.setting.at_n(0)]
        assert best.speedup == max(same)
    assert len(best_per_verifier(points)) == 5
    optimum = next(p for p in best_per_verifier(points) if p.setting.verifier == "lossless")
    assert optimum.setting.num_speculative_tokens < 5  # low acceptance, short blocks


def test_an_impossible_plan_names_the_nearest_point(recorded) -> None:
    points = candidates(recorded, 1.0)
    with pytest.raises(ValueError, match=r"plan: no setting gives a score of 0.99 with a speed-up of 3. Nearest: \S"):
        choose(points, Wish(min_quality=0.99, speedup=3.0))
    fastest = max(points, key=lambda p: p.speedup)
    with pytest.raises(
        ValueError, match=f"Nearest: {fastest.setting.label}, N {fastest.setting.num_speculative_tokens}"
    ):
        choose(points, Wish(speedup=50.0))


def test_when_nothing_is_faster_the_plan_is_not_to_speculate(measurements) -> None:
    """A draft as slow as the target."""
    slow = [
        m if m.kind != "timed" or not m.setting.speculates else type(m)(**(vars(m) | {"time": slower(m.time)}))
        for m in measurements
    ]
    points = candidates(Recorded(CONFIG, PROVENANCE, slow, Plan((), 8, 4, 0)), 1.0)
    chosen = choose(points, Wish())
    assert chosen.setting.verifier == TARGET_ONLY
    assert advice(chosen, points).startswith("Do not speculate")


def test_a_plan_says_when_mixing_requests_keeps_more(recorded) -> None:
    """The draft alone takes a tenth of the target's time and is right on 1 of 8; lossless at N 3 is right on all."""
    points = best_per_verifier(candidates(recorded, 1.0))
    head = next(p for p in points if p.setting.verifier == "head")
    assert mixing(head, recorded) == ""
    weak = next(p for p in points if p.setting.verifier == "static:0.1")  # right on 2 of 8
    rows = summarise(recorded.measurements, [Setting("lossless", None, 3)], PROVENANCE)
    lossless = rows[0]["normalised_time"]
    assert 0.1 < 1 / weak.speedup < lossless < 1  # faster than the target alone
    share = (1 / weak.speedup - 0.1) / (lossless - 0.1)
    assert 1 / 8 + share * 7 / 8 > 2 / 8
    assert mixing(weak, recorded) == ""  # more, and eight prompts cannot tell
    per_prompt = ("scores", "drafted", "accepted", "rejected", "target_calls", "tokens")
    many = [
        replace(m, **{name: getattr(m, name) * 40 for name in per_prompt}) if m.kind == "scored" else m
        for m in recorded.measurements
    ]
    told = mixing(weak, replace(recorded, measurements=many))
    assert told.startswith(
        f"Mixing requests keeps more in the same time: {100 * share:.0f} % of them to lossless, the others to the "
        f"draft alone, scores {1 / 8 + share * 7 / 8:.3f}, +{share * 7 / 8 - 1 / 8:.3f} (+0."
    )
    without = [m for m in many if m.setting.verifier != DRAFT_ONLY]
    assert mixing(weak, replace(recorded, measurements=without)) == ""


def test_a_plan_takes_scores_from_all_prompts_not_from_the_traced_ones(measurements) -> None:
    one = Setting("head", 0.5, 5)
    traced_wrong = [
        type(m)(**(vars(m) | {"scores": [0.0] * len(m.scores)})) if m.kind == "traced" else m for m in measurements
    ]
    scored = next(m for m in measurements if m.kind == "scored" and m.setting == one)
    found = {p.setting: p for p in candidates(Recorded(CONFIG, PROVENANCE, traced_wrong, Plan((), 8, 4, 0)), 1.0)}
    assert found[one].score == sum(scored.scores) / len(scored.scores) == 0.875
    assert found[one.at_n(16)].score == 0.875  # never run: that of the nearest N
    assert found[one.at_n(2)].score == 1.0


def slower(time: dict[str, float]) -> dict[str, float]:
    return time | {"draft": 10 * time["draft"], "verification": 30 * time["verification"]}


def test_a_bench_without_timing_or_traces_is_one_clear_error(measurements, recorded) -> None:
    with pytest.raises(ValueError, match=r"temperature=0.3: target-only decoding was not timed at it \(timed at: 1\)"):
        candidates(recorded, 0.3)
    bare = [m for m in measurements if m.kind != "traced"]
    with pytest.raises(ValueError, match="trace: nothing was both traced and timed"):
        candidates(Recorded(CONFIG, PROVENANCE, bare, Plan((), 8, 4, 0)), 1.0)
    with pytest.raises(ValueError, match="speedup=-1"):
        Wish(speedup=-1)


@pytest.mark.slow
def test_the_clock_agrees_on_the_embedded_pair() -> None:
    """Wall-clock speed of a shared machine scatters by a tenth and more; the middle over settings must not."""
    settings = [Setting(TARGET_ONLY, None, 0)]
    settings += [Setting(v, None, n) for v in ("lossless", "static:0.5", "static:0.2") for n in (2, 4, 7)]
    plan = Plan(tuple(settings), batch_size=25, timing_n=12, seed=0, trace_n=50)
    pair, task = ModelPair.embedded(), load_task("shop", n=50)
    measurements = sweep(pair, task, plan)
    rows = summarise(measurements, settings, header_of(pair, task, plan)["provenance"])
    for row, setting in zip(rows[1:], settings[1:], strict=True):  # what needs no clock
        foretold = foretell(measurements, setting)
        assert foretold.block_efficiency == pytest.approx(row["tokens_per_target_call"], rel=0.08)
    ratios = np.array([r["predicted_over_measured"] for r in rows if r["predicted_over_measured"] is not None])
    assert len(ratios) == 9
    assert 0.85 < np.median(ratios) < 1.15
    assert np.abs(np.log(ratios)).max() < np.log(1.4)
