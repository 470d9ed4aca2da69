"""Tiles of the Hopper kernel: which ones fit, and how long each should take.

A tile is `images x height x width` lattice points. Its input lies in shared memory row after row,
`pitch` pixels from one row to the next, so that the N pixels of one WGMMA run over row ends; the
columns between rows are computed for nothing. Where a tile spans the whole width (height), the
margin of one row (image) is the margin of the next as well: both are zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

from .problem import Hardware
from .sm90_cost import (
    CLOCK_MHZ,
    DRAM_BYTES,
    PACK_MICROSECONDS,
    SPREAD_STORE,
    START_CYCLES,
    UnitWork,
)

if TYPE_CHECKING:
    from .sm90 import Job, Shape

TILES = (
    (256, 1),
    (216, 1),
    (184, 1),
    (128, 1),
    (64, 1),
    (128, 2),
    (104, 2),
    (64, 2),
    (80, 3),
    (64, 4),
)
"""(N, row blocks of a job) of every compiled kernel; UPCONV_SM90_TILES is the same list."""

OPERANDS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Operand type of the kernel, by dtype; float32 is rounded to TF32."""
MAX_KINDS, MAX_PAIRS, MAX_JOBS, MAX_FOLDS, MAX_BLOCKS = 32, 1024, 128, 4, 4
"""How much the kernel's parameters hold, as in csrc/cuda/sm90_params.h."""
STEP_PAIRS = 4
STAGE_BYTES = 8192
FIXED_BYTES = 1024 + 2 * 256 * 4 + 2 * 8 * 96 * 4 + 1024 * 4 + 8 * 8 * 544 + 6 * 64 * 96 + 4096
"""Barriers, tables of columns, offsets and pairs, staging of 8 warps, raw ring of the loaders, and
slack after the last plane."""
ITEM_PIXELS = 4
"""Pixels that a loader copies together."""
LOADERS = 96
"""Loader threads of a block."""
MAX_SLOTS, MAX_STAGES = 16, 16
MAX_PIXELS = 768
"""A loader thread lists at most 8 items of 4 pixels; 24 threads go side by side."""

PLANE_PHASE = 1
"""Pixels of a plane, modulo 8: a pixel's blocks then fall into different banks."""


@dataclass(frozen=True)
class Tiling:
    n: int
    blocks: int
    split: bool
    """The consumers split the pixels (and share weights) rather than the jobs."""
    images: int
    height: int
    width: int
    pitch: int
    rows: int
    pixels: int
    plane: int
    slice_blocks: int
    slices: int
    slots: int
    stages: int
    vector: int
    shift_x: int
    groups: int
    tiles: tuple[int, int, int]
    cycles: float
    bound: str

    @property
    def microseconds(self) -> float:
        return self.cycles / CLOCK_MHZ + PACK_MICROSECONDS

    @property
    def split_pixels(self) -> int:
        if not self.split:
            return 0
        if self.images > 1:
            return self.images // 2 * self.rows * self.pitch
        return self.height // 2 * self.pitch

    def pairs(
        self,
        taps: Sequence[tuple[tuple[int, int], tuple[int, ...]]],
        low_y: int,
        in_step: int,
    ) -> list[tuple[int, int, tuple[int, ...]]]:
        """(offset in 16-byte units, channel block, weight position of each fold), whole steps."""
        result = []
        for (y, x), folds in taps:
            row, lane = divmod(y - low_y, in_step)
            pixel = (lane * self.images * self.rows + row) * self.pitch + x - self.shift_x
            for block in range(0, self.slice_blocks, 2):
                result.append((block * self.plane + pixel, block, folds))
        return result

    def fields(self, shape: Shape) -> dict[str, int]:
        problem = shape.problem
        shift_y = shape.shifts[0]
        out_h, out_w = problem.out_size
        return {
            "operand": OPERANDS[problem.dtype],
            "tile_n": self.n,
            "job_blocks": self.blocks,
            "channels_last": int(problem.channels_last),
            "copy": copy_mode(shape)[0],
            "batch": problem.batch,
            "in_channels": problem.in_channels,
            "in_h": problem.in_size[0],
            "in_w": problem.in_size[1],
            "out_channels": problem.out_channels,
            "out_h": out_h,
            "out_w": out_w,
            "in_step_y": shape.rows.in_step,
            "in_step_x": shape.columns.in_step,
            "out_step_y": shape.rows.out_step,
            "out_step_x": shape.columns.out_step,
            "tiles_o": self.tiles[0],
            "tiles_y": self.tiles[1],
            "tiles_x": self.tiles[2],
            "tile_o": self.images,
            "tile_h": self.height,
            "tile_w": self.width,
            "pitch": self.pitch,
            "rows": self.rows,
            "pixels": self.pixels,
            "plane": self.plane,
            "shift_y": shift_y,
            "shift_x": self.shift_x,
            "slice_blocks": self.slice_blocks,
            "slices": self.slices,
            "slots": self.slots,
            "stages": self.stages,
            "split_pixels": self.split_pixels,
            "fold_rows": shape.fold_rows,
            "vector": self.vector,
            "weight_in": 0,
            "weight_out": 0,
            "groups": self.groups,
            "kinds": 0,
            "pairs": 0,
            "jobs": 0,
        }

    def notes(self, shape: Shape) -> tuple[str, ...]:
        use = shape.problem.batch * shape.rows.count * shape.columns.count
        points = self.tiles[0] * self.tiles[1] * self.tiles[2]
        consumers = 2 if self.split else 1
        share = use / (points * consumers * self.n)
        kind = "split the pixels" if self.split else "split the output rows"
        return (
            f"tile {self.images} x {self.height} x {self.width} lattice points, "
            f"m64n{self.n} x {self.blocks}, {share:.0%} of the columns stored",
            f"the two consumers {kind}; {shape.folds} row phases folded into 64 rows",
            f"{self.slices} slices of {self.slice_blocks} channel blocks, {self.slots} slots, "
            f"{self.stages} weight stages",
            f"most of the time goes to {self.bound}; {self.cycles / CLOCK_MHZ:.1f} us expected",
        )


