"""The operators as PyTorch sees them: `torch.ops.upconv.*`.

Schemas are defined here, in Python, so that the operators exist before anything is compiled and
traced graphs that hold them can be loaded at once. A call runs through these levels:

    Autocast            cast as PyTorch does for convolutions                         (Python)
    Autograd            function transforms, gradients (autograd.py)                  (Python)
    AutogradCPU/CUDA    once a library is loaded: straight on when nothing is recorded   (C++)
    backend, unbuilt    check, plan, build and load if the plan wants it, call again  (Python)
    CPU/CUDA            once a library is loaded: look the plan up and run it            (C++)

What takes precedence once loaded is decided by PyTorch's dispatcher: kernels for a device stand
before the ones for an alias, which is what the Python ones are registered under.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import autograd, flops, plans
from .checks import check_call, check_grad_output, expand_all
from .libraries import compiled, serve
from .planner import Plan
from .plans import forced, hardware, tf32_allowed

__all__ = [
    "FORWARD",
    "clear_plans",
    "compiled",
    "forced",
    "hardware",
    "planned",
    "serve",
    "tf32_allowed",
]

_FORWARD_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias=None, SymInt[{n}] stride=1, SymInt[{n}] padding=0, "
    "SymInt[{n}] output_padding=0, SymInt groups=1, SymInt[{n}] dilation=1"
)
_PARAMETERS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt groups, SymInt[] dilation"
)
_GRADIENT_ARGUMENTS = f"Tensor grad_output, Tensor other, SymInt[] size, {_PARAMETERS}"
_SCHEMAS = (
    *(f"conv_transpose{n}d({_FORWARD_ARGUMENTS.format(n=n)}) -> Tensor" for n in (1, 2, 3)),
    "conv_transpose_grad_input(Tensor grad_output, Tensor weight, SymInt[] input_size, "
    f"{_PARAMETERS}) -> Tensor",
    "conv_transpose_grad_weight(Tensor grad_output, Tensor input, SymInt[] weight_size, "
    f"{_PARAMETERS}) -> Tensor",
    "_grad_bias(Tensor grad_output, int ndim) -> Tensor",
    "_grad_weight_and_bias(Tensor grad_output, Tensor input, SymInt[] weight_size, "
    f"{_PARAMETERS}) -> (Tensor, Tensor)",
    # What the compiled side asks of Python: never on a call whose key it has seen before.
    f"_autograd(int ndim, Tensor input, Tensor weight, Tensor? bias, {_PARAMETERS}) -> Tensor",
    f"_check(int ndim, Tensor input, Tensor weight, Tensor? bias, {_PARAMETERS}) -> ()",
    f"_aten_gradient(str direction, {_GRADIENT_ARGUMENTS}) -> Tensor",
    f"_check_gradient(str direction, {_GRADIENT_ARGUMENTS}) -> ()",
    "_make_plan(int[] key) -> int[]",
    # What Python asks of the compiled side.
    "_clear_cpu_plans() -> ()",
    "_clear_cuda_plans() -> ()",
    "_clear_cuda_wgrad_plans() -> ()",
    # What compiled libraries ask of each other: where the table of a library's kernels lies.
    "_cuda_fp16_kernels() -> int",
    "_cuda_strict_kernels() -> int",
)

_library = torch.library.Library("upconv", "DEF")  # type: ignore[no-untyped-call]
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]

FORWARD: tuple[Callable[..., Tensor], ...] = (
    torch.ops.upconv.conv_transpose1d.default,
    torch.ops.upconv.conv_transpose2d.default,
    torch.ops.upconv.conv_transpose3d.default,
)
"""The forward operators, by number of spatial dimensions less one."""

GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "grad_input": torch.ops.upconv.conv_transpose_grad_input.default,
    "grad_weight": torch.ops.upconv.conv_transpose_grad_weight.default,
}


def _parameters(
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> tuple[Sequence[int], Sequence[int], Sequence[int], int, Sequence[int]]:
    """Defaults put in: the dispatcher leaves out trailing arguments that equal them."""
    return stride, padding, output_padding, groups, dilation


def _forward_unbuilt(
    ndim: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, *given: Any
) -> Tensor:
    """The first call on a device, and every call on devices without kernels of ours."""
    rest = _parameters(*given)
    check_call(ndim, input, weight, bias, *rest)
    plan = planned(ndim, input, weight, bias, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        if plan is not None and plan.kernel != "aten" and serve(input.device.type):
            return FORWARD[ndim - 1](input, weight, bias, *rest)
        return autograd.ATEN_CONV[ndim - 1](input, weight, bias, *rest)


def planned(
    ndim: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Plan | None:
    """The plan of a checked call; None where PyTorch is to have it without further thought."""
    lists = expand_all(ndim, stride, padding, output_padding, dilation)
    key = plans.key_of(ndim, input, weight, bias, lists, groups)
    return None if key is None else plans.plan_of(key)


def _forward_fake(
    ndim: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, *given: Any
) -> Tensor:
    """Shape, dtype and strides: PyTorch's own operator on tensors without values.

    Every kernel of ours writes the layout PyTorch would write.
    """
    rest = _parameters(*given)
    check_call(ndim, input, weight, bias, *rest)
    return autograd.ATEN_CONV[ndim - 1](input, weight, bias, *rest)


def _forward_autograd(
    ndim: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, *given: Any
) -> Tensor:
    return autograd.conv_transpose(ndim, input, weight, bias, *_parameters(*given))


def _forward_batched(
    ndim: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, *given: Any
) -> Tensor:
    """vmap: PyTorch's operator has a batching rule."""
    return autograd.aten_conv_transpose(ndim, input, weight, bias, *_parameters(*given))


