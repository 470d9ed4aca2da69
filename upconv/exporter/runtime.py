"""What an exported file does around its kernel: the text from BEGIN to END is copied into it.

A real module, so that it is checked and formatted like the rest; the stand-ins below END are what
the exporter writes for each layer. Names begin with `_` (see rules.py for the reasons), and
annotations must be evaluable where they stand: an exported file has no `from __future__`.
"""

from __future__ import annotations

import contextlib as _contextlib
import ctypes as _ctypes
import hashlib as _hashlib
import os as _os
import time as _time
from types import SimpleNamespace as _SimpleNamespace
from typing import Any as _Any

import torch
from torch import nn as _nn  # noqa: F401 (ModelNew uses it)
from torch.utils import cpp_extension as _cpp_extension

# BEGIN
# --- One call ---------------------------------------------------------------------------------


def _conv_transpose(x: torch.Tensor, layer: _Any) -> _Any:
    """What `layer`, an nn.ConvTranspose, answers to x. Raises where the kernel cannot serve."""
    if x.dim() == len(layer.kernel_size) + 1:  # without a batch
        return _conv_transpose(x.unsqueeze(0), layer).squeeze(0)
    options = (layer.stride, layer.padding, layer.output_padding, layer.dilation, layer.groups)
    operands = (x, layer.weight, layer.bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        return _ConvTranspose.apply(*operands, options)  # type: ignore[no-untyped-call]
    return _launch(*operands, options)


class _ConvTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Any, x: _Any, weight: _Any, bias: _Any, options: _Any) -> _Any:
        ctx.save_for_backward(x, weight)
        ctx.options = options
        ctx.bias_size = None if bias is None else [bias.shape[0]]
        return _launch(x, weight, bias, options)

    @staticmethod
    def backward(ctx: _Any, grad: _Any) -> _Any:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        return (*_gradients(grad, x, weight, ctx.bias_size, ctx.options, wanted), None)


def _gradients(
    grad: _Any, x: _Any, weight: _Any, bias_size: _Any, options: _Any, wanted: _Any
) -> _Any:
    """Gradients of x, weight and bias, those that are wanted. PyTorch computes them, for now."""
    stride, padding, output_padding, dilation, groups = options
    return torch.ops.aten.convolution_backward(
        grad,
        x,
        weight,
        bias_size,
        stride,
        padding,
        dilation,
        True,  # transposed
        output_padding,
        groups,
        wanted,
    )


def _launch(x: _Any, weight: _Any, bias: _Any, options: _Any) -> torch.Tensor:
    """The kernel, on the current stream. Nothing is kept from call to call but the plan."""
    plan = _plan(x, weight, bias, options)
    x = x.contiguous(memory_format=plan.layout)
    if x.data_ptr() % 16:  # a view that starts between the 16-byte vectors that the kernel reads
        x = x.clone(memory_format=plan.layout)
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = torch.empty(plan.shape, dtype=x.dtype, device=x.device, memory_format=plan.layout)
    if plan.handle:
        scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=x.device)
        error = _LIBRARY.upconv_forward(
            plan.handle,
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            scratch.data_ptr(),
            x.device.index,
            torch.cuda.current_stream(x.device).cuda_stream,
        )
        if error:
            raise RuntimeError(f"the kernel failed: {error.decode()} (input {tuple(x.shape)})")
    return y.contiguous(memory_format=torch.channels_last) if plan.turned else y


# --- What the kernel can serve ----------------------------------------------------------------


def _plan(x: _Any, weight: _Any, bias: _Any, options: _Any) -> _Any:
    """The plan of a call, made and checked when the first call of its kind comes.

    PyTorch's rule of layouts: the output is channels_last when either operand is.
    """
    if _TF32:
        precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        if precision != "tf32":
            raise RuntimeError(
                "this file computes float32 in TF32, rounded to nearest as PyTorch does, but "
                f"torch.backends.cudnn.conv.fp32_precision is {precision!r}: set it to 'tf32', "
                "PyTorch's default"
            )
    channels_last = x.dim() == 4 and any(
        not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)
        for t in (x, weight)
    )
    tensors = (x, weight) if bias is None else (x, weight, bias)
    key = (channels_last, options, *[(t.shape, t.dtype, t.device) for t in tensors])
    plan = _PLANS.get(key)
    if plan is None:
        _check(x, weight, bias, options[4])
        plan = _PLANS[key] = _make_plan(x, weight, bias, options, channels_last)
    return plan


