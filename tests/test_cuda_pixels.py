"""What the Hopper kernels whose rows are pixels have in common on a GPU: memory and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import allocations, serving

import upconv
from upconv import ops
from upconv.planner import sm90_patch, sm90_phases, sm90_walk

pytestmark = pytest.mark.gpu

LAYERS = {
    sm90_patch.KERNEL: (2, (2,)),
    sm90_phases.KERNEL: (4, (2, 1)),
    sm90_walk.KERNEL: (3, (1, 1)),
}
"""Kernel; stride, padding."""


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Any:
    """Two tensors and the rest of a call that the kernel serves, in a type that is asked for."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    size, steps = LAYERS[request.param]

    def make(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
        x = torch.randn(4, 64, 32, 32, device="cuda").to(dtype)
        w = torch.randn(64, 32, size, size, device="cuda").to(dtype)
        assert serving(2, x, w, None, *steps) == request.param
        return x, w, (None, *steps)

    with torch.no_grad(), ops.forced(request.param):
        yield make


def test_a_frozen_weight_is_packed_once_and_nothing_else_is_allocated(layer: Any) -> None:
    x, w, rest = layer(torch.float32)
    first = upconv.conv_transpose2d(x, w, *rest)
    with allocations() as taken:
        second = upconv.conv_transpose2d(x, w, *rest)
    w.mul_(2)
    changed = upconv.conv_transpose2d(x, w, *rest)
    assert torch.equal(first, second)
    assert taken == [1, first.numel() * 4], "more than the output was allocated"
    torch.testing.assert_close(changed, 2 * first)


def test_a_cuda_graph_replays_on_new_values(layer: Any) -> None:
    x, w, rest = layer(torch.bfloat16)
    upconv.conv_transpose2d(x, w, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = upconv.conv_transpose2d(x, w, *rest)
    x.copy_(torch.randn_like(x))
    graph.replay()
    expected = upconv.conv_transpose2d(x, w, *rest)
    assert torch.equal(y, expected)