def tilings(
    shape: Shape, by_blocks: Mapping[int, list[Job] | None], hardware: Hardware
) -> Iterator[Tiling]:
    """Every legal tiling of a shape, with its expected time."""
    for n, blocks in TILES:
        job_list = by_blocks[blocks]
        if not job_list or len(job_list) + 1 > MAX_JOBS:  # an odd number gets one that idles
            continue
        for split in (False, True):
            if not split and len(job_list) == 1:
                continue
            for area in areas(shape, n, split, store_vector(shape, job_list)):
                yield from pipelines(shape, job_list, n, blocks, split, area, hardware)


@dataclass(frozen=True)
class Area:
    images: int
    height: int
    width: int
    pitch: int
    rows: int
    pixels: int
    vector: int
    shift_x: int


def copy_mode(shape: Shape) -> tuple[int, int]:
    """How input rows are copied (the kernel's `copy`), and to how many pixels they are aligned."""
    problem = shape.problem
    width = problem.in_size[1]
    if problem.channels_last:
        return 0, 1
    if width % ITEM_PIXELS == 0:
        return 0, ITEM_PIXELS
    if problem.element_bytes == 4:
        return 1, 1
    return (1, 2) if width % 2 == 0 else (2, 1)


def store_vector(shape: Shape, job_list: list[Job]) -> int:
    """Elements of one store, contiguous layout: whole vectors must stay in an output row."""
    problem = shape.problem
    if problem.channels_last:
        return 1
    span = shape.columns.out_step
    if span > 1 and not (job_list[0].interleave and len(shape.columns.firsts) == span):
        return 1
    whole = 16 // problem.element_bytes
    width = problem.out_size[1]
    return whole if width % whole == 0 else gcd(width, 2)


