"""Exported files on a GPU: they build, and agree with PyTorch forward and backward."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_harness import CASES, load, load_case, seeded
from gpu_checks import precision
from torch import Tensor, nn

import upconv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH"),
]

OF_LARGEST = {torch.float32: 1e-3, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Error allowed, as a share of the largest output: TF32 keeps 10 bits, as float16 does."""


@pytest.fixture(autouse=True, scope="module")
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the exported kernel needs compute capability 9.0")


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    # In place of assert_close, which makes copies of many GiB.
    bound = tolerance + tolerance * theirs.abs()
    wrong = ((ours - theirs).abs() > bound).sum().item()
    assert wrong == 0, f"{wrong} of {theirs.numel()} elements differ"


def near(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """PyTorch has kernels for small strided layers that do not round to TF32: float64 decides."""
    assert ours.shape == exact.shape
    assert ours.dtype == dtype
    if ours.numel():
        error = (ours.double() - exact).abs().max() / exact.abs().max()
        assert error.item() <= OF_LARGEST[dtype]


@pytest.mark.parametrize("name", CASES)
def test_the_examples_agree_with_pytorch(name: str) -> None:
    """As the harness checks it: float32 with TF32 on, train mode, no gradients, several inputs."""
    context = load_case(name)
    arguments = context["get_init_inputs"]()
    reference = seeded(context["Model"], arguments).cuda()
    ours = seeded(context["ModelNew"], arguments).cuda()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.device("cuda"), torch.no_grad():
            (x,) = context["get_inputs"]()
            close(ours(x), reference(x), 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_agree_with_pytorch(name: str) -> None:
    context = load_case(name)
    arguments = context["get_init_inputs"]()
    reference = seeded(context["Model"], arguments).cuda()
    ours = seeded(context["ModelNew"], arguments).cuda()
    x = torch.randn(2, arguments[0], 40, 52, device="cuda")
    results = []
    for model in (ours, reference):
        inputs = x.clone().requires_grad_()
        y = model(inputs)
        y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y))
        results.append([inputs.grad, *[p.grad for p in model.parameters()]])
    for mine, theirs in zip(*results, strict=True):
        scale = theirs.abs().max().item()
        assert (mine - theirs).abs().max().item() <= 1e-4 * scale


def exported(tmp_path: Path, layer: nn.Module, dtype: str) -> Callable[..., Any]:
    size = (4, layer.in_channels, *[16] * len(layer.kernel_size))
    path = upconv.export(layer, tmp_path / "layer.py", size, dtype=dtype)
    model: Callable[..., Any] = load(path.read_text())["ModelNew"]
    return model


SHAPES = [(1, 7, 9), (3, 33, 20), (2, 1, 1), (5, 64, 31), (0, 8, 8)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_strided_layer_takes_any_size_and_layout(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    layer = nn.ConvTranspose2d(24, 40, (4, 3), (2, 1), (1, 2), (1, 0), dilation=(1, 2))
    ours = seeded(exported(tmp_path, layer, dtype), []).to("cuda", kind)
    layer = layer.to("cuda", kind)
    exact = copy.deepcopy(layer).double()
    ours.load_state_dict(layer.state_dict())
    for batch, height, width in SHAPES:
        x = torch.randn(batch, 24, height, width, device="cuda", dtype=kind)
        wide = torch.randn(batch, 24, height, width + 3, device="cuda", dtype=kind)
        for view in (x, x.contiguous(memory_format=torch.channels_last), wide[..., 3:]):
            y = ours(view)
            near(y, exact(view.double()), kind)
            if batch and height > 1:
                assert y.stride() == layer(view).stride()
    unbatched = torch.randn(24, 8, 8, device="cuda", dtype=kind, requires_grad=True)
    near(ours(unbatched), exact(unbatched.double()), kind)
    ours(unbatched).sum().backward()
    assert unbatched.grad is not None
    assert unbatched.grad.shape == unbatched.shape


def test_streams_graphs_and_a_second_load(tmp_path: Path) -> None:
    layer = nn.ConvTranspose2d(32, 32, 3, 1, 1)
    text = upconv.export(layer, tmp_path / "layer.py", (4, 32, 16, 16)).read_text()
    first, second = (seeded(load(text)["ModelNew"], []).cuda() for _ in range(2))
    x = torch.randn(4, 32, 16, 16, device="cuda")
    with torch.no_grad():
        expected = first(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there = second(x)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(there, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = first(x)
        x.mul_(2)
        graph.replay()
        assert torch.equal(captured, first(x))


def test_calls_that_cannot_be_served_say_why(tmp_path: Path) -> None:
    context = load_case("kb57")
    model = context["ModelNew"](64, 64, 3).cuda()
    x = torch.randn(1, 64, 8, 8, device="cuda")
    for bad, words in (
        (x.cpu(), "on a GPU"),
        (x.double(), "exported for torch.float32"),
        (x[:, :63], "takes (N, 64"),
        (x[0, 0], "takes (N, 64"),
    ):
        with pytest.raises(RuntimeError, match=words.replace("(", r"\(")):
            model(bad)
    with pytest.raises(RuntimeError, match="in_channels of a group = 4"):
        context["ModelNew"](64, 64, 3, groups=16).cuda()(x)
    with precision("ieee"), pytest.raises(RuntimeError, match="TF32"):
        model(x)
