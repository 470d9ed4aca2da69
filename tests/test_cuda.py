"""The operators on a CUDA GPU, with the planner's choice and with the Hopper kernel forced."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import allocations, check_same, distance, poison, precision
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import upconv
from upconv import ops, plans

pytestmark = pytest.mark.gpu

SM90 = "sm90_wgmma_fprop"
# Relative to the norm of the result: half a unit of the output's last place for 16-bit types, and
# what rounding both operands to TF32 leaves (2^-11 each, averaging out over the sum).
LIMIT = {torch.float32: 5e-4, torch.bfloat16: 3e-3, torch.float16: 5e-4}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *rest: object) -> float:
    """Distance from a float64 reference, relative to its norm; infinite where y has a NaN."""
    b, *parameters = rest
    wide = [t.double() if isinstance(t, torch.Tensor) else None for t in (x, w, b)]
    compute = getattr(F, f"conv_transpose{x.dim() - 2}d")
    return distance(y, compute(*wide, *parameters))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, object]:
    pair = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * 2))  # noqa: E731
    stride, dilation = pair(1, 5), pair(1, 3)
    layout = draw(st.sampled_from(["contiguous", "channels_last", "odd_offset", "strided"]))
    step = 8 if layout == "channels_last" else 1
    return {
        "dtype": draw(st.sampled_from(list(LIMIT))),
        "batch": draw(st.integers(1, 6)),
        "cin": draw(st.integers(8 // step, 160 // step)) * step,
        "cout": draw(st.integers(1, 12) | st.integers(8 // step, 200 // step)) * step,
        "size": (draw(st.integers(1, 48)), draw(st.integers(1, 130))),
        "kernel": pair(1, 6),
        "stride": stride,
        "padding": pair(0, 3),
        "output_padding": tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        ),
        "dilation": dilation,
        "bias": draw(st.booleans()),
        "layout": layout,
        "seed": draw(st.integers(0, 2**31)),
    }


def tensors(c: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(c["seed"])  # type: ignore[arg-type]
    shape = (c["batch"], c["cin"], *c["size"])  # type: ignore[misc]
    x = torch.randn(shape, device="cuda").to(c["dtype"])  # type: ignore[arg-type]
    if c["layout"] == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif c["layout"] == "odd_offset":
        x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(shape)
    elif c["layout"] == "strided":
        x = torch.stack([x, x], dim=-1)[..., 0]
    w = torch.randn(c["cin"], c["cout"], *c["kernel"], device="cuda").to(c["dtype"])  # type: ignore
    b = torch.randn(c["cout"], device="cuda").to(c["dtype"]) if c["bias"] else None  # type: ignore
    return x, w, b


@settings(max_examples=300, deadline=None, derandomize=True, phases=[Phase.generate])
@given(calls())
def test_the_forced_kernel_equals_pytorch(c: dict[str, object]) -> None:
    x, w, b = tensors(c)
    rest = (c["stride"], c["padding"], c["output_padding"], 1, c["dilation"])
    try:
        shape = F.conv_transpose2d(x.to("meta"), w.to("meta"), None, *rest).shape  # type: ignore
    except RuntimeError:
        assume(False)
    assume(min(shape) > 0)
    with torch.no_grad(), ops.forced(SM90):
        poison(shape, x.dtype)
        y = upconv.conv_transpose2d(x, w, b, *rest)  # type: ignore[arg-type]
        again = upconv.conv_transpose2d(x, w, b, *rest)  # type: ignore[arg-type]
    check_same(y, again)
    assert error(y, x, w, b, *rest) <= LIMIT[x.dtype]
    native = F.conv_transpose2d(x, w, b, *rest)  # type: ignore[arg-type]
    for layout in (torch.contiguous_format, torch.channels_last):  # sizes of 1 may count as both
        if native.is_contiguous(memory_format=layout):
            assert y.is_contiguous(memory_format=layout)


@pytest.fixture
def strict() -> Iterator[None]:
    """Inside, float32 must not be rounded to TF32."""
    with precision("ieee"):
        yield


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("shape", "out_channels", "kernel", "stride"),
    [((4, 192, 40, 56), 80, 5, 2), ((2, 64, 60, 90), 64, 3, 1), ((8, 512, 16, 16), 256, 2, 2)],
)
def test_strict_float32_has_at_most_twice_the_error_of_pytorch(
    shape: tuple[int, ...], out_channels: int, kernel: int, stride: int, layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").to(memory_format=layout)
    w = torch.randn(shape[1], out_channels, kernel, kernel, device="cuda")
    with torch.no_grad(), ops.forced(SM90):
        ours = error(upconv.conv_transpose2d(x, w, None, stride), x, w, None, stride)
    assert ours <= 2 * error(F.conv_transpose2d(x, w, None, stride), x, w, None, stride)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(12, 16), (7, 27)])
def test_strict_float32_is_exact_for_numbers_of_every_size(
    size: tuple[int, int], layout: torch.memory_format
) -> None:
    """FP16, of which the kernel makes float32, ends at 65504. Each pixel is of another size, in
    several passes; no error is larger than float32's own, whatever lies beside it."""
    torch.manual_seed(0)
    sizes = 10.0 ** (70 * torch.rand(2, 1, *size, device="cuda", dtype=torch.double) - 36)
    x = (torch.randn(2, 40, *size, device="cuda") * sizes).float().to(memory_format=layout)
    w = torch.randn(40, 24, 1, 1, device="cuda")
    with torch.no_grad(), ops.forced(SM90):
        y = upconv.conv_transpose2d(x, w)
        assert torch.equal(y, upconv.conv_transpose2d(x, w))
    expected = F.conv_transpose2d(x.double(), w.double())
    largest = F.conv_transpose2d(x.double().abs(), w.double().abs())  # if nothing cancelled
    assert float(((y - expected).abs() / largest).max()) < 4e-7


