"""The Hopper kernels for patches on a GPU: layers whose kernel is their stride, all directions."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import (
    between_nans,
    check_same,
    check_weight_gradients,
    distance,
    poison,
    precision,
    serving,
)
from gpu_layers import OURS, PYTORCHS, check_tilings
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import upconv
from upconv import ops, plans
from upconv.planner import H200, Problem, make_plan, sm90_patch, sm90_patch_wgrad

pytestmark = pytest.mark.gpu

LIMIT = {torch.float32: 6e-4, torch.bfloat16: 3e-3, torch.float16: 6e-4}
"""Relative to the norm of the result: half a unit of the output's last place for 16-bit types, and
what rounding both operands to TF32 leaves."""
STRICT_LIMIT = 1e-6
"""The same for float32 that must not be rounded."""
DIRECTIONS = ("forward", "grad_input", "grad_weight")
KERNELS = (sm90_patch.KERNEL, sm90_patch.KERNEL, sm90_patch_wgrad.KERNEL)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    ndim = draw(st.sampled_from([1, 2, 2, 2, 3]))
    back, dtype = draw(st.booleans()), draw(st.sampled_from(list(LIMIT)))
    short = back and dtype != torch.float32 and ndim > 1 and draw(st.booleans())
    unit = 4 if back and dtype != torch.float32 and not short else 2
    widest = 8 if short else 1200 // unit if ndim == 1 else 50
    rows = draw(st.lists(st.integers(1, 40 if ndim == 2 else 9), min_size=2, max_size=2))
    steps = draw(st.lists(st.integers(1, 5), min_size=2, max_size=2))
    if short:  # below patches of 2 x 2
        steps[ndim - 2] = 2
    kernel = (*steps[: ndim - 1], 2 if back else draw(st.sampled_from([2, 2, 4, 8])))
    size = [*rows[: ndim - 1], unit * draw(st.integers(1, widest))]
    # Images of the forward pass have a multiple of 4 pixels.
    while not back and torch.Size(size).numel() % 4:
        size[-1] *= 2
    last = not back and ndim > 1 and draw(st.booleans())
    step = 8 if last else 1
    if last and draw(st.booleans()):
        size[-1], kernel = draw(st.integers(1, 60)), (*kernel[:-1], draw(st.integers(2, 5)))
    # Two channels are a row of planes that are no multiple of 16 bytes.
    paired = not (back or last) and torch.Size(size).numel() * dtype.itemsize % 16 != 0
    even = 2 if paired else step
    return {
        "back": back,
        "last": last,
        "dtype": dtype,
        "strict": dtype == torch.float32 and not last and draw(st.booleans()),
        "batch": draw(st.integers(1, 20)),
        "cin": draw(st.integers(8 // even, 300 // even)) * even,
        "cout": draw(st.integers(8 // step, 160 // step)) * step,
        "size": tuple(size),
        "kernel": kernel,
        "bias": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=400, deadline=None, derandomize=True, phases=[Phase.generate])
@given(calls())
def test_the_forced_kernel_equals_float64_and_repeats_itself(c: dict[str, Any]) -> None:
    torch.manual_seed(c["seed"])
    ndim, kernel, dtype = len(c["size"]), c["kernel"], c["dtype"]
    w = torch.randn(c["cin"], c["cout"], *kernel, device="cuda").to(dtype)
    shape = (c["batch"], c["cin"], *c["size"])
    out = (c["batch"], c["cout"], *(s * k for s, k in zip(c["size"], kernel, strict=True)))
    rest = (kernel, (0,) * ndim, (0,) * ndim, 1, (1,) * ndim)
    layout = torch.channels_last if ndim == 2 else torch.channels_last_3d
    with (
        torch.no_grad(),
        ops.forced(sm90_patch.KERNEL),
        precision("ieee" if c["strict"] else "tf32"),
    ):
        if c["back"]:
            sizes = (c["batch"], c["cin"], c["cout"], c["size"], kernel, kernel)
            asked = {"dtype": str(dtype)[6:], "tf32": not c["strict"], "direction": "grad_input"}
            assert sm90_patch.refusal(Problem.of(*sizes, **asked), H200) is None
            gy = between_nans(out, dtype)
            poison(torch.Size(shape), dtype)
            result, again = (ops.GRADIENTS["grad_input"](gy, w, shape, *rest) for _ in range(2))
            expected = ops._aten_gradient("grad_input", gy.double(), w.double(), shape, *rest)
        else:
            x = between_nans(shape, dtype)
            if c["last"]:
                x = x.contiguous(memory_format=layout)
            bias = torch.randn(c["cout"], device="cuda").to(dtype) if c["bias"] else None
            dense = not c["last"] or min(c["size"]) * c["batch"] > 1  # else both layouts
            assert not dense or serving(ndim, x, w, bias, kernel) == sm90_patch.KERNEL
            poison(torch.Size(out), dtype)
            result, again = (OURS[ndim - 1](x, w, bias, kernel) for _ in range(2))
            wide = None if bias is None else bias.double()
            expected = PYTORCHS[ndim - 1](x.double(), w.double(), wide, kernel)
    check_same(result, again)
    assert distance(result, expected) <= (STRICT_LIMIT if c["strict"] else LIMIT[dtype])
    # One pixel, or one channel, has both layouts.
    assert result.is_contiguous(memory_format=layout if c["last"] else torch.contiguous_format)


@st.composite
def wide_problems(draw: st.DrawFn) -> Problem:
    """Forward, patches 2 wide."""
    ndim, dtype = draw(st.sampled_from([1, 2, 2, 2, 3])), draw(st.sampled_from(list(LIMIT)))
    rows = [draw(st.integers(1, 30 if ndim == 2 else 9)) for _ in range(ndim - 1)]
    kernel = (*[draw(st.sampled_from([1, 2, 2, 2, 3])) for _ in rows], 2)
    problem = Problem.of(
        draw(st.integers(1, 20)),
        2 * draw(st.integers(4, 150)),
        draw(st.integers(8, 160)),
        (*rows, 2 * draw(st.integers(1, 300 if ndim == 1 else 40))),
        kernel,
        kernel,
        bias=draw(st.booleans()),
        dtype=str(dtype)[6:],
        tf32=True,
    )
    assume(sm90_patch.refusal(problem, H200) is None)
    return problem


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(wide_problems(), st.integers(0, 2**31))
def test_every_tiling_equals_float64(problem: Problem, seed: int) -> None:
    found = sm90_patch.tilings(problem.in_three(), plans.cuda_hardware(0))
    records = map(sm90_patch.record, found)
    limit = LIMIT[getattr(torch, problem.dtype)]
    check_tilings(problem, sm90_patch.KERNEL, records, seed, limit)


@st.composite
def weight_problems(draw: st.DrawFn) -> Problem:
    ndim, dtype = draw(st.sampled_from([1, 2, 2, 2, 3])), draw(st.sampled_from(list(LIMIT)))
    rows = draw(st.lists(st.integers(1, 40 if ndim == 2 else 9), min_size=2, max_size=2))
    steps = draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    # Every other row may begin between two vectors, but no image.
    vector = 16 // dtype.itemsize // (1 if prod(rows[: ndim - 1]) % 2 else 2)
    width = vector * draw(st.integers(1, 200 if ndim == 1 else 20))
    kernel = (*steps[: ndim - 1], 2)
    return Problem.of(
        draw(st.integers(1, 20)),
        draw(st.integers(8, 300)),
        draw(st.integers(8, 200)),
        (*rows[: ndim - 1], width),
        kernel,
        kernel,
        dtype=str(dtype)[6:],
        tf32=True,
        direction="grad_weight",
    )


@settings(max_examples=200, deadline=None, derandomize=True, phases=[Phase.generate])
@given(weight_problems(), st.integers(0, 2**31))
def test_the_gradients_of_weight_and_bias_equal_float64(problem: Problem, seed: int) -> None:
    limit = LIMIT[getattr(torch, problem.dtype)]
    check_weight_gradients(problem, sm90_patch_wgrad.KERNEL, seed, limit)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_errors_of_weight_and_bias_are_no_larger_than_pytorchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 128, 96, 96, device="cuda").to(dtype)
    gy = torch.randn(8, 64, 192, 192, device="cuda").to(dtype)
    rest = ([2, 2], [0, 0], [0, 0], 1, [1, 1])
    shape = (128, 64, 2, 2)
    wanted = ops._aten_gradient("grad_weight", gy.double(), x.double(), shape, *rest)
    sums = gy.double().sum([0, 2, 3])
    theirs = ops._aten_gradient("grad_weight", gy, x, shape, *rest)
    with torch.no_grad(), ops.forced(sm90_patch_wgrad.KERNEL):
        weight, bias = torch.ops.upconv._grad_weight_and_bias(gy, x, shape, *rest)
    assert distance(weight, wanted) <= 1.1 * distance(theirs, wanted)
    assert distance(bias, sums) <= 1.1 * distance(gy.sum([0, 2, 3]), sums)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("size", [(4, 256, 32, 32), (40, 64, 14, 16), (40, 64, 14, 14)])
def test_errors_are_no_larger_than_pytorchs(size: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(size, device="cuda").to(dtype)
    w = torch.randn(size[1], 96, 2, 2, device="cuda").to(dtype)
    b = torch.randn(96, device="cuda").to(dtype)
    expected = F.conv_transpose2d(x.double(), w.double(), b.double(), 2)
    with torch.no_grad(), ops.forced(sm90_patch.KERNEL):
        ours = distance(upconv.conv_transpose2d(x, w, b, 2), expected)
    assert ours <= 1.05 * distance(F.conv_transpose2d(x, w, b, 2), expected)


@pytest.mark.parametrize("direction", DIRECTIONS[:2])
@pytest.mark.parametrize("size", [(14, 14), (6, 10), (18, 6), (8, 8)])
def test_a_nan_spoils_its_own_patch_alone(size: tuple[int, int], direction: str) -> None:
    """In 16 bits, boxes have more than their pixels: of other channels, rows and images."""
    torch.manual_seed(0)
    w = torch.randn(70, 48, 2, 2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(9, 70, *size, device="cuda", dtype=torch.bfloat16)
    gy = torch.randn(9, 48, *(2 * s for s in size), device="cuda", dtype=torch.bfloat16)
    for spoilt in (x, gy):
        spoilt[::2, 1::3, 0, 0] = spoilt[1::4, ::5, -1, -1] = float("nan")
    rest = ([2, 2], [0, 0], [0, 0], 1, [1, 1])
    with torch.no_grad(), ops.forced(sm90_patch.KERNEL):
        if direction == "forward":
            got = upconv.conv_transpose2d(x, w, None, 2)
            expected = F.conv_transpose2d(x.double(), w.double(), None, 2)
        else:
            got = ops.GRADIENTS["grad_input"](gy, w, x.shape, *rest)
            expected = F.conv2d(gy.double(), w.double(), None, 2)
    assert torch.equal(got.isnan(), expected.isnan())
    assert distance(got.nan_to_num(), expected.nan_to_num()) <= LIMIT[torch.bfloat16]


@pytest.mark.parametrize("size", [(4, 512, 32, 32), (40, 64, 14, 14), (2, 64, 16, 20, 16)])
def test_errors_of_strict_float32_are_no_larger_than_pytorchs(size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ndim = len(size) - 2
    x = torch.randn(size, device="cuda")
    w = torch.randn(size[1], 96, *[2] * ndim, device="cuda")
    exact = PYTORCHS[ndim - 1](x.double(), w.double(), None, 2)
    gy = torch.randn(exact.shape, device="cuda")
    rest = ([2] * ndim, [0] * ndim, [0] * ndim, 1, [1] * ndim)
    gradient = ops._aten_gradient("grad_input", gy.double(), w.double(), x.shape, *rest)
    with torch.no_grad(), precision("ieee"):
        theirs = PYTORCHS[ndim - 1](x, w, None, 2)
        their_gradient = ops._aten_gradient("grad_input", gy, w, x.shape, *rest)
        with ops.forced(sm90_patch.KERNEL):
            assert serving(ndim, x, w, None, (2,) * ndim) == sm90_patch.KERNEL
            y = OURS[ndim - 1](x, w, None, 2)
            gx = ops.GRADIENTS["grad_input"](gy, w, x.shape, *rest)
    assert distance(y, exact) <= distance(theirs, exact)
    assert distance(gx, gradient) <= distance(their_gradient, gradient)


def test_strict_float32_is_exact_for_numbers_of_every_size() -> None:
    """FP16, of which the kernel makes float32, ends at 65504. Each pixel is of another size; no
    error is larger than float32's own, whatever lies beside it. In half of the images the second
    half of the channels is of another size still."""
    torch.manual_seed(0)
    sizes = 10.0 ** (70 * torch.rand(4, 1, 12, 16, device="cuda", dtype=torch.double) - 36)
    x = torch.randn(4, 80, 12, 16, device="cuda") * sizes
    x[2:, 40:] *= 10.0 ** (36 - 70 * torch.rand(2, 1, 12, 16, device="cuda", dtype=torch.double))
    x = x.clamp(-1e36, 1e36).float()
    w = torch.randn(80, 24, 2, 2, device="cuda")
    with torch.no_grad(), ops.forced(sm90_patch.KERNEL), precision("ieee"):
        y = upconv.conv_transpose2d(x, w, None, 2)
    expected = F.conv_transpose2d(x.double(), w.double(), None, 2)
    largest = F.conv_transpose2d(x.double().abs(), w.double().abs(), None, 2)
    assert float(((y - expected).abs() / largest).max()) < 4e-7


def test_a_training_step_of_a_unet_layer() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 48, 48, device="cuda")
    plain = torch.nn.ConvTranspose2d(64, 32, 2, 2).cuda()
    fast = upconv.ConvTranspose2d(64, 32, 2, 2).cuda()
    fast.load_state_dict(plain.state_dict())
    gradients = []
    for direction, kernel in zip(DIRECTIONS, KERNELS, strict=True):
        problem = Problem.of(4, 64, 32, (48, 48), 2, 2, tf32=True, direction=direction)
        assert make_plan(problem, H200).kernel == kernel
    for module in (plain.double(), fast):
        inputs = x.to(module.weight.dtype).requires_grad_()
        (module(inputs) ** 2).sum().backward()
        gradients.append([inputs.grad, module.weight.grad, module.bias.grad])
    for expected, got in zip(*gradients, strict=True):
        assert distance(got, expected) <= 2 * LIMIT[torch.float32]


@pytest.mark.parametrize("direction", ["forward", "grad_input"])
def test_a_tensor_beyond_two_to_the_32_elements(direction: str) -> None:
    """The layer's output has as many; of it and of the gradient, the first and the last rows."""
    w = torch.randn(8, 64, 2, 2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 8, 4096, 4160, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), ops.forced(sm90_patch.KERNEL):
        y = upconv.conv_transpose2d(x, w, None, 2)
        assert y.numel() > 2**32
        rest = ([2, 2], [0, 0], [0, 0], 1, [1, 1])
        got = y if direction == "forward" else ops.GRADIENTS["grad_input"](y, w, x.shape, *rest)
    for rows in (slice(0, 8), slice(-8, None)):
        part = x[:, :, rows].double()
        expected = F.conv_transpose2d(part, w.double(), None, 2)
        of = slice(0, 16) if rows.start == 0 else slice(-16, None)
        if direction == "grad_input":
            expected = F.conv2d(y[:, :, of].double(), w.double(), None, 2)
            of = rows
        assert distance(got[:, :, of], expected) <= LIMIT[torch.bfloat16]