def widths(shape: Shape, n: int, vector: int) -> list[int]:
    """Widths of a tile, in lattice points: what cuts the image evenly and fits rows into N."""
    count = shape.columns.count
    whole = vector // gcd(vector, shape.columns.out_step)
    align = max(whole, copy_mode(shape)[1])
    parts = {-(-count * rows // n) for rows in range(1, 17)} | {1}
    cut = {up(-(-count // part), align if part > 1 else whole) for part in parts}
    return sorted(width for width in cut if width <= n)


def areas(shape: Shape, n: int, split: bool, vector: int) -> Iterator[Area]:
    """The tile areas that fit N pixels a consumer."""
    problem = shape.problem
    count_y, count_x = shape.rows.count, shape.columns.count
    low_y, high_y, low_x, high_x = shape.shifts
    step = shape.rows.in_step
    start = copy_mode(shape)[1]
    low_x = low_x // start * start
    align = max(vector // gcd(vector, shape.columns.out_step), start, ITEM_PIXELS)
    consumers = 2 if split else 1
    for width in widths(shape, n, vector):
        pitch = width + high_x - low_x
        if width >= count_x:  # the margins are zeros, so rows can share them
            pitch = max(problem.in_size[1] - low_x, width + high_x, width)
        pitch = up(pitch, align)
        overhang = max(0, width + high_x - low_x - pitch)
        most = min(1 + (n - width) // pitch, -(-count_y // consumers))
        bands = -(-count_y // (most * consumers))
        for height in {most, -(-count_y // (bands * consumers))}:
            rows = height * consumers + (high_y - low_y) // step
            pixels = up(step * rows * pitch + overhang, ITEM_PIXELS)
            yield Area(1, height * consumers, width, pitch, rows, pixels, vector, low_x)
        used = (count_y - 1) * pitch + width
        if step > 1 or used > n:
            continue
        rows = max(problem.in_size[0] - low_y, count_y + high_y, count_y)
        images = min(1 + (n - used) // (rows * pitch), -(-problem.batch // consumers)) * consumers
        if images > 1:
            over_rows = max(0, count_y + high_y - low_y - rows)
            pixels = up((images * rows + over_rows) * pitch + overhang, ITEM_PIXELS)
            yield Area(images, count_y, width, pitch, rows, pixels, vector, low_x)


def pipelines(
    shape: Shape,
    job_list: list[Job],
    n: int,
    blocks: int,
    split: bool,
    area: Area,
    hardware: Hardware,
) -> Iterator[Tiling]:
    """The depths of slices and rings that fit shared memory."""
    problem = shape.problem
    block_channels = 16 // problem.element_bytes
    total_blocks = up(-(-problem.in_channels // block_channels), 2)
    plane = area.pixels + (PLANE_PHASE - area.pixels) % 8
    if (
        area.pixels > MAX_PIXELS
        or area.images * problem.in_channels * prod(problem.in_size) >= 2**30
    ):
        return
    for slice_blocks in (8, 4, 2):
        if slice_blocks > total_blocks and slice_blocks > 2:
            continue
        slices = -(-total_blocks // slice_blocks)
        slot = slice_blocks * plane * 16
        room = hardware.shared_memory - FIXED_BYTES
        kinds = {kind: None for job in job_list for kind in job.kinds}
        pair_count = sum(up(len(kind.taps) * slice_blocks // 2, STEP_PAIRS) for kind in kinds)
        # A job that idles brings tap lists of its own, empty ones.
        idle = blocks if not split and len(job_list) % 2 else 0
        if pair_count > MAX_PAIRS or len(kinds) + idle > MAX_KINDS:
            continue
        rings = 1 if split else 2  # consumers that split the pixels share their weights
        for stages in (8, 6, 5, 4):
            slots = min((room - rings * stages * STAGE_BYTES) // slot, MAX_SLOTS)
            if slots >= 2:
                depth = (slice_blocks, slices, slots, stages)
                yield timed(shape, job_list, n, blocks, split, area, plane, depth, hardware)


def group_count(job_list: list[Job], split: bool) -> int:
    """Units of work of one tile: a job each, or two where the consumers take one each."""
    return len(job_list) if split else -(-len(job_list) // 2)


def unit_work(
    shape: Shape,
    job_list: list[Job],
    n: int,
    split: bool,
    area: Area,
    depth: tuple[int, int],
    units: int,
) -> UnitWork:
    """What the stages of the pipeline have to do for one unit of work."""
    problem = shape.problem
    slice_blocks, slices = depth
    lists = [len(kind.taps) * slice_blocks // 2 for job in job_list for kind in job.kinds]
    share = slices / group_count(job_list, split)
    side_by_side = LOADERS // min(slice_blocks, 4)
    passes = max(slice_blocks // 4, 1)
    outputs = problem.batch * problem.out_channels * problem.out_size[0] * problem.out_size[1]
    stored = outputs * problem.element_bytes / units
    span = shape.columns.out_step if job_list[0].interleave else 1
    segments = outputs / units / (area.width * span)
    if problem.channels_last:
        segments = 0.0
    elif shape.columns.out_step > 2:
        stored *= SPREAD_STORE
    elif span < shape.columns.out_step:
        stored *= 2  # half of every sector, which costs as much as a whole one
    return UnitWork(
        tensor=sum(lists) * (2 if split else 1) * share * n / 2,
        items=-(-area.pixels // (ITEM_PIXELS * side_by_side)) * passes * slices,
        slices=slices,
        stored=stored,
        segments=segments,
        weights=sum(map(step_count, lists)) * share * STAGE_BYTES,
    )


def timed(
    shape: Shape,
    job_list: list[Job],
    n: int,
    blocks: int,
    split: bool,
    area: Area,
    plane: int,
    depth: tuple[int, int, int, int],
    hardware: Hardware,
) -> Tiling:
    """The tiling with the cycles it should take on the whole problem."""
    problem = shape.problem
    slice_blocks, slices, slots, stages = depth
    tiles = (
        -(-problem.batch // area.images),
        -(-shape.rows.count // area.height),
        -(-shape.columns.count // area.width),
    )
    groups = group_count(job_list, split)
    units = tiles[0] * tiles[1] * tiles[2] * groups
    work = unit_work(shape, job_list, n, split, area, (slice_blocks, slices), units)
    memory = problem.bytes / units / DRAM_BYTES
    cycles = max(work.cycles, memory)
    if slots < 3:
        cycles *= 1.1  # the consumers then wait for each other
    waves = -(-units // hardware.multiprocessors)
    return Tiling(
        n,
        blocks,
        split,
        area.images,
        area.height,
        area.width,
        area.pitch,
        area.rows,
        area.pixels,
        plane,
        slice_blocks,
        slices,
        slots,
        stages,
        area.vector,
        area.shift_x,
        groups,
        tiles,
        cycles * waves + START_CYCLES,
        work.most,
    )


def step_count(pairs: int) -> int:
    """Weight blocks of a tap list: whole ones, then what is left as 2 and 1."""
    return pairs // STEP_PAIRS + (pairs % STEP_PAIRS).bit_count()


def up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple
