"""Tilings of the Hopper kernel: which ones fit, and how long each should take.

A tiling is an area (sm90_area.py), the jobs that read it, and how deep slices and rings are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

from .operands import OPERANDS, SPLIT
from .problem import Hardware
from .sm90_area import (
    COPY_BOXES,
    COPY_ROWS,
    GROUP,
    SLACK_PIXELS,
    Area,
    Box,
    aligned,
    stored_share,
    tile_counts,
)
from .sm90_cost import (
    CLOCK_MHZ,
    CONSTANTS,
    DRAM_BYTES,
    PACK_MICROSECONDS,
    PARTIAL_SECTOR,
    UnitWork,
    gathering_cycles,
    line_cycles,
)
from .sm90_load import SPLIT_PARTS, Load, sum_slices
from .sm90_task import WARP_ROWS, Shape, Taps, Task, Triple
from .sm90_weights import STAGE_BYTES, WeightRings, turn_slices, weight_rings

if TYPE_CHECKING:
    from .sm90 import Job

TILES = (
    (256, 1),
    (240, 1),
    (216, 1),
    (184, 1),
    (64, 1),
    (128, 2),
    (104, 2),
)
"""(N, row blocks of a job) of every compiled kernel: the lists of csrc/cuda/sm90_launch.cuh."""

BLOCKS = tuple(sorted({blocks for _, blocks in TILES}))
"""Row blocks that a job may have."""

SPLIT_TILES = ((256, 1), (224, 1), (208, 1), (128, 1), (128, 2))
"""The same for split float32: N of both consumers together."""
SPLIT_NOTE = "float32 as two FP16 numbers, scaled by the input's range: a pass over it, 2 KiB"
BLOCK_ROWS = 64
FIXED_BYTES = 1024 + 2 * 256 * 4 + 8 * 16 * 288 + SLACK_PIXELS * 16
"""Barriers, table of columns, staging of 8 warps, and slack after the last channel block."""
MAX_SLOTS = 16
FULL_TILE = 256
"""N times row blocks of the tiles with most sums a thread, 128."""
MAX_PIXELS = 768
"""A loader thread lists at most 8 items of 4 pixels; 24 threads go side by side."""

STAGED_BYTES = 256
"""Of a row, that a warp regroups at a time; of two width phases half as many columns."""
SECTOR = 32
"""Bytes that L2 and memory write at least."""
SHORT_RING = 4
"""Stages: two are being read, and two more hardly hide L2's delay."""

BLOCK_PHASE = 1
"""Pixels of a channel block, modulo 8: a pixel's blocks then fall into different banks."""


