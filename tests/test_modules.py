"""The layers: PyTorch's in everything but the kernel."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import upconv

PAIRS = [
    (upconv.ConvTranspose1d, nn.ConvTranspose1d, 1),
    (upconv.ConvTranspose2d, nn.ConvTranspose2d, 2),
    (upconv.ConvTranspose3d, nn.ConvTranspose3d, 3),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1, "output_padding": 1, "bias": False},
    {"stride": 3, "groups": 2, "dilation": 2},
]


@pytest.mark.parametrize(("ours", "theirs", "ndim"), PAIRS)
@pytest.mark.parametrize("options", OPTIONS)
def test_same_values_repr_and_state(ours: Any, theirs: Any, ndim: int, options: Any) -> None:
    torch.manual_seed(5)
    mine = ours(4, 6, 3, **options)
    torch.manual_seed(5)
    their = theirs(4, 6, 3, **options)
    assert repr(mine) == repr(their)
    assert isinstance(mine, theirs)
    assert list(mine.state_dict()) == list(their.state_dict())
    for a, b in zip(mine.state_dict().values(), their.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert mine.state_dict()._metadata == their.state_dict()._metadata
    their.load_state_dict(mine.state_dict())
    mine.load_state_dict(their.state_dict())
    x = torch.randn(2, 4, *[5] * ndim)
    torch.testing.assert_close(mine(x), their(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ours", "theirs", "ndim"), PAIRS)
def test_same_constructor(ours: Any, theirs: Any, ndim: int) -> None:
    assert inspect.signature(ours) == inspect.signature(theirs)
    layer = ours(4, 6, 3, dtype=torch.float64, device="meta")
    assert layer.weight.dtype == torch.float64
    assert layer.weight.is_meta
    for bad in (
        {"padding_mode": "reflect"},
        {"groups": 0},
        {"groups": 3},
        {"dtype": torch.int64},
        {"kernel_size": -1},
        {"kernel_size": 3.0},
    ):
        arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3} | bad
        with pytest.raises(Exception) as expected:  # noqa: PT011
            theirs(**arguments)
        with pytest.raises(type(expected.value)) as given:
            ours(**arguments)
        assert str(given.value) == str(expected.value)


@pytest.mark.parametrize(("ours", "theirs", "ndim"), PAIRS)
@pytest.mark.parametrize(
    "later",
    [
        {"padding_mode": "circular"},
        {"padding": "same"},
        {"padding": -1},
        {"stride": 0},
        {"output_padding": 2},
        {"kernel_size": (3, 3, 3, 3)},
    ],
)
def test_what_the_constructor_accepts_and_forward_does_not(
    ours: Any, theirs: Any, ndim: int, later: Any
) -> None:
    def build(kind: Any) -> Any:
        if "padding_mode" in later:
            layer = kind(4, 6, 3)
            layer.padding_mode = later["padding_mode"]
            return layer
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kind(4, 6, **({"kernel_size": 3} | later))

    x = torch.randn(2, 4, *[5] * ndim)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        build(theirs)(x)
    with pytest.raises(type(expected.value)):
        build(ours)(x)


@pytest.mark.parametrize(("ours", "theirs", "ndim"), PAIRS)
def test_output_size(ours: Any, theirs: Any, ndim: int) -> None:
    mine, their = ours(4, 6, 3, stride=2, padding=1), theirs(4, 6, 3, stride=2, padding=1)
    their.load_state_dict(mine.state_dict())
    x = torch.randn(2, 4, *[5] * ndim)
    for size in ([9] * ndim, [10] * ndim, [2, 6, *[10] * ndim], torch.Size([10] * ndim)):
        torch.testing.assert_close(mine(x, size), their(x, output_size=size))
    torch.testing.assert_close(mine(x[0], [6, *[10] * ndim]), their(x[0], [6, *[10] * ndim]))
    for bad in ([8] * ndim, [11] * ndim, [9] * (ndim + 1)):
        with pytest.raises(ValueError) as expected:  # noqa: PT011
            their(x, bad)
        with pytest.raises(ValueError) as given:  # noqa: PT011
            mine(x, bad)
        assert str(given.value) == str(expected.value)
    with pytest.raises(TypeError):
        mine(x, 9)


def test_copies_and_pickles() -> None:
    layer = upconv.ConvTranspose2d(4, 6, 3, stride=2)
    x = torch.randn(1, 4, 5, 5)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is upconv.ConvTranspose2d
        assert torch.equal(other(x), layer(x))


def test_training_gives_pytorchs_weights() -> None:
    torch.manual_seed(1)
    mine = nn.Sequential(upconv.ConvTranspose2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 1, 3))
    their = nn.Sequential(nn.ConvTranspose2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 1, 3))
    their.load_state_dict(mine.state_dict())
    x = torch.randn(4, 3, 6, 6)
    for model in (mine, their):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(mine.parameters(), their.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("ours", "theirs", "ndim"), PAIRS)
def test_torchscript_runs_pytorchs_function(ours: Any, theirs: Any, ndim: int) -> None:
    layer = ours(4, 6, 3, stride=2, padding=1)
    scripted = torch.jit.script(layer)
    x = torch.randn(2, 4, *[5] * ndim)
    torch.testing.assert_close(scripted(x), layer(x))
    torch.testing.assert_close(scripted(x, [10] * ndim), layer(x, [10] * ndim))


class WithSize(nn.Module):
    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.up = up

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        return self.up(x, output_size=like.shape[2:])


def kinds_of_nodes(module: nn.Module) -> list[str]:
    return [node.op for node in fx.symbolic_trace(module).graph.nodes]


@pytest.mark.parametrize(("ours", "theirs", "ndim"), PAIRS)
def test_fx_takes_a_layer_as_a_whole(ours: Any, theirs: Any, ndim: int) -> None:
    """As it takes PyTorch's; its sizes may then be what is being traced."""
    layer = ours(4, 6, 3, stride=2, padding=1)
    swapped = theirs(4, 6, 3, stride=2, padding=1)
    expected = kinds_of_nodes(WithSize(swapped))
    assert "call_module" in expected
    upconv.accelerate(swapped)
    x, like = torch.randn(2, 4, *[5] * ndim), torch.randn(2, 6, *[10] * ndim)
    for made in (layer, swapped, copy.deepcopy(layer), pickle.loads(pickle.dumps(swapped))):
        model = WithSize(made)
        assert kinds_of_nodes(model) == expected
        torch.testing.assert_close(fx.symbolic_trace(model)(x, like), made(x, [10] * ndim))
    upconv.restore(swapped)
    assert kinds_of_nodes(WithSize(swapped)) == expected


