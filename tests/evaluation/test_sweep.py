"""Sweeps: every prompt under every setting, resumed without losing or repeating a measurement."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from diversed.engine import ModelPair
from diversed.evaluation import sweep as module
from diversed.evaluation.rows import summarise
from diversed.evaluation.settings import DRAFT_ONLY, RIVALS, TARGET_ONLY, Setting, load_verifier
from diversed.evaluation.show import family, frontier_picture, frontier_table, with_interval, write_json
from diversed.evaluation.sweep import Measurement, Plan, header_of, read_measurements, sweep
from diversed.tasks import load_task
from diversed.verifiers import (
    BlockVerification,
    Cactus,
    CascadeOpt,
    CascadeToken,
    EntropyRule,
    FavouriteRule,
    FuzzyRule,
    LearnedEnsemble,
    Lenience,
    Lossless,
    OpeningRule,
    StaticEnsemble,
    TopKRelaxation,
    TypicalAcceptance,
)

SETTINGS = (Setting(TARGET_ONLY, num_speculative_tokens=0), Setting("lossless"), Setting("static:0.3", quality=0.4))
PLAN = Plan(SETTINGS, batch_size=3, timing_n=2, seed=5, trace_n=4)
KEYS = [
    "verifier", "weight", "quality", "num_speculative_tokens", "temperature", "task", "n", "score", "score_ci",
    "acceptance_rate", "acceptance_ci", "position_acceptance", "position_acceptance_ci",
    "block_efficiency", "tokens_per_target_call", "tokens_per_second",
    "normalised_time", "speedup", "speedup_ci", "bias", "bias_ci", "total_variation", "time_split", "predicted_speedup",
    "predicted_speedup_ci", "predicted_over_measured", "trained_on", "seed", "provenance",
]  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    return ModelPair.embedded()


@pytest.fixture(scope="module")
def task():
    return load_task("shop", n=5)


@pytest.fixture(scope="module")
def measured(pair, task):
    return sweep(pair, task, PLAN)


def test_every_setting_meets_every_prompt_once_per_pass(measured):
    for setting in SETTINGS:
        timed = [m.start for m in measured if m.setting == setting and m.kind == "timed"]
        batched = [(m.start, len(m.scores)) for m in measured if m.setting == setting and m.kind == "scored"]
        assert sorted(timed) == [0, 1]
        assert sorted(batched) == [(0, 3), (3, 2)]


def test_settings_take_turns_on_every_prompt():
    order = [(s.label, start) for s, start, _, kind, _ in PLAN.passes(5) if kind == "timed"]
    assert [start for _, start in order] == [0] * 3 + [1] * 3
    assert order[0][0] != order[3][0]


def test_rows_equal_a_recomputation_from_the_measurements(measured, pair, task):
    rows = summarise(measured, SETTINGS, header_of(pair, task, PLAN)["provenance"])
    assert [list(r) for r in rows] == [KEYS] * 3
    for row, setting in zip(rows, SETTINGS, strict=True):
        mine = [m for m in measured if m.setting == setting and m.kind == "scored"]
        scores = [x for m in mine for x in m.scores]
        tokens, calls = (sum(x for m in mine for x in getattr(m, k)) for k in ("tokens", "target_calls"))
        assert row["n"] == len(scores) == 5
        assert row["score"] == sum(scores) / 5
        assert row["tokens_per_target_call"] == tokens / calls
    target, lossless, static = rows
    assert target["tokens_per_target_call"] == 1.0
    assert target["acceptance_rate"] is None
    assert target["speedup"] == pytest.approx(1.0)
    assert lossless["weight"] == 1.0
    assert static["weight"] == 0.3
    assert static["quality"] == 0.4
    assert static["acceptance_rate"] > lossless["acceptance_rate"]
    assert static["speedup"] == pytest.approx(1 / static["normalised_time"])


def test_an_interrupted_sweep_goes_on_and_ends_like_an_uninterrupted_one(measured, pair, task, tmp_path, monkeypatch):
    path = tmp_path / "measurements.jsonl"
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    real = module.measure
    monkeypatch.setattr(module, "measure", failing)
    with pytest.raises(KeyboardInterrupt):
        sweep(pair, task, PLAN, path=path)
    assert len(path.read_text().splitlines()) == 2 + 4
    with path.open("a") as file:
        file.write('{"setting": {"verif')  # what a power cut leaves of a line
    resumed = sweep(pair, task, PLAN, path=path)
    assert len(calls) == 5 + len(measured) - 4

    def counts(measurements):
        return sorted((m.setting.label, m.start, m.kind, m.tokens, m.accepted, m.scores) for m in measurements)

    assert counts(resumed) == counts(measured)
    assert counts(sweep(pair, task, PLAN, path=path)) == counts(measured)  # nothing left to do


def test_a_folder_of_another_run_is_refused(pair, task, tmp_path):
    path = tmp_path / "measurements.jsonl"
    path.write_text(json.dumps({"config": {"task": "tally"}}) + "\n")
    before = path.read_text()
    with pytest.raises(ValueError, match=r"output_dir: .* belongs to another run .*task: 'tally' there, 'shop' now"):
        sweep(pair, task, PLAN, path=path)
    assert path.read_text() == before


def test_a_line_that_was_cut_off_is_dropped_without_writing_the_others_anew(pair, task, tmp_path, monkeypatch):
    path = tmp_path / "measurements.jsonl"
    module.append_line(path, header_of(pair, task, PLAN))
    module.append_line(path, {"planned": [], "further_seeds": []})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"setting": {"verif')

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "write_text", full)
    module.continue_file(path, header_of(pair, task, PLAN), replace(PLAN, settings=()))
    assert path.read_bytes() == whole
    foreign = b'{"config": {"task": "tally"}}\n{"cut'
    path.write_bytes(foreign)
    with pytest.raises(ValueError, match="belongs to another run"):
        module.continue_file(path, header_of(pair, task, PLAN), PLAN)
    assert path.read_bytes() == foreign  # somebody else's is not touched
    path.write_bytes(b'{"cut')
    assert module.continue_file(path, header_of(pair, task, PLAN), PLAN) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [({"stop_strings": ("x",)}, "stop_strings"), ({"score": max}, "score_function")],
)
def test_another_task_under_the_same_name_is_another_run(change, named, pair, task, tmp_path):
    path = tmp_path / "measurements.jsonl"
    module.continue_file(path, header_of(pair, task, PLAN), PLAN)
    with pytest.raises(ValueError, match=f"belongs to another run .{named}: "):
        module.continue_file(path, header_of(pair, replace(task, **change), PLAN), PLAN)


def test_weights_are_told_apart_whatever_their_format(tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin", "model.gguf"):
        folder = tmp_path / name
        folder.mkdir()
        assert module.weights_in(folder) is None
        (folder / name).write_bytes(b"a" * 10_000)
        before = module.weights_in(folder)
        (folder / name).write_bytes(b"b" * 10_000)
        assert None is not before != module.weights_in(folder) == module.weights_in(folder / name)
    assert module.weights_in(tmp_path / "user" / "repo") is None


def test_a_head_that_was_changed_is_dropped_under_all_its_names(tmp_path):
    def one(verifier: str, head: str, start: int = 0) -> Measurement:
        counts = {k: [1] for k in ("drafted", "accepted", "rejected", "target_calls", "tokens")}
        setting = Setting(verifier, 0.5)
        return Measurement(setting, start, "scored", 0, scores=[1.0], **counts, time={}, head=head)

    rows = [one("block:h", "old"), one("control:h", "old"), one("h", "old"), one("h", "new", 1), one("h", "new")]
    path = tmp_path / "measurements.jsonl"
    lines = [{"config": {"task": "shop"}}, *map(asdict, [*rows, one("h", "new")])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_measurements(path).measurements
    assert [(m.setting.verifier, m.start, m.head) for m in found] == [("h", 1, "new"), ("h", 0, "new")]


@pytest.mark.parametrize("spec", ["transformers:beam", "transformers:assisted:2"])
def test_a_setting_that_cannot_be_is_refused_before_anything_is_measured(spec, pair):
    with pytest.raises(ValueError, match=f"verifier='{spec}'"):
        Setting(spec).prepare(pair)


def test_a_prompt_that_is_too_long_is_named_before_anything_is_measured(pair, task, tmp_path):
    long = replace(task.examples[3], prompt="x " * 5000)
    task = replace(task, examples=[*task.examples[:3], long, task.examples[4]])
    with pytest.raises(ValueError, match=r"task='shop', test split, row 3: .*context holds"):
        sweep(pair, task, PLAN, path=tmp_path / "measurements.jsonl")
    assert not (tmp_path / "measurements.jsonl").exists()


def test_a_full_disk_is_one_clear_error_and_keeps_what_was_measured(pair, task, tmp_path):
    from pathlib import Path

    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with pytest.raises(ValueError, match=r"output_dir: cannot write .*No space left"):
        module.append_line(Path("/dev/full"), {"a": 1})
    with pytest.raises(ValueError, match=r"json=.*cannot be written"):
        write_json([{"a": 1}], Path("/dev/full"))


def test_table_and_picture(measured, pair, task, tmp_path):
    pytest.importorskip("matplotlib")
    rows = summarise(measured, SETTINGS, header_of(pair, task, PLAN)["provenance"])
    narrow = Console(width=80, file=io.StringIO())
    narrow.print(frontier_table(rows, "title", "exact match"))
    text = narrow.file.getvalue()
    assert "…" not in text  # nothing is cut off in a terminal of 80 columns
    assert all(r["verifier"] in text for r in rows)
    assert frontier_picture(rows, tmp_path / "new" / "f.png", "title", "exact match")
    assert (tmp_path / "new" / "f.png").read_bytes()[:4] == b"\x89PNG"
    assert [family(r) for r in rows] == [TARGET_ONLY, "lossless", "static:0.3"]
    many = [r | {"verifier": name, "quality": None} for r in rows for name in RIVALS]  # more curves than colours
    assert len({family(r) for r in many}) > 10
    assert frontier_picture(many, tmp_path / "many.png", "title", "exact match")
    assert family({"verifier": "block:static:0.5", "quality": None}) == "block:static"
    assert family({"verifier": "transformers:assisted:0.5", "quality": None}) == "transformers:assisted:0.5"


def test_draft_only_runs_the_draft(pair, task):
    m = module.measure(pair, task, Setting(DRAFT_ONLY, num_speculative_tokens=0), 0, 2, kind="scored", seed=0)
    alone = replace(pair, target=pair.draft)
    again = module.measure(alone, task, Setting(TARGET_ONLY, num_speculative_tokens=0), 0, 2, kind="scored", seed=0)
    assert m.tokens == again.tokens


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("lossless", Lossless),
        ("entropy:0.7", EntropyRule),
        ("fuzzy-tv:0.6", FuzzyRule),
        ("favourite:0.1", FavouriteRule),
        ("opening:16", OpeningRule),
        ("opening:16,2.5", OpeningRule),
        ("static:0.7", StaticEnsemble),
        ("lenience:0.5", Lenience),
        ("cascade-opt:-0.2", CascadeOpt),
        ("cascade-token:0.5", CascadeToken),
        ("cactus:0.1", Cactus),
        ("fuzzy-kl:0.5", FuzzyRule),
        ("fuzzy-js:0.2", FuzzyRule),
        ("typical:0.3", TypicalAcceptance),
        ("typical:1,inf", TypicalAcceptance),
        ("topk:3", TopKRelaxation),
        ("topk:3,0.2", TopKRelaxation),
        ("block", BlockVerification),
        ("block:static:0.5", BlockVerification),
        ("learned", LearnedEnsemble),
        ("learned:tally", LearnedEnsemble),
    ],
)
def test_verifiers_by_name(spec, kind):
    assert isinstance(load_verifier(spec), kind)


@pytest.mark.parametrize(
    "spec",
    [
        "static:",
        "static:x",
        "static:1.2",
        "static:0.5,0.5",
        "nope",
        "learned:nope",
        "no/head",
        "lenience:0",
        "topk:1.5",
        "topk:inf",
        "typical:0.1,0.2,0.3",
        "fuzzy-js",
        "block:nope",
        "block:typical:0.3",
    ],
)
def test_unknown_verifiers_are_one_clear_error(spec, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="verifier="):
        load_verifier(spec)


def test_lossless_has_no_dial(pair):
    with pytest.raises(ValueError, match="quality: lossless has no dial"):
        Setting("lossless", quality=0.5).prepare(pair)


def test_a_control_samples_from_nu_one_token_at_a_time(pair, task):
    """Its distribution is that of the verifier (tested in the engine); here: nothing is drafted."""
    control = module.measure(pair, task, Setting("control:static:0"), 0, 2, kind="scored", seed=0)
    assert control.drafted == [0, 0]
    assert control.target_calls == control.tokens
    draft = module.measure(pair, task, Setting(DRAFT_ONLY, num_speculative_tokens=0), 0, 2, kind="scored", seed=0)
    assert control.tokens == draft.tokens  # weight 0 on the target is the draft, token for token


def test_further_seeds_score_anew_and_are_averaged(pair, task):
    settings = (Setting(TARGET_ONLY, num_speculative_tokens=0),)
    plan = Plan(settings, batch_size=2, timing_n=0, seed=0, further_seeds=(1,))
    passes = list(plan.passes(3))
    assert [(p[1], p[2], p[4]) for p in passes] == [(0, 2, 0), (2, 3, 0), (0, 2, 1), (2, 3, 1)]
    found = [module.measure(pair, task, s, a, min(b, 2), kind=k, seed=seed) for s, a, b, k, seed in passes if a == 0]
    assert found[0].tokens != found[1].tokens
    (row,) = summarise(found, settings, header_of(pair, task, plan)["provenance"])
    assert row["seed"] == [0, 1]
    assert row["n"] == 2
    assert row["score"] == pytest.approx(sum(found[0].scores + found[1].scores) / 4)


def test_a_trace_is_recorded_once_for_all_n():
    settings = (Setting("lossless", None, 3), Setting("lossless", None, 7), Setting("static:0.5"), SETTINGS[0])
    plan = Plan(settings, batch_size=4, timing_n=0, seed=0, trace_n=6)
    traced = [(s.verifier, s.num_speculative_tokens, a, b) for s, a, b, kind, _ in plan.passes(9) if kind == "traced"]
    assert sorted(traced) == [
        ("lossless", 7, 0, 4),
        ("lossless", 7, 4, 6),
        ("static:0.5", 5, 0, 4),
        ("static:0.5", 5, 4, 6),
    ]


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (0.953, (0.94, 0.966), ".953±.013"),
        (10.123, (9.623, 10.623), "10.123±.500"),
        (100.0, (80.0, 120.0), "100.000±20.000"),
        (-0.25, (-0.5, 0.0), "-.250±.250"),
        (0.5, (float("-inf"), float("inf")), "0.500"),
        (None, None, "–"),
    ],
)
def test_values_with_their_intervals(value, interval, text):
    assert with_interval(value, interval) == text


def test_rows_are_json_that_every_reader_takes(tmp_path):
    row = {"score": float("nan"), "ci": (float("-inf"), float("inf")), "deep": [{"x": 1.5}], "n": 3}
    write_json([row], tmp_path / "rows.json")
    text = (tmp_path / "rows.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found == [{"score": None, "ci": [None, None], "deep": [{"x": 1.5}], "n": 3}]


def test_other_rows_other_scores_and_other_weights_are_another_run(pair, task, tmp_path):
    config = module.configuration(pair, task, PLAN)
    other = replace(task.examples[0], columns=dict(task.examples[0].columns) | {"answer": "another"})
    changed = replace(task, examples=[other, *task.examples[1:]])
    assert module.configuration(pair, changed, PLAN)["examples"] != config["examples"]
    assert module.configuration(pair, replace(task, score_name="mine"), PLAN) != config
    assert module.weights_in(tmp_path) is None
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1 << 20))
    before = module.weights_in(tmp_path)
    assert before == module.weights_in(tmp_path)
    file.write_bytes(bytes(1 << 19) + b"trained" * 1000 + bytes((1 << 19) - 7000))
    assert module.weights_in(tmp_path) not in (None, before)
