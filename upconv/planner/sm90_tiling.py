"""Tilings of the Hopper kernel: which ones fit, and how long each should take.

A tiling is an area (sm90_area.py), the jobs that read it, and how deep slices and rings are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import TYPE_CHECKING

from .problem import Hardware
from .sm90_area import COPY_BOXES, COPY_ROWS, Area, Box, aligned, areas, compiled, raw_rings, up
from .sm90_cost import (
    CLOCK_MHZ,
    DRAM_BYTES,
    PACK_MICROSECONDS,
    START_CYCLES,
    UnitWork,
    feeding_cycles,
    fill_factor,
    line_cycles,
)
from .sm90_task import Shape, Taps, Task, Triple
from .sm90_weights import (
    STAGE_BYTES,
    STEP_PAIRS,
    SUM_PAIRS,
    WeightRings,
    even_part,
    step_count,
    turn_slices,
    weight_rings,
)

if TYPE_CHECKING:
    from .sm90 import Job

TILES = (
    (256, 1),
    (240, 1),
    (216, 1),
    (184, 1),
    (128, 1),
    (64, 1),
    (128, 2),
    (104, 2),
    (64, 2),
)
"""(N, row blocks of a job) of every compiled kernel: the lists of csrc/cuda/sm90_launch.cuh."""

BLOCKS = tuple(sorted({blocks for _, blocks in TILES}))
"""Row blocks that a job may have."""

SPLIT_TILES = ((256, 1), (224, 1), (208, 1), (128, 1), (128, 2))
"""The same for split float32: N of both consumers together."""
SPLIT_PRODUCTS, SPLIT_PARTS = 3, 2
"""WGMMAs for two channel blocks of a tap, and numbers in shared memory for one of the input."""

OPERANDS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Operand type of the kernel, by dtype; float32 is rounded to TF32."""
SPLIT = 3
"""Operand type of float32 that must not be rounded."""
MAX_KINDS, MAX_PAIRS, MAX_JOBS, MAX_BLOCKS, MAX_VISITS = 32, 1024, 128, 4, 128
"""How much the kernel's parameters hold, as in csrc/cuda/sm90_params.h."""
BLOCK_ROWS = 64
FIXED_BYTES = 1024 + 2 * 256 * 4 + 8 * 16 * 288 + 4096
"""Barriers, table of columns, staging of 8 warps, and slack after the last channel block."""
PAIR_BYTES, VISIT_BYTES = 4, 48
"""Of the tables of pairs and visits; together these are rounded to 128 bytes."""
MAX_SLOTS = 16
MAX_PIXELS = 768
"""A loader thread lists at most 8 items of 4 pixels; 24 threads go side by side."""

BLOCK_PHASE = 1
"""Pixels of a channel block, modulo 8: a pixel's blocks then fall into different banks."""


@dataclass(frozen=True)
class Tiling:
    n: int
    blocks: int
    alternate: bool
    """The consumers take units in turn, rather than two jobs of the same unit."""
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
            **dict.fromkeys(("width_phases", "line_pitch", "line_columns", "shifted"), 0),
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
        use = shape.task.batch * shape.depth.count * shape.rows.count * shape.columns.count
        share = use / (prod(self.tiles) * self.n)
        kind = "take tiles in turn" if self.alternate else "split the output rows of a tile"
        if shape.task.split:
            kind = "halve the columns of a tile"
        boxes = {COPY_BOXES: "TMA boxes", COPY_ROWS: f"TMA, {self.box.boxes} boxes a tile"}
        copies = boxes.get(copy, "copies of the loaders' own")
        several = f"{planes} planes, each " if planes > 1 else ""
        return (
            f"tile {area.images} x {area.height} x {area.width} lattice points, "
            f"m64n{self.n} x {self.blocks}, {share:.0%} of the columns stored",
            f"the two consumers {kind}; {shape.folds * shape.width_folds} phases of "
            f"{min(shape.fold_rows, shape.task.out_channels)} channels folded into 64 rows",
            f"{several}{self.slices} slices of {self.slice_blocks} channel blocks, {self.slots} "
            f"slots, {self.weights}, input by {copies}",
            f"most of the time goes to {self.work.most}; {self.cycles / CLOCK_MHZ:.1f} us expected",
        )


def visits(job_list: list[Job], alternate: bool) -> list[tuple[tuple[Job, ...], list[Triple]]]:
    """The jobs of each unit of a tile, one or two, and the planes that any of them reads."""
    size = 1 if alternate else 2
    groups = [tuple(job_list[i : i + size]) for i in range(0, len(job_list), size)]
    return [
        (group, sorted({plane for job in group for kind in job.kinds for plane in kind.planes}))
        for group in groups
    ]


