"""What a server can serve at all, given how it drafts."""

from types import SimpleNamespace

import pytest

from diversed.vllm.bounds import Bounds
from diversed.vllm.requests import check_request

DRAFTS = SimpleNamespace(method="draft_model", draft_sample_method="probabilistic", rejection_sample_method="standard")
ONE_HOT = SimpleNamespace(method="ngram", draft_sample_method="greedy", rejection_sample_method="standard")
ADAPTIVE = SimpleNamespace(**vars(DRAFTS), enable_adaptive_verification=True)
BOUNDS = Bounds(allow_synthetic=True, heads={"shop": "heads/shop"})


def check(setting, speculation, temperature=1.0, bounds=BOUNDS):
    extra = None if setting is None else {"diversed": setting}
    return check_request(SimpleNamespace(extra_args=extra, temperature=temperature), bounds, speculation, None)


def test_what_can_be_served():
    assert check({"verifier": "static:0.5"}, DRAFTS).value == 0.5
    assert check({"verifier": "static:0.5"}, ONE_HOT).value == 0.5
    assert check({"verifier": "entropy:0.7"}, ONE_HOT).kind == "entropy"
    assert check({"quality": 1}, None) is None
    assert check(None, None, bounds=Bounds(default_quality=0.5)) is None  # nobody asked: nothing to refuse


@pytest.mark.parametrize(
    ("setting", "speculation", "temperature", "says"),
    [
        ({"verifier": "static:0.5"}, None, 1.0, "does not speculate"),
        ({"verifier": "static:0.5"}, ADAPTIVE, 1.0, "cannot relax: adaptive verification"),
        ({"verifier": "fuzzy-tv:0.5"}, ONE_HOT, 1.0, '"draft_sample_method": "probabilistic"'),
        ({"head": "shop"}, ONE_HOT, 1.0, "no draft model"),
        ({"verifier": "synthetic:0.5"}, DRAFTS, 0.0, "temperature above 0"),
        ({"quality": 0.5, "phase": "inside"}, DRAFTS, 1.0, "has no tokens '<think>' and '</think>'"),
    ],
)
def test_what_cannot(setting, speculation, temperature, says):
    with pytest.raises(ValueError, match=says):
        check(setting, speculation, temperature)
