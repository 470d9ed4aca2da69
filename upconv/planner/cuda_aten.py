"""How long PyTorch's own operator takes on a GPU.

A call is so many times the arithmetic, so many times the least traffic (cuDNN copies input and
output to channels_last and back, and adds the bias in a pass of its own), and a fixed time. How
many depends on the call, on the type, and on what kind of layer it is: `CALLS`, fitted by
`benchmarks/fit_aten.py` to 2,263 calls of 400 layers on an H200 with torch 2.11, the faster of the
default and cudnn.benchmark where both were measured. Single calls take far longer than the table
says, hundreds of times in groups of three dimensions; few take less. Where our own estimate is not
below this one, PyTorch keeps the call: nobody is to get slower by installing upconv.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from .problem import Problem

TERAFLOPS = {"float64": 60.0, "float32": 421.0, "bfloat16": 805.0, "float16": 760.0}
"""Sustained matrix rates of an H200; float32 is TF32."""
COPY_TERABYTES = 4.27
CALL_MICROSECONDS = 8.0
TILE = 64
"""Channels, on either side, that the arithmetic of a call is a multiple of."""
FEW_CHANNELS = 8
"""With fewer on either side other kernels serve."""
FAR = 3
"""A stride that is a kind of its own where taps overlap."""
UNLIKE_OTHERS = 2, 256
"""Dimensions and output channels for which cuDNN has kernels of other speed where taps overlap: the
forward pass in TF32 takes 1.5 to 2.5 times what it takes with other numbers of channels, on 6
layers."""


class Call(NamedTuple):
    arithmetic: float
    """Times what the tensor cores need, with channels in whole tiles."""
    traffic: float
    """Times the least traffic."""
    fixed: float
    """Microseconds."""


CALLS: dict[str, dict[str, Call]] = {
    "channels_last 16 bits": {
        "groups": Call(0.974, 13.4, 47.5),
        "overlap": Call(1.43, 4.77, 12.1),
        "overlap 3-D": Call(1.23, 6.73, 11.2),
        "overlap to 256": Call(0.755, 4.92, 9.6),
        "overlap, far": Call(2.63, 8.96, 17),
        "pieces": Call(0.337, 6.76, 11.7),
        "pieces 3-D": Call(3.65, 5.44, 7.79),
        "plain": Call(0.984, 3.89, 12.5),
        "plain 3-D": Call(0.944, 14.3, 20.7),
        "pointwise": Call(0.0731, 1.79, 4.55),
    },
    "channels_last TF32": {
        "groups": Call(2.63, 15.2, 39.8),
        "overlap": Call(1.17, 3.14, 16),
        "overlap 3-D": Call(1.17, 4.95, 2.97),
        "overlap to 256": Call(3.99, 5.66, 23.5),
        "overlap, far": Call(3.28, 4.28, 19.4),
        "pieces": Call(0.511, 4.77, 15.2),
        "pieces 3-D": Call(0.287, 5, 7.02),
        "plain": Call(1.14, 2.13, 18.2),
        "plain 3-D": Call(3.6, 1.53, 2),
        "pointwise": Call(0.568, 1.73, 8.67),
    },
    "forward 16 bits": {
        "few channels": Call(4.08, 5.88, 19.3),
        "groups": Call(0.829, 13.6, 60),
        "overlap": Call(1.5, 8.69, 21.2),
        "overlap 3-D": Call(0.912, 12, 21.2),
        "overlap to 256": Call(2.06, 1.99, 11),
        "overlap, far": Call(3.49, 10.4, 28.9),
        "overlap, far 1-D": Call(0.231, 6.31, 45.9),
        "pieces": Call(1.33, 10.8, 21.2),
        "pieces 3-D": Call(0.05, 11.8, 15.8),
        "plain": Call(1, 8.15, 19.7),
        "plain 3-D": Call(0.795, 22.2, 2),
        "pointwise": Call(4.95, 0.929, 10.5),
    },
    "forward TF32": {
        "few channels": Call(0.0838, 9.84, 11.6),
        "groups": Call(2.32, 12.8, 19),
        "overlap": Call(1.76, 4.43, 24.1),
        "overlap 3-D": Call(1.43, 5.08, 35.7),
        "overlap to 256": Call(3.83, 7.39, 17.7),
        "overlap, far": Call(1.65, 10.6, 8.08),
        "overlap, far 1-D": Call(0.285, 8.13, 4.02),
        "pieces": Call(1.03, 7.51, 18.2),
        "pieces 3-D": Call(3.62, 5.69, 29.5),
        "plain": Call(1.23, 4.85, 22.3),
        "plain 3-D": Call(3.78, 1.13, 2),
        "pointwise": Call(3.45, 0.702, 11.4),
    },
    "forward float32": {
        "few channels": Call(0.234, 2.29, 28.3),
        "groups": Call(2.61, 3.94, 22.2),
        "overlap": Call(12.6, 7.43, 24),
        "overlap 3-D": Call(11.1, 14.5, 1.31),
        "overlap to 256": Call(11.1, 9.24, 7.05),
        "overlap, far 1-D": Call(11.1, 6.98, 31.1),
        "pieces": Call(10.4, 6.83, 30.5),
        "pieces 3-D": Call(0.0479, 12.2, 28.8),
        "plain": Call(6.13, 13.2, 3.53),
        "plain 3 x 3": Call(6.83, 36.9, 2),
        "plain 3-D": Call(3.18, 12.9, 0.918),
    },
    "grad_input 16 bits": {
        "few channels": Call(1.27, 7.99, 4.95),
        "groups": Call(2.57, 4.3, 29.1),
        "overlap": Call(1.52, 3.25, 20.8),
        "overlap 3-D": Call(2.76, 1.87, 60),
        "overlap to 256": Call(0.811, 4.25, 17),
        "overlap, far": Call(0.724, 11.9, 39.7),
        "overlap, far 1-D": Call(0.723, 4.6, 12.9),
        "pieces": Call(1.02, 4.41, 17),
        "pieces 3-D": Call(0.0751, 5.03, 21.2),
        "plain": Call(1.34, 4.23, 18.4),
        "plain 3-D": Call(0.833, 10.8, 2),
        "pointwise": Call(0.855, 0.736, 6.36),
    },
    "grad_input TF32": {
        "few channels": Call(0.347, 2.06, 5.73),
        "groups": Call(1.24, 4.23, 7.2),
        "overlap": Call(1.13, 3, 17.8),
        "overlap 3-D": Call(1.68, 2.72, 60),
        "overlap to 256": Call(0.348, 4.88, 29.3),
        "overlap, far": Call(0.05, 9.94, 60),
        "overlap, far 1-D": Call(0.309, 5.25, 11.8),
        "pieces": Call(0.929, 3, 19.4),
        "pieces 3-D": Call(2.63, 2.38, 13.7),
        "plain": Call(1.29, 3.18, 17.3),
        "plain 3-D": Call(0.368, 13.6, 14.4),
        "pointwise": Call(0.846, 1.1, 6.59),
    },
    "grad_input float32": {
        "few channels": Call(0.291, 2.08, 1.56),
        "groups": Call(2.03, 40, 11.3),
        "overlap": Call(9.78, 0.05, 22.8),
        "overlap 3-D": Call(4.53, 0.0205, 22.4),
        "overlap to 256": Call(12.6, 3.46, 51.4),
        "overlap, far": Call(0.607, 36.9, 60),
        "overlap, far 1-D": Call(9.96, 0.0716, 60),
        "pieces": Call(9.84, 0.05, 37.9),
        "pieces 3-D": Call(0.0291, 1.51, 34.9),
        "plain": Call(9.94, 0.05, 2),
        "plain 3 x 3": Call(8.41, 0.05, 60),
        "plain 3-D": Call(1, 40, 60),
        "pointwise": Call(5.92, 1.17, 8.31),
    },
    "grad_weight 16 bits": {
        "few channels": Call(1.37, 5.32, 26.9),
        "groups": Call(1.08, 4.62, 33),
        "overlap": Call(1.5, 4.04, 23.6),
        "overlap 3-D": Call(3.49, 2.08, 33),
        "overlap to 256": Call(1.44, 2.57, 14.7),
        "overlap, far": Call(0.843, 10.6, 21.5),
        "overlap, far 1-D": Call(0.899, 4.09, 32.6),
        "pieces": Call(1.1, 4.37, 26.3),
        "pieces 3-D": Call(1.39, 4.48, 24.8),
        "plain": Call(1.81, 3.34, 25.9),
        "plain 3-D": Call(0.756, 21.4, 2.82),
        "pointwise": Call(4.62, 0.05, 24.5),
    },
    "grad_weight TF32": {
        "few channels": Call(0.305, 6.56, 11.9),
        "groups": Call(1.1, 4.65, 60),
        "overlap": Call(1.9, 3.38, 30),
        "overlap 3-D": Call(4.77, 2.18, 60),
        "overlap to 256": Call(1.2, 5.12, 27.6),
        "overlap, far": Call(1.09, 8.15, 46),
        "overlap, far 1-D": Call(0.0376, 7.02, 16.8),
        "pieces": Call(1.66, 2.86, 36.2),
        "pieces 3-D": Call(3.19, 3, 23.4),
        "plain": Call(3, 3.62, 28.6),
        "plain 3-D": Call(0.884, 22.1, 60),
        "pointwise": Call(5.76, 0.0524, 17.8),
    },
    "grad_weight float32": {
        "few channels": Call(0.0851, 7.9, 2),
        "groups": Call(4.5, 8.55, 2),
        "overlap": Call(12.8, 4.87, 46),
        "overlap 3-D": Call(6.98, 40, 2),
        "overlap to 256": Call(12.4, 4.29, 2),
        "overlap, far": Call(4.62, 13.2, 39.3),
        "overlap, far 1-D": Call(11.1, 0.05, 57.3),
        "pieces": Call(21.4, 0.05, 60),
        "pieces 3-D": Call(76.2, 1.27, 2),
        "plain": Call(9.84, 10.1, 49.7),
        "plain 3 x 3": Call(0.553, 16.1, 15.2),
        "plain 3-D": Call(22.2, 40, 2),
        "pointwise": Call(20.4, 1.13, 6.65),
    },
}
"""By `call_of` and `kind_of`. The logarithms are off by 0.1 to 0.3 on average, by 0.5 where PyTorch
has kernels of very different speed for a kind (groups, three dimensions at stride 1)."""


UNSURE = {"channels_last float32": 0.45, "grad_weight float32": 0.9}
"""Times what the table says, where that is not sure. Float32 that must be exact was not measured on
channels_last: PyTorch's best over all layouts takes 0.43 to 1.0 of what it takes on the contiguous
one (26 layers). Of 123 weight gradients that ours was taken for by this, one was slower than
PyTorch's by more than 5 %."""


