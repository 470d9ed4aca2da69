"""What the planners of the mma.sync gradients share: jobs, boxes and the integers of a plan.

The kernels (csrc/cuda/gather_wgrad.cuh, gather_igrad.cuh) stage boxes of rows in shared memory and
gather single elements from them. A `Job` is a set of taps of depth and height, and the rows ("unit
rows") over which they are summed; `Box` says which rows of a tensor a unit brings along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import gcd, prod

from .legality import first_refusal
from .operands import OPERANDS
from .problem import Hardware, Problem, three

MOST_JOBS = 48
FARTHEST = 1 << 15
"""Rows and planes of a box are numbered by 16 bits."""
SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, for all of its blocks, each of which costs 1 KiB more than it asks for."""

CLOCK_MHZ = 1700.0
DRAM_BYTES = 18.0
"""A cycle and multiprocessor: 4.1 TB/s over 132 of them."""


@dataclass(frozen=True)
class Job:
    """As GatherJob in csrc/cuda/gather_params.h."""

    block: int
    shares: int
    tap_z: int
    taps_z: int
    tap_y: int
    taps_y: int
    gy_z: int
    gy_y: int
    x_z: int
    x_y: int
    count_z: int
    count_y: int
    units: int


@dataclass(frozen=True)
class Box:
    """Rows of one plane of the box, and steps in the tensor and in the box; see GatherParams."""

    rows: int
    plane_step: int
    row_step: int
    tap_rows: int
    row_advance: int


@dataclass(frozen=True)
class TapClass:
    """Taps of one dimension that meet the same outputs: those from `first` on, `stride` apart.

    The first tap meets unit row q at input q + shift, each further one `apart` before that.
    """

    tap: int
    taps: int
    step: int
    apart: int
    first: int
    count: int
    shift: int


def tap_classes(size: int, kernel: int, stride: int, padding: int, dilation: int) -> list[TapClass]:
    """Every tap in one class, also those that meet no output: their gradient is zero.

    `size` is that of the output.
    """
    common = gcd(stride, dilation)
    step, apart = stride // common, dilation // common
    classes = []
    for tap in range(min(step, kernel)):
        first = (tap * dilation - padding) % stride
        count = max(0, -(-(size - first) // stride))
        shift = (first + padding - tap * dilation) // stride
        taps = -(-(kernel - tap) // step)
        classes.append(TapClass(tap, taps, step, apart, first, count, shift))
    return classes


def copy_bytes(width: int, element: int) -> int:
    """The widest copies with which every row of a tensor begins and ends."""
    return next((n for n in (16, 8, 4) if width * element % n == 0), element)


def pitch(columns: int, element: int, modulus: int, rest: int) -> int:
    """Elements of a row of a box: at least `columns`, and `rest` bytes above a multiple."""
    least = columns * element
    return (least + (rest - least) % modulus) // element


def output_pitch(columns: int, problem: Problem, taps: int) -> int:
    """Of grad_output. Rows start on odd multiples of 16 bytes: the 8 rows that a load meets, if it
    meets more than one, lie in different banks."""
    element, (stride, dilation) = problem.element_bytes, (problem.stride[-1], problem.dilation[-1])
    each = copy_bytes(problem.out_size[-1], element) // element
    span = (columns - 1) * stride + (taps - 1) * dilation + 1
    return pitch(each - 1 + -(-span // each) * each, element, 32, 16)


def input_pitch(columns: int, element: int) -> int:
    """Of the input, whose loads take 8 bytes from each of 4 rows at a time."""
    return pitch(columns, element, 64, 32)


def copies(lines: int, columns: int, width: int, element: int) -> tuple[float, float]:
    """Passes of a warp over rows, and over their granules, to stage a box of a tensor so wide."""
    bytes_each = copy_bytes(width, element)
    granules = -(-columns * element // bytes_each)
    rows = lines * min(32, 1 << (granules - 1).bit_length()) / 32
    waits = 1 if bytes_each > 2 else 4  # through registers: read, waited for, written
    return rows, rows * -(-granules // 32) * waits


def rows_by_input(problem: Problem, rows: int, taps_y: int) -> Box:
    """The box of grad_output of a unit of input rows."""
    stride, dilation = three(problem.stride, 1)[1], three(problem.dilation, 1)[1]
    step = gcd(stride, dilation) if rows > 1 else dilation
    advance = stride // step if rows > 1 else 0
    count = (rows - 1) * advance + (taps_y - 1) * (dilation // step) + 1
    return Box(count, three(problem.dilation, 1)[0], step, dilation // step, advance)


def legality(problem: Problem, hardware: Hardware) -> str | None:
    """Why neither kernel can serve, or None."""
    reason = first_refusal(problem, hardware, OPERANDS)
    if reason:
        return reason
    if problem.strict and problem.direction != "grad_weight":
        return "computes float32 in TF32, which is not allowed here"
    channels = [c // problem.groups for c in (problem.in_channels, problem.out_channels)]
    planes = (channels[0] + 1) * prod(problem.in_size), (channels[1] + 1) * prod(problem.out_size)
    if max(planes) >= 1 << 31:
        return "the channels of a group have 2^31 elements or more"
    widest = max(n * s + k * d + p for n, k, s, p, _, d in problem.dimensions)
    if max(widest, problem.batch * prod(problem.in_size)) >= 1 << 30:
        return "2^30 pixels or more"
    if max(problem.batch * prod(problem.out_size), prod(problem.kernel) * channels[1]) >= 1 << 30:
        return "2^30 outputs or taps, or more"
    return None


def common_fields(problem: Problem) -> dict[str, int]:
    """The scalars that say what the problem is."""

    def named(name: str, names: str, values: tuple[int, ...], absent: int) -> dict[str, int]:
        return {f"{name}_{n}": v for n, v in zip(names, three(values, absent), strict=True)}

    return {
        "batch": problem.batch,
        "groups": problem.groups,
        "in_channels": problem.in_channels // problem.groups,
        "out_channels": problem.out_channels // problem.groups,
        **named("in", "dhw", problem.in_size, 1),
        **named("out", "dhw", problem.out_size, 1),
        **named("kernel", "zyx", problem.kernel, 1),
        **named("stride", "zyx", problem.stride, 1),
        "padding_x": problem.padding[-1],
        "dilation_x": problem.dilation[-1],
    }


def record(scalars: Mapping[str, int], jobs: tuple[Job, ...]) -> tuple[int, ...]:
    """The plan as integers, in the order of csrc/cuda/gather_params.h."""
    flat = [getattr(job, field.name) for job in jobs for field in fields(Job)]
    return (*scalars.values(), *flat)
