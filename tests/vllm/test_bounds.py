"""What operators set."""

import pytest

from diversed.vllm.bounds import Bounds, read_bounds
from diversed.vllm.request import parse_relaxation


def test_nothing_set_is_lossless_by_default():
    assert read_bounds({}) == Bounds()
    assert Bounds().default_quality == 1


def test_environment():
    bounds = read_bounds(
        {
            "DIVERSED_DEFAULT_QUALITY": "0.8",
            "DIVERSED_MINIMUM_QUALITY": "0.3",
            "DIVERSED_HEADS": "gsm8k=heads/a, chat=user/b",
            "DIVERSED_PHASE": "inside",
            "DIVERSED_STRICT": "1",
        }
    )
    assert bounds == Bounds(0.8, 0.3, heads={"gsm8k": "heads/a", "chat": "user/b"}, phase="inside", strict=True)


def test_environment_overrides_the_file(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text('default_quality = 0.5\nminimum_quality = 0.2\nstrict = true\n[heads]\nshop = "heads/shop"\n')
    bounds = read_bounds({"DIVERSED_CONFIG": str(file), "DIVERSED_DEFAULT_QUALITY": "1"})
    assert bounds == Bounds(1.0, 0.2, heads={"shop": "heads/shop"}, strict=True)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"DIVERSED_DEFAULT_QUALITY": "high"}, "DIVERSED_DEFAULT_QUALITY='high' must be a number between 0 and 1"),
        ({"DIVERSED_MINIMUM_QUALITY": "7"}, "DIVERSED_MINIMUM_QUALITY='7'"),
        (
            {"DIVERSED_MINIMUM_QUALTY": "0.5"},
            "DIVERSED_MINIMUM_QUALTY is no setting; there are DIVERSED_DEFAULT_QUALITY, ",
        ),
        ({"DIVERSED_HEADS": "shop"}, "DIVERSED_HEADS='shop': write NAME=FOLDER"),
        ({"DIVERSED_PHASE": "never"}, "phase='never' is unknown"),
        ({"DIVERSED_STRICT": "maybe"}, "DIVERSED_STRICT='maybe' must be 1 or 0"),
        ({"DIVERSED_CONFIG": "no/such.toml"}, "cannot be read"),
        ({"DIVERSED_DEFAULT_QUALITY": "0.2", "DIVERSED_MINIMUM_QUALITY": "0.5"}, "lies below minimum_quality"),
        ({"DIVERSED_DEFAULT_VERIFIER": "entropy:0.7"}, "default_verifier='entropy:0.7' is unknown: use static:W"),
        ({"DIVERSED_DEFAULT_VERIFIER": "head:shop"}, "default_verifier='head:shop' is unknown: .* heads is empty"),
        ({"DIVERSED_DEFAULT_VERIFIER": "static:much"}, "default_verifier='static:much'='much' must be a number"),
        (
            {
                "DIVERSED_DEFAULT_VERIFIER": "static:0.1",
                "DIVERSED_DEFAULT_QUALITY": "0.5",
                "DIVERSED_MINIMUM_QUALITY": "0.3",
            },
            "its weight is 0.1, below minimum_quality=0.3",
        ),
    ],
)
def test_each_mistake_is_named(environment, says):
    with pytest.raises(ValueError, match=says):
        read_bounds(environment)


def test_unknown_keys_of_a_file_are_refused(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text("minimum_qualty = 0.2\n")
    with pytest.raises(ValueError, match="'minimum_qualty' is no setting"):
        read_bounds({"DIVERSED_CONFIG": str(file)})


@pytest.mark.parametrize("quality", [0.3, 0.7, 1.0])
def test_silent_requests_keep_the_minimum_under_any_default(quality):
    for verifier in ("", "head:shop", "static:0.5", "static:0.9", "static:0.2"):
        try:
            bounds = Bounds(quality, 0.3, verifier, heads={"shop": "heads/shop"})
        except ValueError:
            assert verifier == "static:0.2"
            assert quality < 0.7
            continue
        silent = parse_relaxation(None, bounds)
        assert silent is None or silent.strictness >= 0.3
