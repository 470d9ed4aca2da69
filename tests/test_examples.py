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
