"""The compiled libraries: what each of them holds, and how one comes into the process.

    cpu          everything on the CPU
    cuda         the GPU's operators; its kernels, with TF32 and BF16 on the tensor cores
    cuda_wgrad   the gradient of the weight on a GPU, which inference does without
    cuda_fp16    the kernels of `cuda` for FP16 on the tensor cores
    cuda_strict  the same for float32 that must not be rounded to TF32

Each is built and loaded when it is first needed. The last two hold kernels only, which the
operators of `cuda` run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .planner import Problem

KINDS = ("cpu", "cuda", "cuda_wgrad", "cuda_fp16", "cuda_strict")

OPERANDS = ("tf32", "bf16", "fp16", "split")
"""What the tensor cores are given, by the numbers of the planner and of csrc/cuda/*_launch.cu."""

OPERANDS_OF = {"cuda": ("tf32", "bf16"), "cuda_fp16": ("fp16",), "cuda_strict": ("split",)}
"""Which library has which, for all kernels in BY_OPERAND. cuda_wgrad has all four."""

BY_OPERAND = (
    "sm90_wgmma_fprop",
    "sm90_patch",
    "sm90_phases",
    "sm90_walk",
    "mma_fprop",
    "overlap_fprop",
    "gather_igrad",
)

_PROOF = {
    "cpu": ("upconv::conv_transpose2d", "CPU"),
    "cuda": ("upconv::conv_transpose2d", "CUDA"),
    "cuda_wgrad": ("upconv::conv_transpose_grad_weight", "CUDA"),
    "cuda_fp16": ("upconv::_cuda_fp16_kernels", "CompositeExplicitAutograd"),
    "cuda_strict": ("upconv::_cuda_strict_kernels", "CompositeExplicitAutograd"),
}
"""An operator that the library implements, and for what."""

_not_served: set[str] = set()


def of_device(device: str) -> list[str]:
    """All libraries that calls on a device may need."""
    return [kind for kind in KINDS if kind.split("_")[0] == device]


def operand_bits(kind: str) -> int:
    """UPCONV_OPERAND_BITS of a library: one for each of its operands."""
    return sum(1 << OPERANDS.index(operand) for operand in OPERANDS_OF[kind])


def operand_of(problem: Problem) -> str | None:
    """What the tensor cores are given for a problem's numbers; None: they cannot take them."""
    if problem.dtype == "float32":
        return "split" if problem.strict else "tf32"
    return {"bfloat16": "bf16", "float16": "fp16"}.get(problem.dtype)


def library_of(device: str, kernel: str, problem: Problem) -> str:
    """The library that holds a kernel in the type of a problem that it can serve."""
    if device != "cuda":
        return device
    if problem.direction == "grad_weight":
        return "cuda_wgrad"
    if kernel not in BY_OPERAND:
        return "cuda"
    operand = operand_of(problem)
    return next(kind for kind, operands in OPERANDS_OF.items() if operand in operands)


def needed_for(device: str, kernel: str, problem: Problem) -> tuple[str, str]:
    """What a call by a kernel takes: the library with the operators, and the kernel's own."""
    return device, library_of(device, kernel, problem)


def why_missing(device: str, kernel: str, problem: Problem) -> str:
    """What of a kernel's libraries is not to be had here, and why; empty where all are."""
    from . import jit

    for kind in needed_for(device, kernel, problem):
        if reason := jit.obstacle(kind):
            return f"the library {kind} is not available ({reason})"
    return ""


def compiled(kind: str) -> bool:
    """Has a library been loaded?"""
    import torch

    return torch._C._dispatch_has_kernel_for_dispatch_key(*_PROOF[kind])


def serve(kind: str) -> bool:
    """Have a library in this process: built and loaded first, unless that was tried before."""
    import torch

    if compiled(kind):
        return True
    if gave_up(kind) or (kind != "cpu" and torch.cuda.is_current_stream_capturing()):
        return False  # a build inside a CUDA graph would end the capture
    from . import jit

    if not (jit.load(kind).ok and compiled(kind)):
        _not_served.add(kind)
    return not gave_up(kind)


def gave_up(kind: str) -> bool:
    """Was the library tried and not to be had? That holds for the life of the process."""
    return kind in _not_served
