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


@pytest.mark.parametrize("seed", range(6))
def test_warps_without_products_wait_for_each_other(library: ctypes.CDLL, seed: int) -> None:
    """Most phases here have no taps. Nothing but a barrier keeps the warps of a consumer together
    then, and one of them would sleep through two turns."""
    problem = Problem.of(3, 22, 20, (2, 12), 2, (4, 3), 1, 2, 3, dtype="bfloat16")
    chosen = [
        (shape, job_list, tiling)
        for shape, job_list, tiling in records(problem)
        if not tiling.alternate and tiling.slice_blocks == 2 and tiling.blocks == 2
    ]
    shape, job_list, tiling = chosen[seed % len(chosen)]
    check_result(library, problem, sm90.record(shape, job_list, tiling), seed)
