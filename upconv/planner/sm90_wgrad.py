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
from itertools import product
from math import prod

from . import sm90_wgrad_bias
from .candidate import Candidate, Refusal
from .cuda_aten import bias_microseconds
from .operands import OPERANDS
from .problem import Hardware, Problem
from .sm90 import rounding_legality
from .sm90_area import up
from .sm90_wgrad_bias import Sums
from .sm90_wgrad_chunks import (
    INT,
    MAX_JOBS,
    MAX_PLANES,
    MAX_RUNS,
    PRODUCERS,
    UNIT,
    Chunk,
    box_layout,
    chunks,
    conflicts,
    copy_bytes,
    copy_input_bytes,
    jobs_of,
    passes,
    point_step,
    points_of_copy,
)
from .sm90_wgrad_cost import SUMS_GAIN, Blocks, ChunkWork, Split
from .sm90_wgrad_jobs import ROWS, WARP_ROWS, WARPS, Form, Job, forms, tap_step

KERNEL = "sm90_wgmma_wgrad"
MOST_SUMS = 40
"""Plans, the fastest ones, that are looked at for the bias's gradient on the way."""
Option = tuple[Form, list[Job], Chunk, Split]


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
    squares = form.woven and copy_input >= 8
    if chunk.slab:
        brought = words = 0
        boxes += chunk.pixels * element // chunk.slab
    elif squares:
        words = 4 * passes(form.n, units * (1 if small else 2), 8)
        brought = words * 16 // copy_input
    else:
        brought = passes(form.n, chunk.pixels * element // max(copy_input, 4))
        words = brought * (copy_input // 4 if form.single and not small else 1)
    parts = 2 if form.spread == 2 and form.run > 2 else 1
    together = 2 if form.groups > 1 and (form.spread == 1 or form.single) else 1
    reach = up(8 * form.spread + form.run - 1, 4) * 4 + (parts - 1) * 48
    window: float = 16 * (1 + (form.run + 1) // 2) if form.in_order else reach
    if form.odd > 1:  # 8 bytes at a time
        words = (3 + (form.run - 1) * form.apart) // 2 + 2
        window = 16 * up(words, 2)
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
        woven=form.n * units * element * 2 / PRODUCERS if chunk.slab and form.woven else 0,
        copied=float(not chunk.slab),
        places=len(planes) * len(parts_of_row),
        starts=float(problem.in_size[1] == 1),
        edges=edges(problem, form, job, chunk),
        boxes=boxes,
        waits=(copies if copy == 2 else 0) + (brought if copy_input == 2 else 0),
        spare=chunk.stages > job.extra_rows + 1 + chunk.lag,
    )


def edges(problem: Problem, form: Form, job: Job, chunk: Chunk) -> float:
    """Of each chunk, on average: how many rows of boxes a producer thread writes zeros beside."""
    if not form.odd:
        return 0.0
    strips = -(-problem.in_size[2] // chunk.segment)
    starts = [plane.start for plane in job.planes]
    reach = chunk.filled - 7
    firsts = [strip * chunk.segment * form.spread for strip in {0, strips - 2, strips - 1}]
    last_ones = [f for f in firsts if f >= 0 and f + max(starts) + reach > problem.out_size[2]]
    some = len(last_ones) + (min(starts) < 0 and 0 not in last_ones)
    return some / strips * len(starts) * chunk.images


def refusal(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = rounding_legality(problem, hardware)
    if reason:
        return reason
    if problem.channels_last:
        return "reads the contiguous layout only"
    furthest = [(k - 1) * d + p for _, k, _, p, _, d in problem.dimensions]
    if max(*furthest, *problem.stride, problem.out_channels, prod(problem.kernel)) > 2**15 - 64:
        return "sizes beyond the 16 bits of its tables"
    if max(problem.batch * prod(problem.in_size), prod(problem.out_size)) >= INT:
        return "2^31 and more pixels are beyond its 32-bit sizes"
    return None


def consider(problem: Problem, hardware: Hardware) -> Candidate | Refusal:
    reason = refusal(problem, hardware)
    if reason:
        return Refusal(KERNEL, reason)
    problem = problem.in_three()
    best = choose(problem, hardware)
    if best is None:
        return Refusal(KERNEL, "no chunk fits: too many taps, channels or phases")
    microseconds, sums, (form, job_list, chunk, split) = best
    by = "the TMA" if chunk.slab else "copies, grad_output by the TMA" if chunk.boxes else "copies"
    notes = (
        f"{len(job_list)} jobs of {form.consumers} warpgroups, each {form.groups} runs of"
        f" {form.run} taps, 64 x {form.n} channels",
        f"chunks of {chunk.images} x {chunk.segment} pixels by {by}, {chunk.stages} in the ring;"
        f" {sum(split.workers) / len(job_list):.0f} blocks share the pixels of a job",
        f"workspace {split.workspace / 2**20:.1f} MiB of partial sums, added in a fixed order",
        f"most of the time goes to {split.bound}",
        *(("adds up the bias's gradient on the way",) if sums else ()),
    )
    params = record(problem, form, job_list, chunk, split, sums)
    return Candidate(KERNEL, microseconds, params, notes, sums is not None)


def choose(problem: Problem, hardware: Hardware) -> tuple[float, Sums | None, Option] | None:
    """The plan with the least expected time, and what it adds to the bias's gradient.

    Where that gradient is wanted too, a plan that adds nothing to it takes a pass more.
    """
    plans = sorted(options(problem, hardware), key=lambda plan: plan[3].microseconds)
    if not plans:
        return None
    best: tuple[float, Sums | None, Option] = plans[0][3].microseconds, None, plans[0]
    if not problem.bias:
        return best
    limit = best[0] + SUMS_GAIN * bias_microseconds(problem)
    for plan in plans[:MOST_SUMS]:
        form, job_list, chunk, split = plan
        # Of another form the estimate may err by more than there is to be gained.
        if form != plans[0][0] or split.microseconds > limit:
            continue
        if found := sm90_wgrad_bias.sums(problem, *plan[:3]):
            blocks = blocks_of(problem, form, job_list, chunk, hardware)
            planes = [sum(map(bool, each)) for each in found]
            if (expected := blocks.with_sums(split.workers, planes)) < limit:
                limit, best = expected, (expected, found, plan)
    return best


def least_jobs(problem: Problem, form: Form) -> int:
    """Jobs that there are at least: to make all of 12,000 taps and 1,000 channels took 15 s."""
    runs = -(-prod(problem.kernel) // form.run)
    shares = runs * -(-problem.out_channels // WARP_ROWS)
    return -(-shares // (WARPS * form.groups * form.consumers))


def options(problem: Problem, hardware: Hardware) -> Iterator[Option]:
    """Every legal plan of a 3-D problem, with its expected time."""
    for form, boxes in product(forms(problem), (False, True)):
        if box_layout(problem, form) is None if boxes else form.odd:
            continue
        if least_jobs(problem, form) > MAX_JOBS:
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
        "odd": form.odd,
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
    problem: Problem,
    form: Form,
    job_list: list[Job],
    chunk: Chunk,
    split: Split,
    sums: Sums | None = None,
) -> tuple[int, ...]:
    """The plan as integers."""
    result = list(fields(problem, form, job_list, chunk, split).values())
    none = tuple((0,) * len(job.planes) for job in job_list)
    for job, workers, added in zip(job_list, split.workers, sums or none, strict=True):
        result += job_record(job, workers, added)
    return tuple(result)


def job_record(job: Job, workers: int, sums: tuple[int, ...]) -> list[int]:
    planes, form = job.planes, job.form
    result = [job.shift_y, job.extra_rows, len(planes), len(job.consumers), workers]
    for plane, added in zip(planes, sums, strict=True):
        result += [plane.channel, plane.depth, plane.phase_y, plane.phase_x, plane.start, added]
    result += [0] * 6 * (MAX_PLANES - len(planes))
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
