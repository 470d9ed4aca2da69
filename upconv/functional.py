"""`conv_transpose1d/2d/3d`: the signature and the semantics of `torch.nn.functional`'s.

A call of a kind that came before costs one look-up in a dictionary of *routes*, which says how to
go on: by PyTorch's function, or by our operator with its arguments in the form that the operator
parses fastest (trailing defaults left out, equal values given once: 3 us less a call). PyTorch's
function is right for any tensors, whatever the dictionary says, and the operator makes its own
plan; so the key may leave out what seldom changes the choice, such as the strides of the tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import ops, plans
from .autograd import ATEN_CONV, pytorch_errs, records_gradient
from .checks import check_call, expand_all
from .planner import Plan
from .recording import why_pytorchs

Size = int | tuple[int, ...] | list[int]
"""One integer for every spatial dimension, or one for each."""

MOST_ROUTES = 16384
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None))
_DEFAULTS = ((1,), (0,), (0,), 1, (1,))

_NOT_OVERRIDDEN = (
    Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    torch._C._disabled_torch_function_impl,  # of parameters
)

_is_compiling = torch.compiler.is_compiling

_Route = tuple[tuple[Any, ...], bool, bool | None, tuple[Any, ...]]
# Per kind of call: None for PyTorch's function; else the arguments of the operator after the bias,
# whether it is the operator when gradients are not recorded and when they are (None: not known
# yet), and the stride, padding, output padding and dilation as the first call gave them.
_routes: dict[Any, _Route | None] = {}
plans.on_clear(_routes.clear)


class ConvTransposeFunction(Protocol):
    """The type of all three functions."""

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        dilation: Size = 1,
    ) -> Tensor: ...


def _make_function(ndim: int) -> ConvTransposeFunction:
    aten, op = ATEN_CONV[ndim - 1], ops.FORWARD[ndim - 1]

    def conv_transpose(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        dilation: Size = 1,
    ) -> Tensor:
        if _is_compiling():
            sizes = (_each(size, ndim) for size in (stride, padding, output_padding))
            return op(input, weight, bias, *sizes, groups, _each(dilation, ndim))
        if has_torch_function_variadic(input, weight, bias):
            parameters = (stride, padding, output_padding, groups, dilation)
            return _overridden(conv_transpose, aten, (input, weight, bias), parameters)
        try:
            route = _routes[
                input.shape,
                weight.shape,
                input.dtype,
                input.is_cuda,
                stride,
                padding,
                output_padding,
                groups,
                dilation,
            ]
            served: bool | None = False
            if route is not None:
                served = route[1]
                if served is not route[2] and records_gradient(input, weight, bias):
                    served = route[2]
            if served is False:
                if not (weight.is_meta or (bias is not None and bias.is_meta)):
                    return aten(
                        input, weight, bias, stride, padding, output_padding, groups, dilation
                    )
            elif served and route is not None:
                # 1.0 finds the entry of 1 and (2.0, 2.0) that of (2, 2): the operator would not see
                # the difference. Layers give the same objects every time, which costs less to see.
                known = route[3]
                same = stride is known[0] and padding is known[1]
                same = same and output_padding is known[2] and dilation is known[3]
                same = same or _all_integers(stride, padding, output_padding, dilation)
                if same and type(groups) is int:
                    return op(input, weight, bias, *route[0])
        except (KeyError, TypeError, AttributeError, RuntimeError):
            pass  # a call of a new kind, or a bad one: the long way tells
        return _long_way(
            conv_transpose,
            ndim,
            (input, weight, bias),
            (stride, padding, output_padding, groups, dilation),
        )

    return _named(conv_transpose, ndim)


def _named(function: Any, ndim: int) -> ConvTransposeFunction:
    function.__name__ = function.__qualname__ = f"conv_transpose{ndim}d"
    function.__doc__ = (
        f"`torch.nn.functional.conv_transpose{ndim}d`, by the fastest kernel for the problem."
    )
    result: ConvTransposeFunction = function
    return result


def _hashable(size: Any) -> Any:
    return tuple(size) if type(size) is list else size


def _each(value: Any, ndim: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * ndim


def _is_integer(value: object) -> bool:
    """What PyTorch takes for an int, NumPy's included; booleans and tensors are not."""
    if isinstance(value, (bool, Tensor)):
        return False
    return isinstance(value, (int, torch.SymInt)) or hasattr(type(value), "__index__")


def _index(value: Any) -> Any:
    """NumPy's integers as Python's."""
    return value if isinstance(value, (int, torch.SymInt)) else operator.index(value)


