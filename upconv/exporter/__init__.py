"""`upconv export`: a layer as one Python file that needs nothing but PyTorch.

layers.py, model_file.py     what is to be exported
families.py                  which kernel, and which sources it is made of
cuda_source.py, python_source.py   those sources as one text each
runtime.py                   what the file does around them
render.py                    the file
rules.py                     what it must not hold
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ExportError
from .layers import Layer, model_class

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ExportError", "export", "write"]


def export(
    layer: nn.Module,
    path: str | os.PathLike[str],
    input_size: Sequence[int],
    *,
    dtype: str | None = None,
    tf32: bool = True,
    capability: tuple[int, int] = (9, 0),
    overwrite: bool = False,
) -> Path:
    """Writes `layer` as a Python file that defines ModelNew and needs PyTorch only.

    `layer` is an nn.ConvTranspose1d/2d/3d, PyTorch's or upconv's; its weights are not written, the
    file's class makes the same ones from the same seed, and loads the same state_dict. `input_size`
    is the (N, C, *spatial) that it is meant for: the file takes any, but a layer that no kernel
    covers there is refused with an ExportError. `dtype` is by default that of the layer; float32
    is computed in TF32 unless `tf32` is False. `capability` is that of the GPU it is for.
    """
    from .render import Target, render

    described = Layer.of_module(layer)
    chosen = dtype or str(layer.weight.dtype).removeprefix("torch.")
    origin = f"nn.{described}"
    target = Target(chosen, tf32, capability)
    rendered = render(described, model_class(described), tuple(input_size), target, origin)
    return write(rendered.text, Path(path), overwrite)


def write(text: str, path: Path, overwrite: bool = False) -> Path:
    """Writes a file whole or not at all; one that exists only where `overwrite` says so."""
    if path.is_dir():
        raise ExportError(f"{path} is a folder; name the file to write")
    if not path.parent.is_dir():
        raise ExportError(f"the folder {path.parent} does not exist; make it first")
    if path.exists() and not overwrite:
        raise ExportError(f"{path} exists already; choose another name, or overwrite it (--force)")
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".upconv-", delete=False
        ) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error}") from None
    return path
