"""bench, report, plan and calibrate as a user runs them, one after the other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diversed.cli import app
from diversed.pairs import HEADS


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks, two N, traced and timed."""
    out = tmp_path_factory.mktemp("bench")
    args = [
        "--verifier",
        "lossless",
        "--verifier",
        "learned:shop",
        "--quality",
        "0.5",
        "-N",
        "2",
        "-N",
        "4",
        "--n",
        "2",
    ]
    args += ["--batch-size", "2", "--timing-n", "1", "--trace-n", "2", "--output-dir", str(out)]
    result = run("bench", "--task", "shop", "--task", "tally", *args, "--json", str(out / "all.json"))
    assert result.exit_code == 0, result.output
    return out


def test_bench_measures_every_combination(folder: Path) -> None:
    rows = json.loads((folder / "all.json").read_text())
    assert len(rows) == 2 * (2 + 2 * 2)
    assert {r["task"] for r in rows} == {"shop", "tally"}
    assert all(r["seed"] == 0 and r["n"] == 2 for r in rows)
    learned = [r for r in rows if r["verifier"] == "learned:shop"]
    assert {r["trained_on"] for r in learned} == {"shop"}
    assert all(r["bias"] > 0 and r["predicted_over_measured"] > 0 for r in learned)
    assert all(r["bias"] == 0 for r in rows if r["verifier"] == "lossless")


def test_report_covers_all_benches_below_a_folder(folder: Path, tmp_path: Path) -> None:
    result = run("report", str(folder), "--output-dir", str(tmp_path), "--json", str(tmp_path / "rows.json"))
    assert result.exit_code == 0, result.output
    for name in ("report.html", "report.md", "pictures"):
        assert str(tmp_path / name) in result.output
    text = (tmp_path / "report.md").read_text()
    assert "## shop: embedded-target with embedded-draft" in text
    assert "## tally: embedded-target with embedded-draft" in text
    assert "| trained on | shop | tally |" in text
    assert "Unfinished" not in text
    assert json.loads((tmp_path / "rows.json").read_text()) == json.loads((folder / "all.json").read_text())


def test_plan_answers_or_names_the_nearest(folder: Path, tmp_path: Path) -> None:
    result = run("plan", "--trace", str(folder / "shop"), "--min-quality", "0.01", "--json", str(tmp_path / "p.json"))
    assert result.exit_code == 0, result.output
    points = json.loads((tmp_path / "p.json").read_text())
    (chosen,) = [p for p in points if p["chosen"]]
    assert chosen["speedup"] == max(p["speedup"] for p in points if p["score"] >= 0.01)
    assert f"speed-up {chosen['speedup']:.2f}" in result.output
    both = run("plan", "--trace", str(folder))
    assert f"holds several benches: choose one of {folder / 'shop'}, {folder / 'tally'}" in str(both.exception)
    impossible = run("plan", "--trace", str(folder / "shop"), "--speedup", "1000")
    assert isinstance(impossible.exception, ValueError)
    assert "no setting gives a speed-up of 1000. Nearest: " in str(impossible.exception)


def test_calibrate_writes_beside_a_head_what_a_request_can_wish_for(tmp_path: Path) -> None:
    from diversed import LearnedEnsemble

    head = tmp_path / "head"
    shutil.copytree(HEADS / "shop", head)
    result = run(
        "calibrate", str(head), "--n", "4", "--batch-size", "4", "--timing-n", "1", "--quality", "0", "--quality", "1",
        "--json", str(tmp_path / "rows.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    learned = LearnedEnsemble.from_pretrained(head)
    assert [p.quality for p in learned.calibration.points] == [0.0, 1.0]
    assert learned.calibration.points[0].acceptance == 1.0
    assert learned.calibration.conditions["task"] == "shop"
    assert learned.calibration.conditions["split"] == "validation"
    slowest = max(p.normalised_time for p in learned.calibration.points)
    assert learned.at(max_normalised_time=slowest).quality == 1.0
    planned = run("plan", "--trace", str(head), "--speedup", "0.01", "--json", str(tmp_path / "plan.json"))
    assert planned.exit_code == 0, planned.output
    points = json.loads((tmp_path / "plan.json").read_text())
    assert [p["setting"]["quality"] for p in points] == [None, 0.0, 1.0]
    elsewhere = run("plan", "--trace", str(head), "--temperature", "0")
    assert "temperature=0: the head" in str(elsewhere.exception)
    assert "was calibrated at 1" in str(elsewhere.exception)
    assert points[1]["speedup"] == pytest.approx(1 / learned.calibration.points[0].normalised_time)
    row = tmp_path / "row.json"
    wished = run("generate", "Question: Ada", "--verifier", str(head), "--min-quality", "0.0001", "--json", str(row))
    assert wished.exit_code == 0, wished.output
    assert json.loads(row.read_text())[0]["quality"] == learned.at(min_quality=0.0001).quality
    refused = run("generate", "Question: Ada", "--verifier", "lossless", "--min-quality", "0.5")
    assert "lossless has no calibration" in str(refused.exception)
    again = run(
        "calibrate", str(head), "--timing-n", "0", "--n", "2", "--output-dir", str(tmp_path / "x"), "--quality", "1"
    )
    assert isinstance(again.exception, ValueError)
    assert "timing_n=0" in str(again.exception)
    assert not (tmp_path / "x").exists()  # before anything is measured


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--verifier", "poems"], "verifier='poems' is unknown"),
        (["bench", "--verifier", "typical:2"], "verifier='typical:2': write typical:X with epsilon"),
        (["bench", "--verifier", "learned", "--quality", "1.5"], "quality=1.5 must be a number between 0 and 1"),
        (["generate", "x", "--verifier", "target-only", "--quality", "0.5"], "verifier='target-only' is unknown"),
        (["report", "nowhere"], "folder: 'nowhere' holds no measurements.jsonl"),
        (["plan", "--trace", "nowhere", "--speedup", "0"], "speedup=0.0 must be a number above 0"),
        (["calibrate", "nowhere"], "run='nowhere' has no config.json"),
    ],
)
def test_bad_input_names_the_argument(arguments: list[str], message: str, monkeypatch, tmp_path: Path) -> None:
    """The command line prints such errors on one line (test_cli.py)."""
    monkeypatch.chdir(tmp_path)
    found = run(*arguments).exception
    assert isinstance(found, ValueError)
    assert message in str(found)
