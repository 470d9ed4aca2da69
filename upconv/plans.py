"""Between the operators and the planner: which kernel serves a call, as flat integers.

The compiled side describes a call by a *key* of integers, looks it up in its own table, and asks
`answer` when it is not there. The answer is a *record*, `[kernel id, *parameters]`. Both layouts
are stated here and in csrc/binding/common.h; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from . import env, libraries
from .planner import ATEN, DIRECTIONS, MOST_PHASES, Hardware, Plan, Problem, make_plan

if TYPE_CHECKING:
    from torch import Tensor

KERNEL_IDS = {
    ATEN: 0,
    "cpu_fprop": 1,
    "sm90_wgmma_fprop": 2,
    "mma_fprop": 3,
    "direct_fprop": 4,
    "sm90_wgmma_wgrad": 5,
    "direct_wgrad": 6,
    "direct_igrad": 7,
    "gather_wgrad": 8,
    "gather_igrad": 9,
    "sm90_patch": 10,
    "sm90_patch_wgrad": 11,
    "sm90_phases": 12,
    "sm90_phases_wgrad": 13,
    "overlap_fprop": 14,
    "depthwise_igrad": 15,
    "depthwise_wgrad": 16,
    "sm90_walk": 17,
}
ASK_AGAIN = -1
"""In a kernel's place: PyTorch's operator for this call, and the next one asks again."""
DEVICE_KINDS = ("cpu", "cuda")
DTYPES = ("float32", "float64", "bfloat16", "float16")
KEY_HEADER = (
    "device_kind",
    "device_index",
    "dtype",
    "channels_last",
    "tf32",
    "has_bias",
    "threads",
    "ndim",
    "batch",
    "in_channels",
    "out_channels",
    "groups",
    "direction",
)
"""The first integers of a key; `ndim` values each of KEY_LISTS follow."""
KEY_LISTS = ("in_size", "kernel", "stride", "padding", "output_padding", "dilation")

_TORCH_DTYPES = {getattr(torch, name): index for index, name in enumerate(DTYPES)}
_forced: list[str | None] = []
_given: list[list[int]] = []
_clearing: list[Callable[[], None]] = []


def key_of(
    ndim: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lists: Sequence[Sequence[int]],
    groups: int,
) -> list[int] | None:
    """The key of a checked call, or None when no kernel of ours could ever serve it.

    `lists` is stride, padding, output_padding and dilation, expanded to every dimension.
    """
    kind = input.device.type
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if (
        kind not in DEVICE_KINDS
        or input.dtype not in _TORCH_DTYPES
        or any(
            t.dtype != input.dtype or t.device != input.device or t.layout != torch.strided
            for t in tensors
        )
    ):
        return None
    on_gpu = kind == "cuda"
    batch = input.shape[0] if input.dim() == ndim + 2 else 1
    return [
        DEVICE_KINDS.index(kind),
        input.device.index or 0,
        _TORCH_DTYPES[input.dtype],
        int(channels_last(ndim, input, weight)),
        int(on_gpu and input.dtype == torch.float32 and tf32_allowed()),
        int(bias is not None),
        0 if on_gpu else torch.get_num_threads(),
        ndim,
        batch,
        weight.shape[0],
        weight.shape[1] * groups,
        groups,
        DIRECTIONS.index("forward"),
        *input.shape[-ndim:],
        *weight.shape[2:],
        *(value for values in lists for value in values),
    ]


def gradient_key_of(
    direction: str,
    grad_output: Tensor,
    other: Tensor,
    sizes: tuple[Sequence[int], Sequence[int]],
    lists: Sequence[Sequence[int]],
    groups: int,
) -> list[int] | None:
    """The same for a gradient; `other` is the weight or the input, `sizes` those of both.

    None also where the layouts of the two tensors differ: which of them PyTorch's answer then has
    depends on its backend.
    """
    input_size, weight_size = sizes
    ndim = len(weight_size) - 2
    batched = len(input_size) == ndim + 2
    kind = grad_output.device.type
    if (
        kind not in DEVICE_KINDS
        or grad_output.dtype not in _TORCH_DTYPES
        or any(t.layout != torch.strided for t in (grad_output, other))
        or (other.dtype, other.device) != (grad_output.dtype, grad_output.device)
    ):
        return None
    last = [_strides_channels_last(t) for t in (grad_output, other) if t.dim() == ndim + 2]
    if any(last) and not (all(last) and batched):
        return None
    on_gpu = kind == "cuda"
    return [
        DEVICE_KINDS.index(kind),
        grad_output.device.index or 0,
        _TORCH_DTYPES[grad_output.dtype],
        int(any(last)),
        int(on_gpu and grad_output.dtype == torch.float32 and tf32_allowed()),
        0,
        0 if on_gpu else torch.get_num_threads(),
        ndim,
        input_size[0] if batched else 1,
        weight_size[0],
        weight_size[1] * groups,
        groups,
        DIRECTIONS.index(direction),
        *input_size[-ndim:],
        *weight_size[2:],
        *(value for values in lists for value in values),
    ]


def channels_last(ndim: int, input: Tensor, weight: Tensor) -> bool:
    """PyTorch's rule: the output is channels_last when either operand has such strides.

    A 1-D convolution is a 2-D one of height 1 to PyTorch, so that its operands count as well. An
    unbatched input gets a batch of 1, whose stride is ambiguous and does not count.
    """
    return _strides_channels_last(
        input if input.dim() == ndim + 2 else input.unsqueeze(0)
    ) or _strides_channels_last(weight)


def _strides_channels_last(tensor: Tensor) -> bool:
    """What TensorImpl::is_strides_like_channels_last says of the tensor with 2 spatial sizes."""
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(2)
    sizes, strides = tensor.shape, tensor.stride()
    least = 0
    if strides[1] == 0:
        return False
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        if sizes[dim] == 0 or strides[dim] < least:
            return False
        if dim == 0 and least == strides[1]:
            return False
        least = strides[dim]
        if sizes[dim] > 1:
            least *= sizes[dim]
    return True


def problem_of(key: Sequence[int]) -> Problem:
    """The problem that a key describes."""
    head = dict(zip(KEY_HEADER, key, strict=False))
    ndim = head["ndim"]
    if len(key) != len(KEY_HEADER) + len(KEY_LISTS) * ndim:
        raise ValueError(f"a key of {ndim} dimensions does not have {len(key)} integers: {key}")
    start = len(KEY_HEADER)
    lists = {
        name: tuple(key[start + index * ndim : start + (index + 1) * ndim])
        for index, name in enumerate(KEY_LISTS)
    }
    return Problem(
        batch=head["batch"],
        in_channels=head["in_channels"],
        out_channels=head["out_channels"],
        groups=head["groups"],
        bias=bool(head["has_bias"]),
        dtype=DTYPES[head["dtype"]],
        channels_last=bool(head["channels_last"]),
        tf32=bool(head["tf32"]),
        direction=DIRECTIONS[head["direction"]],
        **lists,
    )


def plan_of(key: Sequence[int]) -> Plan | None:
    """The plan of a key, or None when PyTorch is to have the call without further thought."""
    if env.settings().backend == "aten":
        return None
    problem = problem_of(key)
    if problem.batch == 0 or min(problem.out_size) < 1 or max(problem.stride) > MOST_PHASES:
        return None
    if 0 in problem.dilation:  # of kernels of 1, where PyTorch takes it
        return None
    kind, index, threads = DEVICE_KINDS[key[0]], key[1], key[KEY_HEADER.index("threads")]
    machine = cuda_hardware(index) if kind == "cuda" else cpu_hardware(threads)
    return make_plan(problem, machine, forced_kernel())


def gradient_plan(forward: Plan, direction: str) -> Plan:
    """The plan of a gradient of the same layer. A GPU computes weight's and bias's together."""
    with_bias = forward.hardware.kind == "cuda" and direction == "grad_weight"
    bias = forward.problem.bias and with_bias
    problem = replace(forward.problem, direction=direction, bias=bias)
    return make_plan(problem, forward.hardware, forced_kernel())


def forced_kernel() -> str | None:
    """The kernel that is to serve wherever it is legal; None: the planner's choice."""
    return _forced[-1] if _forced else env.settings().force_kernel


