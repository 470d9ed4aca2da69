"""Result files: whole at any moment, readable for good, and gone on with only where it is fair."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_helpers import made_up_results

from upconv import cli, results, tables
from upconv.bench import Row, Settings, Timing, report
from upconv.cases import Case
from upconv.floor import Rates
from upconv.results import ResultsError, csv_text, earlier, holds, read_results, write_results

ROOT = Path(__file__).parent.parent
TINY = Case("tiny", 2, 4, 6, (5, 6), (3, 3), 2, 1, 1, 1, 2)
SETTINGS = Settings(against=("default", "compile"))


def row_of(case: Case, batch: int | None = None) -> Row:
    timing = Timing.of([1.0, 2.0, 3.0])
    problem = case.problem(batch)
    errors = {"torch": 1e-7, "upconv": 2e-7}
    times = {"torch": timing, "upconv": timing}
    return Row(case.name, problem, case.batch, "cpu_fprop", "", "forward", errors, 1e-6, times)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 0}', '{"schema": 4}', "not json"])
def test_files_without_results_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match="measure again"):
        read_results(path)
    with pytest.raises(ResultsError, match="cannot read"):
        read_results(tmp_path / "none.json")


@pytest.mark.parametrize("rows", [None, [None], [{"case": "a"}], [{"problem": {"x": 1}}]])
def test_rows_that_are_none_are_refused(tmp_path: Path, rows: object) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"schema": 2, "rows": rows}))
    with pytest.raises(ResultsError, match="is damaged: rows"):
        read_results(path)


def places(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a file; of lists the first part stands for all."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, part in value.items():
            yield from places(part, *path, name)
    elif isinstance(value, list) and value:
        yield from places(value[0], *path, 0)


def damaged(whole: dict[str, Any], path: tuple[Any, ...], bad: object) -> str:
    """The file as text, with something else, or nothing (`...`), in one place."""
    copied = json.loads(json.dumps(whole))
    place = copied
    for name in path[:-1]:
        place = place[name]
    if bad is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = bad
    return json.dumps(copied)


BAD: list[object] = [..., None, "x", "cpu", "", True, -1, 0, 2.5, 1e300, 1e-300, 10**30]
BAD += [float("nan"), float("inf"), [], [7, []], {}, {"x": {}}]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_damaged_field_is_named_or_does_not_matter(
    bad: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that reads files, for damage in every place: never a traceback."""
    whole, good, path = made_up_results(), tmp_path / "good.json", tmp_path / "bad.json"
    whole["rows"] = [whole["rows"][0], whole["rows"][-1]]
    backward = next(row for row in made_up_results()["rows"] if row["direction"] == "backward")
    whole["rows"].insert(0, backward)
    good.write_text(json.dumps(whole))
    refused = 0
    for place in places(whole):
        path.write_text(damaged(whole, place, bad))
        for command in (
            ["report", str(path), "-o", str(tmp_path / "page.html")],
            ["bench", "--results", str(path), "--csv", str(tmp_path / "a.csv"), "--force"],
            ["bench", "--results", str(good), "--compare", str(path)],
        ):
            code = cli.main(command)
            said = capsys.readouterr().err
            assert code in (0, 1, 2), place
            assert code != 2 or "bad.json" in said or "no row" in said, (place, said)
            refused += code == 2
    assert refused


def test_what_is_said_of_a_damaged_field(tmp_path: Path) -> None:
    whole, path = made_up_results(), tmp_path / "bad.json"
    for place, bad, words in (
        (("rows", 0, "times", "upconv", "median"), "fast", r"rows\[0\].times.upconv.median should"),
        (
            ("rows", 0, "problem", "stride"),
            [2, 0],
            r"rows\[0\].problem is no layer: stride must be",
        ),
        (("environment", "torch"), ..., "environment.torch is missing"),
    ):
        path.write_text(damaged(whole, place, bad))
        with pytest.raises(ResultsError, match=words):
            read_results(path)


