"""The Hopper kernel for the weight's gradient of all phases of a row, on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import between_nans, check_weight_gradients, distance, poison
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from strategies import unaligned_planes

from upconv import ops, plans
from upconv.planner import H200, Problem, sm90_phases_wgrad

pytestmark = pytest.mark.gpu

LIMIT = {torch.float32: 6e-4, torch.bfloat16: 3e-3, torch.float16: 6e-4}
"""Relative to the norm of the result: half a unit of the output's last place for 16-bit types, and
what rounding both operands to TF32 leaves."""
KERNEL = sm90_phases_wgrad.KERNEL
ROWS = [(3, 2, 1), (4, 2, 1), (4, 2, 1), (16, 8, 4), (4, 4, 0), (8, 4, 4), (8, 8, 0)]
"""Taps, stride and padding of a row."""


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ndim, dtype = draw(st.sampled_from([1, 2, 2, 2, 3])), draw(st.sampled_from(list(LIMIT)))
    usual = draw(st.booleans())

    def rows(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=ndim - 1, max_size=ndim - 1))

    row = draw(st.sampled_from(ROWS))
    width = draw(st.integers(1, 150 if ndim == 1 else 14)) * 16 // dtype.itemsize
    problem = Problem.of(
        draw(st.integers(1, 12)),
        draw(st.integers(8, 300)),
        draw(st.integers(8, 200)),
        (*rows(1, 24 if ndim == 2 else 6), width),
        (*([row[0]] * (ndim - 1) if usual else rows(1, 5)), row[0]),
        (*([row[1]] * (ndim - 1) if usual else rows(1, 3)), row[1]),
        (*([row[2]] * (ndim - 1) if usual else rows(0, 2)), row[2]),
        (*[0] * (ndim - 1), int(row[0] == 3)),
        dtype=str(dtype)[6:],
        tf32=True,
        direction="grad_weight",
    )
    assume(min(problem.out_size) > 0 and sm90_phases_wgrad.refusal(problem, H200) is None)
    return problem


@settings(max_examples=250, deadline=None, derandomize=True, phases=[Phase.generate])
@given(problems(), st.integers(0, 2**31))
def test_the_gradients_of_weight_and_bias_equal_float64(problem: Problem, seed: int) -> None:
    check_weight_gradients(problem, KERNEL, seed, LIMIT[getattr(torch, problem.dtype)])


@st.composite
def patches(draw: st.DrawFn) -> Problem:
    """2 x 2, with rows so short that a part has whole ones."""
    dtype = draw(st.sampled_from(list(LIMIT)))
    deep = draw(st.sampled_from([(), (), (1,), (3,)]))
    kernel = (*(draw(st.integers(1, 3)) for _ in deep), 2, 2)
    width = draw(st.integers(1, 128 // dtype.itemsize))
    problem = Problem.of(
        draw(st.integers(1, 40)),
        draw(st.integers(8, 300)),
        draw(st.integers(8, 200)),
        (*deep, draw(st.integers(1, 32)), width),
        kernel,
        kernel,
        dtype=str(dtype)[6:],
        tf32=True,
        direction="grad_weight",
    )
    assume(sm90_phases_wgrad.refusal(problem, H200) is None)
    return problem


@st.composite
def copied(draw: st.DrawFn) -> Problem:
    """2 x 2 in 16 bits, where no run of whole rows begins on 16 bytes."""
    deep = draw(st.sampled_from([(), (), (1,), (3,)]))
    kernel = (*(draw(st.integers(1, 3)) for _ in deep), 2, 2)
    problem = Problem.of(
        draw(st.integers(1, 40)),
        draw(st.integers(8, 300)),
        draw(st.integers(8, 200)),
        (*deep, *draw(unaligned_planes(30))),
        kernel,
        kernel,
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        direction="grad_weight",
    )
    assert sm90_phases_wgrad.square_run(problem).copied
    return problem


@settings(max_examples=200, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.one_of(patches(), copied()), st.integers(0, 2**31))
def test_patches_equal_float64(problem: Problem, seed: int) -> None:
    check_weight_gradients(problem, KERNEL, seed, LIMIT[getattr(torch, problem.dtype)])


@settings(max_examples=45, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.one_of(problems(), patches(), copied()), st.integers(0, 2**31))
def test_every_tiling_equals_float64(problem: Problem, seed: int) -> None:
    torch.manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    x = between_nans((problem.batch, problem.in_channels, *problem.in_size), dtype)
    gy = between_nans((problem.batch, problem.out_channels, *problem.out_size), dtype)
    shape = torch.Size((problem.in_channels, problem.out_channels, *problem.kernel))
    steps = (problem.stride, problem.padding, problem.output_padding)
    rest = (shape, *steps, 1, (1,) * problem.ndim)
    wanted = ops._aten_gradient("grad_weight", gy.double(), x.double(), *rest)
    for tiling in sm90_phases_wgrad.tilings(problem.in_three(), plans.cuda_hardware(0)):
        # The call asks for no bias: the sums would have nowhere to go.
        fields = {**sm90_phases_wgrad.fields(tiling), "sums": 0}
        poison(shape, dtype)
        with plans.given(KERNEL, list(fields.values())), torch.no_grad():
            result = ops.GRADIENTS["grad_weight"](gy, x, *rest)
        assert distance(result, wanted) <= LIMIT[dtype], tiling


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("size", [(64, 256, 8, 8), (16, 128, 32, 32), (8, 128, 24, 48)])
@pytest.mark.parametrize(("stride", "padding"), [(2, 1), (4, 0)])
def test_errors_are_no_larger_than_pytorchs(
    size: tuple[int, ...], stride: int, padding: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(size, device="cuda").to(dtype)
    gy = torch.randn(size[0], 96, stride * size[2], stride * size[3], device="cuda").to(dtype)
    rest = ((size[1], 96, 4, 4), [stride] * 2, [padding] * 2, [0, 0], 1, [1, 1])
    wanted = ops._aten_gradient("grad_weight", gy.double(), x.double(), *rest)
    sums = gy.double().sum([0, 2, 3])
    theirs = ops._aten_gradient("grad_weight", gy, x, *rest)
    with torch.no_grad(), ops.forced(KERNEL):
        weight, bias = torch.ops.upconv._grad_weight_and_bias(gy, x, *rest)
    assert distance(weight, wanted) <= 1.1 * distance(theirs, wanted)
    assert distance(bias, sums) <= 1.1 * distance(gy.sum([0, 2, 3]), sums)


SPECIAL = {"nan": float("nan"), "a nan of the GPU's": None, "inf": float("inf")}


@pytest.mark.parametrize("name", SPECIAL)
def test_numbers_that_are_none_reach_all_that_they_touch(name: str) -> None:
    """One element of grad_output: of its channel all taps that meet it, and no other channel."""
    x = torch.ones(2, 64, 8, 8, device="cuda")
    gy = torch.ones(2, 64, 16, 16, device="cuda")
    value = SPECIAL[name]
    gy[0, 5, 6, 7] = torch.zeros((), device="cuda") / 0 if value is None else value
    rest = ((64, 64, 4, 4), [2, 2], [1, 1], [0, 0], 1, [1, 1])
    wanted = ops._aten_gradient("grad_weight", gy.double(), x.double(), *rest)
    with torch.no_grad(), ops.forced(KERNEL):
        weight, bias = torch.ops.upconv._grad_weight_and_bias(gy, x, *rest)
    torch.testing.assert_close(weight.double(), wanted, equal_nan=True, rtol=1e-5, atol=0)
    assert not torch.isfinite(bias[5])
    assert torch.isfinite(bias[torch.arange(64) != 5]).all()