@dataclass(frozen=True)
class Tiling:
    n: int
    blocks: int
    alternate: bool
    """The consumers take units in turn, rather than two jobs of the same unit."""
    paired: bool
    """These two jobs are the width phases of the same rows, which the consumers store together."""
    area: Area
    slice_blocks: int
    sum_slices: int
    sum_pairs: int
    """Split float32: slices, and pairs of a tap list, that are summed by themselves; else 0."""
    slices: int
    """Channel slices of one plane."""
    slots: int
    weights: WeightRings
    turn_slices: int
    box: Box
    job_groups: int
    tiles: tuple[int, int, int, int]
    cycles: float
    work: UnitWork

    @property
    def microseconds(self) -> float:
        return self.cycles / CLOCK_MHZ + PACK_MICROSECONDS

    @property
    def block_pitch(self) -> int:
        return block_pitch(self.area)

    def shifted(self, shape: Shape) -> bool:
        return shiftable(shape, self.area, self.n * self.blocks)

    def plane(self, offsets: Triple) -> Triple:
        """The offsets from which a plane is loaded."""
        return offsets[0], offsets[1], aligned(offsets[2], self.area.start)

    def pairs(self, offsets: Triple, taps: Taps, steps: Triple) -> list[tuple[int, ...]]:
        """(offset in 16-byte units, channel block, shift in depth, rows, columns) in a plane."""
        area = self.area
        back = offsets[2] - self.plane(offsets)[2]
        result: list[tuple[int, ...]] = []
        for y, x in taps:
            row, lane = divmod(y, area.lanes)
            pixel = (lane * area.images * area.rows + row) * area.pitch + x + back
            shift = offsets[0], offsets[1] + y * steps[1], offsets[2] + x * steps[2]
            for block in range(0, self.slice_blocks, 2):
                result.append((block * self.block_pitch + pixel, block, *shift))
        return result

    def fields(self, shape: Shape) -> dict[str, int]:
        task, area = shape.task, self.area
        return {
            "operand": SPLIT if task.split else OPERANDS[task.dtype],
            "tile_n": self.n,
            "job_blocks": self.blocks,
            "channels_last": int(task.channels_last),
            "copy": area.copy,
            "batch": task.batch,
            "conv_groups": task.groups,
            "in_channels": task.in_channels,
            **dict(zip(("in_d", "in_h", "in_w"), task.in_size, strict=True)),
            "out_channels": task.out_channels,
            **dict(zip(("out_d", "out_h", "out_w"), task.out_size, strict=True)),
            **dict(zip(("in_step_z", "in_step_y", "in_step_x"), shape.steps, strict=True)),
            "lanes": shape.lanes,
            "tile_lanes": area.lanes,
            "out_step_z": shape.depth.out_step,
            "out_step_y": shape.rows.out_step,
            "out_step_x": shape.columns.out_step,
            **dict(zip(("tiles_o", "tiles_z", "tiles_y", "tiles_x"), self.tiles, strict=True)),
            "tile_o": area.images,
            "tile_h": area.height,
            "tile_w": area.width,
            "pitch": area.pitch,
            **{"strip": area.strip, "row_columns": area.row_columns},
            "rows": area.rows,
            "pixels": area.pixels,
            "block_pitch": self.block_pitch,
            "slice_blocks": self.slice_blocks,
            "parts": SPLIT_PARTS if task.split else 1,
            "slices": self.slices,
            "slots": self.slots,
            **self.weights.fields(),
            **self.box._asdict(),
            "flat": int(area.flat),
            "alternate": int(self.alternate),
            "turn_slices": self.turn_slices,
            "sum_slices": self.sum_slices,
            "sum_pairs": self.sum_pairs,
            "fold_rows": shape.fold_rows,
            "folds": shape.folds,
            "row_folds": shape.row_folds,
            "depth_apart": task.lattices[0].out_step,
            "width_folds": shape.width_folds,
            "warp_lines": shape.warp_lines,
            "width_phases": 0,
            "paired": int(self.paired),
            **dict.fromkeys(("line_pitch", "line_columns", "shifted"), 0),
            **dict(zip(("fill_z", "fill_y"), task.fills, strict=True)),
            "fill_first": int(task.fill_first),
            "vector": area.vector,
            "weight_in": task.weight_in,
            "weight_out": task.weight_out,
            "weight_group": task.weight_group,
            "weight_blocks": 0,
            "job_groups": self.job_groups,
            "row_phases": len(shape.row_phases),
            **dict.fromkeys(("kinds", "pairs", "visits", "jobs"), 0),
        }

    def notes(self, shape: Shape, planes: int) -> tuple[str, ...]:
        area, copy = self.area, self.area.copy
        share = stored_share(shape, self.n, area)
        kind = "take tiles in turn" if self.alternate else "split the output rows of a tile"
        if self.paired:
            kind = "have one width phase each, stored together"
        if shape.task.split:
            kind = "halve the columns of a tile"
        boxes = {COPY_BOXES: "TMA boxes", COPY_ROWS: f"TMA, {self.box.boxes} boxes a tile"}
        copies = boxes.get(copy, "copies of the loaders' own")
        several = f"{planes} planes, each " if planes > 1 else ""
        strips = " in strips of 8" if area.in_strips else ""
        return (
            f"tile {area.images} x {area.height} x {area.width} lattice points{strips}, "
            f"m64n{self.n} x {self.blocks}, {share:.0%} of the columns stored",
            f"the two consumers {kind}; {shape.folds * shape.width_folds} phases of "
            f"{min(shape.fold_rows, shape.task.out_channels)} channels folded into 64 rows",
            f"{several}{self.slices} slices of {self.slice_blocks} channel blocks, {self.slots} "
            f"slots, {self.weights}, input by {copies}",
            *((SPLIT_NOTE,) if shape.task.split else ()),
            f"most of the time goes to {self.work.most}; {self.cycles / CLOCK_MHZ:.1f} us expected",
        )


def operand_reads(n: int, split: bool) -> float:
    """Of shared memory, 128 bytes each, by one WGMMA. Split: by one of each consumer."""
    return (2 if split else 1) * BLOCK_ROWS / 4 + n / 4


def addressable(task: Task, area: Area) -> bool:
    """Do the kernel's 32-bit offsets, and a loader's table, reach over the tile's images?"""
    in_image = task.groups * task.in_channels * prod(task.in_size)
    out_image = task.groups * task.out_channels * prod(task.out_size)
    images = area.images
    reached = max(images * in_image, (images - 1) * out_image)
    return area.pixels <= MAX_PIXELS and reached < 2**30


