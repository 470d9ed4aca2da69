"""The examples run, and agree with PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_demo() -> None:
    command = [sys.executable, "examples/demo.py", "--batch", "1", "--seconds", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 layers swapped, 0 left" in done.stdout
    assert "upconv and PyTorch agree" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--amp"]], ids=["float32", "amp"])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
def test_training(device: str, options: list[str]) -> None:
    if device == "cpu" and options:
        pytest.skip("float16 autocast is for GPUs")
    tiny = ["--steps", "30", "--batch", "4", "--width", "8"] if device == "cpu" else []
    command = [sys.executable, "examples/train_dcgan.py", "--device", device, *tiny, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 layers swapped, 0 left" in done.stdout
    assert "the loss curves agree" in done.stdout
