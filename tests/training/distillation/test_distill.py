import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from diversed import ModelPair, generate
from diversed.folders import sole_writer
from diversed.tasks.word_problems import problems
from diversed.training.distillation import DistillSettings, distill
from diversed.training.distillation import run as run_module
from diversed.training.distillation import student as student_module
from diversed.training.distillation.student import shallow_student
from models import noisy, random_prompts, tiny
from training.distillation.made import HELD_OUT, PROMPTS, QUICK, metrics, run, target

# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_acceptance_rises_and_the_target_stays(tmp_path: Path, lora_rank: int):
    if lora_rank:
        pytest.importorskip("peft")
    pair = ModelPair.embedded()
    before = {k: v.clone() for k, v in pair.target.state_dict().items()}
    settings = DistillSettings(
        layers=(0,),
        lora_rank=lora_rank,
        text="mixed",
        max_new_tokens=32,
        steps=24,
        batch_size=4,
        warmup=4,
        learning_rate=2e-3 if lora_rank == 0 else 1e-2,
        precision="float32",
        evaluate_every=12,
    )
    taught, held_out = problems("train", 64, seed=1, family="shop"), problems("validation", 12, seed=7, family="shop")
    phases: list[str] = []
    result = distill(
        pair.target,
        None,
        pair.tokenizer,
        [p.prompt for p in taught],
        settings,
        tmp_path,
        given=[p.solution if i % 8 else None for i, p in enumerate(taught)],
        held_out_prompts=[p.prompt for p in held_out],
        progress=lambda step, total, row: phases.append(row["phase"]),
    )
    assert result.before.sequences == 12
    assert result.after.ci[0] > result.before.ci[1] + 0.05
    assert set(phases) == {"sampling", "training", "held-out"}
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 8
    assert [r["step"] for r in metrics(tmp_path) if "held_out_acceptance" in r] == [0, 12, 24]
    assert all(torch.equal(v, before[k]) for k, v in pair.target.state_dict().items())
    assert all(p.requires_grad for p in pair.target.parameters())
    assert (tmp_path / "curve.png").stat().st_size > 5000
    # The measure is lossless acceptance: the engine accepts about as much.
    drafted = ModelPair(pair.target, result.draft, pair.tokenizer)
    stats = generate(drafted, [p.prompt for p in held_out], num_speculative_tokens=1, max_new_tokens=32, seed=0).stats
    assert stats.acceptance_rate == pytest.approx(result.after.mean, abs=0.1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_saved_draft_is_an_ordinary_model(tmp_path: Path, family: str, dtype: torch.dtype):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    changes = {"layer_types": kinds} if family == "gemma3" else {}
    model = target(family=family, **changes).to(dtype)
    model.generation_config = GenerationConfig(eos_token_id=[5, 6], pad_token_id=0)
    settings = dataclasses.replace(QUICK, layers=(0, 3), steps=3, precision="bf16")
    result = run(tmp_path, settings, target=model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype="auto")
    assert loaded.dtype == dtype
    assert loaded.config.num_hidden_layers == 2
    assert loaded.generation_config.eos_token_id == [5, 6]
    assert getattr(loaded.config, "layer_types", None) in (None, [kinds[0], kinds[3]], ["full_attention"] * 2)
    if family == "gemma3":
        assert loaded.config.layer_types == [kinds[0], kinds[3]]
    ids = torch.tensor(random_prompts([40]))
    assert torch.equal(loaded(ids).logits, result.draft(ids).logits)
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert torch.equal(loaded.get_output_embeddings().weight, model.get_output_embeddings().weight)
    assert not torch.equal(loaded.model.layers[1].mlp.up_proj.weight, model.model.layers[3].mlp.up_proj.weight)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    pair = ModelPair(model, loaded, tokenizer)
    out = generate(pair, ["abc", "fox 12"], num_speculative_tokens=3, max_new_tokens=24, ignore_eos=True, seed=0)
    assert [len(ids) for ids in out.token_ids] == [24, 24]


def test_a_student_of_all_layers_is_the_target():
    model = target(family="gemma3", layer_types=["sliding_attention"] * 3 + ["full_attention"])
    student = shallow_student(model, range(4))
    ids = torch.tensor(random_prompts([40]))
    torch.testing.assert_close(student(ids).logits, model(ids).logits)
    assert student.get_input_embeddings() is model.get_input_embeddings()


def test_checkpoints_hold_layers_and_final_norm_alone(tmp_path: Path):
    from safetensors import safe_open

    run(tmp_path, dataclasses.replace(QUICK, steps=3))
    (folder,) = (tmp_path / "checkpoints").iterdir()
    with safe_open(folder / "layers.safetensors", "pt") as file:
        names = set(file.keys())
    assert folder.name == "step-0000003"
    assert names == {
        n for n, _ in shallow_student(target(), (0,)).named_parameters() if n.startswith("model.layers")
    } | {"model.norm.weight"}


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_an_existing_draft_improves_and_the_one_passed_in_stays(tmp_path: Path, lora_rank: int):
    if lora_rank:
        pytest.importorskip("peft")
    model = target()
    draft = noisy(model, 0.3)
    before = {k: v.clone() for k, v in draft.state_dict().items()}
    settings = dataclasses.replace(QUICK, layers=None, steps=60, lora_rank=lora_rank, samples_per_prompt=4)
    settings = dataclasses.replace(settings, learning_rate=5e-3 if lora_rank else 3e-3)
    result = run(tmp_path, settings, target=model, draft=draft, held_out_prompts=[*HELD_OUT, *PROMPTS])
    assert result.after.mean > result.before.mean + 0.02
    assert all(torch.equal(v, before[k]) for k, v in draft.state_dict().items())
    changed = not torch.equal(result.draft.get_input_embeddings().weight, draft.get_input_embeddings().weight)
    assert changed == (lora_rank == 0)
    assert not [n for n, _ in result.draft.named_parameters() if "lora" in n]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path: Path, lora_rank: int):
    if lora_rank:
        pytest.importorskip("peft")
    settings = dataclasses.replace(QUICK, lora_rank=lora_rank, steps=24, evaluate_every=5, precision="bf16")
    straight = run(tmp_path / "straight", settings)

    def kill(step: int, total: int, row: dict[str, Any]) -> None:
        if row["phase"] == "held-out" and step == 15:  # after the checkpoint of step 10, before that of 15
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "killed", settings, progress=kill)
    assert not (tmp_path / "killed" / "draft").exists()
    again = run(tmp_path / "killed", settings, resume=True)
    for a, b in zip(again.draft.parameters(), straight.draft.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (again.before, again.after) == (straight.before, straight.after)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "straight")
    for name in ("texts.jsonl", "held-out.jsonl", "config.json"):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "straight" / name).read_text()
    done = run(tmp_path / "killed", settings, resume=True)  # nothing left to do
    assert done.tokens_per_second == pytest.approx(again.tokens_per_second, rel=0.3)  # of all steps, whoever took them
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "straight")


