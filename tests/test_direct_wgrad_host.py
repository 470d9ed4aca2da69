"""The own source of the CUDA-core kernels for the gradients, compiled for the CPU and run there.

tests/host_cuda stands in for CUDA. Tensors and workspace lie between NaNs and start as NaNs, so
that what is read outside of them, or before it was written, shows.
"""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from params_header import CUDA
from test_direct_host import GUARD, HOST, LIMIT, OPERATORS, fenced

from upconv.configurations import draw
from upconv.planner import H200, Problem
from upconv.planner import direct_igrad as igrad
from upconv.planner import direct_wgrad as planner

Run = Callable[[planner.Division, bool, torch.Tensor, torch.Tensor], torch.Tensor]


def compiled_tiles(name: str) -> tuple[tuple[int, int], ...]:
    """Input channels and columns of the kernels in direct_grad_launch.cuh; "FLOAT", ..."""
    text = (CUDA / "direct_grad_launch.cuh").read_text()
    line = re.search(rf"define UPCONV_DIRECT_WGRAD_{name}_TILES\(X\)(.*)", text)
    assert line
    return tuple((int(a), int(c)) for a, c in re.findall(r"X\((\d+), (\d+)\)", line.group(1)))


def built(folder: Path) -> ctypes.CDLL:
    """The kernel, built from copies: quoted includes look beside the including file first."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    shared = [CUDA / name for name in ("divider.h", "parts.h", "plan_reader.h")]
    for file in [*CUDA.glob("direct_*"), *shared, *HOST.iterdir()]:
        shutil.copy(file, folder)
    lists = [
        f"-D{name}_TILES(X)=" + " ".join(f"X({a}, {c})" for a, c in compiled_tiles(name))
        for name in ("FLOAT", "NARROW", "DOUBLE")
    ]
    lists.append("-DCOLUMNS(X)=" + " ".join(f"X({c})" for c in igrad.COLUMNS))
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-I.", *lists]
    done = subprocess.run(
        [*command, "-o", "wgrad.so", "-include", "host_cuda.h", "direct_grad_driver.cpp"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(folder / "wgrad.so"))
    pointer = ctypes.c_void_p
    library.run_direct_grad.argtypes = [pointer, ctypes.c_int64, ctypes.c_int, *[pointer] * 4]
    library.direct_grad_bytes.argtypes = [pointer, ctypes.c_int64]
    library.direct_grad_bytes.restype = ctypes.c_int64
    return library


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    library = built(tmp_path_factory.mktemp("direct_grad"))

    def call(
        way: planner.Division, descending: bool, other: torch.Tensor, gy: torch.Tensor
    ) -> torch.Tensor:
        """The gradient; `other` is the input, or the weight where the input's is computed."""
        problem, record = way.problem, planner.record(way)
        integers = (ctypes.c_int64 * len(record))(*record)
        assert library.direct_grad_bytes(integers, len(record)) == way.workspace_bytes
        each = problem.out_channels // problem.groups
        shape = (problem.in_channels, each, *problem.kernel)
        if way.inputs == 0:
            shape = (problem.batch, problem.in_channels, *problem.in_size)
        sums = torch.float64 if problem.dtype == "float64" else torch.float32
        words = way.workspace_bytes // way.sum_bytes
        tensors = [
            fenced(other),
            fenced(gy),
            fenced(torch.full(shape, float("nan"), dtype=gy.dtype)),
            fenced(torch.full((words,), float("nan"), dtype=sums)),
        ]
        starts = [each.data_ptr() + GUARD * each.element_size() for each in tensors]
        assert library.run_direct_grad(integers, len(record), int(descending), *starts) == 0
        for written in tensors[2:]:
            assert bool(written[:GUARD].isnan().all() and written[-GUARD:].isnan().all())
        return tensors[2][GUARD:-GUARD].view(shape)

    return call


