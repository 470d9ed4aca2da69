"""The mma.sync kernel's plan, as far as a machine without a GPU can test it.

The emulator (mma_emulator.py) reads nothing but the integers of the plan, as the kernel does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from math import prod
from pathlib import Path

import mma_emulator as emulator
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from upconv.planner import H200, Candidate, Problem, Refusal, make_plan, mma, mma_columns
from upconv.planner import mma_tiling as tiling_module
from upconv.planner.lattice import Lattice

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "upconv" / "csrc" / "cuda"
CONVOLUTIONS = (
    torch.nn.functional.conv_transpose1d,
    torch.nn.functional.conv_transpose2d,
    torch.nn.functional.conv_transpose3d,
)
DTYPES = (("float32", True), ("float32", False), ("bfloat16", True), ("float16", True))


def candidate(problem: Problem, multiprocessors: int = 132) -> Candidate:
    answer = mma.consider(problem, replace(H200, multiprocessors=multiprocessors))
    assert isinstance(answer, Candidate), answer
    return answer


@st.composite
def problems(draw: st.DrawFn, largest: int = 300) -> Problem:
    ndim = draw(st.integers(1, 3))
    each = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * ndim))  # noqa: E731
    stride, dilation = each(1, 4), each(1, 3)
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    dtype, tf32 = draw(st.sampled_from(DTYPES))
    size = tuple(draw(st.integers(1, (40, 9, 5)[ndim - 1])) for _ in range(ndim))
    problem = Problem(
        batch=draw(st.integers(1, 3)),
        in_channels=groups * draw(st.integers(4, 40)),
        out_channels=groups * draw(st.integers(4, 90)),
        in_size=size,
        kernel=each(1, 4 if ndim < 3 else 3),
        stride=stride,
        padding=each(0, 2),
        output_padding=tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        ),
        dilation=dilation,
        groups=groups,
        dtype=dtype,
        tf32=tf32,
    )
    assume(min(problem.out_size) > 0)
    assume(prod(problem.out_size) * problem.out_channels <= largest * 100)
    return problem


def check(problem: Problem, record: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((problem.batch, problem.in_channels, *problem.in_size))
    each = problem.out_channels // problem.groups
    w = rng.standard_normal((problem.in_channels, each, *problem.kernel))
    b = rng.standard_normal(problem.out_channels)
    flat = x.reshape(*x.shape[:2], *[1] * (3 - problem.ndim), *problem.in_size)
    y = emulator.run(record, flat, w, b)
    expected = CONVOLUTIONS[problem.ndim - 1](
        *map(torch.from_numpy, (x, w, b)),
        problem.stride,
        problem.padding,
        problem.output_padding,
        problem.groups,
        problem.dilation,
    )
    np.testing.assert_allclose(y.reshape(expected.shape), expected.numpy(), rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([1, 8, 132]))
def test_the_emulated_kernel_computes_the_convolution(problem: Problem, sms: int) -> None:
    check(problem, candidate(problem, sms).params)
