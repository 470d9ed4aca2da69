"""The doctor: finds what is there, says what is wrong, and survives everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from upconv import accuracy, cli, doctor, env, libraries
from upconv.jit import loader
from upconv.version import __version__

ROOT = Path(__file__).parent.parent


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"upconv: {__version__}" in text
    assert "problems agree with float64" in text
    assert "UPCONV_CACHE_DIR = " + os.environ["UPCONV_CACHE_DIR"] in text
    assert text.endswith("all is well\n")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failures"] == []
    assert report["versions"]["torch"] == torch.__version__
    assert report["cpu"]["threads of torch"] == torch.get_num_threads()
    assert report["cache"]["folder"] == os.path.realpath(os.environ["UPCONV_CACHE_DIR"])
    assert len(report["self-test"]) >= 2 * len(doctor.SELF_TEST)


def test_looking_only_builds_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"UPCONV_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "upconv", "doctor", "--no-self-test"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "cpu: upconv's kernels where they win (nothing is in the way)" in done.stdout
    assert done.stdout.endswith("all is well\n")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("gpu", [True, False])
def test_every_library_of_use_is_listed(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    kinds = list(libraries.KINDS) if gpu else ["cpu"]
    assert doctor.kinds() == list(doctor.expected_kernels()) == kinds
    assert doctor.devices() == (["cpu", "cuda"] if gpu else ["cpu"])


def test_a_wrong_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(ndim: int) -> accuracy.Operator:
        return lambda *given: accuracy.TORCH_OPERATORS[ndim](*given).flip(-1)

    monkeypatch.setattr(accuracy, "upconv_operator", wrong)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "something is wrong" in text
    assert "self-test: cpu, stride 1, float32: error" in text


def test_a_probe_that_fails_is_reported_beside_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> dict[str, object]:
        raise OSError("the disk is on fire\nsecond line")

    monkeypatch.setattr(doctor, "tools", broken)
    report = doctor.examine(self_test=False)
    assert report["tools"] == {"error": "OSError: the disk is on fire"}
    assert report["versions"]["upconv"] == __version__
    assert doctor.failures(report) == ["tools: OSError: the disk is on fire"]
    assert "the disk is on fire" in doctor.render(report)


def test_a_bad_variable_is_named() -> None:
    environment = os.environ | {"UPCONV_ISA": "sse9"}
    command = [sys.executable, "-m", "upconv", "doctor", "--no-self-test"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "UPCONV_ISA='sse9' is not one of auto, avx512, avx2, scalar" in done.stdout


def test_without_torch(tmp_path: Path) -> None:
    """A torch that cannot be imported, as after a broken installation."""
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libtorch_cpu.so: cannot open')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "upconv", "doctor"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert f"upconv: {__version__}" in done.stdout
    assert "libtorch_cpu.so: cannot open" in done.stdout
    assert "UPCONV_BACKEND = auto" in done.stdout


@pytest.mark.parametrize("options", [[], ["--no-self-test"]], ids=["all", "looking only"])
def test_without_a_compiler(options: list[str], tmp_path: Path) -> None:
    """Calls work, but nothing is faster: the report says so, why, and what to install."""
    environment = os.environ | {"PATH": str(tmp_path), "UPCONV_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("CXX", None)
    command = [sys.executable, "-m", "upconv", "doctor", *options]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    _, verdict = done.stdout.split("something is wrong:")
    assert "calls on the CPU run on PyTorch's operator: no C++ compiler was found" in verdict
    assert "apt-get install g++" in verdict
    if not options:
        assert "problems agree with float64" in done.stdout
    assert "all is well" not in done.stdout


def test_pytorchs_operator_by_choice_is_no_failure() -> None:
    command = [sys.executable, "-m", "upconv", "doctor"]
    environment = os.environ | {"UPCONV_BACKEND": "aten"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    _, verdict = done.stdout.split("nothing is wrong, but upconv's kernels do not serve:")
    assert "calls on the CPU run on PyTorch's operator: UPCONV_BACKEND=aten asks" in verdict


def test_a_build_that_failed_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the build failed: a.cpp:1: error"
    failed = loader.LoadResult("cpu", False, reason=reason)
    monkeypatch.setitem(loader._results, "cpu", failed)
    monkeypatch.setattr(doctor, "kinds", lambda: ["cpu"])
    expected = f"kernels: cpu: calls on the CPU run on PyTorch's operator: {reason}"
    for section in (doctor.kernels(), doctor.expected_kernels()):
        report = {"kernels": section}
        assert doctor.failures(report) == [expected]
        assert not section["cpu"]["available"]
        assert json.loads(json.dumps(section)) == section


@pytest.mark.parametrize(
    ("capability", "forced", "wrong"),
    [((9, 0), "", True), ((8, 0), "", False), ((8, 0), "x", True)],
)
def test_libraries_are_missed_on_gpus_that_they_would_serve(
    capability: tuple[int, int], forced: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On others no kernel runs by itself, so that nobody needs nvcc for them."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: capability)
    monkeypatch.setattr(doctor, "kinds", lambda: ["cuda"])
    monkeypatch.setitem(loader._results, "cuda", loader.LoadResult("cuda", False, reason="no nvcc"))
    forcing = replace(env.settings(), force_kernel=forced or None)
    monkeypatch.setattr(env, "_settings", forcing)
    report = {"kernels": doctor.kernels()}
    assert bool(doctor.failures(report)) == wrong
    text = "calls on the GPU run on PyTorch's operator: no nvcc"
    assert doctor.verdict(report).endswith(text)


def test_every_library_has_words() -> None:
    assert set(doctor.SERVED_BY) == set(libraries.KINDS)


def test_the_help_states_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit code 0: upconv's kernels are there and right" in text
    assert "1: something is to be mended" in text
