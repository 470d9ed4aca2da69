"""The gradients on a CUDA GPU, with the planner's choice and with our kernels forced."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import check_same, distance
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import upconv
from upconv import ops
from upconv.planner import sm90, sm90_wgrad

pytestmark = pytest.mark.gpu

# Relative to the norm of the result: half a unit of the output's last place for 16-bit types, and
# what rounding both operands to TF32 leaves.
LIMIT = {torch.float32: 6e-4, torch.bfloat16: 3e-3, torch.float16: 6e-4}
KERNELS = {"grad_input": sm90.KERNEL, "grad_weight": sm90_wgrad.KERNEL}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def gradient(
    direction: str, gy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rest: tuple[Any, ...]
) -> torch.Tensor:
    if direction == "grad_weight":
        return ops.GRADIENTS[direction](gy, x, w.shape, *rest)
    return ops.GRADIENTS[direction](gy, w, x.shape, *rest)


def reference(
    direction: str, gy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rest: tuple[Any, ...]
) -> torch.Tensor:
    by_weight = direction == "grad_weight"
    other, size = (x, w.shape) if by_weight else (w, x.shape)
    return ops._aten_gradient(direction, gy, other, size, *rest)


def poison(*shapes: torch.Size, dtype: torch.dtype) -> None:
    """Leaves NaNs in the memory that the next allocations will get, workspaces included."""
    _ = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for shape in shapes]
    torch.full((32 * 2**20,), float("nan"), device="cuda")


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    pair = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * 2))  # noqa: E731
    direction = draw(st.sampled_from(list(KERNELS)))
    kernel = (draw(st.integers(1, 5)), draw(st.integers(1, 7)))
    dilation = pair(1, 3)
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    stride = (1, 1) if direction == "grad_input" else pair(1, 3)
    extra = [0, 0] if direction == "grad_input" else [max(stride) - 1, max(dilation) - 1]
    return {
        "direction": direction,
        "dtype": draw(st.sampled_from(list(LIMIT))),
        "batch": draw(st.integers(1, 9)),
        "cin": draw(st.integers(8, 140)),
        "cout": draw(st.integers(8, 140)),
        "size": (draw(st.integers(1, 40)), draw(st.integers(1, 140))),
        "kernel": kernel,
        "stride": stride,
        "padding": tuple(draw(st.integers(0, min(r, 3))) for r in reach),
        "output_padding": tuple(draw(st.integers(0, max(0, e))) for e in extra),
        "dilation": dilation,
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=300, deadline=None, derandomize=True, phases=[Phase.generate])
@given(calls())
def test_the_forced_kernels_equal_float64_and_repeat_themselves(c: dict[str, Any]) -> None:
    torch.manual_seed(c["seed"])
    x = torch.randn(c["batch"], c["cin"], *c["size"], device="cuda").to(c["dtype"])
    w = torch.randn(c["cin"], c["cout"], *c["kernel"], device="cuda").to(c["dtype"])
    rest = (c["stride"], c["padding"], c["output_padding"], 1, c["dilation"])
    try:
        y = F.conv_transpose2d(x.to("meta"), w.to("meta"), None, *rest)
        F.conv_transpose2d(x[:1].cpu().float(), w.cpu().float(), None, *rest)
    except RuntimeError:
        assume(False)
    assume(min(y.shape) > 0)
    gy = torch.randn(y.shape, device="cuda").to(c["dtype"])
    direction = c["direction"]
    with torch.no_grad(), ops.forced(KERNELS[direction]):
        poison(x.shape, w.shape, dtype=x.dtype)
        result = gradient(direction, gy, x, w, rest)
        again = gradient(direction, gy, x, w, rest)
    check_same(result, again)
    expected = reference(direction, gy.double(), x.double(), w.double(), rest)
    assert distance(result, expected) <= LIMIT[x.dtype]
    assert result.is_contiguous()


WEIGHT_LAYERS = {
    "1-D, dilated": ((3, 32, 1000), 64, (5,), 1, 0, 3, 1),
    "3-D": ((2, 48, 6, 9, 40), 24, (3, 3, 3), 1, 1, 1, 1),
    "3-D, stride 2": ((2, 32, 5, 8, 24), 32, (3, 5, 7), 2, 1, 1, 1),
    "groups": ((4, 32, 20, 48), 64, (3, 5), (2, 3), (1, 2), (2, 1), 4),
    "stride 5": ((3, 32, 9, 40), 16, (3, 3), 5, 1, 2, 1),
    "odd width": ((3, 40, 7, 33), 100, (4, 4), 2, 1, 1, 1),
    "channels on 8 bytes": ((3, 64, 20, 64), 64, (3, 3), 1, 0, 1, 1),
    "channels on 4 bytes": ((2, 64, 512), 128, (3,), 1, 0, 1, 1),
    "volumes on 16 bytes": ((2, 48, 6, 8, 32), 24, (3, 3, 3), 1, 0, 1, 1),
    "images side by side": ((9, 64, 8, 8), 64, (4, 4), 2, 1, 1, 1),
    "kernel = stride": ((5, 128, 16, 32), 64, (2, 2), 2, 0, 1, 1),
    "odd rows": ((5, 72, 13, 13), 128, (3, 3), 1, 1, 1, 1),
    "odd rows, stride 2": ((3, 64, 28, 56), 64, (3, 3), 2, 1, 1, 1),
    "odd rows, no padding": ((3, 64, 9, 32), 96, (3, 3), 2, 0, 1, 1),
    "odd rows, images side by side": ((9, 64, 16, 16), 32, (5, 5), 2, 2, 1, 1),
    "odd rows, 1-D, dilated": ((3, 32, 1024), 64, (3,), 2, 1, 2, 1),
    "odd rows, 3-D": ((2, 32, 6, 9, 32), 64, (3, 3, 3), 2, 1, 1, 1),
    "odd rows, 3-D, dilated": ((2, 32, 4, 8, 32), 24, (3, 3, 3), 2, 1, 2, 1),
}


@pytest.mark.parametrize("name", WEIGHT_LAYERS)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_the_weights_gradient_of_other_layers(name: str, dtype: torch.dtype) -> None:
    size, cout, kernel, *options, groups = WEIGHT_LAYERS[name]
    ndim = len(kernel)
    each = [list(o) if isinstance(o, tuple) else [o] * ndim for o in options]
    stride, padding, dilation = each
    torch.manual_seed(0)
    x = torch.randn(size, device="cuda").to(dtype)
    w = torch.randn(size[1], cout // groups, *kernel, device="cuda").to(dtype)
    rest = (stride, padding, [0] * ndim, groups, dilation)
    forward = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[ndim - 1]
    gy = torch.randn_like(forward(x, w, None, *rest))
    with torch.no_grad(), ops.forced(sm90_wgrad.KERNEL):
        poison(x.shape, w.shape, dtype=x.dtype)
        result = gradient("grad_weight", gy, x, w, rest)
    expected = reference("grad_weight", gy.double(), x.double(), w.double(), rest)
    assert distance(result, expected) <= LIMIT[dtype]


INPUT_LAYERS = {
    "rows of 2 mod 4": ((3, 64, 40, 96), 64, (3, 3), 1, 0, 1, 1),
    "odd rows": ((2, 32, 21, 33), 64, (3, 4), 1, 1, 1, 1),
    "1-D": ((3, 32, 1000), 64, (5,), 1, 0, 3, 1),
    "1-D, odd, stride 2": ((3, 40, 501), 32, (3,), 2, 1, 2, 1),
    "3-D": ((2, 48, 6, 9, 40), 24, (3, 3, 3), 1, 0, 1, 1),
    "3-D, odd, stride 2": ((2, 32, 5, 8, 24), 32, (3, 3, 3), 2, 1, 2, 1),
    "groups, strides 2 and 3": ((4, 32, 20, 48), 64, (3, 5), (2, 3), (1, 2), (2, 1), 4),
    "stride 5": ((3, 32, 9, 40), 16, (3, 3), 5, 1, 2, 1),
    "small images": ((9, 64, 7, 5), 64, (3, 3), 1, 0, 1, 1),
}
"""Gradients whose rows do not begin on 16 bytes."""


@pytest.mark.parametrize("name", INPUT_LAYERS)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_the_inputs_gradient_where_rows_do_not_begin_on_16_bytes(
    name: str, dtype: torch.dtype
) -> None:
    size, cout, kernel, *options, groups = INPUT_LAYERS[name]
    ndim = len(kernel)
    each = [list(o) if isinstance(o, tuple) else [o] * ndim for o in options]
    stride, padding, dilation = each
    torch.manual_seed(0)
    x = torch.randn(size, device="cuda").to(dtype)
    w = torch.randn(size[1], cout // groups, *kernel, device="cuda").to(dtype)
    rest = (stride, padding, [0] * ndim, groups, dilation)
    forward = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[ndim - 1]
    y = forward(x, w, None, *rest)
    around = torch.full((y.numel() + 8192,), float("nan"), device="cuda", dtype=dtype)
    gy = around[4096 : 4096 + y.numel()].view(y.shape).normal_()  # NaN before and behind it
    with torch.no_grad(), ops.forced(sm90.KERNEL):
        poison(x.shape, w.shape, dtype=x.dtype)
        result = gradient("grad_input", gy, x, w, rest)
    expected = reference("grad_input", gy.double(), x.double(), w.double(), rest)
    assert distance(result, expected) <= LIMIT[dtype]


LAYERS = {
    "stride 1": ((4, 64, 96, 160), 64, 3, 1, 0),
    "phases": ((8, 64, 32, 48), 64, 4, 2, 1),
    "kernel = stride": ((4, 128, 64, 64), 64, 2, 2, 0),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_errors_are_no_larger_than_pytorchs(name: str, dtype: torch.dtype) -> None:
    size, cout, kernel, stride, padding = LAYERS[name]
    x = torch.randn(size, device="cuda").to(dtype)
    w = torch.randn(size[1], cout, kernel, kernel, device="cuda").to(dtype)
    rest = ([stride] * 2, [padding] * 2, [0, 0], 1, [1, 1])
    gy = torch.randn_like(F.conv_transpose2d(x, w, None, *rest))
    for direction, kernel_name in KERNELS.items():
        if direction == "grad_input" and stride > 1:
            continue
        expected = reference(direction, gy.double(), x.double(), w.double(), rest)
        with torch.no_grad(), ops.forced(kernel_name):
            ours = distance(gradient(direction, gy, x, w, rest), expected)
        assert ours <= 1.1 * distance(reference(direction, gy, x, w, rest), expected)


def layer(cls: type[torch.nn.Module], **options: Any) -> tuple[torch.Tensor, torch.nn.Module]:
    torch.manual_seed(0)
    x = torch.randn(8, 64, 40, 56, device="cuda")
    return x, cls(64, 48, 3, 1, 1, **options).cuda()  # type: ignore[call-arg]


def test_only_the_gradients_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x, module = layer(upconv.ConvTranspose2d)
    asked: list[str] = []
    plan_of = ops.plans.plan_of

    def watched(key: list[int]) -> object:
        asked.append(ops.plans.problem_of(key).direction)
        return plan_of(key)

    monkeypatch.setattr(ops.plans, "plan_of", watched)
    # The operator itself: the function leaves a layer as small as this one to PyTorch.
    run = partial(ops.FORWARD[1], weight=module.weight, bias=module.bias, padding=(1, 1))
    ops.clear_plans()
    run(x).sum().backward()
    assert "grad_weight" in asked
    assert "grad_input" not in asked
    asked.clear()
    ops.clear_plans()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    run(x.requires_grad_()).sum().backward()
    assert "grad_input" in asked
    assert "grad_weight" not in asked


@pytest.mark.parametrize("forced", [None, *KERNELS.values()])
def test_a_training_step_equals_pytorchs(forced: str | None) -> None:
    x, module = layer(torch.nn.ConvTranspose2d)
    _, fast = layer(upconv.ConvTranspose2d)
    fast.load_state_dict(module.state_dict())
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    with ops.forced(forced):
        fast(x1).square().mean().backward()
    module(x2).square().mean().backward()
    for ours, theirs in zip((x1, *fast.parameters()), (x2, *module.parameters()), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert distance(ours.grad, theirs.grad.double()) < 2e-3


def test_double_backward() -> None:
    x, fast = layer(upconv.ConvTranspose2d)
    _, module = layer(torch.nn.ConvTranspose2d)
    module.load_state_dict(fast.state_dict())
    results = []
    for network in (fast, module):
        mine = x.clone().requires_grad_()
        with ops.forced(sm90_wgrad.KERNEL):
            (first,) = torch.autograd.grad(network(mine).square().mean(), mine, create_graph=True)
            first.square().sum().backward()
        assert mine.grad is not None
        results.append((mine.grad, network.weight.grad))  # type: ignore[union-attr]
    for ours, theirs in zip(*results, strict=True):
        assert distance(ours, theirs.double()) < 5e-3  # type: ignore[arg-type, union-attr]


def test_autocast_with_a_grad_scaler_and_compile() -> None:
    x, module = layer(upconv.ConvTranspose2d)
    _, plain = layer(torch.nn.ConvTranspose2d)
    plain.load_state_dict(module.state_dict())
    compiled = torch.compile(module, fullgraph=True)
    scaler = torch.amp.GradScaler("cuda")
    with ops.forced(sm90_wgrad.KERNEL):
        for network in (compiled, plain):
            with torch.autocast("cuda", torch.float16):
                loss = network(x).float().square().mean()
            scaler.scale(loss).backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert distance(ours.grad, theirs.grad.double()) < 5e-3


def test_a_cuda_graph_of_a_training_step() -> None:
    x, module = layer(upconv.ConvTranspose2d)
    gy = torch.randn_like(module(x))
    rest = ([1, 1], [1, 1], [0, 0], 1, [1, 1])
    with torch.no_grad(), ops.forced(sm90_wgrad.KERNEL):
        gradient("grad_weight", gy, x, module.weight, rest)  # type: ignore[arg-type]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = gradient("grad_weight", gy, x, module.weight, rest)  # type: ignore[arg-type]
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
    expected = reference("grad_weight", gy.double(), x.double(), module.weight.double(), rest)  # type: ignore[operator]
    assert distance(result, expected) <= LIMIT[torch.float32]


def test_the_workspace_is_all_that_is_allocated() -> None:
    x, module = layer(upconv.ConvTranspose2d)
    gy = torch.randn_like(module(x))
    rest = ([1, 1], [1, 1], [0, 0], 1, [1, 1])
    with torch.no_grad(), ops.forced(sm90_wgrad.KERNEL):
        gradient("grad_weight", gy, x, module.weight, rest)  # type: ignore[arg-type]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradient("grad_weight", gy, x, module.weight, rest)  # type: ignore[arg-type]
    assert torch.cuda.max_memory_allocated() - before <= 65 * 2**20


def test_unbatched_and_one_dimensional_inputs() -> None:
    x = torch.randn(32, 500, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(32, 16, 8, device="cuda", dtype=torch.bfloat16)
    rest = ([4], [2], [0], 1, [1])
    gy = torch.randn_like(F.conv_transpose1d(x, w, None, *rest))
    with torch.no_grad(), ops.forced(sm90_wgrad.KERNEL):
        result = gradient("grad_weight", gy, x, w, rest)
    expected = reference("grad_weight", gy.double(), x.double(), w.double(), rest)
    assert distance(result, expected) <= LIMIT[torch.bfloat16]
