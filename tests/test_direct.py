"""The CUDA-core kernel on a GPU: forced, on drawn calls of every kind, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import check_same, distance, poison, precision, serving
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from strategies import Case, cases

import upconv
from upconv import ops
from upconv.planner import direct

pytestmark = pytest.mark.gpu

# Relative to the norm of the result: half a unit of the output's last place for 16-bit types, and
# the rounding of a few hundred additions for the others.
LIMIT = {
    torch.float32: 2e-6,
    torch.float64: 1e-14,
    torch.bfloat16: 3e-3,
    torch.float16: 5e-4,
}
OURS = (upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)
THEIRS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def check(
    ndim: int,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    *rest: object,
    must_serve: bool = True,
) -> torch.Tensor:
    wide = [None if t is None else t.detach().double() for t in (x, w, b)]
    expected = THEIRS[ndim - 1](*wide, *rest)  # type: ignore[arg-type]
    with torch.no_grad(), ops.forced(direct.KERNEL):
        poison(expected.shape, x.dtype)
        y = OURS[ndim - 1](x, w, b, *rest)  # type: ignore[arg-type]
        again = OURS[ndim - 1](x, w, b, *rest)  # type: ignore[arg-type]
        served = serving(ndim, x, w, b, *rest) == direct.KERNEL
    # PyTorch, which has the calls that the kernel refuses, need not repeat itself.
    if served:
        check_same(y, again)
    assert served or not must_serve
    assert distance(y, expected) <= LIMIT[x.dtype]
    return y


@pytest.mark.parametrize("ndim", [1, 2, 3])
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_drawn_calls_equal_pytorch(ndim: int, data: st.DataObject) -> None:
    """Every dtype, groups, unbatched and empty batches, transposed, sliced, expanded operands."""
    case: Case = data.draw(cases(ndim))
    x, w, b = case.tensors("cuda")
    check(ndim, x, w, b, *case.parameters, must_serve=False)


LAYERS = {
    "bilinear": (2, 21, 21, (37, 41), 16, 8, 4, 0, 21, 1),
    "depthwise": (3, 40, 40, (56, 57), 3, 1, 1, 0, 40, 1),
    "multiplier": (2, 24, 72, (31, 64), 4, 2, 1, 0, 24, 1),
    "one output": (2, 56, 1, (61, 50), 9, 3, 4, 2, 1, 1),
    "few inputs": (2, 3, 64, (64, 64), 4, 2, 1, 0, 1, 1),
    "groups": (2, 32, 64, (33, 65), (3, 5), (2, 3), (1, 2), 0, 4, (2, 1)),
    "signal": (3, 1, 1, (5000,), 16, 8, 4, 0, 1, 1),
    "signals": (2, 64, 64, (3001,), 4, 2, 1, 0, 64, 1),
    "volume": (2, 16, 16, (9, 17, 30), (3, 5, 7), 2, (1, 2, 3), 1, 4, 1),
    "large stride": (2, 5, 5, (9, 9), 64, 32, 16, 0, 5, 1),
    "dense": (2, 40, 24, (30, 31), 3, 2, 1, 1, 1, 1),
}


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_some_size(name: str, dtype: torch.dtype) -> None:
    batch, cin, cout, size, kernel, stride, padding, extra, groups, dilation = LAYERS[name]
    each = (kernel,) * len(size) if isinstance(kernel, int) else kernel
    x = torch.randn(batch, cin, *size, device="cuda").to(dtype)
    w = torch.randn(cin, cout // groups, *each, device="cuda").to(dtype)
    b = torch.randn(cout, device="cuda").to(dtype)
    check(len(size), x, w, b, stride, padding, extra, groups, dilation)


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
def test_an_odd_storage_offset_is_read_in_place(dtype: torch.dtype) -> None:
    values = torch.randn(2 * 6 * 20 * 33 + 1, device="cuda").to(dtype)
    x = values[1:].view(2, 6, 20, 33)
    assert x.data_ptr() % 16
    w = torch.randn(6, 1, 4, 4, device="cuda").to(dtype)
    check(2, x, w, None, 2, 1, 0, 6)


def test_an_empty_batch_and_an_unbatched_input() -> None:
    w = torch.randn(4, 1, 4, 4, device="cuda")
    with torch.no_grad(), ops.forced(direct.KERNEL):
        y = upconv.conv_transpose2d(torch.randn(0, 4, 8, 8, device="cuda"), w, None, 2, 1, 0, 4)
    assert y.shape == (0, 4, 16, 16)
    check(2, torch.randn(4, 8, 8, device="cuda"), w, None, 2, 1, 0, 4)


def test_float32_is_exact_where_tf32_is_allowed() -> None:
    """The kernel rounds nothing to TF32: 2^-11 would show."""
    for each in ("tf32", "ieee"):
        x, w = torch.randn(2, 8, 32, 32, device="cuda"), torch.randn(8, 1, 3, 3, device="cuda")
        with precision(each):
            check(2, x, w, None, 1, 1, 0, 8)


def test_gradients_flow_through_the_kernel() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 9, 10, device="cuda", dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 2, 4, 4, device="cuda", dtype=torch.float64, requires_grad=True)
    with ops.forced(direct.KERNEL):
        ours = torch.autograd.grad(
            upconv.conv_transpose2d(x, w, None, 2, 1, 0, 3).square().sum(), (x, w)
        )
    theirs = torch.autograd.grad(F.conv_transpose2d(x, w, None, 2, 1, 0, 3).square().sum(), (x, w))
    for mine, other in zip(ours, theirs, strict=True):
        assert distance(mine, other) <= 1e-12


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("groups", "dense")])
def test_the_gradient_of_the_input(name: str, dtype: torch.dtype) -> None:
    batch, cin, cout, size, kernel, stride, padding, extra, groups, dilation = LAYERS[name]
    each = (kernel,) * len(size) if isinstance(kernel, int) else kernel
    x = torch.zeros(batch, cin, *size, device="cuda", dtype=torch.float64, requires_grad=True)
    w = torch.randn(cin, cout // groups, *each, device="cuda").to(dtype)
    rest = (stride, padding, extra, groups, dilation)
    y = THEIRS[len(size) - 1](x, w.double(), None, *rest)
    gy = torch.randn_like(y).to(dtype)
    (expected,) = torch.autograd.grad(y, x, gy.double())
    lists = [(v,) * len(size) if isinstance(v, int) else v for v in rest[:3]]
    last = (dilation,) * len(size) if isinstance(dilation, int) else dilation
    arguments = (gy, w, x.shape, *lists, groups, last)
    with torch.no_grad(), ops.forced(direct.KERNEL):
        poison(x.shape, dtype)
        got = ops.GRADIENTS["grad_input"](*arguments)
        again = ops.GRADIENTS["grad_input"](*arguments)
    assert torch.equal(got, again)
    assert distance(got, expected) <= LIMIT[dtype]


def test_a_cuda_graph_replays_on_new_values() -> None:
    x, w = torch.randn(4, 8, 32, 32, device="cuda"), torch.randn(8, 1, 4, 4, device="cuda")
    with torch.no_grad(), ops.forced(direct.KERNEL):
        upconv.conv_transpose2d(x, w, None, 2, 1, 0, 8)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = upconv.conv_transpose2d(x, w, None, 2, 1, 0, 8)
        x.normal_()
        w.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
    expected = F.conv_transpose2d(x.double(), w.double(), None, 2, 1, 0, 8)
    assert distance(y, expected) <= LIMIT[torch.float32]


def test_a_tensor_beyond_two_to_the_31_elements() -> None:
    x = torch.randn(3, 8, 4096, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(8, 1, 3, 3, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), ops.forced(direct.KERNEL):
        y = upconv.conv_transpose2d(x, w, None, 3, groups=8)
    assert y.numel() > 2**31
    for part in (slice(0, 32), slice(-32, None)):
        expected = F.conv_transpose2d(x[-1:, :, part].double(), w.double(), None, 3, groups=8)
        rows = slice(0, 96) if part.start == 0 else slice(-96, None)
        assert distance(y[-1:, :, rows], expected) <= LIMIT[torch.bfloat16]
