"""How long PyTorch's own operator takes on a GPU: an estimate that rather flatters it.

Measured on an H200 with torch 2.11 on 26 layers, 30 drawn ones and 36 of known networks;
cudnn.benchmark gained up to 7 % on the contiguous layout. There cuDNN copies input and output to
channels_last and back, and adds the bias in a pass of its own. The convolution itself takes 1.3 to
1.6 times what the arithmetic needs at stride 1, 2.0 and more at larger strides, and 3.4 to 5.4
times in TF32 in two dimensions where the taps of neighbouring outputs overlap. The copies take 0.9
to 2.3 times the least traffic where arithmetic dominates, 3.2 to 8 times where memory does. In
three dimensions at stride 1 the convolution takes 15 to 64 times what the arithmetic needs in TF32,
8.5 to 10 times with 16-bit types; at stride 2 the call takes 5 to 16 times the least traffic.
Groups of few channels run on other kernels: 28 to 80 times the least traffic in float32, 12 to 35
times with 16-bit types. Without TF32 it runs at 7 to 43 TFLOP/s (11 at best in three dimensions),
or at 108 where a transform serves. On channels_last tensors the copies fall away, the pass for the
bias does not: 1.6 to 5.5 times the arithmetic besides. Where our own estimate is not below this
one, PyTorch keeps the call: nobody is to get slower by installing upconv.
"""

from __future__ import annotations

from math import prod

from .problem import Problem

TERAFLOPS = {"float64": 60.0, "float32": 421.0, "bfloat16": 805.0, "float16": 760.0}
"""Sustained matrix rates of an H200; float32 is TF32."""
STRICT_TERAFLOPS = {1: 36.0, 2: 44.0, 3: 12.0}
"""float32 without TF32, by the number of dimensions."""
STRICT_STRIDED_TERAFLOPS = 34.0
"""The same in two dimensions with a stride: 16 to 33 over 6 layers."""
TRANSFORM_TERAFLOPS = 110.0
"""The same where PyTorch can use a transform: stride 1, two dimensions, many output channels."""
COPY_TERABYTES = 4.27
CALL_MICROSECONDS = 8.0
SHORT_CALL = {"forward": (35.0, 0.6), "gradient": (30.0, 0.6)}
"""Short calls with copies and bias, five kernels or more: so many us, and so much of the work. Of
60 forward calls none was below 44 us; estimates of 12 short ones were half of what they took."""
POINTWISE = {"forward": 0.65, "gradient": 0.4}
"""Kernel and stride 1, a plain product: 0.7 and 0.4 of what the rule says, over 2 layers."""
FAR_STEPS_TERAFLOPS = 25.0
"""16-bit types, a stride of 4 or more, taps that overlap, at most 64 output channels: 9 to 21 over
4 layers."""
VOLUME_SHARE = {"float32": 12.0, "small": 7.0}
"""Times the arithmetic in three dimensions at stride 1, on either layout."""
CHANNELS_LAST = {"overlap in TF32": 2.0, "other": 1.4, "traffic": 0.6}
"""Times the arithmetic (by whether taps of neighbouring outputs overlap at a stride) and the least
traffic, beside the bias. 13 layers each in TF32 and BF16 took
1.0 to 30 times as long; but for one (dcgan1 in BF16: 0.8), where PyTorch keeps the call anyway."""
SMALL_TYPES = {"forward": 1.08, "channels_last": 1.15}
"""How much longer than the rule says 16-bit types take: 0.93 to 5 times over 57 layers, 1.5 at the
median, and 0.76 to 20 times on channels_last over 48 layers, 1.5 at the median."""
STRIDED_VOLUME = 1.5
"""The same on channels_last in three dimensions with a stride: 1.4 to 5.8 times over 10 layers."""
PIECES = 1.1
"""The same where kernel and stride are equal: 0.94 to 3.2 times, 1.4 at the median of 18."""
HALF_TILE = 32
"""So few output channels take the time of twice as many, in 2-D at stride 1: kb71 took 1.01 ms
in TF32 and 0.74 in BF16 where 0.67 and 0.35 were expected without, kb78 1.77 and 1.36 where 1.01
and 0.52."""
FEW_CHANNELS = 8
FEW_CHANNELS_TERAFLOPS = {"strided float32": 13.0, "other": 8.0}
"""With fewer channels than that on either side: 9 to 13 and 2 to 8 over 8 layers."""
DOUBLE_TERAFLOPS = 5.0
"""float64: 0.2 to 5 over 8 layers, far from what the matrix units could do."""


