"""Gradients that PyTorch's own operators compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import upconv
from upconv import functional

# On a CPU with AMX, PyTorch's own gradients of these in bfloat16 are wrong in every run or in some.
LAYERS_THAT_GO_WRONG = (
    ((1, 1, 1, 3, 1), (1, 1, 1, 3, 3), (1, 1, 2), (0, 0, 0), (1, 0, 0), (2, 1, 1)),
    ((3, 1, 1, 1), (1, 1, 2, 5), (1, 2), (0, 2), (0, 0), (1, 1)),
    ((3, 3, 1), (3, 3, 3), (3,), (1,), (1,), (1,)),
    ((2, 3, 2, 3, 1), (3, 1, 5, 5, 2), (2, 2, 3), (1, 1, 1), (1, 0, 1), (2, 2, 2)),
)


@pytest.mark.parametrize("layer", LAYERS_THAT_GO_WRONG)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_right_on_every_cpu(
    layer: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else calls as small as these would record their gradients by PyTorch's function.
    monkeypatch.setattr(functional, "WORTH_RECORDING_US", 0.0)
    sizes, kernel, stride, padding, output_padding, dilation = layer
    layers = (upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)
    rest = (None, stride, padding, output_padding, 1, dilation)
    for seed in range(20):
        torch.manual_seed(seed)
        x, w = (torch.randn(size).to(dtype).requires_grad_() for size in (sizes, kernel))
        y = layers[len(stride) - 1](x, w, *rest)
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
