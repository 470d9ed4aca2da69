"""Gradients that PyTorch's own operators compute, and how ours are part of the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import upconv
from upconv import autograd, functional, ops
from upconv.autograd import ATEN_CONV

LAYERS = (upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)

# On a CPU with AMX, PyTorch's own gradients of these in bfloat16 are wrong in every run or in some.
LAYERS_THAT_GO_WRONG = (
    ((1, 1, 1, 3, 1), (1, 1, 1, 3, 3), (1, 1, 2), (0, 0, 0), (1, 0, 0), (2, 1, 1)),
    ((3, 1, 1, 1), (1, 1, 2, 5), (1, 2), (0, 2), (0, 0), (1, 1)),
    ((3, 3, 1), (3, 3, 3), (3,), (1,), (1,), (1,)),
    ((2, 3, 2, 3, 1), (3, 1, 5, 5, 2), (2, 2, 3), (1, 1, 1), (1, 0, 1), (2, 2, 2)),
)


@pytest.mark.parametrize("layer", LAYERS_THAT_GO_WRONG)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_right_on_every_cpu(layer: Any, dtype: torch.dtype) -> None:
    sizes, kernel, stride, padding, output_padding, dilation = layer
    rest = (None, stride, padding, output_padding, 1, dilation)
    for seed in range(20):
        torch.manual_seed(seed)
        x, w = (torch.randn(size).to(dtype).requires_grad_() for size in (sizes, kernel))
        y = LAYERS[len(stride) - 1](x, w, *rest)
        gy = torch.randn(y.shape).to(dtype)
        for count in (8, 64, 512, 4096):  # what is freed is what the next ones get
            torch.full((count,), float("nan"), dtype=dtype)
        ours = torch.autograd.grad(y, (x, w), gy)
        wide = [t.detach().double().requires_grad_() for t in (x, w)]
        operators = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
        exact = torch.autograd.grad(operators[len(stride) - 1](*wide, *rest), wide, gy.double())
        for gradient, expected in zip(ours, exact, strict=True):
            far = (gradient.double() - expected).abs().max() / expected.abs().max()
            assert float(far) < 2**-6, (seed, gradient, expected)


@pytest.fixture(params=[True, False], ids=["AMX", "no AMX"])
def amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setattr(autograd, "_has_amx", lambda: request.param)
    functional._routes.clear()
    yield request.param
    functional._routes.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "size", [(2, 3, 4, 5), (1, 64, 48, 48)], ids=["a short call", "a long one"]
)
def test_short_calls_are_recorded_where_pytorchs_gradients_are_wrong(
    amx: bool, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, w = torch.randn(size).to(dtype), torch.randn(size[1], 8, 3, 3).to(dtype)
    distrusted = amx and dtype != torch.float32
    for _ in range(2):  # the second call knows its route
        with torch.no_grad():
            assert upconv.conv_transpose2d(x, w).grad_fn is None
        y = upconv.conv_transpose2d(x.requires_grad_(), w)
        pytorchs = "ConvolutionBackward" in type(y.grad_fn).__name__
        if distrusted or size[0] == 2:
            assert pytorchs != distrusted
        (gradient,) = torch.autograd.grad(y.sum(), x)
        exact = F.conv2d(torch.ones_like(y).double(), w.double())
        limit = 2**-7 if dtype != torch.float32 else 1e-5
        assert float((gradient.double() - exact).abs().max()) <= limit * float(exact.abs().max())


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_an_output_without_numbers_has_gradients_of_zero(ndim: int) -> None:
    functional._routes.clear()
    x = torch.randn(2, 4, *[1] * ndim, requires_grad=True)
    w = torch.randn(4, 3, *[2] * ndim, requires_grad=True)
    b = torch.randn(3, requires_grad=True)
    operators = [getattr(torch.ops.upconv, f"conv_transpose{n}d") for n in (1, 2, 3)]
    for call in (LAYERS[ndim - 1], operators[ndim - 1]):
        y = call(x, w, b, [1] * ndim, [1] * ndim)
        assert y.numel() == 0
        for gradient, tensor in zip(
            torch.autograd.grad(y.sum(), (x, w, b)), (x, w, b), strict=True
        ):
            assert torch.equal(gradient, torch.zeros_like(tensor))


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("wanted", ["x", "w", "b", "xwb"])
def test_constant_gradients_are_part_of_the_graph(ndim: int, wanted: str) -> None:
    """Those of a linear loss depend on nothing; a penalty on them has gradients all the same."""
    leaves = {
        "x": torch.randn(2, 32, *[24 // ndim] * ndim),
        "w": torch.randn(32, 32, *[3] * ndim),
        "b": torch.randn(32),
    }
    for name in wanted:
        leaves[name].requires_grad_()
    inputs = [leaves[name] for name in wanted]
    results = []
    for call in (ATEN_CONV[ndim - 1], LAYERS[ndim - 1]):
        with ops.forced("cpu_fprop"):
            y = call(*leaves.values(), [2] * ndim)
            gradients = torch.autograd.grad(y.sum(), inputs, create_graph=True)
            assert [gradient.requires_grad for gradient in gradients] == [wanted != "b"] * len(
                wanted
            )
            if wanted == "b":
                continue
            penalty = sum(gradient.square().sum() for gradient in gradients)
            results.append(torch.autograd.grad(penalty, inputs, allow_unused=True))
    for expected, got in zip(*results, strict=True) if results else ():
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2)


def test_gradients_under_vmap() -> None:
    """Of vectors of a graph that was recorded outside."""
    x, w = torch.randn(2, 32, 32, 32), torch.randn(32, 32, 4, 4, requires_grad=True)
    results = []
    for call in (F.conv_transpose2d, upconv.conv_transpose2d):
        y = call(x, w, None, 2, 1)
        v = torch.ones(3, *y.shape)
        of = lambda g, y=y: torch.autograd.grad(y, w, g, retain_graph=True)[0]  # noqa: E731
        results.append(torch.vmap(of)(v))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-2)


def test_an_empty_batch_of_empty_rows_has_gradients_at_the_first_call_too() -> None:
    functional._routes.clear()
    x, w = torch.zeros(0, 2, 0, requires_grad=True), torch.randn(2, 2, 3, requires_grad=True)
    for _ in range(2):
        y = upconv.conv_transpose1d(x, w, None, 2, 0, 0, 1, 3)
        gx, gw = torch.autograd.grad(y.sum(), (x, w))
        assert gx.shape == x.shape
        assert torch.equal(gw, torch.zeros_like(w))