def call_of(problem: Problem) -> str:
    """The call: its direction or layout, and the type that it is computed in."""
    call = problem.direction
    if problem.channels_last and call == "forward":
        call = "channels_last"
    if problem.dtype == "float32":
        return f"{call} {'TF32' if problem.tf32 else 'float32'}"
    return f"{call} 16 bits"


def kind_of(problem: Problem) -> str:
    channels = min(problem.in_channels, problem.out_channels) // problem.groups
    if problem.groups > 1:
        return "groups"
    if channels < FEW_CHANNELS:
        return "few channels"
    if max(*problem.kernel, *problem.stride) == 1:
        return "pointwise"
    if max(problem.stride) == 1:
        kind = "plain 3 x 3" if _winograd(problem) else "plain"
    elif _overlap(problem):
        kind = "overlap" if max(problem.stride) < FAR else "overlap, far"
        if (problem.ndim, problem.out_channels) == UNLIKE_OTHERS and kind == "overlap":
            kind = "overlap to 256"
    else:
        kind = "pieces"
    if kind == "overlap, far" and problem.ndim == 1:  # vocoders; 0.5 to 0.7 times other layers
        return f"{kind} 1-D"
    return f"{kind} 3-D" if problem.ndim == 3 else kind


def _winograd(problem: Problem) -> bool:
    """Are there kernels with fewer products? Float32 that must be exact takes a third to a half of
    the time then."""
    return problem.strict and problem.kernel == (3, 3) and max(problem.dilation) == 1