def test_a_fresh_process_goes_on_to_the_same_numbers(tmp_path: Path):
    straight = run(tmp_path / "straight")

    def kill(step: int, total: int, row: dict[str, Any]) -> None:
        if row["phase"] == "held-out" and step == 6:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "killed", dataclasses.replace(QUICK, evaluate_every=6), progress=kill)
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]; import torch; torch.set_num_threads(1); from pathlib import Path; "
        "from training.distillation.made import run; run(Path(sys.argv[1]), resume=True)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "killed", Path(__file__).parents[2]], check=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "killed" / "draft")
    for a, b in zip(again.parameters(), straight.draft.parameters(), strict=True):
        assert torch.equal(a, b)


def test_sampled_text_ends_at_a_stop_string(tmp_path: Path):
    settings = dataclasses.replace(QUICK, steps=1, max_new_tokens=40, stop_strings=("a", "e", "i", "o", "u"))
    result = run(tmp_path, settings)
    tokenizer = AutoTokenizer.from_pretrained(result.folder)
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().split("\n") if line]
    texts = [tokenizer.decode(row["tokens"], skip_special_tokens=True) for row in rows]
    assert any(set(text[-1:]) & set("aeiou") for text in texts)
    assert not any(set(text[:-1]) & set("aeiou") for text in texts)


def test_ctrl_c_saves_a_checkpoint(tmp_path: Path):
    def press(step: int, total: int, row: dict[str, Any]) -> None:
        if row["phase"] == "held-out" and step == 3:
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    settings = dataclasses.replace(QUICK, checkpoint_every=1000, evaluate_every=3)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "pressed", settings, progress=press)
    assert signal.getsignal(signal.SIGINT) is handler
    assert [f.name for f in (tmp_path / "pressed" / "checkpoints").iterdir()] == ["step-0000003"]
    again, straight = run(tmp_path / "pressed", settings, resume=True), run(tmp_path / "straight", settings)
    assert again.after == straight.after


