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
FEW_CHANNELS = 8
FEW_CHANNELS_TERAFLOPS = {"strided float32": 13.0, "other": 8.0}
"""With fewer channels than that on either side: 9 to 13 and 2 to 8 over 8 layers."""
DOUBLE_TERAFLOPS = 5.0
"""float64: 0.2 to 5 over 8 layers, far from what the matrix units could do."""


def aten_microseconds(problem: Problem) -> float:
    depthwise = 1 < problem.groups == problem.in_channels
    if depthwise and not problem.channels_last:
        return _depthwise_microseconds(problem)
    return max(_tuned_microseconds(problem), _awkward_microseconds(problem))


def _depthwise_microseconds(problem: Problem) -> float:
    """Time for every output, and for every tap whether it meets an input or not.

    16-bit types have a better kernel where nothing is strided or the kernel is large.
    """
    outputs = problem.batch * problem.out_channels * prod(problem.out_size) / 1e6
    taps = prod(problem.kernel)
    better = problem.element_bytes == 2 and (max(problem.stride) == 1 or taps > 100)
    return outputs * (9.4 + 0.6 * taps) * (0.3 if better else 1.0) + CALL_MICROSECONDS


def _awkward_microseconds(problem: Problem) -> float:
    """Contiguous layers that the tensor cores do not serve; 0 for all others."""
    channels = min(problem.in_channels, problem.out_channels)
    if problem.channels_last:
        return 0.0
    if problem.dtype == "float64":
        return problem.flops / DOUBLE_TERAFLOPS / 1e6 + CALL_MICROSECONDS
    if problem.groups == 1 and channels < FEW_CHANNELS:
        strided = max(problem.stride) > 1 and problem.dtype == "float32"
        rate = FEW_CHANNELS_TERAFLOPS["strided float32" if strided else "other"]
        return problem.flops / rate / 1e6 + CALL_MICROSECONDS
    return 0.0


def _tuned_microseconds(problem: Problem) -> float:
    """What cuDNN's kernels for tensor cores take."""
    arithmetic = problem.flops / TERAFLOPS[problem.dtype] / 1e6
    memory = problem.bytes / COPY_TERABYTES / 1e6
    if problem.channels_last:
        return max(1.1 * arithmetic, 1.3 * memory) + CALL_MICROSECONDS
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
