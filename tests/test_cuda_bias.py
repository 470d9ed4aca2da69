"""The bias's gradient on a CUDA GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import check_same, distance, poison
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import upconv
from upconv import autograd, ops
from upconv.planner import H200, Problem, make_plan, sm90_wgrad

pytestmark = pytest.mark.gpu

LIMIT = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    if not ops.serve("cuda"):
        pytest.skip("the library cannot be built here")


def check(gy: torch.Tensor, ndim: int) -> None:
    poison(gy.shape[-ndim - 1 : gy.dim() - ndim], gy.dtype)
    result, again = (torch.ops.upconv._grad_bias(gy, ndim) for _ in range(2))
    expected = autograd.aten_bias_gradient(gy.double(), ndim)
    assert result.dtype == gy.dtype
    check_same(result, again)
    # Relative to the numbers that are added: their sum may be close to nothing.
    scale = autograd.aten_bias_gradient(gy.double().square(), ndim).sqrt().norm()
    assert bool(torch.isfinite(result).all())
    limit = LIMIT[gy.dtype]
    assert float((result.double() - expected).norm()) <= limit * float(scale + expected.norm())


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    ndim = draw(st.integers(1, 3))
    batched = draw(st.booleans())
    channels = draw(st.one_of(st.integers(1, 70), st.sampled_from([128, 512, 1030])))
    spatial = [draw(st.integers(1, 20)) for _ in range(ndim - 1)]
    spatial.append(draw(st.one_of(st.integers(1, 70), st.sampled_from([1026, 4099, 40000]))))
    shape = [*([draw(st.integers(1, 9))] if batched else []), channels, *spatial]
    while torch.Size(shape).numel() > 2**26:
        shape[-1] = max(1, shape[-1] // 2)
    dtype = draw(st.sampled_from(list(LIMIT)))
    offset = draw(st.integers(0, 9))
    memory = torch.randn(offset + torch.Size(shape).numel(), device="cuda").to(dtype)
    gy = memory[offset:].view(shape)
    if batched and ndim > 1 and draw(st.booleans()):
        gy = gy.contiguous(memory_format=LAST[ndim])
    return gy, ndim


@settings(max_examples=150, deadline=None, derandomize=True, phases=[Phase.generate])
@given(tensors())
def test_any_tensor_is_summed(drawn: tuple[torch.Tensor, int]) -> None:
    check(*drawn)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("size", [(8, 64, 258, 258), (64, 256, 28, 28), (1, 128, 500, 1001)])
def test_errors_are_no_larger_than_pytorchs(size: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gy = torch.randn(size, device="cuda").to(dtype)
    expected = autograd.aten_bias_gradient(gy.double(), 2)
    ours = distance(torch.ops.upconv._grad_bias(gy, 2), expected)
    assert ours <= 1.1 * distance(autograd.aten_bias_gradient(gy, 2), expected)


def test_what_is_not_dense_or_of_another_dtype_is_pytorchs() -> None:
    for gy in (
        torch.ones(1, 1, 1, 1, device="cuda").expand(2, 5, 7, 9),
        torch.randn(2, 5, 14, 9, device="cuda")[:, :, ::2],
        torch.randn(2, 5, 7, 9, device="cuda", dtype=torch.float64),
        torch.empty(0, 5, 7, 9, device="cuda"),
    ):
        result = torch.ops.upconv._grad_bias(gy, 2)
        torch.testing.assert_close(result, autograd.aten_bias_gradient(gy, 2))


def test_a_backward_pass_takes_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 32, 60, 64, device="cuda")
    w = torch.randn(32, 48, 3, 3, device="cuda", requires_grad=True)
    b = torch.randn(48, device="cuda", requires_grad=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    y = ops.FORWARD[1](x, w, b)
    gy = torch.randn_like(y)
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        y.backward(gy)
    names = {str(event.name) for event in profile.events() or ()}
    assert "upconv::_grad_weight_and_bias" in names
    assert "aten::sum" not in names
    assert b.grad is not None
    assert distance(b.grad, autograd.aten_bias_gradient(gy.double(), 2)) < 1e-6


# Batch, channels, size, kernel, stride, padding: rows on 16 bytes, rows that follow each other as
# one, classes of channels, both phases of stride 2, volumes, one dimension.
LAYERS: list[tuple[Any, ...]] = [
    (4, 32, 48, (20, 64), 3, 1, 1),
    (4, 64, 64, (30, 64), 3, 1, 0),
    (3, 64, 64, (16, 32), (3, 7), 1, 0),
    (4, 64, 32, (33, 32), 2, 2, 0),
    (8, 128, 64, (16, 16), 4, 2, 1),
    (3, 16, 64, (6, 10, 64), 2, 2, 0),
    (5, 32, 64, (640,), 3, 1, 0),
]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_it_comes_with_the_gradient_of_the_weight(
    layer: tuple[Any, ...], dtype: torch.dtype
) -> None:
    batch, channels, out_channels, size, kernel, stride, padding = layer
    torch.manual_seed(0)
    ndim = len(size)
    each = lambda v: [v] * ndim if isinstance(v, int) else list(v)  # noqa: E731
    rest = (each(stride), each(padding), each(0), 1, each(1))
    x = torch.randn(batch, channels, *size, device="cuda").to(dtype)
    w = torch.randn(channels, out_channels, *each(kernel), device="cuda").to(dtype)
    gy = torch.randn_like(autograd.ATEN_CONV[ndim - 1](x, w, None, *rest))
    problem = Problem.of(*layer, dtype=str(dtype)[6:], tf32=True, direction="grad_weight")
    assert make_plan(problem, H200, sm90_wgrad.KERNEL).chosen.with_bias
    expected = [
        autograd.aten_weight_gradient(gy.double(), x.double(), w.shape, *rest),
        autograd.aten_bias_gradient(gy.double(), ndim),
    ]
    limits = ({torch.float32: 1e-3}.get(dtype, LIMIT[dtype]), LIMIT[dtype])
    with torch.no_grad(), ops.forced(sm90_wgrad.KERNEL):
        poison(w.shape, dtype)
        poison((out_channels,), dtype)
        both, again = (
            torch.ops.upconv._grad_weight_and_bias(gy, x, w.shape, *rest) for _ in range(2)
        )
    for result, repeated, wanted, limit in zip(both, again, expected, limits, strict=True):
        assert result.dtype == dtype
        check_same(result, repeated)
        assert distance(result, wanted) <= limit


def test_the_first_call_of_a_process_has_the_bits_of_all_others() -> None:
    """It finds the library of the weight's gradient unloaded."""
    call = """
import torch, upconv
torch.manual_seed(0)
module = upconv.ConvTranspose1d(32, 64, 3).cuda()
x, gy = torch.randn(5, 32, 640, device="cuda"), torch.randn(5, 64, 642, device="cuda")
grads = [torch.autograd.grad(module(x), [module.weight, module.bias], gy) for _ in range(3)]
print(all(torch.equal(a, b) for again in grads[1:] for a, b in zip(grads[0], again)))
"""
    process = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    assert process.stdout.split() == ["True"], process.stderr


