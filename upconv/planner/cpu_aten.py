"""What PyTorch's own operator should take on a CPU, for contiguous tensors.

PyTorch hands float32 (and bfloat16) to oneDNN, which has four ways of doing it. Which one it takes,
and where each spends its time, was read from its log over some 150 shapes:

- "direct": stride 1. Converts the input to channel blocks of 16, convolves, converts back.
- "phases": strided, not dilated. Converts to channels last, one matrix product per phase and
  tap, converts back.
- "depthwise": one channel per group. Converts to channel blocks; far from the arithmetic peak.
- "columns": everything else, and PyTorch's own code for what oneDNN does not take (float64,
  float16, output padding of at least the stride). One matrix product makes all products of all
  taps, then they are added up where they belong.

The conversions touch fresh memory: above 32 MB malloc maps it anew for every call, at a fifth of
the speed. Constants are rounded so as to favour PyTorch where they scatter.
"""

from __future__ import annotations

from math import ceil, prod

from .problem import Hardware, Problem

FLOPS_PER_CYCLE = {"avx512": 64.0, "avx2": 32.0}
CYCLES_PER_MICROSECOND = 2800.0
EFFICIENCY = {"direct": 0.5, "phases": 0.6, "depthwise": 0.02, "columns": 0.75}
"""Share of the arithmetic peak in the convolution proper."""
CONVERTED_BYTES_PER_MICROSECOND = {"recycled": 3000.0, "fresh": 800.0}
"""Input and output together, two threads or more."""
RECYCLED_BYTES = 32 << 20
COLUMN_MICROSECONDS = 0.0012
"""Adding up one product of "columns", one thread."""
CALL_MICROSECONDS = {"direct": 30.0, "phases": 30.0, "depthwise": 40.0, "columns": 12.0}

DESCRIPTIONS = {
    "direct": "oneDNN's direct convolution, between two conversions of the layout",
    "phases": "oneDNN's matrix product per phase, between two conversions of the layout",
    "depthwise": "oneDNN's depthwise convolution, between two conversions of the layout",
    "columns": "one matrix product for all taps, whose products are then added up",
}


def method(problem: Problem) -> str:
    """Which of its ways PyTorch takes."""
    cin = problem.in_channels // problem.groups
    cout = problem.out_channels // problem.groups
    strided, dilated = max(problem.stride) > 1, max(problem.dilation) > 1
    native = any(o >= s for o, s in zip(problem.output_padding, problem.stride, strict=True))
    if native or problem.dtype in ("float64", "float16") or (strided and dilated):
        return "columns"
    if problem.groups > 1 and cin == 1 and cout == 1:
        return "columns" if dilated or problem.ndim == 3 else "depthwise"
    if strided:
        return "phases" if problem.groups == 1 or cin >= 16 else "columns"
    blocks = problem.groups == 1 or (cin % 4 == 0 and cout % 4 == 0)
    return "direct" if blocks else "columns"


def describe(problem: Problem) -> str:
    return f"PyTorch's own operator: {DESCRIPTIONS[method(problem)]}"


def microseconds(problem: Problem, hardware: Hardware) -> float:
    way = method(problem)
    threads = max(1, hardware.threads)
    lanes = FLOPS_PER_CYCLE.get(hardware.isa, 8.0) / (2 if problem.dtype == "float64" else 1)
    flops = float(problem.flops)
    cin, cout = problem.in_channels // problem.groups, problem.out_channels // problem.groups
    if way in ("direct", "phases"):
        # Channels fill whole vectors, and the input channels are the inner loop.
        block = 16 if problem.groups == 1 else 4
        flops *= ceil(cout / block) * block / cout
    if way == "columns":
        flops *= max(1.0, 16 / cin)
    arithmetic = flops / (lanes * EFFICIENCY[way] * CYCLES_PER_MICROSECOND) / threads

    pixels = problem.batch * prod(problem.in_size)
    out_elements = problem.batch * problem.out_channels * prod(problem.out_size)
    converted = (pixels * problem.in_channels + out_elements) * problem.element_bytes
    state = "recycled" if out_elements * problem.element_bytes <= RECYCLED_BYTES else "fresh"
    memory = converted / CONVERTED_BYTES_PER_MICROSECOND[state] * 2 / min(threads, 2)
    if way == "columns":
        products = pixels * problem.out_channels * prod(problem.kernel)
        memory = memory / 2 + products * COLUMN_MICROSECONDS / threads
    return CALL_MICROSECONDS[way] + arithmetic + memory
