"""The Hopper kernel for both phases of a row on a GPU: forward, and the input's gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import distance, serving
from gpu_layers import check_forced, check_tilings
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import upconv
from upconv import ops, plans
from upconv.planner import H200, Candidate, Problem, make_plan, sm90_phases

pytestmark = pytest.mark.gpu

LIMIT = {torch.float32: 6e-4, torch.bfloat16: 3e-3, torch.float16: 6e-4}
"""Relative to the norm of the result: half a unit of the output's last place for 16-bit types, and
what rounding both operands to TF32 leaves."""
GAN = (2, 1, 0)
"""Stride, padding, output padding of a generator's layers, whose kernel is 4."""


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

    taps = draw(st.sampled_from(sm90_phases.TAPS))
    stride = [2] * (ndim - 1) if usual else rows(1, 3)
    output = [draw(st.integers(0, s - 1)) for s in stride]
    problem = Problem.of(
        draw(st.integers(1, 12)),
        draw(st.integers(8, 300)),
        draw(st.integers(8, 200)),
        (*rows(1, 40 if ndim == 2 else 9), 4 * draw(st.integers(1, 300 if ndim == 1 else 24))),
        (*([taps] * (ndim - 1) if usual else rows(1, 6)), taps),
        (*stride, 2),
        (*([1] * (ndim - 1) if usual else rows(0, 3)), 1),
        (*([4 - taps] * (ndim - 1) if usual else output), draw(st.integers(0, 1))),
        bias=draw(st.booleans()),
        dtype=str(dtype)[6:],
        tf32=True,
        direction=draw(st.sampled_from(["forward", "grad_input"])),
    )
    assume(min(problem.out_size) > 0)
    assume(isinstance(sm90_phases.consider(problem, H200), Candidate))
    return problem


@settings(max_examples=500, deadline=None, derandomize=True, phases=[Phase.generate])
@given(problems(), st.integers(0, 2**31))
def test_the_forced_kernel_equals_float64_and_repeats_itself(problem: Problem, seed: int) -> None:
    check_forced(problem, sm90_phases.KERNEL, seed, LIMIT[getattr(torch, problem.dtype)])


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(problems(), st.integers(0, 2**31))
def test_every_tiling_equals_float64(problem: Problem, seed: int) -> None:
    found = sm90_phases.tilings(problem.in_three(), plans.cuda_hardware(0))
    records = map(sm90_phases.record, found)
    limit = LIMIT[getattr(torch, problem.dtype)]
    check_tilings(problem, sm90_phases.KERNEL, records, seed, limit)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("size", [(32, 256, 8, 8), (8, 128, 32, 32), (4, 256, 24, 48)])
def test_errors_are_no_larger_than_pytorchs(size: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(size, device="cuda").to(dtype)
    w = torch.randn(size[1], 96, 4, 4, device="cuda").to(dtype)
    b = torch.randn(96, device="cuda").to(dtype)
    expected = F.conv_transpose2d(x.double(), w.double(), b.double(), *GAN)
    with torch.no_grad(), ops.forced(sm90_phases.KERNEL):
        ours = distance(upconv.conv_transpose2d(x, w, b, *GAN), expected)
    assert ours <= 1.05 * distance(F.conv_transpose2d(x, w, b, *GAN), expected)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_a_weight_that_begins_between_two_vectors(dtype: torch.dtype) -> None:
    """Packing reads the four taps of a row at once."""
    torch.manual_seed(0)
    x = torch.randn(4, 32, 8, 8, device="cuda").to(dtype)
    w = torch.randn(32 * 48 * 16 + 1, device="cuda").to(dtype)[1:].view(32, 48, 4, 4)
    expected = F.conv_transpose2d(x.double(), w.double(), None, *GAN)
    with torch.no_grad(), ops.forced(sm90_phases.KERNEL):
        assert distance(upconv.conv_transpose2d(x, w, None, *GAN), expected) <= LIMIT[dtype]


def test_a_training_step_of_a_generators_layer() -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 512, 8, 8, device="cuda")
    plain = torch.nn.ConvTranspose2d(512, 256, 4, *GAN).cuda()
    fast = upconv.ConvTranspose2d(512, 256, 4, *GAN).cuda()
    fast.load_state_dict(plain.state_dict())
    for direction in ("forward", "grad_input"):
        problem = Problem.of(128, 512, 256, (8, 8), 4, *GAN, tf32=True, direction=direction)
        assert make_plan(problem, H200).kernel == sm90_phases.KERNEL
    gradients = []
    for module in (plain.double(), fast):
        inputs = x.to(module.weight.dtype).requires_grad_()
        (module(inputs) ** 2).sum().backward()
        gradients.append([inputs.grad, module.weight.grad, module.bias.grad])
    for expected, got in zip(*gradients, strict=True):
        assert distance(got, expected) <= 2 * LIMIT[torch.float32]


@pytest.mark.parametrize("direction", ["forward", "grad_input"])
def test_a_tensor_beyond_two_to_the_32_elements(direction: str) -> None:
    """The layer's output has as many; of it and of the gradient, the first and the last rows."""
    w = torch.randn(8, 64, 4, 4, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 8, 4096, 4160, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), ops.forced(sm90_phases.KERNEL):
        assert serving(2, x, w, None, *GAN) == sm90_phases.KERNEL
        y = upconv.conv_transpose2d(x, w, None, *GAN)
        assert y.numel() > 2**32
        rest = ([2, 2], [1, 1], [0, 0], 1, [1, 1])
        got = y if direction == "forward" else ops.GRADIENTS["grad_input"](y, w, x.shape, *rest)
    for rows in (slice(0, 8), slice(-8, None)):
        wide = slice(0, 10) if rows.start == 0 else slice(-10, None)
        if direction == "forward":
            expected = F.conv_transpose2d(x[:, :, wide].double(), w.double(), None, *GAN)
            expected = expected[:, :, :16] if rows.start == 0 else expected[:, :, -16:]
            part = y[:, :, :16] if rows.start == 0 else y[:, :, -16:]
        else:
            of = slice(0, 20) if rows.start == 0 else slice(-20, None)
            expected = F.conv2d(y[:, :, of].double(), w.double(), None, 2, 1)
            expected, part = expected[:, :, rows], got[:, :, rows]
        assert distance(part, expected) <= LIMIT[torch.bfloat16]
