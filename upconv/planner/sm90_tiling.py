"""Tiles of the Hopper kernel: which ones fit, and how long each should take.

A tile is `images x height x width` lattice points. Its input lies in shared memory row after row,
`pitch` pixels from one row to the next, so that the N pixels of one WGMMA run over row ends; the
columns between rows are computed for nothing. Where a tile spans the whole width (height), the
margin of one row (image) is the margin of the next as well: both are zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from .problem import Hardware

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

STEP_PAIRS = 4
STAGE_BYTES = 8192
FIXED_BYTES = 1024 + 2 * 256 * 4 + 8 * 8 * 544 + 4 * 64 * 128 + 4096
"""Barriers, column tables, staging of 8 warps, raw ring of the loaders, slack after the last plane."""
ITEM_PIXELS = 4
"""Pixels that a loader copies together."""
MAX_SLOTS, MAX_STAGES = 16, 16

CLOCK_MHZ = 1700.0
"""Sustained under tensor load on an H200."""
L2_BYTES = 26.0
"""Bytes a cycle that one multiprocessor draws from L2 when all of them do."""
STORE_BYTES = 13.0
"""Bytes a cycle that one multiprocessor stores when all of them do."""
DRAM_BYTES = 18.4
"""4.27 TB/s copy rate, for one of 132 multiprocessors at CLOCK_MHZ."""


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
        return self.cycles / CLOCK_MHZ + 2.0

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
        taps = problem.kernel[0] * problem.kernel[1]
        out_h, out_w = problem.out_size
        return {
            "operand": {"float32": 0, "bfloat16": 1, "float16": 2}[problem.dtype],
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
            "weight_in": problem.out_channels * taps,
            "weight_out": taps,
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
            f"bound by {self.bound}: {self.cycles / CLOCK_MHZ:.1f} us expected",
        )


def tilings(
    shape: Shape, by_blocks: Mapping[int, list[Job] | None], hardware: Hardware
) -> Iterator[Tiling]:
    """Every legal tiling of a shape, with its expected time."""
    for n, blocks in TILES:
        job_list = by_blocks[blocks]
        if not job_list or len(job_list) + 1 > 128:
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


def areas(shape: Shape, n: int, split: bool, vector: int) -> Iterator[Area]:
    """The tile areas that fit N pixels a consumer."""
    problem = shape.problem
    count_y, count_x = shape.rows.count, shape.columns.count
    low_y, high_y, low_x, high_x = shape.shifts
    span, step = shape.columns.out_step, shape.rows.in_step
    start = copy_mode(shape)[1]
    low_x = low_x // start * start
    align = max(vector // gcd(vector, span), start)
    consumers = 2 if split else 1
    seen = set()
    for parts in range(1, max(2, -(-count_x // 8)) + 1):
        width = -(-count_x // parts)
        width = up(width, align if parts > 1 else vector // gcd(vector, span))
        if width > n:
            continue
        if width in seen:
            continue
        seen.add(width)
        pitch = width + high_x - low_x
        if width >= count_x:
            pitch = max(problem.in_size[1] - low_x, width + high_x, width)
        pitch = up(pitch, ITEM_PIXELS)
        margin_y = (high_y - low_y) // step
        most = min(1 + (n - width) // pitch, -(-count_y // consumers))
        bands = -(-count_y // (most * consumers))
        for height in {most, -(-count_y // (bands * consumers))}:
            full = height * consumers
            rows = full + margin_y
            overhang = max(0, width + high_x - low_x - pitch)
            pixels = up(step * rows * pitch + overhang, ITEM_PIXELS)
            yield Area(1, full, width, pitch, rows, pixels, vector, low_x)
        if step == 1 and most * 1 >= count_y or (split and step == 1):
            rows = max(problem.in_size[0] - low_y, count_y + high_y, count_y)
            used = (count_y - 1) * pitch + width
            if used > n:
                continue
            images = 1 + (n - used) // (rows * pitch)
            images = min(images, -(-problem.batch // consumers)) * consumers
            if images < 2:
                continue
            over_rows = max(0, count_y + high_y - low_y - rows)
            overhang = max(0, width + high_x - low_x - pitch)
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
    plane = area.pixels + (1 - area.pixels) % 8  # a pixel's blocks fall into different banks
    for slice_blocks in (8, 4, 2):
        if slice_blocks > total_blocks and slice_blocks > 2:
            continue
        slices = -(-total_blocks // slice_blocks)
        slot = slice_blocks * plane * 16
        room = hardware.shared_memory - FIXED_BYTES
        kinds = {kind: None for job in job_list for kind in job.kinds}
        pair_count = sum(len(kind.taps) * slice_blocks // 2 for kind in kinds)
        if pair_count > 1024 or len(kinds) > 32:
            continue
        rings = 1 if split else 2  # consumers that split the pixels share their weights
        for stages in (8, 6, 4, 3, 2):
            slots = min((room - rings * stages * STAGE_BYTES) // slot, MAX_SLOTS)
            if slots >= 2:
                depth = (slice_blocks, slices, slots, stages)
                yield timed(
                    shape, job_list, n, blocks, split, area, plane, depth, hardware
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
    groups = len(job_list) if split else -(-len(job_list) // 2)
    units = tiles[0] * tiles[1] * tiles[2] * groups
    steps = sum(
        step_count(len(kind.taps) * slice_blocks // 2)
        for job in job_list
        for kind in job.kinds
    )
    pairs = sum(len(kind.taps) for job in job_list for kind in job.kinds) * slice_blocks // 2
    steps_per_unit = steps / groups * slices
    # A WGMMA is bound by the tensor core (N / 2 cycles) or by its shared-memory operands.
    instruction = max(n / 2, (2048 + 32 * n) / 128)
    tensor = pairs * (2 if split else 1) / groups * slices * instruction
    weights = steps_per_unit * STAGE_BYTES
    fill = slices * slice_blocks * 16 * area.pixels
    outputs = problem.batch * problem.out_channels * problem.out_size[0] * problem.out_size[1]
    store = outputs * problem.element_bytes / units
    # Few whole sectors in a store of strided columns: each one costs as much as a full one.
    strided = not problem.channels_last and shape.columns.out_step > 1
    if strided and not job_list[0].interleave:
        store *= min(shape.columns.out_step, 32 // problem.element_bytes)
    traffic = (weights + fill) / L2_BYTES
    write = store / STORE_BYTES
    dram = problem.bytes / units / DRAM_BYTES
    if slots < 3:
        tensor *= 1.25
    cycles = max(tensor, traffic, write, dram)
    bound = ("tensor cores", "L2 traffic", "stores", "memory")[
        (tensor, traffic, write, dram).index(cycles)
    ]
    # Each unit has a tail that nothing hides: the slower stages a quarter, and the hand-over.
    cycles += 0.15 * (tensor + traffic + write - max(tensor, traffic, write)) + 600
    waves = -(-units // hardware.multiprocessors)
    return Tiling(
        n, blocks, split, area.images, area.height, area.width, area.pitch, area.rows,
        area.pixels, plane, slice_blocks, slices, slots, stages, area.vector, area.shift_x, groups, tiles,
        cycles * waves + 4000, bound,
    )


def step_count(pairs: int) -> int:
    """Weight blocks of a tap list: whole ones, then what is left as 2 and 1."""
    return pairs // STEP_PAIRS + (pairs % STEP_PAIRS).bit_count()


def up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple
