"""The own source of the kernels for the gradients of depthwise layers, compiled for the CPU.

tests/host_cuda stands in for CUDA. Tensors and workspace lie between NaNs and start as NaNs, so
that what is read outside of them, or before it was written, shows.
"""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from params_header import CUDA
from test_direct_host import GUARD, HOST, LIMIT, fenced
from test_direct_wgrad_host import expected_gradient

from upconv.planner import H200, Problem, depthwise_igrad, depthwise_wgrad
from upconv.planner.depthwise import legality

PLANNERS = {"grad_input": depthwise_igrad, "grad_weight": depthwise_wgrad}
Run = Callable[[Any, bool, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def compiled_forms(name: str) -> tuple[tuple[int, ...], ...]:
    """What the kernels in depthwise_launch.cuh are compiled for; "IGRAD" or "WGRAD"."""
    text = (CUDA / "depthwise_launch.cuh").read_text()
    found = re.search(rf"DEPTHWISE_{name}_FORMS\(X\)((?:[^\n]*\\\n)*[^\n]*)", text)
    assert found
    forms = re.findall(r"X\(([\d, ]+)\)", found.group(1))
    return tuple(tuple(map(int, form.split(","))) for form in forms)


def built(folder: Path) -> ctypes.CDLL:
    """The kernels, built from copies: quoted includes look beside the including file first."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    shared = [CUDA / name for name in ("divider.h", "parts.h", "plan_reader.h", "ordered_sum.cuh")]
    files = [*CUDA.glob("depthwise_*"), *CUDA.glob("direct_*"), *shared, *HOST.iterdir()]
    for file in files:
        shutil.copy(file, folder)
    lists = [
        f"-D{name}_FORMS(X)="
        + " ".join(f"X({', '.join(map(str, form))})" for form in compiled_forms(name))
        for name in ("IGRAD", "WGRAD")
    ]
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-I.", *lists]
    done = subprocess.run(
        [*command, "-o", "depthwise.so", "-include", "host_cuda.h", "depthwise_driver.cpp"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(folder / "depthwise.so"))
    pointer = ctypes.c_void_p
    library.run_depthwise.argtypes = [pointer, ctypes.c_int64, ctypes.c_int, *[pointer] * 5]
    library.depthwise_bytes.argtypes = [pointer, ctypes.c_int64, ctypes.c_int]
    library.depthwise_bytes.restype = ctypes.c_int64
    return library


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    library = built(tmp_path_factory.mktemp("depthwise"))

    def call(
        way: Any, descending: bool, other: torch.Tensor, gy: torch.Tensor, offset: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A gradient, and the bias's; grad_output begins `offset` elements late."""
        problem, by_weight = way.problem, way.problem.direction == "grad_weight"
        record = PLANNERS[problem.direction].record(way)
        integers = (ctypes.c_int64 * len(record))(*record)
        assert library.depthwise_bytes(integers, len(record), 1) == way.shared_bytes
        workspace = way.workspace_bytes if by_weight else 0
        assert library.depthwise_bytes(integers, len(record), 0) == workspace
        shape = (problem.in_channels, 1, *problem.kernel)
        if not by_weight:
            shape = (problem.batch, problem.in_channels, *problem.in_size)
        late = torch.full((offset,), float("nan"), dtype=gy.dtype)
        tensors = [
            fenced(other),
            fenced(torch.cat([late, gy.flatten()])),
            fenced(torch.full(shape, float("nan"), dtype=gy.dtype)),
            fenced(torch.full((problem.in_channels,), float("nan"), dtype=gy.dtype)),
            fenced(torch.full((workspace // 4,), float("nan"))),
        ]
        starts = [each.data_ptr() + GUARD * each.element_size() for each in tensors]
        starts[1] += offset * gy.element_size()
        assert library.run_depthwise(integers, len(record), int(descending), *starts) == 0
        for written in tensors[2:]:
            assert bool(written[:GUARD].isnan().all() and written[-GUARD:].isnan().all())
        return tensors[2][GUARD:-GUARD].view(shape), tensors[3][GUARD:-GUARD]

    return call


def compare(run: Run, way: Any, offset: int = 0) -> None:
    problem, by_weight = way.problem, way.problem.direction == "grad_weight"
    dtype = getattr(torch, problem.dtype)
    shape = (problem.in_channels, 1, *problem.kernel)
    if by_weight:
        shape = (problem.batch, problem.in_channels, *problem.in_size)
    other = torch.randn(shape).to(dtype)
    gy = torch.randn(problem.batch, problem.out_channels, *problem.out_size).to(dtype)
    expected = expected_gradient(problem, other, gy, by_weight)
    both = [run(way, order, other, gy, offset) for order in (False, True)]
    wanted = [(both[0][0], expected)]
    if by_weight and way.with_bias:
        wanted.append((both[0][1], gy.double().sum([0, *range(2, gy.dim())])))
    for ours, exact in wanted:
        assert bool(ours.isfinite().all()), ("a sum was not written, or read from outside", way)
        distance = (ours.double() - exact).norm() / exact.norm().clamp_min(1e-30)
        assert float(distance) <= LIMIT[problem.dtype], way
    for ours, again in zip(*both, strict=True):
        assert torch.equal(ours.nan_to_num(), again.nan_to_num()), "depends on the threads' order"


def drawn(seed: int) -> Iterator[Problem]:
    """Depthwise layers of every number of dimensions and type, with a stride."""
    choose = random.Random(seed)
    while True:
        ndim = choose.choice((1, 2, 2, 3))
        most = {1: 60, 2: 12, 3: 5}[ndim]
        size = [choose.randint(1, most) for _ in range(ndim)]
        stride = [choose.choice((1, 2, 2, 3, 4)) for _ in range(ndim)]
        stride[-1] = choose.choice((2, 2, 3, 4, 5, 8))
        kernel = [choose.randint(1, 2 * s) for s in stride]
        dilation = [1 if k > 1 else choose.randint(1, 2) for k in kernel]
        if ndim == 3:
            kernel[0], dilation[0] = choose.randint(1, 4), choose.randint(1, 2)
        more = [choose.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
        least = [
            (n - 1) * s + d * (k - 1) + m + 1
            for n, s, d, k, m in zip(size, stride, dilation, kernel, more, strict=True)
        ]
        padding = [choose.randint(0, min(5, (n - 1) // 2)) for n in least]
        channels = choose.choice((1, 2, 3, 5, 9))
        yield Problem.of(
            choose.randint(1, 3),
            channels,
            channels,
            size,
            kernel,
            stride,
            padding,
            more,
            dilation,
            channels,
            dtype=choose.choice(("float32", "bfloat16", "float16")),
            direction=choose.choice(("grad_input", "grad_weight")),
        )


@pytest.mark.parametrize("seed", range(6))
def test_drawn_problems(seed: int, run: Run) -> None:
    """The chosen division, and any other."""
    choose, source, compared = random.Random(seed), drawn(seed), 0
    while compared < 12:
        problem = next(source)
        machine = replace(H200, multiprocessors=choose.choice([1, 2]))
        if legality(problem, machine) is not None:
            continue
        ways = list(PLANNERS[problem.direction].divisions(problem, machine))
        assert ways, problem
        compare(run, min(ways, key=lambda way: way.microseconds), choose.choice((0, 0, 1, 2)))
        compare(run, choose.choice(ways))
        compared += 1


LAYERS = {
    "bilinear": Problem.of(2, 2, 2, (9, 12), 16, 8, 4, groups=2),
    "square": Problem.of(3, 5, 5, (7, 7), 4, 2, 1, groups=5),
    "odd": Problem.of(2, 3, 3, (7, 9), 3, 2, 1, groups=3),
    "patches": Problem.of(2, 3, 3, (6, 9), 2, 2, groups=3),
    "wide blocks": Problem.of(1, 1, 1, (3, 4), 64, 32, 16, groups=1),
    "blocks of 16": Problem.of(1, 2, 2, (5, 7), 31, 16, 7, groups=2),
    "signal": Problem.of(5, 2, 2, (1200,), 4, 2, 1, groups=2),
    "patches of a signal": Problem.of(3, 2, 2, (70,), 5, 5, groups=2),
    "volume": Problem.of(2, 3, 3, (4, 5, 6), 4, 2, 1, groups=3),
    "rows": Problem.of(2, 3, 3, (5, 17), (2, 8), (1, 4), (0, 2), groups=3),
    "gaps": Problem.of(2, 2, 2, (5, 6), (2, 3), (3, 5), 1, (2, 1), groups=2),
    "long rows": Problem.of(1, 1, 1, (4, 700), 4, 2, 1, groups=1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", LAYERS)
def test_both_gradients(name: str, dtype: str, run: Run) -> None:
    for direction, planner in PLANNERS.items():
        problem = replace(LAYERS[name], dtype=dtype, direction=direction)
        ways = list(planner.divisions(problem, replace(H200, multiprocessors=1)))
        for way in {ways[0], ways[len(ways) // 2], ways[-1]}:
            compare(run, way)


def test_infinities_spoil_what_they_meet_and_no_more(run: Run) -> None:
    """Of a kernel that is no multiple of the stride, elements that some tap does not meet."""
    problem = Problem.of(1, 1, 1, (6, 6), 3, 2, 1, direction="grad_input")
    gy = torch.ones(1, 1, 11, 11)
    gy[0, 0, 5, 5] = float("inf")
    way = next(depthwise_igrad.divisions(problem, H200))
    gx, _ = run(way, False, torch.ones(1, 1, 3, 3), gy, 0)
    expected = expected_gradient(problem, torch.ones(1, 1, 3, 3), gy, False)
    assert torch.equal(gx.double(), expected)