def _forward_autocast(
    device: str, ndim: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, *given: Any
) -> Tensor:
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor | None) -> Tensor | None:
        eligible = (
            tensor is not None
            and tensor.is_floating_point()
            and tensor.dtype != torch.float64
            and tensor.device.type == device
        )
        return tensor.to(dtype) if tensor is not None and eligible else tensor

    key = "AutocastCPU" if device == "cpu" else "AutocastCUDA"
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return FORWARD[ndim - 1](cast(input), cast(weight), cast(bias), *given)


def _gradient_served(
    direction: str,
    grad_output: Tensor,
    other: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> bool:
    """Checks the call; is a kernel of ours to have it, and its library there, built if need be?"""
    rest = (stride, padding, output_padding, groups, dilation)
    _check_gradient(direction, grad_output, other, size, *rest)
    sizes = (other.shape, size) if direction == "grad_weight" else (size, other.shape)
    ndim = len(sizes[1]) - 2
    lists = expand_all(ndim, stride, padding, output_padding, dilation)
    key = plans.gradient_key_of(direction, grad_output, other, sizes, lists, groups)
    plan = None if key is None else plans.plan_of(key)
    library = grad_output.device.type
    if library == "cuda" and direction == "grad_weight":
        library = "cuda_wgrad"
    return plan is not None and plan.kernel != "aten" and serve(library)


def _gradient_unbuilt(direction: str, *arguments: Any) -> Tensor:
    """A gradient before its library is loaded, and on every device without kernels of ours."""
    served = _gradient_served(direction, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        if served:
            return GRADIENTS[direction](*arguments)
        return _aten_gradient(direction, *arguments)


def _weight_and_bias_unbuilt(grad_output: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Both: on a GPU by what the library has for them, else one after the other.

    The first call, too: a kernel for the weight's gradient alone may round in another order than
    the one for both, and the same inputs are to give the same bits.
    """
    both = grad_output.is_cuda and _gradient_served("grad_weight", grad_output, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        if both:
            weight, bias = torch.ops.upconv._grad_weight_and_bias(grad_output, *rest)
        else:
            weight = GRADIENTS["grad_weight"](grad_output, *rest)
            bias = torch.ops.upconv._grad_bias(grad_output, weight.dim() - 2)
    return weight, bias


def _aten_gradient(direction: str, *arguments: Any) -> Tensor:
    """PyTorch's own; also what the compiled side asks for where the plan says so."""
    with torch._C._AutoDispatchBelowAutograd():
        if direction == "grad_weight":
            return autograd.aten_weight_gradient(*arguments)
        return autograd.aten_input_gradient(*arguments)


def _check_gradient(
    direction: str,
    grad_output: Tensor,
    other: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> None:
    by_weight = direction == "grad_weight"
    input_size, weight_size = (other.shape, size) if by_weight else (size, other.shape)
    parameters = (stride, padding, output_padding, dilation)
    ndim = len(weight_size) - 2
    check_grad_output(ndim, grad_output, input_size, weight_size, parameters, groups)


def clear_plans() -> None:
    """Forget every plan, also where the compiled side keeps them."""
    plans.clear()


def _clear_compiled_plans() -> None:
    for kind in ("cpu", "cuda", "cuda_wgrad"):  # those that keep plans
        if compiled(kind):
            getattr(torch.ops.upconv, f"_clear_{kind}_plans")()


def _implement(name: str, key: str, kernel: Callable[..., Any]) -> None:
    _library.impl(name, kernel, key)  # type: ignore[no-untyped-call]


def _register() -> None:
    for ndim in (1, 2, 3):
        name = f"conv_transpose{ndim}d"
        _implement(name, "CompositeExplicitAutograd", partial(_forward_unbuilt, ndim))
        _implement(name, "Autograd", partial(_forward_autograd, ndim))
        _implement(name, "FuncTorchBatched", partial(_forward_batched, ndim))
        _implement(name, "AutocastCPU", partial(_forward_autocast, "cpu", ndim))
        _implement(name, "AutocastCUDA", partial(_forward_autocast, "cuda", ndim))
        torch.library.register_fake(f"upconv::{name}", partial(_forward_fake, ndim), lib=_library)
    for direction, differentiated, aten in (
        ("grad_input", autograd.input_gradient, autograd.aten_input_gradient),
        ("grad_weight", autograd.weight_gradient, autograd.aten_weight_gradient),
    ):
        name = f"conv_transpose_{direction}"
        _implement(name, "CompositeExplicitAutograd", partial(_gradient_unbuilt, direction))
        _implement(name, "Autograd", differentiated)
        _implement(name, "FuncTorchBatched", aten)
        torch.library.register_fake(f"upconv::{name}", aten, lib=_library)
    _implement("_grad_bias", "CompositeExplicitAutograd", autograd.aten_bias_gradient)
    _implement("_grad_weight_and_bias", "CompositeExplicitAutograd", _weight_and_bias_unbuilt)
    _implement("_autograd", "CompositeImplicitAutograd", autograd.conv_transpose)
    _implement("_check", "CompositeImplicitAutograd", check_call)
    _implement("_aten_gradient", "CompositeExplicitAutograd", _aten_gradient)
    _implement("_check_gradient", "CompositeExplicitAutograd", _check_gradient)
    _implement("_make_plan", "CompositeExplicitAutograd", plans.answer)
    plans.on_clear(_clear_compiled_plans)
    flops.register_at_import()


_register()
