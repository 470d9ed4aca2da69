"""The weight's gradient on Hopper by the kernel's own code, run on a CPU (wgrad_on_cpu.py).

The numbers are small and whole, so that TF32 makes no error at all and bfloat16 only that of its
output.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import wgrad_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from wgrad_references import any_plan, box_problems, expected, odd_problems, problems

from upconv.planner import Problem

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return wgrad_on_cpu.compiled(tmp_path_factory.mktemp("wgrad"))


def check(
    library: ctypes.CDLL, problem: Problem, record: tuple[int, ...], bias: bool = False
) -> None:
    numbers = np.random.default_rng(1)
    whole = lambda *shape: numbers.integers(-3, 4, shape).astype(np.float64)  # noqa: E731
    x = whole(problem.batch, problem.in_channels, *problem.in_size)
    gy = whole(problem.batch, problem.out_channels, *problem.out_size)
    wanted = expected(problem, x, gy)
    gw, gb = wgrad_on_cpu.run(library, record, x, gy, wanted.size)
    limit = 0 if problem.dtype == "float32" else 2**-8
    np.testing.assert_allclose(gw.reshape(wanted.shape), wanted, rtol=limit, atol=0)
    if bias:
        sums = gy.sum(tuple(i for i in range(gy.ndim) if i != 1))
        np.testing.assert_allclose(gb, sums, rtol=limit, atol=0)
    else:
        assert np.isnan(gb).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([1, 3, 7]), st.randoms(use_true_random=False))
def test_any_plan_computes_the_gradient(
    library: ctypes.CDLL, problem: Problem, multiprocessors: int, rng: Random
) -> None:
    check(library, problem, any_plan(problem, multiprocessors, rng))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(box_problems(), st.sampled_from([1, 3, 7]), st.randoms(use_true_random=False))
def test_any_box_brings_grad_output(
    library: ctypes.CDLL, problem: Problem, multiprocessors: int, rng: Random
) -> None:
    check(library, problem, any_plan(problem, multiprocessors, rng, boxes=True))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(odd_problems(), st.sampled_from([1, 3, 7]), st.randoms(use_true_random=False))
def test_rows_may_begin_anywhere(
    library: ctypes.CDLL, problem: Problem, multiprocessors: int, rng: Random
) -> None:
    check(library, problem, any_plan(problem, multiprocessors, rng, odd=True))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(odd_problems(bias=True), st.sampled_from([1, 3, 7]), st.randoms(use_true_random=False))
def test_the_gradient_of_the_bias_comes_with_odd_rows(
    library: ctypes.CDLL, problem: Problem, multiprocessors: int, rng: Random
) -> None:
    record = any_plan(problem, multiprocessors, rng, bias=True, odd=True)
    check(library, problem, record, bias=True)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(box_problems(), st.sampled_from([1, 3, 7]), st.randoms(use_true_random=False))
def test_the_gradient_of_the_bias_comes_with_it(
    library: ctypes.CDLL, problem: Problem, multiprocessors: int, rng: Random
) -> None:
    check(library, problem, any_plan(problem, multiprocessors, rng, bias=True), bias=True)


@pytest.mark.parametrize(
    ("size", "stride"), [((5, 24), 2), ((5, 13), 1), ((64,), 2), ((2, 3, 16), 2)]
)
def test_nothing_beside_an_odd_row_reaches_it(
    library: ctypes.CDLL, size: tuple[int, ...], stride: int
) -> None:
    """Rows and channels follow each other as one: those beside a NaN know nothing of it."""
    problem = Problem.of(2, 16, 64, size, 3, stride, 1, dtype="bfloat16", tf32=True)
    problem = replace(problem, direction="grad_weight")
    numbers = np.random.default_rng(1)
    x = numbers.integers(-3, 4, (2, 16, *problem.in_size)).astype(np.float64)
    gy = numbers.integers(-3, 4, (2, 64, *problem.out_size)).astype(np.float64)
    spoilt = [0, 5, 17, 63]
    gy[:, spoilt] = 0
    wanted = expected(problem, x, gy)
    gy[1, spoilt] = np.nan
    record = any_plan(problem, 3, Random(0), odd=True)
    gw, _ = wgrad_on_cpu.run(library, record, x, gy, wanted.size)
    gw = gw.reshape(wanted.shape)
    clean = [channel for channel in range(64) if channel not in spoilt]
    np.testing.assert_allclose(gw[:, clean], wanted[:, clean], rtol=2**-8, atol=0)
    assert np.isnan(gw[:, spoilt]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("channels", [(400, 128), (512, 100)])
def test_many_weights_are_written_in_rows(
    library: ctypes.CDLL, dtype: str, channels: tuple[int, int]
) -> None:
    """Of 8 input and 64 output channels each, the last of them incomplete."""
    problem = Problem.of(1, *channels, (1, 8), (2, 2), 2, dtype=dtype, tf32=True)
    problem = replace(problem, direction="grad_weight")
    check(library, problem, any_plan(problem, 7, Random(0)))