GRADIENT = {
    "grad_input": {"float32": (1.9, 1.2), "small": (1.4, 1.1)},
    "grad_weight": {"float32": (2.05, 1.6), "small": (1.9, 1.7)},
}
"""How many times the arithmetic the gradients take on the contiguous layout, by dtype: where taps
of neighbouring outputs overlap (grad_input: at stride 1), and elsewhere. Below what was
measured on 9 layers."""
GRADIENT_TRAFFIC = {
    "grad_input": {"float32": 2.7, "small": 5.0},
    "grad_weight": {"float32": 3.0, "small": 3.0},
}
"""The copies to channels_last and back, as a multiple of the least traffic. The whole estimate of
grad_weight is 0.5 to 1.2 times what was measured (24 layers, TF32 and BF16), that of grad_input 0.6
to 1.2 times what whole backward passes took less the rest (20 layers)."""


GRADIENT_TILE, GRADIENT_MOST_WASTE = 64, 4.0
"""The weight's gradient is computed in tiles of so many channels on either side: 32 channels take
the time of 64. (24 layers: 16 channels cost no more than 32.)"""
GROUPED_GRADIENT_TERAFLOPS = {"float32": 6.5, "small": 15.0}
"""The weight's gradient with at most 16 channels a group: 5 to 6, and 11 to 13 with 16-bit types,
over 2 layers."""
UNEVEN_GRADIENT_TERAFLOPS = 25.0
"""The same in TF32 with groups of fewer than 32 channels on one side: 4 to 23 over 4 layers."""
SMALL_GROUPS_TERAFLOPS = {"float32": 3.8, "small": 3.6}
"""The same with fewer than FEW_CHANNELS: 3.2 and 3.1 over one layer."""


GROUPED_INPUT_TERAFLOPS = {"float32": 10.0, "small": 8.0, "three dimensions": 2.0}
"""The input's gradient with at most 16 channels a group: 5.7 to 9.8 and 5.2 to 7.8 over 2 layers,
1.8 to 1.9 over one in three dimensions. Depthwise layers have kernels of their own."""
SMALL_GROUPS_INPUT_TERAFLOPS = {"float32": 6.0, "small": 8.5}
"""The same with fewer than FEW_CHANNELS: 5.7, and 6.7 to 8 with 16-bit types, over one layer."""
FEW_INPUT_TERAFLOPS = {"float32": (3.5, 25.0, 13.8), "small": (8.0, 12.0, 8.0)}
"""The input's gradient with fewer than FEW_CHANNELS input channels, with fewer output channels, and
with one: 2.8, 22 and 12 to 13.7 over 4 layers, 6.3, 11 and 4.7 to 6.3 with 16-bit types."""


DEPTHWISE_NANOSECONDS = {
    "grad_input": {"float32": (0.5, 0.95), "small": (0.2, 0.7)},
    "grad_weight": {"float32": (0.75, 2.2), "small": (0.35, 2.2)},
}
"""Depthwise layers, for each thousand products: at stride 1, and with a stride. 0.53 to 0.7 and 1.0
to 2.0 for the input's gradient over 6 layers (0.22 to 0.3 and 0.7 to 2.0 with 16-bit types), 0.85
to 2.3 and 2.3 to 2.8 for the weight's (0.39 to 0.5 and 2.8 to 18)."""
FEW_WEIGHT_TERAFLOPS = {"float32": (2.3, 17.0, 17.0), "small": (7.0, 12.9, 9.8)}
"""The weight's gradient with fewer than FEW_CHANNELS input channels, with fewer output channels,
and with one: 2.1, 12 and 15 to 17 over 4 layers, 6.5, 12 and 1 to 9.4 with 16-bit types."""
STRICT_WEIGHT_TERAFLOPS = 40.0
"""The weight's gradient without TF32: 8.6 and 16 over 2 layers, at little more than the least
traffic; more where a layer is larger."""


VOLUME_INPUT_GRADIENT = {"float32": 2.2, "small": 2.3}
"""How much longer the input's gradient takes in three dimensions at stride 1 than the rule for two
says: 2.2 to 2.7 times, and 2.5 to 4.4 with 16-bit types, over 3 layers."""


def few_kind(channels: list[int]) -> int:
    """Few input channels, few output channels, or one."""
    return 0 if channels[0] < FEW_CHANNELS else 2 if channels[1] == 1 else 1


