"""Errors of the compiled side reach Python whole, whatever C++ library it is linked with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jit_helpers import ROOT

# A plan that the compiled side must not take: one number too many.
SCRIPT = """
import torch, upconv
from upconv import plans
asked = plans.record
plans.record = lambda key: [*asked(key), 1]
try:
    upconv.conv_transpose2d(torch.ones(2, 16, 9, 9), torch.ones(16, 16, 3, 3))
except RuntimeError as problem:
    print(problem)
"""


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["", "-static-libstdc++"])
def test_a_plan_that_does_not_fit_is_an_error_with_numbers(tmp_path: Path, flag: str) -> None:
    """With a C++ library of its own in it, the message ended at the first number; on one machine
    the process did."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not on the PATH")
    variables = {"CXX": f"{compiler} {flag}", "UPCONV_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the planner's record (kernel 1, " in done.stdout, done.stdout + done.stderr[-2000:]
    assert "planner and library differ" in done.stdout
