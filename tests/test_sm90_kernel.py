"""The Hopper kernel's own code, run on a CPU (sm90_on_cpu.py): drawn layers and any tiling of them.

What PyTorch computes in float64 is the measure. The operands are rounded beforehand to what the
tensor cores take, so that only the order of additions is left.
"""

from __future__ import annotations

import ctypes
import random
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sm90_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from sm90_references import TASKS, expected, expected_grad_input, problems

from upconv.planner import H200, Problem, sm90, sm90_tiling
from upconv.planner.sm90_task import Task

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return sm90_on_cpu.compiled(tmp_path_factory.mktemp("sm90"))


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Small whole numbers, which no operand type rounds."""
    return np.round(values * 2)


def records(task: Task, multiprocessors: int) -> list[tuple[int, ...]]:
    """Every tiling of a task, as the kernel reads it."""
    hardware = replace(H200, multiprocessors=multiprocessors)
    result = []
    for shape in sm90.shapes(task):
        by_blocks = {blocks: sm90.jobs(shape, blocks) for blocks in range(1, 5)}
        for tiling in sm90_tiling.tilings(shape, by_blocks, hardware):
            job_list = by_blocks[tiling.blocks]
            assert job_list is not None
            result.append((shape, job_list, tiling))
    return result


def compare(library: ctypes.CDLL, problem: Problem, direction: str, record: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = lambda *shape: rng.integers(-3, 4, shape).astype(np.float64)  # noqa: E731
    w = whole(problem.in_channels, problem.out_channels // problem.groups, *problem.kernel)
    if direction == "forward":
        x = whole(problem.batch, problem.in_channels, *problem.in_size)
        bias: np.ndarray | None = whole(problem.out_channels)
        wanted = expected(problem, x, w, bias)
    else:
        x = whole(problem.batch, problem.out_channels, *problem.out_size)
        bias = None
        wanted = expected_grad_input(problem, x, w)
    y = sm90_on_cpu.run(library, record, x, w, bias, wanted.shape, 2, seed)
    tolerance = 0 if record[0] == 0 else 2**-8
    np.testing.assert_allclose(y, wanted, rtol=tolerance, atol=0)


@pytest.mark.parametrize("direction", TASKS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(problem=problems(), choose=st.randoms(use_true_random=False))
def test_the_kernel_computes_the_convolution(
    library: ctypes.CDLL, direction: str, problem: Problem, choose: random.Random
) -> None:
    if problem.dtype == "float16":
        problem = replace(problem, dtype="bfloat16")
    shape, job_list, tiling = choose.choice(records(TASKS[direction](problem), 2))
    compare(library, problem, direction, sm90.record(shape, job_list, tiling), choose.randrange(99))