def slow_input_gradient(problem: Problem) -> float:
    """Microseconds of layers whose input gradient cuDNN's fast kernels do not serve; else 0."""
    kind = "float32" if problem.dtype == "float32" else "small"
    channels = [c // problem.groups for c in (problem.in_channels, problem.out_channels)]
    if problem.dtype == "float64" or max(channels) == 1:
        return 0.0
    if problem.groups > 1 and max(channels) < FEW_CHANNELS and problem.ndim < 3:
        rate = SMALL_GROUPS_INPUT_TERAFLOPS[kind]
    elif problem.groups > 1 and max(channels) <= 16:
        rate = GROUPED_INPUT_TERAFLOPS["three dimensions" if problem.ndim == 3 else kind]
    elif problem.groups == 1 and min(channels) < FEW_CHANNELS:
        rate = FEW_INPUT_TERAFLOPS[kind][few_kind(channels)]
    else:
        return 0.0
    return problem.flops / rate / 1e6


def slow_weight_gradient(problem: Problem) -> float:
    """Microseconds of layers whose weight gradient cuDNN's fast kernels do not serve; else 0."""
    kind = "float32" if problem.dtype == "float32" else "small"
    channels = [c // problem.groups for c in (problem.in_channels, problem.out_channels)]
    if problem.groups > 1 and max(channels) < FEW_CHANNELS:
        rate = SMALL_GROUPS_TERAFLOPS[kind]
    elif problem.groups > 1 and max(channels) <= 16:
        rate = GROUPED_GRADIENT_TERAFLOPS[kind]
    elif problem.groups > 1 and min(channels) < 32 and problem.dtype == "float32" and problem.tf32:
        rate = UNEVEN_GRADIENT_TERAFLOPS
    elif problem.groups == 1 and min(channels) < FEW_CHANNELS and problem.dtype != "float64":
        rate = FEW_WEIGHT_TERAFLOPS[kind][few_kind(channels)]
    else:
        return 0.0
    return problem.flops / rate / 1e6


def _depthwise_gradient(problem: Problem) -> float:
    kind = "float32" if problem.element_bytes >= 4 else "small"
    strided = int(max(problem.stride) > 1)
    products = problem.flops / 2e6 * DEPTHWISE_NANOSECONDS[problem.direction][kind][strided]
    return max(products, 2 * _least(problem)[1]) + CALL_MICROSECONDS


def gradient_microseconds(problem: Problem) -> float:
    arithmetic, memory = _least(problem)
    if 1 < problem.groups == problem.in_channels == problem.out_channels:
        return _depthwise_gradient(problem)
    kind = "float32" if problem.dtype == "float32" else "small"
    by_weight = problem.direction == "grad_weight"
    overlap = _overlap(problem) if by_weight else max(problem.stride) == 1
    share = GRADIENT[problem.direction][kind][0 if overlap else 1]
    copies = GRADIENT_TRAFFIC[problem.direction][kind] * memory
    slow = slow_weight_gradient(problem) if by_weight else slow_input_gradient(problem)
    if by_weight and problem.dtype == "float32" and not problem.tf32 and slow == 0.0:
        return max(problem.flops / STRICT_WEIGHT_TERAFLOPS / 1e6, memory) + CALL_MICROSECONDS
    if by_weight:
        channels = [c // problem.groups for c in (problem.in_channels, problem.out_channels)]
        waste = prod(-(-c // GRADIENT_TILE) * GRADIENT_TILE / c for c in channels)
        share *= min(waste, GRADIENT_MOST_WASTE)
        few = problem.groups == 1 and min(channels) < FEW_CHANNELS
        if few and slow:
            return slow + CALL_MICROSECONDS
    elif problem.ndim == 3 and overlap:
        share, copies = (each * VOLUME_INPUT_GRADIENT[kind] for each in (share, copies))
    return _copying_call(problem, max(share * arithmetic + copies, slow), "gradient")


def _least(problem: Problem) -> tuple[float, float]:
    """Microseconds of the arithmetic and of the traffic by themselves."""
    arithmetic = problem.flops / TERAFLOPS[problem.dtype] / 1e6
    return arithmetic, problem.bytes / COPY_TERABYTES / 1e6


def aten_microseconds(problem: Problem) -> float:
    if problem.channels_last:
        return _channels_last_microseconds(problem)
    if problem.direction != "forward":
        return gradient_microseconds(problem)
    if 1 < problem.groups == problem.in_channels:
        return _depthwise_microseconds(problem)
    return max(_tuned_microseconds(problem), _awkward_microseconds(problem))


def _channels_last_microseconds(problem: Problem) -> float:
    arithmetic, memory = _least(problem)
    if problem.direction != "forward":  # not measured
        return max(1.1 * arithmetic, 1.3 * memory) + CALL_MICROSECONDS
    wide, strided = problem.dtype == "float32", max(problem.stride) > 1
    share = CHANNELS_LAST["overlap in TF32" if wide and strided and _overlap(problem) else "other"]
    if problem.ndim == 3 and not strided:
        share = VOLUME_SHARE["float32" if wide else "small"]
    elif not strided and problem.out_channels <= HALF_TILE:
        share *= 2
    copies = CHANNELS_LAST["traffic"] * memory + _bias_pass(problem)
    longer = 1.0 if wide else SMALL_TYPES["channels_last"]
    if problem.ndim == 3 and strided:
        longer *= STRIDED_VOLUME
    return longer * (share * arithmetic + copies + CALL_MICROSECONDS)


def _overlap(problem: Problem) -> bool:
    """Do taps of neighbouring outputs meet the same inputs?"""
    return any(k > s for k, s in zip(problem.kernel, problem.stride, strict=True))


def _bias_pass(problem: Problem) -> float:
    """Microseconds in which the output is read and written once more."""
    outputs = problem.batch * problem.out_channels * prod(problem.out_size)
    return 2 * outputs * problem.element_bytes / COPY_TERABYTES / 1e6 if problem.bias else 0.0


def bias_microseconds(problem: Problem) -> float:
    """The bias's gradient by itself: our own sum over grad_output, two launches."""
    outputs = problem.batch * problem.out_channels * prod(problem.out_size)
    return outputs * problem.element_bytes / COPY_TERABYTES / 1e6 + CALL_MICROSECONDS


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
    if problem.dtype == "float64":
        return problem.flops / DOUBLE_TERAFLOPS / 1e6 + CALL_MICROSECONDS
    if problem.groups == 1 and channels < FEW_CHANNELS:
        strided = max(problem.stride) > 1 and problem.dtype == "float32"
        rate = FEW_CHANNELS_TERAFLOPS["strided float32" if strided else "other"]
        return problem.flops / rate / 1e6 + CALL_MICROSECONDS
    far = problem.element_bytes == 2 and max(problem.stride) >= 4 and _overlap(problem)
    if far and problem.groups == 1 and problem.out_channels <= 64:
        return problem.flops / FAR_STEPS_TERAFLOPS / 1e6 + CALL_MICROSECONDS
    return 0.0


def _tuned_microseconds(problem: Problem) -> float:
    """What cuDNN's kernels take."""
    arithmetic, memory = _least(problem)
    if problem.dtype == "float32" and not problem.tf32:
        return strict_microseconds(problem, memory) + CALL_MICROSECONDS
    wide = problem.element_bytes == 4
    if problem.groups > 1:
        share, traffic = 3.4, grouped_traffic(problem)
    elif problem.ndim == 3:
        kind = "float32" if wide else "small"
        share, traffic = VOLUME_SHARE[kind] if max(problem.stride) == 1 else 3.4, 4.0
    elif max(problem.stride) == 1:
        share, traffic = 1.35, 2.6
    else:
        share = (
            3.4 if _overlap(problem) and problem.dtype == "float32" and problem.ndim > 1 else 2.0
        )
        traffic = 2.0 if arithmetic > 2 * memory else 3.2
    copies = traffic * memory + _bias_pass(problem)
    longer = 1.0 if wide else SMALL_TYPES["forward"]
    if max(problem.stride) > 1 and not _overlap(problem):
        longer *= PIECES
    return longer * _copying_call(problem, share * arithmetic + copies, "forward")


def _copying_call(problem: Problem, work: float, kind: str) -> float:
    least, share = SHORT_CALL[kind]
    if max(*problem.kernel, *problem.stride) == 1:
        work *= POINTWISE[kind]
    return max(work + CALL_MICROSECONDS, least + share * work)


def grouped_traffic(problem: Problem) -> float:
    """How many times the least traffic a grouped call takes.

    Many channels a group: 12 to 80 times over 7 layers, 12 to 20 with 16-bit types.
    """
    most = max(problem.in_channels, problem.out_channels) // problem.groups
    if most > 16:
        return 8.0
    return 15.0 if problem.element_bytes == 4 else 8.0


def strict_microseconds(problem: Problem, memory: float) -> float:
    """float32 that must not be rounded: mostly bound by arithmetic."""
    if problem.groups > 1:
        return max(problem.flops / TERAFLOPS["float32"] / 1e6, grouped_traffic(problem) * memory)
    strided = problem.ndim == 2 and max(problem.stride) > 1
    rate = STRICT_STRIDED_TERAFLOPS if strided else STRICT_TERAFLOPS[problem.ndim]
    plain = max(problem.stride) == max(problem.dilation) == problem.groups == 1
    if plain and problem.ndim == 2 and problem.out_channels >= 128:
        rate = TRANSFORM_TERAFLOPS
    return max(problem.flops / rate / 1e6, 3.0 * memory)


def aten_note(problem: Problem) -> str:
    if problem.channels_last:
        return "PyTorch's own operator, which reads and writes channels_last directly"
    return "PyTorch's own operator, with its copies to channels_last and back"