def _well_typed(tensors: tuple[Any, ...], parameters: tuple[Any, ...]) -> bool:
    input, weight, bias = tensors
    stride, padding, output_padding, groups, dilation = parameters
    return (
        isinstance(input, Tensor)
        and isinstance(weight, Tensor)
        and (bias is None or isinstance(bias, Tensor))
        and _is_integer(groups)
        and _all_integers(stride, padding, output_padding, dilation)
    )


def _all_integers(*sizes: Any) -> bool:
    for size in sizes:
        for value in size if isinstance(size, (tuple, list)) else (size,):
            if type(value) is not int and not _is_integer(value):
                return False
    return True


def _overrides(tensor: Any) -> bool:
    """Is it a tensor of a class with a `__torch_function__` of its own?"""
    own = getattr(type(tensor), "__torch_function__", None)
    return isinstance(tensor, Tensor) and getattr(own, "__func__", own) not in _NOT_OVERRIDDEN


def _overridden(
    function: Callable[..., Tensor],
    aten: Callable[..., Tensor],
    tensors: tuple[Any, Any, Any],
    parameters: tuple[Any, ...],
) -> Tensor:
    """For `__torch_function__`: tensors of other classes know PyTorch's function and none of ours;
    modes (a default device, say) and tracers of modules see the one that was called."""
    called = aten if any(map(_overrides, tensors)) else function
    result: Tensor = handle_torch_function(called, tensors, *tensors, *parameters)
    return result


def _long_way(
    function: Callable[..., Tensor],
    ndim: int,
    tensors: tuple[Any, Any, Any],
    parameters: tuple[Any, Any, Any, Any, Any],
) -> Tensor:
    """Check, plan, remember the route, and call."""
    if any(type(size) is list for size in parameters):  # lists cannot be looked up, tuples can
        return function(*tensors, *map(_hashable, parameters))
    aten = ATEN_CONV[ndim - 1]
    if not _well_typed(tensors, parameters):
        return aten(*tensors, *parameters)  # raises, in PyTorch's own words
    input, weight, bias = tensors
    stride, padding, output_padding, groups, dilation = parameters
    rest = (
        *(tuple(map(_index, _each(size, 1))) for size in (stride, padding, output_padding)),
        _index(groups),
        tuple(map(_index, _each(dilation, 1))),
    )
    if torch._C._get_tracing_state():
        # A traced file is loaded, and turned into ONNX, where nobody knows our operators.
        return aten(*tensors, *parameters)
    if not all(type(t) in _PLAIN for t in tensors):
        return ops.FORWARD[ndim - 1](input, weight, bias, *rest)
    check_call(ndim, input, weight, bias, *rest)
    plan = ops.planned(ndim, input, weight, bias, *rest)
    recording = records_gradient(*tensors)
    native = plan is not None and plan.kernel != "aten" and ops.serve(input.device.type)
    route: _Route | None
    errs = pytorch_errs(input)  # then our operator records, whoever computes the forward pass
    if plan is not None and (native or errs or plan.hardware.kind == "cuda"):
        recorded: bool | None
        if plan.hardware.kind == "cuda":
            recorded = _recording_pays(plan, tensors) if recording else None
        else:
            recorded = errs or (native and not why_pytorchs([plan]))
        route = _shortest(ndim, rest), native, recorded, (*parameters[:3], dilation)
    else:
        route = None
    if len(_routes) >= MOST_ROUTES:
        _routes.clear()
    with suppress(TypeError):  # a list among the parameters, or sizes that are symbols
        key = (input.shape, weight.shape, input.dtype, input.is_cuda, *parameters)
        _routes[key] = route
    if route is not None and route[2 if recording else 1]:
        return ops.FORWARD[ndim - 1](input, weight, bias, *rest)
    return aten(*tensors, *parameters)


def _recording_pays(plan: Plan, tensors: tuple[Any, ...]) -> bool:
    """Do the kernels of a GPU save more than it takes to record their gradients?"""
    asked = zip(tensors, ("grad_input", "grad_weight"), strict=False)
    directions = [direction for tensor, direction in asked if tensor.requires_grad]
    passes = [plan, *(plans.gradient_plan(plan, direction) for direction in directions)]
    worth = not why_pytorchs(passes, forced=plans.forced_kernel() is not None)
    return worth and ops.serve(plan.hardware.kind)


def _shortest(ndim: int, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments for the operator, fastest to parse."""
    stride, padding, output_padding, groups, dilation = rest
    lists = expand_all(ndim, stride, padding, output_padding, dilation)
    short = [size[:1] if len(set(size)) == 1 else size for size in lists]
    arguments: list[Any] = [*short[:3], int(groups), short[3]]
    while arguments and arguments[-1] == _DEFAULTS[len(arguments) - 1]:
        arguments.pop()
    return tuple(arguments)


conv_transpose1d = _make_function(1)
conv_transpose2d = _make_function(2)
conv_transpose3d = _make_function(3)
