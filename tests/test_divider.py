"""Division by a multiplication and a shift (csrc/cuda/divider.h), against Python's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from params_header import CUDA

LARGEST = 2**31 - 1
SOURCE = """
#include "divider.h"
extern "C" int quotient(int dividend, int by) { return upconv::Divider(by)(dividend); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH")
    folder: Path = tmp_path_factory.mktemp("divider")
    (folder / "divider.cpp").write_text(SOURCE)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CUDA}", "divider.cpp"]
    subprocess.run([*command, "-o", "divider.so"], cwd=folder, check=True, timeout=100)
    return ctypes.CDLL(str(folder / "divider.so"))


numbers = st.one_of(
    st.integers(0, LARGEST),
    st.integers(0, 1000),
    st.integers(0, 30).flatmap(lambda bit: st.integers(2**bit - 1, 2**bit + 1)),
)


@settings(max_examples=2000, deadline=None, derandomize=True)
@given(numbers, numbers)
def test_every_quotient_is_exact(library: ctypes.CDLL, dividend: int, by: int) -> None:
    by = max(1, by)
    assert library.quotient(dividend, by) == dividend // by
    multiple = dividend // by * by  # where the quotient changes
    for near in {multiple, max(0, multiple - 1)}:
        assert library.quotient(near, by) == near // by