@st.composite
def grouped_calls(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[object, ...]]:
    """Shapes of input and weight, and the parameters: 1-D to 3-D, with groups."""
    ndim, groups = draw(st.sampled_from([1, 2, 3, 3])), draw(st.sampled_from([1, 2, 3]))
    some = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * ndim))  # noqa: E731
    channels = [draw(st.integers(8, 90)) for _ in range(2)]
    stride, dilation = some(1, 3), some(1, 2)
    extra = tuple(draw(st.integers(0, s - 1)) for s in stride)
    x = (draw(st.integers(1, 3)), channels[0] * groups, *some(1, 24 if ndim == 3 else 60))
    w = (channels[0] * groups, channels[1], *some(1, 4))
    return x, w, (stride, some(0, 1), extra, groups, dilation)


@settings(max_examples=120, deadline=None, derandomize=True, phases=[Phase.generate])
@given(grouped_calls(), st.sampled_from(list(LIMIT)), st.booleans())
def test_groups_and_every_number_of_dimensions(
    call: tuple[tuple[int, ...], tuple[int, ...], tuple[object, ...]],
    dtype: torch.dtype,
    bias: bool,
) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(shape, device="cuda").to(dtype) for shape in call[:2])
    b = torch.randn(call[1][1] * call[2][3], device="cuda").to(dtype) if bias else None  # type: ignore[operator]
    name = f"conv_transpose{x.dim() - 2}d"
    try:
        shape = getattr(F, name)(x.to("meta"), w.to("meta"), None, *call[2]).shape
    except RuntimeError:
        assume(False)
    assume(min(shape) > 0)
    with torch.no_grad(), ops.forced(SM90):
        poison(shape, dtype)
        y = getattr(upconv, name)(x, w, b, *call[2])
    assert error(y, x, w, b, *call[2]) <= LIMIT[dtype]


def layer(**options: object) -> tuple[torch.Tensor, torch.nn.ConvTranspose2d]:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 40, 56, device="cuda")
    return x, torch.nn.ConvTranspose2d(64, 48, 4, 2, 1, **options).cuda()  # type: ignore[arg-type]