def _check(x: _Any, weight: _Any, bias: _Any, groups: int) -> None:
    """RuntimeError for tensors that the kernel would misread."""
    if not x.is_cuda:
        raise RuntimeError(f"the kernel runs on a GPU, the input is on {x.device}: move it there")
    for what, tensor in (("input", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != _DTYPE:
            raise RuntimeError(
                f"this file was exported for {_DTYPE}, the {what} is {tensor.dtype}: convert it, "
                "or export again with --dtype"
            )
        if tensor is not None and tensor.device != x.device:
            raise RuntimeError(
                f"the input is on {x.device}, the {what} on {tensor.device}: move one of them"
            )
    channels, outputs = weight.shape[0], weight.shape[1] * groups
    if x.dim() != weight.dim() or x.shape[1] != channels or 0 in x.shape[1:]:
        raise RuntimeError(
            f"the layer takes (N, {channels}, and {weight.dim() - 2} sizes), N optional; "
            f"the input is {tuple(x.shape)}"
        )
    if bias is not None and bias.shape != (outputs,):
        raise RuntimeError(f"the layer has {outputs} output channels, its bias {tuple(bias.shape)}")


def _make_plan(x: _Any, weight: _Any, bias: _Any, options: _Any, channels_last: bool) -> _Any:
    """Asks the planner; a layout that it refuses is computed contiguous and turned afterwards."""
    stride, padding, output_padding, dilation, groups = options
    reason, dtype = "", str(_DTYPE).split(".")[1]
    for last in {channels_last: None, False: None}:
        problem = _PLANNER.Problem(
            batch=x.shape[0],
            in_channels=weight.shape[0],
            out_channels=weight.shape[1] * groups,
            in_size=tuple(x.shape[2:]),
            kernel=tuple(weight.shape[2:]),
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            dilation=dilation,
            groups=groups,
            bias=bias is not None,
            dtype=dtype,
            channels_last=last,
            tf32=_TF32,
        )
        plan = _SimpleNamespace(
            handle=None,  # an empty batch needs none
            scratch_bytes=0,
            shape=(problem.batch, problem.out_channels, *problem.out_size),
            layout=torch.channels_last if last else torch.contiguous_format,
            turned=channels_last != last,
        )
        if problem.batch == 0 and min(problem.out_size) > 0:
            return plan
        answer = _PLANNER.consider(problem, _hardware(x.device))
        if not isinstance(answer, _PLANNER.Refusal):
            record = (_ctypes.c_int64 * len(answer.params))(*answer.params)
            plan.handle = _LIBRARY.upconv_plan(record, len(answer.params))
            if not plan.handle:
                raise RuntimeError(f"planner and kernel disagree about {problem}")
            plan.scratch_bytes = _LIBRARY.upconv_scratch_bytes(plan.handle)
            return plan
        reason = answer.reason
    raise RuntimeError(f"the kernel cannot serve an input of {tuple(x.shape)}: {reason}")


def _hardware(device: _Any) -> _Any:
    found = torch.cuda.get_device_properties(device)
    # The most one thread group may ask for; older torch does not tell, and since Volta every GPU
    # keeps 1 KiB of a multiprocessor's memory for itself.
    shared = getattr(found, "shared_memory_per_block_optin", 0)
    return _PLANNER.Hardware(
        "cuda",
        name=found.name,
        capability=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        shared_memory=shared or found.shared_memory_per_multiprocessor - 1024,
    )


# --- The build --------------------------------------------------------------------------------


def _build() -> _Any:
    """The compiled kernel. Built once per machine; needs nvcc, but neither a GPU nor PyTorch's
    headers, which would take longer to compile than the kernel does."""
    parts = (_CUDA_SOURCE, *_CUDA_FLAGS, str(torch.version.cuda))
    name = f"{_NAME}_{_hashlib.sha256(''.join(parts).encode()).hexdigest()[:16]}"
    _wait_for_other_builds(name)
    path = _cpp_extension.load_inline(  # type: ignore[no-untyped-call]
        name=name,
        cpp_sources="",
        cuda_sources=_CUDA_SOURCE,
        extra_cuda_cflags=list(_CUDA_FLAGS),
        no_implicit_headers=True,
        is_python_module=False,
    )
    library = _ctypes.CDLL(path)
    pointer = _ctypes.c_void_p
    library.upconv_plan.restype = pointer
    library.upconv_plan.argtypes = [_ctypes.POINTER(_ctypes.c_int64), _ctypes.c_int64]
    library.upconv_scratch_bytes.restype = _ctypes.c_int64
    library.upconv_scratch_bytes.argtypes = [pointer]
    library.upconv_forward.restype = _ctypes.c_char_p
    library.upconv_forward.argtypes = [*[pointer] * 6, _ctypes.c_int, pointer]
    return library


def _wait_for_other_builds(name: str) -> None:
    """Another process may be building; if it was killed, load_inline would wait for it for ever.
    Builds take seconds: a lock that is five minutes old belongs to none that is alive."""
    lock = _os.path.join(_cpp_extension._get_build_directory(name, verbose=False), "lock")
    with _contextlib.suppress(FileNotFoundError):  # gone: the other build is done
        while _time.time() - _os.path.getmtime(lock) < 300:
            _time.sleep(0.2)
        _os.remove(lock)


# END

_NAME = ""
_DTYPE = torch.float32
_TF32 = True
_CUDA_SOURCE = ""
_CUDA_FLAGS: tuple[str, ...] = ()
_PLANS: dict[_Any, _Any] = {}
_PLANNER: _Any = None
_LIBRARY: _Any = None
