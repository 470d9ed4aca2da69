"""The planner's side of the Hopper kernel for the weight's gradient.

The kernel (csrc/cuda/sm90_wgmma_wgrad.cuh) multiplies 64 channels of grad_output, at the places
that a run of taps meets, with N input channels, and sums over pixels. This module turns a problem
into

    runs    neighbouring taps of one kernel row and width phase: their operands share registers
    jobs    what one block accumulates: a few runs for each of its two or three warpgroups
    planes  the parts of grad_output that a job reads: 64 channels of one phase
    chunks  one input row and a strip of columns (of several images where they are narrow)

and picks form, chunk and number of workers with the least expected time. `record` writes it as the
integers that csrc/cuda/sm90_wgrad_params.h reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .candidate import Candidate, Refusal
from .problem import Hardware, Problem
from .sm90 import legality
from .sm90_area import up
from .sm90_tiling import OPERANDS
from .sm90_wgrad_cost import ChunkWork, Split, splits

KERNEL = "sm90_wgmma_wgrad"

FORMS = ((2, 64, 1, 4), (3, 64, 1, 3), (2, 64, 2, 2), (2, 128, 2, 1), (2, 64, 4, 1))
"""(warpgroups, input channels, runs, taps of a run) of every compiled kernel, as
UPCONV_WGRAD_FORMS lists them."""
MAX_JOBS, MAX_PLANES, MAX_CONSUMERS, MAX_GROUPS, MAX_TAPS, MAX_STAGES = 64, 8, 3, 4, 4, 16
"""How much the kernel's parameters hold, as in csrc/cuda/sm90_wgrad_params.h."""
UNIT, ROWS = 32, 64
"""Pixels that one set of registers covers; channels of grad_output of one warpgroup."""
PRODUCERS = 128
FIXED_BYTES = 1024 + 128
"""Barriers and the table of pieces, and slack after the last channel."""
MAX_PIXELS = 128
MAX_OFFSET = 8
"""Runs further apart than this many points get planes of their own."""


@dataclass(frozen=True)
class Run:
    """Neighbouring taps; tap i pairs input column c with point c + shift_x + i of its phase."""

    phase_y: int
    shift_y: int
    phase_x: int
    shift_x: int
    taps: tuple[int, ...]


@dataclass(frozen=True)
class Plane:
    channel: int
    phase_y: int
    phase_x: int
    start: int


@dataclass(frozen=True)
class Form:
    consumers: int
    n: int
    groups: int
    run: int
    pairs: bool
    in_order: bool
    """Pixels lie in order in shared memory: 16-bit types without pairs."""

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.groups * self.run * self.n // 2


@dataclass(frozen=True)
class Job:
    """What one block accumulates: for each warpgroup its first channel and its runs."""

    consumers: tuple[tuple[int, tuple[Run, ...]], ...]
    form: Form

    @property
    def shift_y(self) -> int:
        return min(run.shift_y for _, runs in self.consumers for run in runs)

    @property
    def extra_rows(self) -> int:
        return max(run.shift_y for _, runs in self.consumers for run in runs) - self.shift_y

    def planes(self) -> list[Plane]:
        """Each run finds its points in one of them."""
        planes: list[Plane] = []
        every = [(channel, run) for channel, runs in self.consumers for run in runs]
        for channel, run in sorted(every, key=lambda pair: pair[1].shift_x):
            if self.place(planes, channel, run) is None:
                phase_x = 0 if self.form.pairs else run.phase_x
                planes.append(Plane(channel, run.phase_y, phase_x, run.shift_x))
        return planes

    def place(self, planes: list[Plane], channel: int, run: Run) -> tuple[int, int] | None:
        """Index of the run's plane and offset in it.

        Windows are read in vectors of 4 points, or in words where pixels are in order; pairs can be
        taken one point further on.
        """
        phase_x = 0 if self.form.pairs else run.phase_x
        step = 2 if self.form.in_order else 4
        most = 1 if self.form.pairs and self.form.run > 1 else 0
        for index, plane in enumerate(planes):
            offset = run.shift_x - plane.start
            same = (plane.channel, plane.phase_y, plane.phase_x) == (channel, run.phase_y, phase_x)
            if same and offset % step <= most and 0 <= offset <= MAX_OFFSET:
                return index, offset
        return None

    def halo(self) -> int:
        """Points beyond the strip that its taps reach."""
        planes = self.planes()
        places = [
            (self.place(planes, channel, run), run)
            for channel, runs in self.consumers
            for run in runs
        ]
        return max(place[1] + len(run.taps) - 1 for place, run in places if place)


