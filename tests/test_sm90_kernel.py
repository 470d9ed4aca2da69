"""The Hopper kernel's own code, run on a CPU (sm90_on_cpu.py): drawn layers and any tiling of them.

What PyTorch computes in float64 is the measure. The numbers are small and whole, so that TF32 makes
no error at all and bfloat16 only that of its output.
"""

from __future__ import annotations

import ctypes
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import sm90_on_cpu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sm90_plan import problems

from upconv.planner import H200, Problem, sm90, sm90_tiling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH"),
]
MULTIPROCESSORS = 2


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return sm90_on_cpu.compiled(tmp_path_factory.mktemp("sm90"))


def records(problem: Problem) -> list[tuple[sm90.Shape, list[sm90.Job], sm90_tiling.Tiling]]:
    """Every tiling of a problem."""
    hardware = replace(H200, multiprocessors=MULTIPROCESSORS)
    result = []
    for shape in sm90.shapes(problem):
        by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in range(1, 5)}
        for tiling in sm90_tiling.tilings(shape, by_blocks, hardware):
            job_list = by_blocks[tiling.blocks]
            assert job_list is not None
            result.append((shape, job_list, tiling))
    return result


def check_result(
    library: ctypes.CDLL, problem: Problem, record: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    whole = lambda *shape: rng.integers(-3, 4, shape).astype(np.float64)  # noqa: E731
    x = whole(problem.batch, problem.in_channels, *problem.in_size)
    w = whole(problem.in_channels, problem.out_channels, *problem.kernel)
    b = whole(problem.out_channels)
    lists = problem.stride, problem.padding, problem.output_padding, 1, problem.dilation
    wanted = torch.nn.functional.conv_transpose2d(*map(torch.from_numpy, (x, w, b)), *lists)
    y = sm90_on_cpu.run(library, record, x, w, b, tuple(wanted.shape), MULTIPROCESSORS, seed)
    tolerance = 0 if record[0] == 0 else 2**-8
    np.testing.assert_allclose(y, wanted.numpy(), rtol=tolerance, atol=0)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problem=problems(), choose=st.randoms(use_true_random=False))
def test_the_kernel_computes_the_convolution(
    library: ctypes.CDLL, problem: Problem, choose: random.Random
) -> None:
    if problem.dtype == "float16":
        problem = replace(problem, dtype="bfloat16")
    shape, job_list, tiling = choose.choice(records(problem))
    check_result(library, problem, sm90.record(shape, job_list, tiling), choose.randrange(99))


IDLE = {
    "phases without taps": (
        Problem.of(3, 37, 136, (4, 3), 2, (4, 3), dilation=2, tf32=True),
        (128, 1, 2, 4),
    ),
    "one job of two without taps": (
        Problem.of(3, 30, 180, (6, 8), 2, 4, dilation=2, dtype="bfloat16"),
        (216, 1, 2, 4),
    ),
    "two slices a turn": (
        Problem.of(3, 22, 20, (2, 12), 2, (4, 3), 1, 2, 3, dtype="bfloat16"),
        (64, 2, 2, 6),
    ),
}
"""Layers with jobs that multiply nothing, and the tiling (N, row blocks, channel blocks of a slice,
weight stages) with which a kernel hangs that does not keep such a job's warps together."""


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.parametrize("seed", range(4))
def test_jobs_without_products_keep_up(library: ctypes.CDLL, name: str, seed: int) -> None:
    """Nothing but a barrier keeps the warps of such a job together, and it must give every slot
    back by itself; else one warp, or the loaders, wait for ever."""
    problem, wanted = IDLE[name]
    chosen = [
        (shape, job_list, tiling)
        for shape, job_list, tiling in records(problem)
        if (tiling.n, tiling.blocks, tiling.slice_blocks, tiling.stages) == wanted
        and not tiling.alternate
    ]
    assert chosen
    for shape, job_list, tiling in chosen:
        check_result(library, problem, sm90.record(shape, job_list, tiling), seed)
