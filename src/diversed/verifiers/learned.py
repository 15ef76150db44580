"""The learned verifier: a small head that sets the ensemble weight at each position, and its life on the Hub."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import HfApi, PyTorchModelHubMixin
from torch import Tensor, nn

from diversed.verification import entropy, total_variation
from diversed.verifiers.calibration import FILE as CALIBRATION
from diversed.verifiers.calibration import Calibration, load_calibration
from diversed.verifiers.ensemble import Ensemble, check_fraction, log_odds, scale_odds

NUM_FEATURES = 8

MODEL_CARD = """---
{{ card_data }}
---

# An ensemble head for relaxed speculative decoding

A head for the Python package `diversed`. It sets, at each position, how far the verifier of speculative decoding
leans on the target model (weight 1: lossless) or lets the draft model have its way (weight 0), from the hidden states
of both. It fits one pair of models and one task; loading it onto another pair is an error.

| | |
| --- | --- |
| target | {{ pair.target | default("not recorded", true) }} |
| draft | {{ pair.draft | default("not recorded", true) }} |
| task | {{ task | default("not recorded", true) }} |

{% if figures %}## Measured

| | |
| --- | --- |
{% for key, value in figures.items() %}| {{ key }} | {{ value }} |
{% endfor %}{% endif %}
{% if training %}## Training

| | |
| --- | --- |
{% for key, value in training.items() %}| {{ key }} | {{ value }} |
{% endfor %}{% endif %}
## Use

```python
from diversed import LearnedEnsemble, ModelPair, generate

{% if pair.target == "diversed/embedded-target" -%}
pair = ModelPair.embedded()
{%- else -%}
pair = ModelPair.from_pretrained("{{ pair.target }}", "{{ pair.draft }}")
{%- endif %}
verifier = LearnedEnsemble.from_pretrained("{{ repo_id | default("this/folder", true) }}").at(quality=0.5)
generate(pair, ["..."], verifier=verifier)
```
"""


def closed_form_features(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What the two distributions alone say of a position: [..., V] -> [..., 8], a function of the prefix alone.

    In order: entropy of p and of q in nats; TV(p, q); the largest p and the largest q; p of the draft's favourite and
    q of the target's; whether the favourites agree.
    """
    p, q = target_probs, draft_probs
    (top_p, best_p), (top_q, best_q) = p.max(-1), q.max(-1)
    return torch.stack(
        [
            entropy(p),
            entropy(q),
            total_variation(p, q),
            top_p,
            top_q,
            p.gather(-1, best_q.unsqueeze(-1)).squeeze(-1),
            q.gather(-1, best_p.unsqueeze(-1)).squeeze(-1),
            (best_p == best_q).to(p.dtype),
        ],
        -1,
    )