def test_fx_looks_into_derived_classes() -> None:
    """As it looks into those of PyTorch's: their forward may be anything."""

    class Relu(upconv.ConvTranspose2d):
        def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
            return super().forward(input, output_size).relu()

    assert "call_method" in kinds_of_nodes(nn.Sequential(Relu(4, 6, 3)))


def test_the_classes_keep_their_own_module() -> None:
    for ours, theirs, _ in PAIRS:
        assert ours.__module__ == "upconv.modules"
        assert theirs.__module__ == "torch.nn.modules.conv"


def up2(x: Tensor, w: Tensor) -> Tensor:
    return upconv.conv_transpose2d(x, w, stride=2)


def up1(x: Tensor, w: Tensor) -> Tensor:
    return upconv.conv_transpose1d(x, w, padding=[1], dilation=2)


def up3(x: Tensor, w: Tensor) -> Tensor:
    return upconv.conv_transpose3d(x, w, None, 2, 1, 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("function", "ndim"), [(up1, 1), (up2, 2), (up3, 3)])
def test_torchscript_compiles_the_functions(function: Any, ndim: int) -> None:
    x, w = torch.randn(2, 4, *[5] * ndim), torch.randn(4, 6, *[3] * ndim)
    scripted = torch.jit.script(function)
    assert f"aten::conv_transpose{ndim}d" in str(scripted.graph)
    torch.testing.assert_close(scripted(x, w), function(x, w))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["trace", "script"])
@pytest.mark.parametrize(("ours", "theirs", "ndim"), PAIRS)
def test_what_torchscript_saves_needs_no_upconv(
    ours: Any, theirs: Any, ndim: int, how: str, tmp_path: Path
) -> None:
    """Nor does ONNX, which is made of the trace: it knows PyTorch's operators only."""
    layer, x = ours(4, 6, 3, stride=2), torch.randn(2, 4, *[5] * ndim)
    expected = layer(x)  # now the layer's kind of call is known
    made = torch.jit.trace(layer, x) if how == "trace" else torch.jit.script(layer)
    made.save(tmp_path / "layer.pt")
    loaded = torch.jit.load(tmp_path / "layer.pt")
    assert "upconv::" not in str(loaded.inlined_graph)
    torch.testing.assert_close(loaded(x), expected)