def test_tf32_is_rounded_to_nearest_and_keeps_nans() -> None:
    """A layer that multiplies by the identity gives back what it has read. Ties may go either way:
    TMA rounds to even, the loaders away from zero."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2, 64, 20, 36), dtype=torch.int64, device="cuda")
    bits = bits & ~(0xFF << 23) | (100 + bits % 50) << 23  # finite
    x = bits.to(torch.int32).view(torch.float32)
    w = torch.eye(64, device="cuda").view(64, 64, 1, 1)
    with torch.no_grad(), ops.forced("sm90_wgmma_fprop"):
        y = upconv.conv_transpose2d(x, w)
        x[1, 3, 7, 9], x[1, 5, 8, 8] = float("nan"), float("inf")
        z = upconv.conv_transpose2d(x, w)
    spacing = ((bits >> 23 & 0xFF) - 127 - 10).double().exp2()
    assert bool(((y.double() - x.double()).abs() <= spacing / 2)[0].all())
    assert int((y.view(torch.int32) & 0x1FFF).count_nonzero()) == 0
    assert bool(z[1, :, 7, 9].isnan().all())
    assert bool(z[1, 5, 8, 8] == float("inf"))


def test_unbatched_and_one_dimensional_inputs() -> None:
    x = torch.randn(32, 24, 40, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(32, 16, 3, 3, device="cuda", dtype=torch.bfloat16)
    signal = torch.randn(3, 32, 1000, device="cuda", dtype=torch.bfloat16)
    taps = torch.randn(32, 16, 8, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), ops.forced(SM90):
        y = upconv.conv_transpose2d(x, w)
        z = upconv.conv_transpose1d(signal, taps, stride=4, padding=2)
    assert error(y[None], x[None], w, None) <= LIMIT[x.dtype]
    flat = (signal[:, :, None], taps[:, :, None], None, (1, 4), (0, 2))
    assert error(z[:, :, None], *flat) <= LIMIT[x.dtype]


def test_a_channels_last_weight_with_and_without_a_batch() -> None:
    x = torch.randn(2, 32, 24, 40, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(32, 16, 3, 3, device="cuda", dtype=torch.bfloat16)
    w = w.contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), ops.forced(SM90):
        batched, single = upconv.conv_transpose2d(x, w), upconv.conv_transpose2d(x[0], w)
    assert error(batched, x, w, None) <= LIMIT[x.dtype]
    assert error(single[None], x[:1], w, None) <= LIMIT[x.dtype]
    assert single.stride() == F.conv_transpose2d(x[0], w).stride()


def test_a_frozen_weight_is_packed_once_and_again_when_it_changes() -> None:
    x, module = layer(bias=False)
    weight = module.weight.detach().clone()
    with torch.no_grad(), ops.forced(SM90):
        first = upconv.conv_transpose2d(x, weight, None, 2, 1)
        with allocations() as taken:
            second = upconv.conv_transpose2d(x, weight, None, 2, 1)
        weight.mul_(2)
        changed = upconv.conv_transpose2d(x, weight, None, 2, 1)
    assert torch.equal(first, second)
    assert taken == [1, first.numel() * 4], "more than the output was allocated"
    torch.testing.assert_close(changed, 2 * first)


def test_nothing_is_allocated_beside_output_and_packed_weight() -> None:
    x, module = layer()
    with torch.no_grad(), ops.forced(SM90):
        upconv.conv_transpose2d(x, module.weight, module.bias, 2, 1)
        with allocations() as taken:
            y = upconv.conv_transpose2d(x, module.weight, module.bias, 2, 1)
    # Folded and rounded up to whole blocks, a packed weight is a few times the weight at most.
    count, bytes = taken
    assert count == 2
    assert bytes <= y.numel() * 4 + 8 * module.weight.numel() * 4


def test_gradients_and_training_step() -> None:
    x, module = layer()
    fast = upconv.ConvTranspose2d(64, 48, 4, 2, 1).cuda()
    fast.load_state_dict(module.state_dict())
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    with ops.forced(SM90):
        fast(x1).square().mean().backward()
    module(x2).square().mean().backward()
    pairs = ((x1.grad, x2.grad), (fast.weight.grad, module.weight.grad))
    for ours, theirs in (*pairs, (fast.bias.grad, module.bias.grad)):  # type: ignore[union-attr]
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-3


@pytest.mark.usefixtures("strict")
def test_strict_float32_keeps_off_tf32() -> None:
    x, module = layer()
    with torch.no_grad(), ops.forced(SM90):
        y = upconv.conv_transpose2d(x, module.weight, module.bias, 2, 1)
    assert error(y, x, module.weight, module.bias, 2, 1) < 1e-6


def test_a_graph_is_captured_before_its_types_are_loaded() -> None:
    """Nothing is built inside: the graph has PyTorch's operator, the next call outside ours."""
    call = """
import torch, upconv
from upconv import libraries, ops
x = torch.randn(4, 64, 32, 32, device="cuda", dtype=torch.float16)
w = torch.randn(64, 64, 4, 4, device="cuda", dtype=torch.float16)
with torch.no_grad(), ops.forced("sm90_wgmma_fprop"):
    torch.ops.upconv.conv_transpose2d(x.bfloat16(), w.bfloat16(), None, [2], [1])
    expected = torch.conv_transpose2d(x, w, None, 2, 1)
    torch.cuda.synchronize()
    assert libraries.compiled("cuda") and not libraries.compiled("cuda_fp16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.upconv.conv_transpose2d(x, w, None, [2], [1])
    graph.replay()
    torch.cuda.synchronize()
    assert not libraries.compiled("cuda_fp16")
    after = torch.ops.upconv.conv_transpose2d(x, w, None, [2], [1])
    assert libraries.compiled("cuda_fp16")
    for result in (y, after):
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-1)
    with torch.profiler.profile() as profile:
        torch.ops.upconv.conv_transpose2d(x, w, None, [2], [1])
        torch.cuda.synchronize()
    print(any("sm90_wgmma_fprop" in event.key for event in profile.key_averages()))
"""
    process = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    assert process.stdout.split() == ["True"], process.stderr