@dataclass(frozen=True)
class Chunk:
    """One input row, `segment` columns of `images` images, and how it lies in shared memory."""

    segment: int
    images: int
    filled: int
    segment_pitch: int
    pitch: int
    input_bytes: int
    plane_bytes: int
    stage_bytes: int
    stages: int
    lag: int

    @property
    def pixels(self) -> int:
        return self.segment * self.images


def pieces(
    found: list[tuple[int, int]], most: int, element_bytes: int
) -> Iterator[list[tuple[int, int]]]:
    """Sorted (shift, tap) pairs, cut into neighbours, at most `most` of them together.

    Copies of 4 bytes hold two 16-bit pixels: there every piece but the last of a chain has an even
    length, so that all of them start alike.
    """
    while found:
        chain = 1
        while chain < len(found) and found[chain][0] == found[0][0] + chain:
            chain += 1
        length = min(chain, most)
        if length < chain and element_bytes == 2 and length > 1:
            length -= length % 2
        yield found[:length]
        found = found[length:]


def runs(problem: Problem, most: int) -> list[Run]:
    """Every tap of a 2-D problem, in runs of at most `most`."""
    (_, height, step_y, pad_y, _, dilation_y), columns = problem.dimensions
    _, width, step_x, pad_x, _, dilation_x = columns
    by_phase: dict[int, list[tuple[int, int]]] = {}
    for k in range(width):
        shift, phase = divmod(k * dilation_x - pad_x, step_x)
        by_phase.setdefault(phase, []).append((shift, k))
    result = []
    for phase_x, found in sorted(by_phase.items()):
        for piece in pieces(sorted(found), most, problem.element_bytes):
            for ky in range(height):
                shift_y, phase_y = divmod(ky * dilation_y - pad_y, step_y)
                taps = tuple(ky * width + kx for _, kx in piece)
                result.append(Run(phase_y, shift_y, phase_x, piece[0][0], taps))
    # Runs that share a plane stand together; then those that share its rows.
    return sorted(result, key=lambda r: (r.phase_y, r.phase_x, r.shift_x, r.shift_y))


