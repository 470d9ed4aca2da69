"""The gradient operators' way through C++, on a device made for tests: no GPU is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

TESTS = Path(__file__).resolve().parent
COMPILER = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_keys_plans_checks_and_fallback(tmp_path: Path) -> None:
    library = tmp_path / "gradient_probe.so"
    folder = Path(torch.__file__).parent / "lib"
    command = [str(COMPILER), "-std=c++20", "-O0", "-fPIC", "-shared"]
    command += [f"-I{TESTS.parent / 'upconv' / 'csrc'}"]
    command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [str(TESTS / "gradient_probe.cpp"), "-o", str(library)]
    command += [f"-L{folder}", "-ltorch_cpu", "-lc10"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [sys.executable, str(TESTS / "gradient_probe.py"), str(library)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "fine"
