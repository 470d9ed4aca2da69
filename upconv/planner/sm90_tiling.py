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
    GATHER_FACTOR,
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
FIXED_BYTES = 1024 + 2 * 256 * 4 + 1024 * 4 + 8 * 16 * 288 + 4096
"""Barriers, tables of columns and pairs, staging of 8 warps, and slack after the last plane."""
GATHER_BYTES = 2 * 8 * 96 * 4 + 6 * 64 * 96
"""Table of offsets and raw ring of the loaders, where they copy without TMA."""
BOX_BYTES = 32 * 1024
"""Boxes in the raw ring where TMA copies: what must be under way to keep the memory busy."""
BOX_GOOD = 8 * 1024
"""Boxes of small tiles take several channel blocks, up to this size: each costs a barrier."""
BOX_MOST = 256
"""Elements of a box along one dimension."""
MAX_CHUNKS = 16
COPY_BOXES = 3
"""`copy` for TMA boxes."""
ITEM_PIXELS = 4
"""Pixels that a loader copies together."""
MAX_SLOTS, MAX_STAGES = 16, 16
MAX_PIXELS = 768
"""A loader thread lists at most 8 items of 4 pixels; 24 threads go side by side."""

PLANE_PHASE = 1
"""Pixels of a plane, modulo 8: a pixel's blocks then fall into different banks."""


