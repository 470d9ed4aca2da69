"""Which layers `upconv.export` takes: those that are no more than their class and sizes say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import upconv
from upconv.exporter import ExportError

SIZE = (2, 16, 8, 8)


class Twice(nn.ConvTranspose2d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return 2 * super().forward(input, output_size)


class OursTwice(upconv.ConvTranspose2d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return 2 * super().forward(input, output_size)


def plain() -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(16, 16, 4)


def own_forward() -> nn.Module:
    layer = plain()
    layer.forward = lambda x: x  # type: ignore[method-assign, assignment, misc]
    return layer


def hooked(register: str) -> nn.Module:
    layer = plain()
    getattr(layer, register)(lambda *_: None)
    return layer


def swapped_normed() -> nn.Module:
    layer = parametrizations.weight_norm(plain())
    upconv.accelerate(layer)
    return layer


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Twice(16, 16, 4), "Twice is a class of its own; its forward may differ"),
    "ours": (lambda: OursTwice(16, 16, 4), "OursTwice is a class of its own"),
    "forward": (own_forward, "has a forward of its own, set on the instance"),
    "before": (lambda: hooked("register_forward_pre_hook"), "has hooks"),
    "after": (lambda: hooked("register_forward_hook"), "has hooks"),
    "backward": (lambda: hooked("register_full_backward_hook"), "has hooks"),
    "norm": (lambda: parametrizations.weight_norm(plain()), r"parametrizations \(weight\)"),
    "swapped": (swapped_normed, r"parametrizations \(weight\)"),
    "pruned": (lambda: prune.random_unstructured(plain(), "weight", 0.5), "has hooks"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_layer_that_does_more_is_refused(what: str, tmp_path: Path) -> None:
    make, words = REFUSED[what]
    with pytest.raises(ExportError, match=words):
        upconv.export(make(), tmp_path / "layer.py", SIZE)
    assert list(tmp_path.iterdir()) == []


def test_plain_layers_are_written_alike(tmp_path: Path) -> None:
    """PyTorch's, upconv's, a swapped one, one whose parametrization was removed."""
    swapped = plain()
    upconv.accelerate(swapped)
    bare = parametrizations.weight_norm(plain())
    torch.nn.utils.parametrize.remove_parametrizations(bare, "weight")
    layers = [plain(), upconv.ConvTranspose2d(16, 16, 4), swapped, bare]
    paths = [tmp_path / f"{number}.py" for number in range(len(layers))]
    texts = {
        upconv.export(layer, path, SIZE).read_text()
        for layer, path in zip(layers, paths, strict=True)
    }
    assert len(texts) == 1
