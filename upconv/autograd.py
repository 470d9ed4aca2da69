"""Differentiation of the operators.

With `y = T(x, w)` the transposed convolution, `G(gy, w)` its gradient by the input and `W(gy, x)`
its gradient by the weight, all three are linear in each argument, and each one's gradients are
calls of the other two:

    y  = T(x, w)     gx = G(gy, w)     gw = W(gy, x)
    gx = G(gy, w)    ggy = T(ggx, w)   gw = W(gy, ggx)
    gw = W(gy, x)    ggy = T(x, ggw)   gx = G(gy, ggw)

so that gradients of any order need nothing else. Function transforms (vmap, jvp, torch.func.grad),
forward-mode differentiation, tensor subclasses, complex numbers and mixed dtypes take PyTorch's own
operators, which know all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .checks import check_call, expand_all

ATEN_CONV: tuple[Callable[..., Tensor], ...] = (
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
)
"""PyTorch's transposed convolutions, by number of spatial dimensions less one."""

_FLOATS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
# Under torch.compile every tensor is one of these while the graph is traced; unlike other
# subclasses they stand for a plain tensor, and the operator is to stay in the graph.
_TRACED = frozenset(("FakeTensor", "FunctionalTensor", "Tensor", "Parameter", "Buffer"))


@lru_cache(maxsize=1)
def _has_amx() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


def pytorch_errs(tensor: Tensor) -> bool:
    """Are PyTorch's own gradients of such numbers not to be trusted?

    On a CPU with AMX its kernels for 16-bit types give wrong ones for some layers, 1 % of small
    drawn ones (torch 2.13: sums over memory that nothing has written); the forward ones are right.
    """
    return tensor.is_cpu and tensor.dtype in (torch.bfloat16, torch.float16) and _has_amx()


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As PyTorch's gradients are to have them: float32 where it errs in 16 bits."""
    return tuple(t.float() for t in tensors) if any(map(pytorch_errs, tensors)) else tensors