def _overlap(problem: Problem) -> bool:
    """Do taps of neighbouring outputs meet the same inputs?"""
    return any(k > s for k, s in zip(problem.kernel, problem.stride, strict=True))


def least(problem: Problem) -> tuple[float, float]:
    """Microseconds of the arithmetic, with channels in whole tiles, and of the least traffic."""
    channels = [c // problem.groups for c in (problem.in_channels, problem.out_channels)]
    tiles = prod(-(-c // TILE) * TILE / c for c in channels)
    arithmetic = tiles * problem.flops / TERAFLOPS[problem.dtype] / 1e6
    return arithmetic, problem.bytes / COPY_TERABYTES / 1e6


def aten_microseconds(problem: Problem) -> float:
    """Of a call in any direction and layout."""
    forward = problem.direction == "forward"
    depthwise = 1 < problem.groups == problem.in_channels
    if not forward:
        depthwise = depthwise and problem.in_channels == problem.out_channels
    if problem.channels_last and (depthwise or not forward):
        return _unmeasured_microseconds(problem)
    if depthwise and not (forward and problem.dtype == "float64"):
        return _depthwise_microseconds(problem)
    if problem.dtype == "float64":
        return problem.flops / DOUBLE_TERAFLOPS / 1e6 + CALL_MICROSECONDS
    arithmetic, memory = least(problem)
    call, kind = call_of(problem), kind_of(problem)
    rows = CALLS[call.replace("channels_last float32", "forward float32")]
    # A kind that was not measured: the fastest that was.
    fitting = [rows[kind]] if kind in rows else list(rows.values())
    share = UNSURE.get(call, 1.0)
    return share * min(a * arithmetic + t * memory + fixed for a, t, fixed in fitting)


def bias_microseconds(problem: Problem) -> float:
    """The bias's gradient by itself: our own sum over grad_output, two launches."""
    outputs = problem.batch * problem.out_channels * prod(problem.out_size)
    return outputs * problem.element_bytes / COPY_TERABYTES / 1e6 + CALL_MICROSECONDS


# --- what other kernels serve ---------------------------------------------------------------------

DOUBLE_TERAFLOPS = 5.0
"""float64: 0.2 to 5 over 8 layers, far from what the matrix units could do."""
DEPTHWISE_NANOSECONDS = {
    "grad_input": {"float32": (0.5, 0.95), "small": (0.2, 0.7)},
    "grad_weight": {"float32": (0.75, 2.2), "small": (0.35, 2.2)},
}
"""Gradients of depthwise layers, for each thousand products: at stride 1, and with a stride. 0.53
to 0.7 and 1.0 to 2.0 for the input's gradient over 6 layers (0.22 to 0.3 and 0.7 to 2.0 with 16-bit
types), 0.85 to 2.3 and 2.3 to 2.8 for the weight's (0.39 to 0.5 and 2.8 to 18)."""


def _unmeasured_microseconds(problem: Problem) -> float:
    """As fast as it may be."""
    arithmetic = problem.flops / TERAFLOPS[problem.dtype] / 1e6
    return max(1.1 * arithmetic, 1.3 * least(problem)[1]) + CALL_MICROSECONDS


def _depthwise_microseconds(problem: Problem) -> float:
    """Forward: time for every output, and for every tap whether it meets an input or not. 16-bit
    types have a better kernel where nothing is strided or the kernel is large."""
    small = problem.element_bytes == 2
    strided = max(problem.stride) > 1
    if problem.direction != "forward":
        each = DEPTHWISE_NANOSECONDS[problem.direction]["small" if small else "float32"]
        products = problem.flops / 2e6 * each[strided]
        return max(products, 2 * least(problem)[1]) + CALL_MICROSECONDS
    outputs = problem.batch * problem.out_channels * prod(problem.out_size) / 1e6
    taps = prod(problem.kernel)
    better = small and (not strided or taps > 100)
    return outputs * (9.4 + 0.6 * taps) * (0.3 if better else 1.0) + CALL_MICROSECONDS


def aten_note(problem: Problem) -> str:
    if problem.channels_last:
        return "PyTorch's own operator, which reads and writes channels_last directly"
    return "PyTorch's own operator, with its copies to channels_last and back"
