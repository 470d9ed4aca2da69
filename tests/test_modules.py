"""The layers: PyTorch's in everything but the kernel."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

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
