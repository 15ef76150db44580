"""The draft under training: made of some of the target's layers, or an existing one; which parameters learn."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # config entries with one value a layer


def default_layers(target: PreTrainedModel) -> tuple[int, ...]:
    """The first two and the last two layers, or all of them where there are fewer than four."""
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    return tuple(sorted({i for i in (0, 1, count - 2, count - 1) if 0 <= i < count}))


def shallow_student(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the target's class with copies of these layers and of the final norm, in float32.

    Embeddings and output layer are the target's own modules, shared and not copied.

    Raises:
        ValueError: layers out of range, or a target that is not embeddings, ``model.layers``, a norm and an
            output layer.
    """
    stack = getattr(getattr(target, "model", None), "layers", None)
    if not isinstance(stack, nn.ModuleList):
        raise ValueError(
            f"target: {type(target).__name__} has no .model.layers to make a shallow student of; "
            "pass draft= with a smaller model of its family (Llama, Qwen3, Gemma3 and Mistral have them)"
        )
    shared = {id(p) for m in (target.get_input_embeddings(), target.get_output_embeddings()) for p in m.parameters()}
    others = [
        name
        for name, p in target.named_parameters()
        if id(p) not in shared and not name.startswith(("model.layers.", "model.norm."))
    ]
    if others:
        raise ValueError(
            f"target: {type(target).__name__} has parameters outside its layers, norm and embeddings ({others[0]}); "
            "pass draft= with a smaller model of its family"
        )
    wrong = [i for i in layers if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < len(stack)]
    if not layers or wrong:
        raise ValueError(
            f"layers={tuple(layers)!r} must name at least one of the target's {len(stack)} layers, "
            f"0 to {len(stack) - 1}" + (f": {wrong[0]!r} is none" if wrong else "")
        )
    device = target.get_input_embeddings().weight.device
    with torch.device(device):
        student: PreTrainedModel = type(target)(shallow_config(target.config, layers, len(stack)))
    student.set_input_embeddings(target.get_input_embeddings())
    student.set_output_embeddings(target.get_output_embeddings())
    for ours, i in zip(student.model.layers, layers, strict=True):
        ours.load_state_dict(stack[i].state_dict())
    student.model.norm.load_state_dict(target.model.norm.state_dict())
    student.model.layers.float()
    student.model.norm.float()
    student.generation_config = copy.deepcopy(target.generation_config)
    return student.eval()


def shallow_config(config: Any, layers: Sequence[int], count: int) -> Any:
    """A copy of the config for these layers; entries that hold a value per layer are cut along."""
    cut = copy.deepcopy(config)
    for name in PER_LAYER:
        values = getattr(cut, name, None)
        if isinstance(values, list | tuple) and len(values) == count:
            setattr(cut, name, [values[i] for i in layers])
    cut.num_hidden_layers = len(layers)
    return cut


def student_of(target: PreTrainedModel, draft: PreTrainedModel | None, layers: Sequence[int] | None) -> PreTrainedModel:
    """The model that learns, in float32: a copy of ``draft``, or a shallow student of the target.

    A draft whose input and output embeddings equal the target's keeps them: they are frozen, as a shallow student's.
    """
    if draft is None:
        student = shallow_student(target, default_layers(target) if layers is None else layers)
    else:
        if layers is not None:
            raise ValueError(f"layers={tuple(layers)!r} chooses layers of the target: leave it out with a draft=")
        student = copy.deepcopy(draft).float().eval()
    student.requires_grad_(True)
    for ours, theirs in (
        (student.get_input_embeddings(), target.get_input_embeddings()),
        (student.get_output_embeddings(), target.get_output_embeddings()),
    ):
        if same_weights(ours.weight, theirs.weight):
            ours.requires_grad_(False)
    return student


def same_weights(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and (a is b or torch.equal(a.detach().float(), b.detach().to(a.device).float()))


def add_lora(student: PreTrainedModel, rank: int, seed: int) -> Any:
    """Freeze everything and add trainable low-rank adapters to every linear layer but the output layer, in place.

    Returns:
        peft's wrapper; its ``merge_and_unload()`` gives the plain model back.
    """
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ValueError(
            f"lora_rank={rank} needs peft: pip install 'diversed[train]', or use lora_rank=0 for full fine-tuning"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(
            student, peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")
        ).eval()


def save_draft(
    student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Any, dtype: torch.dtype
) -> PreTrainedModel:
    """Write an ordinary transformers folder and return the model in it, a copy of the student in ``dtype``."""
    finished = copy.deepcopy(student)
    for parameter in finished.parameters():  # not .to(dtype): rotary frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    finished.config.dtype = dtype
    finished.config._name_or_path = ""
    finished.requires_grad_(False)
    finished.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return finished
