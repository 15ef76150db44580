"""Reports say what the measurements hold, what is missing, and what intervals separate."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made import PROMPTS, SETTINGS, made_bench, write_bench

from diversed.evaluation.pages import to_html, to_markdown, write_report
from diversed.evaluation.report import TABLE_HEADER, load_benches, report_blocks
from diversed.evaluation.settings import TARGET_ONLY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bench(tmp_path / "shop" / "measurements.jsonl", made_bench()).parent


def test_numbers_equal_a_recomputation_from_the_jsonl(folder: Path) -> None:
    """By hand from the lines of the file, without the package's own sums."""
    lines = [json.loads(line) for line in (folder / "measurements.jsonl").read_text().splitlines()]
    scored = [line for line in lines if line.get("kind") == "scored"]
    timed = [line for line in lines if line.get("kind") == "timed"]
    target_only = next(t["setting"] for t in timed if t["setting"]["verifier"] == TARGET_ONLY)
    table = next(b for b in report_blocks(load_benches([folder])) if b.kind == "table")
    assert len(table.rows) == len(scored) == len(SETTINGS) + 2
    for line, cells in zip(scored, table.rows, strict=True):
        row = dict(zip(TABLE_HEADER, cells, strict=True))
        s = line["setting"]
        assert row["verifier"] == s["verifier"]
        assert row["score"].split(" ")[0] == f"{sum(line['scores']) / PROMPTS:.3f}"
        if s["num_speculative_tokens"]:
            examined = sum(line["accepted"]) + sum(line["rejected"])
            assert row["acceptance"].split(" ")[0] == f"{sum(line['accepted']) / examined:.3f}"
            assert row["block efficiency"] == f"{1 + sum(line['accepted']) / sum(line['target_calls']):.2f}"
        mine, alone = (
            sorted(sum(v for k, v in t["time"].items() if k != "compile") / 40 for t in timed if t["setting"] == which)
            for which in (s, target_only)
        )
        ratio = (alone[2] + alone[3]) / (mine[2] + mine[3])
        assert row["speed-up"].split(" ")[0] == f"{ratio:.2f}"


def test_the_planners_error_is_stated(folder: Path) -> None:
    """The clock of the made-up bench follows the model, so nothing is off."""
    texts = [b.text for b in report_blocks(load_benches([folder]))]
    assert "Predicted ÷ measured speed-up over 8 rows: median 1.00, from 1.00 to 1.00; 8 of them within 10 %." in texts


def test_statements_name_only_what_separates(folder: Path) -> None:
    """At the middle of the measured N, 5."""
    items = [b.text for b in report_blocks(load_benches([folder])) if b.kind == "item"]
    # Right on 8 of 8 against 2 of 8 separates; 7 or 8 of 8 against 8 of 8 does not.
    assert any(re.match(r"static:0.1, N 5, T 1: -0.750 exact match over target-only \(95 %: ", text) for text in items)
    assert not any(text.startswith(("lossless", "head")) and "over target-only" in text for text in items)
    # At acceptance .8 the static line lies halfway between 5/8 and 2/8.
    (gain,) = [t for t in items if "over static" in t]
    assert gain.startswith("head @ 0.5, N 5, T 1: +0.438 exact match over static at equal acceptance 0.800 (95 %: +0.")


def test_no_verifier_at_all_is_a_rival(folder: Path) -> None:
    """Some requests lossless, or to the target alone where that is faster; the others to the draft alone, which is
    right on 1 of 8."""
    blocks = report_blocks(load_benches([folder]))
    items = [b.text for b in blocks if b.kind == "item"]
    # Two thirds of the way from acceptance .4 (8 of 8) to 1 (1 of 8).
    (gain,) = [t for t in items if "over mixing requests at equal acc" in t]
    assert gain.startswith(
        "head @ 0.5, N 5, T 1: +0.458 exact match over mixing requests at equal acceptance 0.800 (95 %"
    )
    table = next(b for b in blocks if b.kind == "table")
    row = next(dict(zip(TABLE_HEADER, r, strict=True)) for r in table.rows if list(r[:3]) == ["head", "0.5", "5"])
    time = float(row["normalised time"])
    assert 0.1 < time < 1  # the draft alone takes a tenth of the target's time
    mixed = 1 / 8 + (time - 0.1) / 0.9 * 7 / 8
    (gain,) = [t for t in items if t.startswith("head") and "(target-only and draft-only)" in t]
    found = re.search(rf"1: ([+-][0-9.]+) exact .* at equal time {time:.3f} \(95 %: ", gain)
    assert found is not None
    assert float(found[1]) == pytest.approx(7 / 8 - mixed, abs=0.001)


