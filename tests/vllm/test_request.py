"""What requests may ask for."""

import json

import pytest

from diversed.vllm.bounds import Bounds
from diversed.vllm.request import Relaxation, parse_relaxation

HEADS = Bounds(heads={"shop": "heads/shop", "tally": "heads/tally"})


def parse(setting, bounds=HEADS):
    return parse_relaxation(None if setting is None else {"diversed": setting}, bounds)


@pytest.mark.parametrize("setting", [None, {}, {"quality": 1}, {"quality": 1.0, "head": "shop"},
                                     {"verifier": "lossless"}, {"verifier": "static:1"}])  # fmt: skip
def test_silence_and_quality_one_are_lossless(setting):
    assert parse(setting) is None


def test_a_head_is_served_as_trained_or_on_the_dial():
    assert parse({"head": "shop"}) == Relaxation("head", "shop", 0.0, 0.5, "everywhere")
    assert parse({"head": "tally", "quality": 0.2}) == Relaxation("head", "tally", 0.0, 0.2, "everywhere")


def test_quality_alone_turns_the_first_head_or_is_the_weight():
    assert parse({"quality": 0.3}) == Relaxation("head", "shop", 0.0, 0.3, "everywhere")
    static = parse({"quality": 0.3}, Bounds())
    assert static.kind == "static"
    assert static.value == pytest.approx(0.3)
    assert parse({"quality": 0.3}, Bounds(default_verifier="static:0.8")).value == pytest.approx(0.8 * 0.3 / 0.38)


def test_static_weights_go_through_the_dial():
    assert parse({"verifier": "static:0.8"}).value == pytest.approx(0.8)
    assert parse({"verifier": "static:0.8", "quality": 0.2}).value == pytest.approx(0.5)


def test_the_same_as_json_text_or_flat_keys():
    expected = parse({"head": "shop", "quality": 0.4})
    assert parse(json.dumps({"head": "shop", "quality": 0.4})) == expected
    assert parse_relaxation({"diversed_head": "shop", "diversed_quality": 0.4, "other": 1}, HEADS) == expected


def test_silent_requests_take_the_default():
    bounds = Bounds(default_quality=0.7)
    assert parse(None, bounds).value == pytest.approx(0.7)
    assert parse({"quality": 1}, bounds) is None


def test_a_request_that_names_a_head_or_a_weight_means_it_as_it_is():
    bounds = Bounds(default_quality=0.3, minimum_quality=0.3, heads=HEADS.heads)
    assert parse({"head": "shop"}, bounds).quality == 0.5
    assert parse({"verifier": "static:0.4"}, bounds).value == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"quality": 1.5}, r"quality=1.5 must be a number between 0 and 1"),
        ({"quality": "high"}, "quality='high' must be a number"),
        ({"quality": True}, "quality=True"),
        ({"head": "poems"}, "head='poems' is not served here; there are: shop, tally"),
        ({"head": "poems", "quality": 1}, "head='poems' is not served here"),
        ({"verifier": "static:banana", "quality": 1}, "write static:X with a number"),
        ({"head": "shop", "verifier": "static:0.5"}, "exclude each other"),
        ({"temperature": 1}, "'temperature' is no setting; there are quality, head, verifier, phase"),
        ({"verifier": "static"}, "write static:X with a number"),
        ({"verifier": "static:2"}, "must be a number between 0 and 1"),
        ({"verifier": "typical:0.5"}, "is unknown: use lossless"),
        ({"verifier": "entropy:0.5", "quality": 0.4}, "entropy has no dial"),
        ({"verifier": "synthetic:0.5"}, "DIVERSED_ALLOW_SYNTHETIC=1"),
        ({"phase": "sometimes"}, "phase='sometimes' is unknown"),
        ("{", "is no JSON"),
        ([0.5], "must be an object"),
    ],
)
def test_each_bad_setting_gives_one_clear_error(setting, says):
    with pytest.raises(ValueError, match=says):
        parse(setting)


def test_minimum_quality_bounds_heads_weights_and_rules():
    bounds = Bounds(heads={"shop": "x"}, minimum_quality=0.4)
    assert parse({"quality": 0.4}, bounds) is not None
    assert parse({"verifier": "static:0.4"}, bounds) is not None
    for setting in ({"quality": 0.39}, {"verifier": "static:0.39"}, {"verifier": "static:0.5", "quality": 0.3},
                    {"verifier": "entropy:0.7"}):  # fmt: skip
        with pytest.raises(ValueError, match="this server's minimum quality is"):
            parse(setting, bounds)


def test_minimum_quality_one_allows_lossless_alone():
    bounds = Bounds(minimum_quality=1.0)
    assert parse({"quality": 1}, bounds) is None
    with pytest.raises(ValueError, match="minimum quality is 1"):
        parse({"quality": 0.999}, bounds)


def test_phase_can_be_narrowed_but_not_left():
    assert parse({"quality": 0.5, "phase": "inside"}).phase == "inside"
    assert parse({"quality": 0.5}, Bounds(phase="inside")).phase == "inside"
    with pytest.raises(ValueError, match="relaxes inside reasoning only"):
        parse({"quality": 0.5, "phase": "everywhere"}, Bounds(phase="inside"))