def test_cuda_graph_replays_on_new_values() -> None:
    x, module = layer()
    weight = module.weight.detach()
    with torch.no_grad(), ops.forced(SM90):
        upconv.conv_transpose2d(x, weight, None, 2, 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = upconv.conv_transpose2d(x, weight, None, 2, 1)
        x.normal_()
        weight.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
    assert error(y, x, weight, None, 2, 1) <= LIMIT[torch.float32]


def test_streams_and_threads_do_not_disturb_each_other() -> None:
    from concurrent.futures import ThreadPoolExecutor

    x, module = layer()
    weight = module.weight.detach()
    torch.cuda.synchronize()

    def work(seed: int) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad(), ops.forced(SM90):
            mine = x * (seed + 1)
            for _ in range(5):
                y = upconv.conv_transpose2d(mine, weight, None, 2, 1)
            stream.synchronize()
            return error(y, mine, weight, None, 2, 1)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(8))) <= LIMIT[torch.float32]


def test_compile_and_autocast_use_the_operator() -> None:
    x, module = layer()
    fast = upconv.ConvTranspose2d(64, 48, 4, 2, 1).cuda()
    fast.load_state_dict(module.state_dict())
    with torch.no_grad(), ops.forced(SM90):
        compiled = torch.compile(fast, fullgraph=True)(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            cast = fast(x)
    assert error(compiled, x, fast.weight, fast.bias, 2, 1) <= LIMIT[torch.float32]
    assert cast.dtype == torch.bfloat16


def test_a_tensor_beyond_two_to_the_31_elements() -> None:
    x = torch.randn(3, 8, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(8, 16, 1, 1, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), ops.forced(SM90):
        y = upconv.conv_transpose2d(x, w)
    assert y.numel() > 2**31
    for part in (slice(0, 64), slice(-64, None)):
        expected = torch.einsum("chw,co->ohw", x[-1, :, part].double(), w[:, :, 0, 0].double())
        got = y[-1, :, part].double()
        assert float((got - expected).norm() / expected.norm()) <= LIMIT[torch.bfloat16]


def test_a_plan_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no crash: planner and libraries of different versions, say."""
    x, module = layer()
    weight, rest = module.weight.detach(), ([2, 2], [1, 1], [0, 0], 1, [1, 1])
    gy = upconv.conv_transpose2d(x, weight, None, 2, 1)
    asked = plans.record
    monkeypatch.setattr(plans, "record", lambda key: [*asked(key), 1])
    plans.clear()
    try:
        with (
            torch.no_grad(),
            ops.forced(SM90),
            pytest.raises(RuntimeError, match=r"kernel 2, .* fit"),
        ):
            upconv.conv_transpose2d(x, weight, None, 2, 1)
        with pytest.raises(RuntimeError, match=r"parameters\) does not fit"):
            ops.GRADIENTS["grad_weight"](gy, x, weight.shape, *rest)
    finally:
        monkeypatch.undo()
        plans.clear()
    assert torch.equal(gy, upconv.conv_transpose2d(x, weight, None, 2, 1))
