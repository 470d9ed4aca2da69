"""Which parts of grad_output the weight's gradient on Hopper adds to the bias's gradient.

The bias's gradient is the sum of grad_output over all but the channels, by itself a pass at the
memory's rate. The kernel brings all of grad_output to shared memory anyway, much of it several
times: for other taps in other planes and jobs, for neighbouring strips and units of work. Here
planes are picked that together hold every element; which block adds which of their elements, so
that none is added twice, is the kernel's rule (csrc/cuda/sm90_wgrad_sums.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from .problem import Problem

if TYPE_CHECKING:
    from .sm90_wgrad_chunks import Chunk
    from .sm90_wgrad_jobs import Form, Job, Plane

Sums = tuple[tuple[int, ...], ...]
"""For each job and plane: so many slices of the input, the last ones, add the plane's elements."""


def depth_sums(problem: Problem) -> dict[int, int] | None:
    """The same for each tap along the depth, by its offset; None where slices are left out.

    Taps of one phase meet the same slices. The first has all but the last ones, which those after
    it have.
    """
    size, kernel, stride, padding, _, dilation = problem.dimensions[0]
    offsets = [k * dilation - padding for k in range(kernel)]
    result = {}
    for phase in range(min(stride, problem.out_size[0])):
        same = [offset for offset in offsets if offset % stride == phase]
        if not same or same[0] >= stride:
            return None
        beyond = (problem.out_size[0] - 1 - phase) // stride * stride + phase
        if (size - 1) * stride + same[-1] < beyond:
            return None
        result[same[0]] = size
        for before, offset in pairwise(same):
            result[offset] = (offset - before) // stride
            if result[offset] > size:  # none of both meets what lies between them
                return None
    return result


def holds_phase(problem: Problem, form: Form, job: Job, plane: Plane, chunk: Chunk) -> bool:
    """Do the strips and units of a job see every element of the plane's rows?"""
    rows = -(-(problem.out_size[1] - plane.phase_y) // problem.stride[1])
    last_row = problem.in_size[1] - 1 + job.shift_y + job.extra_rows
    points = problem.out_size[2] * problem.element_bytes // form.point_bytes
    strip = chunk.segment * form.spread
    begin = (-(-problem.in_size[2] // chunk.segment) - 1) * strip
    reach = plane.start + chunk.filled - (16 // form.point_bytes - 1 if chunk.flat else 0)
    return (
        job.shift_y <= 0
        and last_row >= rows - 1
        and plane.start <= 0
        and (reach >= strip or begin == 0)
        and begin + reach >= points
    )


def wanted(problem: Problem, depths: dict[int, int], blocks: range) -> Iterator[tuple[int, ...]]:
    """Channel, depth and row phase of the planes that together hold all of grad_output."""
    for channel in blocks:
        for depth in depths:
            for phase_y in range(min(problem.stride[1], problem.out_size[1])):
                yield channel, depth, phase_y


def sums(problem: Problem, form: Form, job_list: list[Job], chunk: Chunk) -> Sums | None:
    """The planes to add up; None where some element would be missing.

    What the TMA brings has all width phases of a row. A job adds up planes of the same channels.
    """
    depths = depth_sums(problem)
    if not chunk.slab or depths is None or problem.in_size[0] > 2**15 - 1:
        return None
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    channel_of: dict[int, int] = {}
    # Chunks with many taps take longest, and so feel it least.
    for number, job in sorted(enumerate(job_list), key=lambda each: -each[1].taps):
        for index, plane in enumerate(job.planes):
            key = (plane.channel, plane.depth, plane.phase_y)
            alike = channel_of.get(number, plane.channel) == plane.channel
            if key not in found and alike and holds_phase(problem, form, job, plane, chunk):
                found[key] = number, index
                channel_of[number] = plane.channel
    needed = list(wanted(problem, depths, range(0, problem.out_channels, chunk.rows)))
    if any(place not in found for place in needed):
        return None
    result = [[0] * len(job.planes) for job in job_list]
    for place in needed:
        number, index = found[place]
        result[number][index] = depths[place[1]]
    return tuple(tuple(each) for each in result)
