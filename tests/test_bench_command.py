"""`upconv bench` as a command: contenders, files, comparisons; stopped for real, and resumed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from upconv import bench, cli
from upconv.cases import Case

ROOT = Path(__file__).parent.parent
LAYER = ["--in-channels=8", "--out-channels=6", "--kernel=4", "--stride=2", "--input=2,8,9,9"]
QUICK = ["--device", "cpu", "--seconds", "0.02"]

Capture = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    return cli.main(["bench", *words])


def read(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def test_contenders_and_csv(tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / "rows.csv"
    ways = ["--against", "default,benchmark,channels_last"]
    assert run(*LAYER, *QUICK, *ways, "--csv", str(table)) == 0
    captured = capsys.readouterr()
    assert f"written: {table}" in captured.err
    assert "channels_last ms" in captured.out
    assert "over the fastest" in captured.out
    assert "benchmark was not timed (all cases): cudnn.benchmark is for GPUs only" in captured.out
    (row,) = csv.DictReader(table.open())
    assert (row["case"], row["batch"], row["correct"]) == ("layer", "2", "True")
    assert float(row["channels_last_median_ms"]) > 0


def stopped_after_one_case(command: list[str], path: Path) -> subprocess.CompletedProcess[str]:
    """Runs it, and sends what Ctrl-C sends once the file holds a case."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + 120
        while not path.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_stopped_by_ctrl_c_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    words = ["dcgan1", "hifigan1_1d", "kb72_3d", "--batch", "1", "--threads", "1", *QUICK]
    words += ["--direction", "both"]
    command = [sys.executable, "-m", "upconv", "bench", *words, "--out", str(path)]
    stopped = stopped_after_one_case(command, path)
    assert stopped.returncode == 130, stopped.stderr
    assert "the same command with --resume goes on from there" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert os.listdir(tmp_path) == [path.name]
    before = read(path)
    assert not before["complete"]
    assert 1 <= len(before["rows"]) < 6

    done = subprocess.run(
        [*command, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    kept = len(before["rows"])
    assert f"{path} holds {kept} rows; {6 - kept} to measure" in done.stderr
    after = read(path)
    assert after["complete"]
    assert [row["case"] for row in after["rows"]] == 2 * words[:3]
    directions = [row["direction"] for row in after["rows"]]
    assert directions == 3 * ["forward"] + 3 * ["backward"]
    assert after["rows"][:kept] == before["rows"]
    assert after["machine_rates"] == before["machine_rates"]


def stop(*given: object) -> bench.Row:
    raise KeyboardInterrupt


def test_stopped_without_a_file(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(case: Case, *given: object) -> bench.Row:
        monkeypatch.setattr(bench, "measure", stop)
        return bench.Row(case.name, case.problem(), 1, "aten", errors={"upconv": 0.0})

    monkeypatch.setattr(bench, "measure", once)
    assert run("kb*", *QUICK) == 130
    assert "with --out FILE a run can be resumed" in capsys.readouterr().err


def test_stopped_before_the_first_case_an_older_file_stays(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    path.write_text("older")
    monkeypatch.setattr(bench, "measure", stop)
    assert run(*LAYER, *QUICK, "--out", str(path), "--force") == 130
    assert "no case was finished" in capsys.readouterr().err
    assert path.read_text() == "older"


def test_resume_measures_only_what_is_missing(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ["--out", str(tmp_path / "results.json"), "--resume"]
    assert run(*LAYER, *QUICK, *out) == 0  # no file yet: from the beginning
    first = read(tmp_path / "results.json")
    monkeypatch.setattr(bench, "measure", lambda *given: pytest.fail("measured again"))
    assert run(*LAYER, *QUICK, *out) == 0
    again = read(tmp_path / "results.json")
    assert again["complete"]
    assert again["rows"] == first["rows"]
    capsys.readouterr()
    assert run(*LAYER, *QUICK, *out, "--against", "channels_last") == 2
    assert "against ['default'] there, ['channels_last'] now" in capsys.readouterr().err
    assert read(tmp_path / "results.json") == again


@pytest.mark.parametrize("option", ["--out", "--csv"])
def test_results_are_not_overwritten_by_a_typo(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    path = tmp_path / "an hour of measurements"
    path.write_text("precious")
    with monkeypatch.context() as patched:
        patched.setattr(bench, "measure", lambda *given: pytest.fail("measured in vain"))
        assert run(*LAYER, *QUICK, option, str(path)) == 2
    error = capsys.readouterr().err
    assert f"{option} {path} exists already: " in error
    assert "overwrite it (--force), or choose another name" in error
    assert ("go on with it (--resume)" in error) == (option == "--out")
    assert path.read_text() == "precious"
    assert run(*LAYER, *QUICK, option, str(path), "--force") == 0
    assert "upconv" in path.read_text()


def test_an_empty_file_holds_nothing_to_lose(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.touch()
    assert run(*LAYER, *QUICK, "--out", str(path)) == 0
    assert read(path)["complete"]


def test_resuming_writes_the_csv_anew(tmp_path: Path) -> None:
    files = ["--out", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    assert run(*LAYER, *QUICK, *files) == 0
    assert run(*LAYER, *QUICK, *files, "--resume", "--direction", "both") == 0
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 3


def test_rows_of_another_kind_are_added_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert run(*LAYER, *QUICK, "--out", str(path), "--commit", "abc") == 0
    more = ["--dtype", "float64,float32", "--direction", "both", "--layout", "channels_last"]
    more += ["--commit", "def"]
    assert run(*LAYER, *QUICK, *more, "--out", str(path), "--resume") == 0
    results = read(path)
    assert results["environment"]["commit"] == "abc and def"
    kinds = [(one["dtype"], one["layout"], one["direction"]) for one in results["summaries"]]
    assert kinds == [
        ("float32", "contiguous", "forward"),
        ("float64", "channels_last", "forward"),
        ("float64", "channels_last", "backward"),
        ("float32", "channels_last", "forward"),
        ("float32", "channels_last", "backward"),
    ]
    assert set(results["machine_rates"]) == {"float32", "float64"}
    assert all(row["floor_ms"] > 0 for row in results["rows"])


def with_times(results: dict[str, Any], factor: float) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(results))
    for row in changed["rows"]:
        for name in ("median", "low", "high", "fastest"):
            row["times"]["upconv"][name] *= factor
    return changed


def test_compare_with_an_older_file(tmp_path: Path, capsys: Capture) -> None:
    new, slow, fast = (tmp_path / f"{name}.json" for name in ("new", "slow", "fast"))
    assert run(*LAYER, *QUICK, "--out", str(new)) == 0
    slow.write_text(json.dumps(with_times(read(new), 1000.0)))
    fast.write_text(json.dumps(with_times(read(new), 0.001)))
    capsys.readouterr()
    assert run("--compare", str(slow), "--results", str(new)) == 0
    assert "1 cases compared: 1 faster" in capsys.readouterr().out
    assert run("--compare", str(fast), "--results", str(new)) == 1
    text = capsys.readouterr().out
    assert "1000.00" in text
    assert "1 cases compared: 1 slower" in text
    # After a run as well.
    assert run(*LAYER, *QUICK, "--compare", str(slow)) == 0
    assert run(*LAYER, *QUICK, "--compare", str(fast)) == 1
    assert "upconv's times against" in capsys.readouterr().out


def test_results_are_shown_again(capsys: Capture) -> None:
    path = ROOT / "benchmarks/results/cpu-2threads.json"
    assert run("--results", str(path)) == 0
    assert "15 cases: geometric mean" in capsys.readouterr().out
    assert run("--results", str(path), "--compare", str(path)) == 0
    assert "15 cases compared: 15 same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kb69", "--resume"], "--resume goes on with the file of --out"),
        (["kb69", "--out", "a.json", "--resume", "--force"], "--force drops it: give one"),
        (["kb69", "--csv", "/no/such/folder/a.csv"], "folder does not exist"),
        (["kb69", "--out", "/dev/null"], "is not a plain file"),
        (["kb69", "--device", "cpu", "--dtype", "tf32"], "tf32 is for GPUs only"),
        (["kb69", "--batch", "0"], "--batch must be at least 1"),
        (["kb69", "--against", "benchmark", "--device", "cpu"], "for GPUs only; add default"),
        (["kb69", "--compare", "/no/such/file.json"], "cannot read /no/such/file.json"),
        (["kb69", "--results", "a.json"], "--results measures nothing: it does not go with cases"),
        (["--out", "b.json", "--results", "a.json"], "does not go with --out"),
    ],
)
def test_bad_usage_gets_words_and_code_2(capsys: Capture, words: list[str], message: str) -> None:
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("upconv bench: ")
    assert message in error


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--against", "default,jax", "'jax' is none of default, benchmark, channels_last, compile"),
        ("--dtype", "int8", "'int8' is none of tf32, float32, float64, bfloat16, float16"),
        ("--layout", "contiguous,", "'' is none of contiguous, channels_last"),
    ],
)
def test_what_there_is_not(capsys: Capture, option: str, value: str, message: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(option, value)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