def expected_gradient(
    problem: Problem, other: torch.Tensor, gy: torch.Tensor, by_weight: bool
) -> torch.Tensor:
    sizes = (problem.in_channels, problem.out_channels // problem.groups, *problem.kernel)
    if not by_weight:
        sizes = (problem.batch, problem.in_channels, *problem.in_size)
    wanted = torch.zeros(sizes).double().requires_grad_()
    x, w = (other.double(), wanted) if by_weight else (wanted, other.double())
    rest = (problem.stride, problem.padding, problem.output_padding)
    y = OPERATORS[problem.ndim - 1](x, w, None, *rest, problem.groups, problem.dilation)
    (gradient,) = torch.autograd.grad(y, wanted, gy.double())
    return gradient


def compare(run: Run, way: planner.Division) -> None:
    problem = way.problem
    dtype = getattr(torch, problem.dtype)
    if way.inputs:
        other = torch.randn(problem.batch, problem.in_channels, *problem.in_size).to(dtype)
    else:
        each = problem.out_channels // problem.groups
        other = torch.randn(problem.in_channels, each, *problem.kernel).to(dtype)
    gy = torch.randn(problem.batch, problem.out_channels, *problem.out_size).to(dtype)
    expected = expected_gradient(problem, other, gy, way.inputs > 0)
    ascending, descending = (run(way, order, other, gy) for order in (False, True))
    assert bool(ascending.isfinite().all()), "a sum was not written, or read from outside"
    distance = (ascending.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert float(distance) <= LIMIT[problem.dtype], way
    assert torch.equal(ascending, descending), "the result depends on the order of the threads"


@pytest.mark.parametrize("seed", range(3))
def test_drawn_problems(seed: int, run: Run) -> None:
    """Every dtype and number of dimensions; the chosen division, then any other."""
    choose = random.Random(seed)
    for configuration in islice(draw(200 + seed), 3):
        problem = replace(configuration.problem, channels_last=False, direction="grad_weight")
        machine = replace(H200, multiprocessors=choose.choice([1, 2]))
        ways = list(planner.divisions(problem, machine))
        assert ways
        compare(run, min(ways, key=lambda way: way.microseconds))
        compare(run, choose.choice(ways))


LAYERS = {
    "bilinear": Problem.of(1, 2, 2, (5, 27), 16, 8, 4, groups=2),
    "depthwise": Problem.of(2, 3, 3, (6, 40), 3, 1, 1, groups=3),
    "one output": Problem.of(1, 9, 1, (5, 23), 9, 3, 4, 2),
    "groups": Problem.of(1, 16, 6, (5, 21), (3, 5), (2, 3), (1, 2), 0, (2, 1), 2),
    "volume": Problem.of(1, 4, 4, (3, 3, 11), (3, 3, 7), 2, (1, 1, 3), 1, 1, 2),
    "signal": Problem.of(1, 2, 2, (300,), 4, 2, 1, groups=2),
    "wider than a warp": Problem.of(1, 1, 1, (4, 5), (3, 45), 2, (1, 20)),
    "no output for some rows": Problem.of(1, 2, 3, (5, 6), (2, 3), 1, (3, 2), 0, (4, 1)),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_weights_gradient_by_every_tile(name: str, dtype: str, run: Run) -> None:
    """Each in one division of middling size, of one multiprocessor."""
    problem = replace(LAYERS[name], dtype=dtype, direction="grad_weight")
    by_tile: dict[tuple[int, int], list[planner.Division]] = {}
    for way in planner.divisions(problem, replace(H200, multiprocessors=1)):
        by_tile.setdefault((way.inputs, way.columns), []).append(way)
    assert by_tile.keys() <= set(planner.tiles_of(dtype))
    assert len(by_tile) > 1
    for ways in by_tile.values():
        compare(run, ways[len(ways) // 2])


DEPTHWISE = {
    "bilinear": LAYERS["bilinear"],
    "depthwise": LAYERS["depthwise"],
    "signal": LAYERS["signal"],
    "two outputs each": Problem.of(1, 3, 6, (7, 9), (4, 3), (1, 2), (0, 1), groups=3),
    "volume": Problem.of(1, 2, 2, (3, 4, 6), (3, 3, 5), 2, 1, 1, groups=2),
    "dilated": Problem.of(1, 2, 2, (6, 13), (2, 7), (1, 3), (3, 4), 0, (4, 2), 2),
    "rows without outputs": Problem.of(1, 1, 1, (5, 5), (1, 1), 1, (2, 1)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", DEPTHWISE)
def test_the_inputs_gradient(name: str, dtype: str, run: Run) -> None:
    problem = replace(DEPTHWISE[name], dtype=dtype, direction="grad_input")
    assert igrad.legality(problem, H200) is None
    ways = list(igrad.divisions(problem, replace(H200, multiprocessors=2)))
    compare(run, ways[0])
    compare(run, ways[-1])


def test_what_meets_no_output_does_not_matter(run: Run) -> None:
    """Infinite inputs spoil the taps that they meet, and no others."""
    problem = Problem.of(1, 1, 1, (6, 6), 3, 1, 1, direction="grad_weight")
    x = torch.ones(1, 1, 6, 6)
    x[0, 0, 0, 0] = float("inf")
    gy = torch.ones(1, 1, 6, 6)
    way = min(planner.divisions(problem, H200), key=lambda way: way.microseconds)
    gw = run(way, False, x, gy)[0, 0]
    assert bool(gw[0].isfinite().all())
    assert bool(gw[:, 0].isfinite().all())
    assert bool((gw[1:, 1:] == float("inf")).all())