def store_vector(shape: Shape, job_list: list[Job]) -> int:
    """Elements of one store, contiguous layout: whole vectors must stay in an output row."""
    task = shape.task
    if task.channels_last:
        return 1
    span = shape.columns.out_step
    whole_rows = job_list[0].together or job_list[0].paired
    if span > 1 and not (whole_rows and len(shape.columns.firsts) == span):
        return 1
    whole = 16 // task.element_bytes
    width = task.out_size[2]
    return whole if width % whole == 0 else gcd(width, 2)


def block_pitch(area: Area) -> int:
    return area.pixels + (BLOCK_PHASE - area.pixels) % 8


def pipelines(
    shape: Shape,
    load: Load,
    job: Job,
    form: tuple[int, int, bool, int],
    area: Area,
    ring: tuple[Box, int],
    hardware: Hardware,
) -> Iterator[Tiling]:
    """The depths of the rings that fit shared memory."""
    slice_blocks = form[3]
    total_blocks = shape.task.channel_blocks
    slices = -(-total_blocks // slice_blocks)
    parts = SPLIT_PARTS if shape.task.split else 1
    slot = parts * slice_blocks * block_pitch(area) * 16
    room = hardware.shared_memory - FIXED_BYTES - load.table_bytes - ring[1]
    tiles = tile_counts(shape, area)
    known: dict[tuple[int, int, bool, bool], tuple[UnitWork, float]] = {}
    own = False  # rings of their own for the consumers: the longest that fit, they cost the same
    groups, steps = load.groups * shape.task.groups, (load.steps * slices, load.job_steps * slices)
    for weights in weight_rings(form[2], groups, *steps):
        slots = min((room - weights.bytes) // slot, MAX_SLOTS)
        if slots < 2 or (weights.rings == 2 and own and not weights.resident):
            continue
        if weights.resident and groups > hardware.multiprocessors:
            continue
        own = weights.rings == 2
        whole = form[2] or weights.rings == 2
        turn = turn_slices(whole, load.most_visits * slices, slots)
        key = turn, weights.rings, weights.resident, weights.stages <= SHORT_RING
        if key not in known:
            depth = (slices, *key, ring[0])
            known[key] = timed(shape, load, job, form, area, depth, tiles, hardware)
        work, cycles = known[key]
        yield Tiling(
            *form[:3],
            job.paired,
            area,
            slice_blocks,
            sum_slices(load) if shape.task.split else 0,
            load.sum_pairs,
            slices,
            slots,
            weights,
            turn,
            ring[0],
            load.groups,
            tiles,
            cycles,
            work,
        )


def shiftable(shape: Shape, area: Area, sums: int) -> bool:
    """Can lines be staged as far from 16 bytes as they lie in the output? Not in tiles with most
    sums, N times row blocks: the kernel has no registers for it."""
    return shape.shifts and area.one_row and (shape.task.split or sums < FULL_TILE)


class Stores(NamedTuple):
    """What a unit writes; see `UnitWork` for each of these."""

    stored: float
    segments: float = 0.0
    strip_segments: float = 0.0
    cut: float = 0.0
    ragged: float = 0.0
    vectors: float = 0.0
    pieces: float = 0.0
    lines: float = 0.0


def store_work(
    shape: Shape, job: Job, form: tuple[int, int, bool, int], area: Area, units: int
) -> Stores:
    task, (n, blocks, alternate, _) = shape.task, form
    outputs = task.outputs * (1 - task.filled) / units
    stored = outputs * task.element_bytes
    if task.channels_last:
        return Stores(stored, vectors=stored / 16, pieces=outputs / WARP_ROWS)
    if job.lines:
        # Width phases without taps are vectors like the others.
        staged = n * blocks * BLOCK_ROWS * (1 if alternate else 2)
        shifted = shiftable(shape, area, n * blocks)
        vectors = outputs / (shape.whole if shifted else area.vector)
        several = shape.columns.out_step > 2
        cycles = line_cycles(staged, vectors, shifted and several)
        pieces = outputs / (area.width * shape.columns.out_step)
        return Stores(0.0, lines=cycles, strip_segments=pieces if area.in_strips else 0.0)
    span = shape.columns.out_step if job.together or job.paired else 1
    segments = outputs / (area.width * span)
    edges = area.width * span * task.element_bytes, task.out_size[2] * task.element_bytes
    ragged = segments if any(edge % SECTOR for edge in edges) else 0.0
    if span < shape.columns.out_step:
        # A part of every sector.
        stored *= PARTIAL_SECTOR * min(shape.columns.out_step, SECTOR // task.element_bytes)
    columns = STAGED_BYTES // task.element_bytes // (1 if span == 1 else 2)
    rows = area.images, area.rows, area.height
    cut = segments * (row_pieces(rows, area.row_columns, area.width, columns) - 1)
    of_kind = (0.0, segments) if area.in_strips else (segments, 0.0)
    return Stores(stored, *of_kind, cut, ragged, stored / (area.vector * task.element_bytes))


@cache
def row_pieces(rows: tuple[int, int, int], pitch: int, width: int, columns: int) -> float:
    """Pieces of a row of the tile, on average, where `columns` of it are staged at a time. Images,
    rows of each in the tile, and those that are stored."""
    images, apart, height = rows
    begins = [(o * apart + y) * pitch for o in range(images) for y in range(height)]
    pieces = [(begin + width - 1) // columns - begin // columns + 1 for begin in begins]
    return sum(pieces) / len(pieces)


def unit_work(
    shape: Shape,
    load: Load,
    job: Job,
    form: tuple[int, int, bool, int],
    area: Area,
    depth: tuple[int, int, int, bool, bool, Box],
    units: int,
) -> UnitWork:
    """What the stages of the pipeline have to do for one unit of work. A plane costs what slices
    of one plane do: it is loaded and multiplied by itself. `depth`: slices of a plane and of a
    turn, rings of weights, whether those stay and whether they are short, the boxes."""
    task = shape.task
    n, _, alternate, slice_blocks = form
    slices, per_turn, rings, resident, short, box = depth
    share = slices / load.groups
    unit_slices = load.visits * share
    stores = store_work(shape, job, form, area, units)
    turns = 1 if alternate else 2 * -(-unit_slices // per_turn)
    if rings == 2:
        turns = 0
    if task.split:
        turns = load.additions * share + form[1] * unit_slices / sum_slices(load)
    chunks = unit_slices * slice_blocks / box.raw_blocks if box.raw_blocks else 0.0
    steps = load.steps * share
    placed = area.pixels * slice_blocks * unit_slices * 16
    rows = chunks if area.copy == COPY_ROWS else 0.0
    return UnitWork(
        operands=load.pairs * share * operand_reads(n, task.split),
        margins=placed * (1 - GROUP / area.strip),
        brought=chunks * box.raw_bytes if chunks else placed,
        slices=unit_slices,
        boxes=chunks,
        starved=chunks if box.raw_chunks == 2 else 0.0,
        row_chunks=rows,
        row_boxes=rows * box.boxes,
        stepped=placed * (gcd(shape.steps[2], 32) - 1) if area.copy == COPY_BOXES else 0.0,
        turns=turns,
        **stores._asdict(),
        bare_stores=stores.stored if rings == 2 else 0.0,
        bare_segments=stores.segments + stores.strip_segments if rings == 2 else 0.0,
        paired=stores.stored if job.paired else 0.0,
        weights=0.0 if resident else steps * STAGE_BYTES,
        shallow=steps if short and not resident else 0.0,
        gathered=placed * gathering_cycles(area.copy, shape.steps[2]),
        constants=constants_of(task),
    )


def constants_of(task: Task) -> dict[str, float]:
    if task.split:
        return CONSTANTS[-1]
    return CONSTANTS[(task.element_bytes == 2) + 2 * task.channels_last]


def timed(
    shape: Shape,
    load: Load,
    job: Job,
    form: tuple[int, int, bool, int],
    area: Area,
    depth: tuple[int, int, int, bool, bool, Box],
    tiles: tuple[int, int, int, int],
    hardware: Hardware,
) -> tuple[UnitWork, float]:
    """The work of a unit, and the cycles that the whole task should take."""
    units = prod(tiles) * load.groups * shape.task.groups
    work = unit_work(shape, load, job, form, area, depth, units)
    blocks = hardware.multiprocessors
    if depth[3]:  # weights stay: each has units of one group of jobs
        blocks -= blocks % (load.groups * shape.task.groups)
    waves = -(-units // blocks)
    memory, before = memory_cycles(shape.task, units, hardware)
    return work, max(work.cycles, memory) * waves + before + work.constants["start"]


def memory_cycles(task: Task, units: int, hardware: Hardware) -> tuple[float, float]:
    """The least that the memory needs: for a unit, and for what passes over a tensor before them
    (rows without taps are filled, the range of split float32 is found)."""
    outputs = task.outputs * task.element_bytes
    filled = task.filled * outputs
    passes = outputs if task.fill_first else filled
    if task.split:
        passes += task.inputs * task.element_bytes
    before = passes / DRAM_BYTES / hardware.multiprocessors
    return (task.bytes - filled) / units / DRAM_BYTES, before
