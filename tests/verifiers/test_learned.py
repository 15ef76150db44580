"""The head, its dial and its life on disk."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from torch import Tensor

from diversed import EnsembleHead, LearnedEnsemble, Lossless
from diversed.verifiers.calibration import Calibration
from diversed.verifiers.learned import closed_form_features

VARIANTS = [
    {},
    {"mlp_size": 4},
    {"features": True},
    {"mlp_size": 4, "features": True},
    {"features": True, "hidden": False},
]
PAIR = {"target": "big/target", "draft": "small/draft", "vocabulary_hash": "0123456789abcdef"}


def positions(batch: int = 40, size: int = 7, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch)
    p, q = torch.randn(2, batch, 2, size, generator=generator).mul(2).softmax(-1)
    hidden = torch.randn(batch, 2, 8, generator=generator).to(dtype)
    return p, q, hidden[..., :5], hidden[..., 5:]


def random_head(seed: int = 0, spread: float = 1.0, **kwargs: object) -> EnsembleHead:
    head = EnsembleHead(5, 3, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return head.eval().requires_grad_(False)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("initial", [0.5, 0.1, 0.93])
def test_an_untrained_head_sets_its_initial_weight_everywhere(variant: dict[str, object], initial: float) -> None:
    head = EnsembleHead(5, 3, initial_weight=initial, **variant)
    torch.testing.assert_close(LearnedEnsemble(head).weight(*positions()), torch.full((40, 2), initial))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_weight_depends_on_what_the_head_looks_at(variant: dict[str, object]) -> None:
    p, q, target_hidden, draft_hidden = positions()
    verifier = LearnedEnsemble(random_head(**variant))
    weight = verifier.weight(p, q, target_hidden, draft_hidden)
    assert ((weight > 0) & (weight < 1)).all()
    sees_hidden = variant.get("hidden", True)
    assert torch.equal(weight, verifier.weight(p, q, target_hidden + 1, draft_hidden)) != sees_hidden
    assert torch.equal(weight, verifier.weight(p, q, target_hidden, draft_hidden + 1)) != sees_hidden
    same_without_probs = torch.equal(weight, verifier.weight(q, p.roll(1, 0), target_hidden, draft_hidden))
    assert same_without_probs != bool(variant.get("features"))


def test_nu_is_the_blend_at_the_weight() -> None:
    p, q, *hidden = positions()
    verifier = LearnedEnsemble(random_head())
    w = verifier.weight(p, q, *hidden).unsqueeze(-1)
    torch.testing.assert_close(verifier(p, q, *hidden), w * p + (1 - w) * q)


def test_the_linear_head_is_one_layer_on_both_hidden_states() -> None:
    """The paper's head, written out."""
    p, q, target_hidden, draft_hidden = positions()
    head = random_head()
    logits = torch.cat([target_hidden, draft_hidden], -1) @ head.out.weight[0] + head.out.bias
    torch.testing.assert_close(LearnedEnsemble(head).weight(p, q, target_hidden, draft_hidden), torch.sigmoid(logits))


@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_quality_1_is_lossless_to_the_last_bit_and_quality_0_the_draft(spread: float) -> None:
    """Also for a head whose weights have saturated at 0 and 1."""
    p, q, *hidden = positions()
    verifier = LearnedEnsemble(random_head(spread=spread))
    assert torch.equal(verifier.at(quality=1)(p, q, *hidden), Lossless()(p, q, *hidden))
    assert torch.equal(verifier.at(quality=0)(p, q, *hidden), q)
    assert verifier.at(quality=0).weight(p, q, *hidden).eq(0).all()


def test_the_dial_scales_the_odds_of_the_head() -> None:
    verifier = LearnedEnsemble(random_head())
    at_half, dialled = (verifier.at(quality=d).weight(*positions()).double() for d in (0.5, 0.8))
    torch.testing.assert_close(dialled / (1 - dialled), 4 * at_half / (1 - at_half), rtol=1e-4, atol=0)
    assert torch.equal(verifier.weight(*positions()), verifier.at(quality=0.5).weight(*positions()))


def test_the_dial_still_turns_where_the_head_has_saturated() -> None:
    """sigmoid(20) rounds to 1 in float32: the odds must be scaled before that."""
    head = EnsembleHead(5, 3)
    with torch.no_grad():
        head.out.bias.fill_(20.0)
    weight = LearnedEnsemble(head).at(quality=1e-9).weight(*positions())
    torch.testing.assert_close(weight, torch.full((40, 2), torch.tensor(20 - 20.7232658).sigmoid()), rtol=1e-4, atol=0)


