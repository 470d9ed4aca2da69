"""What PyTorch's own operator should take on a CPU, for contiguous tensors.

PyTorch hands float32 (and bfloat16) to oneDNN, which has four ways of doing it. Which one it takes,
and where each spends its time, was read from its log over some 150 shapes:

- "direct": stride 1. Converts the input to channel blocks of 16, convolves, converts back.
- "phases": strided, not dilated. Converts to channels last, one matrix product per phase and
  tap, converts back.
- "depthwise": one channel per group. Converts to channel blocks; far from the arithmetic peak.
- "columns": everything else, and PyTorch's own code for what oneDNN is not given (float64,
  float16, output padding of at least the stride, one small image). One matrix product makes all
  products of all taps, then they are added up where they belong.

The conversions touch fresh memory: above 32 MB malloc maps it anew for every call, at a fifth of
the speed. Constants are rounded so as to favour PyTorch where they scatter.
"""

from __future__ import annotations

from math import ceil, prod

from .geometry import phases
from .problem import Hardware, Problem

FLOPS_PER_CYCLE = {"avx512": 64.0, "avx2": 32.0}
CYCLES_PER_MICROSECOND = 2800.0
EFFICIENCY = {"direct": 0.58, "phases": 0.47, "depthwise": 0.02, "columns": 0.75}
"""Share of the arithmetic peak in the convolution proper."""
CONVERTED_BYTES_PER_MICROSECOND = {"recycled": 4500.0, "fresh": 800.0}
"""Input and output together, two threads or more."""
RECYCLED_BYTES = 32 << 20
COLUMN_MICROSECONDS = 0.0012
"""Adding up one product of "columns", one thread."""
SLOWDOWN_16BIT = {"bfloat16": 4.0, "float16": 8.0}
"""Of the arithmetic, where the CPU has no 16-bit multiplier; with one it is twice as fast."""
WEIGHT_BYTES_PER_MICROSECOND = 2500.0
"""Weights are converted as well, but for "columns"."""
ONEDNN_MICROSECONDS, NATIVE_MICROSECONDS = 45.0, 12.0
"""A call that computes next to nothing."""

DESCRIPTIONS = {
    "direct": "oneDNN's direct convolution, between two conversions of the layout",
    "phases": "oneDNN's matrix product per phase, between two conversions of the layout",
    "depthwise": "oneDNN's depthwise convolution, between two conversions of the layout",
    "columns": "one matrix product for all taps, whose products are then added up",
}


def is_native(problem: Problem) -> bool:
    """Whether PyTorch uses its own code rather than oneDNN: its rule, `ConvParams::use_mkldnn`."""
    wide = any(o >= s for o, s in zip(problem.output_padding, problem.stride, strict=True))
    if wide or problem.dtype in ("float64", "float16"):
        return True
    # One small image, without groups. The rule looks at the first two spatial sizes, also in 3-D.
    large_kernel = problem.ndim > 1 and min(problem.kernel[-2:]) > 3
    small = problem.in_channels * prod(problem.in_size[:2]) <= 20480
    one = problem.batch == 1 and problem.groups == 1
    return problem.dtype == "float32" and one and small and not large_kernel


def method(problem: Problem) -> str:
    """Which of its ways PyTorch takes."""
    cin = problem.in_channels // problem.groups
    cout = problem.out_channels // problem.groups
    strided, dilated = max(problem.stride) > 1, max(problem.dilation) > 1
    if is_native(problem) or (strided and dilated):
        return "columns"
    if problem.groups > 1 and cin == 1 and cout == 1:
        return "columns" if dilated or problem.ndim == 3 else "depthwise"
    if strided:
        return "phases" if problem.groups == 1 or cin >= 16 else "columns"
    if prod(problem.kernel) == 1:
        return "columns"  # a plain matrix product of what is there
    blocks = problem.groups == 1 or (cin % 4 == 0 and cout % 4 == 0)
    return "direct" if blocks else "columns"


def useful_share(problem: Problem) -> float:
    """Share of the products that land inside the output: oneDNN leaves the others out."""
    share = 1.0
    for dimension in problem.dimensions:
        size, kernel = dimension[:2]
        inside = sum(
            min(phase.count, size - tap.shift) - max(0, -tap.shift)
            for phase in phases(*dimension)
            for tap in phase.taps
        )
        share *= inside / (size * kernel)
    return share


def describe(problem: Problem) -> str:
    return f"PyTorch's own operator: {DESCRIPTIONS[method(problem)]}"


def microseconds(problem: Problem, hardware: Hardware) -> float:
    way = method(problem)
    threads = max(1, hardware.threads)
    lanes = FLOPS_PER_CYCLE.get(hardware.isa, 8.0) / (2 if problem.dtype == "float64" else 1)
    flops = float(problem.flops)
    cin, cout = problem.in_channels // problem.groups, problem.out_channels // problem.groups
    if way != "columns":
        flops *= useful_share(problem)
    if way in ("direct", "phases"):
        # Output channels fill whole vectors.
        block = 16 if problem.groups == 1 else 4
        flops *= ceil(cout / block) * block / cout
    if way == "columns":
        flops *= max(1.0, 16 / cin)
    if problem.dtype in SLOWDOWN_16BIT:
        flops *= 0.5 if hardware.native_16bit else SLOWDOWN_16BIT[problem.dtype]
    arithmetic = flops / (lanes * EFFICIENCY[way] * CYCLES_PER_MICROSECOND) / threads

    pixels = problem.batch * prod(problem.in_size)
    out_elements = problem.batch * problem.out_channels * prod(problem.out_size)
    converted = (pixels * problem.in_channels + out_elements) * problem.element_bytes
    state = "recycled" if out_elements * problem.element_bytes <= RECYCLED_BYTES else "fresh"
    memory = converted / CONVERTED_BYTES_PER_MICROSECOND[state] * 2 / min(threads, 2)
    if way == "columns":
        products = pixels * problem.out_channels * prod(problem.kernel)
        # Nothing is converted, but the output is written before anything is added to it.
        memory *= out_elements * problem.element_bytes / converted / 2
        memory += products * COLUMN_MICROSECONDS / threads
    else:
        weights = problem.in_channels * cout * prod(problem.kernel) * problem.element_bytes
        memory += weights / WEIGHT_BYTES_PER_MICROSECOND / threads
    call = NATIVE_MICROSECONDS if is_native(problem) else ONEDNN_MICROSECONDS
    return call + arithmetic + memory