def test_an_infinity_stays_in_its_channel() -> None:
    """Channels that follow each other as one are brought together."""
    x = torch.randn(2, 64, 8, 32, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16)
    gy = torch.randn(2, 64, 10, 34, device="cuda", dtype=torch.bfloat16)
    gy[0, 5, 0, 0] = gy[1, 9, -1, -1] = torch.inf
    rest = ([1, 1], [0, 0], [0, 0], 1, [1, 1])
    with torch.no_grad(), ops.forced(sm90_wgrad.KERNEL):
        _, bias = torch.ops.upconv._grad_weight_and_bias(gy, x, w.shape, *rest)
    assert torch.isinf(bias).nonzero().flatten().tolist() == [5, 9]
    assert not bool(torch.isnan(bias).any())


def test_double_backward_and_graphs() -> None:
    x = torch.randn(2, 16, 9, 9, device="cuda", requires_grad=True)
    w, b = torch.randn(16, 8, 3, 3, device="cuda"), torch.randn(8, device="cuda").requires_grad_()
    grads: list[Any] = []
    for function in (ops.FORWARD[1], F.conv_transpose2d):
        (first,) = torch.autograd.grad(function(x, w, b).pow(3).sum(), b, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        grads.append((first.detach(), second))
    for ours, theirs in zip(*grads, strict=True):
        assert distance(ours, theirs.double()) < 5e-3
    gy = torch.randn(3, 40, 31, 33, device="cuda")
    torch.ops.upconv._grad_bias(gy, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = torch.ops.upconv._grad_bias(gy, 2)
    gy.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert distance(result, gy.double().sum((0, 2, 3))) < 1e-5


def test_a_compiler_sees_the_sum() -> None:
    """It can put the sum together with what comes before it."""
    module = upconv.ConvTranspose2d(32, 48, 3).cuda()
    x = torch.randn(4, 32, 60, 64, device="cuda")
    torch.compile(module, fullgraph=True)(x).square().mean().backward()
    assert module.bias is not None
    ours = module.bias.grad
    expected = torch.autograd.grad(module(x).square().mean(), module.bias)[0]
    assert ours is not None
    assert distance(ours, expected.double()) < 2e-3
