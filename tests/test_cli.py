"""The command: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from upconv import cli
from upconv.jit import store
from upconv.jit.folder import FolderUnusable
from upconv.version import __version__

ROOT = Path(__file__).parent.parent
DCGAN = ["--in-channels=8", "--out-channels=6", "--kernel=4", "--stride=2", "--padding=1"]

Capture = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    return cli.main(list(words))


def test_module_and_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "upconv", "--version"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, f"upconv {__version__}\n")


def test_no_command_is_bad_usage(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run()
    assert exit_info.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_explain_a_layer(capsys: Capture) -> None:
    assert run("explain", *DCGAN, "--input", "2,8,16,16", "--device", "h200") == 0
    text = capsys.readouterr().out
    assert "ConvTranspose2d  8 -> 6 channels, kernel 4x4, stride 2, padding 1, bias" in text
    assert "float32 (TF32 allowed), contiguous, on NVIDIA H200" in text


def test_explain_a_case_as_json(capsys: Capture) -> None:
    assert run("explain", "kb75", "--device", "cpu", "--json", "--dtype", "bfloat16") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["problem"]["stride"] == [2, 3]
    assert record["problem"]["dtype"] == "bfloat16"
    assert record["hardware"]["kind"] == "cpu"


@pytest.mark.parametrize(
    ("shape", "ndim", "batch"),
    [("16", 1, 1), ("2,8,16", 1, 2), ("9,16,16", 3, 1), ("16,16", 2, 1), ("2,8,4,5,6", 3, 2)],
)
def test_the_input_says_the_dimensions(capsys: Capture, shape: str, ndim: int, batch: int) -> None:
    assert run("explain", *DCGAN, "--input", shape, "--device", "h200", "--json") == 0
    problem = json.loads(capsys.readouterr().out)["problem"]
    assert (len(problem["in_size"]), problem["batch"]) == (ndim, batch)


def test_explain_draws(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "phases.svg"
    assert run("explain", *DCGAN, "--input", "8,8", "--draw", str(path)) == 0
    assert path.read_text().startswith("<?xml")
    assert run("explain", *DCGAN, "--input", "8,8", "--draw", str(tmp_path / "a.pdf")) == 2
    assert "upconv explain: a drawing is written as .svg or .png" in capsys.readouterr().err


def test_drawing_without_matplotlib(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("explain", *DCGAN, "--input", "8,8", "--draw", str(tmp_path / "a.svg")) == 2
    assert "pip install 'upconv[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain"], "missing: --in-channels, --out-channels, --kernel, --input"),
        (["explain", "kb99"], "no case is called 'kb99'"),
        (["explain", "kb69", "--kernel", "3"], "not both"),
        (["explain", *DCGAN, "--input", "2,9,8,8"], "9 channels, --in-channels says 8"),
        (["explain", *DCGAN, "--input", "0,8"], "input size must be at least 1"),
        (["explain", *DCGAN, "--input", "8,8", "--groups", "5"], "not divisible by groups"),
        (["explain", *DCGAN, "--input", "1,2,3,4,5,6"], "N,C,D,H,W"),
        (["explain", *DCGAN, "--input", "8,8", "--dilation", "1,1,1"], "3 spatial dimensions"),
        (["bench", "kb69", *DCGAN, "--input", "8,8"], "not both"),
        (["bench", "nothing*"], "no case is called 'nothing*'"),
        (["bench", "kb64_1d", "--layout", "channels_last"], "no channels_last"),
        (["bench", "kb69", "--threads", "0"], "--threads must be from 1 to 1024, got 0"),
        (["bench", "kb69", "--threads", "99999999999"], "1024, got 99999999999; this machine has"),
        (["bench", "kb69", "--seconds", "inf"], "--seconds must be a number from 0 on, got inf"),
        (["bench", "kb69", "--seconds", "nan"], "--seconds must be a number from 0 on, got nan"),
        (["bench", "kb69", "--seconds", "-1"], "--seconds must be a number from 0 on, got -1"),
        (["bench", "kb69", "--out", "/no/such/folder/a.json"], "folder does not exist"),
        (["build", "metal"], "there is no library 'metal'; choose from cpu, cuda"),
    ],
)
def test_bad_usage_gets_words_and_code_2(capsys: Capture, words: list[str], message: str) -> None:
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"upconv {words[0]}: ")
    assert message in error


@pytest.mark.parametrize("kernel", ["three", "3,,3", ""])
def test_numbers_that_are_none(capsys: Capture, kernel: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run("explain", "--kernel", kernel)
    assert exit_info.value.code == 2
    assert "not a list of whole numbers such as 3 or 3,5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "number"),
    [("--in-channels", "9" * 23), ("--groups", "-" + "9" * 23), ("--input", f"8,{'9' * 23}")],
)
def test_numbers_that_pytorch_has_not(capsys: Capture, option: str, number: str) -> None:
    for command in ("bench", "explain"):
        with pytest.raises(SystemExit) as exit_info:
            run(command, *DCGAN, "--input", "8,8", f"{option}={number}")
        assert exit_info.value.code == 2
        said = capsys.readouterr().err
        assert option in said
        assert "9 is beyond PyTorch's numbers, up to 2^63 - 1" in said


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "/a/b"), FolderUnusable("in use by process")]
)
def test_a_cache_that_cannot_be_cleared(
    error: Exception, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_all(folder: Path) -> int:
        raise error

    monkeypatch.setattr(store, "remove_all", remove_all)
    assert run("build", "cpu") == 0  # now there is a folder
    assert run("cache", "clear") == 1
    said = capsys.readouterr().err
    assert said == f"upconv cache: the builds cannot all be removed: {error}\n"


def test_cuda_where_there_is_none(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run("bench", "kb69", "--device", "cuda") == 2
    assert "finds no CUDA GPU" in capsys.readouterr().err


def test_bench_from_end_to_end(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "results.json"
    options = [*DCGAN, "--input", "2,8,9,9", "--device", "cpu", "--seconds", "0.05"]
    assert run("bench", *options, "--out", str(path)) == 0
    text = capsys.readouterr().out
    assert "1 cases: geometric mean" in text
    assert "layer" in text
    results = json.loads(path.read_text())
    assert results["complete"]
    assert results["rows"][0]["correct"]
    assert results["rows"][0]["times"]["upconv"]["runs"] >= 7


def test_bench_as_markdown(capsys: Capture) -> None:
    options = [*DCGAN, "--input", "2,8,9,9", "--device", "cpu", "--seconds", "0.05"]
    assert run("bench", *options, "--markdown") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("| layer | 8 → 6, 9x9, k 4, s 2, p 1 | 2 |")


def test_bench_fails_where_the_result_is_wrong(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from upconv import accuracy

    operator = accuracy.TORCH_OPERATORS[2]
    monkeypatch.setattr(accuracy, "upconv_operator", lambda ndim: lambda *a: operator(*a) * 1.1)
    assert run("bench", *DCGAN, "--input", "2,8,9,9", "--device", "cpu") == 1
    assert "WRONG" in capsys.readouterr().out


def test_bench_stopped_by_the_user_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from upconv import bench

    measured: list[str] = []

    def measure(case: object, *given: object) -> bench.Row:
        if measured:
            raise KeyboardInterrupt
        measured.append(case.name)  # type: ignore[attr-defined]
        problem = case.problem()  # type: ignore[attr-defined]
        return bench.Row(measured[0], problem, 64, "aten", errors={"torch": 0, "upconv": 0})

    monkeypatch.setattr(bench, "measure", measure)
    path = tmp_path / "results.json"
    assert run("bench", "--device", "cpu", "--out", str(path)) == 130
    results = json.loads(path.read_text())
    assert not results["complete"]
    assert [row["case"] for row in results["rows"]] == measured == ["kb69"]


def test_bench_lists_its_cases(capsys: Capture) -> None:
    assert run("bench", "--list") == 0
    assert capsys.readouterr().out.split()[:3] == ["kb69", "kb65", "kb57"]


def test_build_then_cache(capsys: Capture) -> None:
    assert run("build", "cpu") == 0
    library = Path(capsys.readouterr().out.rpartition(": ")[2].strip())
    assert library.exists()
    assert run("cache") == 0
    assert library.parent.name in capsys.readouterr().out
    assert run("cache", "show", "--json") == 0
    assert library.parent.name in json.loads(capsys.readouterr().out)["builds"]


def test_clear_empties_the_cache(tmp_path: Path) -> None:
    """In a folder of its own: the one of the session is in use."""
    environment = os.environ | {"UPCONV_CACHE_DIR": str(tmp_path / "cache")}

    def upconv(*words: str) -> str:
        command = [sys.executable, "-m", "upconv", *words]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    source = Path(os.environ["UPCONV_CACHE_DIR"])
    assert run("build", "cpu") == 0
    for entry in source.glob("cpu-*"):
        (tmp_path / "cache").mkdir(mode=0o700, exist_ok=True)
        subprocess.run(["cp", "-r", entry, tmp_path / "cache"], check=True)
    assert "cpu-" in upconv("cache")
    assert upconv("cache", "clear").startswith("removed ")
    assert "cpu-" not in upconv("cache")


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m upconv explain kb69 --device h200 | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("ConvTranspose2d")
