"""How the Hopper kernel for the weight's gradient cuts the pixels into chunks, and where they lie.

A chunk is one input row and a strip of columns (of several images where they are narrow), with the
parts of grad_output that its taps meet. The TMA brings it where rows, or what follows each other as
one, begin on 16 bytes; otherwise threads copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd, prod

from .problem import Hardware, Problem
from .sm90_area import up
from .sm90_wgrad_jobs import ROWS, WARP_ROWS, Form, Job, jobs

MAX_JOBS, MAX_PLANES, MAX_RUNS, MAX_STAGES = 64, 8, 9, 16
"""How much the kernel's parameters hold, as in csrc/cuda/sm90_wgrad_params.h."""
UNIT = 32
"""Pixels that one set of registers covers."""
PRODUCERS = 128
FIXED_BYTES = 1024 + 3 * PRODUCERS * 16 + 128
"""Barriers and tables, the producers' notes, and slack after the last channel."""
MAX_PIXELS = 128
MAX_BOX = 256
"""Points of a row of one box of the TMA; odd rows come in words of two."""
SLABS = (128, 64, 32, 16)
SLAB_ALIGNMENT = 1024
"""Bytes after which the swizzle repeats."""
INT = 2**31


@dataclass(frozen=True)
class Chunk:
    """One input row, `segment` columns of `images` images, and how it lies in shared memory."""

    boxes: bool
    """The TMA brings grad_output. Otherwise threads copy it."""
    flat: int
    """Boxes: 1: the rows of a slice of grad_output follow each other as one; 2: all of them do."""
    classes: int
    """Then: so many channels follow each other as one, too."""
    together: bool
    """Boxes: one has all images of a chunk, side by side in each channel."""
    slab: int
    """The TMA brings the input: so many bytes of a channel side by side. 0: threads copy it."""
    segment: int
    images: int
    filled: int
    segment_pitch: int
    pitch: int
    rows: int
    input_bytes: int
    plane_bytes: int
    stage_bytes: int
    stages: int
    lag: int

    @property
    def pixels(self) -> int:
        return self.segment * self.images


def point_step(problem: Problem, form: Form) -> int:
    """Elements of grad_output from one point of a plane to the next."""
    return 1 if form.spread == 2 else problem.stride[2]


def contiguous(problem: Problem, form: Form) -> bool:
    """Do the points of a plane follow each other in memory?"""
    return point_step(problem, form) * problem.element_bytes == form.point_bytes


def copy_bytes(problem: Problem, form: Form) -> int:
    """Bytes of one copy of grad_output; 2: element by element, which waits for memory."""
    row = problem.out_size[2] * problem.element_bytes
    if not contiguous(problem, form):
        return form.point_bytes
    return next((size for size in (16, 8, 4) if row % size == 0), 2)