@dataclass(frozen=True)
class Tiling:
    n: int
    blocks: int
    alternate: bool
    """The consumers take units in turn, rather than two jobs of the same unit."""
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
    copy: int
    shift_x: int
    box: tuple[int, int, int, int, int]
    """Columns, rows, channel blocks and bytes of a TMA box, and how many the raw ring holds."""
    groups: int
    tiles: tuple[int, int, int]
    cycles: float
    bound: str

    @property
    def microseconds(self) -> float:
        return self.cycles / CLOCK_MHZ + PACK_MICROSECONDS

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
            "copy": self.copy,
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
            "raw_w": self.box[0],
            "raw_h": self.box[1],
            "raw_blocks": self.box[2],
            "raw_bytes": self.box[3],
            "raw_chunks": self.box[4],
            "alternate": int(self.alternate),
            "turn_slices": turn_slices(self.alternate, self.slices, self.slots),
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
        share = use / (points * self.n)
        kind = "take tiles in turn" if self.alternate else "split the output rows of a tile"
        copies = "TMA boxes" if self.copy == COPY_BOXES else "copies of the loaders' own"
        return (
            f"tile {self.images} x {self.height} x {self.width} lattice points, "
            f"m64n{self.n} x {self.blocks}, {share:.0%} of the columns stored",
            f"the two consumers {kind}; {shape.folds} row phases folded into 64 rows",
            f"{self.slices} slices of {self.slice_blocks} channel blocks, {self.slots} slots, "
            f"{self.stages} weight stages, input by {copies}",
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
        for area in areas(shape, n, store_vector(shape, job_list)):
            for alternate in (True, False) if len(job_list) > 1 else (True,):
                yield from pipelines(shape, job_list, n, blocks, alternate, area, hardware)


@dataclass(frozen=True)
class Area:
    images: int
    height: int
    width: int
    pitch: int
    rows: int
    pixels: int
    vector: int
    copy: int
    shift_x: int


def box_of(shape: Shape, area: Area) -> tuple[int, int]:
    """Columns and rows of the TMA box that holds one channel of a tile.

    A box begins on 16 bytes, at most `late` columns before the tile does.
    """
    whole = 16 // shape.problem.element_bytes
    step = shape.columns.in_step
    late = max((i * area.width * step + area.shift_x) % whole for i in range(whole))
    return up(area.pitch * step + late, whole), area.rows * shape.rows.in_step


def boxes_fit(shape: Shape, area: Area) -> bool:
    return max(*box_of(shape, area), area.images) <= BOX_MOST


def copy_modes(shape: Shape) -> list[tuple[int, int]]:
    """The ways to copy input rows (the kernel's `copy`, alignment in pixels), best first."""
    problem = shape.problem
    if problem.channels_last or problem.in_size[1] * problem.element_bytes % 16:
        return [copy_mode(shape)]
    # Two pixels of 16 bits are read together.
    return [(COPY_BOXES, 4 // problem.element_bytes), copy_mode(shape)]


def copy_mode(shape: Shape) -> tuple[int, int]:
    """The same without TMA."""
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


def widths(shape: Shape, n: int, vector: int, start: int) -> list[int]:
    """Widths of a tile, in lattice points: what cuts the image evenly and fits rows into N."""
    count = shape.columns.count
    whole = vector // gcd(vector, shape.columns.out_step)
    parts = {-(-count * rows // n) for rows in range(1, 17)} | {1}
    cut = {up(-(-count // part), max(whole, start) if part > 1 else whole) for part in parts}
    return sorted(width for width in cut if width <= n)


def areas(shape: Shape, n: int, vector: int) -> Iterator[Area]:
    """The tile areas that fit N pixels, each with the best way to copy it."""
    boxed: set[tuple[int, int]] = set()
    for copy, start in copy_modes(shape):
        for area in areas_copied(shape, n, vector, copy, start):
            if copy == COPY_BOXES:
                if not boxes_fit(shape, area):
                    continue
                boxed.add((area.images, area.height))
            elif boxed:
                continue
            yield area


def areas_copied(shape: Shape, n: int, vector: int, copy: int, start: int) -> Iterator[Area]:
    problem = shape.problem
    count_y, count_x = shape.rows.count, shape.columns.count
    low_y, high_y, low_x, high_x = shape.shifts
    step = shape.rows.in_step
    low_x = low_x // start * start
    align = max(vector // gcd(vector, shape.columns.out_step), start, ITEM_PIXELS)
    for width in widths(shape, n, vector, start):
        pitch = width + high_x - low_x
        if width >= count_x:  # the margins are zeros, so rows can share them
            pitch = max(problem.in_size[1] - low_x, width + high_x, width)
        pitch = up(pitch, align)
        overhang = max(0, width + high_x - low_x - pitch)
        most = min(1 + (n - width) // pitch, count_y)
        for height in {most, -(-count_y // -(-count_y // most))}:
            rows = height + (high_y - low_y) // step
            pixels = up(step * rows * pitch + overhang, ITEM_PIXELS)
            yield Area(1, height, width, pitch, rows, pixels, vector, copy, low_x)
        used = (count_y - 1) * pitch + width
        if step > 1 or used > n:
            continue
        rows = max(problem.in_size[0] - low_y, count_y + high_y, count_y)
        images = min(1 + (n - used) // (rows * pitch), problem.batch)
        if images > 1:
            over_rows = max(0, count_y + high_y - low_y - rows)
            pixels = up((images * rows + over_rows) * pitch + overhang, ITEM_PIXELS)
            yield Area(images, count_y, width, pitch, rows, pixels, vector, copy, low_x)


def raw_ring(
    shape: Shape, area: Area, slice_blocks: int
) -> tuple[tuple[int, int, int, int, int], int]:
    """The TMA boxes of a tiling (see `Tiling.box`), and the bytes of the raw ring."""
    if area.copy != COPY_BOXES:
        return (0, 0, 0, 0, 0), GATHER_BYTES
    columns, rows = box_of(shape, area)
    block = columns * rows * area.images * 16
    blocks = max(b for b in (1, 2, 4, 8) if b == 1 or (b <= slice_blocks and b * block <= BOX_GOOD))
    size = up(blocks * block, 128)
    count = min(max(BOX_BYTES // size, 2), MAX_CHUNKS)
    return (columns, rows, blocks, size, count), size * count


def pipelines(
    shape: Shape,
    job_list: list[Job],
    n: int,
    blocks: int,
    alternate: bool,
    area: Area,
    hardware: Hardware,
) -> Iterator[Tiling]:
    """The depths of slices and rings that fit shared memory."""
    problem = shape.problem
    block_channels = 16 // problem.element_bytes
    total_blocks = up(-(-problem.in_channels // block_channels), 2)
    if (
        area.pixels > MAX_PIXELS
        or area.images * problem.in_channels * prod(problem.in_size) >= 2**30
        or (area.images - 1) * problem.out_channels * prod(problem.out_size) >= 2**30
    ):
        return
    plane = area.pixels + (PLANE_PHASE - area.pixels) % 8
    for slice_blocks in (8, 4, 2):
        if slice_blocks > total_blocks and slice_blocks > 2:
            continue
        slices = -(-total_blocks // slice_blocks)
        slot = slice_blocks * plane * 16
        room = hardware.shared_memory - FIXED_BYTES - raw_ring(shape, area, slice_blocks)[1]
        kinds = {kind: None for job in job_list for kind in job.kinds}
        pair_count = sum(up(len(kind.taps) * slice_blocks // 2, STEP_PAIRS) for kind in kinds)
        # A job that idles brings tap lists of its own, empty ones.
        idle = blocks if not alternate and len(job_list) % 2 else 0
        if pair_count > MAX_PAIRS or len(kinds) + idle > MAX_KINDS:
            continue
        for stages in (8, 6, 4):
            slots = min((room - stages * STAGE_BYTES) // slot, MAX_SLOTS)
            if slots >= 2:
                depth = (slice_blocks, slices, slots, stages)
                yield timed(shape, job_list, n, blocks, alternate, area, plane, depth, hardware)


def group_count(job_list: list[Job], alternate: bool) -> int:
    """Units of work of one tile: a job each, or two where the consumers take one each."""
    return len(job_list) if alternate else -(-len(job_list) // 2)


def turn_slices(alternate: bool, slices: int, slots: int) -> int:
    """Slices of one turn: whole units where these alternate; else half of the ring, so that the
    next turn's slices arrive during this one."""
    return slices if alternate else min(slices, max(slots // 2, 1))


def unit_work(
    shape: Shape,
    job_list: list[Job],
    n: int,
    alternate: bool,
    area: Area,
    depth: tuple[int, int, int],
    units: int,
) -> UnitWork:
    """What the stages of the pipeline have to do for one unit of work."""
    problem = shape.problem
    slice_blocks, slices, slots = depth
    lists = [len(kind.taps) * slice_blocks // 2 for job in job_list for kind in job.kinds]
    share = slices / group_count(job_list, alternate)
    outputs = problem.batch * problem.out_channels * problem.out_size[0] * problem.out_size[1]
    stored = outputs * problem.element_bytes / units
    boxes = area.copy == COPY_BOXES
    span = shape.columns.out_step if job_list[0].interleave else 1
    segments = outputs / units / (area.width * span)
    if problem.channels_last:
        segments = 0.0
    elif shape.columns.out_step > 2:
        stored *= SPREAD_STORE
    elif span < shape.columns.out_step:
        stored *= 2  # half of every sector, which costs as much as a whole one
    return UnitWork(
        tensor=sum(lists) * share * n / 2,
        placed=area.pixels * slice_blocks * slices * 16 * (1 if boxes else GATHER_FACTOR),
        slices=slices,
        turns=1 if alternate else 2 * -(-slices // turn_slices(alternate, slices, slots)),
        stored=stored,
        segments=segments,
        weights=sum(map(step_count, lists)) * share * STAGE_BYTES,
    )


def timed(
    shape: Shape,
    job_list: list[Job],
    n: int,
    blocks: int,
    alternate: bool,
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
    groups = group_count(job_list, alternate)
    units = tiles[0] * tiles[1] * tiles[2] * groups
    work = unit_work(shape, job_list, n, alternate, area, depth[:3], units)
    memory = problem.bytes / units / DRAM_BYTES
    cycles = max(work.cycles, memory)
    waves = -(-units // hardware.multiprocessors)
    return Tiling(
        n,
        blocks,
        alternate,
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
        area.copy,
        area.shift_x,
        raw_ring(shape, area, slice_blocks)[0],
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
