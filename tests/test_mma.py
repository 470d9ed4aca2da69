"""The mma.sync kernel on a CUDA GPU, forced wherever it is legal, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import allocations, check_same, distance, poison, precision, serving
from gpu_layers import check_forced, check_tilings
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from mma_layers import problems

import upconv
from upconv import ops, plans
from upconv.planner import Candidate, Problem, mma, mma_tiling

pytestmark = pytest.mark.gpu

MMA = "mma_fprop"
OURS = (upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)
THEIRS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
# Relative to the norm of the result: half a unit of the output's last place for 16-bit types, what
# rounding both operands to TF32 leaves (2^-11 each, averaging out over the sum), and for strict
# float32 the 22 bits of two TF32 numbers.
LIMIT = {
    (torch.float32, "tf32"): 5e-4,
    (torch.float32, "ieee"): 1e-6,
    (torch.bfloat16, "tf32"): 3e-3,
    (torch.float16, "tf32"): 5e-4,
}
FEW = 8
"""Outputs that may all be off by half a unit, which is up to 2^-8 of a bfloat16. Over more of them
that averages out."""


def limit_for(kind: Any, y: torch.Tensor) -> float:
    few = kind[0] == torch.bfloat16 and y.numel() < FEW
    return 2**-8 if few else LIMIT[kind]


def limit_of(problem: Problem) -> float:
    return LIMIT[getattr(torch, problem.dtype), "ieee" if problem.strict else "tf32"]


@pytest.fixture(autouse=True)
def _ampere() -> Iterator[None]:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    yield
    conv.fp32_precision = before


def error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *rest: object) -> float:
    """Distance from a float64 reference, relative to its norm; infinite where y has a NaN."""
    b, *parameters = rest
    wide = [t.double() if isinstance(t, torch.Tensor) else None for t in (x, w, b)]
    expected = THEIRS[w.dim() - 3](*wide, *parameters)
    return distance(y, expected)


@st.composite
def calls(
    draw: st.DrawFn,
    cin: tuple[int, int] = (4, 100),
    cout: tuple[int, int] = (4, 140),
    sizes: tuple[int, int, int] = (800, 50, 16),
    kernels: tuple[int, int, int] = (5, 5, 5),
    most_dilation: int = 3,
    groups: tuple[int, ...] = (1, 1, 2, 4),
) -> dict[str, object]:
    """Channels of a group as the least and the most, sizes and kernels by dimensions."""
    ndim = draw(st.integers(1, 3))
    each = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * ndim))  # noqa: E731
    stride, dilation = each(1, 4), each(1, most_dilation)
    group_count = draw(st.sampled_from(groups))
    return {
        "kind": draw(st.sampled_from(list(LIMIT))),
        "batch": draw(st.integers(1, 5)),
        "cin": group_count * draw(st.integers(*cin)),
        "cout": draw(st.integers(*cout)),
        "size": each(1, sizes[ndim - 1]),
        "kernel": each(1, kernels[ndim - 1]),
        "stride": stride,
        "padding": each(0, 3),
        "output_padding": tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        ),
        "dilation": dilation,
        "groups": group_count,
        "bias": draw(st.booleans()),
        "layout": draw(st.sampled_from(["contiguous", "odd_offset", "strided", "expanded"])),
        "seed": draw(st.integers(0, 2**31)),
    }


def tensors(c: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(c["seed"])  # type: ignore[arg-type]
    dtype, precision = c["kind"]  # type: ignore[misc]
    torch.backends.cudnn.conv.fp32_precision = precision
    shape = (c["batch"], c["cin"], *c["size"])  # type: ignore[misc]
    x = torch.randn(shape, device="cuda").to(dtype)
    if c["layout"] == "odd_offset":
        x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(shape)
    elif c["layout"] == "strided":
        x = torch.stack([x, x], dim=-1)[..., 0]
    elif c["layout"] == "expanded":
        x = x[:1].expand(shape)
    w = torch.randn(c["cin"], c["cout"], *c["kernel"], device="cuda").to(dtype)  # type: ignore
    cout = c["cout"] * c["groups"]  # type: ignore[operator]
    b = torch.randn(cout, device="cuda").to(dtype) if c["bias"] else None
    return x, w, b


@settings(max_examples=400, deadline=None, derandomize=True, phases=[Phase.generate])
@given(calls())
def test_the_forced_kernel_equals_pytorch(c: dict[str, object]) -> None:
    x, w, b = tensors(c)
    rest = (c["stride"], c["padding"], c["output_padding"], c["groups"], c["dilation"])
    ndim = w.dim() - 2
    try:
        shape = THEIRS[ndim - 1](x.to("meta"), w.to("meta"), None, *rest).shape  # type: ignore
    except RuntimeError:
        assume(False)
    assume(min(shape) > 0)
    assume(prod(shape) < 2**25)
    with torch.no_grad(), ops.forced(MMA):
        # Of strict float32 with too many products, PyTorch's kernel serves, which need not repeat
        # itself: the 2,064 of one draw differed in the last bits, once in a few runs.
        assume(serving(ndim, x, w, b, *rest) == MMA)
        poison(shape, x.dtype)
        y = OURS[ndim - 1](x, w, b, *rest)  # type: ignore[arg-type]
        again = OURS[ndim - 1](x, w, b, *rest)  # type: ignore[arg-type]
    check_same(y, again)
    assert error(y, x, w, b, *rest) <= limit_for(c["kind"], y)


@settings(max_examples=300, deadline=None, derandomize=True, phases=[Phase.generate])
@given(problems(largest=10**5), st.integers(0, 2**31))
def test_both_directions_equal_float64_and_repeat_themselves(problem: Problem, seed: int) -> None:
    with precision("ieee" if problem.strict else "tf32"):
        assume(isinstance(mma.consider(problem, plans.cuda_hardware(0)), Candidate))
        check_forced(problem, MMA, seed, limit_of(problem))


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(problems(largest=3000), st.randoms(use_true_random=False), st.integers(0, 2**31))
def test_every_tiling_equals_float64(problem: Problem, rng: Random, seed: int) -> None:
    hardware = plans.cuda_hardware(0)
    every = mma_tiling.tilings(mma.works(problem), hardware)
    fitting = [tiling for tiling in every if mma_tiling.fits(tiling, hardware)]
    some = rng.sample(fitting, min(8, len(fitting)))
    records = [mma.record(tiling.work, tiling) for tiling in some]
    with precision("ieee" if problem.strict else "tf32"):
        check_tilings(problem, MMA, records, seed, limit_of(problem))


def test_the_forced_kernel_is_the_one_that_runs() -> None:
    x = torch.randn(2, 24, 9, 10, 11, device="cuda")
    w = torch.randn(24, 7, 3, 2, 4, device="cuda")
    lists = [(2, 2, 2), (0, 0, 0), (0, 0, 0), (1, 1, 1)]
    key = plans.key_of(3, x, w, None, lists, 3)
    assert key is not None
    with ops.forced(MMA):
        assert plans.record(key)[0] == plans.KERNEL_IDS[MMA]


@pytest.mark.parametrize("kind", list(LIMIT))
def test_no_more_error_than_pytorch(kind: tuple[torch.dtype, str]) -> None:
    dtype, precision = kind
    torch.manual_seed(0)
    torch.backends.cudnn.conv.fp32_precision = precision
    x = torch.randn(4, 192, 40, 56, device="cuda").to(dtype)
    w = torch.randn(192, 80, 5, 5, device="cuda").to(dtype)
    with torch.no_grad(), ops.forced(MMA):
        ours = error(upconv.conv_transpose2d(x, w, None, 2), x, w, None, 2)
    theirs = error(F.conv_transpose2d(x, w, None, 2), x, w, None, 2)
    assert ours <= (2.0 if precision == "ieee" else 1.1) * theirs


def test_nothing_is_allocated_beside_output_and_packed_weight() -> None:
    x = torch.randn(4, 64, 40, 57, device="cuda").flatten()[1:].narrow(0, 0, 4 * 64 * 40 * 56)
    x = x.view(4, 64, 40, 56)  # on an odd address
    w = torch.randn(64, 48, 4, 4, device="cuda")
    with torch.no_grad(), ops.forced(MMA):
        upconv.conv_transpose2d(x, w, None, 2, 1)
        with allocations() as taken:
            y = upconv.conv_transpose2d(x, w.clone(), None, 2, 1)
    count, bytes = taken
    assert count == 3, "the copied weight, the packed one, the output"
    assert bytes <= y.numel() * 4 + 4 * w.numel() * 4


def test_cuda_graph_replays_on_new_values() -> None:
    x = torch.randn(2, 32, 12, 20, 16, device="cuda")
    w = torch.randn(32, 16, 3, 3, 3, device="cuda")
    with torch.no_grad(), ops.forced(MMA):
        upconv.conv_transpose3d(x, w, None, 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = upconv.conv_transpose3d(x, w, None, 2)
        x.normal_()
        w.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
    assert error(y, x, w, None, 2) <= LIMIT[torch.float32, "tf32"]


def test_a_zero_batch_and_an_unbatched_input() -> None:
    w = torch.randn(32, 16, 3, device="cuda")
    x = torch.randn(32, 100, device="cuda")
    with torch.no_grad(), ops.forced(MMA):
        assert upconv.conv_transpose1d(x[None][:0], w).shape == (0, 16, 102)
        y = upconv.conv_transpose1d(x, w)
    assert error(y[None], x[None], w, None) <= LIMIT[torch.float32, "tf32"]


def test_a_tensor_beyond_two_to_the_31_elements() -> None:
    x = torch.randn(3, 8, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(8, 16, 1, 1, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), ops.forced(MMA):
        y = upconv.conv_transpose2d(x, w)
    assert y.numel() > 2**31
    for part in (slice(0, 64), slice(-64, None)):
        expected = torch.einsum("chw,co->ohw", x[-1, :, part].double(), w[:, :, 0, 0].double())
        got = y[-1, :, part].double()
        assert float((got - expected).norm() / expected.norm()) <= 3e-3