def vocabulary_hash(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 over a tokenizer's sorted vocabulary, 16 hex digits: by it a head knows its pair."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()[:16]


class EnsembleHead(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="diversed",
    tags=["speculative-decoding"],
    license="apache-2.0",
    model_card_template=MODEL_CARD,
):
    """Log-odds of the ensemble weight from the hidden states of both models that predict a position.

    The paper's head is one linear layer on [h_target; h_draft] (Wang et al. 2026, section 4). ``mlp_size`` puts one
    hidden layer in between, ``features`` appends :func:`closed_form_features`, ``hidden=False`` leaves the hidden
    states out: eight numbers need far fewer labels than a thousand. Inputs are standardised first; the head starts at
    ``initial_weight`` everywhere. Parameters stay in float32 whatever the models' dtype, or small steps of training
    would be lost to rounding.

    Args:
        target_hidden_size, draft_hidden_size: sizes of the last hidden states.
        mlp_size: units of the hidden layer; 0 for the linear head.
        features: whether the closed-form features join the input.
        hidden: whether the hidden states do.
        initial_weight: ensemble weight of the untrained head, strictly between 0 and 1.
        pair: ``{"target": name, "draft": name, "vocabulary_hash": hash}`` of the pair it is made for.
        task, training, figures: what it was trained on, how, and what was measured; for the config and model card.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        target_hidden_size: int,
        draft_hidden_size: int,
        mlp_size: int = 0,
        features: bool = False,
        hidden: bool = True,
        initial_weight: float = 0.5,
        pair: dict[str, str] | None = None,
        task: str | None = None,
        training: dict[str, Any] | None = None,
        figures: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not 0 < check_fraction("initial_weight", initial_weight) < 1:
            raise ValueError(f"initial_weight={initial_weight} must lie strictly between 0 and 1")
        self.target_hidden_size, self.draft_hidden_size = target_hidden_size, draft_hidden_size
        if not (features or hidden):
            raise ValueError("features=False and hidden=False leave the head nothing to look at: keep one of them")
        self.features, self.hidden = features, hidden
        self.pair, self.task = pair or {}, task
        self.training_settings, self.figures = training or {}, figures or {}
        size = (target_hidden_size + draft_hidden_size) * hidden + NUM_FEATURES * features
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        if mlp_size:
            self.body: nn.Module = nn.Sequential(nn.Linear(size, mlp_size), nn.GELU())
        else:
            self.body = nn.Identity()
        self.out = nn.Linear(mlp_size or size, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.constant_(self.out.bias, log_odds(initial_weight))

    def inputs(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        """What the head looks at, [..., size] in float32, before standardising."""
        features = closed_form_features(target_probs.float(), draft_probs.float()) if self.features else None
        return self.join_inputs(target_hidden, draft_hidden, features)

    def join_inputs(self, target_hidden: Tensor, draft_hidden: Tensor, features: Tensor | None) -> Tensor:
        """:meth:`inputs` where :func:`closed_form_features` are at hand already."""
        parts = [target_hidden.float(), draft_hidden.float()] if self.hidden else []
        if self.features:
            assert features is not None
            parts.append(features)
        return torch.cat(parts, -1)

    @torch.no_grad()
    def fit_normalisation(self, inputs: Tensor) -> None:
        """Standardise by the mean and deviation of a sample of inputs [M, size]."""
        self.mean.copy_(inputs.mean(0))
        self.scale.copy_(inputs.std(0, correction=0).clamp_min(1e-4))

    def forward(self, inputs: Tensor) -> Tensor:
        """Log-odds of the weight, [..., size] -> [...]."""
        standardised = (inputs - self.mean) / self.scale
        return self.out(self.body(standardised)).squeeze(-1)  # type: ignore[no-any-return]

    def generate_model_card(self, *args: Any, **kwargs: Any) -> Any:
        details = {"pair": self.pair, "task": self.task, "training": self.training_settings, "figures": self.figures}
        return super().generate_model_card(*args, **details, **kwargs)


def head_folder(source: str | Path, name: str = "source") -> str | Path:
    """Where a head lies: in ``head`` below a training run's folder, else at the source itself.

    Raises:
        ValueError: a folder without a head; ``name`` is what the user calls the argument.
    """
    folder = Path(source)
    if not folder.is_dir():
        return source  # a Hub id
    found = next((f for f in (folder, folder / "head") if (f / "model.safetensors").is_file()), None)
    if found is None:
        raise ValueError(
            f"{name}={str(source)!r} holds no head: give a folder with config.json and model.safetensors, or that of a "
            "training run that got as far as its first validation"
        )
    return found


def model_name(source: str) -> str:
    """The last part of a folder or Hub id: folders may move, models keep their names. ``distill`` calls all its drafts
    ``draft``, so there the part before it counts as well."""
    path = Path(source)
    return f"{path.parent.name}/{path.name}" if path.name == "draft" else path.name


@dataclass(frozen=True)
class LearnedEnsemble(Ensemble):
    """nu = w p + (1 - w) q with w = sigmoid(head + log-odds of quality) at each position.

    ``same_names=False`` lets the head serve a pair of other names, say a renamed folder; sizes and vocabulary must
    fit all the same. ``calibration`` is what ``diversed calibrate`` measured along the dial, if it did.
    """

    head: EnsembleHead
    quality: float = 0.5
    same_names: bool = True
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        check_fraction("quality", self.quality)

    def log_odds(
        self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor
    ) -> Tensor:
        """Log-odds of the weight as trained, before the dial, [...] in float32."""
        logits: Tensor = self.head(self.head.inputs(target_probs, draft_probs, target_hidden, draft_hidden))
        return logits

    def weight(self, target_probs: Tensor, draft_probs: Tensor, target_hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        logits = self.log_odds(target_probs, draft_probs, target_hidden, draft_hidden)
        # Adding log-odds is scale_odds in a form that keeps precision when the head saturates.
        if 0 < self.quality < 1:
            return torch.sigmoid(logits + log_odds(self.quality)).to(target_probs.dtype)
        return scale_odds(torch.sigmoid(logits), self.quality).to(target_probs.dtype)

    def to(self, device: torch.device) -> LearnedEnsemble:
        """The same verifier with its head on ``device``."""
        at_home = self.head.mean.device == device
        return self if at_home else replace(self, head=copy.deepcopy(self.head).to(device))

    def at(
        self,
        *,
        quality: float | None = None,
        min_quality: float | None = None,
        max_normalised_time: float | None = None,
    ) -> LearnedEnsemble:
        """The same head with the odds of its weight scaled: 0.5 as trained, 1 lossless, 0 takes every draft.

        Instead of ``quality``, a calibrated head takes a wish: ``min_quality``, the task's score to keep, or
        ``max_normalised_time``, time per token over target-only decoding, or both (:meth:`Calibration.quality_for`).

        Raises:
            ValueError: a value out of range, a head without calibration, or a wish that nothing measured meets.
        """
        if min_quality is None and max_normalised_time is None:
            if quality is None:
                raise ValueError("quality, min_quality, max_normalised_time: give one of them")
            return replace(self, quality=check_fraction("quality", quality))
        if quality is not None:
            raise ValueError("quality is the raw dial: give it alone, or min_quality and max_normalised_time instead")
        if self.calibration is None:
            raise ValueError(
                "min_quality, max_normalised_time: this head has no calibration.json; make it with diversed calibrate, "
                "or give quality"
            )
        found = self.calibration.quality_for(min_quality=min_quality, max_normalised_time=max_normalised_time)
        return replace(self, quality=found)

    @classmethod
    def from_pretrained(cls, source: str | Path, *, same_names: bool = True, **kwargs: Any) -> Self:
        """Load a head from a folder, a training run's folder or the Hub (``model.safetensors`` and ``config.json``)."""
        source = head_folder(source)
        with contextlib.redirect_stdout(io.StringIO()):  # the mixin announces itself where a command's text should be
            head = EnsembleHead.from_pretrained(source, strict=True, **kwargs)
        where = {k: v for k, v in kwargs.items() if k in ("revision", "token", "cache_dir", "local_files_only")}
        calibration = load_calibration(source, **where)
        return cls(head.eval().requires_grad_(False), same_names=same_names, calibration=calibration)

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Write ``model.safetensors``, ``config.json``, the model card, and ``calibration.json`` where there is one."""
        self.head.save_pretrained(folder, **kwargs)
        if self.calibration is not None:
            self.calibration.save(folder)
        else:  # one that lies there was another head's
            (Path(folder) / CALIBRATION).unlink(missing_ok=True)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | bool | None = None, **kwargs: Any
    ) -> Any:
        """Upload what :meth:`save_pretrained` writes; ``kwargs`` are those of ``HfApi.upload_folder``."""
        api = HfApi(token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return api.upload_folder(repo_id=repo, folder_path=folder, **kwargs)

    def check_fits(
        self, *, target: str, draft: str, hidden_sizes: tuple[int, int], vocabulary_hash: str | None
    ) -> None:
        """Raise ValueError, naming both pairs, where the head was made for another pair."""
        made = self.head.pair
        sizes = (self.head.target_hidden_size, self.head.draft_hidden_size)
        differs = []
        if sizes != hidden_sizes:
            differs.append(f"hidden sizes {sizes} against {hidden_sizes}")
        if vocabulary_hash and (made.get("vocabulary_hash") or vocabulary_hash) != vocabulary_hash:
            differs.append("vocabularies")
        for role, name in (("target", target), ("draft", draft)) if self.same_names else ():
            if model_name(made.get(role, name)) != model_name(name):
                differs.append(f"{role} names")
        if differs:
            raise ValueError(
                f"verifier: this head was made for target {made.get('target', '(unnamed)')} with draft "
                f"{made.get('draft', '(unnamed)')}, and the pair here is {target} with {draft}; they differ in "
                f"{' and '.join(differs)}. Use a head trained on this pair"
                + (", or same_names=False if only the names differ." if differs and "names" in differs[-1] else ".")
            )
