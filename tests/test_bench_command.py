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
    command = [sys.executable, "-m", "upconv", "bench", *words, "--out", str(path)]
    stopped = stopped_after_one_case(command, path)
    assert stopped.returncode == 130, stopped.stderr
    assert "the same command with --resume goes on from there" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert os.listdir(tmp_path) == [path.name]
    before = read(path)
    assert not before["complete"]
    assert 1 <= len(before["rows"]) < 3

    done = subprocess.run(
        [*command, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    kept = len(before["rows"])
    assert f"{path} holds {kept} cases; {3 - kept} to measure" in done.stderr
    after = read(path)
    assert after["complete"]
    assert [row["case"] for row in after["rows"]] == words[:3]
    assert after["rows"][:kept] == before["rows"]


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
    assert run(*LAYER, *QUICK, "--out", str(path)) == 130
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
    assert run(*LAYER, *QUICK, *out, "--dtype", "float64") == 2
    assert "dtype float32 there, float64 now" in capsys.readouterr().err
    assert read(tmp_path / "results.json") == again


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
        (["kb69", "--csv", "/no/such/folder/a.csv"], "folder does not exist"),
        (["kb69", "--out", "/dev/null"], "is not a plain file"),
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


def test_a_way_that_there_is_not(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run("--against", "default,jax")
    assert exit_info.value.code == 2
    message = "'jax' is none of default, benchmark, channels_last, compile"
    assert message in capsys.readouterr().err