def jobs(problem: Problem, form: Form) -> list[Job]:
    """The jobs of a form, for one block of input channels.

    Every second block of channels is gone through backwards, so that a job that spans two blocks
    still reads few planes.
    """
    every = runs(problem, form.run)
    parts = [tuple(every[i : i + form.groups]) for i in range(0, len(every), form.groups)]
    consumers: list[tuple[int, tuple[Run, ...]]] = []
    for block in range(-(-problem.out_channels // ROWS)):
        ordered = parts if block % 2 == 0 else parts[::-1]
        consumers += [(block * ROWS, part) for part in ordered]
    return [
        Job(tuple(consumers[i : i + form.consumers]), form)
        for i in range(0, len(consumers), form.consumers)
    ]


def forms(problem: Problem) -> Iterator[Form]:
    """The forms that fit; 16-bit types at width stride 2 keep both phases in one word."""
    small = problem.element_bytes == 2
    pairs = small and problem.stride[1] == 2 and problem.out_size[1] % 2 == 0
    for consumers, n, groups, run in FORMS:
        if not (pairs and consumers > 2):
            yield Form(consumers, n, groups, run, pairs, small and not pairs)


def copy_bytes(problem: Problem, job: Job) -> int:
    """Bytes of one copy of grad_output; 2: element by element, which waits for memory."""
    starts = [plane.start for plane in job.planes()]
    step, width = problem.stride[1], problem.out_size[1]
    if job.form.pairs:
        width, step = width // 2, 1
    point = 4 if job.form.pairs else problem.element_bytes
    if step > 1:
        return 4 if point == 4 else 2
    for points in (4, 2, 1):
        if points * point >= 4 and all(value % points == 0 for value in (width, *starts)):
            return points * point
    return 2


def copy_input_bytes(problem: Problem, form: Form) -> int:
    """Bytes of one copy of the input."""
    row = problem.in_size[1] * problem.element_bytes
    sizes = (16, 8, 4) if form.in_order else (4,)
    return next((size for size in sizes if row % size == 0), 2)


def chunks(
    problem: Problem, form: Form, job_list: list[Job], hardware: Hardware
) -> Iterator[Chunk]:
    """Every chunk that the producers can bring and that fits shared memory."""
    point = 4 if form.pairs else problem.element_bytes
    halo = max(job.halo() for job in job_list)
    planes = max(len(job.planes()) for job in job_list)
    extra = max(job.extra_rows for job in job_list)
    copies = [copy_bytes(problem, job) for job in job_list]
    per_copy = min(max(4 // point, 1) if copy == 2 else copy // point for copy in copies)
    vectors = UNIT * problem.element_bytes // 16
    for pixels in range(UNIT, MAX_PIXELS + 1, UNIT):
        for segment in range(8, pixels + 1, 8):
            images = pixels // segment
            if pixels % segment or images > problem.batch or segment > up(problem.in_size[1], UNIT):
                continue
            filled = up(segment + halo, 4)
            if images * max(segment, filled - segment) // per_copy > PRODUCERS:
                continue
            pitch = images * filled  # and so much more that rows fall into different banks
            pitch += (8 - pitch) % 16 if form.in_order else (4 - pitch) % 8
            input_bytes = pixels // UNIT * vectors * (form.n * 16 + (32 if form.pairs else 16))
            plane_bytes = ROWS * pitch * point
            stage = up(input_bytes + planes * plane_bytes, 128)
            stages = min((hardware.shared_memory - FIXED_BYTES) // stage, MAX_STAGES)
            # One chunk more than must be: the consumers' slot is free while they work.
            lag = min(max(stages - extra - 3, 1), 2)
            if stages >= lag + extra + 1:
                sizes = (input_bytes, plane_bytes, stage)
                yield Chunk(segment, images, filled, filled, pitch, *sizes, stages, lag)


def passes(channels: int, row: int) -> int:
    """Channels of one producer thread: so many lie side by side, rounded to a power of two."""
    return channels // (1 << min(PRODUCERS // row, channels).bit_length() - 1)


def chunk_work(problem: Problem, form: Form, job: Job, chunk: Chunk) -> ChunkWork:
    """What one chunk of a job costs producers and consumers."""
    element = problem.element_bytes
    small = element == 2
    point = 4 if form.pairs else element
    units = chunk.pixels // UNIT
    planes = job.planes()
    copy = copy_bytes(problem, job)
    per_copy = max(4 // point, 1) if copy == 2 else copy // point
    words = passes(form.n, chunk.pixels * element // max(copy_input_bytes(problem, form), 4))
    copies = len(planes) * passes(ROWS, chunk.images * chunk.segment // per_copy)
    if chunk.filled > chunk.segment:
        right = chunk.images * (chunk.filled - chunk.segment) // per_copy
        copies += len(planes) * passes(ROWS, right)
    window = 16 * (1 + form.run // 2) if form.in_order else up(8 + form.run - 1, 4) * point
    consumers = len(job.consumers)
    # Memory comes in sectors of 32 bytes. The width phases of a row share theirs.
    span = chunk.filled * problem.stride[1]
    by_row = Counter((plane.channel, plane.phase_y, plane.phase_x) for plane in planes)
    rows = sum({row[:2]: count for row, count in sorted(by_row.items())}.values())
    read = form.n * up(chunk.segment * element, 32) + rows * ROWS * (span * element + 28)
    by_elements = small and problem.in_size[1] % 2 == 1
    return ChunkWork(
        tensor=consumers * form.groups * form.run * units * (2 if small else 4) * form.n / 2,
        batches=units * -(-form.groups // 2),
        windows=consumers * form.groups * units * ROWS * 4 * window,
        read=chunk.images * read,
        copies=words + copies,
        rounded=0 if small else words,
        waits=(copies if copy == 2 else 0) + (words if by_elements else 0),
        spare=chunk.stages > job.extra_rows + 1 + chunk.lag,
    )


def refusal(problem: Problem, hardware: Hardware) -> str | None:
    """Why the kernel cannot serve, or None."""
    reason = legality(problem, hardware)
    if reason:
        return reason
    if problem.channels_last:
        return "reads the contiguous layout only"
    if problem.ndim == 3:
        return "3-D is not covered"
    if problem.groups != 1:
        return f"groups = {problem.groups}: covers groups = 1 only"
    if max(*problem.kernel, *problem.dilation, *problem.padding, problem.out_channels) > 8191:
        return "sizes beyond the 16 bits of its tables"
    return None


def flat(problem: Problem) -> Problem:
    """1-D as 2-D with one row."""
    if problem.ndim == 2:
        return problem
    return replace(
        problem,
        in_size=(1, *problem.in_size),
        kernel=(1, *problem.kernel),
        stride=(1, *problem.stride),
        padding=(0, *problem.padding),
        output_padding=(0, *problem.output_padding),
        dilation=(1, *problem.dilation),
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
    notes = (
        f"{len(job_list)} jobs of {form.consumers} warpgroups, each {form.groups} runs of"
        f" {form.run} taps, 64 x {form.n} channels",
        f"chunks of {chunk.images} x {chunk.segment} pixels, {chunk.stages} in the ring;"
        f" {split.workers} blocks share the pixels of a job",
        f"workspace {split.workspace / 2**20:.1f} MiB of partial sums, added in a fixed order",
        f"most of the time goes to {split.bound}",
    )
    params = record(problem, form, job_list, chunk, split)
    return Candidate(KERNEL, split.microseconds, params, notes)


def options(problem: Problem, hardware: Hardware) -> Iterator[tuple[Form, list[Job], Chunk, Split]]:
    """Every legal plan of a 2-D problem, with its expected time."""
    for form in forms(problem):
        job_list = jobs(problem, form)
        if len(job_list) > MAX_JOBS or max(len(job.planes()) for job in job_list) > MAX_PLANES:
            continue
        blocks = -(-problem.in_channels // form.n)
        for chunk in chunks(problem, form, job_list, hardware):
            work = [chunk_work(problem, form, job, chunk) for job in job_list]
            extra = max(job.extra_rows for job in job_list)
            for split in splits(problem, chunk, work, extra, blocks, form, hardware):
                yield form, job_list, chunk, split


def fields(
    problem: Problem, form: Form, job_list: list[Job], chunk: Chunk, split: Split
) -> dict[str, int]:
    """The scalars, in the order of csrc/cuda/sm90_wgrad_params.h."""
    out_h, out_w = problem.out_size
    return {
        "operand": OPERANDS[problem.dtype],
        "consumers": form.consumers,
        "tile_n": form.n,
        "groups": form.groups,
        "run": form.run,
        "pairs": int(form.pairs),
        "batch": problem.batch,
        "in_channels": problem.in_channels,
        "in_h": problem.in_size[0],
        "in_w": problem.in_size[1],
        "out_channels": problem.out_channels,
        "out_h": out_h,
        "out_w": out_w,
        "step_y": problem.stride[0],
        "step_x": problem.stride[1],
        "taps": problem.kernel[0] * problem.kernel[1],
        "segment": chunk.segment,
        "images": chunk.images,
        "filled": chunk.filled,
        "segment_pitch": chunk.segment_pitch,
        "pitch": chunk.pitch,
        "copy_input": copy_input_bytes(problem, form),
        "band_rows": split.band_rows,
        "bands": split.bands,
        "strips": -(-problem.in_size[1] // chunk.segment),
        "image_groups": -(-problem.batch // chunk.images),
        "planes": max(len(job.planes()) for job in job_list),
        "stages": chunk.stages,
        "lag": chunk.lag,
        "input_bytes": chunk.input_bytes,
        "plane_bytes": chunk.plane_bytes,
        "stage_bytes": chunk.stage_bytes,
        "workers": split.workers,
        "channel_blocks": -(-problem.in_channels // form.n),
        "jobs": len(job_list),
    }


def record(
    problem: Problem, form: Form, job_list: list[Job], chunk: Chunk, split: Split
) -> tuple[int, ...]:
    """The plan as integers."""
    result = list(fields(problem, form, job_list, chunk, split).values())
    no_group = [0, 0, 0, 0] + [-1] * MAX_TAPS
    for job in job_list:
        planes = job.planes()
        result += [job.shift_y, job.extra_rows, copy_bytes(problem, job), len(planes)]
        for plane in planes:
            result += [plane.channel, plane.phase_y, plane.phase_x, plane.start]
        result += [0] * 4 * (MAX_PLANES - len(planes))
        for channel, part in job.consumers:
            result += [1, channel]
            for run in part:
                place = job.place(planes, channel, run)
                assert place is not None
                back = job.extra_rows - (run.shift_y - job.shift_y)
                skew = place[1] % 4 if form.pairs else 0
                high = run.phase_x + 2 * skew if form.pairs else 0
                result += [place[0], back, place[1] - skew, high]
                result += [*run.taps, *[-1] * (MAX_TAPS - len(run.taps))]
            result += no_group * (MAX_GROUPS - len(part))
        idle = [0, 0, *no_group * MAX_GROUPS]
        result += idle * (MAX_CONSUMERS - len(job.consumers))
    return tuple(result)
