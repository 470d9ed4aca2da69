"""`ConvTranspose1d/2d/3d`: PyTorch's layers with another `forward`, and nothing else.

A layer compiled by TorchScript runs PyTorch's function: TorchScript cannot compile ours. That is
the first half of every `forward`, in the words that TorchScript reads.
"""

from __future__ import annotations

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