def test_the_budget_stops_in_time_and_the_draft_is_there(tmp_path: Path):
    settings = dataclasses.replace(QUICK, steps=1_000_000, budget_seconds=4.0, evaluate_every=100_000)
    settings = dataclasses.replace(settings, checkpoint_every=100_000)
    result = run(tmp_path, settings)
    assert result.stopped == "budget"
    assert 0 < result.steps < 1_000_000
    assert result.seconds < 60  # one step beyond the budget at most, on however busy a machine
    rows = [r for r in metrics(tmp_path) if "learning_rate" in r]
    assert rows[-1]["learning_rate"] < 0.5 * settings.learning_rate  # the schedule follows the clock
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "draft").config.num_hidden_layers == 1
    more = run(tmp_path, dataclasses.replace(settings, budget_seconds=3.0), resume=True)
    assert more.steps >= result.steps


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_folder_with_another_run_is_refused(tmp_path: Path):
    settings = dataclasses.replace(QUICK, steps=1)
    run(tmp_path / "run", settings)
    with pytest.raises(ValueError, match=r"output_dir=.* holds this run already: add --resume"):
        run(tmp_path / "run", settings)
    other = dataclasses.replace(settings, learning_rate=0.5, layers=(1,))
    with pytest.raises(ValueError, match=r"another run.*layers: \[0\] there, \[1\] now, learning_rate: 0.001 there"):
        run(tmp_path / "run", other, resume=True)
    with pytest.raises(ValueError, match=r"another run \(target_weights: "):
        run(tmp_path / "run", settings, target=target(intermediate_size=48), resume=True)
    with pytest.raises(ValueError, match=r"another run \(prompts: "):
        run(tmp_path / "run", settings, prompts=PROMPTS[1:], resume=True)
    with sole_writer(tmp_path / "run"), pytest.raises(ValueError, match="being written to by another run"):
        run(tmp_path / "run", settings, resume=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="not empty and holds no run"):
        run(tmp_path / "files", settings)
    with pytest.raises(ValueError, match=r"output_dir=.* cannot be written"):
        run(tmp_path / "files" / "thesis.tex", settings)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({"layers": (0, 4)}, {}, r"layers=\(0, 4\) must name .* 4 layers, 0 to 3: 4 is none"),
        ({"layers": ()}, {}, r"layers=\(\) must name at least one"),
        ({}, {"prompts": []}, "prompts holds no prompt"),
        ({"max_prompt_tokens": 2}, {}, r"prompts: each of the 8 prompts is longer than max_prompt_tokens=2 .*3\)"),
        ({"text": "given"}, {}, "text='given' needs completions: pass given="),
        ({"text": "given"}, {"given": ["a"]}, "given has 1 completions for 8 prompts"),
        ({"text": "given"}, {"given": [None] * 8}, "no text to learn from"),
        ({"text": "own"}, {}, "text='own' must be 'target', 'given' or 'mixed'"),
        ({"steps": 0}, {}, "steps=0 must be a whole number above 0"),
        ({"learning_rate": float("nan")}, {}, "learning_rate=nan must be a number above 0"),
        ({"tv_from": 1.5}, {}, "tv_from=1.5 must be between 0 and 1"),
        ({"budget_seconds": 0}, {}, "budget_seconds=0 must be"),
    ],
)
def test_errors_name_the_argument(tmp_path: Path, settings: dict[str, Any], arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, dataclasses.replace(QUICK, **settings), **arguments)


def test_models_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpt2 = tiny("gpt2")
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no .model.layers .* pass draft="):
        run(tmp_path / "a", target=gpt2)
    with pytest.raises(ValueError, match=r"layers=\(0,\) chooses layers of the target: leave it out"):
        run(tmp_path / "b", draft=target(num_hidden_layers=1))
    scaled = target()
    scaled.lm_head.register_forward_hook(lambda module, args, out: out)  # harmless
    forward: Callable[..., Any] = scaled.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out

    scaled.forward = doubled
    with pytest.raises(ValueError, match="target: LlamaForCausalLM scales or changes its logits"):
        run(tmp_path / "c", target=scaled)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(student_module.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"lora_rank=4 needs peft: pip install 'diversed\[train\]'"):
        run(tmp_path / "d", dataclasses.replace(QUICK, lora_rank=4))


def test_gpt2_may_be_a_draft_of_its_own(tmp_path: Path):
    settings = dataclasses.replace(QUICK, layers=None, steps=2)
    result = run(tmp_path, settings, target=tiny("gpt2"), draft=tiny("gpt2", seed=1, n_inner=48))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "draft").config.n_inner == 48
    assert result.steps == 2


def test_held_out_text_stays_what_a_budget_made_it(tmp_path: Path):
    """What before and after are measured on."""
    settings = dataclasses.replace(QUICK, steps=4, checkpoint_every=2)
    first = run(tmp_path, settings)
    lines = (tmp_path / "held-out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "held-out.jsonl").write_text("".join(lines[:2]))
    again = run(tmp_path, dataclasses.replace(settings, budget_seconds=None), resume=True)
    assert (tmp_path / "held-out.jsonl").read_text() == "".join(lines[:2])
    assert again.before == first.before


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(run_module, "save_file", full)
    with pytest.raises(ValueError, match=r"output_dir: cannot write .*No space left .*go on with --resume"):
        run(tmp_path, dataclasses.replace(QUICK, steps=2))
