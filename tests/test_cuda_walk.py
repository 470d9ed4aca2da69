"""The Hopper kernel that walks, on a GPU: forward, and the input's gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import between_nans, distance, serving
from gpu_layers import check_forced, check_tilings
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import upconv
from upconv import ops, plans
from upconv.planner import H200, Candidate, Problem, sm90_walk

pytestmark = pytest.mark.gpu

DIRECTIONS = ("forward", "grad_input")
LIMIT = {"float32": 6e-4, "bfloat16": 3e-3, "float16": 6e-4}
"""Relative to the norm of the result: half a unit of the output's last place for 16-bit types, and
what rounding both operands to TF32 leaves."""


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ndim, direction = draw(st.sampled_from([1, 2, 2, 3, 3])), draw(st.sampled_from(DIRECTIONS))
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    spread = [number(1, 3) if direction == "forward" and number(0, 1) else 1 for _ in range(ndim)]
    walk = draw(st.sampled_from([1, 3, 3]))
    rows = [number(1, 40 if ndim == 2 else 12) for _ in range(ndim - 1)]
    problem = Problem.of(
        number(1, 12),
        number(8, 300),
        number(8, 200),
        (*rows, 4 * number(1, 300 if ndim == 1 else 24)),
        (walk, number(1, 5), 3)[-ndim:] if ndim != 2 else (number(1, 5), 3),
        tuple(spread),
        tuple(number(0, 3) for _ in range(ndim)),
        tuple(number(0, each - 1) for each in spread),
        tuple(spread),
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(list(LIMIT))),
        tf32=True,
        direction=direction,
    )
    assume(min(problem.out_size) > 0)
    assume(isinstance(sm90_walk.consider(problem, H200), Candidate))
    return problem


@settings(max_examples=500, deadline=None, derandomize=True, phases=[Phase.generate])
@given(problems(), st.integers(0, 2**31))
def test_the_forced_kernel_equals_float64_and_repeats_itself(problem: Problem, seed: int) -> None:
    check_forced(problem, sm90_walk.KERNEL, seed, LIMIT[problem.dtype])


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(problems(), st.integers(0, 2**31))
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
