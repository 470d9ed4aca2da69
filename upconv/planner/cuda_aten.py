"""How long PyTorch's own operator takes on a GPU: an estimate that rather flatters it.

Measured on an H200 with torch 2.11 on 26 layers. On the contiguous layout cuDNN copies input and
output to channels_last and back (0.9 to 6 times the least traffic, 2.3 and more on most), convolves
at 1.3 to 1.6 times the time that the arithmetic needs at stride 1, 2.0 to 5.4 times at larger
strides, and adds the bias in a pass of its own. On channels_last tensors it comes close to the
floor. Where our own estimate is not below this one, PyTorch keeps the call: nobody is to get slower
by installing upconv.
"""

from __future__ import annotations

from math import prod

from .problem import Problem

TERAFLOPS = {"float64": 60.0, "float32": 421.0, "bfloat16": 805.0, "float16": 760.0}
"""Sustained matrix rates of an H200; float32 is TF32."""
COPY_TERABYTES = 4.27
CALL_MICROSECONDS = 8.0


def aten_microseconds(problem: Problem) -> float:
    arithmetic = problem.flops / TERAFLOPS[problem.dtype] / 1e6
    memory = problem.bytes / COPY_TERABYTES / 1e6
    if problem.channels_last:
        return max(1.1 * arithmetic, 1.3 * memory) + CALL_MICROSECONDS
    share = 1.35 if max(problem.stride) == 1 else 2.0
    outputs = problem.batch * problem.out_channels * prod(problem.out_size)
    bias_pass = 2 * outputs * problem.element_bytes if problem.bias else 0
    copies = 2.6 * memory + bias_pass / COPY_TERABYTES / 1e6
    return share * arithmetic + copies + CALL_MICROSECONDS


def aten_note(problem: Problem) -> str:
    if problem.channels_last:
        return "PyTorch's own operator, which reads and writes channels_last directly"
    return "PyTorch's own operator, with its copies to channels_last and back"