@pytest.mark.parametrize("initial", [0, 1, -0.5, 2, "0.5"])
def test_an_initial_weight_without_finite_odds_is_refused(initial: object) -> None:
    with pytest.raises(ValueError, match="initial_weight"):
        EnsembleHead(5, 3, initial_weight=initial)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_and_arithmetic_stay_in_float32_for_bfloat16_models(variant: dict[str, object]) -> None:
    p, q, *hidden = positions(dtype=torch.bfloat16)
    head = random_head(**variant)
    assert {t.dtype for t in head.state_dict().values()} == {torch.float32}
    inputs = head.inputs(p, q, *hidden)
    assert inputs.dtype == torch.float32
    assert inputs.shape[-1] == 8 * variant.get("hidden", True) + 8 * bool(variant.get("features"))
    exact = head(head.inputs(p, q, *(h.float() for h in hidden)))
    assert torch.equal(head(inputs), exact)
    assert LearnedEnsemble(head)(p, q, *hidden).dtype == torch.float32


def test_the_closed_form_features_of_hand_computed_cases() -> None:
    p = torch.tensor([[0.4, 0.6, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]])
    entropy_p = -(0.4 * math.log(0.4) + 0.6 * math.log(0.6))
    expected = torch.tensor(
        [[entropy_p, 1.5 * math.log(2), 0.5, 0.6, 0.5, 0.0, 0.25, 0.0], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    )
    torch.testing.assert_close(closed_form_features(p, q), expected)


def test_a_head_with_nothing_to_look_at_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden=False"):
        EnsembleHead(4, 4, hidden=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_normalisation_standardises_the_inputs_it_was_fitted_to(variant: dict[str, object]) -> None:
    p, q, target_hidden, draft_hidden = positions()
    head = random_head(**variant)
    inputs = head.inputs(p, q, 100 * target_hidden + 7, draft_hidden).flatten(0, 1)
    inputs[:, 4] = 3.0  # a dead unit must not divide by zero
    head.fit_normalisation(inputs)
    standardised = (inputs - head.mean) / head.scale
    torch.testing.assert_close(standardised.mean(0), torch.zeros(inputs.shape[1]), atol=1e-4, rtol=0)
    deviation = torch.ones(inputs.shape[1])
    deviation[4] = 0.0
    torch.testing.assert_close(standardised.std(0, correction=0), deviation, atol=1e-4, rtol=0)
    torch.testing.assert_close(head(inputs), head.out(head.body(standardised)).squeeze(-1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_head_loads_as_the_same_verifier(variant: dict[str, object], tmp_path: Path) -> None:
    details = {"pair": PAIR, "task": "sums", "training": {"steps": 3}, "figures": {"acceptance": 0.7}}
    head = random_head(**variant, **details)
    head.fit_normalisation(head.inputs(*positions()).flatten(0, 1))
    LearnedEnsemble(head).save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors", "README.md"} <= {file.name for file in tmp_path.iterdir()}

    loaded = LearnedEnsemble.from_pretrained(tmp_path)
    assert torch.equal(loaded.weight(*positions()), LearnedEnsemble(head).weight(*positions()))
    assert loaded.head.pair == PAIR
    assert loaded.head.task == "sums"
    assert loaded.head.training_settings == {"steps": 3}
    assert loaded.head.figures == {"acceptance": 0.7}
    assert not loaded.head.training
    assert not any(parameter.requires_grad for parameter in loaded.head.parameters())

    tensors = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["pair"] == PAIR
    assert (config["target_hidden_size"], config["draft_hidden_size"]) == (5, 3)
    card = (tmp_path / "README.md").read_text()
    for part in ("big/target", "small/draft", "sums", "acceptance", "0.7", "steps", "library_name: diversed"):
        assert part in card


def test_an_unnamed_head_saves_with_a_card_as_well(tmp_path: Path) -> None:
    LearnedEnsemble(EnsembleHead(5, 3)).save_pretrained(tmp_path)
    assert "not recorded" in (tmp_path / "README.md").read_text()
    assert LearnedEnsemble.from_pretrained(tmp_path).head.pair == {}


def test_a_training_runs_folder_stands_for_its_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"run": {}}')
    with pytest.raises(ValueError, match=r"source='.*' holds no head: give a folder with config.json and model"):
        LearnedEnsemble.from_pretrained(tmp_path)
    LearnedEnsemble(EnsembleHead(5, 3, task="sums")).save_pretrained(tmp_path / "head")
    assert LearnedEnsemble.from_pretrained(tmp_path).head.task == "sums"


FITS = {
    "target": "big/target",
    "draft": "small/draft",
    "hidden_sizes": (5, 3),
    "vocabulary_hash": PAIR["vocabulary_hash"],
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"target": "moved/elsewhere/target"},  # folders may move
        {"vocabulary_hash": None},  # a pair without a tokenizer cannot tell
    ],
)
def test_the_pair_a_head_was_made_for_is_accepted(change: dict[str, object]) -> None:
    LearnedEnsemble(EnsembleHead(5, 3, pair=PAIR)).check_fits(**(FITS | change))


def test_a_head_made_on_a_pair_without_tokenizer_fits_the_pair_with_one() -> None:
    LearnedEnsemble(EnsembleHead(5, 3, pair=PAIR | {"vocabulary_hash": ""})).check_fits(**FITS)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"target": "big/other"}, "target names"),
        ({"draft": "small/other"}, "draft names"),
        ({"draft": "another/run/draft"}, "draft names"),  # distill calls every draft so
        ({"hidden_sizes": (3, 5)}, "hidden sizes"),
        ({"vocabulary_hash": "f" * 16}, "vocabularies"),
    ],
)
def test_another_pair_is_refused_and_both_are_named(change: dict[str, object], difference: str) -> None:
    verifier = LearnedEnsemble(EnsembleHead(5, 3, pair=PAIR)).at(quality=0.3)
    here = FITS | change
    with pytest.raises(ValueError, match="verifier") as error:
        verifier.check_fits(**here)
    for part in (difference, "big/target", "small/draft", here["target"], here["draft"]):
        assert part in str(error.value)