def test_files_of_schema_1_are_read() -> None:
    old = read_results(ROOT / "benchmarks/results/cpu-2threads.json")
    assert old["schema"] == 1
    rows = results.rows_of(old)
    assert all(row.skipped == row.scratch == {} for row in rows)
    assert [row.ratio for row in rows] == [record["ratio"] for record in old["rows"]]
    assert "| PyTorch ms | upconv ms | speed-up |" in tables.markdown(old)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    write_results(path, {"a": 1})

    def stopped(number: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_results(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["results.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "results.json")
    write_results(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads((tmp_path / "results.json").read_text()) == {"a": 1}


def test_timed_rows_are_kept_and_others_not(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert earlier(path, SETTINGS) == ([], {}, None)
    good = row_of(TINY)
    failed = replace(good, case="failed", times={}, failure="RuntimeError: out of memory")
    rates = {"float32": Rates(1e12, 1e11)}
    told = replace(SETTINGS, commit="abc")
    write_results(path, report([good, failed], told, rates=rates))
    assert earlier(path, SETTINGS) == ([good], rates, "abc")
    # More or fewer seconds change how sure a time is, not what it means; other dtypes and
    # directions are other rows.
    for other in ({"seconds": 1.0}, {"dtype": "float64"}, {"direction": "backward"}):
        assert earlier(path, replace(SETTINGS, **other)) == ([good], rates, "abc")


def test_a_file_of_an_older_version_is_not_gone_on_with() -> None:
    path = ROOT / "benchmarks/results/cpu-2threads.json"
    with pytest.raises(ResultsError, match=r"schema 1 of an older upconv.*another --out"):
        earlier(path, SETTINGS)


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("settings", "device", "cuda", "device cuda there, cpu now"),
        ("settings", "against", ["default"], r"against \['default'\] there"),
        ("environment", "torch", "1.0", "torch 1.0 there"),
        ("environment", "upconv", "0.0.1", "upconv 0.0.1 there"),
    ],
)
def test_other_conditions_are_refused_in_words(
    tmp_path: Path, part: str, name: str, value: object, words: str
) -> None:
    path = tmp_path / "results.json"
    written = report([row_of(TINY)], SETTINGS)
    written[part][name] = value
    write_results(path, written)
    with pytest.raises(ResultsError, match=f"cannot resume .*{words}.*or another --out"):
        earlier(path, SETTINGS)


def test_another_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    written = report([row_of(TINY)], SETTINGS)
    written["environment"]["hardware"]["threads"] = 1000
    write_results(path, written)
    with pytest.raises(ResultsError, match="hardware threads 1000 there"):
        earlier(path, SETTINGS)


def test_a_case_is_known_by_its_sizes_too() -> None:
    rows = [row_of(TINY, batch=1)]
    assert holds(rows, TINY, SETTINGS)
    assert not holds(rows, TINY._replace(name="other"), SETTINGS)
    assert not holds(rows, TINY._replace(in_size=(5, 7)), SETTINGS)
    assert not holds(rows, TINY._replace(batch=4), SETTINGS)
    assert not holds(rows, TINY, replace(SETTINGS, dtype="float64"))
    assert not holds(rows, TINY, replace(SETTINGS, dtype="tf32"))
    assert not holds(rows, TINY, replace(SETTINGS, layout="channels_last"))
    assert not holds(rows, TINY, replace(SETTINGS, direction="backward"))


def test_csv_has_a_line_a_row_and_flat_columns() -> None:
    rows = [replace(row_of(TINY), skipped={"compile": "failed: a, b"}), row_of(TINY, batch=1)]
    first, second = csv.DictReader(io.StringIO(csv_text(report(rows, SETTINGS))))
    assert (first["case"], first["batch"], first["in_size"]) == ("tiny", "2", "5x6")
    assert (first["kernel_size"], first["chosen_kernel"]) == ("3x3", "cpu_fprop")
    assert (first["torch_median_ms"], first["torch_runs"]) == ("2.0", "3")
    assert float(first["upconv_tflop_per_s"]) == rows[0].rates["upconv"]["tflop_per_s"]
    assert (first["compile_median_ms"], first["compile_skipped"]) == ("", "failed: a, b")
    assert first["upconv_scratch_bytes"] == ""
    assert (second["batch"], second["full_batch"]) == ("1", "2")
    assert first["floor_ms"] == first["upconv_share_of_floor"] == ""
    assert csv_text(report([], SETTINGS)) == ""


def test_csv_of_gradients() -> None:
    parts = {"input": 1e-7, "weight": 2e-7, "bias": 3e-7}
    row = replace(row_of(TINY), direction="backward", gradients={"upconv": parts}, floor_ms=0.5)
    first, second = csv.DictReader(io.StringIO(csv_text(report([row, row_of(TINY)], SETTINGS))))
    assert (first["direction"], first["upconv_weight_gradient_error"]) == ("backward", "2e-07")
    assert (second["direction"], second["upconv_weight_gradient_error"]) == ("forward", "")
    assert (first["floor_ms"], first["upconv_share_of_floor"]) == ("0.5", "0.25")
