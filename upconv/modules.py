"""`ConvTranspose1d/2d/3d`: PyTorch's layers with another `forward`, and nothing else.

A layer compiled by TorchScript runs PyTorch's function: TorchScript cannot compile ours. That is
the first half of every `forward`, in the words that TorchScript reads.

torch.fx takes a layer as a whole, and does not look into its `forward`, where the layer's
`__module__` says torch.nn. So these layers say that, each for itself, but not their classes: a
class is found again by its name when a layer is pickled.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any, TypeVar

import torch.jit
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvTransposeNd

from .functional import (
    ConvTransposeFunction,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)

__all__ = ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]

_MODULE = "__module__"
_Layer = TypeVar("_Layer", bound=nn.Module)


def _register_for_scripting() -> None:
    """TorchScript compiles calls of our functions to PyTorch's."""
    with suppress(Exception):  # it is private to PyTorch; without it such calls do not compile
        for ndim, function in enumerate((conv_transpose1d, conv_transpose2d, conv_transpose3d), 1):
            torch.jit._builtins._register_builtin(function, f"aten::conv_transpose{ndim}d")


_register_for_scripting()


def make_leaf(layer: nn.Module) -> None:
    """Let torch.fx take the layer as a whole, as it takes PyTorch's."""
    layer.__dict__[_MODULE] = _ConvTransposeNd.__module__


def _leaf(kind: type[_Layer]) -> type[_Layer]:
    """The class, whose constructor makes a leaf of a layer."""
    original = kind.__init__

    @functools.wraps(original)
    def constructor(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is kind:  # into the forward of a derived class torch.fx does look
            make_leaf(self)

    kind.__init__ = constructor  # type: ignore[method-assign]
    return kind


def unmake_leaf(layer: nn.Module) -> None:
    layer.__dict__.pop(_MODULE, None)


def _run(
    layer: _ConvTransposeNd,
    function: ConvTransposeFunction,
    input: Tensor,
    output_size: list[int] | None,
) -> Tensor:
    if layer.padding_mode != "zeros":
        raise ValueError(f"Only `zeros` padding mode is supported for {type(layer).__name__}")
    output_padding = layer.output_padding
    if output_size is not None:
        output_padding = tuple(
            layer._output_padding(
                input,
                output_size,
                layer.stride,  # type: ignore[arg-type]
                layer.padding,  # type: ignore[arg-type]
                layer.kernel_size,  # type: ignore[arg-type]
                len(layer.kernel_size),
                layer.dilation,  # type: ignore[arg-type]
            )
        )
    return function(
        input,
        layer.weight,
        layer.bias,
        layer.stride,
        layer.padding,  # type: ignore[arg-type]
        output_padding,
        layer.groups,
        layer.dilation,
    )


@_leaf
class ConvTranspose1d(nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d`, by the fastest kernel for the problem."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if is_scripting():
            return F.conv_transpose1d(
                input,
                self.weight,
                self.bias,
                self.stride,
                self.padding,  # type: ignore[arg-type]
                self._output_padding(
                    input,
                    output_size,
                    self.stride,  # type: ignore[arg-type]
                    self.padding,  # type: ignore[arg-type]
                    self.kernel_size,  # type: ignore[arg-type]
                    1,
                    self.dilation,  # type: ignore[arg-type]
                ),
                self.groups,
                self.dilation,
            )
        return _run(self, conv_transpose1d, input, output_size)


@_leaf
class ConvTranspose2d(nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d`, by the fastest kernel for the problem."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if is_scripting():
            return F.conv_transpose2d(
                input,
                self.weight,
                self.bias,
                self.stride,
                self.padding,  # type: ignore[arg-type]
                self._output_padding(
                    input,
                    output_size,
                    self.stride,  # type: ignore[arg-type]
                    self.padding,  # type: ignore[arg-type]
                    self.kernel_size,  # type: ignore[arg-type]
                    2,
                    self.dilation,  # type: ignore[arg-type]
                ),
                self.groups,
                self.dilation,
            )
        return _run(self, conv_transpose2d, input, output_size)


@_leaf
class ConvTranspose3d(nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d`, by the fastest kernel for the problem."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if is_scripting():
            return F.conv_transpose3d(
                input,
                self.weight,
                self.bias,
                self.stride,
                self.padding,  # type: ignore[arg-type]
                self._output_padding(
                    input,
                    output_size,
                    self.stride,  # type: ignore[arg-type]
                    self.padding,  # type: ignore[arg-type]
                    self.kernel_size,  # type: ignore[arg-type]
                    3,
                    self.dilation,  # type: ignore[arg-type]
                ),
                self.groups,
                self.dilation,
            )
        return _run(self, conv_transpose3d, input, output_size)