def test_same_names_false_lets_other_names_pass_but_not_other_sizes_or_vocabularies() -> None:
    verifier = LearnedEnsemble(EnsembleHead(5, 3, pair=PAIR), same_names=False)
    verifier.check_fits(**(FITS | {"target": "a", "draft": "b"}))
    verifier.at(quality=0.2).check_fits(**(FITS | {"target": "a", "draft": "b"}))
    for change in ({"hidden_sizes": (5, 4)}, {"vocabulary_hash": "f" * 16}):
        with pytest.raises(ValueError, match="big/target"):
            verifier.check_fits(**(FITS | change))


def test_a_calibrated_head_is_uploaded_with_its_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: dict[str, Any] = {}

    def upload(self: HfApi, *, repo_id: str, folder_path: str, **kwargs: Any) -> str:
        sent.update(kwargs, repo_id=repo_id, files=sorted(os.listdir(folder_path)))
        return "done"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **kwargs: SimpleNamespace(repo_id=f"me/{repo_id}"))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    calibration = Calibration((), {"task": "shop"})
    head = LearnedEnsemble(EnsembleHead(5, 3, pair=PAIR), calibration=calibration)
    assert head.push_to_hub("head", commit_message="first") == "done"
    head.save_pretrained(tmp_path)
    assert sent == {"repo_id": "me/head", "commit_message": "first", "files": sorted(os.listdir(tmp_path))}
    assert "calibration.json" in sent["files"]


def test_a_file_that_holds_another_models_tensors_is_no_head(tmp_path):
    """Loaded leniently it would be a weight of one half everywhere."""
    folder = tmp_path / "head"
    LearnedEnsemble(EnsembleHead(4, 4)).save_pretrained(folder)
    save_file({"lm_head.weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    with pytest.raises(RuntimeError, match="out"):
        LearnedEnsemble.from_pretrained(folder)


def test_a_calibration_does_not_outlive_its_head(tmp_path):
    folder = tmp_path / "head"
    LearnedEnsemble(EnsembleHead(4, 4)).save_pretrained(folder)
    (folder / "calibration.json").write_text("{}")
    LearnedEnsemble(EnsembleHead(4, 4)).save_pretrained(folder)
    assert LearnedEnsemble.from_pretrained(folder).calibration is None
