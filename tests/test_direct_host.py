"""The CUDA-core kernel's own source, compiled for the CPU and run there.

tests/host_cuda stands in for CUDA: threads are coroutines that meet at barriers, shared memory
starts as NaNs, asynchronous copies arrive when they are waited for. What the numpy emulator cannot
see is tested here: barriers, the order of the stores, places in shared memory.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import direct_emulator as emulator
import pytest
import torch

from upconv.configurations import draw
from upconv.planner import H200, Problem, direct
from upconv.planner.direct_shape import Convolution, convolutions, row_choices
from upconv.planner.direct_tiling import Tiling, tiles_of, tilings

HOST = Path(__file__).resolve().parent / "host_cuda"
OPERATORS = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
LIMIT = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 4e-3, "float16": 6e-4}
GUARD = 1024

Run = Callable[[Tiling, bool, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The kernel, built from copies: quoted includes look beside the including file first."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("direct")
    for file in [*emulator.CUDA.glob("direct_*"), emulator.CUDA / "plan_reader.h", *HOST.iterdir()]:
        shutil.copy(file, folder)
    lists = [
        f"-D{name}_TILES(X)="
        + " ".join(f"X({rows}, {n})" for rows, n in emulator.compiled_tiles(name).items())
        for name in ("FLOAT", "DOUBLE", "LONG")
    ]
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-I.", *lists]
    built = subprocess.run(
        [*command, "-o", "direct.so", "direct_driver.cpp"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    library = ctypes.CDLL(str(folder / "direct.so"))
    pointer = ctypes.c_void_p
    library.run_direct.argtypes = [pointer, ctypes.c_int64, ctypes.c_int, *[pointer] * 4]

    def call(
        tiling: Tiling,
        descending: bool,
        x: torch.Tensor,
        w: torch.Tensor,
        b: torch.Tensor | None,
    ) -> torch.Tensor:
        convolution = tiling.convolution
        sizes = [axis.out_size for axis in convolution.axes][-(x.dim() - 2) :]
        shape = (x.shape[0], convolution.groups * convolution.out_channels, *sizes)
        record = direct.record(tiling)
        fences = [fenced(x), fenced(w), fenced(torch.full(shape, float("nan"), dtype=x.dtype))]
        starts = [fence.data_ptr() + GUARD * fence.element_size() for fence in fences]
        bias = None if b is None else b.data_ptr()
        code = library.run_direct(
            (ctypes.c_int64 * len(record))(*record),
            len(record),
            int(descending),
            starts[0],
            starts[1],
            bias,
            starts[2],
        )
        assert code == 0
        assert bool(fences[2][:GUARD].isnan().all() and fences[2][-GUARD:].isnan().all())
        return fences[2][GUARD:-GUARD].view(shape)

    return call


def fenced(values: torch.Tensor) -> torch.Tensor:
    """The values between NaNs: what is read outside of them shows."""
    fence = torch.full((GUARD,), float("nan"), dtype=values.dtype)
    return torch.cat([fence, values.flatten(), fence])


def compare(run: Run, problem: Problem, tiling: Tiling) -> None:
    dtype = getattr(torch, problem.dtype)
    x = torch.randn(problem.batch, problem.in_channels, *problem.in_size).to(dtype)
    outputs = problem.out_channels // problem.groups
    w = torch.randn(problem.in_channels, outputs, *problem.kernel).to(dtype)
    b = torch.randn(problem.out_channels).to(dtype) if problem.bias else None
    expected = OPERATORS[problem.ndim - 1](
        x.double(),
        w.double(),
        None if b is None else b.double(),
        problem.stride,
        problem.padding,
        problem.output_padding,
        problem.groups,
        problem.dilation,
    )
    ascending, descending = (run(tiling, order, x, w, b) for order in (False, True))
    assert bool(ascending.isfinite().all()), "an output was not written, or read from outside"
    distance = (ascending.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert float(distance) <= LIMIT[problem.dtype], (problem, tiling)
    assert torch.equal(ascending, descending), "the result depends on the order of the threads"


@pytest.mark.parametrize("seed", range(4))
def test_drawn_problems(seed: int, run: Run) -> None:
    """Every dtype and number of dimensions; the chosen tiling, then any other."""
    choose = random.Random(seed)
    for configuration in islice(draw(100 + seed), 9):
        problem = replace(configuration.problem, channels_last=False)
        machine = replace(H200, multiprocessors=choose.choice([1, 132]))
        ways = convolutions(problem)
        tiling = direct.best_tiling(ways, machine)
        assert tiling is not None
        compare(run, problem, tiling)
        way = choose.choice(ways)
        choices = row_choices(way, list(tiles_of(way)))
        others = list(tilings(choose.choice(choices), machine))
        compare(run, problem, choose.choice(others))


LAYERS = {
    "bilinear": Problem.of(1, 3, 3, (20, 21), 16, 8, 4, groups=3),
    "depthwise": Problem.of(2, 5, 5, (24, 40), 3, 1, 1, groups=5),
    "one output": Problem.of(1, 56, 1, (20, 23), 9, 3, 4, 2),
    "groups": Problem.of(1, 32, 64, (9, 21), (3, 5), (2, 3), (1, 2), 0, (2, 1), 4),
    "volume": Problem.of(1, 16, 16, (4, 6, 11), (3, 5, 7), 2, (1, 2, 3), 1, 1, 4),
    "signal": Problem.of(1, 2, 2, (700,), 4, 2, 1, groups=2),
    "large stride": Problem.of(1, 1, 1, (4, 4), 64, 32, 16),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_some_size(name: str, dtype: str, run: Run) -> None:
    problem = replace(LAYERS[name], dtype=dtype)
    tiling = direct.best_tiling(convolutions(problem), replace(H200, multiprocessors=4))
    assert tiling is not None
    compare(run, problem, tiling)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "large stride"])
def test_the_gradient_of_the_input(name: str, dtype: str, run: Run) -> None:
    problem = replace(LAYERS[name], dtype=dtype)
    way = Convolution.of_input_gradient(problem)
    tiling = direct.best_tiling([way], replace(H200, multiprocessors=4))
    assert tiling is not None
    number = getattr(torch, dtype)
    gy = torch.randn(problem.batch, problem.out_channels, *problem.out_size).to(number)
    each = problem.out_channels // problem.groups
    w = torch.randn(problem.in_channels, each, *problem.kernel).to(number)
    x = torch.zeros(problem.batch, problem.in_channels, *problem.in_size).double().requires_grad_()
    rest = (problem.stride, problem.padding, problem.output_padding)
    y = OPERATORS[problem.ndim - 1](x, w.double(), None, *rest, problem.groups, problem.dilation)
    (expected,) = torch.autograd.grad(y, x, gy.double())
    got = run(tiling, False, gy, w, None)
    assert bool(got.isfinite().all())
    assert float((got.double() - expected).norm() / expected.norm()) <= LIMIT[dtype]