def record(key: Sequence[int]) -> list[int]:
    """What the compiled side keeps for a key: the kernel's number and the kernel's parameters."""
    if _given:
        return list(_given[-1])
    plan = plan_of(key)
    if plan is None:
        return [KERNEL_IDS[ATEN]]
    return [KERNEL_IDS[plan.kernel], *plan.chosen.params]


def answer(key: Sequence[int]) -> list[int]:
    """The record of a key, once the library with its kernel is loaded; PyTorch's without it."""
    made = record(key)
    kernel = next((name for name, number in KERNEL_IDS.items() if made[:1] == [number]), None)
    if kernel not in libraries.BY_OPERAND:
        return made  # in the library that asks
    library = libraries.library_of(DEVICE_KINDS[key[0]], kernel, problem_of(key))
    if libraries.serve(library):
        return made
    # Not to be had at all, or not now: nothing is built while a CUDA graph is captured.
    return [KERNEL_IDS[ATEN] if libraries.gave_up(library) else ASK_AGAIN]


def hardware(device: torch.device) -> Hardware:
    """The machine behind a torch device, as the planner sees it."""
    if device.type == "cuda":
        return cuda_hardware(torch.cuda.current_device() if device.index is None else device.index)
    return cpu_hardware(torch.get_num_threads())


