"""The command line: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
from typer.testing import CliRunner

from diversed.cli import app, show_warning
from diversed.cli.options import VERIFIER_HELP
from diversed.evaluation.settings import RULES
from diversed.folders import sole_writer

QUESTION = "Question: Ada has 12 nuts and sells 5. How many nuts are there now?\nAnswer:"
ROW_KEYS = {
    "verifier",
    "weight",
    "quality",
    "num_speculative_tokens",
    "temperature",
    "task",
    "n",
    "score",
    "score_ci",
    "acceptance_rate",
    "acceptance_ci",
    "position_acceptance",
    "position_acceptance_ci",
    "block_efficiency",
    "tokens_per_target_call",
    "tokens_per_second",
    "normalised_time",
    "speedup",
    "seed",
    "provenance",
}
BENCH_KEYS = ROW_KEYS | {
    "speedup_ci", "bias", "bias_ci", "total_variation", "time_split", "predicted_speedup", "predicted_speedup_ci",
    "predicted_over_measured", "trained_on",
}  # fmt: skip


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own, as a user meets it."""
    command = [sys.executable, "-m", "diversed.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=300, check=False)


def test_a_warning_is_one_line_without_source_code(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", show_warning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("slow [here]", stacklevel=1)
    assert capsys.readouterr().err == "diversed: warning: slow [here]\n"


def test_help_teaches():
    for command in ("demo", "generate", "chat", "bench", "eval", "train", "distill"):
        result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"})
        assert result.exit_code == 0
        assert "--seed" in result.output
        assert "--json" in result.output
    for command in ("report", "plan", "calibrate"):
        result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"})
        assert result.exit_code == 0
        assert "--json" in result.output


def test_help_lists_every_verifier():
    for name in ("lossless", "learned", "block", *(f"{rule}:" for rule in RULES)):
        assert name in VERIFIER_HELP
    for command in ("generate", "chat", "bench"):
        assert "fuzzy-kl:X" in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"}).output


def test_generate_is_reproducible_and_writes_a_row(tmp_path):
    file = tmp_path / "row.json"
    args = ["generate", QUESTION, "--verifier", "learned", "--quality", "0.6", "--seed", "3", "--json", str(file)]
    first, second = CliRunner().invoke(app, args), CliRunner().invoke(app, args)
    assert first.exit_code == 0
    assert first.stdout == second.stdout
    assert "####" in first.stdout
    (row,) = json.loads(file.read_text())
    assert set(row) >= ROW_KEYS
    assert row["text"].strip() in first.stdout
    assert row["quality"] == 0.6


def test_coloured_tokens_come_with_a_legend():
    result = CliRunner().invoke(app, ["generate", QUESTION, "--seed", "3", "--origins"])
    assert "####" in result.stdout
    assert "tokens: accepted recovered bonus" in result.stderr


def test_generate_may_choose_how_much_to_draft(tmp_path):
    file = tmp_path / "row.json"
    args = ["generate", QUESTION, "--verifier", "learned", "-N", "auto", "--temperature", "0", "--json", str(file)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "####" in result.stdout
    assert json.loads(file.read_text())[0]["num_speculative_tokens"] == "auto"


def test_generate_streams_what_it_would_print_at_once():
    """Tokens printed as they come add up to the decoded text."""
    streamed = CliRunner().invoke(app, ["generate", QUESTION, "--seed", "1"])
    stopped = CliRunner().invoke(app, ["generate", QUESTION, "--seed", "1", "--stop", "never met"])
    assert streamed.stdout == stopped.stdout


def test_prompts_come_from_a_file_or_a_pipe(tmp_path):
    (tmp_path / "p.txt").write_text(QUESTION + "\n")
    from_file = CliRunner().invoke(app, ["generate", "--file", str(tmp_path / "p.txt")])
    from_pipe = CliRunner().invoke(app, ["generate"], input=QUESTION + "\n")
    from_argument = CliRunner().invoke(app, ["generate", QUESTION])
    assert from_file.stdout == from_pipe.stdout == from_argument.stdout


def test_chat_answers_turns_the_dial_and_survives_a_slip(tmp_path):
    lines = (
        "Ada has 12 nuts and sells 5. How many nuts are there now?\n/quality 0.9\n\n/reset\nIvo has 3 cups.\n/quit\n"
    )
    result = run("chat", "--verifier", "learned", "--json", str(tmp_path / "chat.json"), stdin=lines)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "chat.json").read_text())
    assert [r["quality"] for r in rows] == [None, 0.9]


def test_bench_writes_rows_picture_and_resumes(tmp_path):
    args = ["bench", "--verifier", "lossless", "--verifier", "static:0.5", "--verifier", "learned", "--quality", "0.5"]
    args += [
        "-N",
        "3",
        "--n",
        "6",
        "--timing-n",
        "1",
        "--output-dir",
        str(tmp_path),
        "--json",
        str(tmp_path / "o.json"),
    ]
    first = CliRunner().invoke(app, args)
    assert first.exit_code == 0, first.output
    rows = json.loads((tmp_path / "o.json").read_text())
    assert [r["verifier"] for r in rows] == ["target-only", "draft-only", "lossless", "static:0.5", "learned"]
    assert all(set(r) == BENCH_KEYS for r in rows)
    before = (tmp_path / "measurements.jsonl").read_bytes()
    assert CliRunner().invoke(app, args).exit_code == 0
    assert (tmp_path / "measurements.jsonl").read_bytes() == before
    assert json.loads((tmp_path / "o.json").read_text()) == rows


def test_demo_measures_anew_but_leaves_a_benchs_measurements_alone(tmp_path):
    file = tmp_path / "measurements.jsonl"
    bench = ["bench", "--verifier", "lossless", "-N", "3", "--n", "2", "--timing-n", "0", "--trace-n", "0"]
    assert CliRunner().invoke(app, [*bench, "--output-dir", str(tmp_path)]).exit_code == 0
    before = file.read_bytes()
    demo = ["demo", "--n", "2", "--timing-n", "0"]
    refused = run(*demo, "--output-dir", str(tmp_path))
    assert refused.returncode != 0
    assert "holds other measurements: choose another folder" in refused.stderr
    assert file.read_bytes() == before
    for changed in (["--n", "2"], ["--n", "3", "--task", "tally"]):
        result = CliRunner().invoke(app, ["demo", *changed, "--timing-n", "0", "--output-dir", str(tmp_path / "own")])
        assert result.exit_code == 0, result.output
        assert "at quality" in result.output
    assert {r["n"] for r in json.loads((tmp_path / "own" / "rows.json").read_text())} == {3}


def test_a_folder_that_another_run_writes_to_is_refused_and_left_alone(tmp_path):
    demo = ["demo", "--n", "2", "--timing-n", "0", "--output-dir", str(tmp_path)]
    assert CliRunner().invoke(app, demo).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bench = ["bench", "--verifier", "lossless", "--n", "2", "--timing-n", "0", "--output-dir", str(tmp_path)]
    with sole_writer(tmp_path):
        for command in (demo, bench):
            refused = run(*command)
            assert refused.returncode != 0
            assert "is being written to by another run" in refused.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "prompt is empty"),
        (["generate", "x", "--verifier", "static:2"], "verifier='static:2'"),
        (
            ["generate", "x", "--verifier", "learned", "--quality", "1.5"],
            "quality=1.5 must be a number between 0 and 1",
        ),
        (["generate", "x", "--verifier", "lossless", "--quality", "1.5"], "quality=1.5 must be a number between 0 and"),
        (["generate", "x", "--verifier", "lossless", "--quality", "0.5"], "quality: lossless has no dial"),
        (["generate", "x", "--num-speculative-tokens", "-1"], "num_speculative_tokens=-1"),
        (["generate", "x", "-N", "many"], "num_speculative_tokens='many'"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1"),
        (["generate", "x", "--target", "nowhere/at-all"], "draft is missing"),
        (["generate", "x", "--target", "./nowhere", "--draft", "./nowhere"], "the folder './nowhere' does not exist"),
        (["generate", "x " * 600], "shorten the prompt"),
        (["generate", "--file", "/no/such/file"], "file='/no/such/file'"),
        (["bench", "-N", "0"], "num_speculative_tokens=0"),
        (["bench", "--task", "poems"], "task='poems' is unknown"),
        (["plan", "--trace", "nowhere"], "folder: 'nowhere/measurements.jsonl' does not exist"),
        (["generate", "x", "--dtype", "int4"], "dtype='int4'"),
    ],
)
def test_bad_input_is_one_line_that_names_the_argument(arguments, message, refused):
    said = refused(*arguments)
    assert said.startswith("diversed: error: ")
    assert message in said
    assert len(said.strip().splitlines()) == 1


def test_bad_input_in_a_process_of_its_own():
    result = run("generate", "x", "--temperature", "-1")
    assert result.returncode == 2
    assert result.stderr.startswith("diversed: error: temperature=-1")
    assert len(result.stderr.strip().splitlines()) == 1