def test_the_ranking_at_equal_acceptance_interpolates(folder: Path) -> None:
    blocks = report_blocks(load_benches([folder]))
    (table,) = [b for b in blocks if b.kind == "table" and b.text == "T 1, N 5"]
    assert table.header == ("verifier", *(f"acceptance {a:g}" for a in (0.75, 0.8, 0.85, 0.9, 0.95)))
    cells = {row[0]: [c.split(" ")[0] for c in row[1:]] for row in table.rows}
    assert cells["static"] == ["0.531", "0.437", "0.344", "0.250", "–"]  # 5/8 at .7, 2/8 at .9
    assert cells["head"] == ["0.891", "0.875", "–", "–", "–"]  # 8/8 at .4 (lossless), 7/8 at .8
    assert cells["mixing requests"] == ["0.490", "0.417", "0.344", "0.271", "0.198"]  # 8/8 at .4, the draft's 1/8 at 1
    assert [row[0] for row in table.rows] == ["mixing requests", "static", "head"]


def test_a_half_finished_bench_says_what_is_missing(tmp_path: Path) -> None:
    whole = made_bench()
    kept = [m for m in whole if not (m.setting.verifier == "head" and m.setting.num_speculative_tokens == 5)][:-2]
    path = write_bench(tmp_path / "measurements.jsonl", kept)
    with path.open("a") as file:
        file.write('{"setting": {"verif')  # an interrupted write
    before = path.read_bytes()
    blocks = report_blocks(load_benches([tmp_path]))
    (text,) = [b.text for b in blocks if b.text.startswith("Unfinished")]
    # Of the head at N 5: six timed, one scored and one traced pass; at N 3: the last timed and the scored one.
    assert "10 passes of 2 settings are missing: head @ 0.5, N 3, T 1 (2), head @ 0.5, N 5, T 1 (8)" in text
    assert path.read_bytes() == before  # a report changes nothing
    finished = report_blocks(load_benches([write_bench(tmp_path / "all" / "measurements.jsonl", whole).parent]))
    assert not any(b.text.startswith("Unfinished") for b in finished)


def test_a_bench_that_has_just_begun_is_reported(tmp_path: Path) -> None:
    write_bench(tmp_path / "measurements.jsonl", [])
    texts = [b.text for b in report_blocks(load_benches([tmp_path]))]
    assert "Nothing was scored yet." in texts


