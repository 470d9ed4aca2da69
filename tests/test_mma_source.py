"""The mma.sync kernel's own source, run on the CPU thread by thread, against float64.

The numpy emulator (test_mma_plan.py) tests the plan; this tests the code that reads it: what
cuda_on_cpu/ does is to stand in for the hardware, with copies that happen as late as they may.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mma_layers import problems
from test_mma_plan import operands, reference

from upconv.planner import H200, Problem, mma, mma_tiling

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "upconv" / "csrc" / "cuda"
STAND_INS = ROOT / "tests" / "cuda_on_cpu"
INCLUDE = Path("/usr/local/cuda/include")
# Relative to the norm: operands rounded to TF32, outputs rounded to 16 bits, and for strict
# float32 what float32 itself leaves.
LIMIT = {0: 5e-4, 1: 4e-3, 2: 5e-4, 3: 5e-7}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not INCLUDE.exists() or not shutil.which("g++"), reason="needs g++ and CUDA's headers"
    ),
]


@pytest.fixture(scope="module", params=["900", "800"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Built for a GPU with bulk copies, and for one without."""
    folder = tmp_path_factory.mktemp("mma")
    shared = [CUDA / name for name in ("operands.h", "plan_reader.h")]
    for source in (
        *CUDA.glob("mma_*"),
        *shared,
        *STAND_INS.iterdir(),
    ):  # the latter replace the former
        shutil.copy(source, folder)
    target = folder / "emulated.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-DEMULATED_ARCH={request.param}"]
    command += ["-Wno-unknown-pragmas", f"-I{folder}", f"-I{INCLUDE}"]
    built = subprocess.run(
        [*command, str(folder / "mma_driver.cpp"), "-o", str(target)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return ctypes.CDLL(str(target))


def emulate(library, problem: Problem, record: tuple[int, ...], seed: int = 0) -> float:
    """Error of the emulated kernel relative to float64, infinite where an output is missing."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    x_shape, w_shape, biases = operands(problem)
    x = torch.randn(x_shape, generator=generator).to(dtype)
    w = torch.randn(w_shape, generator=generator).to(dtype)
    forward = problem.direction == "forward"
    b = (torch.randn(biases, generator=generator) * forward).to(dtype)
    expected = reference(problem, x.double(), w.double(), b.double())
    margin = 64  # outputs must stay between two margins
    y = torch.full((expected.numel() + 2 * margin,), float("nan"), dtype=dtype)
    integers = (ctypes.c_int64 * len(record))(*record)
    pointer = lambda t, skip=0: ctypes.c_void_p(t.data_ptr() + skip * t.element_size())  # noqa: E731
    size = ctypes.c_int64(x.numel() * x.element_size())
    length = ctypes.c_int64(len(record))
    code = library.emulate(
        integers, length, pointer(x), size, pointer(w), pointer(b), pointer(y, margin)
    )
    assert code == 0
    assert bool(y[:margin].isnan().all())
    assert bool(y[-margin:].isnan().all())
    got = y[margin:-margin].view(expected.shape).double()
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(problems(largest=60), st.randoms(use_true_random=False))
def test_the_source_computes_the_convolution(library, problem: Problem, rng) -> None:
    every = list(mma_tiling.tilings(mma.works(problem), H200))
    tiling = rng.choice([t for t in every if mma_tiling.fits(t, H200)])
    assert emulate(library, problem, mma.record(tiling.work, tiling)) <= LIMIT[tiling.work.operand]


@pytest.mark.parametrize(
    "problem",
    [
        Problem.of(1, 40, 64, (6, 20), 3, tf32=True),
        Problem.of(2, 20, 48, (3, 5, 9), (3, 2, 3), tf32=True),
        Problem.of(1, 24, 40, (50,), 5, 2, 1, dtype="bfloat16"),
        Problem.of(1, 12, 32, (5, 16), 4, 2, 1, dtype="float16"),
        Problem.of(1, 24, 72, (5, 8), 3, tf32=False),
    ],
    ids=str,
)
def test_dense_layers_by_the_planners_choice(library, problem: Problem) -> None:
    answer = mma.consider(problem, H200)
    assert isinstance(answer, mma.Candidate)
    assert emulate(library, problem, answer.params) <= LIMIT[answer.params[0]]
