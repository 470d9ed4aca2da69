"""The planner's side of the Hopper kernel for the weight's gradient.

The kernel (csrc/cuda/sm90_wgmma_wgrad.cuh) multiplies channels of grad_output, at the places that
taps meet, with N input channels, and sums over pixels. sm90_wgrad_jobs.py says who multiplies what;
this module cuts the pixels into

    chunks  one input row and a strip of columns (of several images where they are narrow)

and picks form, chunk and number of workers with the least expected time. `record` writes it as the
integers that csrc/cuda/sm90_wgrad_params.h reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import gcd, prod

from .candidate import Candidate, Refusal
from .problem import Hardware, Problem
from .sm90 import legality
from .sm90_area import up
from .sm90_tiling import OPERANDS
from .sm90_wgrad_cost import Blocks, ChunkWork, Split
from .sm90_wgrad_jobs import ROWS, WARP_ROWS, WARPS, Form, Job, forms, jobs, tap_step

KERNEL = "sm90_wgmma_wgrad"

MAX_JOBS, MAX_PLANES, MAX_RUNS, MAX_STAGES = 64, 8, 9, 16
"""How much the kernel's parameters hold, as in csrc/cuda/sm90_wgrad_params.h."""
UNIT = 32
"""Pixels that one set of registers covers."""
PRODUCERS = 128
FIXED_BYTES = 1024 + 3 * PRODUCERS * 16 + 128
"""Barriers and tables, the producers' notes, and slack after the last channel."""
MAX_PIXELS = 128
MAX_BOX = 256
"""Points of a row of one box of the TMA."""
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
    return jobs(problem, form, 16 // form.point_bytes if boxes else points_of_copy(problem, form))


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
    if row % 16 == 0:
        return 0, 1
    if slice_bytes % 16 == 0 and problem.padding[2] == 0:
        return 1, 1
    classes, rows = 16 // gcd(volume, 16), plane_rows(problem)
    # A warp multiplies 16 rows of one class, and the classes of all planes are complete.
    whole = rows % (WARP_ROWS * classes) == 0 and problem.out_channels % rows == 0
    fits = classes * prod(problem.out_size) < INT and (whole or classes == 1)
    return (2, classes) if fits and not any(problem.padding) else None


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
    return points + ((8 - points) % 16 if form.in_order else (4 - points) % 8)


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
    pitch = spread_out(form, needed)
    yield False, pitch, plane_rows(problem) * pitch, pitch
    if images > 1 and problem.in_size[0] == 1:
        least = up(needed, vector)
        widths = range(least, least + 8 * vector, vector)
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
    for segment, images in segments(problem):
        if flat and problem.in_size[2] % segment:
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
            if boxes and (planes * each * classes > PRODUCERS or filled > MAX_BOX):
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
    if form.in_order:  # every lane a word, 8 channels and 4 words in a row
        return _most_in_a_bank([row * pitch // 2 + t for row in range(8) for t in range(4)], 1)
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


def chunk_work(problem: Problem, form: Form, job: Job, chunk: Chunk) -> ChunkWork:
    """What one chunk of a job costs producers and consumers."""
    element = problem.element_bytes
    small = element == 2
    units = chunk.pixels // UNIT
    planes = job.planes
    copy = 0 if chunk.boxes else copy_bytes(problem, form)
    per_copy = points_of_copy(problem, form)
    strip = chunk.segment * form.spread
    parts_of_row = [strip, chunk.filled - strip] if chunk.filled > strip else [strip]
    each = (1 if chunk.together else chunk.images) * chunk.classes
    boxes = len(planes) * each if chunk.boxes else 0
    if chunk.boxes:
        parts_of_row = []
    copies = sum(passes(chunk.rows, chunk.images * part // per_copy) for part in parts_of_row)
    copies *= len(planes)
    copy_input = copy_input_bytes(problem)
    squares = not form.in_order and copy_input >= 8
    if chunk.slab:
        brought = words = 0
        boxes += chunk.pixels * element // chunk.slab
    elif squares:
        words = 4 * passes(form.n, units * (1 if small else 2), 8)
        brought = words * 16 // copy_input
    else:
        words = brought = passes(form.n, chunk.pixels * element // max(copy_input, 4))
    parts = 2 if form.spread == 2 and form.run > 2 else 1
    together = 2 if form.groups > 1 and form.spread == 1 else 1
    reach = up(8 * form.spread + form.run - 1, 4) * 4 + (parts - 1) * 48
    window: float = 16 * (1 + (form.run + 1) // 2) if form.in_order else reach
    window *= conflicts(form, chunk.segment, chunk.images, chunk.segment_pitch, chunk.pitch)
    products = sum(map(job.windows, job.consumers))
    # Memory comes in sectors of 32 bytes. The width phases of a row share theirs.
    span = chunk.filled * point_step(problem, form)
    rows = {(plane.channel, plane.depth, plane.phase_y, plane.start) for plane in planes}
    there = min(chunk.rows, problem.out_channels)
    read = min(form.n, problem.in_channels) * up(chunk.segment * element, 32)
    read += len(rows) * there * (span * element + 28)
    return ChunkWork(
        tensor=job.taps * units * ((2 if small else 4) * form.n / 2),
        batches=units * parts * -(-form.groups // together),
        windows=products * units * ROWS * 4 * window,
        read=chunk.images * read,
        copies=copies + brought,
        rounded=words if squares or not small else 0,
        woven=form.n * units * element * 2 / PRODUCERS if chunk.slab and not form.in_order else 0,
        copied=float(not chunk.slab),
        places=len(planes) * len(parts_of_row),
        starts=float(problem.in_size[1] == 1),
        boxes=boxes,
        waits=(copies if copy == 2 else 0) + (brought if copy_input == 2 else 0),
        spare=chunk.stages > job.extra_rows + 1 + chunk.lag,
    )


def refusal(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = legality(problem, hardware)
    if reason:
        return reason
    if problem.dtype == "float32" and not problem.tf32:
        return "rounds float32 to TF32, which torch.backends.cudnn.conv.fp32_precision forbids"
    if problem.channels_last:
        return "reads the contiguous layout only"
    furthest = [(k - 1) * d + p for _, k, _, p, _, d in problem.dimensions]
    if max(*furthest, problem.out_channels, prod(problem.kernel)) > 2**15 - 64:
        return "sizes beyond the 16 bits of its tables"
    if max(problem.batch * prod(problem.in_size), prod(problem.out_size)) >= INT:
        return "2^31 and more pixels are beyond its 32-bit sizes"
    return None


def flat(problem: Problem) -> Problem:
    """1-D and 2-D as 3-D with one slice and one row."""
    missing = 3 - problem.ndim
    return replace(
        problem,
        in_size=(1,) * missing + problem.in_size,
        kernel=(1,) * missing + problem.kernel,
        stride=(1,) * missing + problem.stride,
        padding=(0,) * missing + problem.padding,
        output_padding=(0,) * missing + problem.output_padding,
        dilation=(1,) * missing + problem.dilation,
    )


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = refusal(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    problem = flat(problem)
    best = min(options(problem, hardware), key=lambda o: o[3].microseconds, default=None)
    if best is None:
        return Refusal(KERNEL, "no chunk fits: too many taps, channels or phases")
    form, job_list, chunk, split = best
    by = "the TMA" if chunk.slab else "copies, grad_output by the TMA" if chunk.boxes else "copies"
    notes = (
        f"{len(job_list)} jobs of {form.consumers} warpgroups, each {form.groups} runs of"
        f" {form.run} taps, 64 x {form.n} channels",
        f"chunks of {chunk.images} x {chunk.segment} pixels by {by}, {chunk.stages} in the ring;"
        f" {sum(split.workers) / len(job_list):.0f} blocks share the pixels of a job",
        f"workspace {split.workspace / 2**20:.1f} MiB of partial sums, added in a fixed order",
        f"most of the time goes to {split.bound}",
    )
    params = record(problem, form, job_list, chunk, split)
    return Candidate(KERNEL, split.microseconds, params, notes)


def options(problem: Problem, hardware: Hardware) -> Iterator[tuple[Form, list[Job], Chunk, Split]]:
    """Every legal plan of a 3-D problem, with its expected time."""
    for form, boxes in product(forms(problem), (False, True)):
        if boxes and box_layout(problem, form) is None:
            continue
        job_list = jobs_of(problem, form, boxes)
        if len(job_list) > MAX_JOBS or max(len(job.planes) for job in job_list) > MAX_PLANES:
            continue
        for chunk in chunks(problem, form, job_list, boxes, hardware):
            for split in blocks_of(problem, form, job_list, chunk, hardware).splits():
                yield form, job_list, chunk, split


def blocks_of(
    problem: Problem, form: Form, job_list: list[Job], chunk: Chunk, hardware: Hardware
) -> Blocks:
    work = [chunk_work(problem, form, job, chunk) for job in job_list]
    extra = [job.extra_rows for job in job_list]
    return Blocks(problem, form, chunk, work, extra, hardware.multiprocessors)


def fields(
    problem: Problem, form: Form, job_list: list[Job], chunk: Chunk, split: Split
) -> dict[str, int]:
    """The scalars, in the order of csrc/cuda/sm90_wgrad_params.h."""
    sides = {
        f"{side}_{name}": size
        for side, sizes in (("in", problem.in_size), ("out", problem.out_size))
        for name, size in zip("dhw", sizes, strict=True)
    }
    return {
        "operand": OPERANDS[problem.dtype],
        "consumers": form.consumers,
        "tile_n": form.n,
        "groups": form.groups,
        "run": form.run,
        "pairs": int(form.pairs),
        "batch": problem.batch,
        "in_channels": problem.in_channels,
        **{name: size for name, size in sides.items() if name.startswith("in")},
        "out_channels": problem.out_channels,
        **{name: size for name, size in sides.items() if name.startswith("out")},
        "in_group": problem.in_channels // problem.groups,
        "out_group": problem.out_channels // problem.groups,
        "in_volume": prod(problem.in_size),
        "out_volume": prod(problem.out_size),
        "step_z": problem.stride[0],
        "step_y": problem.stride[1],
        "step_x": point_step(problem, form),
        "spread": form.spread,
        "taps": prod(problem.kernel),
        "tap_step": tap_step(problem, form),
        "segment": chunk.segment,
        "images": chunk.images,
        "filled": chunk.filled,
        "segment_pitch": chunk.segment_pitch,
        "pitch": chunk.pitch,
        "copy_input": copy_input_bytes(problem),
        "slab": chunk.slab,
        "copy": 0 if chunk.boxes else copy_bytes(problem, form),
        "flat": chunk.flat,
        "classes": chunk.classes,
        "together": int(chunk.together),
        "rows": chunk.rows,
        "strips": -(-problem.in_size[2] // chunk.segment),
        "image_groups": -(-problem.batch * problem.in_size[0] // chunk.images),
        "planes": max(len(job.planes) for job in job_list),
        "stages": chunk.stages,
        "lag": chunk.lag,
        "input_bytes": chunk.input_bytes,
        "plane_bytes": chunk.plane_bytes,
        "stage_bytes": chunk.stage_bytes,
        "workers": min(split.workers),
        "channel_blocks": -(-problem.in_channels // form.n),
        "jobs": len(job_list),
    }


def record(
    problem: Problem, form: Form, job_list: list[Job], chunk: Chunk, split: Split
) -> tuple[int, ...]:
    """The plan as integers."""
    result = list(fields(problem, form, job_list, chunk, split).values())
    for job, workers in zip(job_list, split.workers, strict=True):
        result += job_record(job, workers)
    return tuple(result)


def job_record(job: Job, workers: int) -> list[int]:
    planes, form = job.planes, job.form
    result = [job.shift_y, job.extra_rows, len(planes), len(job.consumers), workers]
    for plane in planes:
        result += [plane.channel, plane.depth, plane.phase_y, plane.phase_x, plane.start]
    result += [0] * 5 * (MAX_PLANES - len(planes))
    nothing = [0] * 8
    slots = [nothing] * MAX_RUNS * WARPS
    for c, products in enumerate(job.consumers):
        for g, shares in enumerate(products):
            for warp, (channel, run) in enumerate(shares):
                place = job.place(planes, channel, run)
                assert place is not None
                skew = place[1] % form.vector
                back = job.extra_rows - (run.shift_y - job.shift_y)
                slots[(c * form.groups + g) * WARPS + warp] = [
                    *(place[0], back, place[1] - skew, skew, form.high(run), run.count),
                    *(channel, run.tap),
                ]
    for slot in slots:
        result += slot
    return result
