"""How long PyTorch's own operator takes on a GPU: an estimate that rather flatters it.

Measured on an H200 with torch 2.11 on 26 layers. On the contiguous layout cuDNN copies input and
output to channels_last and back, and adds the bias in a pass of its own. The convolution itself
takes 1.3 to 1.6 times what the arithmetic needs at stride 1, 2.0 and more at larger strides, and
3.4 to 5.4 times in TF32 in two dimensions where the taps of neighbouring outputs overlap. The
copies take 0.9 to 2.3 times the least traffic where arithmetic dominates, 3.2 to 8 times where
memory does. On channels_last tensors it comes close to the floor. Where our own estimate is not
below this one, PyTorch keeps the call: nobody is to get slower by installing upconv.
"""

from __future__ import annotations

from math import prod

from .problem import Problem

TERAFLOPS = {"float64": 60.0, "float32": 421.0, "bfloat16": 805.0, "float16": 760.0}
"""Sustained matrix rates of an H200; float32 is TF32."""
COPY_TERABYTES = 4.27
CALL_MICROSECONDS = 8.0


GRADIENT = {
    "grad_input": {"float32": (1.9, 1.2), "small": (1.4, 1.1)},
    "grad_weight": {"float32": (2.4, 1.6), "small": (1.9, 1.7)},
}
"""How many times the arithmetic the gradients take on the contiguous layout, by dtype: where taps
of neighbouring outputs overlap (grad_input: at stride 1), and elsewhere. Below what was
measured on 9 layers."""
GRADIENT_TRAFFIC = {"grad_input": 2.0, "grad_weight": 2.4}
"""The copies to channels_last and back, as a multiple of the least traffic."""


def gradient_microseconds(problem: Problem) -> float:
    arithmetic, memory = _least(problem)
    kind = "float32" if problem.dtype == "float32" else "small"
    if problem.direction == "grad_input":
        overlap = max(problem.stride) == 1
    else:
        overlap = any(k > s for k, s in zip(problem.kernel, problem.stride, strict=True))
    share = GRADIENT[problem.direction][kind][0 if overlap else 1]
    copies = GRADIENT_TRAFFIC[problem.direction] * memory
    return share * arithmetic + copies + CALL_MICROSECONDS


def _least(problem: Problem) -> tuple[float, float]:
    """Microseconds of the arithmetic and of the traffic by themselves."""
    arithmetic = problem.flops / TERAFLOPS[problem.dtype] / 1e6
    return arithmetic, problem.bytes / COPY_TERABYTES / 1e6


def aten_microseconds(problem: Problem) -> float:
    arithmetic, memory = _least(problem)
    if problem.channels_last:
        return max(1.1 * arithmetic, 1.3 * memory) + CALL_MICROSECONDS
    if problem.direction != "forward":
        return gradient_microseconds(problem)
    outputs = problem.batch * problem.out_channels * prod(problem.out_size)
    bias_pass = 2 * outputs * problem.element_bytes if problem.bias else 0
    if max(problem.stride) == 1:
        share, traffic = 1.35, 2.6
    else:
        overlap = any(k > s for k, s in zip(problem.kernel, problem.stride, strict=True))
        share = 3.4 if overlap and problem.dtype == "float32" and problem.ndim > 1 else 2.0
        traffic = 2.0 if arithmetic > 2 * memory else 3.2
    copies = traffic * memory + bias_pass / COPY_TERABYTES / 1e6
    return share * arithmetic + copies + CALL_MICROSECONDS


def aten_note(problem: Problem) -> str:
    if problem.channels_last:
        return "PyTorch's own operator, which reads and writes channels_last directly"
    return "PyTorch's own operator, with its copies to channels_last and back"
