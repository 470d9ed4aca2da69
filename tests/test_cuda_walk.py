"""The Hopper kernel that walks, on a GPU: forward, and the input's gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import between_nans, distance, serving
from gpu_layers import check_forced, check_tilings
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from walk_layers import DIRECTIONS, Most, walk_problems

import upconv
from upconv import ops, plans
from upconv.planner import Problem, sm90_walk

pytestmark = pytest.mark.gpu

LIMIT = {"float32": 6e-4, "bfloat16": 3e-3, "float16": 6e-4}
"""Relative to the norm of the result: half a unit of the output's last place for 16-bit types, and
what rounding both operands to TF32 leaves."""
PROBLEMS = walk_problems(Most(batch=12, channels=300, rows=40, vectors=40), DIRECTIONS)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@settings(max_examples=500, deadline=None, derandomize=True, phases=[Phase.generate])
@given(PROBLEMS, st.integers(0, 2**31))
def test_the_forced_kernel_equals_float64_and_repeats_itself(problem: Problem, seed: int) -> None:
    check_forced(problem, sm90_walk.KERNEL, seed, LIMIT[problem.dtype])


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(PROBLEMS, st.integers(0, 2**31))
def test_every_tiling_equals_float64(problem: Problem, seed: int) -> None:
    records = map(sm90_walk.record, sm90_walk.tilings(problem, plans.cuda_hardware(0)))
    check_tilings(problem, sm90_walk.KERNEL, records, seed, LIMIT[problem.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(8, 64, 64, 64), (4, 32, 200, 304), (2, 48, 16, 32, 32)])
def test_errors_are_no_larger_than_pytorchs(size: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ndim = len(size) - 2
    x = torch.randn(size, device="cuda").to(dtype)
    w = torch.randn(size[1], 96, *(3,) * ndim, device="cuda").to(dtype)
    b = torch.randn(96, device="cuda").to(dtype)
    pytorchs = getattr(F, f"conv_transpose{ndim}d")
    expected = pytorchs(x.double(), w.double(), b.double(), 1, 1)
    with torch.no_grad(), ops.forced(sm90_walk.KERNEL):
        assert serving(ndim, x, w, b, 1, 1) == sm90_walk.KERNEL
        ours = distance(getattr(upconv, f"conv_transpose{ndim}d")(x, w, b, 1, 1), expected)
    assert ours <= 1.05 * distance(pytorchs(x, w, b, 1, 1), expected)


def test_a_tensor_beyond_two_to_the_32_elements() -> None:
    """Batches of images, each of which is within the kernel's 32-bit sizes."""
    w = torch.randn(16, 72, 3, 3, device="cuda", dtype=torch.bfloat16)
    x = between_nans((32, 16, 1024, 2048), torch.bfloat16)
    with torch.no_grad(), ops.forced(sm90_walk.KERNEL):
        assert serving(2, x, w, None, 1, 1) == sm90_walk.KERNEL
        y = upconv.conv_transpose2d(x, w, None, 1, 1)
    assert y.numel() > 2**32
    for image in (0, 31):
        expected = F.conv_transpose2d(x[image].double(), w.double(), None, 1, 1)
        assert distance(y[image], expected) <= LIMIT["bfloat16"]