def aten_conv_transpose(
    ndim: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Tensor:
    """PyTorch's operator, also under vmap, whose rule for it (torch 2.13) takes the number of
    dimensions from the length of the stride: a single number that stands for all of them adds the
    bias along a wrong one."""
    lists = expand_all(ndim, stride, padding, output_padding, dilation)
    return ATEN_CONV[ndim - 1](input, weight, bias, *lists[:3], groups, lists[3])


def aten_input_gradient(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Tensor:
    """`gx[i] = sum over k of w[k] * gy[i * stride - padding + k * dilation]`: a plain convolution.

    An output padding of at least the stride (legal where the dilation is larger) lets it run on
    beyond the input; the surplus is cut off.
    """
    ndim = weight.dim() - 2
    if 0 in grad_output.shape:  # some of which PyTorch's convolution refuses
        return grad_output.new_zeros(input_size)
    batched = grad_output if grad_output.dim() == ndim + 2 else grad_output.unsqueeze(0)
    wide, weight = _widened(batched, weight)
    gradient = torch.ops.aten.convolution(
        wide, weight, None, stride, padding, dilation, False, [0] * ndim, groups
    )
    for dim, length in enumerate(input_size[-ndim:], start=2):
        if gradient.shape[dim] != length:
            gradient = gradient.narrow(dim, 0, length).contiguous()
    result = gradient if batched is grad_output else gradient.squeeze(0)
    assert isinstance(result, Tensor)
    return result.to(grad_output.dtype)


def aten_weight_gradient(
    grad_output: Tensor,
    input: Tensor,
    weight_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Tensor:
    """`gw[k] = sum over i of x[i] * gy[i * stride - padding + k * dilation]`, by PyTorch."""
    ndim = len(weight_size) - 2
    if 0 in grad_output.shape[-ndim:]:
        return grad_output.new_zeros(weight_size)
    if grad_output.dim() == ndim + 1:
        grad_output, input = grad_output.unsqueeze(0), input.unsqueeze(0)
    dtype = grad_output.dtype
    grad_output, input = _widened(grad_output, input)
    # Only its shape and its strides are read: the latter make the gradient channels_last as well.
    # Under vmap they cannot be asked for.
    weight = grad_output.new_empty(weight_size)
    last = torch.channels_last
    if ndim == 2 and not transformed() and grad_output.is_contiguous(memory_format=last):
        weight = weight.contiguous(memory_format=last)
    _, gradient, _ = torch.ops.aten.convolution_backward(
        grad_output,
        input,
        weight,
        None,
        stride,
        padding,
        dilation,
        True,
        output_padding,
        groups,
        [False, True, False],
    )
    assert isinstance(gradient, Tensor)
    return gradient.to(dtype)


def aten_bias_gradient(grad_output: Tensor, ndim: int) -> Tensor:
    dims = [d for d in range(grad_output.dim()) if d != grad_output.dim() - ndim - 1]
    return grad_output.sum(dims)


def bias_gradient(grad_output: Tensor, ndim: int) -> Tensor:
    """The sum over all but the channels; on a GPU by a kernel of our own.

    A compiler that traces this sees PyTorch's sum, which it can put together with its neighbours.
    """
    if type(grad_output) is Tensor and grad_output.is_cuda and not records_gradient(grad_output):
        result = torch.ops.upconv._grad_bias(grad_output, ndim)
        assert isinstance(result, Tensor)
        return result
    return aten_bias_gradient(grad_output, ndim)


def weight_and_bias_gradients(
    grad_output: Tensor,
    input: Tensor | None,
    weight_size: Sequence[int],
    wanted: tuple[bool, bool],
    *rest: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """Those that are wanted; on a GPU both come from one operator, which may read once for both."""
    by_weight, by_bias = wanted
    plain = type(grad_output) is Tensor and type(input) in (Tensor, torch.nn.Parameter)
    together = by_weight and by_bias and plain and grad_output.is_cuda
    if together and not records_gradient(grad_output, input):
        both = torch.ops.upconv._grad_weight_and_bias(grad_output, input, weight_size, *rest)
        return both[0], both[1]
    weight = torch.ops.upconv.conv_transpose_grad_weight
    return (
        weight(grad_output, input, weight_size, *rest) if by_weight else None,
        bias_gradient(grad_output, len(weight_size) - 2) if by_bias else None,
    )


def records_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def transformed() -> bool:
    """Is a function transform or forward-mode differentiation under way?"""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def ordinary(*tensors: Tensor | None) -> bool:
    """Real floating tensors of one dtype and of no foreign subclass: what the rules above cover."""
    present = [t for t in tensors if t is not None]
    return all(
        type(t).__name__ in _TRACED
        and t.dtype == present[0].dtype
        and t.dtype in _FLOATS
        and t.layout == torch.strided
        for t in present
    )


class _Constant(torch.autograd.Function):
    """A tensor that depends on nothing, as a part of the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def in_graph(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Where gradients are recorded (create_graph=True), all of them are part of the graph, as
    PyTorch's are: also those of a linear loss, which are constant, so that a penalty on them can be
    differentiated like any other."""
    if not torch.is_grad_enabled():
        return gradients
    return tuple(
        each
        if each is None or each.requires_grad
        else _Constant.apply(each, each.new_zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        for each in gradients
    )


class ConvTransposeFunction(torch.autograd.Function):
    """T, with the gradients that were asked for and no others."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, ndim: int, *rest: Any
    ) -> Tensor:
        ctx.rest = rest
        ctx.input_size, ctx.weight_size = input.shape, weight.shape
        by_input, by_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(input if by_weight else None, weight if by_input else None)
        with torch._C._AutoDispatchBelowAutograd():
            return _operator(ndim)(input, weight, bias, *rest)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad_output,) = gradients
        input, weight = ctx.saved_tensors
        by_input, by_weight, by_bias = ctx.needs_input_grad[:3]
        op = torch.ops.upconv
        found: tuple[Tensor | None, ...] = (
            op.conv_transpose_grad_input(grad_output, weight, ctx.input_size, *ctx.rest)
            if by_input
            else None,
            *weight_and_bias_gradients(
                grad_output, input, ctx.weight_size, (by_weight, by_bias), *ctx.rest
            ),
        )
        if by_input or by_weight:  # PyTorch leaves the bias's out where it is alone
            found = in_graph(found)
        return *found, *(None for _ in range(1 + len(ctx.rest)))


class InputGradientFunction(torch.autograd.Function):
    """G."""

    @staticmethod
    def forward(
        ctx: Any, grad_output: Tensor, weight: Tensor, input_size: Sequence[int], *rest: Any
    ) -> Tensor:
        ctx.rest, ctx.weight_size = rest, weight.shape
        by_grad, by_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(grad_output if by_weight else None, weight if by_grad else None)
        with torch._C._AutoDispatchBelowAutograd():
            result = torch.ops.upconv.conv_transpose_grad_input(
                grad_output, weight, input_size, *rest
            )
        assert isinstance(result, Tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (second,) = gradients
        grad_output, weight = ctx.saved_tensors
        by_grad, by_weight = ctx.needs_input_grad[:2]
        ndim = len(ctx.weight_size) - 2
        found: tuple[Tensor | None, ...] = (
            _operator(ndim)(second, weight, None, *ctx.rest) if by_grad else None,
            torch.ops.upconv.conv_transpose_grad_weight(
                grad_output, second, ctx.weight_size, *ctx.rest
            )
            if by_weight
            else None,
        )
        return *in_graph(found), *(None for _ in range(1 + len(ctx.rest)))


class WeightGradientFunction(torch.autograd.Function):
    """W."""

    @staticmethod
    def forward(
        ctx: Any, grad_output: Tensor, input: Tensor, weight_size: Sequence[int], *rest: Any
    ) -> Tensor:
        ctx.rest, ctx.input_size = rest, input.shape
        by_grad, by_input = ctx.needs_input_grad[:2]
        ctx.save_for_backward(grad_output if by_input else None, input if by_grad else None)
        with torch._C._AutoDispatchBelowAutograd():
            result = torch.ops.upconv.conv_transpose_grad_weight(
                grad_output, input, weight_size, *rest
            )
        assert isinstance(result, Tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (second,) = gradients
        grad_output, input = ctx.saved_tensors
        by_grad, by_input = ctx.needs_input_grad[:2]
        ndim = second.dim() - 2
        found: tuple[Tensor | None, ...] = (
            _operator(ndim)(input, second, None, *ctx.rest) if by_grad else None,
            torch.ops.upconv.conv_transpose_grad_input(
                grad_output, second, ctx.input_size, *ctx.rest
            )
            if by_input
            else None,
        )
        return *in_graph(found), *(None for _ in range(1 + len(ctx.rest)))


def _operator(ndim: int) -> Callable[..., Tensor]:
    packets = (
        torch.ops.upconv.conv_transpose1d,
        torch.ops.upconv.conv_transpose2d,
        torch.ops.upconv.conv_transpose3d,
    )
    return packets[ndim - 1].default


def conv_transpose(
    ndim: int, input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> Tensor:
    """T at the level of automatic differentiation."""
    if transformed() or not ordinary(input, weight, bias):
        if ordinary(input, weight, bias):  # others have rules of their own
            check_call(ndim, input, weight, bias, *rest)
        return aten_conv_transpose(ndim, input, weight, bias, *rest)
    if records_gradient(input, weight, bias):
        result = ConvTransposeFunction.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, ndim, *rest
        )
        assert isinstance(result, Tensor)
        return result
    with torch._C._AutoDispatchBelowAutograd():
        return _operator(ndim)(input, weight, bias, *rest)


def input_gradient(
    grad_output: Tensor, weight: Tensor, input_size: Sequence[int], *rest: Any
) -> Tensor:
    """G at the level of automatic differentiation."""
    if transformed() or not ordinary(grad_output, weight):
        return aten_input_gradient(grad_output, weight, input_size, *rest)
    if records_gradient(grad_output, weight):
        result = InputGradientFunction.apply(  # type: ignore[no-untyped-call]
            grad_output, weight, input_size, *rest
        )
    else:
        with torch._C._AutoDispatchBelowAutograd():
            result = torch.ops.upconv.conv_transpose_grad_input(
                grad_output, weight, input_size, *rest
            )
    assert isinstance(result, Tensor)
    return result


def weight_gradient(
    grad_output: Tensor, input: Tensor, weight_size: Sequence[int], *rest: Any
) -> Tensor:
    """W at the level of automatic differentiation."""
    if transformed() or not ordinary(grad_output, input):
        return aten_weight_gradient(grad_output, input, weight_size, *rest)
    if records_gradient(grad_output, input):
        result = WeightGradientFunction.apply(  # type: ignore[no-untyped-call]
            grad_output, input, weight_size, *rest
        )
    else:
        with torch._C._AutoDispatchBelowAutograd():
            result = torch.ops.upconv.conv_transpose_grad_weight(
                grad_output, input, weight_size, *rest
            )
    assert isinstance(result, Tensor)
    return result
