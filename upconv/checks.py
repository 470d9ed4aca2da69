"""Is this a call that a transposed convolution can serve? PyTorch's exception types and words.

Where PyTorch answers bad input with garbage or with a message of a library below it (a weight on
the meta device, dilation 0, an output of negative size), the words here are our own. What PyTorch
accepts passes: an empty batch, for example, is not held to any rule on sizes that it ignores.

The checks run when a plan is made and when shapes are traced, never on a call seen before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .planner import output_size

if TYPE_CHECKING:
    from torch import Tensor

_AXES = ("depth", "height", "width")


def expand(name: str, values: Sequence[int], ndim: int) -> tuple[int, ...]:
    """One value for every spatial dimension; a single one stands for all."""
    if len(values) == 1:
        return tuple(values) * ndim
    if len(values) != ndim:
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of {ndim} values to match "
            f"the convolution dimensions, but got {name}={list(values)}"
        )
    return tuple(values)


def expand_all(
    ndim: int,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
) -> list[tuple[int, ...]]:
    """All four of a call."""
    return [
        expand("stride", stride, ndim),
        expand("padding", padding, ndim),
        expand("output_padding", output_padding, ndim),
        expand("dilation", dilation, ndim),
    ]


def check_call(
    ndim: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> None:
    """Raise what PyTorch would raise, or something clearer of the same type; else return."""
    _check_tensors(ndim, input, weight, bias)
    strides, paddings, extras, dilations = expand_all(
        ndim, stride, padding, output_padding, dilation
    )
    for bad, text in (
        (any(p < 0 for p in paddings), f"negative padding is not supported, got {list(paddings)}"),
        (
            any(e < 0 for e in extras),
            f"negative output_padding is not supported, got {list(extras)}",
        ),
        (
            any(s <= 0 for s in strides),
            f"non-positive stride is not supported, got {list(strides)}",
        ),
        (any(d < 0 for d in dilations), _dilation_text(dilations)),
        (groups <= 0, f"non-positive groups is not supported, got {groups}"),
    ):
        if bad:
            raise RuntimeError(text)
    _check_channels(ndim, input, weight, bias, groups)
    batched = input.dim() == ndim + 2
    size, kernel = tuple(input.shape[-ndim:]), tuple(weight.shape[2:])
    if not (batched and _true(input.shape[0] == 0)):
        _check_sizes(input, weight, size, kernel, extras, strides, dilations)
    results = tuple(map(output_size, size, kernel, strides, paddings, extras, dilations))
    if any(_true(result < 0) for result in results):
        raise RuntimeError(
            f"Given input size per channel: ({_by(size)}). Calculated output size per channel: "
            f"({_by(results)}). Output size is too small: use less padding or a larger input"
        )


def _check_tensors(ndim: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Ranks and devices."""
    if input.dim() not in (ndim + 1, ndim + 2):
        raise RuntimeError(
            f"Expected {ndim + 1}D (unbatched) or {ndim + 2}D (batched) input to "
            f"conv_transpose{ndim}d, but got input of size: {list(input.shape)}"
        )
    if weight.dim() != ndim + 2:
        # PyTorch blames the length of the stride in 2 and 3 dimensions.
        few = "weight should have at least three dimensions. " if weight.dim() < 3 else ""
        raise RuntimeError(
            f"{few}Expected {ndim + 2}-dimensional weight (in_channels, out_channels / groups, "
            f"*kernel) for conv_transpose{ndim}d, but got weight of size {list(weight.shape)} "
            f"and {input.dim()}-dimensional input of size {list(input.shape)} instead"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.is_meta and not input.is_meta:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but got {name} on meta, which "
                f"holds no values, and input on {input.device}: load or initialise the {name}"
            )


def _check_channels(
    ndim: int, input: Tensor, weight: Tensor, bias: Tensor | None, groups: int
) -> None:
    shape = list(weight.shape)
    if weight.shape[0] < groups:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, "
            f"but got weight of size {shape} instead"
        )
    if weight.shape[0] % groups:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, "
            f"but got weight of size [{shape}] instead"
        )
    channels = input.shape[-ndim - 1]
    if _true(channels != weight.shape[0]):
        raise RuntimeError(
            f"Given transposed=1, weight of size {shape}, expected input{list(input.shape)} "
            f"to have {weight.shape[0]} channels, but got {channels} channels instead"
        )
    outputs = weight.shape[1] * groups
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != outputs):
        raise RuntimeError(
            f"Given transposed=1, weight of size {shape}, expected bias to be 1-dimensional with "
            f"{outputs} elements, but got bias of size {list(bias.shape)} instead"
        )


def _check_sizes(
    input: Tensor,
    weight: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    extras: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> None:
    """Rules that PyTorch does not apply to an empty batch."""
    if any(d == 0 and k != 1 for d, k in zip(dilations, kernel, strict=True)):
        raise RuntimeError(_dilation_text(dilations))
    if any(_true(length == 0) for length in size):
        raise RuntimeError(
            "Only zero batch or zero channel inputs are supported, "
            f"but got input shape: {list(input.shape)}"
        )
    if weight.shape[1] == 0 or any(k == 0 for k in kernel):
        raise RuntimeError(
            "non-empty weight tensor expected: out_channels and kernel size should be greater "
            f"than zero, but got weight of size {list(weight.shape)}"
        )
    if any(
        extra >= stride and extra >= dilation
        for extra, stride, dilation in zip(extras, strides, dilations, strict=True)
    ):
        given = {"output_padding": extras, "stride": strides, "dilation": dilations}
        raise RuntimeError(
            "output padding must be smaller than either stride or dilation, but got "
            + " ".join(
                f"{name}_{axis}: {value}"
                for name, values in given.items()
                for axis, value in zip(_AXES[-len(values) :], values, strict=True)
            )
        )


def _true(condition: bool) -> bool:
    """Is it known to be true? A size that only the data decides breaks no rule while tracing."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _dilation_text(dilations: Sequence[int]) -> str:
    return f"dilation should be greater than zero, but got dilation {list(dilations)}"


def _by(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def check_grad_output(
    ndim: int,
    grad_output: Tensor,
    input_size: Sequence[int],
    weight_size: Sequence[int],
    parameters: Sequence[Sequence[int]],
    groups: int,
) -> None:
    """The gradient operators take sizes as numbers: do they fit the gradient that came?

    `parameters` is stride, padding, output_padding and dilation, in this order.
    """
    stride, padding, output_padding, dilation = parameters
    strides, paddings, extras, dilations = expand_all(
        ndim, stride, padding, output_padding, dilation
    )
    sizes = map(
        output_size, input_size[-ndim:], weight_size[2:], strides, paddings, extras, dilations
    )
    expected = torch.Size([*input_size[: -ndim - 1], weight_size[1] * groups, *sizes])
    if grad_output.shape != expected:
        raise RuntimeError(
            f"expected grad_output of size {list(expected)} for input of size {list(input_size)} "
            f"and weight of size {list(weight_size)}, but got {list(grad_output.shape)}"
        )