@lru_cache(maxsize=64)
def cpu_hardware(threads: int) -> Hardware:
    capability = torch.backends.cpu.get_cpu_capability().lower()
    best = "avx512" if "avx512" in capability else "avx2" if "avx2" in capability else "scalar"
    levels = ("scalar", "avx2", "avx512")
    asked = env.settings().isa
    isa = best if asked == "auto" else min(best, asked, key=levels.index)
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    native = any(getattr(torch.cpu, probe, bool)() for probe in probes)
    return Hardware("cpu", name="CPU", threads=threads, isa=isa, native_16bit=native)


@lru_cache(maxsize=64)
def cuda_hardware(index: int) -> Hardware:
    device = torch.cuda.get_device_properties(index)
    # The most one block may ask for; the attribute is newer than the oldest torch we serve, and
    # since Volta every architecture keeps 1 KiB of the multiprocessor's memory for itself.
    shared = getattr(device, "shared_memory_per_block_optin", 0)
    return Hardware(
        "cuda",
        name=device.name,
        capability=(device.major, device.minor),
        multiprocessors=device.multi_processor_count,
        shared_memory=shared or device.shared_memory_per_multiprocessor - 1024,
    )


def tf32_allowed() -> bool:
    """May a float32 convolution on the GPU round to TF32? The one switch read is PyTorch's own.

    Not `cudnn.allow_tf32`: reading that raises as soon as old and new settings disagree.
    """
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def on_clear(callback: Callable[[], None]) -> None:
    """Register what must be forgotten when plans are."""
    _clearing.append(callback)


def clear() -> None:
    """Forget every plan: the next call of each kind is planned anew."""
    cpu_hardware.cache_clear()
    for callback in _clearing:
        callback()


@contextmanager
def forced(kernel: str | None) -> Iterator[None]:
    """Inside, the named kernel serves wherever it is legal, whatever it costs.

    None: what the environment says. For tests and measurements.
    """
    if kernel is not None and kernel not in KERNEL_IDS:
        raise ValueError(f"no kernel {kernel!r}; there are {', '.join(KERNEL_IDS)}")
    _forced.append(kernel or env.settings().force_kernel)
    clear()
    try:
        yield
    finally:
        _forced.pop()
        clear()


@contextmanager
def given(kernel: str, params: Sequence[int]) -> Iterator[None]:
    """Inside, every call runs this plan of its own layer. For tests and measurements."""
    _given.append([KERNEL_IDS[kernel], *params])
    clear()
    try:
        yield
    finally:
        _given.pop()
        clear()