def points_of_copy(problem: Problem, form: Form) -> int:
    return max(max(copy_bytes(problem, form), 4) // form.point_bytes, 1)


def jobs_of(problem: Problem, form: Form, boxes: bool) -> list[Job]:
    """The jobs of a form, with planes that start where copies may."""
    # Where rows begin anywhere a box begins early of itself.
    vector = 1 if form.odd else 16 // form.point_bytes
    return jobs(problem, form, vector if boxes else points_of_copy(problem, form))


def box_layout(problem: Problem, form: Form) -> tuple[int, int] | None:
    """How the TMA sees grad_output, of which something must begin on 16 bytes: flat and classes.

    Rows do, or slices of which the rows follow each other as one (1), or every channel, every
    second or every fourth (2). Rows that follow each other must leave out no column, and channels
    no row and no slice either: what lies beyond them would not be zero.
    """
    row = problem.out_size[2] * problem.element_bytes
    slice_bytes, volume = row * problem.out_size[1], row * prod(problem.out_size[:2])
    if not contiguous(problem, form):
        return None
    if form.odd:
        return odd_layout(problem)
    if row % 16 == 0:
        return 0, 1
    if slice_bytes % 16 == 0 and problem.padding[2] == 0:
        return 1, 1
    classes, rows = 16 // gcd(volume, 16), plane_rows(problem)
    # A warp multiplies 16 rows of one class, and the classes of all planes are complete.
    whole = rows % (WARP_ROWS * classes) == 0 and problem.out_channels % rows == 0
    fits = classes * prod(problem.out_size) < INT and (whole or classes == 1)
    return (2, classes) if fits and not any(problem.padding) else None


def odd_layout(problem: Problem) -> tuple[int, int] | None:
    """The same for odd rows: whole channels, up to eight of which follow each other as one.

    Each row of a plane knows where it begins, so that any number of them may be a class; and what
    does not belong to a row is written over, so that there may be padding.
    """
    volume, rows = prod(problem.out_size), plane_rows(problem)
    classes = 8 // gcd(volume, 8)
    complete = rows % classes == 0 and problem.out_channels % classes == 0
    return (2, classes) if complete and classes * volume < INT else None


def plane_rows(problem: Problem) -> int:
    """Channels of a plane."""
    return min(up(problem.out_channels, WARP_ROWS), ROWS)


def copy_input_bytes(problem: Problem) -> int:
    """Bytes of one copy of the input."""
    row = problem.in_size[2] * problem.element_bytes
    return next((size for size in (16, 8, 4) if row % size == 0), 2)


def slab_bytes(problem: Problem, segment: int) -> int:
    """Bytes of a channel that the TMA brings side by side; 0 where it cannot.

    Rows of the input begin on 16 bytes, and what they have in a chunk is whole slabs.
    """
    if copy_input_bytes(problem) < 16:
        return 0
    return next((b for b in SLABS if segment * problem.element_bytes % b == 0), 0)


def input_size(form: Form, pixels: int, slab: int) -> int:
    """Shared memory of the input of a chunk."""
    if slab:
        return pixels * form.n * form.element_bytes
    return up(pixels // UNIT * unit_bytes(form), 128)


def unit_bytes(form: Form) -> int:
    """Shared memory of a unit of pixels of copied input: vectors, spread over the banks."""
    spare = 32 if form.pairs and form.element_bytes == 2 else 16
    return UNIT * form.element_bytes // 16 * (form.n * 16 + spare)


def segments(problem: Problem) -> Iterator[tuple[int, int]]:
    """Columns and images of the chunks to consider."""
    images_there = problem.batch * problem.in_size[0]
    near = problem.in_channels * prod(problem.in_size) * 16 < INT
    for pixels in range(UNIT, MAX_PIXELS + 1, UNIT):
        for segment in range(8, pixels + 1, 8):
            images = pixels // segment
            if pixels % segment or images > images_there:
                continue
            if segment <= up(problem.in_size[2], UNIT) and (images == 1 or near):
                yield segment, images


def spread_out(form: Form, points: int) -> int:
    """So many points or more that rows fall into different banks."""
    return points + ((8 - points) % 16 if form.in_order or form.single else (4 - points) % 8)


def line_step(rows: int) -> int:
    """Elements of a row of a box, so many rows of which fill lines of 128 bytes."""
    return max(8, 64 // gcd(64, rows))


def odd_pitch(form: Form, points: int, class_rows: int) -> int:
    """So many points or more of each row of a box, in different banks as far as they can be."""
    step = line_step(class_rows)
    least = up(points, step)
    return min(range(least, least + 4 * step, step), key=lambda p: (conflicts(form, 8, 1, p, p), p))


def box_pitches(
    problem: Problem, form: Form, segment: int, images: int, halo: int
) -> Iterator[tuple[bool, int, int, int]]:
    """Boxes of a chunk: together or not, their points, those of a segment and of a channel."""
    layout = box_layout(problem, form)
    assert layout is not None
    strip, vector = segment * form.spread, 16 // form.point_bytes
    # Flat ones begin up to 15 bytes before the plane.
    needed = max(strip - form.spread + 1 + halo, strip) + (vector - 1 if layout[0] else 0)
    if layout[0] == 2 and problem.in_size[0] > 1 and images > 1:
        return  # slices begin at different places of 16 bytes
    class_rows = plane_rows(problem) // layout[1]
    pitch = odd_pitch(form, needed, class_rows) if form.odd else spread_out(form, needed)
    yield False, pitch, plane_rows(problem) * pitch, pitch
    if images > 1 and problem.in_size[0] == 1:
        step = line_step(class_rows * images) if form.odd else vector
        least = up(needed, step)
        widths = range(least, least + 8 * step, step)
        best = min(widths, key=lambda w: (conflicts(form, segment, images, w, w * images), w))
        yield True, best, best, best * images


def chunks(
    problem: Problem, form: Form, job_list: list[Job], boxes: bool, hardware: Hardware
) -> Iterator[Chunk]:
    """Every chunk that the producers can bring and that fits shared memory."""
    planes_of = [job.planes for job in job_list]
    halo = max(job.halo(planes) for job, planes in zip(job_list, planes_of, strict=True))
    planes = max(map(len, planes_of))
    extra = max(job.extra_rows for job in job_list)
    per_copy = points_of_copy(problem, form)
    rows = plane_rows(problem)
    flat, classes = (box_layout(problem, form) if boxes else None) or (0, 1)
    most_filled = MAX_BOX * (2 if form.odd else 1)
    for segment, images in segments(problem):
        if flat and problem.in_size[2] % segment and not form.odd:
            continue  # beyond the input are zeros, which a NaN of the next row would survive
        strip = segment * form.spread
        if boxes:
            layouts = list(box_pitches(problem, form, segment, images, halo))
        else:
            filled = up(max(strip - form.spread + 1 + halo, strip), max(4, per_copy))
            layouts = [(False, filled, filled, spread_out(form, images * filled))]
            if images * max(strip, filled - strip) // per_copy > PRODUCERS:
                continue
        for together, filled, segment_pitch, pitch in layouts:
            each = images if boxes and not together else 1
            if boxes and (planes * each * classes > PRODUCERS or filled > most_filled):
                continue
            plane_bytes = each * rows * pitch * form.point_bytes
            slab = slab_bytes(problem, segment) if boxes else 0
            input_bytes = input_size(form, segment * images, slab)
            stage = up(input_bytes + planes * plane_bytes, SLAB_ALIGNMENT if slab else 128)
            stages = min((hardware.shared_memory - FIXED_BYTES) // stage, MAX_STAGES)
            # The consumers have one chunk at hand and one to come; the rest is on its way.
            lag = min(max(stages - extra - 2, 1), 3)
            if stages < lag + extra + 1:
                continue
            layout = (segment, images, filled, segment_pitch, pitch, rows)
            sizes = (input_bytes, plane_bytes, stage, stages, lag)
            yield Chunk(boxes, flat, classes, together, slab, *layout, *sizes)


@cache
def conflicts(form: Form, segment: int, images: int, segment_pitch: int, pitch: int) -> float:
    """How many times as long as without bank conflicts the consumers read their windows."""
    if form.odd > 1:  # the same of words that hold two points
        return _most_in_a_bank([row * pitch // 2 + 2 * t for row in range(4) for t in range(4)], 2)
    if form.in_order:  # every lane a word, 8 channels and 4 words in a row
        return _most_in_a_bank([row * pitch // 2 + t for row in range(8) for t in range(4)], 1)
    if form.single:  # 8 bytes a lane, by 16 lanes at a time: four channels
        return _most_in_a_bank([row * pitch + 2 * t for row in range(4) for t in range(4)], 2)
    pieces = [
        i * segment_pitch + first * form.spread
        for i in range(images)
        for first in range(0, segment, 8)
    ]
    times = []
    for unit in range(0, len(pieces), 4):
        four = pieces[unit : unit + 4]
        if form.spread == 2:  # halves of the unit one after the other, 8 points a lane
            starts = [[four[h + t // 2] + t % 2 * 8 for t in range(4)] for h in (0, 2)]
        else:
            starts = [four]
        # Vectors of 16 bytes are read by 8 lanes at a time: two channels.
        times += [_most_in_a_bank([r * pitch + at for r in (0, 1) for at in s], 4) for s in starts]
    return sum(times) / len(times)


def _most_in_a_bank(words: list[int], width: int) -> int:
    banks = [word % 32 // width for word in words]
    return max(banks.count(bank) for bank in banks)


def passes(channels: int, row: int, beside: int = 1) -> int:
    """Channels of one producer thread: so many lie side by side, a power of two that divides."""
    jump = beside << (PRODUCERS // beside // row).bit_length() - 1
    return channels // min(jump, channels & -channels)