@dataclass(frozen=True)
class Load:
    """What all units of a tile have to do for one channel slice, whatever the tile."""

    groups: int
    visits: int
    """Of all units together."""
    most_visits: int
    table: int
    """Entries of the table of visits; units with the same tap lists share theirs."""
    kinds: int
    pair_count: int
    """Entries of the table of pairs."""
    pairs: int
    """WGMMAs of all jobs, three for a pair where float32 is split."""
    steps: int
    """Weight blocks of all jobs."""
    longest: int
    """Pairs of the longest tap list."""
    sum_pairs: int
    additions: int
    """Of parts of tap lists to the sums, but for the last part of each."""

    @staticmethod
    def of(
        job_list: list[Job],
        alternate: bool,
        slice_blocks: int,
        split: bool = False,
        sum_pairs: int = 0,
    ) -> Load:
        """`sum_pairs` is chosen here where it is 0 and float32 is split."""
        units = visits(job_list, alternate)
        table = {tuple(job.kinds for job in group): len(planes) for group, planes in units}
        kinds = {kind: None for job in job_list for kind in job.kinds}
        lists = {kind: [len(taps) * slice_blocks // 2 for _, taps in kind.taps] for kind in kinds}
        every = [pairs for job in job_list for kind in job.kinds for pairs in lists[kind]]
        longest = max(every, default=0)
        sum_pairs = (sum_pairs or even_part(longest)) if split else 0
        steps = sum(step_count(pairs, sum_pairs) for pairs in every)
        # A job that idles brings tap lists of its own, empty ones.
        idle = len(job_list[0].kinds) if not alternate and len(job_list) % 2 else 0
        return Load(
            groups=len(units),
            visits=sum(len(planes) for _, planes in units),
            most_visits=max(len(planes) for _, planes in units),
            table=sum(table.values()),
            kinds=len(kinds) + idle,
            pair_count=sum(up(pairs, STEP_PAIRS) for each in lists.values() for pairs in each),
            pairs=sum(every) * (SPLIT_PRODUCTS if split else 1),
            steps=steps,
            longest=longest,
            additions=sum(-(-pairs // sum_pairs) - 1 for pairs in every if pairs) if split else 0,
            sum_pairs=sum_pairs,
        )

    @property
    def fits(self) -> bool:
        return self.pair_count <= MAX_PAIRS and self.kinds <= MAX_KINDS and self.table <= MAX_VISITS

    @property
    def table_bytes(self) -> int:
        return up(self.pair_count * PAIR_BYTES + self.table * VISIT_BYTES, 128)


def tilings(
    shape: Shape, by_blocks: Mapping[int, list[Job] | None], hardware: Hardware
) -> Iterator[Tiling]:
    """Every legal tiling of a shape, with its expected time."""
    split = shape.task.split
    total_blocks = up(-(-shape.task.in_channels * shape.task.element_bytes // 16), 2)
    depths = sorted({b for b in (16, 8, 4, 2, total_blocks) if b <= min(max(total_blocks, 2), 16)})
    loads: dict[tuple[int, bool, int], Load] = {}
    for n, blocks in SPLIT_TILES if split else TILES:
        job_list = by_blocks[blocks]
        if not job_list or len(job_list) + 1 > MAX_JOBS:  # an odd number gets one that idles
            continue
        orders = (True, False) if len(job_list) > 1 and not split else (True,)
        for area in areas(shape, n, store_vector(shape, job_list)):
            if not (addressable(shape.task, area) and compiled(area, n, blocks, split)):
                continue
            for slice_blocks in reversed(depths):
                if area.copy < COPY_BOXES and slice_blocks > 4 and slice_blocks % 4:
                    continue  # the loaders by themselves take four at a time
                rings = list(raw_rings(shape, area, slice_blocks))
                for alternate, ring in product(orders, rings):
                    key = blocks, alternate, slice_blocks
                    if key not in loads:
                        loads[key] = Load.of(job_list, alternate, slice_blocks, split)
                    if loads[key].fits:
                        form = (n, *key)
                        yield from pipelines(
                            shape, loads[key], job_list[0], form, area, ring, hardware
                        )


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
    if span > 1 and not (job_list[0].together and len(shape.columns.firsts) == span):
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
    total_blocks = up(-(-shape.task.in_channels * shape.task.element_bytes // 16), 2)
    slices = -(-total_blocks // slice_blocks)
    parts = SPLIT_PARTS if shape.task.split else 1
    slot = parts * slice_blocks * block_pitch(area) * 16
    room = hardware.shared_memory - FIXED_BYTES - load.table_bytes - ring[1]
    tiles = tile_counts(shape, area)
    known: dict[tuple[int, int, bool], tuple[UnitWork, float]] = {}
    own = False  # rings of their own for the consumers: the longest that fit, they cost the same
    groups, steps = load.groups * shape.task.groups, load.steps * slices
    for weights in weight_rings(shape.task.split, form[2], groups, steps):
        slots = min((room - weights.bytes) // slot, MAX_SLOTS)
        if slots < 2 or (weights.rings == 2 and own):
            continue
        own = weights.rings == 2
        whole = form[2] or weights.rings == 2
        turn = turn_slices(whole, load.most_visits * slices, slots)
        key = turn, weights.rings, weights.resident
        if key not in known:
            depth = (slices, *key, ring[0])
            known[key] = timed(shape, load, job, form, area, depth, tiles, hardware)
        work, cycles = known[key]
        yield Tiling(
            *form[:3],
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


def tile_counts(shape: Shape, area: Area) -> tuple[int, int, int, int]:
    """Images, depths, rows and columns of tiles."""
    return (
        -(-shape.task.batch // area.images),
        shape.depth.count,
        -(-shape.rows.count // area.height),
        -(-shape.columns.count // area.width),
    )


def sum_slices(load: Load) -> int:
    """Slices that are summed by themselves where float32 is split: of short tap lists more than
    one. All products of the later ones meet a sum that truncation can take from."""
    pairs = max(load.longest, 1)
    return 1 + max(SUM_PAIRS - pairs, 0) // (SPLIT_PRODUCTS * pairs)


def unit_work(
    shape: Shape,
    load: Load,
    job: Job,
    form: tuple[int, int, bool, int],
    area: Area,
    depth: tuple[int, int, int, bool, Box],
    units: int,
) -> UnitWork:
    """What the stages of the pipeline have to do for one unit of work. A plane costs what slices
    of one plane do: it is loaded and multiplied by itself. `depth`: slices of a plane and of a
    turn, rings of weights, whether those stay, the boxes."""
    task = shape.task
    n, _, alternate, slice_blocks = form
    slices, per_turn, rings, resident, box = depth
    share = slices / load.groups
    unit_slices = load.visits * share
    outputs = task.outputs * (1 - task.filled) / units
    stored = outputs * task.element_bytes
    span = shape.columns.out_step if job.together else 1
    segments = outputs / (area.width * span)
    lines = 0.0
    if task.channels_last:
        segments = 0.0
    elif job.lines:
        # Width phases without taps are vectors like the others.
        staged = n * form[1] * BLOCK_ROWS * (1 if alternate else 2)
        shifted = shape.shifts and area.one_row
        whole = shape.whole if shifted else area.vector
        lines = line_cycles(staged, outputs / whole, shifted and span > 2)
        stored = segments = 0.0
    elif span < shape.columns.out_step:
        # A part of every sector, which costs as much as a whole one.
        stored *= min(shape.columns.out_step, 32 // task.element_bytes)
    turns = 1 if alternate else 2 * -(-unit_slices // per_turn)
    if rings == 2:
        turns = 0
    if task.split:
        turns = load.additions * share + form[1] * unit_slices / sum_slices(load)
    chunks = unit_slices * slice_blocks / box.raw_blocks if box.raw_blocks else 0.0
    fed_steps = 0.0 if resident or rings == 2 else load.steps * share
    fed = feeding_cycles(chunks, box.boxes, box.raw_bytes, fed_steps)
    slot_bytes = area.pixels * slice_blocks * 16
    return UnitWork(
        tensor=load.pairs * share * n / 2,
        placed=slot_bytes * unit_slices * fill_factor(area.copy, shape.steps[2]),
        slices=unit_slices,
        starved=chunks if box.raw_chunks == 2 else 0.0,
        turns=turns,
        stored=stored,
        segments=segments,
        weights=0.0 if resident else load.steps * share * STAGE_BYTES,
        bare_stores=stored if rings == 2 else 0.0,
        bare_segments=segments if rings == 2 else 0.0,
        kept=unit_slices if resident else 0.0,
        lines=lines,
        fed=fed if area.copy == COPY_ROWS else 0.0,
        split=task.split,
    )


def timed(
    shape: Shape,
    load: Load,
    job: Job,
    form: tuple[int, int, bool, int],
    area: Area,
    depth: tuple[int, int, int, bool, Box],
    tiles: tuple[int, int, int, int],
    hardware: Hardware,
) -> tuple[UnitWork, float]:
    """The work of a unit, and the cycles that the whole task should take."""
    units = prod(tiles) * load.groups * shape.task.groups
    work = unit_work(shape, load, job, form, area, depth, units)
    filled = shape.task.filled * shape.task.outputs * shape.task.element_bytes
    memory = (shape.task.bytes - filled) / units / DRAM_BYTES
    waves = -(-units // hardware.multiprocessors)
    if shape.task.fill_first:
        filled = shape.task.outputs * shape.task.element_bytes
    fill = filled / DRAM_BYTES / hardware.multiprocessors
    return work, max(work.cycles, memory) * waves + fill + START_CYCLES