def test_the_page_is_one_file_and_whole(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    blocks = report_blocks(load_benches([folder]))
    markdown, page = write_report(blocks, tmp_path / "out")
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!#)', text.replace("xlink:href", "xlinkhref"))  # nothing is fetched
    assert text.count("<svg") == 5
    open_tags: list[str] = []

    class Balanced(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "br", "use", "path"):
                open_tags.append(tag)

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            if tag not in ("use", "path"):
                assert open_tags.pop() == tag

    Balanced().feed(text)
    assert open_tags == []
    written = markdown.read_text()
    pictures = re.findall(r"!\[.*\]\((pictures/\d+\.svg)\)", written)
    assert len(pictures) == 5
    assert all((markdown.parent / name).read_text().startswith("<svg") for name in pictures)
    for row in next(b for b in blocks if b.kind == "table").rows:
        assert "| " + " | ".join(row) + " |" in written
    again, _ = write_report(blocks, tmp_path / "again")
    assert again.read_text() == written
    assert (tmp_path / "again" / pictures[0]).read_text() == (tmp_path / "out" / pictures[0]).read_text()


def test_the_papers_tables_and_transfer(tmp_path: Path) -> None:
    one = write_bench(tmp_path / "shop" / "measurements.jsonl", made_bench())
    other = write_bench(tmp_path / "tally" / "measurements.jsonl", made_bench(), task="tally")
    blocks = report_blocks(load_benches([one.parent, other.parent]))
    text = to_markdown(blocks, [f"{i}.svg" for i in range(20)])
    # The fastest head that is not told apart from the target: N 5, right on 7 of 8.
    assert "| shop | 1 | 5 | small | 1.000 | 40.00 % → 1.000 | 80.00 % → 0.875 | head @ 0.5 |" in text
    assert "| trained on | shop | tally |" in text
    assert "| tally | 80.00 % → 0.875 | 80.00 % → 0.875 |" in text
    assert "<h2>In the paper&#x27;s form</h2>" in to_html(blocks)


def test_block_verification_of_a_head_is_not_taken_for_the_head(tmp_path: Path) -> None:
    """It accepts blocks: no position's acceptance, no cell of the head's."""
    blocks = [
        replace(m, setting=replace(m.setting, verifier="block:head"), scores=[0.0] * len(m.scores))
        for m in made_bench()
        if m.setting.quality is not None
    ]
    one = write_bench(tmp_path / "shop" / "measurements.jsonl", [*made_bench(), *blocks])
    other = write_bench(tmp_path / "tally" / "measurements.jsonl", made_bench(), task="tally", split="validation")
    found = report_blocks(load_benches([one.parent, other.parent]))
    items = [b.text for b in found if b.kind == "item"]
    assert any(text.startswith("block:head") and "over target-only" in text for text in items)
    assert not any(text.startswith("block:head") and "equal acceptance" in text for text in items)
    text = to_markdown(found, [f"{i}.svg" for i in range(20)])
    assert "80.00 % → 0.875 | head @ 0.5 |" in text
    assert "| tally | 80.00 % → 0.875 | 80.00 % → 0.875 |" in text
    assert "| trained on | shop | tally (validation) |" in text


def test_two_heads_of_one_task_have_a_row_each(tmp_path: Path) -> None:
    paths = [
        write_bench(tmp_path / draft / task / "measurements.jsonl", made_bench(), task=task, draft=draft)
        for draft in ("small", "smaller")
        for task in ("shop", "tally")
    ]
    text = to_markdown(report_blocks(load_benches([p.parent for p in paths])), [f"{i}.svg" for i in range(20)])
    for draft in ("small", "smaller"):
        assert f"| tally (head, {draft}) | 80.00 % → 0.875 | 80.00 % → 0.875 |" in text


def test_a_handful_of_prompts_supports_no_statement(tmp_path: Path) -> None:
    few = [
        replace(
            m, **{k: getattr(m, k)[:5] for k in ("scores", "drafted", "accepted", "rejected", "target_calls", "tokens")}
        )
        for m in made_bench()
        if m.kind == "scored"
    ]
    path = write_bench(tmp_path / "shop" / "measurements.jsonl", few, n=5, batch_size=5, timing_n=0, trace_n=0)
    assert not [b for b in report_blocks(load_benches([path.parent])) if b.kind == "item"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty: nothing was measured yet"),
        ('{"config"', "is empty: nothing was measured yet"),
        ('{"a": 1}\n', "line 1 of .* is no measurement"),
        ('{"planned": [], "further_seeds": []}\n', "does not begin with a run's configuration"),
        ("rubbish\n", "line 1 of .* is no measurement"),
        (
            '{"config": {"target": "a"}}\n{"config": {"target": "b"}}\n',
            r"results of two runs \(target: a and b\)",
        ),
    ],
)
def test_files_that_are_no_bench_are_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "measurements.jsonl").write_text(content)
    with pytest.raises(ValueError, match=f"^folder: .*{message}"):
        load_benches([tmp_path])


def test_a_folder_without_measurements_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no measurements\.jsonl"):
        load_benches([tmp_path])


def test_what_a_head_gave_before_it_was_trained_further_does_not_count(tmp_path: Path) -> None:
    """A half finished remeasurement of a changed head: its old figures are gone, and missed."""
    old = made_bench()
    again = [replace(m, head="new", scores=[0.0] * len(m.scores)) for m in old if m.setting.verifier == "head"]
    path = write_bench(tmp_path / "measurements.jsonl", old + [m for m in again if m.kind != "traced"])
    (bench,) = load_benches([path.parent])
    assert [r["score"] for r in bench.rows if r["verifier"] == "head"] == [0.0, 0.0]
    assert sum(bench.recorded.missing().values()) == 1
