"""How much shared memory a kernel may have, where several threads of the host launch it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parent.parent / "upconv" / "csrc" / "cuda"
DRIVER = Path(__file__).resolve().parent / "shared_memory_driver.cpp"
INCLUDE = Path("/usr/local/cuda/include")
KIB = 1024

pytestmark = pytest.mark.skipif(
    not INCLUDE.exists() or not shutil.which("g++"), reason="needs g++ and CUDA's headers"
)


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    """The source itself with the driver's CUDA runtime; anew for each test, since it remembers."""
    target = tmp_path / "shared_memory.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", f"-I{INCLUDE}"]
    sources = ["-x", "c++", str(CUDA / "shared_memory.cu"), str(DRIVER)]
    built = subprocess.run(
        [*command, f"-I{CUDA}", *sources, "-o", str(target)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(target))


def test_threads_do_not_take_from_each_other_what_they_allowed(library: ctypes.CDLL) -> None:
    changes = ctypes.c_int()
    assert library.race(ctypes.byref(changes)) == 0
    assert 2 <= changes.value <= 2 * 8, "once for each larger size on each device, at most"


def test_what_every_kernel_has_is_not_asked_for(library: ctypes.CDLL) -> None:
    assert library.ask(0, 48 * KIB) == 0
    assert library.limit_of(0) == 0
    assert library.ask(0, 48 * KIB + 1) == 0
    assert library.limit_of(0) == 48 * KIB + 1


def test_devices_are_apart_and_sizes_never_shrink(library: ctypes.CDLL) -> None:
    for device, size, allowed in ((0, 100, 100), (1, 60, 60), (0, 80, 100), (1, 70, 70)):
        assert library.ask(device, size * KIB) == 0
        assert library.limit_of(device) == allowed * KIB


def test_a_refusal_is_an_error_each_time(library: ctypes.CDLL) -> None:
    for _ in range(2):
        assert library.ask(0, 201 * KIB) != 0
    assert library.ask(0, 200 * KIB) == 0
    assert library.limit_of(0) == 200 * KIB
